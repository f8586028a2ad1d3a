"""What benchmarks/approximation.py trains: an MLP-Mixer on scikit-learn's digits, an MLP on its table of tumours, and a
small GPT-2 on a real text.

The text is that of examples/charlm.py: what modules of Python's standard library say of themselves.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

import numpy as np
import onnx
from sklearn.datasets import load_breast_cancer, load_digits

import recompute as rc
from recompute.models.common import BATCH, Init, InputSpec, Net, glorot_uniform

Batch = dict[str, np.ndarray]
MODULES = (
    "argparse", "collections", "datetime", "decimal", "difflib", "json", "logging", "pathlib", "random", "statistics",
    "textwrap", "unittest",
)  # fmt: skip


@dataclass(frozen=True)
class Task:
    """A network, batches to train on in an order by seed, and scores on what is held out.

    `equal`: the score by which accuracies are compared; more of it is better if `higher`.
    """

    name: ClassVar[str]
    rate: ClassVar[float]
    equal: ClassVar[str]
    higher: ClassVar[bool]

    steps: int
    batch: int

    @property
    def describe(self) -> str:
        """A line for the table."""
        raise NotImplementedError

    def model(self, seed: int) -> onnx.ModelProto:
        """The network with the initial weights of a seed."""
        raise NotImplementedError

    def loss(self, program: rc.Program) -> Any:
        """The loss of a program."""
        raise NotImplementedError

    def optimizer(self) -> Any:
        """What trains: Adam; the learning rate rises for some steps and falls to 0."""
        warm = max(1, self.steps // 15)
        return rc.Adam(
            rc.lr.LinearWarmup(rc.lr.CosineAnnealingDecay(self.rate, self.steps - warm), warm, 0.0, self.rate)
        )

    def batches(self, seed: int) -> Iterator[Batch]:
        """What the steps of a training are fed."""
        raise NotImplementedError

    def scores(self, program: rc.Program) -> dict[str, float]:
        """Name → score on what is held out."""
        raise NotImplementedError


class Digits(Task):
    """Digits of 8 x 8 pixels as 16 patches; residual blocks of a linear layer over patches and two over channels.

    ResMLP (Touvron et al. 2021), with layer norms.
    """

    name, batch, rate, equal, higher = "digits", 64, 3e-3, "accuracy", True
    blocks, channels, patches = 2, 64, 16

    @property
    def describe(self) -> str:
        return (
            f"ResMLP of {self.blocks} blocks ({self.patches} patches, {self.channels} channels) on scikit-learn's "
            f"digits, batch {self.batch}, {self.steps} steps of Adam, 450 of 1,797 held out"
        )

    def data(self) -> tuple[Batch, Batch]:
        """To train on, and held out."""
        x, y = load_digits(return_X_y=True)
        x = x.reshape(-1, 4, 2, 4, 2).transpose(0, 1, 3, 2, 4).reshape(-1, self.patches, 4) / 8 - 1
        return _divided(x, y, 450)

    def model(self, seed: int) -> onnx.ModelProto:
        net, size = Net(batch="N", weights=True, seed=seed), self.channels
        net.input(InputSpec("x", "float32", (BATCH, self.patches, 4)))
        x = _dense(net, "x", "stem", 4, size)
        for i in range(self.blocks):
            y = net.layer_norm(x, f"{i}.norm_1", size=size, epsilon=1e-5)
            y = net.add("Transpose", [y], f"{i}.columns", perm=[0, 2, 1])
            y = _dense(net, y, f"{i}.patches", self.patches, self.patches)
            y = net.add("Transpose", [y], f"{i}.rows", perm=[0, 2, 1])
            x = net.add("Add", [x, y], f"{i}.mixed")
            y = net.layer_norm(x, f"{i}.norm_2", size=size, epsilon=1e-5)
            y = net.add("Gelu", [_dense(net, y, f"{i}.fc_1", size, 4 * size)], f"{i}.gelu")
            x = net.add("Add", [x, _dense(net, y, f"{i}.fc_2", 4 * size, size)], f"{i}.out")
        x = net.layer_norm(x, "norm", size=size, epsilon=1e-5)
        x = net.add("ReduceMean", [x, net.constant("axes", [1])], "mean", keepdims=0)
        net.gemm(x, "logits", sizes=(size, 10), init=glorot_uniform(size, 10))
        net.output("logits", (BATCH, 10))
        return net.model("resmlp", description="ResMLP for digits")

    def loss(self, program: rc.Program) -> Any:
        return rc.losses.cross_entropy(program)

    def batches(self, seed: int) -> Iterator[Batch]:
        train, _ = self.data()
        draws, at = np.random.default_rng(seed), np.zeros(0, np.int64)
        for _ in range(self.steps):
            if len(at) < self.batch:
                at = draws.permutation(len(train["x"]))
            yield {name: v[at[: self.batch]] for name, v in train.items()}
            at = at[self.batch :]

    def scores(self, program: rc.Program) -> dict[str, float]:
        _, held = self.data()
        (logits,) = program.evaluate({"x": held["x"]}, ["logits"])
        return {"accuracy": float((logits.argmax(-1) == held["label"]).mean()), "loss": _cross_entropy(logits, held)}


class Tumours(Digits):
    """Benign or malignant, from 30 measurements of 569 tumours (Wolberg et al. 1995); an MLP of four layers."""

    name, batch, rate = "tumours", 128, 3e-3
    width, features = 32, 30

    @property
    def describe(self) -> str:
        return (
            f"MLP of four layers ({self.width} units) on scikit-learn's breast cancer table, batch {self.batch}, "
            f"{self.steps} steps of Adam, 190 of 569 held out"
        )

    def data(self) -> tuple[Batch, Batch]:
        x, y = load_breast_cancer(return_X_y=True)
        x = (x - x.mean(0)) / x.std(0)
        return _divided(x, y, 190)

    def model(self, seed: int) -> onnx.ModelProto:
        net, width = Net(batch="N", weights=True, seed=seed), self.width
        x, size = net.input(InputSpec("x", "float32", (BATCH, self.features))), self.features
        for i in range(3):
            x, size = net.add("Gelu", [_dense(net, x, f"fc_{i}", size, width)], f"gelu_{i}"), width
        net.gemm(x, "logits", sizes=(width, 2), init=glorot_uniform(width, 2))
        net.output("logits", (BATCH, 2))
        return net.model("mlp", description="MLP for a table")


class Text(Task):
    """Characters of the standard library's documentation; the last tenth is held out."""

    name, batch, rate, equal, higher = "text", 16, 5e-3, "loss", False
    layers, hidden, heads, seq = 2, 64, 4, 32

    @property
    def describe(self) -> str:
        return (
            f"GPT-2 of {self.layers} layers of {self.hidden} on the characters of Python's documentation strings, "
            f"batch {self.batch} x {self.seq}, {self.steps} steps of Adam; the last tenth held out"
        )

    def ids(self) -> tuple[np.ndarray, np.ndarray, int]:
        """Characters as numbers, to train on and held out; how many different ones there are."""
        text = documentation()
        alphabet = sorted(set(text))
        codes = {c: i for i, c in enumerate(alphabet)}
        ids = np.array([codes[c] for c in text])
        return ids[: len(ids) * 9 // 10], ids[len(ids) * 9 // 10 :], len(alphabet)

    def model(self, seed: int) -> onnx.ModelProto:
        options = {"layers": self.layers, "hidden": self.hidden, "heads": self.heads, "seq": self.seq}
        vocab = self.ids()[2]
        return rc.models.build("gpt2-tiny", seed=seed, dropout=0, context=self.seq, vocab=vocab, **options)

    def loss(self, program: rc.Program) -> Any:
        return rc.losses.cross_entropy(program["logits"], axis=-1)

    def _cut(self, ids: np.ndarray, starts: np.ndarray) -> Batch:
        rows = ids[starts[:, None] + np.arange(self.seq + 1)]
        return {"input_ids": rows[:, :-1], "label": rows[:, 1:]}

    def batches(self, seed: int) -> Iterator[Batch]:
        train, _, _ = self.ids()
        draws = np.random.default_rng(seed)
        for _ in range(self.steps):
            yield self._cut(train, draws.integers(0, len(train) - self.seq - 1, self.batch))

    def scores(self, program: rc.Program) -> dict[str, float]:
        _, held, _ = self.ids()
        held_out = self._cut(held, np.arange(0, len(held) - self.seq - 1, self.seq)[:256])
        (logits,) = program.evaluate({"input_ids": held_out["input_ids"]}, ["logits"])
        return {
            "accuracy": float((logits.argmax(-1) == held_out["label"]).mean()),
            "loss": _cross_entropy(logits, held_out),
        }


def _divided(x: np.ndarray, y: np.ndarray, held_out: int) -> tuple[Batch, Batch]:
    """Samples to train on, and so many others, in an order that is always the same."""
    order = np.random.default_rng(0).permutation(len(x))
    parts = order[:-held_out], order[-held_out:]
    train, held = ({"x": x[p].astype(np.float32), "label": y[p].astype(np.int64)} for p in parts)
    return train, held


def documentation() -> str:
    """What modules, their functions and classes, and methods say of themselves, each once."""
    found = {}
    for module in map(import_module, MODULES):
        things = [t for _, t in sorted(vars(module).items()) if inspect.isclass(t) or inspect.isroutine(t)]
        methods = [m for c in things if inspect.isclass(c) for _, m in sorted(vars(c).items()) if inspect.isroutine(m)]
        found.update((inspect.getdoc(thing), None) for thing in [module, *things, *methods])
    return "\n\n".join(filter(None, found))


def _cross_entropy(logits: np.ndarray, held: Batch) -> float:
    scores = logits.astype(np.float64)
    scores -= scores.max(-1, keepdims=True)
    chosen = np.take_along_axis(scores, held["label"][..., None], -1)[..., 0]
    return float((np.log(np.exp(scores).sum(-1)) - chosen).mean())


def _dense(net: Net, x: str, name: str, n: int, m: int) -> str:
    return net.dense(x, name, sizes=(n, m), init=Init("normal", (2 / (n + m)) ** 0.5))
