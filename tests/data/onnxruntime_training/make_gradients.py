"""Makes gradients.npz: gradients of ONNX models by ONNX Runtime's own gradient graph.  See README.md.

python make_gradients.py   in an environment with onnxruntime-training-cpu==1.19.2 onnx==1.16.2 "numpy<2"
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper
from onnxruntime.capi._pybind_state import GradientGraphBuilder, get_optimized_model

FOLDER = Path(__file__).resolve().parent
DATA = FOLDER.parent
OPSET, SAMPLES, TOLERANCE = 21, 8, 1e-5
#: outputs that a gradient reads, by operator: how many a node must have
OUTPUTS = {"LayerNormalization": 3, "SoftmaxCrossEntropyLoss": 2, "Dropout": 2}


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function in a process of its own: some models make ONNX Runtime crash."""
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def run() -> None:
        try:
            sender.send((function(*arguments), None))
        except Exception as error:
            sender.send((None, str(error)))

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    sender.close()
    try:
        result, error = receiver.recv()
    except EOFError:
        result, error = None, "crashed"
    process.join()
    if error is not None:
        raise RuntimeError(error)
    return result


def options() -> ort.SessionOptions:
    result = ort.SessionOptions()
    result.log_severity_level = 4
    return result


def with_outputs(model: onnx.ModelProto) -> None:
    """Gives nodes those optional outputs that ONNX Runtime's gradients read."""
    for i, node in enumerate(model.graph.node):
        for j in range(len(node.output), OUTPUTS.get(node.op_type, 0)):
            node.output.append(f"also_{i}_{j}")


def gradients(
    model: onnx.ModelProto, loss: str, wanted: Sequence[str], feed: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Gradients of a scalar with respect to inputs or initializers.  Raises what ONNX Runtime raises."""
    model.ir_version = 9
    with_outputs(model)
    for t in list(model.graph.initializer):
        if t.name in wanted:
            model.graph.input.append(helper.make_tensor_value_info(t.name, t.data_type, t.dims))
            feed = {**feed, t.name: onnx.numpy_helper.to_array(t)}
            model.graph.initializer.remove(t)
    ready = get_optimized_model(model.SerializeToString(), set(wanted), options())
    builder = GradientGraphBuilder(ready, {loss}, set(wanted), loss, options())
    builder.build()
    session = ort.InferenceSession(builder.get_model(), options(), providers=["CPUExecutionProvider"])
    inputs = {i.name: feed[i.name] if i.name in feed else np.ones((), np.float32) for i in session.get_inputs()}
    made = {o.name for o in session.get_outputs()}
    names = [n for n in wanted if f"{n}_grad" in made]
    return dict(zip(names, session.run([f"{n}_grad" for n in names], inputs), strict=True))


# --------------------------------------------------------------------------------------
# The configurations of ../operators


def only_additions(model: onnx.ModelProto) -> None:
    """Σ of the loss by Add: Sum has no gradient in ONNX Runtime."""
    terms = list(model.graph.node.pop().input)
    total = terms[0]
    for i, term in enumerate(terms[1:]):
        model.graph.node.append(helper.make_node("Add", [total, term], [f"total{i}"]))
        total = f"total{i}"
    for node in model.graph.node:
        for i, name in enumerate(node.output):
            if name == total:
                node.output[i] = "loss"


def operators() -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """`CASE/INPUT` → gradient where it is PyTorch's; and what is wrong with the others."""
    with np.load(DATA / "operators" / "operators.npz") as file:
        pools = dict(file)

    def array(entry: dict[str, Any]) -> np.ndarray:
        pool = pools["values32" if entry["dtype"] == "float" else entry["dtype"]]
        return pool[entry["at"] : entry["at"] + int(np.prod(entry["shape"]))].reshape(entry["shape"])

    found, others = {}, {}
    for case in json.loads(pools["index"].tobytes())["cases"]:
        at, size = case["model"]
        model = onnx.load_from_string(pools["models"][at : at + size].tobytes())
        if not case["grads"] or model.opset_import[0].version > OPSET:
            continue
        only_additions(model)
        feed = {n: array(e) for n, e in case["inputs"].items()}
        try:
            grads = apart(gradients, model, "loss", list(case["grads"]), feed)
        except Exception as error:  # no gradient, no kernel
            others[case["name"]] = "no: " + " ".join(str(error).split())[-100:]
            continue
        for name, g in grads.items():
            want = array(case["grads"][name])
            error = np.inf
            if g.shape == want.shape:
                error = np.abs(g - want).max() / max(np.abs(want).max(), 1e-30) if want.size else 0.0
            if error <= TOLERANCE:
                found[f"{case['name']}/{name}"] = g
            else:
                others[case["name"]] = f"gradient of {name} is {error:.1e} off"
    return found, others


# --------------------------------------------------------------------------------------
# The networks of ../pytorch


def is_training(node: onnx.NodeProto) -> bool:
    """What a BatchNormalization says of itself."""
    return any(a.name == "training_mode" and a.i for a in node.attribute)


def add_loss(model: onnx.ModelProto, kind: str, label: np.ndarray) -> str:
    """Appends a mean loss over the model's output; returns its name."""
    if kind == "internal":
        return model.graph.output[0].name
    y, nodes = model.graph.output[0].name, model.graph.node
    dtype = TensorProto.INT64 if label.dtype.kind == "i" else TensorProto.FLOAT
    model.graph.input.append(helper.make_tensor_value_info("label", dtype, label.shape))
    if kind == "cross_entropy":
        nodes.append(helper.make_node("SoftmaxCrossEntropyLoss", [y, "label"], ["the_loss"], ignore_index=-100))
    elif kind == "mse":
        nodes.append(helper.make_node("Sub", [y, "label"], ["the_error"]))
        nodes.append(helper.make_node("Mul", ["the_error", "the_error"], ["the_square"]))
        nodes.append(helper.make_node("ReduceMean", ["the_square"], ["the_loss"], keepdims=0))
    elif kind == "bce_with_logits":
        for op, ins, out in [
            ("Relu", [y], "above"), ("Mul", [y, "label"], "product"), ("Sub", ["above", "product"], "linear"),
            ("Abs", [y], "size"), ("Neg", ["size"], "below"), ("Exp", ["below"], "small"),
            ("Add", ["small", "one"], "sum"), ("Log", ["sum"], "rest"), ("Add", ["linear", "rest"], "each"),
        ]:  # fmt: skip
            nodes.append(helper.make_node(op, [i if i in (y, "label") else f"the_{i}" for i in ins], [f"the_{out}"]))
        model.graph.initializer.append(helper.make_tensor("the_one", TensorProto.FLOAT, (), [1.0]))
        nodes.append(helper.make_node("ReduceMean", ["the_each"], ["the_loss"], keepdims=0))
    else:
        raise ValueError(f"no loss {kind}")
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info("the_loss", TensorProto.FLOAT, ()))
    return "the_loss"


