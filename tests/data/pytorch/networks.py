"""The small PyTorch networks whose training curves and ONNX exports are the reference data."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# --------------------------------------------------------------------------------------
# MLPs


def mlp_relu() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 10))


class MlpGelu(nn.Module):
    """Both GELU forms, layer norms with and without affine parameters, a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(12)
        self.fc1 = nn.Linear(12, 24)
        self.fc2 = nn.Linear(24, 12, bias=False)
        self.norm2 = nn.LayerNorm(12, elementwise_affine=False)
        self.fc3 = nn.Linear(12, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.fc2(F.gelu(self.fc1(self.norm1(x))))
        return self.head(F.gelu(self.fc3(self.norm2(x)), approximate="tanh"))


class Activations(nn.Module):
    """One linear layer after each activation."""

    def __init__(self, *activations: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(10, 10) for _ in activations)
        self.activations = nn.ModuleList(activations)
        self.head = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        total = x
        for layer, activation in zip(self.layers, self.activations, strict=True):
            total = total + 0.5 * activation(layer(total))
        return self.head(total)


def mlp_activations() -> nn.Module:
    return Activations(
        nn.Tanh(), nn.Sigmoid(), nn.Softplus(), nn.ELU(0.7), nn.LeakyReLU(0.1), nn.SiLU(),
        nn.Hardswish(), nn.PReLU(10), nn.PReLU(), nn.Mish(),
    )  # fmt: skip


def mlp_activations2() -> nn.Module:
    return Activations(
        nn.SELU(), nn.CELU(1.3), nn.Hardsigmoid(), nn.Hardtanh(-0.8, 0.9), nn.Softsign(),
        nn.LogSigmoid(), nn.Softmax(-1), nn.Softshrink(0.1), nn.Hardshrink(0.2),
    )  # fmt: skip


def mlp_batchnorm() -> nn.Module:
    return nn.Sequential(
        nn.Linear(14, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.0),
        nn.Linear(24, 16, bias=False), nn.BatchNorm1d(16, momentum=0.3), nn.Tanh(), nn.Linear(16, 5),
    )  # fmt: skip


def mlp_fresh() -> nn.Module:
    return nn.Sequential(
        nn.Linear(10, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 12), nn.BatchNorm1d(12), nn.ReLU(),
        nn.Linear(12, 12), nn.LayerNorm(12), nn.ReLU(), nn.Linear(12, 4),
    )  # fmt: skip


# --------------------------------------------------------------------------------------
# Convolutional networks


class LeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 5, padding=2)
        self.conv2 = nn.Conv2d(4, 8, 3)
        self.fc1 = nn.Linear(8 * 2 * 2, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.tanh(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(torch.flatten(x, 1))))


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.downsample(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(6)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = BasicBlock(6, 6, 1)
        self.layer2 = BasicBlock(6, 10, 2)
        self.fc = nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.bn1(self.conv1(x))))
        x = self.layer2(self.layer1(x))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


def separable(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=False),
        nn.BatchNorm2d(inputs), nn.ReLU6(),
        nn.Conv2d(inputs, outputs, 1, bias=False),
        nn.BatchNorm2d(outputs), nn.Hardswish(),
    )  # fmt: skip


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down = nn.Conv2d(channels, 4, 1)
        self.up = nn.Conv2d(4, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        scale = x.mean((2, 3), keepdim=True)
        return x * F.hardsigmoid(self.up(F.relu(self.down(scale))))


def mobilenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6(),
        separable(8, 12, 1), SqueezeExcite(12), nn.AvgPool2d(3, 2, 1, count_include_pad=False),
        separable(12, 16, 2), nn.AvgPool2d(2), nn.Flatten(), nn.Dropout(0.0), nn.Linear(16, 5),
    )  # fmt: skip


