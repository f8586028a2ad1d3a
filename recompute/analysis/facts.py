"""The parts of a network, derived from its program and not from its name: its layers, and the rest."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..cost import operator_cost
from ..language.ir import Block, Operator, Value
from ..ops.convolution.conv import Conv
from ..ops.linear.products import Gemm, MatMul
from ..passes.pipelines.repeats import repeats, segments

#: values of so many times the elements that cross between layers are what fused attention does not keep
_SCORES = 8


@dataclass(frozen=True)
class Facts:
    """A forward pass for one sample: `layers` identical ones, and the rest.

    `layer_*`: of one layer; `fixed_*`: of all that is no such layer.  `flops`: floating-point operations; `parameters`:
    elements; `stream`: elements that cross from layer to layer; `layer_kept`: elements that products read, which the
    backward pass needs.  `seq`: the length of sequences of numbers (1: there are none); `experts`: matrices of a layer
    behind one another (1: there are none), whose parts of the layer are `expert_*`.
    """

    layers: int
    layer_flops: float
    layer_parameters: int
    layer_kept: int
    stream: int
    fixed_flops: float
    fixed_parameters: int
    seq: int = 1
    experts: int = 1
    expert_flops: float = 0
    expert_parameters: int = 0
    expert_kept: int = 0

    @property
    def parameters(self) -> int:
        """Number of parameters of the network."""
        return self.layers * self.layer_parameters + self.fixed_parameters

    def step_flops(self, batch: int) -> float:
        """FLOPs of the forward and backward pass of a batch, nothing recomputed (what MFU counts)."""
        return 3 * batch * (self.layers * self.layer_flops + self.fixed_flops)


def facts_of(block: Block) -> Facts:
    """The facts of a forward pass at batch 1.  A network without repeated layers is one layer."""
    groups = segments(block)
    runs = list(repeats(groups))
    common = Counter(groups[first].signature for first, _ in runs).most_common(1)
    layers = [(first, size) for first, size in runs if groups[first].signature == common[0][0]] if runs else []
    total = _flops(block.operators)
    if not layers:
        kept = _kept(block, block.operators)
        stream = max((v.size for v in _values(block, [s.made for s in groups])), default=1)
        parameters, more = sum(v.size for v in block.parameters), _divisible(block, block.operators)
        return Facts(1, total, parameters, kept, stream, 0, 0, **more)
    first, size = layers[0]
    operators = [block.operators[i] for s in groups[first : first + size] for i in s.operators]
    names = {v.name for o in operators for v in o.reads()}
    parameters = sum(v.size for v in block.parameters if v.name in names)
    (border,) = _values(block, [groups[first].made])
    count, flops = len(layers) + 1, _flops(operators)
    kept = _kept(block, operators, _SCORES * border.size)
    rest = sum(v.size for v in block.parameters) - count * parameters
    fixed = max(0.0, total - count * flops), max(0, rest)
    return Facts(count, flops, parameters, kept, border.size, *fixed, **_divisible(block, operators))


def _divisible(block: Block, operators: Sequence[Operator]) -> dict[str, Any]:
    """The length of the first input that is a table of numbers of words; of some operators, how many matrices their
    parameters stack, and FLOPs of these products, elements of the matrices, and what the products read besides."""
    seq = next((v.shape[1] for v in block.inputs if v.ndim == 2 and not v.type.is_float), 1)
    stacked = {v.name: v for v in block.parameters if v.ndim == 3}
    products = [o for o in operators if isinstance(o.op, MatMul) and any(v.name in stacked for v in o.reads())]
    weights = {v.name: v for o in products for v in o.reads() if v.name in stacked}
    return {
        "seq": seq,
        "experts": math.gcd(*(v.shape[0] for v in weights.values())) or 1,
        "expert_flops": _flops(products),
        "expert_parameters": sum(v.size for v in weights.values()),
        "expert_kept": _kept(block, products),
    }


def _flops(operators: Iterable[Operator]) -> float:
    return float(sum(operator_cost(o).flops for o in operators))


def _values(block: Block, names: Sequence[str]) -> list[Value]:
    values = block.values()
    return [values[n] for n in names]


def _kept(block: Block, operators: Iterable[Operator], most: int = 1 << 62) -> int:
    """Elements of different values that products read, but for parameters and for values of more than `most`."""
    declared = {v.name for v in block.persistent()}
    sizes = {
        v.name: v.size
        for o in operators
        if isinstance(o.op, (MatMul, Gemm, Conv))
        for v in o.reads()
        if v.name not in declared and v.size <= most
    }
    return sum(sizes.values())
