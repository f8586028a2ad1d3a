"""Convolutions and matrix products by oneDNN, if its library is installed.

A convolution's activations stay as they are, its weights get what layout the library likes.  A matrix product is cut
into tiles as BLAS's are (runtime/cpu/providers/blas.py), each of them one call in one thread; so are the products of a
head's loss, whose other kernels are numba's (runtime/cpu/kernels/linear_loss.py).

A plan holds the library's primitives for one product; it depends on the product and the number of threads only, and is
made once.  Packed weights and scratchpads are the operator's workspace: nothing is allocated when a step runs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ....language.kernels import register
from ....language.types import TensorType
from ....ops.linear.products import Gemm, MatMul
from ....ops.loss.linear_cross_entropy import LinearLoss
from ...shared.convolved import Convolved, convolved, operands
from ...shared.trouble import LIBRARY
from ..code.emit import Code, module
from ..device import dnnl, jit, native
from ..device.native import Call
from ..families import FAMILIES
from . import blas
from .blas import product, product_calls

if TYPE_CHECKING:
    from ....language.ir import Operator

#: what a primitive's argument is: the operator's x, w, y, bias, or one of the plan's buffers
_ARGUMENTS = {
    "output": {"x": dnnl.SRC, "w": dnnl.WEIGHTS, "y": dnnl.DST, "bias": dnnl.BIAS},
    "input": {"x": dnnl.DIFF_SRC, "w": dnnl.WEIGHTS, "y": dnnl.DIFF_DST},
    "weight": {"x": dnnl.SRC, "w": dnnl.DIFF_WEIGHTS, "y": dnnl.DIFF_DST},
}


@dataclass(frozen=True)
class Stage:
    """One primitive and its arguments: number → (layout, name of the buffer)."""

    primitive: int
    arguments: tuple[tuple[int, tuple[int, str]], ...]
    implementation: str


@dataclass(frozen=True)
class Plan:
    """Primitives in order, and the bytes of the buffers "packed" and "scratchpad" where they are needed."""

    stages: tuple[Stage, ...]
    buffers: tuple[tuple[str, int], ...]


def unavailable() -> str:
    """Why oneDNN cannot run here; "" where it can."""
    if why := native.unavailable():
        return why
    found = dnnl.load()
    return found if isinstance(found, str) else ""


def strides(shape: Sequence[int], *, last: bool) -> tuple[int, ...]:
    """Of a dense [n, c, spatial...], in elements; `last`: the channels lie innermost."""
    order = [0, *range(2, len(shape)), 1] if last else range(len(shape))
    found, step = [0] * len(shape), 1
    for axis in reversed(order):
        found[axis] = step
        step *= shape[axis]
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def plan(c: Convolved) -> Plan | str:
    """The primitives of a product, or why the library refuses it."""
    if why := unavailable():
        return why
    lib = dnnl.load()
    assert isinstance(lib, dnnl.Library)
    native.announce_threads()
    try:
        return _Maker(lib, c).plan()
    except dnnl.DnnlError as e:
        return str(e)


class _Maker:
    """Makes a plan."""

    def __init__(self, lib: dnnl.Library, c: Convolved) -> None:
        self.lib, self.c = lib, c
        self.stages: list[Stage] = []
        self.scratchpad = 0

    def plan(self) -> Plan:
        """Weights packed, the convolution, weights unpacked or the bias added."""
        c, lib, g = self.c, self.lib, self.c.geometry
        shape = c.w if g.group == 1 else (g.group, g.mg, g.cg, *g.window.kernel)
        x, y = (lib.layout(s, strides(s, last=c.last)) for s in (c.x, c.y))
        given, any_ = lib.layout(shape, strides(shape, last=False)), lib.layout(shape, None)
        bias = lib.layout(c.w[:1], (1,)) if c.bias and c.kind == "output" else 0
        window = (g.window.strides, g.window.dilations, g.window.begin, c.end)
        main = lib.convolution(c.kind, (x, any_, y), bias, window)
        which = _ARGUMENTS[c.kind]
        wanted = lib.wanted(main, which["w"])
        packed = "w" if lib.same(wanted, given) else "packed"
        arguments = {which["x"]: (x, "x"), which["y"]: (y, "y"), which["w"]: (wanted, packed)}
        if bias:
            arguments[which["bias"]] = (bias, "bias")
        if packed != "w" and c.kind != "weight":
            self.add(lib.reorder(given, wanted), {dnnl.SRC: (given, "w"), dnnl.DST: (wanted, packed)})
        self.add(main, arguments)
        if packed != "w" and c.kind == "weight":
            self.add(lib.reorder(wanted, given), {dnnl.SRC: (wanted, packed), dnnl.DST: (given, "w")})
        if c.bias and c.kind == "input":
            channels = (1, c.x[1], *(1 for _ in c.x[2:]))
            one = lib.layout(channels, strides(channels, last=False))
            self.add(lib.add(x, one, x), {dnnl.SRC: (x, "x"), dnnl.SRC1: (one, "bias"), dnnl.DST: (x, "x")})
        buffers = [("packed", lib.nbytes(wanted))] if packed != "w" else []
        if self.scratchpad:
            buffers.append(("scratchpad", self.scratchpad))
        return Plan(tuple(self.stages), tuple(buffers))

    def add(self, descriptor: int, arguments: dict[int, tuple[int, str]]) -> None:
        """One more primitive, with its scratchpad."""
        lib = self.lib
        layout = lib.wanted(descriptor, dnnl.SCRATCHPAD)
        needed = lib.nbytes(layout) if layout else 0
        if needed:
            arguments = {**arguments, dnnl.SCRATCHPAD: (layout, "scratchpad")}
            self.scratchpad = max(self.scratchpad, needed)
        name = lib.implementation(descriptor)
        self.stages.append(Stage(lib.primitive(descriptor), tuple(arguments.items()), name))


class OneDnnProvider:
    """Conv, its gradients and ConvTranspose in both layouts, MatMul and Gemm, heads' losses; float32."""

    name = "onednn"

    def accepts(self, op: Operator) -> bool:
        """What the library has good code for: its reference implementations are slower than ours."""
        if isinstance(op.op, (MatMul, Gemm)):
            return (
                op.outputs[0] is not None
                and op.outputs[0].dtype == "f32"
                and not unavailable()
                and product(op) is not None
            )
        if isinstance(op.op, LinearLoss):
            return op.inputs[0] is not None and op.inputs[0].dtype == "f32" and _family(op) is not None
        c = convolved(op)
        found = None if c is None else plan(c)
        return isinstance(found, Plan) and not any(s.implementation.startswith("ref") for s in found.stages)

    def reason(self) -> str:
        """Why it accepts nothing; "" where it does."""
        return unavailable()

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """Packed weights and scratchpad."""
        if isinstance(op.op, (MatMul, Gemm)):
            return ()
        if isinstance(op.op, LinearLoss):
            return _family(op).scratch(op)
        return tuple(TensorType("u8", (n,)) for _, n in _planned(op).buffers)

    def bind(self, op: Operator, ins: Sequence[Any], outs: Sequence[Any], scratch: Sequence[Any]) -> list[Call]:
        """One call for each primitive; the library's threads are those of the step."""
        lib = dnnl.load()
        assert isinstance(lib, dnnl.Library)
        if isinstance(op.op, (MatMul, Gemm)):
            return product_calls(op, ins, outs, blas.Routine(lib.sgemm, status=True))
        if isinstance(op.op, LinearLoss):
            given, made = (*ins, None, None), (*outs, *[None] * 4)
            return _family(op).calls(op, given, made, scratch, blas.Routine(lib.sgemm, status=True))
        found = _planned(op)
        arrays = dict(zip(("x", "w", "y", "bias"), operands(op, ins, outs), strict=True))
        arrays |= {name: a for (name, _), a in zip(found.buffers, scratch, strict=True)}
        kernel = native.compile_ir(_execute())
        calls = []
        for s in found.stages:
            given = {which: (layout, arrays[name].ctypes.data) for which, (layout, name) in s.arguments}
            arguments = lib.arguments(given)
            words = (lib.execute, s.primitive, lib.stream, arguments.count, arguments, native.STATUS)
            calls.append(Call(kernel, (*words, *(a for a in arrays.values() if a is not None)), parallel=False))
        return calls


def _family(op: Operator) -> Any:
    """The kernels between the products of a head's loss; None where they cannot run."""
    return None if jit.unavailable() else FAMILIES.find(op)


def _planned(op: Operator) -> Plan:
    c = convolved(op)
    found = None if c is None else plan(c)
    assert isinstance(found, Plan), found
    return found


@functools.cache
def _execute() -> str:
    """IR: (execute, primitive, stream, count, arguments, status cell)."""
    f = Code()
    execute, primitive, stream = (f.word("%args", i, "ptr") for i in range(3))
    count = f.let(f"trunc i64 {f.word('%args', 3)} to i32")
    arguments, cell = (f.word("%args", i, "ptr") for i in (4, 5))
    status = f.let(f"call i32 {execute}(ptr {primitive}, ptr {stream}, i32 {count}, ptr {arguments})")
    with f.when(f.let(f"icmp ne i32 {status}, 0")):
        f.set(cell, "i64", f.add(f.let(f"sext i32 {status} to i64"), LIBRARY))
    return module(f)


if not unavailable():
    register(OneDnnProvider())
