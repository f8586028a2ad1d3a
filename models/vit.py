"""Vision Transformer (Dosovitskiy et al. 2020, arXiv 2010.11929): patches of an image and one more position that the
classifier reads, pre-norm layers.

Parameters have the names of timm's port; a weight used by MatMul is stored [in, out].
"""

from dataclasses import dataclass
from typing import ClassVar

from ..errors import UsageError
from ._pre_norm import STD, Parts, PreNorm
from .common import BATCH, ZEROS, Init, Net
from .registry import Classifier, Variant, register


def _variant(size: str, *, batches: tuple[int, int], **options: int) -> Variant:
    description = "Vision Transformer {}/{patch}: {layers} layers of {hidden}, {heads} heads".format(size, **options)
    return Variant(f"vit-{size}", description, *batches, options)


@register(
    _variant("tiny", batches=(8, 64), layers=12, hidden=192, heads=3, patch=16),
    _variant("small", batches=(8, 64), layers=12, hidden=384, heads=6, patch=16),
    _variant("base", batches=(8, 32), layers=12, hidden=768, heads=12, patch=16),
    _variant("large", batches=(4, 16), layers=24, hidden=1024, heads=16, patch=16),
)
@dataclass(frozen=True)
class ViT(PreNorm, Classifier):
    """x float32 [N, 3, image, image] to logits float32 [N, classes]."""

    parts: ClassVar[Parts] = Parts("norm1", "qkv", "proj", "norm2", "fc1", "fc2")
    epsilon: ClassVar[float] = 1e-6
    gelu: ClassVar[str] = "none"

    layers: int = 12
    hidden: int = 768
    heads: int = 12
    patch: int = 16
    image: int = 224
    classes: int = 1000
    dropout: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.image % self.patch:
            raise UsageError(f"option 'image' ({self.image}) must be a multiple of 'patch' ({self.patch})")

    def checkpoints(self) -> tuple[str, ...]:
        return ("embeddings.out", *(f"blocks.{index}.out" for index in range(self.layers)))

    def build(self, net: Net) -> None:
        x = self._embeddings(net)
        for index in range(self.layers):
            x = self.layer(net, x, None, f"blocks.{index}")
        x = self.norm(net, x, "norm")
        x = net.add("Gather", [x, net.constant("first", 0)], "pooled", axis=1)
        net.dense(x, "logits", sizes=(self.hidden, self.classes), init=Init("normal", STD), params="head")
        net.output("logits", (BATCH, self.classes))

    def _embeddings(self, net: Net) -> str:
        """[N, 1 + patches, hidden]: the classifier's position, then the patches by rows."""
        x = net.conv(
            "x", "patches", channels=(3, self.hidden), kernel=self.patch, stride=self.patch, params="patch_embed.proj"
        )
        x = net.add("Reshape", [x, net.constant("patches.shape", [0, 0, -1])], "patches.flat")
        x = net.add("Transpose", [x], "patches.rows", perm=[0, 2, 1])
        token = net.parameter("cls_token", (1, 1, self.hidden), ZEROS)
        batch = net.add("Shape", ["x"], "batch", start=0, end=1)
        one = net.constant("token.shape", [1, self.hidden])
        shape = net.add("Concat", [batch, one], "tokens.shape", axis=0)
        token = net.add("Expand", [token, shape], "tokens")
        x = net.add("Concat", [token, x], "positions", axis=1)
        count = 1 + (self.image // self.patch) ** 2
        place = net.parameter("pos_embed", (1, count, self.hidden), Init("normal", STD))
        name = "embeddings.sum" if self.dropout else "embeddings.out"
        x = net.add("Add", [x, place], name)
        return net.dropout(x, "embeddings.out", ratio=self.dropout)
