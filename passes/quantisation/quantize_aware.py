"""Quantisation-aware training: weights and activations are rounded to 8 bits in the forward pass."""

from __future__ import annotations

from collections.abc import Iterable

from ...errors import UsageError, nearest
from ...language.builder import Builder
from ...language.ir import Block, Operator, Role, Value
from ...language.types import TensorType
from ...ops.norm.batch_norm import RunningUpdate
from ...ops.quantisation.fake_quantize import FakeQuantize
from ...ops.quantisation.ranges import MovingRange, RangeScale, RangeZero
from ...support.patterns import Patterns
from ..base import Pass
from ..matching.graph import Graph
from .layers import Layer, end_of, layers_of, named, root_of


class QuantizeAware(Pass):
    """Round the weights and activations of convolutions and products as an 8-bit model will.

    For the forward pass, before differentiation.  Weights get a scale for each output channel, that of their largest
    element; activations one scale and zero point, from moving averages of their least and largest elements, which are
    new buffers.  `layers`, `skip`: globs of layers, by the names of their weights or outputs; `skip_first`,
    `skip_last`: leave those out.  `low`, `high`: the integers of activations; `levels`: the largest of weights.
    """

    layers: tuple[str, ...] = ("*",)
    skip: tuple[str, ...] = ()
    skip_first: bool = False
    skip_last: bool = False
    low: int = 0
    high: int = 255
    levels: int = 127
    momentum: float = 0.99

    def run(self, block: Block) -> Block:
        """UsageError where a glob matches no layer, or nothing is left."""
        if any(op.op.name == "FakeQuantize" for op in block.operators):
            raise UsageError(f"program '{block.name}' is prepared for quantisation already")
        return _Rewrite(self, block).run(self.chosen(block))

    def chosen(self, block: Block) -> list[Layer]:
        """The layers to quantise, in order."""
        layers = layers_of(block)
        if not layers:
            raise UsageError(
                f"program '{block.name}' has nothing to quantize: no Conv, Gemm or MatMul of float32 or float64 reads "
                "a weight of its own"
            )
        wanted, skipped = Patterns(self.layers), Patterns(self.skip)
        names = {n for layer in layers for n in named(block, layer)}
        useless = wanted.useless(names) or skipped.useless(names)
        if useless is not None:
            raise UsageError(f"no Conv, Gemm or MatMul has a weight or output '{useless}'{nearest(useless, names)}")
        layers = layers[int(self.skip_first) : len(layers) - int(self.skip_last)]
        layers = [
            layer
            for layer in layers
            if any(map(wanted.fit, named(block, layer))) and not any(map(skipped.fit, named(block, layer)))
        ]
        if not layers:
            raise UsageError("no layer is left to quantize: all were skipped")
        return layers


class _Rewrite:
    """Inserts operators into a block, and renames what the layers read."""

    def __init__(self, options: QuantizeAware, block: Block) -> None:
        self.options, self.block = options, block
        self.b = Builder.on(block)
        self.producers, self.readers = block.producers(), block.consumers()
        self.buffers: list[Value] = []
        #: position → operators that come before it
        self.added: dict[int, list[Operator]] = {}
        #: position → what its operator reads in place of what
        self.reading: dict[int, dict[str, Value]] = {}

    def run(self, layers: Iterable[Layer]) -> Block:
        chosen = list(layers)
        graph = Graph(self.block)
        held = {v.name for v in (*self.block.parameters, *self.block.buffers)}
        roots: dict[str, Value] = {}
        weights: dict[tuple[str, int], Value] = {}
        for layer in chosen:
            x, end = root_of(graph, layer.x), end_of(graph, held, layer)
            roots.update((v.name, v) for v in (x, end) if v is not None)
        for v in roots.values():
            self.activation(v)
        for layer in chosen:
            self.weight(layer, weights)
        result: list[Operator] = []
        for i, op in enumerate(self.block.operators):
            result += self.added.get(i, ())
            result.append(op.reading(self.reading[i]) if i in self.reading else op)
        return self.block.with_operators(
            result, buffers=(*self.block.buffers, *self.buffers), constants=(*self.block.constants, *self.b.constants)
        )

    def weight(self, layer: Layer, known: dict[tuple[str, int], Value]) -> None:
        """Rounds a weight, with a scale for each index of its axis of output channels."""
        w, axis = layer.weight, layer.axis
        quantized = known.get((w.name, axis))
        if quantized is None:
            b = self.begin(w)
            axes = tuple(i for i in range(w.ndim) if i != axis)
            ends = (b.ReduceMin(w, axes=axes), b.ReduceMax(w, axes=axes)) if axes else (w, w)
            scale = b.emit(RangeScale(steps=self.options.levels, symmetric=1), *ends, name=f"{w.name}.scale")
            op = FakeQuantize(low=-self.options.levels, high=self.options.levels)
            quantized = b.emit(op, w, scale, b.constant(0, w), name=f"{w.name}.quantized")
            known[w.name, axis] = quantized
            self.insert(layer.reader)
        self.reading.setdefault(layer.reader, {})[w.name] = quantized

    def activation(self, v: Value) -> None:
        """Rounds an activation for all that reads it in the forward pass, within a range that follows it."""
        readers = [i for i in self.readers.get(v.name, ()) if self.block.operators[i].role is Role.FORWARD]
        producer = self.producers.get(v.name)
        b, o = self.begin(v), self.options
        b.prefix = v.name
        ends = []
        for upper, batch in enumerate((b.ReduceMin(v, keepdims=0), b.ReduceMax(v, keepdims=0))):
            name = self.b.names.take(f"{v.name}.range_{'high' if upper else 'low'}")
            running = Value(name, TensorType(v.dtype, ()))
            self.buffers.append(running)
            now = b.emit(MovingRange(upper=upper, momentum=o.momentum), running, batch)
            b.emit(RunningUpdate(momentum=0.0), running, now)
            ends.append(now)
        scale = b.emit(RangeScale(steps=o.high - o.low), *ends, name=f"{v.name}.scale")
        zero = b.emit(RangeZero(low=o.low, high=o.high), ends[0], scale, name=f"{v.name}.zero")
        quantized = b.emit(FakeQuantize(low=o.low, high=o.high), v, scale, zero, name=f"{v.name}.quantized")
        self.insert(readers[0] if producer is None else producer + 1)
        for i in readers:
            self.reading.setdefault(i, {})[v.name] = quantized

    def begin(self, v: Value) -> Builder:
        self.b.operators, self.b.prefix = [], v.name
        return self.b

    def insert(self, at: int) -> None:
        self.added.setdefault(at, []).extend(self.b.operators)
