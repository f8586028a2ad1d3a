"""What cuDNN is asked for, by a stand-in that computes the same on the host."""

from __future__ import annotations

import enum
import sys
import types
from typing import Any

import cudnn_nowhere
import numpy as np
import pytest
from convolution_cases import CASES, KINDS, applied, case, in_form, reference

from recompute.ops.convolution.conv import Conv, ConvGradInput, ConvGradWeight
from recompute.runtime.cuda.device import cudnn as library
from recompute.runtime.cuda.device import emulator
from recompute.runtime.cuda.device.kernel import Buffer, Library
from recompute.runtime.cuda.providers import cudnn

pytestmark = pytest.mark.skipif(not emulator.compiler(), reason="no C++ compiler")


class Tensor(cudnn_nowhere.Tensor):
    """A tensor of a graph, of float32."""

    def set_data_type(self, kind: Any) -> None:
        assert kind == "FLOAT"

    def set_alignment(self, to: int) -> None:
        assert to in (4, 16)

    def at(self, address: int) -> np.ndarray:
        span = 1 + sum((d - 1) * s for d, s in zip(self.dim, self.stride, strict=True))
        flat = np.frombuffer((np.ctypeslib.ctypes.c_float * span).from_address(address), np.float32)
        return np.lib.stride_tricks.as_strided(flat, self.dim, [4 * s for s in self.stride])


