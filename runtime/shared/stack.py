"""Memory on a processor's stack, for kernels whose loops become vectors when their numbers lie in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .texts import instructions

if TYPE_CHECKING:
    from .llvm import IRBuilder, Word

#: words of 64 bits that it has
WORDS = 272


@instructions(lambda types: types.voidptr)
def stack(builder: IRBuilder) -> Word:
    """The memory; a kernel has it once."""
    from llvmlite import ir
    from numba.core import cgutils

    pointer = cgutils.alloca_once(builder, ir.IntType(8), size=8 * WORDS)
    pointer.align = 64
    return pointer


@instructions(lambda types, *given: types.none)
def put(builder: IRBuilder, p: Word, i: Word, word: Word) -> None:
    """Writes word i."""
    builder.store(word, builder.gep(builder.bitcast(p, word.type.as_pointer()), [i]))


@instructions(lambda types, *given: types.uint64)
def word(builder: IRBuilder, p: Word, i: Word) -> Word:
    """Word i."""
    return builder.load(builder.gep(builder.bitcast(p, i.type.as_pointer()), [i]))


@instructions(lambda types, *given: types.uint8)
def byte(builder: IRBuilder, p: Word, i: Word) -> Word:
    """Byte i."""
    return builder.load(builder.gep(p, [i]))
