"""The gradient of the head's loss from its log-sum-exp: the logits again, a tile at a time."""

from __future__ import annotations

from ...language.op import Cost
from ...language.types import TensorType
from ..tiles import wide
from .linear_cross_entropy import LinearLoss, expanded_gradients, head_samples, whole
from .linear_tiles import Sizes, Tiles, slice_of, slices


class LinearCrossEntropyGrad(LinearLoss):
    """(x, w, bias?, labels, log-sum-exp, dloss) → the gradients of x, w and bias (optional).

    For each slice of the vocabulary all rows, so that a gradient of w is complete before the next begins; in halves
    that of x is summed in float32.
    """

    linear = ((5,),)
    required_outputs = 2

    def infer(self, x, w, bias, labels, lse, dloss):
        self.check(x, w, bias, labels)
        if dloss != self.loss_type(x, labels) or lse != TensorType(wide(x.dtype), labels.shape):
            raise self.fail("lse and dloss are not those of these inputs", x, w, bias, labels, lse, dloss)
        return (x, w) if bias is None else (x, w, bias)

    def axis_factors(self, ins, outs):
        count, single = len(outs), self.reduction == "none"
        of_inputs = (True, False, False, True, True, single)
        return self.row_factors(ins[3], of_inputs, (True, False, False)[:count], (0, 1, 2)[:count])

    def checks(self, ins, outs):
        return self.label_checks(3, ins[1])

    def scratch(self, ins, outs):
        """A tile's logits and what is computed from them."""
        sizes = Sizes(ins[0], ins[1], ins[3], transposed=bool(self.transB), held=False)
        return sizes.types(wide(ins[0].dtype), held=False, gradient=True)

    def compute(self, ins, outs, scratch):
        """Words from left to right, rows from top to bottom."""
        x, w, bias, labels, lse, dloss = ins
        dx, dw, db = (*outs, None, None)[:3]
        sizes = Sizes(x, w, labels, transposed=bool(self.transB), held=False)
        tiles = Tiles(self, (x, w, bias, labels), sizes, scratch)
        whole_dx = None if dx is None else dx.reshape(tiles.x.shape)
        tiles.share(dloss, slice(0, sizes.rows), tiles.losses)
        for words in slices(sizes.words, sizes.step):
            outs = (whole_dx, *slice_of(self, dw, db, words))
            sums = tiles.sums(outs)
            for rows in slices(sizes.rows, sizes.height):
                block = tiles.block(rows, words, held=False)
                tiles.logits(block, rows, words)
                tiles.differentiate(block, rows, words, lse.reshape(-1)[rows], tiles.losses[rows])
                tiles.spread(block, rows, words, sums)
            for i, (out, total) in enumerate(zip(outs, sums, strict=True)):
                if total is not out and (i > 0 or words.stop == sizes.words):
                    out[...] = total

    def expand(self, b, x, w, bias, labels, lse, dloss):
        t, _, _, chosen, counted = whole(self, b, x, w, bias, labels)
        statistic = b.Reshape(lse, shape=(labels.size, 1))
        return tuple(expanded_gradients(self, b, (x, w, bias, labels), (t, statistic, chosen, counted), dloss))

    def cost(self, ins, outs):
        """Three products, and about ten operations for each logit."""
        x, w = ins[:2]
        count = ins[3].size * w.shape[1 - self.transB]
        moved = sum(t.nbytes for t in (*ins, *outs) if t is not None)
        return Cost(count * (6 * x.shape[-1] + 10), moved)

    @classmethod
    def samples(cls, draw):
        for op, (x, w, bias, y) in head_samples(cls, draw):
            t = op.loss_type(TensorType.of(x), TensorType.of(y))
            lse = draw(str(t.with_shape(y.shape))) + t.numpy.type(2)
            export = str(x.dtype) != "bfloat16"
            yield draw.case(op, x, w, bias, y, lse, draw(str(t)) + t.numpy.type(1), export=export)
