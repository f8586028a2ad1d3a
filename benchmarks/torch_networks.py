"""The zoo's networks in plain torch.nn, for the comparison with PyTorch.

Nothing of this project is imported: the file runs in PyTorch's own environment.  Layouts are the zoo's (and, for ResNet
and VGG, torchvision's): the same parameters, dropout, and ReLU in place where torchvision has it.

Each network has `segments`, modules or functions that are applied one after the other; the last one, the head, is
never recomputed.  The cuts between them are the checkpoints that the zoo proposes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Segmented(nn.Module):
    """Segments in a row; with `recompute`, all but the last keep their inputs only."""

    recompute = False

    def segments(self) -> Sequence[Callable[..., Tensor]]:
        """What is applied one after the other, the head last."""
        raise NotImplementedError

    def through(self, *inputs: Tensor) -> Tensor:
        """Applies the segments; the first takes all inputs."""
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

    def forward(self, x: Tensor) -> Tensor:
        """Logits [n, classes]."""
        return self.through(x)


class Vgg(Segmented):
    """VGG for images [n, 3, 224, 224]; a segment ends behind each pool."""

    def __init__(self, blocks: Sequence[int], classes: int = 1000) -> None:
        super().__init__()
        size, made = 3, []
        for count, channels in zip(blocks, (64, 128, 256, 512, 512), strict=True):
            layers: list[nn.Module] = []
            for _ in range(count):
                layers += [nn.Conv2d(size, channels, 3, padding=1), nn.ReLU(inplace=True)]
                size = channels
            made.append(nn.Sequential(*layers, nn.MaxPool2d(2, 2)))
        self.blocks = nn.ModuleList(made)
        self.classifier = nn.Sequential(
            nn.Linear(512 * 7 * 7, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(4096, classes),
        )

    def segments(self):
        """Five blocks; the classifier.  (torchvision's adaptive pool does nothing at this size.)"""
        return [*self.blocks, lambda x: self.classifier(torch.flatten(x, 1))]

    def forward(self, x: Tensor) -> Tensor:
        """Logits [n, classes]."""
        return self.through(x)


class BertLayer(nn.Module):
    """An encoder layer with attention written out, as the usual port's eager form: dropout on the probabilities."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.dense = (nn.Linear(hidden, hidden) for _ in range(4))
        self.norm1, self.norm2 = (nn.LayerNorm(hidden, eps=1e-12) for _ in range(2))
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.dropout = nn.Dropout(dropout)

    def split(self, x: Tensor) -> Tensor:
        """[n, seq, hidden] to [n, heads, seq, size]."""
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Attention and feed-forward, each with dropout, residual and norm."""
        query, key, value = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        scores = torch.matmul(query, key.transpose(2, 3)) * (1 / math.sqrt(query.shape[-1])) + mask
        probs = self.dropout(torch.softmax(scores, dim=-1))
        merged = torch.matmul(probs, value).transpose(1, 2).reshape(x.shape)
        x = self.norm1(self.dropout(self.dense(merged)) + x)
        inner = nn.functional.gelu(self.up(x))
        return self.norm2(self.dropout(self.down(inner)) + x)


class Bert(Segmented):
    """BERT with the classifier head; a segment is the embeddings, or a layer."""

    def __init__(
        self, layers: int, hidden: int = 768, heads: int = 12, *, vocab: int = 30522, classes: int = 2
    ) -> None:
        super().__init__()
        self.word, self.position, self.token_type = (nn.Embedding(n, hidden) for n in (vocab, 512, 2))
        self.norm = nn.LayerNorm(hidden, eps=1e-12)
        self.dropout = nn.Dropout(0.1)
        self.layers = nn.ModuleList(BertLayer(hidden, heads, 0.1) for _ in range(layers))
        self.pooler = nn.Linear(hidden, hidden)
        self.classifier = nn.Linear(hidden, classes)
        self.mask: Tensor | None = None

    def embed(self, ids: Tensor, kinds: Tensor) -> Tensor:
        """[n, seq] to [n, seq, hidden]."""
        positions = torch.arange(ids.shape[1])
        return self.dropout(self.norm(self.word(ids) + self.token_type(kinds) + self.position(positions)))

    def head(self, x: Tensor) -> Tensor:
        """From the first position."""
        return self.classifier(self.dropout(torch.tanh(self.pooler(x[:, 0]))))

    def segments(self):
        """Embeddings; layers; pooler and classifier."""
        mask = self.mask
        return [self.embed, *((lambda x, layer=layer: layer(x, mask)) for layer in self.layers), self.head]

    def forward(self, ids: Tensor, kinds: Tensor, attention: Tensor) -> Tensor:
        """Logits [n, classes]; `attention` is 1 where a position may be looked at."""
        self.mask = (1.0 - attention[:, None, None, :].float()) * -10000.0
        return self.through(ids, kinds)


def network(name: str, layers: int | None = None) -> Segmented:
    """A network by the zoo's name.  `layers`: that of BERT."""
    makers: dict[str, Callable[[], Segmented]] = {
        "resnet18": lambda: ResNet((2, 2, 2, 2), bottleneck=False),
        "resnet50": lambda: ResNet((3, 4, 6, 3), bottleneck=True),
        "vgg16": lambda: Vgg((2, 2, 3, 3, 3)),
        "bert-base": lambda: Bert(layers or 12),
    }
    return makers[name]()


def batch(name: str, n: int, seq: int | None = None) -> tuple[list[Tensor], Tensor]:
    """Inputs and labels like the zoo's."""
    if name.startswith("bert"):
        ids = torch.randint(0, 30522, (n, seq or 128))
        return [ids, torch.randint(0, 2, ids.shape), torch.ones_like(ids)], torch.randint(0, 2, (n,))
    return [torch.randn(n, 3, 224, 224)], torch.randint(0, 1000, (n,))
