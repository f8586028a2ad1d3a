"""Makes operators.npz: values and gradients of single ONNX nodes by PyTorch's own functions.  See README.md.

python make_operators.py [PART OF A NAME]: with an argument nothing is written, only checked.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cases_image
import cases_network
import cases_tensor
import numpy as np
import onnx
import onnxruntime as ort
import torch
from onnx import TensorProto, helper, numpy_helper
from spec import Const, Spec, draw

FOLDER = Path(__file__).resolve().parent
KINDS = {"f": "float32", "i": "int64", "b": "bool"}
TYPES = {"float32": TensorProto.FLOAT, "int32": TensorProto.INT32, "int64": TensorProto.INT64, "bool": TensorProto.BOOL}


@dataclass
class Pool:
    """Arrays of one dtype, one behind the other."""

    dtype: str
    parts: list[np.ndarray] = field(default_factory=list)
    size: int = 0

    def add(self, array: np.ndarray) -> int:
        """Keeps the elements; returns where they start."""
        at = self.size
        self.parts.append(np.ascontiguousarray(array, self.dtype).ravel())
        self.size += array.size
        return at

    def array(self) -> np.ndarray:
        return np.concatenate([np.zeros(0, self.dtype), *self.parts])


@dataclass
class Made:
    """One configuration: its model, and arrays by name; `values` has a pair (float64, float32) for each name."""

    spec: Spec
    model: onnx.ModelProto
    feed: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray | tuple[np.ndarray, np.ndarray]]
    grads: dict[str, tuple[np.ndarray, np.ndarray]]


def torch_values(
    spec: Spec, feed: dict[str, np.ndarray], cotangents: Sequence[np.ndarray], dtype: torch.dtype
) -> tuple[list[np.ndarray], list[bool], dict[str, np.ndarray]]:
    """Outputs, which of them are differentiable, and the gradients of Σ cotangent · output, by PyTorch in one dtype."""
    tensors = {}
    for name, array in feed.items():
        t = torch.from_numpy(array.copy())
        tensors[name] = t.to(dtype).requires_grad_(name in spec.wanted(feed)) if t.is_floating_point() else t
    result = spec.torch(*tensors.values())
    outputs = list(result) if isinstance(result, (tuple, list)) else [result]
    assert all(o.dtype == dtype for o in outputs if o.is_floating_point()), f"{spec.name}: PyTorch changed the dtype"
    differentiable = [o for o in outputs if o.requires_grad]
    used = [(o, torch.from_numpy(c).to(dtype)) for o, c in zip(differentiable, cotangents, strict=False)]
    grads: dict[str, np.ndarray] = {}
    wanted = spec.wanted(feed)
    if used and wanted:
        loss = sum((o * c).sum() for o, c in used)
        found = torch.autograd.grad(loss, [tensors[n] for n in wanted], allow_unused=True)
        for name, g in zip(wanted, found, strict=True):
            grads[name] = np.zeros(feed[name].shape) if g is None else g.detach().numpy()
    return [o.detach().numpy() for o in outputs], [o.requires_grad for o in outputs], grads


def model_of(
    spec: Spec, arrays: Sequence[Any], outputs: dict[str, np.ndarray], weighted: Sequence[str]
) -> onnx.ModelProto:
    """The node, with Σ cotangent · output over the differentiable outputs as the model's last output `loss`."""
    names = ["" if a is None else f"x{i}" for i, a in enumerate(arrays)]
    constants = [
        numpy_helper.from_array(a.value, n) for a, n in zip(arrays, names, strict=True) if isinstance(a, Const)
    ]
    fed = {n: a for a, n in zip(arrays, names, strict=True) if isinstance(a, np.ndarray)}
    fed |= {f"d{n}": outputs[n] for n in weighted}
    inputs = [info(n, a) for n, a in fed.items()]
    unread = [f"unread{i}" for i in range(spec.unread)]
    steps = (spec.op, *spec.chain)
    between = [f"step{i}" for i in range(len(spec.chain))]
    sources, results = [names[0], *between], [[n] for n in between] + [[*outputs, *unread]]
    nodes = [
        helper.make_node(op, [source, *names[1:]], outs, **spec.attributes)
        for op, source, outs in zip(steps, sources, results, strict=True)
    ]
    for name in weighted:
        nodes.append(helper.make_node("Mul", [name, f"d{name}"], [f"{name}_weighted"]))
        nodes.append(helper.make_node("ReduceSum", [f"{name}_weighted"], [f"{name}_sum"], keepdims=0))
    declared = [info(n, o) for n, o in outputs.items()]
    if weighted:
        nodes.append(helper.make_node("Sum", [f"{n}_sum" for n in weighted], ["loss"]))
        declared.append(helper.make_tensor_value_info("loss", TensorProto.FLOAT, ()))
    graph = helper.make_graph(nodes, "g", inputs, declared, constants)
    opset = helper.make_opsetid("", spec.opset)
    return helper.make_model(graph, opset_imports=[opset], ir_version=10, producer_name="")


def info(name: str, array: np.ndarray) -> onnx.ValueInfoProto:
    """The declaration of an input or output; every float is a float32."""
    return helper.make_tensor_value_info(
        name, TYPES["int32" if array.dtype == np.int32 else KINDS[array.dtype.kind]], array.shape
    )


