"""CUDA kernels for pooling, on the emulated device: both layouts, one plane and several a thread, vectors and not."""

from __future__ import annotations

import re
from typing import Any

import cuda_cases
import numpy as np
import pytest
from test_cuda_index import floats
from test_cuda_moves import launched, run

from recompute.language.layouts import to_last
from recompute.language.types import TensorType
from recompute.ops.channels_last import channels_last_form
from recompute.ops.pooling.average import AveragePool, AveragePoolGrad
from recompute.ops.pooling.whole import GlobalAveragePool, GlobalMaxPool, GlobalMaxPoolGrad
from recompute.ops.pooling.windows import MaxPool, MaxPoolGather, MaxPoolGrad
from recompute.runtime.cuda.device.kernel import C_TYPES
from recompute.runtime.shared.kernels import pooling as kernels_pooling

pytestmark = cuda_cases.needs_device

#: windows as attributes, and an input's shape
WINDOWS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "stem": ({"kernel_shape": (3, 3), "strides": (2, 2), "pads": (1, 1, 1, 1)}, (2, 6, 17, 22)),
    "halves": ({"kernel_shape": (2, 2), "strides": (2, 2)}, (1, 8, 12, 15)),
    "same": ({"kernel_shape": (3, 3), "pads": (1, 1, 1, 1)}, (2, 5, 9, 11)),
    "ceil": ({"kernel_shape": (3, 2), "strides": (2, 3), "pads": (0, 1, 1, 0), "ceil_mode": 1}, (1, 8, 14, 16)),
    "apart": ({"kernel_shape": (3, 3), "dilations": (2, 3), "strides": (2, 1), "pads": (2, 2, 1, 3)}, (1, 3, 13, 14)),
    "gaps": ({"kernel_shape": (1, 2), "strides": (3, 4)}, (2, 4, 11, 18)),
    "line": ({"kernel_shape": (5,), "strides": (2,), "pads": (2, 2)}, (2, 7, 61)),
    "volume": ({"kernel_shape": (2, 3, 2), "strides": (1, 2, 2), "pads": (1, 0, 0, 0, 1, 1)}, (1, 8, 5, 8, 7)),
    "large": ({"kernel_shape": (17, 17)}, (1, 2, 20, 18)),
}
#: each with few and with many planes
TURNS = [(name, planes) for planes in (1, 4) for name in WINDOWS]


def both(op: Any, *inputs: np.ndarray, units: float, want: int | None = None) -> None:
    """Channels first and last."""
    run(op, *inputs, units=units, want=want)
    turned = (np.ascontiguousarray(a.transpose(to_last(a.ndim))) for a in inputs)
    form = channels_last_form(op)
    assert form is not None
    run(form, *turned, units=units, want=want)


def window_numbers(op: MaxPool, x: np.ndarray) -> np.ndarray:
    types = op.infer(TensorType.of(x))
    outs = [np.empty(t.shape, t.numpy) for t in types]
    op.compute([x], outs, [np.empty(t.shape, t.numpy) for t in op.scratch((TensorType.of(x),), types)])
    return outs[2]


@pytest.mark.parametrize(("name", "planes"), TURNS)
def test_largest(name: str, planes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_pooling, "_MUCH", 1 if planes > 1 else 1 << 30)
    fields, shape = WINDOWS[name]
    op = MaxPool(**fields)
    x = floats("f32", *shape)
    x.flat[::7] = 0.5  # ties
    x.flat[5::97] = np.nan
    both(op, x, units=0)
    if name in ("stem", "apart", "volume"):
        both(op, x, units=0, want=1)
        both(op, floats("f16", *shape), units=0, want=2)
    number = window_numbers(op, x)
    dy = floats("f32", *number.shape, seed=1)
    both(MaxPoolGrad(shape=shape[2:], **fields), number, dy, units=8)
    both(MaxPoolGather(**fields), number, floats("f32", *shape), units=0)


@pytest.mark.parametrize("include", [0, 1])
@pytest.mark.parametrize("name", WINDOWS)
def test_means(name: str, include: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_pooling, "_MUCH", 1 if include else 1 << 30)
    fields, shape = WINDOWS[name]
    kinds = ("f32", "f64") if include else ("f32", "bf16", "f16")
    for kind in kinds if name in ("stem", "ceil") else kinds[:1]:
        op = AveragePool(**fields, count_include_pad=include)
        both(op, floats(kind, *shape), units=16)
        small = op.infer(TensorType(kind, shape))[0].shape
        both(AveragePoolGrad(shape=shape[2:], **fields, count_include_pad=include), floats(kind, *small), units=16)


def test_vectors_where_channels_allow() -> None:
    form = channels_last_form(MaxPool(kernel_shape=(2, 2)))
    assert form is not None
    for kind, channels, end in (
        ("f32", 8, "1x8x0_0x1x0_whole"),
        ("f32", 6, "1x1x0_0x1x0"),
        ("f16", 8, "1x8x0_0x1x0_whole"),
    ):
        (name,) = launched(run(form, floats(kind, 1, 5, 6, channels), want=1))
        assert re.fullmatch(rf"max_pool_{C_TYPES[kind]}_1x2x2_1x1x1_.*_{end}", name), name


@pytest.mark.parametrize("kind", ["f32", "f64", "f16", "bf16"])
@pytest.mark.parametrize("shape", [(2, 40, 7, 7), (1, 3, 33, 41), (3, 70, 2), (1, 2, 1, 1)])
def test_over_all_positions(kind: str, shape: tuple[int, ...]) -> None:
    both(GlobalAveragePool(), floats(kind, *shape), units=16)
    x = floats(kind, *shape)
    x.flat[::3] = x.flat[0]
    if kind == "f32":
        x[0, 1, :1] = np.nan
    both(GlobalMaxPool(), x, units=0)
    if kind == "f32":
        rows, n = shape[0] * shape[1], int(np.prod(shape[2:]))
        at = np.arange(rows) * n + np.random.default_rng(0).integers(0, n, rows)
        small = (*shape[:2], *(1,) * (len(shape) - 2))
        both(GlobalMaxPoolGrad(shape=shape[2:]), at.reshape(small), floats(kind, *small), units=0)
