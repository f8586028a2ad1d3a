"""The zoo's networks in plain torch.nn, for the comparison with PyTorch.

Nothing of this project is imported: the file runs in PyTorch's own environment.  Layouts are the zoo's (and, for ResNet
and VGG, torchvision's): the same parameters, dropout, and ReLU in place where torchvision has it.

Each network has `segments`, modules or functions that are applied one after the other; the last one, the head, is
never recomputed.  The cuts between them are the checkpoints that the zoo proposes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Segmented(nn.Module):
    """Segments in a row; with `recompute`, all but the last keep their inputs only."""

    recompute = False

    def segments(self) -> Sequence[Callable[..., Tensor]]:
        """What is applied one after the other, the head last."""
        raise NotImplementedError

    def forward(self, *inputs: Tensor) -> Tensor:
        """Logits, [n, classes] or [n, seq, vocab]: the segments, of which the first takes all inputs."""
        *body, head = self.segments()
        given: tuple[Tensor, ...] = inputs
        for segment in body:
            given = (checkpoint(segment, *given, use_reentrant=False) if self.recompute else segment(*given),)
        return head(*given)


class Block(nn.Module):
    """A residual block of ResNet v1.5: two 3x3 convolutions, or 1x1, 3x3 (with the stride) and 1x1."""

    def __init__(self, first: int, inner: int, out: int, *, stride: int, bottleneck: bool) -> None:
        super().__init__()
        if bottleneck:
            kernels = [(first, inner, 1, 1), (inner, inner, 3, stride), (inner, out, 1, 1)]
        else:
            kernels = [(first, inner, 3, stride), (inner, out, 3, 1)]
        self.convs = nn.ModuleList(nn.Conv2d(a, b, k, s, k // 2, bias=False) for a, b, k, s in kernels)
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for _, b, _, _ in kernels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or first != out:
            self.downsample = nn.Sequential(nn.Conv2d(first, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        """As torchvision's blocks, with `+=` and ReLU in place."""
        identity = x
        out = x
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            out = norm(conv(out))
            if i < len(self.convs) - 1:
                out = self.relu(out)
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(Segmented):
    """ResNet for images [n, 3, 224, 224]; a segment ends behind each block, the first one begins with the stem."""

    def __init__(self, blocks: Sequence[int], *, bottleneck: bool, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )
        size, made = 64, []
        for stage, count in enumerate(blocks):
            width = 64 << stage
            for index in range(count):
                out = width * 4 if bottleneck else width
                stride = 2 if stage and not index else 1
                made.append(Block(size, width, out, stride=stride, bottleneck=bottleneck))
                size = out
        self.blocks = nn.ModuleList(made)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(size, classes)

    def segments(self):
        """Stem and first block; the other blocks; the head."""
        first, *rest = self.blocks
        return [lambda x: first(self.stem(x)), *rest, lambda x: self.fc(torch.flatten(self.pool(x), 1))]


class Vgg(Segmented):
    """VGG for images [n, 3, 224, 224]; a segment ends behind each pool."""

    def __init__(self, blocks: Sequence[int], classes: int = 1000, dropout: float = 0.5) -> None:
        super().__init__()
        size, made = 3, []
        for count, channels in zip(blocks, (64, 128, 256, 512, 512), strict=True):
            layers: list[nn.Module] = []
            for _ in range(count):
                layers += [nn.Conv2d(size, channels, 3, padding=1), nn.ReLU(inplace=True)]
                size = channels
            made.append(nn.Sequential(*layers, nn.MaxPool2d(2, 2)))
        self.blocks = nn.ModuleList(made)
        wide = [
            part
            for inner in (512 * 7 * 7, 4096)
            for part in (nn.Linear(inner, 4096), nn.ReLU(inplace=True), nn.Dropout(dropout))
        ]
        self.classifier = nn.Sequential(*wide, nn.Linear(4096, classes))

    def segments(self):
        """Five blocks; the classifier.  (torchvision's adaptive pool does nothing at this size.)"""
        return [*self.blocks, lambda x: self.classifier(torch.flatten(x, 1))]


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout: nn.Module) -> Tensor:
    """softmax(query·key / √size + mask)·value, written out; each [n, heads, seq, size]."""
    scores = torch.matmul(query, key.transpose(2, 3)) * (1 / math.sqrt(query.shape[-1])) + mask
    return torch.matmul(dropout(torch.softmax(scores, dim=-1)), value)