def make(spec: Spec) -> Made:
    """Draws the inputs, asks PyTorch twice, and builds the model."""
    rng = np.random.default_rng(zlib.crc32(spec.name.encode()))
    arrays = [draw(a, rng) for a in spec.inputs]
    feed = {f"x{i}": a for i, a in enumerate(arrays) if isinstance(a, np.ndarray)}
    first, differentiable, _ = torch_values(spec, feed, (), torch.float64)
    cotangents = [draw(o.shape, rng) for o, d in zip(first, differentiable, strict=True) if d]
    outs64, _, grads64 = torch_values(spec, feed, cotangents, torch.float64)
    outs32, _, grads32 = torch_values(spec, feed, cotangents, torch.float32)
    named = {f"y{i}": o for i, o in enumerate(outs64)}
    weighted = [n for n, d in zip(named, differentiable, strict=True) if d]
    model = model_of(spec, arrays, named, weighted)
    both = zip(named, outs64, outs32, strict=True)
    outputs = {n: (a, b) if a.dtype.kind == "f" else a for n, a, b in both}
    feed |= {f"d{n}": c for n, c in zip(weighted, cotangents, strict=True)}
    return Made(spec, model, feed, outputs, {n: (grads64[n], grads32[n]) for n in grads64})


def by_onnx_runtime(made: Made) -> str:
    """What a third party says about the node: "" where its float32 outputs are PyTorch's, else the difference."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        session = ort.InferenceSession(made.model.SerializeToString(), options, ["CPUExecutionProvider"])
    except Exception as error:  # has no kernel
        return "no: " + str(error).split("\n")[0][-100:]
    inputs = {i.name for i in session.get_inputs()}
    results = session.run(list(made.outputs), {n: a for n, a in made.feed.items() if n in inputs})
    for result, (name, want) in zip(results, made.outputs.items(), strict=True):
        value = want[0] if isinstance(want, tuple) else want
        if result.shape != value.shape:
            return f"{name}: shape {result.shape}, not {value.shape}"
        if value.size and np.abs(result - value.astype(np.float64)).max() > 1e-4 * max(1, np.abs(value).max()):
            return f"{name} differs by {np.abs(result - value.astype(np.float64)).max():.2g}"
    return ""


def check(made: Made) -> None:
    """The model is valid, PyTorch's two precisions agree, ONNX Runtime computes the same."""
    onnx.checker.check_model(made.model, full_check=True)
    pairs = {
        **{n: v for n, v in made.outputs.items() if isinstance(v, tuple)},
        **{f"d{n}": v for n, v in made.grads.items()},
    }
    for name, (a, b) in pairs.items():
        scale = max(np.abs(a).max(), 1e-30) if a.size else 1.0
        error = (np.abs(a - b).max() / scale) if a.size else 0.0
        if not error < 5e-6:
            print(f"  {made.spec.name}: {name} by PyTorch in float32 is {error:.1e} off")
    other = by_onnx_runtime(made)
    if other:
        print(f"  {made.spec.name}: ONNX Runtime: {other}")


def pack(all_made: Sequence[Made]) -> dict[str, np.ndarray]:
    """The arrays of the file: inputs, values in both precisions, models, and an index in JSON."""
    pools = {k: Pool(k) for k in ("float32", "int32", "int64", "bool")}
    wide, narrow, models = Pool("float64"), Pool("float32"), Pool("uint8")
    index = []

    def values(pair: tuple[np.ndarray, np.ndarray]) -> dict[str, Any]:
        narrow.add(pair[1])
        return {"dtype": "float", "shape": pair[0].shape, "at": wide.add(pair[0])}

    def exact(array: np.ndarray) -> dict[str, Any]:
        kind = str(array.dtype)
        return {"dtype": kind, "shape": array.shape, "at": pools[kind].add(array)}

    for made in all_made:
        data = made.model.SerializeToString()
        index.append(
            {
                "name": made.spec.name,
                "op": made.spec.op,
                "model": [models.add(np.frombuffer(data, np.uint8)), len(data)],
                "inputs": {n: exact(a) for n, a in made.feed.items()},
                "outputs": {n: values(v) if isinstance(v, tuple) else exact(v) for n, v in made.outputs.items()},
                "grads": {n: values(v) for n, v in made.grads.items()},
            }
        )
    text = json.dumps({"torch": torch.__version__, "cases": index}, separators=(",", ":"))
    arrays = {k: p.array() for k, p in pools.items()}
    arrays |= {"values64": wide.array(), "values32": narrow.array(), "models": models.array()}
    return {**arrays, "index": np.frombuffer(text.encode(), np.uint8)}


def make_all(specs: Sequence[Spec], part: str, file: str) -> None:
    """Makes and checks the configurations of one file; writes it if that is all of them."""
    names = [s.name for s in specs]
    assert len(set(names)) == len(names), sorted({n for n in names if names.count(n) > 1})
    made: list[Made] = []
    for spec in specs:
        if part not in spec.name:
            continue
        try:
            made.append(make(spec))
            check(made[-1])
        except Exception as error:
            print(f"  {spec.name}: {type(error).__name__}: {str(error)[:300]}")
            if part:
                raise
    operators = {m.spec.op for m in made}
    print(f"{len(made)} configurations of {len(operators)} operators, {sum(len(m.grads) for m in made)} gradients")
    if not part:
        np.savez_compressed(FOLDER / file, **pack(made))
        print(f"{file}: {(FOLDER / file).stat().st_size / 1e6:.2f} MB")


def main(part: str) -> None:
    torch.set_num_threads(1)
    make_all([*cases_tensor.SPECS, *cases_network.SPECS, *cases_image.SPECS], part, "operators.npz")
    try:
        import cases_vision
    except ImportError:
        print("no torchvision: vision.npz stays as it is")
    else:
        make_all(cases_vision.SPECS, part, "vision.npz")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
