"""Kernels written in Python and compiled by numba, with the C signature of runtime/cpu/device/native.py.

    @kernel
    def scale(x, y, factor, begin, end):
        for i in range(begin, end):
            y[i] = factor * x[i]

    scale.call(x, y, 2.0, work=x.size)

numba only translates: its LLVM IR is compiled, cached and loaded like any other, so that a process which finds the
object code in the cache never imports numba.  A kernel is compiled once for each combination of element types, ranks,
and operands that are the same memory: there LLVM need not guess what overlaps.

Functions that kernels call are marked `@inline` (runtime/shared/texts.py).  The cache's key holds their code as well,
and the numbers that any of them takes from its module.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import types
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ....errors import JobError
from ...shared import texts, trouble
from ...shared.texts import Absent, Divisor, Fixed, Inline, Intrinsic, Own, Scratch, Text, Work
from . import halves, native
from .native import Call

if TYPE_CHECKING:
    from ...shared.llvm import BaseContext, Generated, IRBuilder, Kind, Signature, TypingContext, Word
    from .toolchain import Toolchain


@functools.cache
def unavailable() -> str:
    """Why numba's kernels cannot run here; "" where they can."""
    if why := native.unavailable():
        return why
    return "" if importlib.util.find_spec("numba") else "numba is not installed (extra 'cpu')"


#: numba's options: the function alone, without what Python or C would call it by
_OPTIONS = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True, "_nrt": False}


@functools.cache
def _compiled(part: Inline | Intrinsic) -> Any:
    """numba's function, or intrinsic."""
    numba, _ = _numba()
    if isinstance(part, Intrinsic):
        return numba.extending.intrinsic(part.make)
    one = _translated(part.function)
    if part.double is None:
        return numba.njit(fastmath=part.fastmath, **_OPTIONS)(one)
    other = _translated(part.double)

    def either(x: Any) -> Any:
        return other if x is numba.types.float64 else one

    either.__annotations__.clear()  # numba compares signatures
    names: dict[str, Any] = {}
    exec("def stub(x): pass", names)
    numba.extending.overload(names["stub"], jit_options={"fastmath": part.fastmath, **_OPTIONS})(either)
    return names["stub"]


def _translated(function: Callable[..., Any]) -> Any:
    """The function with those it calls replaced by what numba made of them."""
    used = {name for code in texts.codes(function.__code__) for name in texts.names_of(code)}
    names = {n: _compiled(v) for n in used if isinstance(v := function.__globals__.get(n), (Inline, Intrinsic))}
    return types.FunctionType(function.__code__, {**function.__globals__, **names}, function.__name__)


