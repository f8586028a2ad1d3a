"""RowSums: the bits of TreeSum over GatherGrad, in its own numerics and in its kernel."""

from __future__ import annotations

import numpy as np
import pytest

import recompute as rc
from recompute.language.op import op_class
from recompute.language.types import TensorType
from recompute.ops.communication.base import tree_sum
from recompute.ops.communication.shard import padded_size
from recompute.testing import evaluate


def gradient(indices: np.ndarray, dy: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    found = np.zeros(shape, dy.dtype)
    np.add.at(found, indices.reshape(-1), dy.reshape(-1, shape[1]))
    return found


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 8, 13])
@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_the_bits_of_whole_gradients(parts: int, kind: str) -> None:
    """Every rank's part, also where rows are cut; some rows are taken by all ranks, others by none."""
    shape, g = (401, 97), np.random.default_rng(parts)
    indices = np.minimum(g.integers(0, 401, (parts * 4, 33)), g.integers(0, 401, (parts * 4, 33)))
    dy = (g.normal(size=(*indices.shape, shape[1])) * 100).astype(TensorType(kind, ()).numpy)
    dy[0] = -0.0
    each = [gradient(i, d, shape) for i, d in zip(np.split(indices, parts), np.split(dy, parts), strict=True)]
    whole = np.zeros(padded_size(shape[0] * shape[1], parts), dy.dtype)
    whole[: shape[0] * shape[1]] = tree_sum(each).reshape(-1)
    indices[1] -= np.where(indices[1] % 2, 401, 0)  # as many from the end
    size = whole.size // parts
    for rank in {0, parts // 2, parts - 1}:
        text = f"""program p {{
  input %i: i64[{parts * 4},33]
  input %dy: {kind}[{parts * 4},33,97]
  %y: {kind}[{size}] = RowSums(%i, %dy) {{shape=[401,97], parts={parts}, start={rank * size}, size={size}}}
  output %y
}}"""
        block = rc.verify(rc.parse(text))
        native = rc.run_passes(block, rc.pipeline("choose-kernels{providers=[numba]}"))
        assert "using numba" in rc.show(native)
        expected = whole[rank * size : (rank + 1) * size].tobytes()
        assert evaluate(native, {"i": indices, "dy": dy})[0].tobytes() == expected
        (own,) = rc.Executor(providers=("numpy",)).run(rc.Program(block), {"i": indices, "dy": dy}, ["y"])
        assert own.tobytes() == expected


@pytest.mark.parametrize(
    ("attributes", "indices", "dy", "said"),
    [
        (((4, 3), 2, 0, 12), "i64[3]", "f32[3,3]", "divided into 2 parts"),
        (((4, 3), 0, 0, 12), "i64[4]", "f32[4,3]", "divided into 0 parts"),
        (((4, 3), 2, 0, 12), "i64[4]", "f32[4,2]", "not the gradient"),
        (((4, 3), 2, 0, 12), "i64[4]", "f16[4,3]", "f32 or f64"),
        (((4, 3), 2, 0, 12), "f32[4]", "f32[4,3]", "indices must be"),
        (((4, 3), 2, -1, 12), "i64[4]", "f32[4,3]", "negative"),
        (((0, 3), 2, 0, 12), "i64[4]", "f32[4,3]", "no rows"),
        (((4, 0), 2, 0, 12), "i64[4]", "f32[4,0]", "have no elements"),
    ],
)
def test_types_that_cannot_be(attributes: tuple, indices: str, dy: str, said: str) -> None:
    with pytest.raises(rc.RecomputeError, match=said):
        op_class("RowSums")(*attributes).infer(TensorType.parse(indices), TensorType.parse(dy))
