"""GPT-2 (Radford et al. 2019): pre-norm, causal attention, tanh GELU, the output tied to the embedding.

Parameters have the names and layouts of the usual PyTorch port (its linear layers store [in, out] too).
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..errors import UsageError
from ._pre_norm import STD, Parts, PreNorm
from .common import BATCH, Init, InputSpec, Net, integers
from .registry import Variant, register

_MASKED = float(np.finfo(np.float32).min)


def _variant(size: str, *, batches: tuple[int, int], **options: int) -> Variant:
    description = "GPT-2 {}: {layers} layers of {hidden}, {heads} heads".format(size, **options)
    return Variant(f"gpt2-{size}", description, *batches, options)


def _third(size: str, **options: int) -> Variant:
    """A network of GPT-3's kind (arXiv 2005.14165), as Megatron measures them (2205.05198): no layer is sparse."""
    description = "GPT-3 {}: {layers} layers of {hidden}, {heads} heads".format(size, **options)
    return Variant(f"gpt3-{size}", description, 1, 1, {**options, "vocab": 51200, "context": 2048, "seq": 2048})


@register(
    _variant("tiny", batches=(8, 64), layers=2, hidden=128, heads=2, vocab=5000, context=256, seq=128),
    _variant("mini", batches=(8, 32), layers=4, hidden=256, heads=4, vocab=50257, context=512, seq=128),
    _variant("small", batches=(1, 8), layers=12, hidden=768, heads=12, vocab=50257, context=1024, seq=1024),
    _third("22b", layers=48, hidden=6144, heads=64),
    _third("175b", layers=96, hidden=12288, heads=96),
    _third("530b", layers=105, hidden=20480, heads=128),
    _third("1t", layers=128, hidden=25600, heads=160),
)
@dataclass(frozen=True)
class Gpt2(PreNorm):
    """input_ids int64 [N, seq] to logits float32 [N, seq, vocab]; `context` is the longest seq."""

    task: ClassVar[str] = "language-model"
    parts: ClassVar[Parts] = Parts("ln_1", "c_attn", "c_proj", "ln_2", "c_fc", "c_proj")
    epsilon: ClassVar[float] = 1e-5
    gelu: ClassVar[str] = "tanh"

    layers: int = 12
    hidden: int = 768
    heads: int = 12
    seq: int = 1024
    vocab: int = 50257
    context: int = 1024
    dropout: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seq > self.context:
            raise UsageError(f"option 'seq' ({self.seq}) must not exceed 'context' ({self.context})")

    def inputs(self) -> tuple[InputSpec, ...]:
        return (integers("input_ids", (BATCH, self.seq), high=self.vocab),)

    def label(self) -> InputSpec:
        return integers("label", (BATCH, self.seq), high=self.vocab)

    def checkpoints(self) -> tuple[str, ...]:
        return ("embeddings.out", *(f"h.{index}.out" for index in range(self.layers)))

    def build(self, net: Net) -> None:
        x, wte = self._embeddings(net)
        mask = self._causal_mask(net)
        for index in range(self.layers):
            x = self.layer(net, x, mask, f"h.{index}")
        x = self.norm(net, x, "ln_f")
        decoder = net.add("Transpose", [wte], "decoder", perm=[1, 0])
        net.add("MatMul", [x, decoder], "logits")
        net.output("logits", (BATCH, self.seq, self.vocab))

    def _embeddings(self, net: Net) -> tuple[str, str]:
        init = Init("normal", STD)
        wte = net.parameter("wte.weight", (self.vocab, self.hidden), init)
        wpe = net.parameter("wpe.weight", (self.context, self.hidden), init)
        word = net.add("Gather", [wte, "input_ids"], "embeddings.word")
        position_ids = net.constant("position_ids", np.arange(self.seq))
        position = net.add("Gather", [wpe, position_ids], "embeddings.position")
        # Without dropout the sum itself is the checkpoint that people know by this name.
        name = "embeddings.sum" if self.dropout else "embeddings.out"
        x = net.add("Add", [word, position], name)
        return net.dropout(x, "embeddings.out", ratio=self.dropout), wte

    def _causal_mask(self, net: Net) -> str:
        """float32 [seq, seq]: 0 where a position may look, a large negative number at what comes after it."""
        return net.constant("causal_mask", np.triu(np.full((self.seq, self.seq), _MASKED, np.float32), 1))