class UNet(nn.Module):
    """Dilated, grouped and asymmetrically padded convolutions; three kinds of upsampling; skips."""

    def __init__(self) -> None:
        super().__init__()
        self.enc1 = nn.Conv2d(2, 6, 3, padding=1)
        self.enc2 = nn.Conv2d(6, 8, 2, padding="same", groups=2)
        self.enc3 = nn.Conv2d(8, 8, 3, padding=2, dilation=2)
        self.bn = nn.BatchNorm2d(8)
        self.wide = nn.Conv2d(8, 6, (1, 4), padding=(0, 1))
        self.up = nn.ConvTranspose2d(6, 6, 3, stride=2, padding=1, output_padding=1)
        self.mix = nn.Conv2d(6 + 8 + 8, 6, 3, padding=1)
        self.dec = nn.ConvTranspose2d(6, 4, 2, stride=2, groups=2, bias=False)
        self.head = nn.Conv2d(4 + 6 + 6, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        top = F.relu(self.enc1(x))
        mid = F.relu(self.enc2(F.max_pool2d(top, 2)))
        low = F.relu(self.bn(self.enc3(F.avg_pool2d(mid, 2))))
        wide = F.leaky_relu(self.wide(F.pad(low, (1, 0, 0, 0))), 0.2)
        near = F.interpolate(low, scale_factor=2.0, mode="nearest")
        mixed = F.silu(self.mix(torch.cat([self.up(wide), near, mid], 1)))
        smooth = F.interpolate(mixed, size=(8, 8), mode="bilinear", align_corners=False)
        return self.head(torch.cat([self.dec(mixed), smooth, top], 1))


class Upsampler(nn.Module):
    """Reflection and replication padding, pixel shuffle, bilinear with aligned corners; a regression."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1, padding_mode="reflect")
        self.conv2 = nn.Conv2d(2, 4, 3, padding=1, padding_mode="replicate")
        self.conv3 = nn.Conv2d(4, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pixel_shuffle(torch.tanh(self.conv1(x)), 2)
        x = F.elu(self.conv2(x))
        x = F.interpolate(x, scale_factor=1.5, mode="bilinear", align_corners=True)
        return self.conv3(x)


class Norms(nn.Module):
    """Group and instance normalization with and without affine parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.group = nn.GroupNorm(4, 8)
        self.conv2 = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.instance = nn.InstanceNorm2d(8, affine=True)
        self.conv3 = nn.Conv2d(8, 6, 3, padding=1)
        self.plain = nn.InstanceNorm2d(6)
        self.single = nn.GroupNorm(1, 6)
        self.fc = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.group(self.conv1(x)))
        x = F.relu(self.instance(self.conv2(x)))
        x = self.conv3(x)
        x = self.single(x + 0.5 * self.plain(x).square())
        return self.fc(F.relu(x).amax((2, 3)))


