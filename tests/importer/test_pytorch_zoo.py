"""Architectures of torchvision and transformers, as PyTorch exports them, train as PyTorch trains them (float64).

tests/data/pytorch_zoo/make.py says how the files and the values were made; nothing here needs PyTorch.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import json
import tarfile
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import recompute as rc

FOLDER = Path(__file__).parents[1] / "data" / "pytorch_zoo"
_spec = importlib.util.spec_from_file_location("drawn", FOLDER / "drawn.py")
assert _spec is not None and _spec.loader is not None
drawn = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(drawn)


def names() -> list[str]:
    """The architectures."""
    with zipfile.ZipFile(FOLDER / "zoo.zip") as archive:
        return [n.removesuffix(".tar.xz") for n in archive.namelist()]


@functools.lru_cache(2)
def files(name: str) -> dict[str, bytes]:
    """An architecture's files."""
    with zipfile.ZipFile(FOLDER / "zoo.zip") as archive:
        data = archive.read(f"{name}.tar.xz")
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return {m.name: tar.extractfile(m).read() for m in tar.getmembers()}  # type: ignore[union-attr]


class Case:
    """An exported file, and what PyTorch got."""

    def __init__(self, name: str, file: str) -> None:
        self.values = json.loads(files(name)["values.json"])
        self.model = onnx.ModelProto.FromString(files(name)[f"{file}.onnx"])
        drawn.fill(self.model)
        self.mode = "eval" if file == "eval" else "train"
        self.told: list[str] = []

    def load(self, **options: Any) -> rc.Program:
        """The program; `told`: what import warned of."""
        batch = next(i["shape"][0] for i in self.values["inputs"] if i["shape"])
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            program = rc.load(self.model, batch=batch, **options)
        self.told = [str(w.message) for w in told if issubclass(w.category, rc.ModelWarning)]
        return program

    def train(self, program: rc.Program, kind: str) -> list[float]:
        """Losses of four steps."""
        loss = program["loss"] if "loss" in program else program.outputs[0]
        getattr(rc, kind)(self.values["rates"][kind]).minimize(loss)
        given = {i["name"]: _input(i) for i in self.values["inputs"]}
        wanted = [v.name for v in program.inputs]
        feed = {n: given.get(n, first) for n, first in zip(wanted, given.values(), strict=False)}
        executor = rc.Executor(providers=("numpy",))
        return [float(executor.run(program, feed, [loss])[0]) for _ in range(4)]

    def off(self, losses: list[float], kind: str) -> float:
        """The largest relative difference of a loss."""
        expected = np.array(self.values["losses"][f"{self.mode} {kind}"])
        return float((np.abs(np.array(losses) - expected) / np.maximum(np.abs(expected), 1e-3)).max())

    def changed_otherwise(self, program: rc.Program, kind: str) -> dict[str, float]:
        """Tensors that changed in another way than PyTorch's, with the relative difference."""
        groups = [{first, *(n for n, o in self.values["tied"].items() if o == first)}
                  for first in self.values["changes"][f"{self.mode} {kind}"]]  # fmt: skip
        there = {**{n: n for n in program.data}, **{a: str(n) for a, n in program.aliases.items()}}
        tied = {n: there[m] for group in groups for n in group for m in group if m in there}
        before = {t.name: onnx.numpy_helper.to_array(t) for t in self.model.graph.initializer}
        single = any(
            a.name == "to" and a.i == onnx.TensorProto.FLOAT
            for n in self.model.graph.node
            if n.op_type == "Cast"
            for a in n.attribute
        )
        limit = 3e-5 if single else 1e-5  # tables of cosines in float32, for example, differ in their last bits
        found = {}
        for name, (product, norm, determined) in self.values["changes"][f"{self.mode} {kind}"].items():
            own = tied.get(name, name)
            if own not in program.data:
                found[name] = np.inf
                continue
            got, _ = drawn.fingerprint(name, before[own], program.data[own])
            if not abs(got - product) <= limit * norm + 10 * determined + 3e-9:
                found[name] = abs(got - product) / norm
        return found

    def check(self, kind: str, **options: Any) -> None:
        """Trains as in PyTorch: losses, weights and running statistics; nothing is warned of."""
        program = self.load(mode="file", **options)
        assert not self.told
        losses = self.train(program, kind)
        assert self.off(losses, kind) < 1e-5
        assert not self.changed_otherwise(program, kind)

    def parameters(self) -> list[str]:
        """The initializers that are parameters which require gradients."""
        return [n for n in self.values["trains"] if n in {t.name for t in self.model.graph.initializer}]


