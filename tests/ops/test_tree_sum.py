"""TreeSum: the bits of `tree_sum`, in its own numerics and in its kernel."""

from __future__ import annotations

import numpy as np
import pytest

import recompute as rc
from recompute.language.op import op_class
from recompute.language.types import TensorType
from recompute.ops.communication.base import tree_sum
from recompute.testing import evaluate


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 5, 7, 8, 11, 64, 65])
@pytest.mark.parametrize("x", ["f32[40001]", "f64[3,5000]", "f16[33000]", "bf16[7]", "i32[0,2]"])
def test_the_bits_of_the_tree(x: str, parts: int) -> None:
    t = TensorType.parse(x)
    whole = t.with_shape((parts * t.shape[0], *t.shape[1:]))
    block = rc.parse(f"program p {{\n  input %x: {whole}\n  %y: {t} = TreeSum(%x) {{parts={parts}}}\n  output %y\n}}")
    array = (np.random.default_rng(parts).normal(size=whole.shape) * 100).astype(t.numpy)
    expected = tree_sum(np.split(array, parts))
    native = rc.run_passes(block, rc.pipeline("choose-kernels{providers=[numba]}"))
    large = t.dtype in ("f32", "f64") and 2 <= parts <= 64
    assert ("using numba" in rc.show(native)) == large
    assert evaluate(native, {"x": array})[0].tobytes() == expected.tobytes()
    (own,) = rc.Executor(providers=("numpy",)).run(rc.Program(block), {"x": array}, ["y"])
    assert own.tobytes() == expected.tobytes()
    if parts == 7 and t.dtype == "f32":
        assert expected.tobytes() != sum(np.split(array, parts)[1:], array[: t.shape[0]]).tobytes()


@pytest.mark.parametrize(
    ("x", "parts"), [("f32[]", 1), ("f32[5]", 2), ("f32[4]", 0), ("f32[0]", 1 << 30), ("bool[4]", 2)]
)
def test_types_that_cannot_be(x: str, parts: int) -> None:
    with pytest.raises(rc.RecomputeError, match=r"cannot be (divided|added)"):
        op_class("TreeSum")(parts).infer(TensorType.parse(x))
