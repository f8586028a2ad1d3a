"""Kernels of pooling and transposition against the operators' own numerics, on all of their samples and large ones."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from kernel_cases import applied

from recompute.language.ir import Operator
from recompute.language.op import op_class
from recompute.ops.shape.reshape import Transpose
from recompute.runtime.cpu import families
from recompute.runtime.cpu.device import jit, native
from recompute.runtime.cpu.providers.numba import Numba
from recompute.testing import Draw, cases

pytestmark = pytest.mark.skipif(bool(jit.unavailable()), reason=jit.unavailable() or "there")

PROVIDER = Numba()


def run(o: Operator, *arrays: np.ndarray, own: bool = False) -> list[np.ndarray]:
    """The outputs by the kernel, or by the operator itself."""
    outs = [None if v is None else np.full(v.shape, 77, v.type.numpy) for v in o.outputs]
    types = o.workspace() if own else PROVIDER.scratch(o)
    scratch = [np.full(t.shape, 77, t.numpy) for t in types]
    if own:
        o.op.compute(list(arrays), outs, scratch)  # type: ignore[arg-type]
    else:
        native.Table(PROVIDER.bind(o, arrays, outs, scratch)).run()
    return [a for a in outs if a is not None]


def check(op: Any, *arrays: np.ndarray, absent: tuple[int, ...] = (), eps: float = 0) -> None:
    o = applied(op, *arrays, absent=absent)
    assert PROVIDER.accepts(o)
    for found, wanted in zip(run(o, *arrays), run(o, *arrays, own=True), strict=True):
        near = eps * np.finfo(found.dtype).eps if eps else 0
        np.testing.assert_allclose(found, wanted, rtol=near, atol=near)


POOLS = ["ChannelsLastMaxPool", "ChannelsLastMaxPoolGrad", "ChannelsLastAveragePool", "ChannelsLastAveragePoolGrad",
         "ChannelsLastGlobalAveragePool"]  # fmt: skip


@pytest.mark.parametrize("name", POOLS[:4])
def test_samples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """float64: every window; AveragePool's gradient multiplies by a rounded share, up to 9 of them are added."""
    monkeypatch.setattr(families, "ENOUGH", 0)
    checked = 0
    for case in cases(op_class(name)):
        arrays = [a for a in case.inputs if a is not None]
        absent = (1,) if name == POOLS[0] else ()
        if not arrays[-1].size or arrays[-1].dtype not in (np.float64, np.float32):
            continue
        check(case.op, *arrays, absent=absent, eps=20 if name in POOLS[3:] else 0)
        checked += 1
    assert checked > 1


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_large(dtype: str) -> None:
    """As networks have them; ties; a mean of p elements errs by a few roundings of partial sums of 64."""
    draw = Draw("pool")
    x = draw(f"{dtype}[3,21,19,24]")
    fields = {"kernel_shape": (3, 3), "strides": (2, 2), "pads": (1, 1, 1, 1)}
    pool = op_class(POOLS[0])(**fields)
    check(pool, x, absent=(1,))
    check(pool, x, absent=(1, 2))
    ties = np.round(x * 2)
    ties[0, :3] = -np.inf
    ties[1, 5, 5, 3] = np.nan
    check(pool, ties, absent=(1,))
    _, number = run(applied(pool, ties, absent=(1,)), ties)
    dy = draw(f"{dtype}[{','.join(map(str, number.shape))}]")
    check(op_class(POOLS[1])(shape=(21, 19), **fields), number, dy)
    check(op_class(POOLS[2])(**fields), x)
    check(op_class(POOLS[3])(shape=(21, 19), **fields), dy, eps=20)
    check(op_class(POOLS[4])(), x, eps=70)
    check(op_class(POOLS[4])(), draw(f"{dtype}[2,300,130]"), eps=70)


def test_what_it_leaves_alone() -> None:
    pool = op_class(POOLS[0])(kernel_shape=(3, 3))
    x = np.zeros((4, 30, 30, 16), np.float32)
    assert PROVIDER.accepts(applied(pool, x, absent=(1,)))
    assert not PROVIDER.accepts(applied(pool, x))  # flat indices
    assert not PROVIDER.accepts(applied(pool, x.astype(np.float16), absent=(1,)))
    assert not PROVIDER.accepts(applied(pool, x[:, :5, :5], absent=(1,)))


def test_transposes() -> None:
    """All orders of four axes and of five, one of them 1; all widths of elements."""
    for n, shape in ((4, (13, 11, 17, 19)), (5, (5, 1, 33, 17, 16))):
        for perm in itertools.permutations(range(n)):
            x = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
            o = applied(Transpose(perm), x)
            if PROVIDER.accepts(o):
                np.testing.assert_array_equal(run(o, x)[0], x.transpose(perm))
            else:
                assert o.op.views([v.type for v in o.reads()], [v.type for v in o.writes()])
    for dtype in (np.bool_, np.float16, np.float64, np.uint8):
        x = Draw("t")("f64[130,131]", -9, 9).astype(dtype)
        np.testing.assert_array_equal(run(applied(Transpose((1, 0)), x), x)[0], x.T)