def _input(entry: dict[str, Any]) -> np.ndarray:
    shape = tuple(entry["shape"])
    if "values" not in entry:
        return drawn.picture(entry["name"], shape)
    return np.array(entry["values"], entry["type"]).reshape(shape)


FAST = ("transformers/Bert", "transformers/Llama", "transformers/ResNet", "torchvision/small_vit", "masked/fcos")
SLOW = [n for n in names() if n not in FAST]


#: what PyTorch itself cannot export so in float64 (values.json of each has its error), besides T5 and Swin of
#: transformers, which neither exporter can
_LABELS = {f"masked/{n}" for n in ("DebertaForSequenceClassification", "DebertaV2ForSequenceClassification",
                                   "Deberta_relative", "DebertaV2_relative", "retinanet", "words")}  # fmt: skip
_CAUSAL = ("Bloom", "GPT2", "GPTNeo", "GPTNeoX", "Gemma", "Llama", "Mistral", "OPT", "Olmo", "Phi", "Qwen2", "Qwen3",
           "StableLm", "M2M100", "Whisper")  # fmt: skip
NOT_EXPORTED = {
    "train": _LABELS,
    "eval": _LABELS,
    "default": _LABELS,
    "script": {
        *("masked/detr_giou_loss", "masked/detr_pairwise_giou", "masked/fast_rcnn", "masked/fcos"),
        *(f"transformers/{n}" for n in _CAUSAL),
    },
}


def having(file: str, among: Sequence[str]) -> list[str]:
    """The architectures that PyTorch can export so."""
    return [n for n in among if n not in NOT_EXPORTED[file]]


def check_dynamo(name: str, file: str) -> None:
    """What trains is what the file says; frozen parameters, of which it says nothing, are named."""
    case = Case(name, file)
    case.check("Adam", trainable=case.parameters() if case.values["frozen"] else None)


def check_default(name: str) -> None:
    """Equal, or what was lost is told with the remedy."""
    case = Case(name, "default")
    losses = case.train(case.load(), "SGD")
    if case.off(losses, "SGD") < 1e-4:
        return
    (text,) = case.told
    there = {t.name for t in case.model.graph.initializer}
    lost = [n for n in case.values["trains"] if not there & {n, f"model.{n}"}]
    assert any(f"{n}" in text for n in (*lost, *there)) and "optimize=False" in text and "rc.from_torch" in text


@pytest.mark.parametrize("name", FAST)
def test_an_export_trains_as_in_pytorch(name: str) -> None:
    check_dynamo(name, "train")


@pytest.mark.parametrize("name", FAST)
def test_a_default_export_is_equal_or_tells_what_was_lost(name: str) -> None:
    check_default(name)


def test_how_many_there_are() -> None:
    """By each exporter, and in each mode."""
    assert all(len(having(file, names())) >= 45 for file in NOT_EXPORTED)


def test_only_those_are_missing_that_pytorch_cannot_export() -> None:
    missing = {file: {n for n in names() if f"{file}.onnx" not in files(n)} for file in NOT_EXPORTED}
    assert missing == NOT_EXPORTED


@pytest.mark.parametrize("name", having("train", SLOW))
def test_other_exports_train_as_in_pytorch(name: str) -> None:
    check_dynamo(name, "train")


@pytest.mark.parametrize("name", having("eval", names()))
def test_exports_in_eval_mode_train_as_in_pytorch(name: str) -> None:
    check_dynamo(name, "eval")


@pytest.mark.parametrize("name", having("script", names()))
def test_exports_by_torchscript_train_as_in_pytorch(name: str) -> None:
    """The file does not say what a parameter is: those that train are named, as `rc.from_torch` does."""
    case = Case(name, "script")
    case.check("SGD", trainable=case.parameters())


@pytest.mark.parametrize("name", having("default", SLOW))
def test_other_default_exports_are_equal_or_tell_what_was_lost(name: str) -> None:
    check_default(name)


@pytest.mark.parametrize(
    "name", [*(f"transformers/{n}" for n in ("Bert", "Llama", "GPT2", "Bart")), "torchvision/small_swin_v2"]
)
def test_with_attention_as_one_operator(name: str) -> None:
    """All of it is found, and trains as in PyTorch."""
    case = Case(name, "train")
    program = case.load(mode="file")
    assert all("' is attention" in note for note in rc.fuse_attention(program))
    assert "TiledAttention" in {o.op.name for o in program.operators}
    assert case.off(case.train(program, "SGD"), "SGD") < 1e-5
    assert not case.changed_otherwise(program, "SGD")
