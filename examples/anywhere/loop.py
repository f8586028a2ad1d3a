"""Trains an exported step in ONNX Runtime alone: weights in, weights out.

    recompute-compile lenet --batch 8 --optimizer momentum --lr 0.01 -o step.onnx
    python examples/anywhere/loop.py step.onnx 5

needs onnxruntime, safetensors and NumPy, and nothing of this package.  The batch is a pattern of numbers; feed yours.
"""

import json
import pathlib
import sys

import numpy as np
import onnxruntime as ort
from safetensors import safe_open


def pattern(value: ort.NodeArg) -> np.ndarray:
    """The same numbers in every language, in place of data: 0, ±1/8, ... for floats, 0 and 1 for labels and tokens."""
    i = np.arange(np.prod(value.shape, dtype=np.int64)).reshape(value.shape)
    return (i * 7 % 2).astype(np.int64) if "int64" in value.type else ((i * 7 % 17 - 8) / 8).astype(np.float32)


path = pathlib.Path(sys.argv[1])
with safe_open(path.with_name(path.stem + ".state.safetensors"), "np") as file:
    state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no mapping
    updates = json.loads(file.metadata()["updates"])  # weight → output with its new contents
session = ort.InferenceSession(path)
batch = {i.name: pattern(i) for i in session.get_inputs() if i.name not in state}
for _ in range(int(sys.argv[2])):
    loss, *after = session.run(["loss", *updates.values()], {**batch, **state})
    state.update(zip(updates, after, strict=True))
    print(loss)
