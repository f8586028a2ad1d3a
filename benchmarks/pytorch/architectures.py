"""Small configurations of architectures of torchvision and Hugging Face transformers, for comparisons with PyTorch.

Each entry makes (module, example inputs, loss): the loss is a function of the module's output, or None where the
module gives a loss itself.  Needs torch, transformers and, for the first group, torchvision's Python code.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

# where torchvision's compiled part is built for another PyTorch: what registers its operators is left out
sys.modules.setdefault("torchvision._meta_registrations", types.ModuleType("torchvision._meta_registrations"))

Made = tuple[Any, Any, Callable[..., Any] | None]
ARCHITECTURES: dict[str, Callable[[], Made]] = {}
_WORDS, _LENGTH = 61, 9


def _register(name: str) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    def put(make: Callable[[], Made]) -> Callable[[], Made]:
        ARCHITECTURES[name] = make
        return make

    return put


# -- torchvision -------------------------------------------------------------------------------------------------------


def _classifier(output: Any) -> Any:
    """Cross entropy with fixed labels of whatever the module calls its scores, at any batch."""
    scores = output if isinstance(output, torch.Tensor) else output[0]
    return functional.cross_entropy(scores, torch.ones_like(scores[:, 0]).cumsum(0).long() % scores.shape[1])


def _vision(name: str, size: int = 64, **options: Any) -> None:
    def make() -> Made:
        import torchvision.models as zoo

        return getattr(zoo, name)(weights=None, num_classes=7, **options), (torch.randn(2, 3, size, size),), _classifier

    ARCHITECTURES[f"torchvision/{name}"] = make


for _name in ("alexnet", "vgg11_bn", "resnet18", "resnext50_32x4d", "squeezenet1_1", "densenet121", "mobilenet_v2",
              "mobilenet_v3_small", "mnasnet0_5", "shufflenet_v2_x0_5", "efficientnet_b0", "regnet_y_400mf",
              "convnext_tiny", "swin_t", "swin_v2_t"):  # fmt: skip
    _vision(_name)
_vision("googlenet", 96, aux_logits=False, init_weights=False)
_vision("vit_b_16", 32, image_size=32)
# of 96 pixels the last statistics are of two values: there PyTorch differs from itself in channels_last by as much
_vision("inception_v3", 160, aux_logits=False, init_weights=False)


def _small(name: str, make: Callable[[Any], Any], size: int = 64) -> None:
    """A small configuration of one of torchvision's classes, of which the named ones are large."""

    def made() -> Made:
        import torchvision.models as zoo

        return make(zoo), (torch.randn(2, 3, size, size),), _classifier

    ARCHITECTURES[f"torchvision/small_{name}"] = made


def _small_convnext(zoo: Any) -> Any:
    blocks = [zoo.convnext.CNBlockConfig(8, 16, 1), zoo.convnext.CNBlockConfig(16, None, 2)]
    return zoo.ConvNeXt(blocks, stochastic_depth_prob=0.1, num_classes=7)


def _small_swin(zoo: Any, window: int = 4, **options: Any) -> Any:
    shape: dict[str, Any] = {"depths": [2, 2], "num_heads": [1, 2], "window_size": [window, window]}
    return zoo.SwinTransformer([4, 4], 8, num_classes=7, stochastic_depth_prob=0.1, **shape, **options)


def _small_swin_v2(zoo: Any) -> Any:
    swin = zoo.swin_transformer
    return _small_swin(zoo, 2, block=swin.SwinTransformerBlockV2, downsample_layer=swin.PatchMergingV2)


_small("vit", lambda zoo: zoo.VisionTransformer(32, 8, 2, 2, 16, 24, num_classes=7), 32)
_small("convnext", _small_convnext)
_small("swin", _small_swin)
_small("swin_v2", _small_swin_v2)
_small("resnext", lambda zoo: zoo.ResNet(zoo.resnet.Bottleneck, [1] * 4, 7, groups=4, width_per_group=4))


# -- transformers ------------------------------------------------------------------------------------------------------

_SMALL = {
    "vocab_size": _WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 32,
}  # fmt: skip
_DECODER = {**_SMALL, "num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SEQ = {
    "vocab_size": _WORDS, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
}  # fmt: skip


def _words(rows: int = 2) -> Any:
    return torch.randint(3, _WORDS, (rows, _LENGTH))


def _masked(family: str, **options: Any) -> None:
    """Masked-word models: the loss is theirs."""

    def make() -> Made:
        import transformers as hf

        module = getattr(hf, f"{family}ForMaskedLM")(getattr(hf, f"{family}Config")(**{**_SMALL, **options}))
        return module, {"input_ids": _words(), "labels": _words()}, None

    ARCHITECTURES[f"transformers/{family}"] = make