class Conv1dNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(2, 8, 5, stride=2, padding=2)
        self.bn1 = nn.BatchNorm1d(8)
        self.conv2 = nn.Conv1d(8, 8, 3, padding=4, dilation=4, groups=4)
        self.up = nn.ConvTranspose1d(8, 6, 4, stride=2, padding=1)
        self.drop = nn.Dropout(0.0)
        self.fc = nn.Linear(6 * 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool1d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.avg_pool1d(F.elu(self.conv2(x)) + x, 2)
        x = self.drop(F.adaptive_avg_pool1d(F.leaky_relu(self.up(x)), 4))
        return F.log_softmax(self.fc(x.flatten(1)), 1)


class Conv3dNet(nn.Module):
    """With every bias: for a Conv3d without one, the dynamo exporter writes one of a wrong shape."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv3d(1, 4, 3, padding=1)
        self.bn = nn.BatchNorm3d(4)
        self.conv2 = nn.Conv3d(4, 6, (1, 3, 3), stride=(1, 2, 2))
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool3d(F.relu(self.bn(self.conv1(x))), (1, 2, 2))
        x = F.adaptive_avg_pool3d(F.softplus(self.conv2(x)), 1)
        return self.fc(x.flatten(1))


class ConvNext(nn.Module):
    """Patch stem, depthwise 7x7, channels-last layer norm, GELU MLP, layer scale."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 2, stride=2)
        self.depthwise = nn.Conv2d(8, 8, 7, padding=3, groups=8)
        self.norm = nn.LayerNorm(8, eps=1e-6)
        self.fc1 = nn.Linear(8, 24)
        self.fc2 = nn.Linear(24, 8)
        self.gamma = nn.Parameter(torch.full((8,), 0.5))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.gamma * self.fc2(F.gelu(self.fc1(y)))
        x = x + y.permute(0, 3, 1, 2)
        return self.head(x.mean([-2, -1]))


# --------------------------------------------------------------------------------------
# Transformers


class Encoder(nn.Module):
    """A post-norm nn.TransformerEncoderLayer over learned positions, with a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, 16))
        self.position = nn.Parameter(torch.zeros(7, 16))
        self.inputs = nn.Linear(5, 16)
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, activation="gelu", batch_first=True)
        self.fc = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), self.inputs(x)], 1) + self.position
        return self.fc(self.layer(x)[:, 0])


class Attention(nn.Module):
    """Post-norm multi-head attention written by hand, with an additive mask from a bool input."""

    def __init__(self, width: int = 12, heads: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, 24), nn.Linear(24, width)
        self.fc = nn.Linear(width, 3)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        scores = scores.masked_fill(mask[:, None, None, :], -1e9)
        mixed = (torch.softmax(scores, -1) @ value).transpose(1, 2).flatten(2)
        x = self.norm1(x + self.out(mixed))
        x = self.norm2(x + self.fc2(F.relu(self.fc1(x))))
        return self.fc(x.mean(1))


class Gpt(nn.Module):
    """Pre-norm causal decoder: fused q/k/v, scaled_dot_product_attention, tied output layer."""

    def __init__(self, vocabulary: int = 24, width: int = 16, heads: int = 2, length: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(length, width)
        self.drop = nn.Dropout(0.0)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 32), nn.Linear(32, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.wte.weight, std=0.2)
        self.head.weight = self.wte.weight

    def attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(x).split(width, -1)
        shape = (batch, length, self.heads, width // self.heads)
        query, key, value = (part.view(shape).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.proj(mixed.transpose(1, 2).reshape(batch, length, width))

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.wte(tokens) + self.wpe(positions))
        x = x + self.attend(self.norm1(x))
        x = x + self.fc2(F.gelu(self.fc1(self.norm2(x)), approximate="tanh"))
        return self.head(self.norm3(x)).flatten(0, 1)


class RmsNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


class Llama(nn.Module):
    """RMSNorm, rotary embedding, grouped-query attention under a causal mask, SwiGLU."""

    def __init__(self, vocabulary: int = 20, width: int = 16, heads: int = 4, length: int = 6) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.embed = nn.Embedding(vocabulary, width)
        self.norm1, self.norm2, self.norm3 = (RmsNorm(width) for _ in range(3))
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width // 2, bias=False)
        self.value = nn.Linear(width, width // 2, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, 24, bias=False)
        self.up = nn.Linear(width, 24, bias=False)
        self.down = nn.Linear(24, width, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        steps = torch.arange(0, self.size, 2) / self.size
        angles = torch.outer(torch.arange(length), 1.0 / 100.0**steps).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        mask = torch.full((length, length), -1e9).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def rotate(self, x: Tensor) -> Tensor:
        low, high = x.chunk(2, -1)
        return x * self.cos + torch.cat([-high, low], -1) * self.sin

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.size)).transpose(1, 2)

    def repeat(self, x: Tensor) -> Tensor:
        batch, heads, length, size = x.shape
        return x[:, :, None].expand(batch, heads, 2, length, size).reshape(batch, 2 * heads, length, size)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        y = self.norm1(x)
        query, key = self.rotate(self.split(self.query(y))), self.rotate(self.split(self.key(y)))
        key, value = self.repeat(key), self.repeat(self.split(self.value(y)))
        scores = torch.matmul(query, key.transpose(2, 3)) * self.size**-0.5 + self.mask
        mixed = torch.softmax(scores, -1).matmul(value)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        x = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return self.head(self.norm3(x)).flatten(0, 1)


# --------------------------------------------------------------------------------------
# Recurrent networks


class Recurrent(nn.Module):
    """A classifier over the last output of a recurrent layer (or of both directions)."""

    def __init__(self, layer: nn.Module, outputs: int) -> None:
        super().__init__()
        self.layer = layer
        self.fc = nn.Linear(outputs, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layer(x)[0][:, -1])


class TokenLstm(nn.Module):
    """Embedding, bidirectional LSTM with given initial states, max over time."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(15, 8)
        self.layer = nn.LSTM(8, 6, bidirectional=True)
        self.fc = nn.Linear(12 + 12, 4)

    def forward(self, tokens: Tensor, hidden: Tensor, cell: Tensor) -> Tensor:
        outputs, (last, _) = self.layer(self.embed(tokens), (hidden, cell))
        return self.fc(torch.cat([outputs.max(0).values, last[0], last[1]], 1))


def lstm() -> nn.Module:
    return Recurrent(nn.LSTM(5, 10, batch_first=True), 10)


def gru() -> nn.Module:
    return Recurrent(nn.GRU(5, 8, num_layers=2, batch_first=True), 8)


def rnn() -> nn.Module:
    return Recurrent(nn.RNN(5, 8, bidirectional=True, batch_first=True), 16)


# --------------------------------------------------------------------------------------
# Data movement, reductions, and models that return their own loss


class Indexing(nn.Module):
    """Indexing, gather, slices with steps, stack, split, where, expand, pad, einsum, masked_fill."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 8)
        self.core = nn.Parameter(torch.zeros(8, 4, 3))
        self.table = nn.Parameter(torch.zeros(5, 8))
        self.row = nn.Parameter(torch.zeros(1, 8))
        self.head = nn.Linear(29, 3)
        self.register_buffer("order", torch.tensor([3, 0, 0, 2]))

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        h = torch.tanh(self.fc(x))  # [batch, 6, 8]
        picked = h.gather(1, index[:, :, None].expand(-1, -1, 8))  # [batch, 3, 8]
        picked = picked + self.table[index] + self.row.expand(3, 8)
        first, second, third = picked.split([1, 1, 1], 1)
        stacked = torch.stack([first.squeeze(1), third.squeeze(1)], 1)  # [batch, 2, 8]
        chosen = h.index_select(1, self.order)  # [batch, 4, 8]
        strided = F.pad(h[:, 1::2, -3:], (1, 0, 0, 1), value=0.5)  # [batch, 4, 4]
        mixed = torch.einsum("bik,kjl->bijl", chosen, self.core)  # [batch, 4, 4, 3]
        strided = strided[..., None]
        mixed = torch.where(strided > 0, mixed, 0.1 * mixed).masked_fill(strided < -0.6, 0.3)
        flipped = torch.flip(stacked, [2]).reshape(x.shape[0], -1)
        flipped = flipped + second.repeat(1, 1, 2).view(x.shape[0], 16)
        low, high = torch.unbind(mixed.sum(-1)[:, :2], 1)
        tail = torch.roll(h[:, 0], 3, 1)[:, None].tile(1, 2, 1).amax(1)[:, :5]
        return self.head(torch.cat([flipped, low, high, tail], 1))


class Reductions(nn.Module):
    """Sums, means, extremes, norms, variances, products and elementwise mathematics."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 12)
        self.scale = nn.Parameter(torch.ones(4, 1))
        self.fc2 = nn.Linear(14, 8)
        self.fc3 = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x).view(-1, 4, 3)
        e = torch.exp(0.3 * h) * self.scale
        features = [
            e.sum(-1).log(), e.mean((1, 2))[:, None].sqrt(), h.amax(-1).clamp(-1.0, 1.0).sum(1, keepdim=True),
            h.amin(1), torch.linalg.vector_norm(h + 2, dim=(1, 2))[:, None], h.var((1, 2))[:, None],
            torch.logsumexp(h.flatten(1), 1, keepdim=True), e.prod(2).mean(1, keepdim=True),
            h[:, 0, 0].abs()[:, None].pow(1.5),
        ]  # fmt: skip
        y = torch.cat(features, 1)
        y = torch.maximum(torch.sin(y), torch.cos(y)) - torch.minimum(torch.erf(y), y.reciprocal().tanh())
        y = self.fc2(y) / (1.0 + torch.atan(y[:, :8]).square())
        return self.fc3(-y.neg().sign() * torch.log1p(y.abs()))


