"""LLaMA (arXiv 2302.13971, 2307.09288 and, the third, 2407.21783): RMSNorm, rotary embedding, grouped heads, SwiGLU.

Parameters have the names of the usual PyTorch port without `model.`; the weights of MatMul are stored [in, out].
The graph is what exporters make of that port: the cosines and sines are constants, the mask is computed of positions,
and the heads of keys and values are repeated by Expand.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..errors import UsageError
from .common import BATCH, ONES, Init, InputSpec, Net, integers
from .registry import Family, Variant, register

_STD = 0.02
_MASKED = float(np.finfo(np.float32).min)


def _variant(size: str, *, batches: tuple[int, int], **options: int) -> Variant:
    description = "LLaMA {}: {layers} layers of {hidden}, {heads} heads".format(size, **options)
    return Variant(f"llama-{size}", description, *batches, options)


def _third(size: str, **options: int) -> Variant:
    """A network of LLaMA 3; the largest has no number in its name, as there is no other of its size."""
    description = "LLaMA 3 {}: {layers} layers of {hidden}, {heads} heads".format(size, **options)
    name = "llama-405b" if size == "405b" else f"llama3-{size}"
    return Variant(name, description, 1, 1, {**options, "groups": 8, "seq": 8192, "vocab": 128256, "theta": 500000})


@register(
    _variant("tiny", batches=(8, 64), layers=2, hidden=128, inner=352, heads=4, groups=2, vocab=2000, seq=128),
    _variant("block", batches=(1, 4), layers=1, hidden=1024, inner=2816, heads=16, groups=4, seq=2048),
    _variant("7b", batches=(1, 4), layers=32, hidden=4096, inner=11008, heads=32, groups=32, seq=4096),
    _variant("13b", batches=(1, 4), layers=40, hidden=5120, inner=13824, heads=40, groups=40, seq=4096),
    _variant("70b", batches=(1, 1), layers=80, hidden=8192, inner=28672, heads=64, groups=8, seq=4096),
    _third("8b", layers=32, hidden=4096, inner=14336, heads=32),
    _third("70b", layers=80, hidden=8192, inner=28672, heads=64),
    _third("405b", layers=126, hidden=16384, inner=53248, heads=128),
)
@dataclass(frozen=True)
class Llama(Family):
    """input_ids int64 [N, seq] to logits float32 [N, seq, vocab].

    `inner` is the width of SwiGLU, `groups` the heads of keys and values, `theta` the base of the rotary angles.
    """

    task: ClassVar[str] = "language-model"

    layers: int = 32
    hidden: int = 4096
    inner: int = 11008
    heads: int = 32
    groups: int = 32
    seq: int = 4096
    vocab: int = 32000
    theta: int = 10000

    def __post_init__(self) -> None:
        if self.hidden % (2 * self.heads):
            raise UsageError(f"option 'hidden' ({self.hidden}) must be a multiple of twice 'heads' ({self.heads})")
        if self.heads % self.groups:
            raise UsageError(f"option 'heads' ({self.heads}) must be a multiple of 'groups' ({self.groups})")

    @property
    def size(self) -> int:
        """The width of a head."""
        return self.hidden // self.heads

    def inputs(self) -> tuple[InputSpec, ...]:
        return (integers("input_ids", (BATCH, self.seq), high=self.vocab),)

    def label(self) -> InputSpec:
        return integers("label", (BATCH, self.seq), high=self.vocab)

    def checkpoints(self) -> tuple[str, ...]:
        return ("embed_tokens.out", *(f"layers.{index}.out" for index in range(self.layers)))

    def build(self, net: Net) -> None:
        table = net.parameter("embed_tokens.weight", (self.vocab, self.hidden), Init("normal", _STD))
        x = net.add("Gather", [table, "input_ids"], "embed_tokens.out")
        mask = self._causal_mask(net)
        for index in range(self.layers):
            x = self._attention(net, x, mask, f"layers.{index}")
            x = self._feed_forward(net, x, f"layers.{index}")
        x = self._norm(net, x, "norm")
        self._linear(net, x, "lm_head", sizes=(self.hidden, self.vocab), out="logits")
        net.output("logits", (BATCH, self.seq, self.vocab))

    def _attention(self, net: Net, x: str, mask: str, layer: str) -> str:
        """x + o_proj(attention(norm(x))), called `<layer>.self_attn.out`."""
        name = f"{layer}.self_attn"
        y = self._norm(net, x, f"{layer}.input_layernorm")
        query = self._rotated(net, self._heads(net, y, f"{name}.q_proj", self.heads))
        key = self._repeated(net, self._rotated(net, self._heads(net, y, f"{name}.k_proj", self.groups)))
        value = self._repeated(net, self._heads(net, y, f"{name}.v_proj", self.groups))
        key = net.add("Transpose", [key], f"{name}.key", perm=[0, 1, 3, 2])
        parts = (query, key, value)
        y = net.attention(parts, mask, name, size=self.size, hidden=self.hidden, dropout=0)
        y = self._linear(net, y, f"{name}.o_proj", sizes=(self.hidden, self.hidden))
        return net.add("Add", [x, y], f"{name}.out")

    def _heads(self, net: Net, x: str, name: str, heads: int) -> str:
        """[N, seq, hidden] to [N, heads, seq, size]."""
        y = self._linear(net, x, name, sizes=(self.hidden, heads * self.size))
        split = net.constant(f"heads{heads}.shape", [0, 0, heads, self.size])
        y = net.add("Reshape", [y, split], f"{name}.split")
        return net.add("Transpose", [y], f"{name}.heads", perm=[0, 2, 1, 3])

    def _rotated(self, net: Net, x: str) -> str:
        """Rotary embedding (Su et al. 2021, arXiv 2104.09864), the halves of a head being the pairs."""
        cosines = net.constant_once("rotary.cos", lambda: np.cos(self._angles()).astype(np.float32))
        sines = net.constant_once("rotary.sin", lambda: np.sin(self._angles()).astype(np.float32))
        low, high = (f"{x}.{part}" for part in ("low", "high"))
        net.add_many("Split", [x], [low, high], name=f"{x}.halves", axis=-1, num_outputs=2)
        turned = net.add("Concat", [net.add("Neg", [high], f"{high}.negative"), low], f"{x}.turned", axis=-1)
        y = net.add("Mul", [x, cosines], f"{x}.cos")
        return net.add("Add", [y, net.add("Mul", [turned, sines], f"{x}.sin")], f"{x}.rotated")

    def _angles(self) -> np.ndarray:
        """float64 [seq, size]: the angle by which each pair of a position is turned."""
        half = self.size // 2
        return np.tile(np.outer(np.arange(self.seq), float(self.theta) ** (-np.arange(half) / half)), 2)

    def _repeated(self, net: Net, x: str) -> str:
        """[N, groups, seq, size] to [N, heads, seq, size]: each head as often as query heads share it."""
        if self.groups == self.heads:
            return x
        copies = net.constant("repeat.shape", [1, 1, self.heads // self.groups, 1, 1])
        y = net.add("Unsqueeze", [x, net.constant("repeat.axis", [2])], f"{x}.grouped")
        y = net.add("Expand", [y, copies], f"{x}.copies")
        return net.add("Reshape", [y, net.constant("repeated.shape", [0, self.heads, self.seq, self.size])], f"{x}.all")

    def _causal_mask(self, net: Net) -> str:
        """float32 [seq, seq]: 0 where a position may look, the lowest number at what comes after it."""
        keys = net.constant("keys", np.arange(self.seq))
        queries = net.constant("queries", np.arange(self.seq)[:, None])
        seen = net.add("LessOrEqual", [keys, queries], "causal_mask.seen")
        return net.add("Where", [seen, net.constant("zero", 0.0), net.constant("lowest", _MASKED)], "causal_mask")

    def _feed_forward(self, net: Net, x: str, layer: str) -> str:
        """x + down(silu(gate(norm(x))) * up(norm(x))), called `<layer>.out`."""
        name = f"{layer}.mlp"
        y = self._norm(net, x, f"{layer}.post_attention_layernorm")
        gate = self._linear(net, y, f"{name}.gate_proj", sizes=(self.hidden, self.inner))
        up = self._linear(net, y, f"{name}.up_proj", sizes=(self.hidden, self.inner))
        sigmoid = net.add("Sigmoid", [gate], f"{name}.sigmoid")
        y = net.add("Mul", [net.add("Mul", [gate, sigmoid], f"{name}.silu"), up], f"{name}.gated")
        y = self._linear(net, y, f"{name}.down_proj", sizes=(self.inner, self.hidden))
        return net.add("Add", [x, y], f"{layer}.out")

    def _linear(self, net: Net, x: str, name: str, *, sizes: tuple[int, int], out: str | None = None) -> str:
        """A product without a bias; those into the residual stream start smaller by the root of their number."""
        scale = math.sqrt(2 * self.layers) if name.endswith(("o_proj", "down_proj")) else 1.0
        weight = net.parameter(f"{name}.weight", sizes, Init("normal", _STD / scale))
        return net.add("MatMul", [x, weight], out or name)

    def _norm(self, net: Net, x: str, name: str) -> str:
        """RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467): x / root(mean(x²) + ε) · weight."""
        weight = net.parameter(f"{name}.weight", (self.hidden,), ONES)
        y = net.add("Pow", [x, net.constant("two", 2.0)], f"{name}.squares")
        y = net.add("ReduceMean", [y, net.constant("last.axis", [-1])], f"{name}.mean", keepdims=1)
        y = net.add("Add", [y, net.constant("epsilon", 1e-5)], f"{name}.shifted")
        y = net.add("Reciprocal", [net.add("Sqrt", [y], f"{name}.root")], f"{name}.rate")
        y = net.add("Mul", [x, y], f"{name}.normed")
        return net.add("Mul", [weight, y], name)
