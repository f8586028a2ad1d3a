"""bfloat16 in numba's kernels: two bytes in an array, a float32 everywhere else.

An element is widened when it is read and rounded, to the nearest and to even numbers between two, when it is written.
So a kernel over an array `x` of bfloat16 computes in float32, also where it says `x.dtype.type`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...shared.llvm import BaseContext, IRBuilder, Word


def _narrowed(builder: IRBuilder, value: Word) -> Word:
    """The bits of a float, rounded to bfloat16: by integers, which LLVM vectorises better than its instruction."""
    from llvmlite import ir

    word, wide = ir.IntType(16), ir.IntType(32)
    bits = builder.bitcast(value, wide)
    odd = builder.and_(builder.lshr(bits, wide(16)), wide(1))
    up = builder.add(bits, builder.add(odd, wide(0x7FFF)))
    nan = builder.fcmp_unordered("uno", value, value)
    up = builder.select(nan, builder.or_(bits, wide(0x400000)), up)
    return builder.trunc(builder.lshr(up, wide(16)), word)


@functools.cache
def bfloat16() -> Any:
    """numba's type, made known to its compiler."""
    from llvmlite import ir
    from numba.core import types
    from numba.core.datamodel.models import PrimitiveModel
    from numba.core.extending import register_model
    from numba.core.imputils import lower_cast

    class BFloat16(types.Type):
        """The type of an element of an array."""

        def __init__(self) -> None:
            super().__init__(name="bfloat16")

    wide, real, word = ir.IntType(32), ir.FloatType(), ir.IntType(16)

    @register_model(BFloat16)
    class Model(PrimitiveModel):
        """A float in registers, 16 bits in memory."""

        def __init__(self, dmm: Any, kind: Any) -> None:
            super().__init__(dmm, kind, real)

        def get_data_type(self) -> Any:
            """The LLVM type in memory."""
            return word

        def as_data(self, builder: Any, value: Any) -> Any:
            """Rounded."""
            return _narrowed(builder, value)

        def from_data(self, builder: Any, value: Any) -> Any:
            """Widened."""
            return builder.bitcast(builder.shl(builder.zext(value, wide), wide(16)), real)

    dtype = BFloat16()

    @lower_cast(types.float32, BFloat16)
    def same(context: BaseContext, builder: IRBuilder, before: Any, after: Any, value: Word) -> Word:
        return value

    @lower_cast(types.float64, BFloat16)
    def shorter(context: BaseContext, builder: IRBuilder, before: Any, after: Any, value: Word) -> Word:
        return builder.fptrunc(value, real)

    @lower_cast(types.Integer, BFloat16)
    def of_integer(context: BaseContext, builder: IRBuilder, before: Any, after: Any, value: Word) -> Word:
        return builder.sitofp(value, real) if before.signed else builder.uitofp(value, real)

    return dtype


@contextlib.contextmanager
def read_as_float32() -> Iterator[None]:
    """While numba compiles: an element of bfloat16 is a float32 once it is read, and `x.dtype.type` is float32."""
    from numba.core import types
    from numba.core.typing import arraydecl as _declarations

    arraydecl: Any = _declarations
    half, index, kind = bfloat16(), arraydecl.get_array_index_type, arraydecl.DTypeAttr.resolve_type

    def indexed(array: Any, at: Any) -> Any:
        signature = index(array, at)
        return (
            signature._replace(result=types.float32)
            if signature is not None and signature.result is half
            else signature
        )

    def resolved(self: Any, dtype: Any) -> Any:
        return types.NumberClass(types.float32) if dtype.dtype is half else kind(self, dtype)

    arraydecl.get_array_index_type, arraydecl.DTypeAttr.resolve_type = indexed, resolved
    try:
        yield
    finally:
        arraydecl.get_array_index_type, arraydecl.DTypeAttr.resolve_type = index, kind
