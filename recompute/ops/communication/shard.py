"""A rank's part of a value that all ranks have."""

from __future__ import annotations

from typing import Any

from ...language.op import Op, OperatorBuilder
from ...language.types import Operands, TensorType, Value


def padded_size(size: int, parts: int) -> int:
    """The number of elements with as many zeros behind them as it takes to cut them into `parts` equal parts."""
    return -(-size // parts) * parts


class Shard(Op):
    """x → the `rank`-th of `ranks` equal parts of its elements, in one dimension.

    Zeros follow x's elements, so that they can be cut into `parts` equal parts, a multiple of `ranks`.  This is how
    ZeRO (Rajbhandari et al. 2020) divides a parameter, its gradient and its state.
    """

    ranks: int = 1
    rank: int = 0
    parts: int = 1

    def infer(self, x):
        if self.ranks < 1 or not 0 <= self.rank < self.ranks or self.parts < 1 or self.parts % self.ranks:
            raise self.fail("needs a rank below ranks, and parts that are a multiple of ranks", x)
        return (x.with_shape((padded_size(x.size, self.parts) // self.ranks,)),)

    def padded(self, b: OperatorBuilder, x: Value) -> Value:
        """All parts of x behind one another."""
        flat = b.Reshape(x, shape=(x.size,))
        more = padded_size(x.size, self.parts) - x.size
        return b.Concat(flat, b.fill(0, x.type.with_shape((more,))), axis=0) if more else flat

    def expand(self, b, x):
        whole = self.padded(b, x)
        each = whole.size // self.ranks
        return (b.Slice(whole, starts=(self.rank * each,), ends=((self.rank + 1) * each,), axes=(0,)),)

    def compute(self, ins: Operands, outs: Operands, scratch: Operands) -> None:
        flat, out = ins[0].reshape(-1), outs[0]
        part = flat[self.rank * out.size : (self.rank + 1) * out.size]
        out[: part.size] = part
        out[part.size :] = 0

    def axis_factors(self, ins: Any, outs: Any) -> tuple[Any, ...]:
        return ()

    @classmethod
    def samples(cls, draw):
        """With and without zeros; a part that is all zeros; 16-bit floats."""
        yield draw.case(cls(), draw("f64[2,3]"))
        for rank in range(2):
            yield draw.case(cls(ranks=2, rank=rank, parts=4), draw("f64[2,3]"))
        yield draw.case(cls(ranks=4, rank=3, parts=4), draw("f32[5]"))
        yield draw.case(cls(ranks=2, rank=1, parts=2), draw("f16[2,2,2]"))
        yield draw.case(cls(ranks=2, rank=1, parts=2), draw("f64[]"))


def unsharded(b: OperatorBuilder, whole: Any, like: TensorType) -> Any:
    """The value of type `like` from all its parts behind one another."""
    if whole.size != like.size:
        whole = b.Slice(whole, starts=(0,), ends=(like.size,), axes=(0,))
    return whole if like.shape == whole.shape else b.Reshape(whole, shape=like.shape)
