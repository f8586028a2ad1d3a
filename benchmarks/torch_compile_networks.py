"""Networks for `torch_compile.py`: name -> (module, example inputs); small ones run, full ones
are planned on fake tensors.

Each returns its loss alone, as a training step has it.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

SMALL = ("gpt2", "bert", "llama", "vit", "resnet50", "unet")


class Loss(nn.Module):
    """A network of transformers that returns its loss."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss of labels of the shape of `ids`."""
        return self.network(input_ids=ids, labels=labels).loss


class Classified(nn.Module):
    """A classifier of images, or of every pixel, and its cross-entropy."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss."""
        return F.cross_entropy(self.network(images), labels)


class UNet(nn.Module):
    """The U-Net of Ronneberger et al. (2015) with padding and batch normalisation."""

    def __init__(self, width: int, levels: int = 4, classes: int = 4) -> None:
        super().__init__()
        sizes = [width << i for i in range(levels + 1)]
        self.down = nn.ModuleList(self.twice(a, b) for a, b in zip([3, *sizes], sizes, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * s, s, 2, 2) for s in sizes[:-1][::-1])
        self.join = nn.ModuleList(self.twice(2 * s, s) for s in sizes[:-1][::-1])
        self.head = nn.Conv2d(width, classes, 1)

    @staticmethod
    def twice(a: int, b: int) -> nn.Module:
        """Two convolutions, each normalised."""
        layers = [nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True)]
        return nn.Sequential(
            *layers, nn.Conv2d(b, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of each pixel."""
        kept = []
        for i, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if i else x)
            kept.append(x)
        for up, join, beside in zip(self.up, self.join, kept[-2::-1], strict=True):
            x = join(torch.cat([up(x), beside], 1))
        return self.head(x)


def build(name: str, full: bool = False, dropout: float = 0.1) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A network in train mode and a batch for it."""
    torch.manual_seed(0)
    if name in ("vit", "resnet50", "unet"):
        return _images(name, full, dropout)
    return _texts(name, full, dropout)


def _texts(name: str, full: bool, dropout: float) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    import transformers as t

    sizes = {  # batch, length, vocabulary, width, layers, heads
        "gpt2": (8, 1024, 50257, 768, 12, 12) if full else (4, 128, 1000, 128, 6, 4),
        "bert": (32, 512, 30522, 768, 12, 12) if full else (4, 128, 1000, 128, 6, 4),
        "llama": (1, 8192, 128256, 4096, 32, 32) if full else (2, 256, 1000, 128, 8, 4),
    }
    batch, length, vocabulary, width, layers, heads = sizes[name]
    common = {"vocab_size": vocabulary, "max_position_embeddings": length, "use_cache": False}
    if name == "gpt2":
        pd = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
        common = {"vocab_size": vocabulary, "n_positions": length, "use_cache": False}
        network = t.GPT2LMHeadModel(t.GPT2Config(**common, n_embd=width, n_layer=layers, n_head=heads, **pd))
        network.loss_type = "ForCausalLM"  # else a warning breaks the graph in two
    else:
        common |= {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
        if name == "bert":
            common |= {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
            network = t.BertForMaskedLM(t.BertConfig(**common, intermediate_size=4 * width))
        else:
            inner = {"intermediate_size": 14336 if full else 384, "num_key_value_heads": heads // 4}
            network = t.LlamaForCausalLM(t.LlamaConfig(**common, **inner))
    ids = torch.randint(0, vocabulary, (batch, length))
    return Loss(network.train()), (ids, ids.clone())


def _images(name: str, full: bool, dropout: float) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    import torchvision

    size, batch = (224, 64) if full else (64, 16)
    if name == "vit":
        shape = (16, 12, 12, 768, 3072) if full else (8, 6, 4, 128, 512)
        network: nn.Module = torchvision.models.VisionTransformer(size, *shape, dropout=dropout, num_classes=100)
    elif name == "resnet50":
        network = torchvision.models.resnet50(num_classes=100)
    else:
        size, batch = (256, 32) if full else (64, 4)
        network = UNet(64 if full else 16)
        return Classified(network.train()), (
            torch.randn(batch, 3, size, size),
            torch.randint(0, 4, (batch, size, size)),
        )
    return Classified(network.train()), (torch.randn(batch, 3, size, size), torch.randint(0, 100, (batch,)))


def layers_of_27(count: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A stack of pre-norm transformer layers: the kind of network that PyTorch's issue 197838 reports."""
    import transformers as t

    torch.manual_seed(0)
    sizes = {"vocab_size": 1000, "hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4}
    config = t.LlamaConfig(**sizes, num_hidden_layers=count, max_position_embeddings=512, use_cache=False)
    ids = torch.randint(0, 1000, (1, 512))
    return Loss(t.LlamaForCausalLM(config).train()), (ids, ids.clone())


def llama_8b(batch: int = 1, length: int = 2048) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """LLaMA 3 8B in bfloat16: its sizes."""
    import transformers as t

    sizes = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192}
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        network = t.LlamaForCausalLM(t.LlamaConfig(**sizes, **heads, rope_theta=5e5, use_cache=False))
    finally:
        torch.set_default_dtype(before)
    ids = torch.randint(0, 128256, (batch, length))
    return Loss(network.train()), (ids, ids)
