"""Mixtures of experts: LLaMA's layers with several feed-forward networks, two of which serve each token.

The shape `moe-8x7b` is that of Jiang et al. 2024 (arXiv 2401.04088).  Tokens are dealt as by Lepikhin et al. 2020
(GShard, arXiv 2006.16668): within a group of tokens each expert takes `capacity`, first choices before second ones, and
what comes later goes past the experts on the residual stream.  So all shapes are static.  The experts' weights are
stacked, [experts, in, out]: an axis of experts can be cut.
"""

import math
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from ..errors import UsageError
from .common import Init, Net
from .llama import Llama
from .registry import Variant, register

_STD = 0.02


def _variant(size: str, *, batches: tuple[int, int], **options: int) -> Variant:
    form = "Mixture of experts {}: {layers} layers of {hidden}, {experts} experts of {inner}, two of which take a token"
    return Variant(f"moe-{size}", form.format(size, **options), *batches, options)


@register(
    _variant(
        "tiny", batches=(4, 32), layers=2, hidden=64, inner=96, heads=4, groups=2, vocab=1000, seq=64,
        experts=4, tokens=32, capacity=20,
    ),
    _variant(
        "8x7b", batches=(1, 1), layers=32, hidden=4096, inner=14336, heads=32, groups=8, seq=4096,
        experts=8, tokens=4096, capacity=1280, theta=1000000,
    ),
)  # fmt: skip
@dataclass(frozen=True)
class Moe(Llama):
    """input_ids int64 [N, seq] to logits float32 [N, seq, vocab].

    `experts` feed-forward networks of width `inner`; `tokens` are dealt at a time (a divisor of seq), and an expert
    takes `capacity` of them: tokens · 2 / experts is an even share.
    """

    experts: int = 8
    tokens: int = 4096
    capacity: int = 1280

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.experts < 2:
            raise UsageError(f"option 'experts' must be at least 2, as two take each token, not {self.experts}")
        if self.seq % self.tokens:
            raise UsageError(f"option 'seq' ({self.seq}) must be a multiple of 'tokens' ({self.tokens})")

    def _feed_forward(self, net: Net, x: str, layer: str) -> str:
        """x + combined(experts(dispatched(norm(x)))), called `<layer>.out`."""
        name = f"{layer}.moe"
        y = self._norm(net, x, f"{layer}.post_attention_layernorm")
        rows = net.constant("tokens.shape", [-1, self.tokens, self.hidden])
        y = net.add("Reshape", [y, rows], f"{name}.tokens")  # [groups, tokens, hidden]
        dispatch, combine = self._gates(net, y, name)
        taken = net.add("Transpose", [dispatch], f"{name}.dispatch.turned", perm=[0, 2, 1])
        y = net.add("MatMul", [taken, y], f"{name}.taken")  # [groups, experts · capacity, hidden]
        split = net.constant("experts.shape", [-1, self.experts, self.capacity, self.hidden])
        y = net.add("Reshape", [y, split], f"{name}.by_group")
        y = net.add("Transpose", [y], f"{name}.by_expert", perm=[1, 0, 2, 3])
        shape = net.constant("expert.shape", [self.experts, -1, self.hidden])
        y = self._experts(net, net.add("Reshape", [y, shape], f"{name}.own"), name)
        returned = net.constant("returned.shape", [self.experts, -1, self.capacity, self.hidden])
        y = net.add("Reshape", [y, returned], f"{name}.served")
        y = net.add("Transpose", [y], f"{name}.returned", perm=[1, 0, 2, 3])
        slots = net.constant("slots.shape", [-1, self.experts * self.capacity, self.hidden])
        y = net.add("MatMul", [combine, net.add("Reshape", [y, slots], f"{name}.slots")], f"{name}.combined")
        whole = net.constant("sequence.shape", [-1, self.seq, self.hidden])
        return net.add("Add", [x, net.add("Reshape", [y, whole], f"{name}.sequence")], f"{layer}.out")

    def _experts(self, net: Net, x: str, name: str) -> str:
        """down(silu(gate(x)) · up(x)) of each expert, x [experts, groups · capacity, hidden]."""

        def product(x: str, kind: str, sizes: tuple[int, int], std: float) -> str:
            weight = net.parameter(f"{name}.{kind}.weight", (self.experts, *sizes), Init("normal", std))
            return net.add("MatMul", [x, weight], f"{name}.{kind}")

        gate = product(x, "gate_proj", (self.hidden, self.inner), _STD)
        up = product(x, "up_proj", (self.hidden, self.inner), _STD)
        sigmoid = net.add("Sigmoid", [gate], f"{name}.sigmoid")
        y = net.add("Mul", [net.add("Mul", [gate, sigmoid], f"{name}.silu"), up], f"{name}.gated")
        return product(y, "down_proj", (self.inner, self.hidden), _STD / math.sqrt(2 * self.layers))

    def _gates(self, net: Net, x: str, name: str) -> tuple[str, str]:
        """Who takes what, and with which weight: both float32 [groups, tokens, experts · capacity].

        The two weights of a token add up to 1; they are those of the softmax, divided by their sum.
        """
        gate = net.parameter(f"{name}.gate.weight", (self.hidden, self.experts), Init("normal", _STD))
        probs = net.add("Softmax", [net.add("MatMul", [x, gate], f"{name}.gate")], f"{name}.probs", axis=-1)
        first = self._choice(net, probs, f"{name}.first")
        seen = net.add("Cast", [first], f"{name}.first.seen", to=TensorProto.BOOL)
        rest = net.add("Where", [seen, net.constant("minus.one", -1.0), probs], f"{name}.rest")
        second = self._choice(net, rest, f"{name}.second")
        places = self._places(net, first, second, name)
        last = net.constant("last.axis", [-1])
        slots, weights = [], []
        for kind, mask, place in zip(("first", "second"), (first, second), places, strict=True):
            slots.append(self._slot(net, mask, place, f"{name}.{kind}"))
            chosen = net.add("Mul", [probs, mask], f"{name}.{kind}.chosen")
            weights.append(net.add("ReduceSum", [chosen, last], f"{name}.{kind}.weight", keepdims=1))
        total = net.add("Add", weights, f"{name}.total")
        parts = []
        for kind, slot, weight in zip(("first", "second"), slots, weights, strict=True):
            share = net.add("Div", [weight, total], f"{name}.{kind}.share")
            parts.append(net.add("Mul", [slot, share], f"{name}.{kind}.shared"))
        return net.add("Add", slots, f"{name}.dispatch"), net.add("Add", parts, f"{name}.combine")

    def _choice(self, net: Net, scores: str, name: str) -> str:
        """float32 [groups, tokens, experts]: 1 at the expert with the highest score."""
        best = net.add("ArgMax", [scores], f"{name}.best", axis=-1, keepdims=1)
        equal = net.add("Equal", [best, net.constant("expert.numbers", np.arange(self.experts))], f"{name}.equal")
        return net.add("Cast", [equal], f"{name}.mask", to=TensorProto.FLOAT)

    def _places(self, net: Net, first: str, second: str, name: str) -> tuple[str, str]:
        """int64 [groups, tokens, 1] each: which of its expert's tokens it is; all first choices come before second."""
        tokens, last = net.constant("token.axis", 1), net.constant("last.axis", [-1])
        ranks = net.add("CumSum", [first, tokens], f"{name}.first.rank", exclusive=1)
        later = net.add("CumSum", [second, tokens], f"{name}.second.rank", exclusive=1)
        taken = net.add("ReduceSum", [first, net.constant("token.axes", [1])], f"{name}.first.taken", keepdims=1)
        places = []
        for kind, mask, rank in (
            ("first", first, ranks),
            ("second", second, net.add("Add", [later, taken], f"{name}.second.after")),
        ):
            product = net.add("Mul", [rank, mask], f"{name}.{kind}.own")
            place = net.add("ReduceSum", [product, last], f"{name}.{kind}.place", keepdims=1)
            places.append(net.add("Cast", [place], f"{name}.{kind}.number", to=TensorProto.INT64))
        return places[0], places[1]

    def _slot(self, net: Net, mask: str, place: str, name: str) -> str:
        """float32 [groups, tokens, experts · capacity]: 1 at the token's slot, nowhere if its expert is full."""
        numbers = net.constant("slot.numbers", np.arange(self.capacity))
        slot = net.add(
            "Cast", [net.add("Equal", [place, numbers], f"{name}.here")], f"{name}.slot", to=TensorProto.FLOAT
        )
        expert = net.add("Unsqueeze", [mask, net.constant("slot.axis", [3])], f"{name}.expert")
        slot = net.add("Unsqueeze", [slot, net.constant("expert.axis", [2])], f"{name}.slot.all")
        y = net.add("Mul", [expert, slot], f"{name}.slots")
        return net.add(
            "Reshape", [y, net.constant("flat.shape", [-1, self.tokens, self.experts * self.capacity])], f"{name}.flat"
        )
