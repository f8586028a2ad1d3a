"""Makes attention.zip: small networks with attention as both exporters of PyTorch write them, in train mode, float32.

    python tests/data/attention/make.py [NAME ...]

makes all, or those named; needs torch and transformers.  NAME.dynamo.onnx and NAME.script.onnx; what an exporter cannot
write is in missing.json with PyTorch's reason.  Weights are not stored: see drawn.py beside it.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from drawn import strip
from torch import nn
from torch.nn import functional

import recompute as rc

FILE = Path(__file__).parent / "attention.zip"
WORDS, LENGTH = 31, 12
FAMILIES: dict[str, Callable[[], tuple[Any, Any]]] = {}
_SMALL = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
          "intermediate_size": 24, "max_position_embeddings": 32}  # fmt: skip
_DECODER = {**_SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "attention_dropout": 0.1}
_SEQ = {"vocab_size": WORDS, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "pad_token_id": 0,
        "decoder_start_token_id": 2, "attention_dropout": 0.1}  # fmt: skip


def words() -> Any:
    """Two sentences."""
    return torch.randint(3, WORDS, (2, LENGTH))


def padding() -> Any:
    """The second sentence is shorter."""
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, 8:] = 0
    return mask


class First(nn.Module):
    """A module's first result of some inputs, given by position."""

    def __init__(self, module: Any, *names: str) -> None:
        super().__init__()
        self.model, self.names = module, names

    def forward(self, *values: Any) -> Any:
        """Its logits, last hidden state, or whatever comes first."""
        output = self.model(**dict(zip(self.names, values, strict=True))) if self.names else self.model(*values)
        return output[0] if isinstance(output, tuple) else next(iter(output.values()))


def _hugging_face(
    name: str, kind: str, given: dict[str, Callable[[], Any]], eager: bool = False, **options: Any
) -> None:
    def make() -> tuple[Any, Any]:
        import transformers as hf

        config = getattr(hf, f"{kind.partition(':')[0]}Config")(**options)
        if eager:
            config._attn_implementation = "eager"
        if hasattr(config, "use_cache"):
            config.use_cache = False
        module = getattr(hf, kind.replace(":", ""))(config)
        return First(module, *given), tuple(f() for f in given.values())

    FAMILIES[name] = make


_IDS = {"input_ids": words}
_PADDED = {**_IDS, "attention_mask": padding}
_hugging_face("bert", "Bert:Model", _PADDED, **_SMALL, add_pooling_layer=False)
_hugging_face("bert_eager", "Bert:Model", _PADDED, eager=True, **_SMALL)
_hugging_face("distilbert", "DistilBert:Model", _PADDED, vocab_size=WORDS, dim=16, n_layers=2, n_heads=2, hidden_dim=24)
_hugging_face("gpt2", "GPT2:LMHeadModel", _IDS, vocab_size=WORDS, n_embd=16, n_layer=2, n_head=2, n_positions=32)
_hugging_face("gpt2_eager", "GPT2:LMHeadModel", _PADDED, eager=True, vocab_size=WORDS, n_embd=16, n_layer=2, n_head=2,
              n_positions=32)  # fmt: skip
_hugging_face("gpt_neox", "GPTNeoX:ForCausalLM", _IDS, **_SMALL)
_hugging_face("gpt_neox_padded", "GPTNeoX:ForCausalLM", _PADDED, **_SMALL)
_hugging_face("llama", "Llama:ForCausalLM", _IDS, **_DECODER)
_hugging_face("llama_padded", "Llama:ForCausalLM", _PADDED, **_DECODER)
_hugging_face("mistral", "Mistral:ForCausalLM", _IDS, **_DECODER, sliding_window=4)
_hugging_face("mistral_padded", "Mistral:ForCausalLM", _PADDED, **_DECODER, sliding_window=4)
_hugging_face("gemma2_padded", "Gemma2:ForCausalLM", _PADDED, eager=True, **_DECODER, head_dim=4, sliding_window=4)
_hugging_face("gemma2", "Gemma2:ForCausalLM", _IDS, eager=True, **_DECODER, head_dim=4, sliding_window=4)
_hugging_face("t5", "T5:Model", {"input_ids": words, "decoder_input_ids": words}, vocab_size=WORDS, d_model=16, d_kv=8,
              d_ff=24, num_layers=1, num_heads=2)  # fmt: skip
_hugging_face("bart", "Bart:Model", {"input_ids": words, "decoder_input_ids": words}, **_SEQ)
_hugging_face("whisper", "Whisper:Model", {"input_features": lambda: torch.randn(2, 8, 40), "decoder_input_ids": words},
              **_SEQ, num_mel_bins=8, max_source_positions=20, max_target_positions=16)  # fmt: skip
