"""Trains a network with portable bits, from weights and a batch that are the same on every machine; see
exporter/test_portable.py.

NETWORK here                     the losses' bits and a digest of the weights behind 20 steps, as JSON
update                           portable_steps.json, which has them for all networks, written anew
NETWORK TARGET CPU FOLDER        the same step as a library, and the batch (`batch.bin`: the inputs, one after another)
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import recompute as rc

STEPS = 20
#: network, perhaps with a precision → batch
NETWORKS = {"mlp": 8, "mlp fp16": 8, "lenet": 8, "lstm": 16, "gpt2-tiny": 1, "mobilenet_v2": 2}
#: model → learning rate, where it is no constant
RATES = {"mlp": rc.lr.CosineAnnealingDecay(1e-2, STEPS)}
#: model → its classes, where they are fewer than ten
CLASSES = {"mlp": 2}


def digest(arrays: Mapping[str, Any]) -> str:
    """Names all elements of all arrays, those that a library has: what is read or trained."""
    found = hashlib.sha256()
    for name in sorted(arrays):
        found.update(name.encode() + np.ascontiguousarray(arrays[name]).tobytes())
    return found.hexdigest()


def made(network: str) -> tuple[Any, str, dict[str, np.ndarray]]:
    """The compiled step, its loss, and a batch.  Random numbers are integers, scaled by powers of two: no logarithm of
    a C library is in them."""
    model, _, precision = network.partition(" ")
    program = rc.load(rc.models.build(model), batch=NETWORKS[network])
    loss = rc.losses.cross_entropy(program).name
    rng = np.random.default_rng(0)
    for v in program.block.parameters:
        if len(v.shape) > 1:
            terms = v.size // v.shape[0] if len(v.shape) > 2 else max(v.shape)
            scale = 2.0 ** -((terms.bit_length() + 1) // 2)
            program.data[v.name] = ((rng.integers(-1024, 1025, v.shape) / 1024) * scale).astype(v.type.numpy)
    step = rc.compile_step(
        program, loss, rc.Adam(RATES.get(model, 1e-3)), target=rc.Target(precision=precision or "fp32")
    )
    feed = {}
    for v in step.program.inputs:
        if v.dtype[0] == "f":
            feed[v.name] = (rng.integers(-1024, 1025, v.shape) / 1024).astype(v.value.type.numpy)
        else:
            feed[v.name] = rng.integers(0, CLASSES.get(model, 10), v.shape).astype(v.value.type.numpy)
    return step, loss, feed


def main() -> None:
    """The script."""
    if sys.argv[1:] == ["update"]:
        command = [sys.executable, __file__]
        found = {n: json.loads(subprocess.check_output([*command, n, "here"])) for n in NETWORKS}
        Path(__file__).with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
        return
    network, target, *more = sys.argv[1:]
    if target != "here":
        cpu, folder = more
        rc.build_for(target, cpu, portable=True)
        step, loss, feed = made(network)
        rc.write_library(step.program, folder)
        Path(folder, "batch.bin").write_bytes(b"".join(feed[v.name].tobytes() for v in step.program.inputs))
        return
    rc.portable_bits()
    step, loss, feed = made(network)
    executor = rc.Executor()
    losses = [executor.run(step.program, feed, [loss])[0] for _ in range(STEPS)]
    bits = [f"{int(np.float32(x).view(np.uint32)):08x}" for x in losses]
    block = step.program.block
    weights = {v.name: step.program.data[v.name] for v in (*block.parameters, *block.buffers, *block.state)}
    print(json.dumps({"losses": bits, "weights": digest(weights)}))


if __name__ == "__main__":
    main()