def _causal(family: str, **options: Any) -> None:
    """Next-word models."""

    def make() -> Made:
        import transformers as hf

        kind = getattr(hf, f"{family}ForCausalLM", None) or getattr(hf, f"{family}LMHeadModel")
        module = kind(getattr(hf, f"{family}Config")(**options, use_cache=False))
        return module, {"input_ids": _words(), "labels": _words()}, None

    ARCHITECTURES[f"transformers/{family}"] = make


def _translation(family: str, **options: Any) -> None:
    """Encoder and decoder."""

    def make() -> Made:
        import transformers as hf

        kind = getattr(hf, f"{family}ForConditionalGeneration", None) or getattr(hf, f"{family}MTModel")
        module = kind(getattr(hf, f"{family}Config")(**options, use_cache=False))
        return module, {"input_ids": _words(), "labels": _words()}, None

    ARCHITECTURES[f"transformers/{family}"] = make


for _family in ("Bert", "Roberta", "Electra", "XLMRoberta", "Camembert", "RoFormer", "ConvBert", "MPNet", "Deberta",
                "DebertaV2"):  # fmt: skip
    _masked(_family, **({"embedding_size": 16} if _family in ("Electra", "RoFormer", "ConvBert") else {}))
_masked("Albert", embedding_size=8)
_masked("DistilBert", dim=16, n_layers=2, n_heads=2, hidden_dim=24)
_masked("MobileBert", embedding_size=16, intra_bottleneck_size=16, true_hidden_size=16)
for _family in ("Llama", "Mistral", "Qwen2", "Gemma", "Phi", "StableLm", "Olmo", "Qwen3"):
    _causal(_family, **_DECODER, **({"head_dim": 8} if _family in ("Gemma", "Qwen3") else {}))
_causal("GPT2", vocab_size=_WORDS, n_embd=16, n_layer=2, n_head=2, n_positions=32)
_causal("GPTNeoX", **_SMALL)
_causal("GPTNeo", vocab_size=_WORDS, hidden_size=16, num_layers=2, attention_types=[[["global", "local"], 1]],
        num_heads=2, max_position_embeddings=32)  # fmt: skip
_causal("OPT", **{**_SMALL, "ffn_dim": 24, "word_embed_proj_dim": 16})
_causal("Bloom", vocab_size=_WORDS, hidden_size=16, n_layer=2, n_head=2)
_translation("T5", vocab_size=_WORDS, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0)
for _family in ("Bart", "MBart", "Pegasus", "M2M100", "BlenderbotSmall"):
    _translation(_family, **_SEQ)
_translation("Marian", **_SEQ)


def _pictures(family: str, **options: Any) -> None:
    """Image classifiers."""

    def make() -> Made:
        import transformers as hf

        module = getattr(hf, f"{family}ForImageClassification")(getattr(hf, f"{family}Config")(num_labels=7, **options))
        return module, {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([1, 2])}, None

    ARCHITECTURES[f"transformers/{family}"] = make


_PATCHES = {
    "image_size": 32, "patch_size": 8, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24,
}  # fmt: skip
for _family in ("ViT", "DeiT", "Beit"):
    _pictures(_family, **_PATCHES)
_pictures("Swin", image_size=32, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=4)
_pictures("ConvNext", num_stages=2, hidden_sizes=[8, 16], depths=[1, 1])
_pictures("ConvNextV2", num_stages=2, hidden_sizes=[8, 16], depths=[1, 1])
_pictures("Segformer", num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16],
          patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2])  # fmt: skip
_pictures("ResNet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])


@_register("transformers/Whisper")
def _whisper() -> Made:
    import transformers as hf

    config = hf.WhisperConfig(**{k: v for k, v in _SEQ.items() if k != "max_position_embeddings"}, num_mel_bins=8,
                              max_source_positions=20, max_target_positions=16, use_cache=False)  # fmt: skip
    return (
        hf.WhisperForConditionalGeneration(config),
        {"input_features": torch.randn(2, 8, 40), "labels": _words()},
        None,
    )


@_register("transformers/CLIP")
def _clip() -> Made:
    import transformers as hf

    text = {**_SMALL, "projection_dim": 12, "eos_token_id": 2}
    picture = {**_PATCHES, "projection_dim": 12}
    module = hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=picture, projection_dim=12))
    return (
        module,
        {"input_ids": _words(), "pixel_values": torch.randn(2, 3, 32, 32)},
        lambda o: _classifier(o["logits_per_image"]),
    )


@_register("transformers/Wav2Vec2")
def _speech() -> Made:
    import transformers as hf

    config = hf.Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, conv_dim=(8, 8),
        conv_stride=(5, 2), conv_kernel=(10, 3), num_feat_extract_layers=2, num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2, mask_time_prob=0.0, layerdrop=0.0, num_labels=7, classifier_proj_size=12,
    )  # fmt: skip
    module = hf.Wav2Vec2ForSequenceClassification(config)
    return module, {"input_values": torch.randn(2, 400), "labels": torch.tensor([1, 2])}, None
