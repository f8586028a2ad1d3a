"""Kernels written in Python and compiled by numba, with the C signature of runtime/cpu/native.py.

    @kernel
    def scale(x, y, factor, begin, end):
        for i in range(begin, end):
            y[i] = factor * x[i]

    scale.call(x, y, 2.0, work=x.size)

numba only translates: its LLVM IR is compiled, cached and loaded like any other, so that a process which finds the
object code in the cache never imports numba.  A kernel is compiled once for each combination of element types and
ranks.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import JobError
from . import native
from .native import Call


@functools.cache
def unavailable() -> str:
    """Why numba's kernels cannot run here; "" where they can."""
    if why := native.unavailable():
        return why
    return "" if importlib.util.find_spec("numba") else "numba is not installed (extra 'cpu')"


class Kernel:
    """A function over arrays (C-contiguous), integers and floats, and the part [begin, end) of the work to do.

    `uses`: functions of other modules that it calls, whose source belongs to its own.
    """

    def __init__(self, function: Callable[..., None], fastmath: Any, uses: tuple[Any, ...]) -> None:
        self.function = function
        self.fastmath = fastmath
        self.uses = uses
        self._addresses: dict[tuple, int] = {}
        self.__doc__ = function.__doc__

    @functools.cached_property
    def source(self) -> str:
        """Names the text of the module that the kernel stands in, and of what it uses."""
        text = "".join(Path(inspect.getfile(f)).read_text() for f in (self.function, *self.uses))
        return f"{hashlib.sha256(text.encode()).hexdigest()} {self.function.__qualname__} {self.fastmath}"

    def call(self, *operands: Any, work: int, parallel: bool = True) -> Call:
        """A call over these operands; JobError where numba cannot compile it for them."""
        words: list[Any] = []
        for x in operands:
            if isinstance(x, np.ndarray):
                if not x.flags.c_contiguous:
                    raise JobError(f"{self.function.__name__}: an operand of shape {x.shape} is not contiguous")
                words += [x, *x.shape]
            else:
                words.append(x)
        return Call(self.address(tuple(map(_kind, operands))), tuple(words), work, parallel)

    def address(self, kinds: tuple) -> int:
        """The compiled function for operands of these kinds."""
        found = self._addresses.get(kinds)
        if found is None:
            key = native.toolchain().key(self.source, repr(kinds), np.__version__.partition(".")[0])
            found = native.cached(key)
            if found is None:
                found = native.keep(key, self._module(kinds))
            self._addresses[kinds] = found
        return found

    def _module(self, kinds: tuple) -> Any:
        """numba's translation, behind a function `kernel` of our signature."""
        numba, parts = _numba()
        body = numba.njit(
            nogil=True, error_model="numpy", fastmath=self.fastmath, no_cpython_wrapper=True, no_cfunc_wrapper=True
        )(self.function)
        names = {"body": body, **parts}
        exec(_unpacking(kinds), names)
        i64 = numba.types.int64
        compiled = numba.cfunc(numba.types.void(i64, i64, i64), nopython=True, error_model="numpy")(names["unpack"])
        llvm = native.toolchain().llvm
        module = llvm.parse_assembly(compiled.inspect_llvm())
        inner = compiled.native_name.removeprefix("cfunc.")
        module.link_in(llvm.parse_assembly(_ENTRY.replace("INNER", inner)))
        for f in module.functions:
            if not f.is_declaration and f.name != "kernel":
                f.linkage = "internal"
        for g in module.global_variables:
            if not g.is_declaration:
                g.linkage = "internal"
        return module


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


def kernel(function: Callable[..., None] | None = None, *, fastmath: Any = False, uses: tuple[Any, ...] = ()) -> Any:
    """Makes a function a kernel.  `fastmath`: LLVM's flags, for sums in vectors ({"reassoc", "nsz"}), say."""
    if function is None:
        return lambda f: Kernel(f, fastmath, uses)
    return Kernel(function, fastmath, uses)


def _kind(x: Any) -> tuple:
    if isinstance(x, np.ndarray):
        return (x.dtype.name, x.ndim)
    return ("float",) if isinstance(x, (float, np.floating)) else ("int",)


def _unpacking(kinds: tuple) -> str:
    """Python source that reads the operands from the argument words and calls the body."""
    lines, names, at = ["def unpack(args, begin, end):"], [], 0
    for i, kind in enumerate(kinds):
        if len(kind) == 2:
            dtype, ndim = kind
            dims = "".join(f"word(args, {at + 1 + d}), " for d in range(ndim))
            dtype = "np.bool_" if dtype == "bool" else f"np.{dtype}"
            lines.append(f"    a{i} = carray(pointer(word(args, {at})), ({dims}), {dtype})")
            at += 1 + ndim
        else:
            lines.append(f"    a{i} = {'real' if kind[0] == 'float' else 'word'}(args, {at})")
            at += 1
        names.append(f"a{i}")
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
    config.CPU_NAME, config.CPU_FEATURES = native.toolchain().cpu, native.toolchain().features

    def reader(result: Any) -> Any:
        def read(typing: Any, base: Any, index: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                kind = ir.IntType(64) if result is types.int64 else ir.DoubleType()
                return builder.load(builder.gep(builder.inttoptr(args[0], kind.as_pointer()), [args[1]]))

            return result(types.int64, types.int64), generate

        return intrinsic(read)

    def to_pointer(typing: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

        return types.voidptr(types.int64), generate

    return numba, {
        "np": np,
        "carray": carray,
        "word": reader(types.int64),
        "real": reader(types.float64),
        "pointer": intrinsic(to_pointer),
    }