def network(case: dict[str, Any]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """For each parameter of a file: some elements of its gradient and the norm; and the elements' places."""
    model = onnx.load(str(DATA / "pytorch" / case["file"]))
    if any(n.op_type == "BatchNormalization" and not is_training(n) for n in model.graph.node):
        raise RuntimeError("ONNX Runtime has no gradient of BatchNormalization in inference")
    with np.load(DATA / "pytorch" / case["npz"]) as file:
        data = dict(file)
    feed = {name: data[key] for name, key in case["inputs"].items()}
    for value in model.graph.input:  # fixed shapes
        value.CopyFrom(
            helper.make_tensor_value_info(value.name, value.type.tensor_type.elem_type, feed[value.name].shape)
        )
    label = data.get("label", np.zeros(0))
    loss = add_loss(model, case["loss"], label)
    grads = gradients(model, loss, case["trainable"], {**feed, "label": label})
    rng, found = np.random.default_rng(0), {}
    for name in case["trainable"]:
        if name not in grads:
            continue
        flat = grads[name].ravel()
        at = rng.integers(0, flat.size, SAMPLES)
        at[0] = np.abs(flat).argmax()
        found[f"{case['file']}/{name}"] = np.append(flat[at], np.linalg.norm(flat.astype(np.float64))), at
    return found


def compare(case: dict[str, Any], found: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    """RuntimeError where a norm is not PyTorch's (whose loss may detach values)."""
    with np.load(DATA / "pytorch" / case["npz"]) as file:
        norms = dict(zip(file["grad_names"].tolist(), file["grad_norm"], strict=True))
    largest = max(norms.values())
    for theirs, name in case["parameters"].items():
        key = f"{case['file']}/{name}"
        if key in found and abs(found[key][0][-1] - norms[theirs]) > 10 * TOLERANCE * largest:
            raise RuntimeError(f"the gradient of {name} is not PyTorch's")


def networks() -> tuple[dict[str, tuple[np.ndarray, np.ndarray]], dict[str, str]]:
    """All files of opset 21 and older."""
    found, others = {}, {}
    for case in json.loads((DATA / "pytorch" / "index.json").read_text())["cases"]:
        if case["opset"] > OPSET or case["optimize"]:
            continue
        try:
            made = apart(network, case)
            compare(case, made)
            found.update(made)
        except Exception as error:
            others[case["file"]] = " ".join(str(error).split())[-150:]
    return found, others


def main() -> None:
    single, others = operators()
    graphs, refused = networks()
    for name, why in {**others, **refused}.items():
        print(f"  {name}: {why}")
    index = {"onnxruntime": ort.__version__, "operators": {}, "networks": {}}
    values, places = [np.zeros(0, np.float32)], [np.zeros(0, np.int32)]
    for name, g in single.items():
        index["operators"][name] = [int(sum(v.size for v in values)), list(g.shape)]
        values.append(g.ravel())
    for name, (sample, at) in graphs.items():
        index["networks"][name] = [int(sum(v.size for v in values)), int(sum(v.size for v in places))]
        values.append(sample.astype(np.float32))
        places.append(at.astype(np.int32))
    text = np.frombuffer(json.dumps(index, separators=(",", ":")).encode(), np.uint8)
    arrays = {"index": text, "values": np.concatenate(values), "places": np.concatenate(places)}
    np.savez_compressed(FOLDER / "gradients.npz", **arrays)
    cases, files = ({n.split("/")[0] for n in names} for names in (single, graphs))
    print(f"{len(cases)} configurations, {len(files)} networks' files, {len(graphs)} parameters")


if __name__ == "__main__":
    main()
