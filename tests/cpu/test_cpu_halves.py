"""Operators on bfloat16 and float16 by the processor's kernels, against their own numerics in float32."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from kernel_cases import applied

from recompute.errors import RecomputeError
from recompute.language import kernels
from recompute.language.ir import Operator
from recompute.language.kernels import PROVIDERS, accepting, provider
from recompute.language.op import REGISTRY
from recompute.language.types import DTYPES
from recompute.ops.convolution.conv import Conv, ConvGradInput, ConvGradWeight
from recompute.ops.fused import loop
from recompute.ops.linear.products import Gemm, MatMul
from recompute.ops.shape.reshape import Cast
from recompute.runtime.cpu import PREFERRED, families, register_all
from recompute.runtime.cpu.device import native
from recompute.runtime.cpu.device.native import Table
from recompute.runtime.cpu.loops import expressions
from recompute.runtime.cpu.providers import loops
from recompute.testing import cases

pytestmark = pytest.mark.skipif(bool(native.unavailable()), reason=native.unavailable() or "native code runs here")
register_all()
#: unit roundoff
UNIT = {"bf16": 2.0**-8, "f16": 2.0**-11}
NAMES = tuple(n for n in PREFERRED if n in PROVIDERS)
#: operators whose results depend on their inputs alone
CLASSES = sorted(n for n, c in REGISTRY.items() if not (c.abstract or c.updates or c.communicates))

#: operators of a network's time
OF_NETWORKS = ("MatMul", "Softmax", "LayerNormalization", "NormGrad", "ChannelsLastBatchNormTrain",
               "ChannelsLastMaxPool", "Relu", "Add", "Gelu", "TiledAttention", "Transpose")  # fmt: skip


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels take operators of any size; answers that were remembered are for larger ones."""
    for module in {type(f).__module__ for f in families.FAMILIES.table().values()} | {families.__name__}:
        monkeypatch.setattr(sys.modules[module], "ENOUGH", 0, raising=False)
    monkeypatch.setattr(loop, "SMALLEST", 0)
    monkeypatch.setattr(kernels, "_answers", {})


def halved(op: Any, arrays: Any, kind: str) -> list[np.ndarray | None]:
    """Floats in another type where mixed precision would have them."""
    which = op.autocast_inputs
    found: list[np.ndarray | None] = []
    for i, a in enumerate(arrays):
        floating = a is not None and a.dtype.kind == "f"
        to = "f4" if which and i not in which else DTYPES[kind]
        found.append(a if a is None else np.asarray(a.astype(to) if floating else a))
    return found


def by_kernel(op: Operator, arrays: Any) -> list[np.ndarray]:
    """What the first kernel that accepts the operator makes; buffers hold garbage before."""
    chosen = provider(accepting(NAMES, op))
    outs = [None if v is None else np.full(v.shape, 7, v.type.numpy) for v in op.outputs]
    scratch = [np.full(t.shape, 3, t.numpy) for t in chosen.scratch(op)]
    Table(chosen.bind(op, list(arrays), outs, scratch)).run()
    return [o for o in outs if o is not None]


def in_float32(op: Operator, arrays: Any) -> list[np.ndarray]:
    """The operator's numerics on the same numbers in float32."""
    wide = [a.astype("f4") if a is not None and a.dtype in (DTYPES["bf16"], DTYPES["f16"]) else a for a in arrays]
    again = applied(op.op, *wide, want=len(op.outputs))
    outs = [None if v is None else np.full(v.shape, 7, v.type.numpy) for v in again.outputs]
    kept = [o for o, v in zip(outs, op.outputs, strict=True) if v is not None]
    with np.errstate(all="ignore"):
        op.op.compute(wide, outs, [np.empty(t.shape, t.numpy) for t in again.workspace()])
    return kept


def check(op: Operator, arrays: Any, kind: str, units: float = 4) -> None:
    """Within a few roundings of the largest element."""
    for x, y in zip(by_kernel(op, arrays), in_float32(op, arrays), strict=True):
        a, b = x.astype("f8"), y.astype("f8")
        finite = np.isfinite(b) & (abs(b) < np.finfo(np.float16).max / 2)
        most, error = np.abs(b[finite]).max(initial=0), np.abs(a[finite] - b[finite]).max(initial=0)
        assert error <= units * UNIT[kind] * most + 2.0**-24, f"{op.op}: {error:.3g} of {most:.3g}"


def samples(name: str, kind: str) -> Iterator[tuple[Operator, list]]:
    for case in cases(REGISTRY[name]):
        arrays = halved(case.op, case.inputs, kind)
        if not any(a is not None and a.dtype == DTYPES[kind] for a in arrays):
            continue
        try:
            applied(case.op, *(a.astype("f4") if a is not None and a.dtype == DTYPES[kind] else a for a in arrays))
            yield applied(case.op, *arrays, want=case.want), arrays
        except RecomputeError:
            continue  # the pass leaves it in float32