class BertLayer(nn.Module):
    """An encoder layer with attention written out, as the usual port's eager form: dropout on the probabilities."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.dense = (nn.Linear(hidden, hidden) for _ in range(4))
        self.norm1, self.norm2 = (nn.LayerNorm(hidden, eps=1e-12) for _ in range(2))
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.dropout = nn.Dropout(dropout)
        self.fast = False

    def split(self, x: Tensor) -> Tensor:
        """[n, seq, hidden] to [n, heads, seq, size]."""
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Attention and feed-forward, each with dropout, residual and norm."""
        query, key, value = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        if self.fast:
            p = self.dropout.p if self.training else 0.0
            merged = nn.functional.scaled_dot_product_attention(query, key, value, mask, p)
        else:
            merged = attention(query, key, value, mask, self.dropout)
        merged = merged.transpose(1, 2).reshape(x.shape)
        x = self.norm1(self.dropout(self.dense(merged)) + x)
        inner = nn.functional.gelu(self.up(x))
        return self.norm2(self.dropout(self.down(inner)) + x)


class Bert(Segmented):
    """BERT with the classifier head, or with `head="mlm"` the tied decoder over all positions; a segment is the
    embeddings, or a layer."""

    def __init__(
        self,
        layers: int,
        hidden: int = 768,
        heads: int = 12,
        *,
        vocab: int = 30522,
        classes: int = 2,
        dropout: float = 0.1,
        head: str = "classifier",
        seq: int = 128,
    ) -> None:
        super().__init__()
        self.word, self.position, self.token_type = (nn.Embedding(n, hidden) for n in (vocab, 512, 2))
        self.norm = nn.LayerNorm(hidden, eps=1e-12)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(BertLayer(hidden, heads, dropout) for _ in range(layers))
        self.kind = head
        if head == "mlm":
            self.transform, self.transform_norm = nn.Linear(hidden, hidden), nn.LayerNorm(hidden, eps=1e-12)
            self.bias = nn.Parameter(torch.zeros(vocab))
        else:
            self.pooler = nn.Linear(hidden, hidden)
            self.classifier = nn.Linear(hidden, classes)
        self.mask: Tensor | None = None

    def embed(self, ids: Tensor, kinds: Tensor) -> Tensor:
        """[n, seq] to [n, seq, hidden]."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        return self.dropout(self.norm(self.word(ids) + self.token_type(kinds) + self.position(positions)))

    def head(self, x: Tensor) -> Tensor:
        """From the first position, or from each."""
        if self.kind == "mlm":
            x = self.transform_norm(nn.functional.gelu(self.transform(x)))
            return nn.functional.linear(x, self.word.weight, self.bias)
        return self.classifier(self.dropout(torch.tanh(self.pooler(x[:, 0]))))

    def segments(self):
        """Embeddings; layers; the head."""
        mask = self.mask
        return [self.embed, *((lambda x, layer=layer: layer(x, mask)) for layer in self.layers), self.head]

    def forward(self, ids: Tensor, kinds: Tensor, seen: Tensor) -> Tensor:
        """Logits [n, classes] or [n, seq, vocab]; `seen` is 1 where a position may be looked at."""
        self.mask = (1.0 - seen[:, None, None, :].float()) * -10000.0
        return super().forward(ids, kinds)


class Gpt2Layer(nn.Module):
    """A pre-norm layer: attention, then the feed-forward part with GELU's tanh form."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attn, self.mlp = nn.Module(), nn.Module()
        self.attn.c_attn, self.attn.c_proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.mlp.c_fc, self.mlp.c_proj = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.dropout = nn.Dropout(dropout)
        self.fast = False

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """[n, seq, hidden] to the same."""
        parts = self.attn.c_attn(self.ln_1(x)).split(x.shape[-1], dim=-1)
        query, key, value = (p.view(*x.shape[:2], self.heads, -1).transpose(1, 2) for p in parts)
        if self.fast:
            p = self.dropout.p if self.training else 0.0
            merged = nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=p, is_causal=True)
        else:
            merged = attention(query, key, value, mask, self.dropout)
        x = x + self.dropout(self.attn.c_proj(merged.transpose(1, 2).reshape(x.shape)))
        inner = nn.functional.gelu(self.mlp.c_fc(self.ln_2(x)), approximate="tanh")
        return x + self.dropout(self.mlp.c_proj(inner))


