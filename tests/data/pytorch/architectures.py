"""Well-known architectures in small widths, as their owners write and export them: see README.md."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from networks import BOTH, EVAL, TRAIN, Network, batch, classes, real, tokens
from torch import Tensor, nn

# --------------------------------------------------------------------------------------
# A detector with its loss


def conv_bn(
    inputs: int, outputs: int, size: int = 3, stride: int = 1, act: type[nn.Module] = nn.SiLU, **options: int
) -> nn.Module:
    padding = options.get("dilation", 1) * (size // 2)
    conv = nn.Conv2d(inputs, outputs, size, stride, padding, bias=False, **options)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs, eps=1e-3), act())


class CrossStage(nn.Module):
    """Half of the channels pass through a bottleneck; everything is concatenated."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = conv_bn(width, width, 1), conv_bn(3 * width // 2, width, 1)
        self.inner = nn.Sequential(conv_bn(width // 2, width // 2), conv_bn(width // 2, width // 2))

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.first(x).chunk(2, 1))
        return self.last(torch.cat([*parts, parts[-1] + self.inner(parts[-1])], 1))


class PyramidPool(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = conv_bn(width, width // 2, 1), conv_bn(2 * width, width, 1)
        self.pool = nn.MaxPool2d(5, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.first(x)]
        for _ in range(3):
            parts.append(self.pool(parts[-1]))
        return self.last(torch.cat(parts, 1))


class Yolo(nn.Module):
    """An anchor-free detector on two scales; its loss: complete IoU, distribution focal loss, class BCE.

    Every box is assigned to a place beforehand (`place` [batch, boxes]).
    """

    def __init__(self, count: int = 3, bins: int = 4) -> None:
        super().__init__()
        self.count, self.bins = count, bins
        self.stem = nn.Sequential(conv_bn(3, 6, 3, 2), conv_bn(6, 8), CrossStage(8))
        self.down1, self.down2 = conv_bn(8, 8, 3, 2), conv_bn(8, 12, 3, 2)
        self.stage, self.pool = CrossStage(8), PyramidPool(12)
        self.up = nn.Upsample(scale_factor=2.0, mode="nearest")
        self.merge = conv_bn(20, 8, 1)
        self.heads = nn.ModuleList(nn.Conv2d(width, 4 * bins + count, 1) for width in (8, 12))
        for name, value in zip(("points", "strides"), self.grid([(8, 4.0), (4, 8.0)]), strict=True):
            self.register_buffer(name, value, persistent=False)

    @staticmethod
    def grid(levels: list[tuple[int, float]]) -> tuple[Tensor, Tensor]:
        points, strides = [], []
        for size, stride in levels:
            middle = torch.arange(size) + 0.5
            y, x = torch.meshgrid(middle, middle, indexing="ij")
            points.append(torch.stack([x, y], -1).view(-1, 2) * stride)
            strides.append(torch.full((size * size, 1), stride))
        return torch.cat(points), torch.cat(strides)

    def forward(self, x: Tensor, place: Tensor, boxes: Tensor, kind: Tensor) -> Tensor:
        fine = self.stage(self.down1(self.stem(x)))
        coarse = self.pool(self.down2(fine))
        fine = self.merge(torch.cat([fine, self.up(coarse)], 1))
        outs = [head(level).flatten(2) for head, level in zip(self.heads, (fine, coarse), strict=True)]
        raw = torch.cat(outs, 2).transpose(1, 2)
        distances, scores = raw.split([4 * self.bins, self.count], -1)
        at = place[..., None]
        logits = distances.gather(1, at.expand(-1, -1, 4 * self.bins)).unflatten(-1, (4, self.bins))
        points, strides = self.points[place], self.strides[place]
        steps = torch.arange(self.bins, dtype=x.dtype, device=x.device)
        sides = (logits.softmax(-1) * steps).sum(-1) * strides
        found = torch.cat([points - sides[..., :2], points + sides[..., 2:]], -1)
        overlap, wanted = self.complete_iou(found, boxes), torch.zeros_like(scores)
        hot = F.one_hot(kind, self.count).to(x.dtype) * overlap.clamp(min=0.0).detach()[..., None]
        wanted = wanted.scatter_add(1, at.expand(-1, -1, self.count), hot)
        focal = self.distribution(logits, torch.cat([points - boxes[..., :2], boxes[..., 2:] - points], -1) / strides)
        return (1 - overlap).mean() + focal + F.binary_cross_entropy_with_logits(scores, wanted)

    def distribution(self, logits: Tensor, sides: Tensor) -> Tensor:
        sides = sides.clamp(0.0, self.bins - 1.01)
        left = sides.floor()
        shares = torch.stack([left + 1 - sides, sides - left], -1)
        index = torch.stack([left, left + 1], -1).long()
        return -(F.log_softmax(logits, -1).gather(-1, index) * shares).sum(-1).mean()

    @staticmethod
    def complete_iou(a: Tensor, b: Tensor) -> Tensor:
        (ax, ay, au, av), (bx, by, bu, bv) = a.unbind(-1), b.unbind(-1)
        wide, high = torch.minimum(au, bu) - torch.maximum(ax, bx), torch.minimum(av, bv) - torch.maximum(ay, by)
        shared = wide.clamp(min=0.0) * high.clamp(min=0.0)
        iou = shared / ((au - ax) * (av - ay) + (bu - bx) * (bv - by) - shared + 1e-7)
        hull = (torch.maximum(au, bu) - torch.minimum(ax, bx)).square() + (
            torch.maximum(av, bv) - torch.minimum(ay, by)
        ).square()
        apart = ((ax + au - bx - bu).square() + (ay + av - by - bv).square()) / 4
        form = torch.atan((bu - bx) / (bv - by)) - torch.atan((au - ax) / (av - ay))
        form = 4 / math.pi**2 * form.square()
        weight = (form / (form - iou + (1 + 1e-7))).detach()
        return iou - apart / (hull + 1e-7) - weight * form


def yolo_data(g: torch.Generator) -> tuple[dict[str, Tensor], None]:
    place = torch.tensor([[27, 53, 70], [2, 62, 73]])
    corners = torch.tensor(
        [[[8.0, 9, 19, 20], [16, 20, 28, 31], [12, 16, 30, 27]], [[5, 0, 14, 8], [21, 25, 31, 32], [4, 13, 20, 28]]]
    )
    return {**real(2, 3, 32, 32)(g), "place": place, "boxes": corners, "kind": classes(3, 2, 3)(g)}, None


# --------------------------------------------------------------------------------------
# Vision


class DeepLab(nn.Module):
    """Atrous convolutions, a pyramid with an image-wide branch, a decoder with a skip from an early layer."""

    def __init__(self) -> None:
        super().__init__()
        relu = {"act": nn.ReLU}
        self.early = nn.Sequential(conv_bn(3, 6, 3, 2, **relu), conv_bn(6, 6, **relu))
        self.deep = nn.Sequential(conv_bn(6, 8, 3, 2, **relu), conv_bn(8, 8, dilation=2, **relu))
        branches = [conv_bn(8, 4, 1, **relu), conv_bn(8, 4, dilation=2, **relu), conv_bn(8, 4, dilation=3, **relu)]
        self.branches = nn.ModuleList(branches)
        self.whole = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 4, 1), nn.ReLU())
        self.project = nn.Sequential(conv_bn(16, 6, 1, **relu), nn.Dropout(0.0))
        self.skip, self.head = conv_bn(6, 3, 1, **relu), nn.Sequential(conv_bn(9, 6, **relu), nn.Conv2d(6, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        early = self.early(x)
        deep = self.deep(early)
        whole = F.interpolate(self.whole(deep), size=deep.shape[-2:], mode="bilinear", align_corners=False)
        y = self.project(torch.cat([*(branch(deep) for branch in self.branches), whole], 1))
        y = F.interpolate(y, size=early.shape[-2:], mode="bilinear", align_corners=False)
        y = self.head(torch.cat([self.skip(early), y], 1))
        return F.interpolate(y, size=x.shape[-2:], mode="bilinear", align_corners=False)


class SwinBlock(nn.Module):
    """Attention inside windows, which may be shifted, with a table of relative positions."""

    def __init__(self, width: int, side: int, shift: int, window: int = 4, heads: int = 2) -> None:
        super().__init__()
        self.side, self.shift, self.window, self.heads = side, shift, window, heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.table = nn.Parameter(torch.zeros((2 * window - 1) ** 2, heads))
        at = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        apart = (at[:, :, None] - at[:, None]) + window - 1
        self.register_buffer("index", apart[0] * (2 * window - 1) + apart[1], persistent=False)
        self.register_buffer("mask", self.regions() if shift else None, persistent=False)

    def regions(self) -> Tensor:
        """Zero where two places of a window were neighbours before the shift, -100 elsewhere."""
        bounds = torch.tensor([0] * (self.side - self.window) + [1] * (self.window - self.shift) + [2] * self.shift)
        parts = self.windows((3 * bounds[:, None] + bounds)[None, :, :, None]).squeeze(-1)
        return torch.where(parts[:, None] == parts[:, :, None], 0.0, -100.0)

    def windows(self, x: Tensor) -> Tensor:
        w, count = self.window, self.side // self.window
        x = x.view(x.shape[0], count, w, count, w, x.shape[3])
        return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, w * w, x.shape[-1])

    def attend(self, x: Tensor) -> Tensor:
        number, length, width = x.shape
        qkv = self.qkv(x).reshape(number, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = qkv[0] * (width // self.heads) ** -0.5, qkv[1], qkv[2]
        bias = self.table[self.index.view(-1)].view(length, length, -1).permute(2, 0, 1)
        scores = query @ key.transpose(-2, -1) + bias.unsqueeze(0)
        if self.mask is not None:
            count = self.mask.shape[0]
            scores = scores.view(number // count, count, self.heads, length, length) + self.mask[:, None]
            scores = scores.view(-1, self.heads, length, length)
        return self.proj((F.softmax(scores, -1) @ value).transpose(1, 2).reshape(number, length, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        if self.shift:
            y = torch.roll(y, (-self.shift, -self.shift), (1, 2))
        y = self.attend(self.windows(y))
        w, count = self.window, self.side // self.window
        y = y.view(-1, count, count, w, w, x.shape[3]).permute(0, 1, 3, 2, 4, 5).reshape(x.shape)
        if self.shift:
            y = torch.roll(y, (self.shift, self.shift), (1, 2))
        x = x + y
        return x + self.mlp(self.norm2(x))


class Swin(nn.Module):
    """Patches, windows, shifted windows, merged patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, 8, 2, 2), nn.LayerNorm(8)
        self.stage1 = nn.Sequential(SwinBlock(8, 8, 0), SwinBlock(8, 8, 2))
        self.merge_norm, self.merge = nn.LayerNorm(32), nn.Linear(32, 16, bias=False)
        self.stage2 = SwinBlock(16, 4, 0)
        self.last, self.head = nn.LayerNorm(16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stage1(self.norm(self.patches(x).permute(0, 2, 3, 1)))
        parts = [x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]]
        x = self.stage2(self.merge(self.merge_norm(torch.cat(parts, -1))))
        return self.head(self.last(x).permute(0, 3, 1, 2).mean((2, 3)))


class InvertedBottleneck(nn.Module):
    """Expansion, depthwise convolution, squeeze and excitation, projection."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int, expansion: int = 3) -> None:
        super().__init__()
        wide = expansion * inputs
        self.expand, self.depthwise = conv_bn(inputs, wide, 1), conv_bn(wide, wide, size, stride, groups=wide)
        self.fc1, self.fc2 = nn.Conv2d(wide, 2, 1), nn.Conv2d(2, wide, 1)
        self.project = conv_bn(wide, outputs, 1, act=nn.Identity)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(self.expand(x))
        y = y * torch.sigmoid(self.fc2(F.silu(self.fc1(F.adaptive_avg_pool2d(y, 1)))))
        y = self.project(y)
        return x + y if self.residual else y


def efficientnet() -> nn.Module:
    return nn.Sequential(
        conv_bn(3, 6, 3, 2), InvertedBottleneck(6, 6, 3, 1), InvertedBottleneck(6, 8, 5, 2), conv_bn(8, 20, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Dropout(0.0), nn.Linear(20, 5),
    )  # fmt: skip


# --------------------------------------------------------------------------------------
# Sequences


class WhisperBlock(nn.Module):
    def __init__(self, width: int, heads: int, cross: bool) -> None:
        super().__init__()
        self.heads, self.cross = heads, cross
        self.query, self.key, self.value, self.out = self.projections(width)
        if cross:
            self.query2, self.key2, self.value2, self.out2 = self.projections(width)
            self.norm2 = nn.LayerNorm(width)
        self.norm1, self.norm3 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    @staticmethod
    def projections(width: int) -> list[nn.Module]:
        return [nn.Linear(width, width, bias=bias) for bias in (True, False, True, True)]

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).permute(0, 2, 1, 3)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        mixed = F.scaled_dot_product_attention(self.split(query), self.split(key), self.split(value), is_causal=causal)
        return mixed.permute(0, 2, 1, 3).flatten(2)

    def forward(self, x: Tensor, heard: Tensor | None = None) -> Tensor:
        y = self.norm1(x)
        x = x + self.out(self.attend(self.query(y), self.key(y), self.value(y), self.cross))
        if heard is not None:
            y = self.norm2(x)
            x = x + self.out2(self.attend(self.query2(y), self.key2(heard), self.value2(heard), False))
        return x + self.mlp(self.norm3(x))


class Whisper(nn.Module):
    """Convolutions over a spectrogram, sinusoids, an encoder; a decoder that listens to it, with tied embeddings."""

    def __init__(self, mels: int = 6, width: int = 16, vocabulary: int = 17, frames: int = 12, length: int = 5) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(mels, width, 3, padding=1), nn.Conv1d(width, width, 3, stride=2, padding=1)
        angles = torch.arange(frames // 2)[:, None] * torch.exp(
            -math.log(100.0) * torch.arange(width // 2) / (width // 2 - 1)
        )
        self.register_buffer("waves", torch.cat([angles.sin(), angles.cos()], 1), persistent=False)
        self.encoder = nn.ModuleList(WhisperBlock(width, 2, False) for _ in range(2))
        self.decoder = WhisperBlock(width, 2, True)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.embed, self.positions = nn.Embedding(vocabulary, width), nn.Parameter(torch.zeros(length, width))

    def forward(self, mel: Tensor, tokens: Tensor) -> Tensor:
        x = F.gelu(self.conv2(F.gelu(self.conv1(mel)))).permute(0, 2, 1) + self.waves
        for block in self.encoder:
            x = block(x)
        y = self.decoder(self.embed(tokens) + self.positions[: tokens.shape[-1]], self.norm1(x))
        return (self.norm2(y) @ self.embed.weight.T).permute(0, 2, 1)


class RmsNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class LlamaBlock(nn.Module):
    """Rotary positions, four query heads on two key heads, a gated MLP."""

    def __init__(self, width: int, heads: int = 4, shared: int = 2) -> None:
        super().__init__()
        self.heads, self.shared, self.size = heads, shared, width // heads
        self.norm1, self.norm2 = RmsNorm(width), RmsNorm(width)
        self.query, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(width, width * shared // heads, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, 24, bias=False) for _ in range(2))
        self.down = nn.Linear(24, width, bias=False)

    @staticmethod
    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        number, length, _ = x.shape
        y = self.norm1(x)
        query, key, value = (
            layer(y).view(number, length, -1, self.size).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        query, key = self.rotate(query, cos, sin), self.rotate(key, cos, sin)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(number, length, -1))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class LlamaMasked(nn.Module):
    """Angles and the causal mask are computed from positions and from a padding mask."""

    def __init__(self, vocabulary: int = 20, width: int = 16) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(vocabulary, width), RmsNorm(width)
        self.blocks = nn.ModuleList(LlamaBlock(width) for _ in range(2))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.register_buffer("frequencies", 1.0 / 100.0 ** (torch.arange(0, 4, 2) / 4), persistent=False)

    def forward(self, tokens: Tensor, present: Tensor) -> Tensor:
        x = self.embed(tokens)
        length = tokens.shape[1]
        positions = (present.long().cumsum(-1) - 1).clamp(min=0)
        angles = positions[:, :, None].to(x.dtype) * self.frequencies
        angles = torch.cat((angles, angles), -1)[:, None]
        order = torch.arange(length, device=tokens.device)
        visible = (order[None, :] <= order[:, None])[None, None] & present[:, None, None, :]
        cos, sin = angles.cos(), angles.sin()
        for block in self.blocks:
            x = block(x, cos, sin, visible)
        return self.head(self.norm(x)).transpose(1, 2)


def llama_data(g: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    present = torch.ones(4, 6, dtype=torch.bool)
    present[1, 4:], present[3, 5:] = False, False
    label = classes(20, 4, 6)(g)
    label[~present] = -100
    return {**tokens(20, 4, 6)(g), "present": present}, label


class Experts(nn.Module):
    """Two of four gated experts for each token, by TopK; the loss has a term that balances them."""

    def __init__(self, vocabulary: int = 20, width: int = 12, hidden: int = 10, experts: int = 4) -> None:
        super().__init__()
        self.experts = experts
        self.embed, self.norm = nn.Embedding(vocabulary, width), nn.LayerNorm(width)
        self.router = nn.Linear(width, experts, bias=False)
        self.gate, self.up = (nn.Parameter(0.3 * torch.randn(experts, width, hidden)) for _ in range(2))
        self.down = nn.Parameter(0.3 * torch.randn(experts, hidden, width))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor, label: Tensor) -> Tensor:
        x = self.embed(tokens).flatten(0, 1)
        y = self.norm(x)
        chances = self.router(y).softmax(-1)
        best, index = torch.topk(chances, 2, -1)
        best = best / best.sum(-1, keepdim=True)
        shares = torch.zeros_like(chances).scatter(1, index, best)
        hidden = F.silu(torch.einsum("td,edh->eth", y, self.gate)) * torch.einsum("td,edh->eth", y, self.up)
        mixed = torch.einsum("eth,ehd,te->td", hidden, self.down, shares)
        used = F.one_hot(index, self.experts).sum(1).to(x.dtype).mean(0)
        balance = self.experts * (used * chances.mean(0)).sum()
        return F.cross_entropy(self.head(x + mixed), label.flatten()) + 0.01 * balance


def experts_data(g: torch.Generator) -> tuple[dict[str, Tensor], None]:
    return {**tokens(20, 4, 6)(g), "label": classes(20, 4, 6)(g)}, None


class WaveNet(nn.Module):
    """Causal dilated convolutions with gates, residual and skip connections, over quantised sound."""

    def __init__(self, levels: int = 16, width: int = 8, skip: int = 10) -> None:
        super().__init__()
        self.embed = nn.Embedding(levels, width)
        self.dilations = (1, 2, 4)
        self.both = nn.ModuleList(nn.Conv1d(width, 2 * width, 2, dilation=d) for d in self.dilations)
        self.residual = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in self.dilations[1:])
        self.skip = nn.ModuleList(nn.Conv1d(width, skip, 1) for _ in self.dilations)
        self.last = nn.Sequential(nn.ReLU(), nn.Conv1d(skip, skip, 1), nn.ReLU(), nn.Conv1d(skip, levels, 1))

    def forward(self, tokens: Tensor) -> Tensor:
        x, total = self.embed(tokens).transpose(1, 2), torch.zeros(())
        for i, (both, skip, d) in enumerate(zip(self.both, self.skip, self.dilations, strict=True)):
            signal, gate = both(F.pad(x, (d, 0))).chunk(2, 1)
            y = torch.tanh(signal) * torch.sigmoid(gate)
            total = total + skip(y)
            x = x + self.residual[i](y) if i < len(self.residual) else x
        return self.last(total)


# --------------------------------------------------------------------------------------
# Tables and graphs


class Dlrm(nn.Module):
    """Dense features and bags of categories; products of all pairs; a click."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, width), nn.ReLU())
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, width, mode=mode) for rows, mode in [(9, "sum"), (7, "mean")])
        self.single = nn.Embedding(11, width)
        self.top = nn.Sequential(nn.Linear(width + 6, 10), nn.ReLU(), nn.Linear(10, 1))
        rows, columns = torch.tril_indices(4, 4, -1)
        self.register_buffer("rows", rows, persistent=False)
        self.register_buffer("columns", columns, persistent=False)

    def forward(self, x: Tensor, first: Tensor, second: Tensor, third: Tensor) -> Tensor:
        dense = self.bottom(x)
        parts = [
            dense,
            *(bag(index) for bag, index in zip(self.bags, (first, second), strict=True)),
            self.single(third),
        ]
        stacked = torch.stack(parts, 1)
        pairs = torch.bmm(stacked, stacked.transpose(1, 2))[:, self.rows, self.columns]
        return self.top(torch.cat([dense, pairs], 1))


def dlrm_data(g: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    bags = {"first": classes(9, 8, 3)(g), "second": classes(7, 8, 4)(g), "third": classes(11, 8)(g)}
    return {**real(8, 5)(g), **bags}, (torch.rand(8, 1, generator=g) > 0.5).float()


class GraphNet(nn.Module):
    """A convolution over neighbours scaled by degree, then attention over neighbours.

    Messages meet by index_add or, as the TorchScript exporter needs it, by scatter_add.
    """

    def __init__(self, scatter: bool = False, inputs: int = 5, width: int = 8, outputs: int = 3) -> None:
        super().__init__()
        self.scatter = scatter
        self.fc1, self.fc2 = nn.Linear(inputs, width), nn.Linear(width, width, bias=False)
        self.sent, self.received = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(width))
        self.edge = nn.Linear(2, 1)
        self.head = nn.Linear(2 * width, outputs)

    def gather(self, like: Tensor, target: Tensor, message: Tensor) -> Tensor:
        if not self.scatter:
            return torch.zeros_like(like).index_add(0, target, message)
        index = target if message.dim() == 1 else target[:, None].expand_as(message)
        return torch.zeros_like(like).scatter_add(0, index, message)

    def forward(self, x: Tensor, edges: Tensor, features: Tensor) -> Tensor:
        source, target = edges[0], edges[1]
        nodes = x.shape[0]
        degree = self.gather(x[:, 0], target, torch.ones_like(features[:, 0])) + 1
        scale = degree.rsqrt()
        h = self.fc1(x)
        sent = h[source] * (scale[source] * scale[target])[:, None]
        h = F.relu(self.gather(h, target, sent) + h / degree[:, None])
        z = self.fc2(h)
        score = (z @ self.sent)[source] + (z @ self.received)[target] + self.edge(features).squeeze(1)
        score = F.leaky_relu(score, 0.2)
        top = torch.full((nodes,), -1e4, dtype=x.dtype).scatter_reduce(0, target, score, "amax")
        score = torch.exp(score - top[target])
        total = self.gather(score[:1].expand(nodes), target, score) + 1e-9
        weights = score / total[target]
        return self.head(torch.cat([h, self.gather(z, target, z[source] * weights[:, None])], 1))


def graph_data(g: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    inputs = {
        "x": torch.randn(9, 5, generator=g),
        "edges": classes(9, 2, 24)(g),
        "features": torch.randn(24, 2, generator=g),
    }
    return inputs, classes(3, 9)(g)


def whisper_data(g: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    return {"mel": torch.randn(3, 6, 12, generator=g), **tokens(17, 3, 5)(g)}, classes(17, 3, 5)(g)


ARCHITECTURES = [
    Network("yolo", Yolo, yolo_data, "internal", 0.02, TRAIN, EVAL),
    Network("deeplab", DeepLab, batch(real(2, 3, 16, 16), classes(4, 2, 16, 16)), "cross_entropy", 0.4, BOTH, EVAL),
    Network("swin", Swin, batch(real(3, 3, 16, 16), classes(5, 3)), "cross_entropy", 0.05, EVAL, EVAL),
    Network("efficientnet", efficientnet, batch(real(4, 3, 16, 16), classes(5, 4)), "cross_entropy", 0.05, TRAIN, EVAL),
    Network("whisper", Whisper, whisper_data, "cross_entropy", 0.1, EVAL, EVAL, 17, 23),
    Network("llama_masked", LlamaMasked, llama_data, "cross_entropy", 0.2, (), EVAL, 17, 23),
    Network("experts", Experts, experts_data, "internal", 0.1, TRAIN, EVAL),
    Network("wavenet", WaveNet, batch(tokens(16, 3, 12), classes(16, 3, 12)), "cross_entropy", 1.0, EVAL, EVAL),
    Network("dlrm", Dlrm, dlrm_data, "bce_with_logits", 0.2, EVAL, EVAL),
    Network("graph", GraphNet, graph_data, "cross_entropy", 0.2, (), EVAL),
    Network("graph_scatter", lambda: GraphNet(True), graph_data, "cross_entropy", 0.2, EVAL, EVAL),
]