class Kernel:
    """A function over arrays (C-contiguous), integers and floats, and the part [begin, end) of the work to do."""

    def __init__(self, function: Callable[..., None], fastmath: Any, here: bool = False, *, rows: bool = False) -> None:
        """`here`: it belongs to the compiler and runs in this process, also while a library is built.  `rows`: see
        `texts.kernel`; the last operand says how many items a row has."""
        self.function, self.fastmath, self.here, self.rows = function, fastmath, here, rows
        self._addresses: dict[tuple, int] = {}
        self.__doc__ = function.__doc__

    @functools.cached_property
    def source(self) -> str:
        """Names the kernel's code and that of what it uses."""
        named = f"{self.function.__qualname__}{' whole rows' * self.rows}"
        return f"{texts.fingerprint(self.function)} {named} {texts.flags(self.fastmath)}"

    def call(self, *operands: Any, work: int, parallel: bool = True) -> Call:
        """A call over these operands; JobError where numba cannot compile it for them."""
        words: list[Any] = []
        kinds: list[tuple] = []
        seen: dict[tuple, int] = {}
        for i, x in enumerate(operands):
            if x is native.STATUS:
                words += [x, trouble.WORDS]
                kinds.append(("int64", 1))
                continue
            if not isinstance(x, np.ndarray):
                words.append(x)
                kinds.append(("float",) if isinstance(x, (float, np.floating)) else ("int",))
                continue
            if not x.flags.c_contiguous:
                raise JobError(f"{self.function.__name__}: an operand of shape {x.shape} is not contiguous")
            first = seen.setdefault((x.ctypes.data, x.shape, x.dtype), i)
            if first == i or not x.size:
                words += [x, *x.shape]
                kinds.append((x.dtype.name, x.ndim))
            else:
                kinds.append(("same", first))
        return Call(self.address(tuple(kinds)), tuple(words), work, parallel)

    def address(self, kinds: tuple) -> int:
        """The compiled function for operands of these kinds."""
        pointer = self._addresses.get(kinds)
        if pointer is None:
            entry = native.loaded(self._key(kinds), lambda: self._module(kinds), tools=self._tools())
            pointer = self._addresses[kinds] = entry
        return pointer

    def kept(self, kinds: tuple) -> bool:
        """Whether its object code for operands of these kinds was made before: it needs no compiling then."""
        return kinds in self._addresses or native.kept(self._key(kinds))

    def _tools(self) -> Toolchain:
        return native.here() if self.here else native.toolchain()

    def _key(self, kinds: tuple) -> str:
        return self._tools().key(self.source, repr(kinds), np.__version__.partition(".")[0])

    def _module(self, kinds: tuple) -> Any:
        """numba's translation, behind a function `kernel` of our signature."""
        numba, parts = _numba()
        body = numba.njit(fastmath=self.fastmath, **_OPTIONS)(_translated(self.function))
        names = {"body": body, **parts}
        exec(_unpacking(kinds, rows=self.rows), names)
        i64 = numba.types.int64
        with _indices_as_they_are(), halves.read_as_float32():
            compiled = numba.cfunc(numba.types.void(i64, i64, i64), nopython=True, error_model="numpy")(names["unpack"])
        llvm, text = native.here().llvm, compiled.inspect_llvm().replace("noinline", "inlinehint")
        # arrays of ours own no memory: numba's reference counts, inlined, do nothing
        module = llvm.parse_assembly(self._tools().adapted(text))
        inner = compiled.native_name.removeprefix("cfunc.")
        module.link_in(llvm.parse_assembly(_ENTRY.replace("INNER", inner)))
        for value in (*module.functions, *module.global_variables):
            if not value.is_declaration and value.name != "kernel":
                value.linkage = "internal"
        return module


@contextlib.contextmanager
def _indices_as_they_are() -> Iterator[None]:
    """No kernel counts from an array's end, but numba would ask at every access, and loops were not vectorised."""
    from numba import intp
    from numba.core.compiler_lock import global_compiler_lock
    from numba.np import arrayobj

    with global_compiler_lock:
        before = arrayobj.fix_integer_index
        arrayobj.fix_integer_index = lambda context, builder, kind, index, size: context.cast(
            builder, index, kind, intp
        )
        try:
            yield
        finally:
            arrayobj.fix_integer_index = before


_ENTRY = """
declare i32 @"INNER"(ptr, ptr, i64, i64, i64)
define void @kernel(ptr %args, i64 %begin, i64 %end) {
  %result = alloca ptr
  %error = alloca ptr
  %at = ptrtoint ptr %args to i64
  %status = call i32 @"INNER"(ptr %result, ptr %error, i64 %at, i64 %begin, i64 %end)
  ret void
}
"""


def kernel(function: Callable[..., None] | None = None, *, fastmath: bool = False, here: bool = False) -> Any:
    """Makes a function a kernel.  `fastmath`: LLVM's flags, for sums in vectors ({"reassoc", "nsz"}), say; `here`: see
    `Kernel`."""
    if function is None:
        return lambda f: Kernel(f, fastmath, here)
    return Kernel(function, fastmath, here)


@functools.cache
def _kernel_of(text: Text) -> Kernel:
    return Kernel(text.function, text.fastmath, rows=text.rows)


