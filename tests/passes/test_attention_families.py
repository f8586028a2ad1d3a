"""Attention is found in what both exporters of PyTorch write for many families, and computes the same.

tests/data/attention/make.py made the files, in train mode, with dropout; nothing here needs PyTorch.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest

import recompute as rc
from recompute.language.ir import Block
from recompute.language.program import Program
from recompute.language.types import TensorType
from recompute.passes.attention.find_attention import find_attention
from recompute.passes.gradient.autodiff import differentiate
from recompute.testing import weighted_loss

FOLDER = Path(__file__).parents[1] / "data" / "attention"
_spec = importlib.util.spec_from_file_location("drawn_attention", FOLDER / "drawn.py")
assert _spec is not None and _spec.loader is not None
drawn = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(drawn)

BOTH, DYNAMO, SCRIPT = ("dynamo", "script"), ("dynamo",), ("script",)
CAUSAL = "keys from the first to +0 of each query"
#: family → exporters that can write it, layers with attention, notes of windows, caps and dropout, largest bias.
#: TorchScript's exporter has no `aten::diff`, which transformers calls where no padding is given, and no shared heads;
#: dynamo's fails on the Swin of transformers
FAMILIES: dict[str, tuple[tuple[str, ...], int, tuple[str, ...], tuple[int, ...]]] = {
    "bart": (BOTH, 3, ("dropout 0.1", f"{CAUSAL}, dropout 0.1"), ()),
    "bert": (BOTH, 2, ("dropout 0.1",), (2, 1, 1, 12)),
    "bert_eager": (BOTH, 2, ("dropout 0.1",), (2, 1, 1, 12)),
    "bloom": (BOTH, 2, (CAUSAL,), (2, 2, 1, 12)),
    "causal_product": (BOTH, 1, (f"{CAUSAL}, dropout 0.2",), ()),
    "clip_text": (BOTH, 2, (f"{CAUSAL}, dropout 0.1",), ()),
    "deberta": (BOTH, 2, ("dropout 0.1",), (2, 2, 12, 12)),
    "deberta_v2": (BOTH, 2, ("dropout 0.1",), (2, 2, 12, 12)),
    "distilbert": (BOTH, 2, ("dropout 0.1",), (2, 1, 1, 12)),
    "encoder_layer": (BOTH, 1, (f"{CAUSAL}, dropout 0.1",), ()),
    "gemma2": (DYNAMO, 2, ("keys from -3 to +0 of each query, soft cap 50, dropout 0.1",
                           f"{CAUSAL}, soft cap 50, dropout 0.1"), ()),
    "gemma2_padded": (BOTH, 2, ("keys from -3 to +0 of each query, soft cap 50, dropout 0.1",
                                f"{CAUSAL}, soft cap 50, dropout 0.1"), (2, 1, 1, 1, 12)),
    "gpt2": (DYNAMO, 2, (f"{CAUSAL}, dropout 0.1",), ()),
    "gpt2_eager": (BOTH, 2, (f"{CAUSAL}, dropout 0.1",), (2, 1, 1, 12)),
    "gpt_neox": (DYNAMO, 2, (CAUSAL,), ()),
    "gpt_neox_padded": (BOTH, 2, (CAUSAL,), (2, 1, 1, 12)),
    "grouped_product": (DYNAMO, 1, (CAUSAL,), ()),
    "llama": (DYNAMO, 2, (f"{CAUSAL}, dropout 0.1",), ()),
    "llama_padded": (BOTH, 2, (f"{CAUSAL}, dropout 0.1",), (2, 1, 1, 1, 12)),
    "mistral": (DYNAMO, 2, ("keys from -3 to +0 of each query, dropout 0.1",), ()),
    "mistral_padded": (BOTH, 2, ("keys from -3 to +0 of each query, dropout 0.1",), (2, 1, 1, 1, 12)),
    "multihead": (BOTH, 1, ("dropout 0.1",), ()),
    "swin": (SCRIPT, 2, ("",), (8, 2, 16, 16)),
    "t5": (BOTH, 3, ("dropout 0.1", f"{CAUSAL}, dropout 0.1"), (1, 2, 12, 12)),
    "vit": (BOTH, 2, ("dropout 0.1",), ()),
    "whisper": (DYNAMO, 3, ("dropout 0.1", f"{CAUSAL}, dropout 0.1"), ()),
    "whisper_padded": (BOTH, 3, ("dropout 0.1", f"{CAUSAL}, dropout 0.1"), (2, 1, 1, 12)),
}  # fmt: skip
FILES = [(name, how) for name, (exporters, *_) in FAMILIES.items() for how in exporters]
#: families with copies of shared keys and values, which are no more
SHARED = ("llama", "mistral", "gemma2", "grouped")


def test_all_exports_are_here() -> None:
    """What is missing, an exporter cannot write."""
    with zipfile.ZipFile(FOLDER / "attention.zip") as archive:
        names = set(archive.namelist()) - {"missing.json"}
        missing = json.loads(archive.read("missing.json"))
    assert names == {f"{name}.{how}.onnx" for name, how in FILES}
    assert names | set(missing) == {f"{name}.{how}.onnx" for name in FAMILIES for how in BOTH}


@functools.lru_cache(1)
def program(name: str, how: str) -> Program:
    with zipfile.ZipFile(FOLDER / "attention.zip") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return rc.load(drawn.fill(archive.read(f"{name}.{how}.onnx")), batch=2, mode="train")


def given(block: Block, padded: bool) -> dict[str, np.ndarray]:
    g = np.random.default_rng(1)
    length = 10 if padded else 12

    def one(name: str, t: TensorType) -> np.ndarray:
        if t.is_float:
            return g.standard_normal(t.shape).astype(t.numpy)
        if "mask" in name or name == "input_1":  # the second sentence is shorter
            return np.array([[1] * t.shape[1], [1] * length + [0] * (t.shape[1] - length)], t.numpy)
        return g.integers(3, 31, t.shape)

    return {v.name: one(v.name, v.type) for v in block.inputs}


def gradients(block: Block, p: Program, padded: bool) -> list[np.ndarray]:
    """The loss, a weighted sum of the first output, and all gradients."""
    scalar, loss = weighted_loss(block, block.outputs[:1])
    made, pairs = differentiate(scalar, loss)
    data = {v.name: p.data[v.name] for v in made.declared() if v.name in p.data}
    made_program = Program(made, data)
    names = [loss, *(g.name for _, g in sorted(pairs, key=lambda pair: pair[0].name))]
    return rc.Executor(providers=("numpy",), schedule=False).run(made_program, given(block, padded), names)


@pytest.mark.parametrize(("name", "how"), FILES)
def test_families(name: str, how: str) -> None:
    """Every layer is found, with its window; no mask of queries and keys is left; losses and gradients agree."""
    _, count, what, largest = FAMILIES[name]
    p = program(name, how)
    softmaxes = sum(o.op.name == "Softmax" for o in p.block.operators)
    after, notes = find_attention(p.block, p.data)
    found = [o for o in after.operators if o.op.name == "TiledAttention"]
    assert softmaxes == count == len(found) == len(notes)
    assert {n.partition("' is attention")[2].strip(" ()") for n in notes} == set(what)
    biases = [o.inputs[3].shape for o in found if len(o.inputs) > 3 and o.inputs[3] is not None]
    assert max(biases, key=np.prod, default=()) == largest
    keys = {o.inputs[1].shape[-3] for o in found if o.inputs[1] is not None}
    assert not name.startswith(SHARED) or keys == {1}
    masks = {o.inputs[3] for o in found if len(o.inputs) > 3 and o.inputs[3] is not None}
    assert len(masks) == 1 or not name.startswith(("bert", "llama_p", "mistral_p")), "made for each layer"
    padded = name != "deberta_v2"  # where it is padded, it hides everything, and the loss would have to leave it out
    for got, want in zip(gradients(after, p, padded), gradients(p.block, p, padded), strict=True):
        scale = float(np.abs(want).max())
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5 * max(scale, 0.1))
