"""Kernels as Python functions, whose text serves every place.

    @kernel
    def scale(x, y, factor, begin, end):
        for i in range(begin, end):
            y[i] = x.dtype.type(factor) * x[i]

    scale(x, y, 2.0, work=x.size)

A kernel processes the items [begin, end) of its work: a processor's thread many of them, a device's thread one.  Where
`lanes` stands for `range`, the threads that share an item divide its steps, which are independent of each other; what
is outside of such loops they all compute, and one of them stores.  What a step makes the `larger` of itself and another
value is the same for all behind the loop.  Where `warps` stands for `range`, 32 threads have a step together.

numba compiles the functions for processors (runtime/cpu/device/jit.py), and runtime/cuda/code/python_text.py writes
them as CUDA C.  Functions that they call are marked `@inline`, or are `@instructions`, with a text in C beside the
LLVM code; all are called by a name of their module (no `module.function`).
"""

from __future__ import annotations

import dis
import functools
import hashlib
import inspect
import linecache
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

#: steps of an item that the threads which share it divide
lanes = range
#: those that warps of these threads divide, each of which computes a step, and stores it, with all of its threads
warps = range
#: steps that a device's compiler writes out one after another, if the work is `unrolled`
steps = range


class Inline:
    """A function that kernels call, compiled into them.

    `double`: what takes its place for float64.  `c`: CUDA C that does: a function of its name, or the name of one.
    """

    def __init__(
        self, function: Callable[..., Any], fastmath: Any, double: Callable[..., Any] | None, c: str = ""
    ) -> None:
        self.function, self.fastmath, self.double, self.c = function, fastmath, double, c

    @functools.cached_property
    def fingerprint(self) -> str:
        """Names its code and that of all it uses."""
        return " ".join(fingerprint(f) for f in (self.function, self.double) if f) + flags(self.fastmath)


class Intrinsic:
    """Instructions that kernels use: `make(typing, *types)` is what numba's `intrinsic` takes.

    `named`: the functions of which it is made, if it is made of others.  `c`: the same as CUDA C.
    """

    def __init__(self, make: Callable[..., Any], *named: Callable[..., Any], c: str = "") -> None:
        self.make, self.named, self.c = make, named or (make,), c

    @property
    def fingerprint(self) -> str:
        """Names its code."""
        return " ".join(map(fingerprint, self.named))


def instructions(result: Callable[..., Any], c: str = "") -> Callable[[Callable[..., Any]], Any]:
    """Makes a function of (builder, *words) that writes LLVM code an intrinsic.

    `result`: the type of what it returns, by numba's types and those of the arguments.
    """

    def mark(function: Callable[..., Any]) -> Any:
        def make(typing: Any, *arguments: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, words: Any) -> Any:
                value = function(builder, *words)
                return context.get_dummy_value() if value is None else value

            from numba import types

            return result(types, *arguments)(*arguments), generate

        make.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]  # numba reads the arguments' names
        return Intrinsic(make, function, result, c=c)

    return mark


def inline(
    function: Callable[..., Any] | None = None,
    *,
    fastmath: Any = False,
    double: Callable[..., Any] | None = None,
    c: str = "",
) -> Any:
    """Marks a function that kernels call."""
    if function is None:
        return lambda f: Inline(f, fastmath, double, c)
    return Inline(function, fastmath, double, c)


def _report(status: Any, code: Any, number: Any, size: Any) -> None:
    """Writes a session's status (see trouble.py), unless there is a report; the code comes last."""
    if status[0] == 0:
        status[1] = number
        status[2] = size
        status[0] = code


#: report(status, code, number, size): what a kernel does with an operand that it cannot use, before it skips it
report: Any = inline(_report)


@inline
def eight(x: Any, first: Any) -> Any:
    """x, as an argument of a function that uses the eight elements from `first` on, and no others."""
    return x


@inline
def piece(place: Any, first: Any, block: Any) -> Any:
    """`block` elements of x[lead, d, h, w], a place of an array of five axes, from `first` on.

    A processor is given the whole place.  A device reads or writes eight at once, where blocks are full (see
    `Work.whole`), else those of so many along the first axis, from `lead` on.
    """
    return place


@inline(c="DEVICE constexpr bool whole_blocks() { return WHOLE; }\n")
def whole_blocks() -> Any:
    """Whether all blocks are full (see `Work.whole`), so that nobody has to ask."""
    return False


@inline(
    c="""DEVICE void meet()
{
    static_assert(LANES >= 32, "parts of a warp do not wait for each other");
    if constexpr (LANES > 32) __syncthreads();
    else __syncwarp();
}
"""
)
def meet() -> None:
    """The threads of an item wait for each other, and see what each has stored; an item has 32 threads or more."""


@inline(c="DEVICE constexpr bool on_processor() { return false; }\n")
def on_processor() -> Any:
    """Whether the place is a processor; alone in an `if`, its statements are for processors only."""
    return True


