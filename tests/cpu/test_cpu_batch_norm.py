"""Kernels of channels-last batch normalisation against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_cases import applied

from recompute.language.op import op_class
from recompute.runtime.cpu.device import jit, native
from recompute.runtime.cpu.providers.numba import Numba

pytestmark = pytest.mark.skipif(bool(jit.unavailable()), reason=jit.unavailable() or "there")

PROVIDER = Numba()
SHAPES = [(5, 33, 7, 24), (3, 500, 130), (2, 3, 3, 2000), (70, 3, 1, 1, 90)]


def run(name: str, *arrays: np.ndarray, threads: int = 0, inplace: bool = False) -> list[np.ndarray]:
    """The kernel's outputs; `inplace`: the first one in place of the first input."""
    o = applied(op_class(name)(), *arrays)
    assert PROVIDER.accepts(o)
    outs = [np.full(v.shape, 77, v.type.numpy) for v in o.writes()]
    ins = list(arrays)
    if inplace:
        ins[0] = outs[0]
        outs[0][...] = arrays[0]
    scratch = [np.full(t.shape, 77, t.numpy) for t in PROVIDER.scratch(o)]
    native.Table(PROVIDER.bind(o, ins, outs, scratch), threads).run()
    return outs


def exact(name: str, *arrays: np.ndarray, dtype: Any = np.float64) -> list[np.ndarray]:
    """The operator's own numerics in float64 (or another type)."""
    wide = [a.astype(dtype) for a in arrays]
    o = applied(op_class(name)(), *wide)
    outs = [np.empty(v.shape, dtype) for v in o.writes()]
    o.op.compute(wide, outs, [np.empty(t.shape, t.numpy) for t in o.workspace()])
    return outs


def drawn(shape: tuple[int, ...], dtype: Any, shift: float) -> tuple[np.ndarray, ...]:
    g = np.random.default_rng(1)
    c = shape[-1]
    x = (g.standard_normal(shape) * g.uniform(0.5, 2, c) + shift * g.standard_normal(c)).astype(dtype)
    vectors = [g.uniform(0.5, 2, c).astype(dtype), g.standard_normal(c).astype(dtype)]
    return x, *vectors, g.standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shift", [1.0, 1000.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_against_float64(shape: tuple[int, ...], shift: float, dtype: Any) -> None:
    """A block's mean errs by its 64 roundings of |x|, its variance by those of the squares: whatever the mean is.

    What is centred errs by the mean's error, and everything after it by a few roundings.
    """
    x, scale, bias, dy = drawn(shape, dtype, shift)
    eps = float(np.finfo(dtype).eps)
    y, mean, var = run("ChannelsLastBatchNormTrain", x, scale, bias)
    wanted = exact("ChannelsLastBatchNormTrain", x, scale, bias)
    size = abs(wanted[1]).max() + 1
    assert abs(mean - wanted[1]).max() <= 64 * eps * size
    assert abs(var / wanted[2] - 1).max() <= 200 * eps * size
    assert abs(y - wanted[0]).max() <= 2000 * eps * size
    for a, b in zip(run("ChannelsLastBatchNormStatistics", x), (mean, var), strict=True):
        assert a.tobytes() == b.tobytes()
    (again,) = run("ChannelsLastBatchNormApply", x, scale, bias, mean, var)
    assert again.tobytes() == y.tobytes()
    (factor,) = run("BatchNormFactor", scale, var)
    opened = exact("CentreScale", x, mean, factor, bias, dtype=dtype)
    assert opened[0].tobytes() == y.tobytes()
    found = run("ChannelsLastBatchNormGrad", x, scale, mean, var, dy)
    rows = x.size / shape[-1]
    for a, b, n in zip(
        found, exact("ChannelsLastBatchNormGrad", x, scale, mean, var, dy), (1, rows, rows), strict=True
    ):
        assert abs(a - b).max() <= 100 * eps * (1 + n**0.5) * (1 + eps * size * rows)
    (z,) = run("ChannelsLastBatchNormalization", x, scale, bias, mean, var)
    assert abs(z - exact("ChannelsLastBatchNormalization", x, scale, bias, mean, var)[0]).max() <= 50 * eps * size


@pytest.mark.parametrize("shape", SHAPES[:2])
def test_bits_do_not_depend_on_threads_or_places(shape: tuple[int, ...]) -> None:
    x, scale, bias, dy = drawn(shape, np.float32, 1)
    _, mean, var = run("ChannelsLastBatchNormTrain", x, scale, bias)
    for name, arrays in (
        ("ChannelsLastBatchNormTrain", (x, scale, bias)),
        ("ChannelsLastBatchNormApply", (x, scale, bias, mean, var)),
        ("ChannelsLastBatchNormalization", (x, scale, bias, mean, var)),
        ("ChannelsLastBatchNormGrad", (x, scale, mean, var, dy)),
    ):
        wanted = run(name, *arrays)
        for options in ({"threads": 1}, {"threads": 3}, {"inplace": True}):
            for a, b in zip(run(name, *arrays, **options), wanted, strict=True):
                assert a.tobytes() == b.tobytes(), (name, options)
