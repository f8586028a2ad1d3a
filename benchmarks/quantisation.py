"""Accuracy in 8 bits on scikit-learn's digits: floats, rounded after training, and trained on rounded values.

    python benchmarks/quantisation.py [--seeds 3] [--epochs 8] [--tune 2] [NETWORK ...]

Each network is trained in floats; then it is rounded as it is, with ranges from the training images
(`rc.prepare_qat` and runs without updates), or trained on for `--tune` epochs, in floats and on rounded values.  The
8-bit models are scored by ONNX Runtime on the third of the images that is held out.  Needs scikit-learn.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import onnx
import onnxruntime
from sklearn.datasets import load_digits

import recompute as rc

BATCH = 32
#: zoo networks, their options, and how many times each pixel is repeated
NETWORKS: dict[str, tuple[dict[str, Any], int]] = {
    "lenet": ({}, 3),
    "mobilenet_v2": ({"width": 8, "image": 32, "classes": 10}, 4),
    "resnet18": ({"width": 8, "image": 32, "classes": 10}, 4),
}


def images(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Images and labels to train on, and to judge by."""
    options, times = NETWORKS[name]
    x, y = load_digits(return_X_y=True)
    x = np.kron(x.reshape(-1, 1, 8, 8) / 8 - 1, np.ones((1, 1, times, times))).astype(np.float32)
    edge = (28 if name == "lenet" else options["image"]) - x.shape[-1]
    x = np.pad(x, [(0, 0), (0, 0), *[(edge // 2, edge - edge // 2)] * 2], constant_values=-1)
    x = x if name == "lenet" else np.repeat(x, 3, 1)
    order = np.random.default_rng(0).permutation(len(x))
    train, test = order[: 2 * len(x) // 3], order[2 * len(x) // 3 :]
    return x[train], y[train].astype(np.int64), x[test], y[test].astype(np.int64)


def fit(program: rc.Program, x: np.ndarray, y: np.ndarray, rate: float, epochs: int, seed: int) -> rc.Program:
    """The program after training."""
    loss = rc.losses.cross_entropy(program)
    rc.Momentum(rate).minimize(loss)
    draws, executor = np.random.default_rng(seed), rc.Executor()
    for _ in range(epochs):
        order = draws.permutation(len(x))
        for start in range(0, len(x) - BATCH + 1, BATCH):
            at = order[start : start + BATCH]
            executor.run(program, {"x": x[at], "label": y[at]}, [loss])
    return program


def accuracy(model: onnx.ModelProto, x: np.ndarray, y: np.ndarray) -> float:
    """By ONNX Runtime."""
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return float((session.run(None, {"x": x})[0].argmax(1) == y).mean())


def judged(name: str, seed: int, epochs: int, tune: int) -> list[float]:
    """Accuracies in floats, rounded after training, trained on in floats, trained on rounded values."""
    x, y, test, truth = images(name)
    source = rc.models.build(name, seed=seed, **NETWORKS[name][0])
    model = rc.export_trained(fit(rc.load(source, batch=BATCH), x, y, 0.02, epochs, seed))
    found = [accuracy(model, test, truth)]
    rounded = rc.prepare_qat(rc.load(model, batch=BATCH, mode="eval"))
    executor = rc.Executor()
    for start in range(0, 20 * BATCH, BATCH):
        executor.run(rounded, {"x": x[start : start + BATCH]}, [rounded.outputs[0]])
    found.append(accuracy(rc.export_trained(rounded), test, truth))
    for aware in (False, True):
        program = rc.load(model, batch=BATCH, mode="train")
        program = fit(rc.prepare_qat(program) if aware else program, x, y, 0.002, tune, seed)
        found.append(accuracy(rc.export_trained(program), test, truth))
    return found


def main() -> None:
    """Prints a table of means over seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", metavar="NETWORK", default=list(NETWORKS), help="of the zoo")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--tune", type=int, default=2)
    given = parser.parse_args()
    for name in given.networks:
        rows = [judged(name, seed, given.epochs, given.tune) for seed in range(given.seeds)]
        print(name, *(f"{v:.2%}" for v in np.mean(rows, 0)), flush=True)


if __name__ == "__main__":
    main()