@pytest.mark.parametrize("kind", ["bf16", pytest.param("f16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CLASSES)
def test_samples_as_in_float32(name: str, kind: str) -> None:
    """All operators with a kernel; those of a network's time have one."""
    seen = 0
    for op, arrays in samples(name, kind):
        if not op.op.random and accepting(NAMES, op):
            check(op, arrays, kind)
            seen += 1
    assert seen or name not in OF_NETWORKS


@pytest.mark.parametrize("by_instruction", [True, False])
def test_roundings(by_instruction: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the nearest, and to even numbers between two, with and without instructions for it."""
    if by_instruction and not native.converts_bfloat16():
        pytest.skip("this processor has no instructions for bfloat16")
    loops._text.cache_clear()
    monkeypatch.setattr(expressions.native, "converts_bfloat16", lambda: by_instruction)
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, np.uint32)
    bits[:1024] = (bits[:1024] & 0xFFFF0000) | 0x8000  # in the middle between two
    x = bits.view(np.float32)
    x[1024:1028] = np.inf, -np.inf, np.nan, 0.0
    op = applied(Cast(to="bf16"), x)
    (found,) = by_kernel(op, [x])
    loops._text.cache_clear()
    wanted = x.astype(DTYPES["bf16"])
    normal = ~np.isnan(x) & ((abs(x) >= np.finfo(np.float32).tiny) | (x == 0))  # smaller ones may count as zero
    assert np.array_equal(found.view(np.uint16)[normal], wanted.view(np.uint16)[normal])
    assert np.isnan(found[np.isnan(x)].astype("f4")).all()


needed = pytest.mark.skipif(
    not native.converts_bfloat16() or "onednn" not in PROVIDERS, reason="no oneDNN, or no instructions for bfloat16"
)
PRODUCTS = [
    (MatMul(), (130, 70), (70, 300), None),
    (MatMul(transA=1), (70, 130), (70, 300), None),
    (MatMul(transB=1), (130, 70), (300, 70), None),
    (MatMul(transA=1, transB=1), (70, 130), (300, 70), None),
    (MatMul(transB=1), (7, 5, 40, 64), (7, 5, 30, 64), None),
    (MatMul(), (3, 200, 64), (64, 100), None),
    (MatMul(), (64, 100), (3, 100, 200), None),
    (MatMul(transA=1), (3, 1, 64, 40), (5, 64, 30), None),
    (Gemm(transB=1), (50, 64), (30, 64), (30,)),
    (Gemm(), (50, 64), (64, 30), (1, 30)),
]


@needed
@pytest.mark.parametrize(("rule", "a", "b", "bias"), PRODUCTS)
def test_products_are_onednns(rule: Any, a: Any, b: Any, bias: Any) -> None:
    draw = np.random.default_rng(0)
    arrays = [draw.standard_normal(s).astype(DTYPES["bf16"]) for s in (a, b, bias) if s is not None]
    op = applied(rule, *arrays)
    assert accepting(NAMES, op) == "onednn"
    check(op, arrays, "bf16", 1)


@needed
@pytest.mark.parametrize("rule", [Gemm(alpha=0.5), Gemm(beta=2.0)])
def test_products_that_scale_are_widened(rule: Any) -> None:
    draw = np.random.default_rng(0)
    arrays = [draw.standard_normal(s).astype(DTYPES["bf16"]) for s in ((50, 64), (64, 30), (30,))]
    op = applied(rule, *arrays)
    assert accepting(NAMES, op) == "widened"
    check(op, arrays, "bf16")


@needed
def test_convolutions_are_onednns() -> None:
    draw = np.random.default_rng(0)
    x, w, dy = (draw.standard_normal(s).astype(DTYPES["bf16"]) for s in ((2, 32, 9, 9), (48, 32, 3, 3), (2, 48, 7, 7)))
    for rule, arrays in (
        (Conv(), [x, w]),
        (ConvGradInput(shape=(9, 9)), [w, dy]),
        (ConvGradWeight(kernel=(3, 3)), [x, dy]),
    ):
        op = applied(rule, *arrays)
        assert accepting(NAMES, op) == "onednn", rule
        check(op, arrays, "bf16", 1)


def test_statistics_are_float32() -> None:
    """A mean that bfloat16 cannot hold, of numbers far from zero."""
    draw = np.random.default_rng(0)
    x = (100 + draw.standard_normal((64, 32))).astype(DTYPES["bf16"])
    scale, bias = np.ones(32, np.float32), np.zeros(32, np.float32)
    op = applied(REGISTRY["ChannelsLastBatchNormTrain"](), x, scale, bias)
    assert accepting(NAMES, op) == "numba"
    check(op, [x, scale, bias], "bf16")