class InternalNll(nn.Module):
    """Returns the scalar negative log likelihood itself (as a gather, with a penalty on weights)."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(10, 20)
        self.fc2 = nn.Linear(20, 6)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        scores = F.log_softmax(self.fc2(torch.sigmoid(self.fc1(x))), -1)
        return F.nll_loss(scores, label) + 1e-2 * self.fc1.weight.square().sum()


class InternalCrossEntropy(nn.Module):
    """Returns a scalar cross entropy with an ignored label and class weights."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(10, 16)
        self.fc2 = nn.Linear(16, 5)
        self.register_buffer("weight", torch.tensor([1.0, 0.5, 2.0, 1.5, 0.8]))

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(self.fc2(F.relu(self.fc1(x))), label, self.weight, ignore_index=-100)


class InternalMse(nn.Module):
    """Returns the scalar mean squared error itself, plus an L1 and a smooth L1 term."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.fc2 = nn.Linear(16, 2)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        y = self.fc2(torch.tanh(self.fc1(x)))
        error = (y - target).abs()
        smooth = torch.where(error < 0.5, error.square(), error - 0.25).mean()
        return F.mse_loss(y, target) + 0.1 * error.mean() + 0.1 * smooth


# --------------------------------------------------------------------------------------
# The list


Inputs = Callable[[torch.Generator], dict[str, Tensor]]
Label = Callable[[torch.Generator], Tensor]
Data = Callable[[torch.Generator], tuple[dict[str, Tensor], Tensor | None]]
TRAIN, EVAL, BOTH = ("train",), ("eval",), ("train", "eval")


@dataclass(frozen=True)
class Network:
    """A network, its fixed batch, its loss, and the exports to make of it."""

    name: str
    build: Callable[[], nn.Module]
    data: Data
    loss: str
    lr: float
    torchscript: tuple[str, ...] = EVAL
    dynamo: tuple[str, ...] = EVAL
    torchscript_opset: int = 17
    dynamo_opset: int = 18
    dynamic_batch: bool = False
    fresh: bool = False  # keeps the initial values of PyTorch: see README.md, "shared"


def real(*shape: int, **more: tuple[int, ...]) -> Inputs:
    """Makes normally distributed inputs: `x` of the given shape, and the further ones by name."""
    shapes = {"x": shape, **more}
    return lambda g: {key: torch.randn(size, generator=g) for key, size in shapes.items()}


def tokens(vocabulary: int, *shape: int) -> Inputs:
    return lambda g: {"tokens": torch.randint(0, vocabulary, shape, generator=g)}


def classes(count: int, *shape: int) -> Label:
    return lambda g: torch.randint(0, count, shape, generator=g)


def targets(*shape: int) -> Label:
    return lambda g: torch.randn(shape, generator=g)


def batch(inputs: Inputs, label: Label) -> Data:
    return lambda g: (inputs(g), label(g))


def attention_data(g: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    mask = torch.arange(5)[None, :] >= torch.tensor([5, 4, 3, 5])[:, None]
    return {"x": torch.randn(4, 5, 12, generator=g), "mask": mask}, classes(3, 4)(g)


def lstm_data(g: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    states = real(hidden=(2, 4, 6), cell=(2, 4, 6))(g)
    return {**tokens(15, 6, 4)(g), "hidden": states["hidden"], "cell": states["cell"]}, classes(4, 4)(g)


def indexing_data(g: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    return {"x": torch.randn(4, 6, 6, generator=g), "index": classes(5, 4, 3)(g)}, targets(4, 3)(g)


def multilabel_data(g: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    return real(8, 14)(g), (torch.rand(8, 5, generator=g) > 0.5).float()


def ignoring_data(g: torch.Generator) -> tuple[dict[str, Tensor], None]:
    label = classes(5, 8)(g)
    label[2] = -100
    return {"x": torch.randn(8, 10, generator=g), "label": label}, None


def internal(inputs: Inputs, name: str, label: Label) -> Data:
    return lambda g: ({**inputs(g), name: label(g)}, None)


NETWORKS = [
    Network("mlp_relu", mlp_relu, batch(real(8, 16), classes(10, 8)), "cross_entropy", 0.3, TRAIN, EVAL,
            dynamic_batch=True),
    Network("mlp_gelu", MlpGelu, batch(real(8, 12), targets(8, 3)), "mse", 0.1, TRAIN, EVAL, 17, 20),
    Network("mlp_activations", mlp_activations, batch(real(6, 10), targets(6, 4)), "mse", 0.02, TRAIN, EVAL,
            18, 22),
    Network("mlp_activations2", mlp_activations2, batch(real(6, 10), targets(6, 4)), "mse", 0.02),
    Network("mlp_batchnorm", mlp_batchnorm, multilabel_data, "bce_with_logits", 0.9, BOTH, BOTH, 13),
    Network("lenet", LeNet, batch(real(4, 1, 14, 14), classes(10, 4)), "cross_entropy", 0.3, TRAIN, EVAL, 12),
    Network("resnet", ResNet, batch(real(4, 3, 12, 12), classes(6, 4)), "cross_entropy", 0.1, BOTH, BOTH,
            dynamic_batch=True),
    Network("mobilenet", mobilenet, batch(real(4, 3, 16, 16), classes(5, 4)), "cross_entropy", 0.1, BOTH,
            BOTH, 14),
    Network("unet", UNet, batch(real(2, 2, 8, 8), classes(3, 2, 8, 8)), "cross_entropy", 2.0, BOTH, BOTH),
    Network("upsampler", Upsampler, batch(real(4, 1, 6, 6), targets(4, 1, 18, 18)), "mse", 0.1, EVAL, TRAIN),
    Network("norms", Norms, batch(real(4, 3, 8, 8), classes(4, 4)), "cross_entropy", 0.03, TRAIN, EVAL, 17,
            21),
    Network("conv1d", Conv1dNet, batch(real(4, 2, 32), classes(4, 4)), "nll", 0.1, BOTH, BOTH),
    Network("conv3d", Conv3dNet, batch(real(4, 1, 4, 8, 8), classes(3, 4)), "cross_entropy", 0.1, BOTH, BOTH),
    Network("convnext", ConvNext, batch(real(4, 3, 12, 12), classes(5, 4)), "cross_entropy", 0.3, TRAIN, EVAL,
            20, 20),
    Network("encoder", Encoder, batch(real(4, 6, 5), classes(4, 4)), "cross_entropy", 0.03, BOTH, EVAL,
            dynamic_batch=True),
    Network("attention", Attention, attention_data, "cross_entropy", 0.1, EVAL, TRAIN),
    Network("gpt", Gpt, batch(tokens(24, 4, 8), classes(24, 32)), "cross_entropy", 0.2, BOTH, EVAL, 17, 23),
    Network("llama", Llama, batch(tokens(20, 4, 6), classes(20, 24)), "cross_entropy", 0.2, EVAL, EVAL, 16),
    Network("lstm", lstm, batch(real(4, 6, 5), classes(4, 4)), "cross_entropy", 0.3),
    Network("lstm_tokens", TokenLstm, lstm_data, "cross_entropy", 0.2, TRAIN, EVAL, 14),
    Network("gru", gru, batch(real(4, 6, 5), classes(4, 4)), "cross_entropy", 0.3, TRAIN, EVAL),
    Network("rnn", rnn, batch(real(4, 6, 5), classes(4, 4)), "cross_entropy", 0.1),
    Network("indexing", Indexing, indexing_data, "mse", 0.05),
    Network("reductions", Reductions, batch(real(6, 6), targets(6, 3)), "mse", 0.05),
    Network("internal_nll", InternalNll, internal(real(8, 10), "label", classes(6, 8)), "internal", 0.3,
            TRAIN, EVAL),
    Network("internal_cross_entropy", InternalCrossEntropy, ignoring_data, "internal", 0.2, TRAIN, EVAL),
    Network("internal_mse", InternalMse, internal(real(8, 8), "target", targets(8, 2)), "internal", 0.1,
            TRAIN, EVAL, 16),
    Network("mlp_fresh", mlp_fresh, batch(real(8, 10), classes(4, 8)), "cross_entropy", 0.3, BOTH,
            fresh=True),
]  # fmt: skip
