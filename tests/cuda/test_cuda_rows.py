"""Row and channel kernels for CUDA on shapes that take every path: rows of warps and of blocks, several chunks of a
channel, vectors of another type; beside NumPy, in both orders of the threads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda_cases
import numpy as np
import pytest

from recompute.language.kernels import provider
from recompute.language.op import op_class
from recompute.language.types import TensorType
from recompute.ops.rowwise import Rowwise
from recompute.runtime.cuda.device.emulator import EmulatedDevice
from recompute.runtime.cuda.device.kernel import Buffer
from recompute.runtime.cuda.kernels.rows import along_rows
from recompute.testing import Case, Draw

pytestmark = cuda_cases.needs_device


def norms(draw: Draw) -> Any:
    def op(name: str, **attributes: Any) -> Any:
        return op_class(name)(**attributes)

    for t in ("f32", "f16"):
        for rows, n in ((37, 300), (3, 2500), (5, 768), (9, 128)):
            x, w = draw(f"{t}[{rows},{n}]"), draw(f"f32[{n}]")
            yield Case(op("LayerNormalization"), (x, w, draw(f"f32[{n}]")))
            yield Case(op("RMSNormalization"), (x, w))
            given = draw(f"f32[{rows},1]"), draw(f"f32[{rows},1]", 0.5, 1.5), draw(f"{t}[{rows},{n}]")
            yield Case(op("NormGrad", view=(rows, 1, n, 1)), (x, w, *given))
    yield Case(op("NormGrad", view=(3, 4, 2, 1000)), (
        draw("f32[3,8,1000]"), draw("f32[8]"), draw("f32[3,4]"), draw("f32[3,4]", 0.5, 1.5), draw("f32[3,8,1000]"),
    ))  # fmt: skip
    for shape, c in (("2,3,70,90", 3), ("700,40", 40), ("3,5,7", 5)):
        for t in ("f32", "f16"):
            v = [draw(f"f32[{c}]") for _ in range(3)]
            x, var = draw(f"{t}[{shape}]") + np.float16(2).astype(t.replace("f", "float")), draw(f"f32[{c}]", 0.5, 2)
            yield Case(op("BatchNormTrain"), (x, *v[:2]))
            yield Case(op("BatchNormStatistics"), (x,))
            yield Case(op("BatchNormApply"), (x, *v, var))
            yield Case(op("BatchNormGrad"), (x, v[0], v[1], var, draw(f"{t}[{shape}]")))
    for t, shape in (("f32", "30,20,40"), ("f32", "1030,3"), ("f16", "600,8"), ("f16", "40,264"), ("f32", "5,7,1024")):
        c = int(shape.split(",")[-1])
        v = [draw(f"f32[{c}]"), draw(f"f32[{c}]"), draw(f"f32[{c}]", 0.5, 2)]
        yield Case(op("ChannelsLastBatchNormStatistics"), (draw(f"{t}[{shape}]"),))
        yield Case(op("ChannelsLastBatchNormApply"), (draw(f"{t}[{shape}]"), v[0], *v))
        yield Case(op("ChannelsLastBatchNormGrad"), (draw(f"{t}[{shape}]"), *v, draw(f"{t}[{shape}]")))


def rows(draw: Draw) -> Any:
    for shape, axis in (("37,300", -1), ("3,2500", -1), ("4,30,50", 1), ("2,1500,3", 1)):
        x = draw(f"f32[{shape}]")
        for name in ("Softmax", "LogSoftmax"):
            yield Case(op_class(name)(axis=axis), (x,))
            yield Case(op_class(f"{name}Grad")(axis=axis), (x, draw(f"f32[{shape}]")))
    for shape, labels, classes in (("37,300", "37", 300), ("5,2000", "5", 2000), ("3,7,40", "3,40", 7)):
        for reduction in ("mean", "none"):
            op = op_class("SoftmaxCrossEntropyLoss")(reduction=reduction, ignore_index=2)
            y = draw.ints(f"i64[{labels}]", 0, classes)
            x = draw(f"f32[{shape}]", -3, 3)
            yield Case(op, (x, y, draw(f"f32[{classes}]", 0.5, 1.5)))
            yield Case(op, (x, y, None), want=1)
            down = draw(f"f32[{labels}]" if reduction == "none" else "f32[]")
            yield Case(op_class("SoftmaxCrossEntropyGrad")(reduction=reduction, ignore_index=2), (
                x - 8, y, None, down,
            ))  # fmt: skip


@dataclass(frozen=True)
class Beside(Rowwise, abstract=True):
    """(x, y) → tanh(x), z - mean(z) with z = x + y: all rows of y need the only one of x, which an output may take.

    `wide`: the second output in float64."""

    wide: bool = False
    inplace = (0,)

    def infer(self, *inputs: Any) -> Any:
        x, y = inputs
        return x, TensorType("f64" if self.wide else y.dtype, y.shape)

    def expand(self, b: Any, *inputs: Any) -> Any:
        x, y = inputs
        y = b.Add(x, y)
        if self.wide:
            y = b.Cast(y, to="f64")
        return b.Tanh(x), b.Sub(y, b.ReduceMean(y, axes=(-1,)))


def test_an_output_that_rows_share_stays_on_the_host() -> None:
    draw = Draw("beside")
    x, y = draw("f32[1,40]"), draw("f32[37,40]")
    assert not along_rows(cuda_cases.case_block(Case(Beside(), (x, y)))[0].operators[0])


def test_float64_outputs_of_float32_are_computed_in_float64() -> None:
    draw, device = Draw("beside"), cuda_cases.device()
    case = Case(Beside(wide=True), (draw("f32[37,40]"), draw("f32[37,40]")))
    runs = cuda_cases.bound(case, device)
    assert runs
    got, exact = runs[0].run(0xFF)[1], np.add(*case.inputs).astype(np.float64)
    np.testing.assert_allclose(got, exact - exact.mean(1, keepdims=True), rtol=0, atol=1e-14)


CASES = [*norms(Draw("norms")), *rows(Draw("rows"))]


@pytest.fixture(scope="module")
def bindings() -> list[Any]:
    device = cuda_cases.device()
    found = [cuda_cases.bound(c, device) for c in CASES]
    device.compile(k for runs in found for b in runs for k in b.kernels)
    return found


def _name(case: Case) -> str:
    return f"{case.op.name}-{'x'.join(str(d) for d in np.shape(case.inputs[0]))}-{case.inputs[0].dtype}"


@pytest.mark.parametrize("i", range(len(CASES)), ids=[_name(c) for c in CASES])
def test_case(i: int, bindings: list[Any]) -> None:
    assert bindings[i], "the host runs it"
    cuda_cases.check(CASES[i], bindings[i])


def test_a_label_outside_of_the_classes_is_reported() -> None:
    import recompute as rc
    from recompute.runtime import EmulatedCUDAPlace

    program = rc.load(rc.models.build("mlp", batch=2))
    loss = rc.losses.cross_entropy(program).name
    feed = {"x": np.zeros(program["x"].shape, np.float32), "label": np.array([0, 99])}
    with pytest.raises(rc.errors.JobError, match="label"):
        rc.Executor(EmulatedCUDAPlace()).run(program, feed, [loss])


@pytest.mark.parametrize(
    "name", ["LayerNormalization", "NormGrad", "ChannelsLastBatchNormTrain", "ChannelsLastBatchNormGrad"]
)
def test_parts_of_values_give_the_same_bits(name: str) -> None:
    """Operands that begin between the multiples of 16 bytes are read one by one, and added up in the same order."""
    draw, options = Draw(name), {"view": (40, 1, 768, 1)} if name == "NormGrad" else {}
    x, v = [draw("f16[40,768]") for _ in range(2)], [draw("f32[768]", 0.5, 2) for _ in range(3)]
    rows = [draw("f32[40,1]", 0.5, 2) for _ in range(2)]
    inputs = {
        "LayerNormalization": (x[0], *v[:2]),
        "NormGrad": (x[0], v[0], *rows, x[1]),
        "ChannelsLastBatchNormTrain": (x[0], *v[:2]),
        "ChannelsLastBatchNormGrad": (x[0], *v, x[1]),
    }[name]
    op = cuda_cases.operator(Case(op_class(name)(**options), inputs))
    by, device = provider(cuda_cases.kernels_of(op)), EmulatedDevice()
    found = []
    for offset in (0, 4):
        held = []

        def placed(t: TensorType, offset: int = offset, held: list[Any] = held) -> Buffer:
            at, memory = device.allocate(t.nbytes + 64)
            held.append(memory)
            return Buffer(at + offset, t)

        parts = [
            [placed(t) for t in ts]
            for ts in ([v.type for v in op.reads()], [v.type for v in op.writes()], by.scratch(op))
        ]
        for b, a in zip(parts[0], inputs, strict=True):
            device.upload(b, a)
        for call in by.bind(op, *parts):
            device.prepare(call)()
        found.append([device.download(b) for b in parts[1]])
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)