def written(name: str, parameters: str, lines: Sequence[str], names: dict[str, Any]) -> Callable[..., Any]:
    """A function that a program has written, with the names of a module; its text can be read, as a file's can."""
    text = [f"def {name}({parameters}):\n", *(f"    {line}\n" for line in lines)]
    file = f"<{name} {hashlib.sha256(''.join(text).encode()).hexdigest()}>"
    linecache.cache[file] = (0, None, text, file)
    made: dict[str, Any] = {}
    exec(compile("".join(text), file, "exec"), names, made)
    return made[name]


def bound(function: Callable[..., Any], name: str, values: dict[str, Any]) -> Callable[..., Any]:
    """The function under another name, with other values of its module's names, as for those that it calls of this
    module."""
    parts: dict[str, Inline] = {}

    def changed(f: Callable[..., Any], title: str) -> Callable[..., Any]:
        names = {**f.__globals__, **values}
        for n in {n for code in codes(f.__code__) for n in names_of(code)} - values.keys():
            part = names.get(n)
            if isinstance(part, Inline) and not part.c and part.function.__module__ == f.__module__:
                if n not in parts:
                    parts[n] = Inline(changed(part.function, n), part.fastmath, part.double)
                names[n] = parts[n]
        made = types.FunctionType(f.__code__, names, title)
        made.__qualname__ = title
        return made

    return changed(function, name)


def flags(fastmath: Any) -> str:
    """LLVM's flags, named the same in every process."""
    return str(fastmath if isinstance(fastmath, bool) else sorted(fastmath))


def names_of(code: types.CodeType) -> list[str]:
    """Names that the code takes from its module."""
    return list(dict.fromkeys(i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"))


def codes(code: types.CodeType) -> list[types.CodeType]:
    """The code and that of the functions inside it."""
    return [code, *(c for k in code.co_consts if isinstance(k, types.CodeType) for c in codes(k))]


def fingerprint(function: Callable[..., Any]) -> str:
    """Names a function's code, and what it takes from its module."""
    digest = hashlib.sha256()
    for code in codes(function.__code__):
        consts = [k for k in code.co_consts if not isinstance(k, types.CodeType)]
        digest.update(repr((code.co_code.hex(), consts, code.co_names, code.co_varnames)).encode())
        for name in names_of(code):
            value = function.__globals__.get(name)
            if isinstance(value, (Inline, Intrinsic)):
                digest.update(value.fingerprint.encode())
            elif isinstance(value, (int, float, str, tuple, np.generic)):
                digest.update(repr(value).encode())
            elif isinstance(value, np.ndarray):
                digest.update(value.tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Fixed:
    """An integer operand, or a table of rows of them, for which a device's kernel is compiled."""

    value: int | tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Scratch:
    """An operand [items, elements] for what an item computes: an array, or eight numbers of a device's item."""

    array: Any
    dtype: str = "i32"


@dataclass(frozen=True)
class Divisor:
    """An operand of one to four positive integers, which divide numbers: on a device those below 2³¹, by a product."""

    value: int | tuple[int, ...]


@dataclass(frozen=True)
class Own:
    """An operand [rows, items of a row] of which an item stores its own element, and is not read otherwise: a device's
    thread has some items, and loads for all of them before it stores; where an item stores nothing, it stores zero."""

    elements: Any


@dataclass(frozen=True)
class Absent:
    """An operand that is not there: no elements, along so many axes."""

    axes: int = 1


@dataclass(frozen=True)
class Columns:
    """An operand [matrices, rows, columns] on a device, of which a row is a column: row r is column r of them all."""

    matrices: Any


@dataclass(frozen=True)
class Work:
    """A kernel's work: operands (arrays, buffers or what a place's `words` gives; arrays of constants; Absent or None;
    integers, floats; STATUS) and how many items.

    `per`: items of a row, if the text is one of rows.  `lanes`: steps of an item that threads divide.  `whole`: blocks
    of `eight` elements are full and begin at multiples of eight, so that a device reads and writes each at once.
    `unrolled`: loops over `steps` are written out on a device.  `parallel`: items may be divided between threads.
    """

    text: Text
    operands: tuple[Any, ...]
    items: int
    per: int = 0
    lanes: int = 1
    whole: bool = False
    unrolled: bool = False
    parallel: bool = True


@dataclass(frozen=True, eq=False)
class Text:
    """A kernel for every place.  `fastmath`: LLVM's flags.  `rows`, `heavy`: see `kernel`."""

    function: Callable[..., None]
    fastmath: Any = False
    rows: bool = False
    heavy: bool = False

    def __call__(self, *operands: Any, work: int, **more: Any) -> Work:
        """So many items of work with these operands; `more`: fields of `Work`."""
        return Work(self, operands, work, **more)


def kernel(
    function: Callable[..., None] | None = None, *, fastmath: Any = False, rows: bool = False, heavy: bool = False
) -> Any:
    """Makes a function of operands, `begin` and `end` a kernel.

    `rows`: it takes `row` before these two, and its items are some of a row's: [begin, end) of the `per` that the work
    says.  So what is the same for all of a row is computed before them.  `heavy`: an item takes more registers than
    there are for as many threads as a device can have at a time.
    """
    if function is None:
        return lambda f: Text(f, fastmath, rows, heavy)
    return Text(function)