class Gpt2(Segmented):
    """GPT-2, the output tied to the embedding; a segment is the embeddings, or a layer."""

    def __init__(
        self, layers: int, hidden: int, heads: int, *, vocab: int, context: int, seq: int, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, hidden), nn.Embedding(context, hidden)
        self.h = nn.ModuleList(Gpt2Layer(hidden, heads, dropout) for _ in range(layers))
        self.ln_f, self.dropout = nn.LayerNorm(hidden), nn.Dropout(dropout)
        self.register_buffer("mask", torch.full((seq, seq), -10000.0).triu(1), persistent=False)

    def segments(self):
        """Embeddings; layers; norm and logits."""
        return [
            lambda ids: self.dropout(self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))),
            *((lambda x, layer=layer: layer(x, self.mask)) for layer in self.h),
            lambda x: nn.functional.linear(self.ln_f(x), self.wte.weight),
        ]


class VitLayer(nn.Module):
    """A pre-norm layer with exact GELU."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden, eps=1e-6), nn.LayerNorm(hidden, eps=1e-6)
        self.attn, self.mlp = nn.Module(), nn.Module()
        self.attn.qkv, self.attn.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.mlp.fc1, self.mlp.fc2 = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[n, positions, hidden] to the same."""
        parts = self.attn.qkv(self.norm1(x)).split(x.shape[-1], dim=-1)
        query, key, value = (p.view(*x.shape[:2], self.heads, -1).transpose(1, 2) for p in parts)
        p = self.dropout.p if self.training else 0.0
        merged = nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=p)
        x = x + self.dropout(self.attn.proj(merged.transpose(1, 2).reshape(x.shape)))
        return x + self.dropout(self.mlp.fc2(nn.functional.gelu(self.mlp.fc1(self.norm2(x)))))


