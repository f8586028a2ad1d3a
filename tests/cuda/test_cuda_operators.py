"""Every operator's samples by its CUDA kernels, on the emulated device, beside NumPy's own numerics."""

from __future__ import annotations

import functools
from typing import Any

import cuda_cases
import numpy as np
import pytest
from test_extremes import KERNELS_DIFFER, extreme, same

from recompute.ops.loss.scale import InverseIfFinite
from recompute.ops.optimizer.norm_updates import GlobalNorm
from recompute.ops.random.draws import Dropout
from recompute.ops.random.dropout_part import DropoutPart
from recompute.ops.reduction.running import LinearScan
from recompute.ops.vision.resize import Resize, ResizeGrad
from recompute.runtime.cuda.expanded import Expanded, family_of
from recompute.testing import Case, Draw, all_ops, cases

pytestmark = cuda_cases.needs_device

OPS = {cls.__name__: cls for cls in all_ops() if cls.__name__ != "Free"}


@functools.cache
def device() -> Any:
    return cuda_cases.device()


@functools.cache
def bound(name: str) -> list[tuple[Any, list[cuda_cases.Bound]]]:
    return [(case, cuda_cases.bound(case, device())) for case in cases(OPS[name])]


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> None:
    """The kernels of all operators that are tested here, compiled together; on a device a test compiles its own, as
    workers do not know which tests they get."""
    if cuda_cases.PLACE != "emulated":
        return
    wanted = {
        i.callspec.params["name"]
        for i in request.session.items
        if hasattr(i, "callspec") and getattr(i, "module", None) is request.module and "name" in i.callspec.params
    }
    found = (b for n in wanted for _, runs in bound(n) for b in runs)
    cuda_cases.compile_together({k for b in found for k in b.kernels}, device())


@pytest.mark.parametrize("name", OPS)
def test_operator(name: str, compiled: None, capfd: pytest.CaptureFixture[str]) -> None:
    runs = bound(name)
    if not any(r for _, r in runs):
        pytest.skip("the host runs it")
    for case, bindings in runs:
        cuda_cases.check(case, bindings)
    assert "runtime error" not in capfd.readouterr().err, "what C++ leaves undefined (cuda_cases.level)"


#: operators whose kernels give other numbers there on purpose, and why (beside those of the processor's kernels)
DIFFER = {
    **KERNELS_DIFFER,
    **dict.fromkeys(("GRUGrad", "LSTM", "RNN", "RNNGrad"), "no state before the first step is not multiplied"),
    "PadGrad": "an element's copies are added in the order of their places, not itself first",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("operator", [n for n in OPS if n not in DIFFER])
def test_extreme_numbers(operator: str) -> None:
    """Infinities, NaN, zeros of both signs and others, as NumPy's numerics have them."""
    for seed, case in enumerate(cases(OPS[operator])):
        if not any(a is not None and a.dtype == np.float64 for a in case.inputs):
            continue
        case = extreme(case, seed, np.float64)
        for b in cuda_cases.bound(case, device())[:1]:
            with np.errstate(all="ignore"):
                for got, want in zip(b.run(0xFF), cuda_cases.reference(case), strict=True):
                    same(got, want, f"{case.op}: its kernel")


def larger() -> list[Case]:
    """Several blocks of threads, tables of several launches, halves."""
    draw, small, large = Draw("larger"), (2, 3, 40, 30), (2, 3, 130, 200)
    up, down = Resize(shape=large, mode="linear"), Resize(shape=small, mode="cubic", antialias=1)
    x, y = (",".join(map(str, s)) for s in (small, large))
    return [
        draw.case(up, draw(f"f32[{x}]")),
        draw.case(down, draw(f"f16[{y}]")),
        draw.case(Resize(shape=large), draw.ints(f"i64[{x}]", 0, 99)),
        draw.case(ResizeGrad(shape=small, mode="linear"), draw(f"f32[{y}]")),
        draw.case(ResizeGrad(shape=small, mode="nearest"), draw(f"bf16[{y}]")),
        draw.case(GlobalNorm(), draw("f32[300,70]"), draw("f16[9000]"), draw("f32[8192]")),
        draw.case(InverseIfFinite(), np.array(8, "f4"), draw("f32[300,70]"), draw("f16[9000]")),
        draw.case(LinearScan(axis=1), draw("f32[3,50,41]"), draw("f32[3,50,41]")),
        draw.case(LinearScan(axis=0, reverse=1), draw("f16[60,7]"), draw("f16[60,7]")),
        draw.case(Dropout(ratio=0.3, seed=7), draw("f16[40,64]"), np.array(3), want=2),
        draw.case(Dropout(ratio=0.3, seed=7), draw("f32[40,64]"), np.array(3), want=1),
        draw.case(DropoutPart(ratio=0.4, seed=7, first=64, run=24, skip=96), draw("bf16[6,24]"), np.array(3), want=2),
    ]


@pytest.mark.parametrize("i", range(12))
def test_larger(i: int) -> None:
    case = larger()[i]
    runs = cuda_cases.bound(case, device())
    assert runs and not isinstance(family_of(runs[0].op), Expanded)
    cuda_cases.check(case, runs)


def test_on_host() -> None:
    """The host runs samples of those operators that say why, and of no others."""
    found = {n for n, cls in OPS.items() if any(not cuda_cases.operator(c).kernel for c in cases(cls))}
    assert found == {n for n, cls in OPS.items() if cls.on_host}
