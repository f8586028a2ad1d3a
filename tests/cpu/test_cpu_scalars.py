"""Kernels of norms, of loss scaling and of single numbers, which libraries of steps need, against NumPy's numerics."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from kernel_cases import applied

from recompute.errors import NotFiniteError
from recompute.language import kernels
from recompute.language.kernels import PROVIDERS, accepting, provider
from recompute.language.op import REGISTRY, Op
from recompute.runtime.cpu import PREFERRED, families, register_all
from recompute.runtime.cpu.device import jit
from recompute.runtime.cpu.device.native import Table
from recompute.runtime.cpu.kernels import functions, norms
from recompute.testing import cases

pytestmark = pytest.mark.skipif(bool(jit.unavailable()), reason=jit.unavailable() or "native code runs here")
register_all()
OPERATORS = (
    "InverseIfFinite", "LossScaleUpdate", "CheckFinite", "GlobalNorm", "LambUpdate", "LarsUpdate", *functions.NAMES,
)  # fmt: skip


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels take operators of any size; answers that were remembered are for larger ones."""
    for module in {type(f).__module__ for f in families.FAMILIES.table().values()} | {families.__name__}:
        monkeypatch.setattr(sys.modules[module], "ENOUGH", 0, raising=False)
    monkeypatch.setattr(kernels, "_answers", {})


def by_kernel(op: Op, arrays: Any, *, team: int = 0) -> list[np.ndarray] | None:
    """What numba's kernel makes; buffers hold garbage before.  None where none accepts the operator."""
    made = applied(op, *arrays)
    if accepting(tuple(n for n in PREFERRED if n in PROVIDERS), made) != "numba":
        return None
    ins = [None if a is None else np.array(a) for a in arrays]
    outs = [None if v is None else np.full(v.shape, 7, v.type.numpy) for v in made.outputs]
    for i, j in enumerate(op.updates[: len(outs)]):
        outs[i] = ins[j]
    chosen = provider("numba")
    table = Table(chosen.bind(made, ins, outs, [np.full(t.shape, 3, t.numpy) for t in chosen.scratch(made)]), team)
    table.run()
    table.check("the operator")
    return [o for o in outs if o is not None]


def by_numpy(op: Op, arrays: Any) -> list[np.ndarray]:
    """What its own numerics make."""
    made = applied(op, *arrays)
    ins: list[Any] = [None if a is None else np.array(a) for a in arrays]
    outs = [None if v is None else np.full(v.shape, 5, v.type.numpy) for v in made.outputs]
    for i, j in enumerate(op.updates[: len(outs)]):
        outs[i] = ins[j]
    types = [None if v is None else v.type for v in made.inputs], [None if v is None else v.type for v in made.outputs]
    with np.errstate(all="ignore"):
        op.compute(ins, outs, [np.full(t.shape, 3, t.numpy) for t in op.scratch(*types)])
    return [o for o in outs if o is not None]


@pytest.mark.parametrize("name", OPERATORS)
def test_kernels_compute_what_numpy_does(name: str) -> None:
    taken = 0
    for case in cases(REGISTRY[name]):
        found = by_kernel(case.op, case.inputs)
        if found is None:
            continue
        taken += 1
        for a, b in zip(found, by_numpy(case.op, case.inputs), strict=True):
            if name in ("InverseIfFinite", "LossScaleUpdate", "CheckFinite"):
                assert a.tobytes() == b.tobytes()
            else:
                close = 1e-13 if b.dtype == np.float64 else 3e-6
                np.testing.assert_allclose(a, b, rtol=close, atol=close)
    assert taken, "no sample has a kernel"


def test_bits_do_not_depend_on_threads() -> None:
    g = np.random.default_rng(0)
    x = [g.standard_normal(n, dtype=np.float32) for n in (5 * norms.PART + 3, 100)]
    v = np.abs(x[0])
    lamb = [x[0], x[0] * 2, x[0] * 3, v, np.array(0.1, np.float32), np.array(3, np.int64)]
    for name, arrays in (("GlobalNorm", x), ("LambUpdate", lamb), ("LarsUpdate", [*lamb[:3], lamb[4]])):
        one, two = (by_kernel(REGISTRY[name](), arrays, team=n) for n in (1, 2))
        assert one is not None and two is not None
        assert all(a.tobytes() == b.tobytes() for a, b in zip(one, two, strict=True)), name


def test_a_norm_of_gradients_that_explode_is_finite() -> None:
    """Squares of float32 would overflow."""
    (found,) = by_kernel(REGISTRY["GlobalNorm"](), [np.full(4, 1e30, np.float32)]) or ()
    np.testing.assert_allclose(found, 2e30, rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_loss_that_is_not_finite_is_reported(dtype: Any) -> None:
    for bad, says in ((np.nan, "nan"), (-np.nan, "nan"), (np.inf, "inf"), (-np.inf, "-inf")):
        with pytest.raises(NotFiniteError, match=f"the loss is {says},"):
            by_kernel(REGISTRY["CheckFinite"](), [np.array(bad, dtype)])
    for good in (0.0, -1.5, np.finfo(dtype).max, np.finfo(dtype).tiny):
        (found,) = by_kernel(REGISTRY["CheckFinite"](), [np.array(good, dtype)]) or ()
        assert found == dtype(good)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("at", [0, norms.PART - 1, norms.PART, 3 * norms.PART + 2])
def test_one_bad_gradient_is_seen_wherever_it_lies(dtype: Any, at: int) -> None:
    scale, g = np.array(1024, np.float32), np.zeros(3 * norms.PART + 3, dtype)
    g[:] = np.finfo(dtype).max
    for bad, expected in ((g[0], 1 / 1024), (np.inf, 0.0), (-np.inf, 0.0), (np.nan, 0.0)):
        g[at] = bad
        (found,) = by_kernel(REGISTRY["InverseIfFinite"](), [scale, np.ones(3, dtype), g]) or ()
        assert found == np.float32(expected), (bad, at)