class Vit(Segmented):
    """A Vision Transformer; a segment is the patches, or a layer."""

    def __init__(
        self, layers: int = 12, hidden: int = 768, heads: int = 12, *, patch: int = 16, image: int = 224,
        classes: int = 1000, dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.patch_embed = nn.Module()
        self.patch_embed.proj = nn.Conv2d(3, hidden, patch, patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, hidden))
        self.pos_embed = nn.Parameter(torch.randn(1, 1 + (image // patch) ** 2, hidden) * 0.02)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(VitLayer(hidden, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden, eps=1e-6), nn.Linear(hidden, classes)

    def embed(self, x: Tensor) -> Tensor:
        """Positions of an image [n, 3, image, image]."""
        rows = self.patch_embed.proj(x).flatten(2).transpose(1, 2)
        return self.dropout(torch.cat([self.cls_token.expand(len(x), -1, -1), rows], 1) + self.pos_embed)

    def segments(self):
        """Patches; layers; norm and logits."""
        return [self.embed, *self.blocks, lambda x: self.head(self.norm(x)[:, 0])]


class MobileNetV2(Segmented):
    """MobileNet v2 for images, modules numbered as torchvision's; a segment is an inverted residual."""

    #: expansion, channels, repeats, stride of the first
    BLOCKS = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))

    def __init__(self, dropout: float = 0.2, classes: int = 1000) -> None:
        super().__init__()
        made, size = [conv_norm(3, 32, 3, stride=2)], 32
        for expansion, out, repeats, first in self.BLOCKS:
            for i in range(repeats):
                made.append(Inverted(size, out, expansion=expansion, stride=1 if i else first))
                size = out
        self.features = nn.Sequential(*made, conv_norm(size, 1280, 1))
        self.classifier = nn.Sequential(nn.Dropout(dropout), nn.Linear(1280, classes))

    def segments(self):
        """Stem and first block; the other blocks; the head."""
        stem, first, *rest, last = self.features
        return [lambda x: first(stem(x)), *rest, lambda x: self.classifier(last(x).mean((2, 3)))]


def conv_norm(first: int, out: int, kernel: int, *, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Convolution, batch norm and ReLU6."""
    conv = nn.Conv2d(first, out, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out), nn.ReLU6(inplace=True))


class Inverted(nn.Module):
    """An inverted residual: 1x1 to more channels, depthwise 3x3, 1x1 back without an activation."""

    def __init__(self, first: int, out: int, *, expansion: int, stride: int) -> None:
        super().__init__()
        inner = first * expansion
        layers: list[nn.Module] = [] if expansion == 1 else [conv_norm(first, inner, 1)]
        layers += [conv_norm(inner, inner, 3, stride=stride, groups=inner)]
        self.conv = nn.Sequential(*layers, nn.Conv2d(inner, out, 1, bias=False), nn.BatchNorm2d(out))
        self.joins = stride == 1 and first == out

    def forward(self, x: Tensor) -> Tensor:
        """With the shortcut where the shape stays."""
        return x + self.conv(x) if self.joins else self.conv(x)


class Lstm(Segmented):
    """LSTM layers over [n, seq, features], classified by the last state; a segment is a layer."""

    def __init__(self, *, features: int, hidden: int, layers: int, classes: int = 10, **_: int) -> None:
        super().__init__()
        sizes = [features, *[hidden] * (layers - 1)]
        self.layers = nn.ModuleList(nn.LSTM(size, hidden, batch_first=True) for size in sizes)
        self.fc = nn.Linear(hidden, classes)

    def segments(self):
        """The layers; the head."""
        return [*((lambda x, layer=layer: layer(x)[0]) for layer in self.layers), lambda x: self.fc(x[:, -1])]


class Double(nn.Module):
    """Two 3x3 convolutions, a ReLU behind each, of one input or of two joined: [n, first, h, w] to [n, out, h, w]."""

    def __init__(self, first: int, out: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(first, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """ReLU in place, as in most ports."""
        return torch.relu_(self.conv2(torch.relu_(self.conv1(x))))


class Up(Double):
    """What comes from below, twice as large, behind its skip; then as above."""

    def __init__(self, out: int) -> None:
        super().__init__(2 * out, out)
        self.deconv = nn.ConvTranspose2d(2 * out, out, 2, 2)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:  # type: ignore[override]
        """[n, 2 out, h, w] and [n, out, 2 h, 2 w] to the latter's shape."""
        return super().forward(torch.cat([skip, self.deconv(x)], 1))


class UNet(Segmented):
    """U-Net with padded convolutions, parameters named as in the zoo; with `recompute` each level keeps its inputs."""

    def __init__(self, channels: int = 3, classes: int = 2, width: int = 64, image: Any = None) -> None:
        super().__init__()
        sizes = [width << level for level in range(4)]
        for level, (first, out) in enumerate(zip([channels, *sizes], sizes, strict=False), 1):
            self.add_module(f"down{level}", Double(first, out))
            self.add_module(f"up{level}", Up(out))
        self.middle = Double(sizes[-1], 2 * sizes[-1])
        self.classifier = nn.Conv2d(width, classes, 1)

    def run(self, part: Callable[..., Tensor], *given: Tensor) -> Tensor:
        """A part, recomputed or not."""
        return checkpoint(part, *given, use_reentrant=False) if self.recompute else part(*given)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [n, classes, h, w]."""
        skips = []
        for level in range(1, 5):
            x = self.run(self.get_submodule(f"down{level}"), x)
            skips.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.run(self.middle, x)
        for level in range(4, 0, -1):
            x = self.run(self.get_submodule(f"up{level}"), x, skips[level - 1])
        return self.classifier(x)


def network(name: str, **options: Any) -> Segmented:
    """A network by the zoo's name; `options`: some of those that the zoo has."""
    makers: dict[str, Callable[..., Segmented]] = {
        "resnet18": functools.partial(ResNet, (2, 2, 2, 2), bottleneck=False),
        "resnet50": functools.partial(ResNet, (3, 4, 6, 3), bottleneck=True),
        "vgg16": functools.partial(Vgg, (2, 2, 3, 3, 3)),
        "mobilenet_v2": MobileNetV2,
        "bert-large": functools.partial(Bert, layers=24, hidden=1024, heads=16),
        "bert-base": functools.partial(Bert, layers=12),
        "bert-mini": functools.partial(Bert, layers=4, hidden=256, heads=4),
        "bert-tiny": functools.partial(Bert, layers=2, hidden=128, heads=2),
        "gpt2-small": functools.partial(Gpt2, layers=12, hidden=768, heads=12, vocab=50257, context=1024),
        "gpt2-tiny": functools.partial(Gpt2, layers=2, hidden=128, heads=2, vocab=5000, context=256),
        "gpt2-mini": functools.partial(Gpt2, layers=4, hidden=256, heads=4, vocab=50257, context=512, seq=128),
        "vit-base": Vit,
        "vit-small": functools.partial(Vit, hidden=384, heads=6),
        "vit-tiny": functools.partial(Vit, hidden=192, heads=3),
        "lstm": functools.partial(Lstm, features=32, hidden=64, layers=2),
        "unet": UNet,
    }
    return makers[name](**options)


def batch(name: str, n: int, seq: int | None = None) -> tuple[list[Tensor], Tensor]:
    """Inputs and labels like the zoo's."""
    if name.startswith("bert"):
        ids = torch.randint(0, 30522, (n, seq or 128))
        return [ids, torch.randint(0, 2, ids.shape), torch.ones_like(ids)], torch.randint(0, 2, (n,))
    return [torch.randn(n, 3, 224, 224)], torch.randint(0, 1000, (n,))
