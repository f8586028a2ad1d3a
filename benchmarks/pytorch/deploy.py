"""Trains small networks of torchvision and transformers, and scores them in three ways that should agree.

    python benchmarks/pytorch/deploy.py [--only NAME] [--json FILE]

Each network is imported by `rc.from_torch` with its loss, in train mode with its dropout, and trained for 4 steps of
Adam in float32.  Then, without a loss and in batches of 1, 2 and 3: `program.evaluate`, ONNX Runtime on what
`rc.export_trained` gives, and PyTorch's own module in eval mode after `rc.write_back`.  Printed: the largest
difference from `evaluate`, relative to the largest score.  Exit code 1 where ONNX Runtime's exceeds 1e-5.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from architectures import ARCHITECTURES
from table import rows

import recompute as rc

_LIMIT = 1e-5
_LINE = "{name:34} {norms:>5} {dropouts:>8} {batches:>8} {runtime:>9} {pytorch:>9}  {why}"


def main() -> int:
    """The table, and the exit code."""
    names = {n: n for n in ("norms", "dropouts", "batches")}
    head = _LINE.format(name="", **names, runtime="ORT", pytorch="PyTorch", why="")
    found = rows(ARCHITECTURES, __doc__, _LINE, row, head)
    right = [r for r in found if r["right"]]
    print(f"{len(right)} of {len(found)}: ONNX Runtime scores as evaluate does")
    return len(right) < len(found)


def row(name: str, make: Any) -> dict[str, Any]:
    """One network's figures; `why` it has none."""
    found: dict[str, Any] = {"name": name, "norms": 0, "dropouts": 0, "batches": "", "runtime": "", "pytorch": ""}
    found |= {"why": "", "right": False}
    try:
        torch.manual_seed(0)
        module, inputs, loss = make()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = trained(module.train(), inputs, loss)
        kinds = [op.op.name for op in program.forward.operators]
        found["norms"], found["dropouts"] = kinds.count("BatchNormTrain"), kinds.count("Dropout")
        rc.write_back(program, module)
        score(program, module.eval(), inputs, found)
        found["right"] = found["runtime"] < _LIMIT
        found["runtime"], found["pytorch"] = f"{found['runtime']:.1e}", f"{found['pytorch']:.1e}"
    except Exception as e:
        found["why"] = f"{type(e).__name__}: {str(e).strip()}".replace("\n", " ")[:240]
    return found


def trained(module: Any, inputs: Any, loss: Any) -> rc.Program:
    """The module after four steps of Adam."""
    program = rc.from_torch(module, inputs, loss=loss)
    target = program["loss"] if "loss" in program else program.outputs[0]
    rc.Adam(1e-3).minimize(target)
    executor = rc.Executor()
    feed = named(program, inputs)
    for _ in range(4):
        executor.run(program, feed, [target])
    return program


def named(program: rc.Program, inputs: Any) -> dict[str, np.ndarray]:
    """The example inputs by the names of the program's."""
    names = [v.name for v in program.inputs]
    values = [inputs[n] for n in names] if isinstance(inputs, dict) else inputs
    return {n: v.numpy() for n, v in zip(names, values, strict=False)}


def score(program: rc.Program, module: Any, inputs: Any, found: dict[str, Any]) -> None:
    """Compares the first scores at several batches."""
    import onnxruntime as ort

    values = program.forward.values()
    output = next(n for n in program.forward.outputs if values[n].size > 1)
    model = rc.export_trained(program, outputs=[output])
    feed = {n: a for n, a in named(program, inputs).items() if n in {i.name for i in model.graph.input}}
    size = len(next(iter(feed.values())))
    batches = [1, size, size + 1] if program.for_test(outputs=[output]).again and dynamic(model) else [size]
    with tempfile.TemporaryDirectory() as folder:
        rc.save_model(model, Path(folder) / "m.onnx")
        options = ort.SessionOptions()
        options.log_severity_level = 3
        session = ort.InferenceSession(Path(folder) / "m.onnx", options, providers=["CPUExecutionProvider"])
    worst = {"runtime": 0.0, "pytorch": 0.0}
    for n in batches:
        part = {k: np.concatenate([a, a])[:n] for k, a in feed.items()}
        (ours,) = program.evaluate(part, [output])
        worst["runtime"] = max(worst["runtime"], apart(ours, session.run([output], part)[0]))
        with torch.no_grad():
            given = {k: torch.from_numpy(a) for k, a in part.items()}
            theirs = module(**given) if isinstance(inputs, dict) else module(*given.values())
        worst["pytorch"] = max(worst["pytorch"], apart(ours, tensor_of(theirs, output)))
    found |= {**worst, "batches": ",".join(map(str, batches))}


def dynamic(model: Any) -> bool:
    """Whether the exported model takes any batch."""
    return any(not i.type.tensor_type.shape.dim[0].HasField("dim_value") for i in model.graph.input)


def tensor_of(output: Any, name: str) -> np.ndarray:
    """The scores in what a module returns."""
    while not isinstance(output, torch.Tensor):
        output = output[name] if hasattr(output, "keys") and name in output else output[0]
    return output.numpy()


def apart(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference, relative to the largest element."""
    return float(np.abs(a.astype(float) - b).max() / max(np.abs(a).max(), 1e-30))


if __name__ == "__main__":
    sys.exit(main())