_hugging_face("whisper_padded", "Whisper:Model",
              {"input_features": lambda: torch.randn(2, 8, 40), "decoder_input_ids": words,
               "decoder_attention_mask": padding},
              **_SEQ, num_mel_bins=8, max_source_positions=20, max_target_positions=16)  # fmt: skip
_hugging_face("deberta", "Deberta:Model", _IDS, **_SMALL, relative_attention=True, pos_att_type=["c2p", "p2c"])
_hugging_face("deberta_v2", "DebertaV2:Model", _PADDED, **_SMALL, relative_attention=True, pos_att_type=["c2p", "p2c"])
_hugging_face("bloom", "Bloom:ForCausalLM", _IDS, vocab_size=WORDS, hidden_size=16, n_layer=2, n_head=2)
_PICTURE = {"pixel_values": lambda: torch.randn(2, 3, 32, 32)}
_PATCHES = {"image_size": 32, "patch_size": 8, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
            "intermediate_size": 24, "attention_probs_dropout_prob": 0.1}  # fmt: skip
_hugging_face("vit", "ViT:Model", _PICTURE, **_PATCHES)
_hugging_face("swin", "Swin:Model", _PICTURE, image_size=32, patch_size=4, embed_dim=8, depths=[2], num_heads=[2],
              window_size=4)  # fmt: skip
_hugging_face("clip_text", "CLIPText:Model", _IDS, **_SMALL, attention_dropout=0.1)


def _register(make: Callable[[], tuple[Any, Any]]) -> None:
    FAMILIES[make.__name__.removeprefix("_")] = make


class Products(nn.Module):
    """Queries, keys and values from one input, and `scaled_dot_product_attention`."""

    def __init__(self, heads: int, shared: int, **options: Any) -> None:
        super().__init__()
        self.heads, self.shared, self.options = heads, shared, options
        self.q, self.k, self.v = (nn.Linear(16, 4 * n) for n in (heads, shared, shared))

    def forward(self, x: Any) -> Any:
        """[batch, steps, 16]."""
        counts = (self.heads, self.shared, self.shared)
        q, k, v = (
            f(x).view(x.shape[0], x.shape[1], n, 4).transpose(1, 2)
            for f, n in zip((self.q, self.k, self.v), counts, strict=True)
        )
        y = functional.scaled_dot_product_attention(q, k, v, **self.options)
        return y.transpose(1, 2).flatten(2)


@_register
def _causal_product() -> tuple[Any, Any]:
    return Products(2, 2, is_causal=True, dropout_p=0.2), (torch.randn(2, LENGTH, 16),)


@_register
def _grouped_product() -> tuple[Any, Any]:
    return Products(4, 2, is_causal=True, enable_gqa=True), (torch.randn(2, LENGTH, 16),)


@_register
def _multihead() -> tuple[Any, Any]:
    class Self(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2, dropout=0.1, batch_first=True)

        def forward(self, x: Any) -> Any:
            return self.attention(x, x, x, need_weights=False)[0]

    return Self(), (torch.randn(2, LENGTH, 16),)


@_register
def _encoder_layer() -> tuple[Any, Any]:
    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)

        def forward(self, x: Any) -> Any:
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            return self.layer(x, src_mask=mask, is_causal=True)

    return Causal(), (torch.randn(2, LENGTH, 16),)


def main() -> None:
    """Makes what is asked, keeping the rest."""
    kept: dict[str, bytes] = {}
    if FILE.exists():
        with zipfile.ZipFile(FILE) as old:
            kept = {n: old.read(n) for n in old.namelist()}
    missing = json.loads(kept.pop("missing.json", b"{}"))
    for name in sys.argv[1:] or FAMILIES:
        for short, exporter in (("dynamo", "dynamo"), ("script", "torchscript")):
            file = f"{name}.{short}.onnx"
            kept.pop(file, None)
            missing.pop(file, None)
            torch.manual_seed(0)
            try:
                module, inputs = FAMILIES[name]()
                with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
                    warnings.simplefilter("ignore")
                    source = rc.from_torch(module.train(), inputs, exporter=exporter).source
                kept[file] = strip(source)
            except Exception as e:
                missing[file] = f"{type(e).__name__}: {e}".strip().replace("\n", " ")[:300]
            print(file, len(kept.get(file, b"")), missing.get(file, ""), flush=True)
    kept["missing.json"] = json.dumps(missing, indent=1, sort_keys=True).encode()
    with zipfile.ZipFile(FILE, "w", zipfile.ZIP_LZMA) as new:
        for n in sorted(kept):
            new.writestr(zipfile.ZipInfo(n), kept[n], zipfile.ZIP_LZMA)
    print(f"{FILE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