class Graph:
    """A graph of one convolution; `too_much`: no engine does with less workspace."""

    too_much = False

    def __init__(self, **_: Any) -> None:
        self.calls: list[str] = []

    def tensor(self, name: str, dim: list[int], stride: list[int], data_type: str) -> Tensor:
        return Tensor(dim, stride)

    def _made(self, kind: str, given: list[Tensor], options: dict[str, Any]) -> Tensor:
        self.kind, self.given, self.options, self.out = kind, given, options, Tensor()
        return self.out

    def conv_fprop(self, image: Tensor, weight: Tensor, **options: Any) -> Tensor:
        return self._made("output", [image, weight], options)

    def conv_dgrad(self, loss: Tensor, filter: Tensor, **options: Any) -> Tensor:
        return self._made("input", [filter, loss], options)

    def conv_wgrad(self, image: Tensor, loss: Tensor, **options: Any) -> Tensor:
        return self._made("weight", [image, loss], options)

    def __getattr__(self, name: str) -> Any:
        def called(*args: Any) -> Any:
            self.calls.append(name)
            if name == "get_workspace_size":
                return (1 << 40) if self.too_much else 8

        return called

    def operator(self) -> Any:
        o = {k: tuple(v) for k, v in self.options.items()}
        shapes = [tuple(t.dim) for t in self.given]
        x, w = {"output": (*shapes,), "input": (tuple(self.out.dim), shapes[0]),
                "weight": (shapes[0], tuple(self.out.dim))}[self.kind]  # fmt: skip
        fields = {"strides": o["stride"], "pads": (*o["pre_padding"], *o["post_padding"]), "dilations": o["dilation"],
                  "group": x[1] // w[1]}  # fmt: skip
        conv = Conv(**fields)
        y = {"output": tuple(self.out.dim)}.get(self.kind, shapes[1])
        assert conv.infer(*(cudnn.TensorType("f32", s) for s in (x, w)))[0].shape == y, "cuDNN counts other windows"
        return {"output": conv, "input": ConvGradInput(shape=x[2:], **fields),
                "weight": ConvGradWeight(kernel=w[2:], **fields)}[self.kind]  # fmt: skip

    def _execute(self, addresses: dict[int, int], workspace: int, handle: int) -> None:
        assert handle == 7
        assert self.calls[:4] == ["validate", "build_operation_graph", "create_execution_plans",
                                  "deselect_numeric_notes"]  # fmt: skip
        arrays = [np.ascontiguousarray(t.at(addresses[id(t)])) for t in self.given]
        self.out.at(addresses[id(self.out)])[...] = reference(self.operator(), arrays)


@pytest.fixture(params=["classic", "1.32"])
def provider(request: Any, monkeypatch: Any) -> Any:
    """The provider with a stand-in for the package, in an older form and in a newer one."""
    names = (*cudnn._UNWANTED, "NONDETERMINISTIC", "DOWN_CONVERT_INPUTS", "TENSOR_CORE")
    fake = types.ModuleType("cudnn")
    fake.__dict__.update(
        data_type=types.SimpleNamespace(FLOAT="FLOAT", HALF="HALF", BFLOAT16="BFLOAT16"), pygraph=Graph,
        heur_mode=types.SimpleNamespace(A=0, FALLBACK=1), numerical_note=enum.Enum("Note", names),
        create_handle=lambda: 7, set_stream=lambda handle, stream: None,
    )  # fmt: skip
    if request.param == "1.32":
        fake.__dict__.update(
            pygraph=None, _pybind_module=types.SimpleNamespace(backend_graph=Graph),
            create_handle=lambda: types.SimpleNamespace(backend_handle=7),
        )  # fmt: skip
    library._handle.cache_clear()
    monkeypatch.setitem(sys.modules, "cudnn", fake)
    monkeypatch.setattr(library, "current_device", lambda: 0)
    cudnn.plan.cache_clear()
    yield cudnn.Cudnn()
    cudnn.plan.cache_clear()
    library._handle.cache_clear()


def run(provider: Any, op: Any, arrays: list[np.ndarray], offset: int = 0) -> np.ndarray:
    bound = applied(op, *arrays)
    assert provider.accepts(bound)
    device = emulator.EmulatedDevice()

    def buffer(t: Any, a: Any = None) -> Buffer:
        address, memory = device.allocate(t.nbytes + 64)
        held.append(memory)
        found = Buffer(address + offset, t)
        if a is not None:
            device.upload(found, a)
        return found

    held: list[Any] = []
    ins = [buffer(v.type, a) for v, a in zip(bound.inputs, arrays, strict=True)]  # type: ignore[union-attr]
    out = buffer(bound.outputs[0].type)  # type: ignore[union-attr]
    for c in provider.bind(bound, ins, [out], [buffer(t) for t in provider.scratch(bound)]):
        c.run(0) if isinstance(c, Library) else device.prepare(c)()
    return device.download(out)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_convolutions(kind: str, last: bool, provider: Any) -> None:
    for name, (attributes, _, ws) in CASES.items():
        if (ws[1] == 1 and attributes.get("group", 1) > 1) or name in ("1x1", "1x1 many", "big step"):
            continue
        op, arrays = case(name, kind)
        exact = reference(op, arrays)
        op, arrays = in_form(op, arrays) if last else (op, arrays)
        found = run(provider, op, arrays, 4 if name == "uneven" else 0)
        found = np.moveaxis(found, -1, 1) if last and kind != "weight" else found
        np.testing.assert_allclose(found, exact, rtol=1e-4, atol=1e-3, err_msg=name)


def test_what_is_left_to_others(provider: Any, monkeypatch: Any) -> None:
    for name in ("depthwise", "1x1", "depth multiplier", "depthwise line"):
        op, arrays = case(name, "output")
        assert not provider.accepts(applied(op, *arrays))
    op, arrays = case("3x3", "output")
    assert not provider.accepts(applied(op, *(a.astype(np.float64) for a in arrays)))
    monkeypatch.setattr(Graph, "too_much", True)
    cudnn.plan.cache_clear()
    assert not provider.accepts(applied(op, *arrays))
    monkeypatch.setattr(Graph, "validate", lambda self: 1 / 0, raising=False)
    cudnn.plan.cache_clear()
    assert cudnn.plan(*provider_key(op, arrays), 0, tf32=False) == "ZeroDivisionError: division by zero"


def provider_key(op: Any, arrays: list[np.ndarray]) -> tuple[Any, str]:
    found = cudnn.convolved(applied(op, *arrays))
    assert found is not None
    return found, "f32"


def test_it_is_not_there_without_a_device() -> None:
    if library.unavailable():
        from recompute.language.kernels import PROVIDERS

        assert "cudnn" not in PROVIDERS