def _operand(x: Any) -> Any:
    match x:
        case None | Absent():
            return np.empty((0,) * (1 if x is None else x.axes), np.uint8)
        case Fixed(tuple() as rows) | Divisor(tuple() as rows):
            return np.array(rows, np.int64)
        case Fixed(value) | Divisor(value) | Own(value) | Scratch(value):
            return value
    return x


def call_of(work: Work) -> Call:
    """The call that does the work of a kernel for every place."""
    operands = [*map(_operand, work.operands), *[work.per] * work.text.rows]
    return _kernel_of(work.text).call(*operands, work=work.items, parallel=work.parallel)


#: items of rows: a row's end, whole rows, another's beginning, so that what is the same for whole rows is computed once
_ROWS = """
    first, last = begin // PER, end // PER
    for part in range(3):
        row, stop, low, high = first, first + min(end - begin, 1), begin - first * PER, min(end - first * PER, PER)
        if part == 1:
            row, stop, low, high = first + 1, last, 0, PER
        if part == 2:
            row, stop, low, high = last, last + min(last - first, end - last * PER, 1), 0, end - last * PER
        for r in range(row, stop):
            body(GIVEN, r, low, high)
"""


def _unpacking(kinds: tuple, *, rows: bool) -> str:
    """Python source that reads the operands from the argument words and calls the body.

    Kinds: (element type, rank), ("same", the operand that is the same memory), ("float",), ("int",).
    """
    lines, names, at = ["def unpack(args, begin, end):"], [], 0
    for i, kind in enumerate(kinds):
        match kind:
            case ("same", first):
                lines.append(f"    a{i} = a{first}")
            case ("float",) | ("int",):
                lines.append(f"    a{i} = {'real' if kind == ('float',) else 'word'}(args, {at})")
                at += 1
            case (dtype, ndim):
                dims = "".join(f"word(args, {at + 1 + d}), " for d in range(ndim))
                dtype = {"bool": "np.bool_", "bfloat16": "bfloat16"}.get(dtype, f"np.{dtype}")
                lines.append(f"    a{i} = carray(pointer(word(args, {at})), ({dims}), {dtype})")
                at += 1 + ndim
        names.append(f"a{i}")
    if rows:
        lines.append(_ROWS.replace("PER", names.pop()).replace("GIVEN", ", ".join(names)))
    else:
        lines.append(f"    body({', '.join([*names, 'begin', 'end'])})")
    return "\n".join(lines)


@functools.cache
def _numba() -> tuple[Any, dict[str, Any]]:
    """numba, set to this project's target, and the functions that read argument words."""
    if why := unavailable():
        raise JobError(f"no numba kernels: {why}")
    import numba
    from llvmlite import ir
    from numba import carray, types
    from numba.extending import intrinsic

    config: Any = numba.config  # read when numba compiles for the first time
    config.CPU_NAME, config.CPU_FEATURES = native.here().cpu, native.here().features
    config.OPT = config._OptLevel(0)  # loops are vectorised later, where it is known which operands are the same
    config.LOOP_VECTORIZE = config.SLP_VECTORIZE = 0

    def reader(result: Any) -> Any:
        def read(typing: TypingContext, base: Kind, index: Kind) -> Generated:
            def generate(context: BaseContext, builder: IRBuilder, signature: Signature, args: Sequence[Word]) -> Word:
                kind = ir.IntType(64) if result is types.int64 else ir.DoubleType()
                return builder.load(builder.gep(builder.inttoptr(args[0], kind.as_pointer()), [args[1]]))

            return result(types.int64, types.int64), generate

        return intrinsic(read)

    def to_pointer(typing: TypingContext, address: Kind) -> Generated:
        def generate(context: BaseContext, builder: IRBuilder, signature: Signature, args: Sequence[Word]) -> Word:
            return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

        return types.voidptr(types.int64), generate

    return numba, {
        "np": np,
        "carray": carray,
        "word": reader(types.int64),
        "real": reader(types.float64),
        "pointer": intrinsic(to_pointer),
        "bfloat16": types.NumberClass(halves.bfloat16()),
    }
