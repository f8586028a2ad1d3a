"""How updates store parameters and state in fewer bits: stochastic rounding to bfloat16, and codes of 8 bits.

**Stochastic rounding** (Gupta et al. 2015, arXiv 1502.02551): of the two bfloat16 numbers around a float32 x the
farther one is taken with a probability of its share of the distance, so that E[rounded] = x, and updates much smaller
than a step of bfloat16 are not lost.  With r of 16 uniform bits it is the upper half of the bits of x plus r.  r comes
from the counter-based stream (ops/random/philox.py): element i of a parameter has the i-th 64-bit word of the stream
(seed, step), whose lowest 16 bits round the parameter, the next ones its first state, and so on.

**8 bits** (Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861): state is cut into
blocks of 256 elements.  A block has its largest magnitude as float32, and for each element the number of the entry of a
code book that is nearest to element / magnitude, but of a second moment above 0 never that of 0.  The book is the
paper's dynamic tree quantisation.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import field
from typing import Any, ClassVar, cast

import numpy as np

from ...errors import ModelError
from ...language.factors import Factor, Place, aligned, needed_whole
from ...language.op import FunctionWriter, Op
from ...language.types import Array, TensorType, Types, need
from ..random.philox import words_from

#: elements of a block of 8-bit state, and its bytes: the codes, then the magnitude
BLOCK, ROW = 256, 260
#: elements of a parameter below which its state stays in the working type
LEAST = 4096
#: elements whose codes or random bits are in temporaries at a time
_TILE = 1024


@functools.cache
def code_book(*, signed: bool) -> Array:
    """The 256 numbers of dynamic tree quantisation, float32 [256], ascending: 0, 1, and for e = 0 ... 6 the middles of
    2ᵉ (2ᵉ⁺¹ without sign) equal parts of [0.1, 1], times 10ᵉ⁻⁶, of both signs if `signed`."""
    codes = [0.0, 1.0]
    for e in range(7):
        borders = np.linspace(0.1, 1.0, (1 << e if signed else 2 << e) + 1)
        middles = (borders[:-1] + borders[1:]) / 2 * 10.0 ** (e - 6)
        codes += [*middles, *(-middles if signed else ())]
    return np.array(sorted(codes), np.float32)


@functools.cache
def borders(*, signed: bool) -> Array:
    """Where the nearest entry of `code_book` changes, float32 [255]: x has the code of how many are below it.

    Without sign all above 0 have an entry above 0: a second moment that became 0 beside a first that did not would make
    the next step as large as 1 / epsilon.
    """
    book = code_book(signed=signed)
    middles = (book[:-1] + book[1:]) / np.float32(2)
    if not signed:
        middles[0] = 0
    return middles


def blocks(size: int) -> int:
    """Blocks of so many elements."""
    return -(-size // BLOCK)


def decoded(rows: Array, out: Array, *, signed: bool) -> None:
    """Writes the elements of 8-bit state, u8 [blocks, 260], into a float32 vector."""
    book = code_book(signed=signed)
    for b, row in enumerate(rows):
        part = out[b * BLOCK : (b + 1) * BLOCK]
        np.multiply(book[row[: part.size]], row[BLOCK:].view(np.float32)[0], out=part)


def encoded(x: Array, rows: Array, *, signed: bool) -> None:
    """Writes a float32 vector as 8-bit state, u8 [blocks, 260].  A block with NaN becomes NaN."""
    between = borders(signed=signed)
    for b, row in enumerate(rows):
        part = x[b * BLOCK : (b + 1) * BLOCK]
        most = np.abs(part).max()
        with np.errstate(invalid="ignore"):
            row[: part.size] = np.searchsorted(between, part / (most if most != 0 else np.float32(1)))
        row[part.size : BLOCK] = 0
        row[BLOCK:].view(np.float32)[0] = most


def rounded(x: Array, noise: Array, out: Array) -> None:
    """Writes float32 as bfloat16, up where the lower half of its bits and `noise` (u32, 16 bits) exceed 16 bits."""
    bits = x.view(np.uint32)
    up = (bits + noise) >> np.uint32(16)
    out.view(np.uint16)[...] = np.where(np.isnan(x), bits >> np.uint32(16) | np.uint32(0x40), up)


class Stored(Op, abstract=True):
    """The base of updates with a choice of storage for parameters and state.

    `stochastic`: the parameter and its state are bfloat16, rounded stochastically with the stream (`seed`, step);
    `first`: the number of the parameter's first element, for a part of a larger one.  `eight_bits`: state is u8
    [blocks, 260], 256 codes and a float32 in each row.
    """

    stochastic: bool = field(default=False, kw_only=True)
    seed: int = field(default=0, kw_only=True)
    first: int = field(default=0, kw_only=True)
    eight_bits: bool = field(default=False, kw_only=True)

    rate_at: ClassVar[int]
    step_at: ClassVar[int | None] = None
    #: whether each element is updated on its own; of each state whether it has both signs, if 8 bits can hold it
    each_alone: ClassVar[bool] = True
    signs: ClassVar[tuple[bool, ...]] = ()

    @property
    def counter_at(self) -> int | None:
        """Position of the step counter; None where it is not read."""
        if self.step_at is not None or not self.stochastic:
            return self.step_at
        return 1 + max(*self.updates, 1, self.rate_at)

    @property
    def stores(self) -> bool:
        """Whether it stores in another way than in the working type."""
        return self.stochastic or self.eight_bits

    def state_type(self, w: TensorType) -> TensorType:
        """The type of a state of a parameter of type `w`."""
        if self.eight_bits:
            return TensorType("u8", (blocks(w.size), ROW))
        return w.with_dtype("bf16" if self.stochastic else "f32" if w.dtype in ("f16", "bf16") else w.dtype)

    def check_storage(self, w: TensorType, states: int, inputs: Sequence[TensorType | None]) -> None:
        """TypeRuleError where a parameter of this type cannot be stored so."""
        if self.stores and not self.each_alone:
            raise self.fail("takes norms of whole parameters: state and rounding are as ever", *inputs)
        if self.stochastic and w.dtype != "bf16":
            raise self.fail("stochastic rounding is for bfloat16 parameters", *inputs)
        if self.eight_bits and (len(self.signs) < states or w.dtype not in ("f16", "bf16", "f32")):
            raise self.fail("state of 8 bits is for Adam's moments, of float32 and 16-bit parameters", *inputs)
        if not 0 <= self.seed < 1 << 64 or not 0 <= self.first < 1 << 56:
            raise self.fail("the seed must be in [0, 2⁶⁴), the first element's number in [0, 2⁵⁶)", *inputs)

    def axis_factors(self, ins: Types, outs: Types) -> tuple[Factor, ...] | None:
        """Each element is updated on its own; blocks of 8-bit state, and the stream's words, lie in flat order."""
        if self.eight_bits:
            return None
        factors = aligned(ins, outs)
        if not self.stochastic:
            return factors
        lead = next((a for a, d in enumerate(need(outs[0]).shape) if d != 1), 0)
        return (*factors[: lead + 1], *needed_whole(factors[lead + 1 :]))

    def sliced(self, factor: Factor, start: int, size: int, outs: Types) -> Any:
        """The same words of the stream: those before the slice are left out."""
        part = super().sliced(factor, start, size, outs)
        if not self.stochastic:
            return part
        place, w = factor.outputs[0], need(outs[0])
        assert isinstance(place, Place)
        before = start * place.inner * math.prod(w.shape[place.axis + 1 :])
        return dataclasses.replace(cast(Any, part), first=self.first + before)

    def export(self, g: FunctionWriter, ins: Sequence[str], outs: Sequence[str]) -> bool:
        """ModelError where ONNX has no operators to store so."""
        if not self.stores:
            return False
        how = "rounds stochastically (bf16-pure)" if self.stochastic else "keeps its state in 8 bits"
        raise ModelError(
            f"{self.name} {how}, for which ONNX has no operators: export a step in bf16 or float32 instead"
        )

    def load(self, states: Sequence[Array | None], here: slice, rooms: Sequence[Array]) -> list[Array | None]:
        """Elements `here` (a part that begins with a block) of each state in float32, in `rooms`."""
        arrays: list[Array | None] = []
        free = iter(rooms)
        for number, state in enumerate(states):
            if state is None:
                arrays.append(None)
                continue
            room = next(free)[: here.stop - here.start]
            if self.eight_bits:
                decoded(state[here.start // BLOCK : blocks(here.stop)], room, signed=self.signs[number])
            else:
                room[...] = state.reshape(-1)[here]
            arrays.append(room)
        return arrays

    def store(self, to: Sequence[Array | None], what: Sequence[Array | None], here: slice, step: Array | None) -> None:
        """Stores elements `here` of the parameter and of each state (None: it is absent, or there already)."""
        for tile, words in self._tiles(here, step):
            local = slice(tile.start - here.start, tile.stop - here.start)
            for number, (array, x) in enumerate(zip(to, what, strict=True)):
                if x is None or array is None:
                    continue
                if number and self.eight_bits:
                    encoded(x[local], array[tile.start // BLOCK : blocks(tile.stop)], signed=self.signs[number - 1])
                elif words is not None:
                    noise = (words >> np.uint64(16 * number) & np.uint64(0xFFFF)).astype(np.uint32)
                    rounded(x[local], noise, array.reshape(-1)[tile])
                else:
                    array.reshape(-1)[tile] = x[local]

    def _tiles(self, here: slice, step: Array | None) -> Iterator[tuple[slice, Array | None]]:
        """Parts of a slice, with their words of the stream."""
        for start in range(here.start, here.stop, _TILE):
            tile = slice(start, min(start + _TILE, here.stop))
            words = None
            if self.stochastic and step is not None:
                words = words_from(self.seed, step, self.first + start, tile.stop - start)
            yield tile, words
