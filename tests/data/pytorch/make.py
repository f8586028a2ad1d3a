"""Makes the PyTorch reference data of this folder: python make.py [network ...]; see README.md.

For every network of networks.py: six SGD steps in float32 and float64 (NAME.npz), and its ONNX exports
by both exporters of PyTorch, each checked against the network itself, all listed in index.json.
"""

from __future__ import annotations

import copy
import io
import json
import logging
import sys
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
import torch.nn.functional as F
from architectures import ARCHITECTURES
from google.protobuf.message import Message
from networks import NETWORKS, Network
from onnx import numpy_helper
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

FOLDER = Path(__file__).resolve().parent
STEPS, SAMPLES, TOLERANCE = 6, 4, 1e-4
MODES = {"train": torch.onnx.TrainingMode.TRAINING, "eval": torch.onnx.TrainingMode.EVAL}
LOSSES = {
    "cross_entropy": F.cross_entropy,
    "nll": F.nll_loss,
    "mse": F.mse_loss,
    "bce_with_logits": F.binary_cross_entropy_with_logits,
    "internal": lambda output, _: output,
}


class Rejected(Exception):
    """An export that cannot be used; the message says why."""


@dataclass
class Problem:
    """A network with its initial state and its fixed batch."""

    spec: Network
    model: nn.Module
    inputs: dict[str, Tensor]
    label: Tensor | None


@dataclass(frozen=True)
class Variant:
    """One way to export a network."""

    exporter: str
    mode: str
    optimize: bool = False

    def file(self, name: str) -> str:
        short = {"torchscript": "ts", "dynamo": "dynamo"}[self.exporter]
        return f"{name}.{short}.{self.mode}{'.opt' if self.optimize else ''}.onnx"


@dataclass(frozen=True)
class Names:
    """PyTorch parameter name -> initializer name; and the parameters whose initializer is transposed."""

    found: dict[str, str]
    transposed: list[str]


# --------------------------------------------------------------------------------------
# The networks and their training


def build(spec: Network, seed: int) -> Problem:
    """Builds a network; every parameter gets distinct values, so that it can be found in a file."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = spec.build()
    if not spec.fresh:
        shift(model, generator, 0.1)
        shift_statistics(model, generator)
    inputs, label = spec.data(generator)
    return Problem(spec, model, inputs, label)


def shift(model: nn.Module, generator: torch.Generator, scale: float) -> None:
    """Adds noise to every parameter."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


def shift_statistics(model: nn.Module, generator: torch.Generator) -> None:
    """Gives the running statistics other values than zero and one."""
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
            elif name.endswith("running_var"):
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))


def cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if value.is_floating_point() else value


def train(problem: Problem, dtype: torch.dtype) -> tuple[list[float], dict[str, Tensor], nn.Module]:
    """The loss before each SGD step, the gradients of the first step, and the trained model."""
    model = copy.deepcopy(problem.model).to(dtype).train()
    inputs = [cast(value, dtype) for value in problem.inputs.values()]
    label = None if problem.label is None else cast(problem.label, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=problem.spec.lr)
    losses, gradients = [], {}
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = LOSSES[problem.spec.loss](model(*inputs), label)
        loss.backward()
        if not losses:
            gradients = {name: value.grad.clone() for name, value in model.named_parameters()}
        losses.append(loss.item())
        optimizer.step()
    return losses, gradients, model


def forward(problem: Problem, mode: str) -> np.ndarray:
    """The output of the untrained network in float32."""
    model = copy.deepcopy(problem.model).train(mode == "train")
    with torch.no_grad():
        return model(*problem.inputs.values()).numpy()


def sample(gradients: dict[str, Tensor], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Name, norm, and a few elements (the largest among them) of every gradient."""
    names, norms, indices, values = [], [], [], []
    for name, gradient in gradients.items():
        flat = gradient.numpy().ravel()
        index = rng.integers(0, flat.size, SAMPLES)
        index[0] = np.abs(flat).argmax()
        names.append(name)
        norms.append(np.linalg.norm(flat))
        indices.append(index)
        values.append(flat[index])
    return {
        "grad_names": np.array(names),
        "grad_norm": np.array(norms, np.float64),
        "grad_index": np.array(indices, np.int64),
        "grad_value": np.array(values, np.float64),
    }


def check_losses(losses32: list[float], losses64: list[float]) -> None:
    """The curve moves clearly, goes down, and does not depend on rounding."""
    np.testing.assert_allclose(losses32, losses64, rtol=2e-5)
    assert np.isfinite(losses64).all()
    assert losses64[-1] < 0.95 * losses64[0], losses64
    assert max(np.diff(losses64)) < 0.05 * losses64[0], losses64


def save_curve(problem: Problem, path: Path) -> list[float]:
    """Trains in both precisions and writes NAME.npz."""
    losses32, _, _ = train(problem, torch.float32)
    losses64, gradients, trained = train(problem, torch.float64)
    check_losses(losses32, losses64)
    arrays = {name: value.numpy() for name, value in problem.inputs.items()}
    if problem.label is not None:
        arrays["label"] = problem.label.numpy()
    for name, buffer in trained.named_buffers():
        if "running_" in name:
            arrays[f"trained/{name}"] = buffer.numpy()
    for mode in MODES:
        arrays[f"output_{mode}"] = forward(problem, mode)
    arrays["losses32"] = np.array(losses32, np.float64)
    arrays["losses64"] = np.array(losses64, np.float64)
    np.savez_compressed(path, **arrays, **sample(gradients, np.random.default_rng(0)))
    return losses64


# --------------------------------------------------------------------------------------
# Export


def export(problem: Problem, variant: Variant) -> onnx.ModelProto:
    """Exports an untrained copy of the network."""
    spec = problem.spec
    model = copy.deepcopy(problem.model).train(variant.mode == "train")
    options: dict = {"opset_version": getattr(spec, f"{variant.exporter}_opset")}
    if variant.exporter == "dynamo":
        options |= {"dynamo": True, "external_data": False, "optimize": variant.optimize}
        if spec.dynamic_batch:
            batch = torch.export.Dim("batch", min=2, max=64)
            options["dynamic_shapes"] = tuple({0: batch} for _ in problem.inputs)
    else:
        options |= {"dynamo": False}
        if spec.dynamic_batch:
            options["dynamic_axes"] = {name: {0: "batch"} for name in [*problem.inputs, "output"]}
    target = io.BytesIO()
    torch.onnx.export(
        model,
        tuple(problem.inputs.values()),
        target,
        input_names=list(problem.inputs),
        output_names=["output"],
        training=MODES[variant.mode],
        do_constant_folding=False,
        verbose=False,
        **options,
    )
    result = onnx.load_from_string(target.getvalue())
    strip(result)
    return result


def strip(message: Message) -> None:
    """Removes documentation and metadata (stack traces and the like) from a message, recursively."""
    for field, value in message.ListFields():
        if field.name in ("doc_string", "metadata_props"):
            message.ClearField(field.name)
        elif field.message_type is not None and field.message_type.name != "TensorProto":
            for part in [value] if isinstance(value, Message) else value:
                strip(part)


def tensors(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def match(model: nn.Module, exported: onnx.ModelProto) -> Names:
    """Finds the initializer of every parameter, by equal values."""
    arrays, found, transposed = tensors(exported), {}, []
    for name, parameter in model.named_parameters():
        value = parameter.detach().numpy()
        candidates = [name] if name in arrays else list(arrays)
        same = [key for key in candidates if np.array_equal(arrays[key], value)]
        turned = [key for key in candidates if value.ndim == 2 and np.array_equal(arrays[key], value.T)]
        if len(same) == 1:
            found[name] = same[0]
        elif not same and len(turned) == 1:
            found[name] = turned[0]
            transposed.append(name)
    return Names(found, transposed)


def holders(model: nn.Module, exported: onnx.ModelProto, names: Names) -> list[str]:
    """The initializers to train: those of the parameters, also where they are concatenated or reordered."""
    found = set(names.found.values())
    rest = [value for name, value in model.named_parameters() if name not in names.found]
    wanted = np.concatenate([np.zeros(0), *(value.detach().numpy().ravel() for value in rest)])
    found |= {key for key, value in tensors(exported).items() if value.size and np.isin(value, wanted).any()}
    return sorted(found)


def identities(exported: onnx.ModelProto) -> dict[str, str]:
    """Output -> input of the Identity nodes that the TorchScript exporter puts for equal initializers."""
    arrays = tensors(exported)
    nodes = [node for node in exported.graph.node if node.op_type == "Identity"]
    return {node.output[0]: node.input[0] for node in nodes if node.input[0] in arrays}


def match_by_name(model: nn.Module, exported: onnx.ModelProto, shared: dict[str, str]) -> Names:
    """Every parameter of a network with equal initial values, as an initializer or the copy of one."""
    known = {**tensors(exported), **shared}
    return Names({name: name for name, _ in model.named_parameters() if name in known}, [])


class Detached(TorchFunctionMode):
    """Gathers the results of `detach`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[np.ndarray] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is Tensor.detach:
            self.found.append(result.numpy().copy())
        return result


def constant_values(problem: Problem, variant: Variant, exported: onnx.ModelProto) -> list[str]:
    """The file's values through which PyTorch lets no gradient flow: ONNX has no such operator."""
    model = copy.deepcopy(problem.model).train(forward_mode(problem, variant) == "train")
    with torch.no_grad(), Detached() as detached:
        model(*problem.inputs.values())
    if not detached.found:
        return []
    every = onnx.ModelProto()
    every.CopyFrom(exported)
    known = {v.name: v for v in onnx.shape_inference.infer_shapes(exported, data_prop=True).graph.value_info}
    names = [n for n, v in known.items() if v.type.tensor_type.elem_type == onnx.TensorProto.FLOAT]
    every.graph.output.extend(known[n] for n in names)
    values = dict(zip(names, infer(every, problem.inputs, names), strict=True))
    result = []
    for wanted in detached.found:
        same = [
            n for n, v in values.items() if v.shape == wanted.shape and np.allclose(v, wanted, rtol=1e-4, atol=1e-5)
        ]
        assert same, "a detached value is not in the file"
        result.append(same[-1])
    return result


# --------------------------------------------------------------------------------------
# Checks of the exported files


def infer(model: onnx.ModelProto, inputs: dict[str, Tensor], outputs: list[str] | None = None) -> Any:
    """Runs a file with onnxruntime, as it stands: its first output, or those that are named."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    results = session.run(outputs, {name: value.numpy() for name, value in inputs.items()})
    return results if outputs else results[0]


def forward_mode(problem: Problem, variant: Variant) -> str:
    """What the file computes: the dynamo exporter writes inference BatchNormalization in either mode."""
    return "train" if variant == Variant("torchscript", "train") else "eval"


def check_outputs(problem: Problem, variant: Variant, exported: onnx.ModelProto) -> None:
    """The file is valid and computes what the network computes."""
    onnx.checker.check_model(exported, full_check=True)
    output = infer(exported, problem.inputs)
    wanted = forward(problem, forward_mode(problem, variant))
    np.testing.assert_allclose(output, wanted, rtol=TOLERANCE, atol=TOLERANCE)


def check_unfolded(problem: Problem, exported: onnx.ModelProto) -> None:
    """Every batch normalization of the network is a node of the file."""
    wanted = sum(type(layer).__name__.startswith("BatchNorm") for layer in problem.model.modules())
    if sum(node.op_type == "BatchNormalization" for node in exported.graph.node) != wanted:
        raise Rejected("BatchNormalization is folded into other nodes")


def check_trainable(problem: Problem, variant: Variant, exported: onnx.ModelProto, names: Names) -> None:
    """Every parameter is in the file as often as in the network, and the output follows it when it changes."""
    numbers = Counter(x for value in tensors(exported).values() for x in value.ravel().tolist())
    wanted = Counter(x for value in problem.model.parameters() for x in value.detach().ravel().tolist())
    for name, parameter in problem.model.named_parameters():
        counts = {numbers[x] if numbers[x] != wanted[x] else 1 for x in parameter.detach().ravel().tolist()}
        if counts != {1}:
            raise Rejected(f"the file holds {max(counts)} copies of parameter {name} (0: folded away)")
    moved = Problem(problem.spec, copy.deepcopy(problem.model), problem.inputs, problem.label)
    shift(moved.model, torch.Generator().manual_seed(1), 0.05)
    with torch.no_grad():
        for name, parameter in moved.model.named_parameters():
            if name not in names.found:
                parameter.copy_(problem.model.get_parameter(name))
    output = infer(replace(exported, moved.model, names), problem.inputs)
    if not np.allclose(output, forward(moved, forward_mode(problem, variant)), rtol=1e-3, atol=1e-3):
        raise Rejected("a value computed from parameters is folded into a constant")


def replace(exported: onnx.ModelProto, model: nn.Module, names: Names) -> onnx.ModelProto:
    """A copy of the file with the parameters of `model`."""
    result = onnx.ModelProto()
    result.CopyFrom(exported)
    values = {}
    for name, target in names.found.items():
        value = model.get_parameter(name).detach().numpy()
        values[target] = np.ascontiguousarray(value.T if name in names.transposed else value)
    for tensor in result.graph.initializer:
        if tensor.name in values:
            tensor.CopyFrom(numpy_helper.from_array(values[tensor.name], tensor.name))
    return result


# --------------------------------------------------------------------------------------
# The index


def variants(spec: Network) -> list[Variant]:
    """The exports to try; the optimized one is what the dynamo exporter writes unless told otherwise."""
    result = [Variant("torchscript", mode) for mode in spec.torchscript]
    result += [Variant("dynamo", mode) for mode in spec.dynamo]
    return [*result, Variant("dynamo", spec.dynamo[-1], optimize=True)]


def make_case(problem: Problem, variant: Variant, earlier: list[bytes]) -> dict:
    """Exports, checks and writes one file; returns its entry of the index."""
    spec = problem.spec
    exported = export(problem, variant)
    check_outputs(problem, variant, exported)
    check_unfolded(problem, exported)
    shared = identities(exported) if spec.fresh else {}
    names = match_by_name(problem.model, exported, shared) if spec.fresh else match(problem.model, exported)
    if not spec.fresh:
        check_trainable(problem, variant, exported, names)
    data = exported.SerializeToString()
    if data in earlier:
        raise Rejected("identical to an earlier file of this network")
    earlier.append(data)
    file = variant.file(spec.name)
    (FOLDER / file).write_bytes(data)
    return {
        "network": spec.name,
        "file": file,
        "exporter": variant.exporter,
        "mode": variant.mode,
        "optimize": variant.optimize,
        "opset": max(entry.version for entry in exported.opset_import if entry.domain == ""),
        "npz": f"{spec.name}.npz",
        "loss": spec.loss,
        "lr": spec.lr,
        "dynamic_batch": spec.dynamic_batch,
        "inputs": {name: name for name in problem.inputs},
        "label": None if problem.label is None else "label",
        "parameters": names.found,
        "transposed": names.transposed,
        "trainable": holders(problem.model, exported, names),
        "shared": shared,
        "no_grad": constant_values(problem, variant, exported),
    }


def make_network(spec: Network, seed: int) -> tuple[list[dict], list[dict]]:
    """All files of one network: the entries of the index, and those skipped."""
    problem = build(spec, seed)
    losses = save_curve(problem, FOLDER / f"{spec.name}.npz")
    size = sum(value.numel() for value in problem.model.parameters())
    print(f"{spec.name}: {size} parameters, loss", *(f"{loss:.4f}" for loss in losses))
    cases, skipped, earlier = [], [], []
    for variant in variants(spec):
        try:
            cases.append(make_case(problem, variant, earlier))
        except (Rejected, torch.onnx.errors.OnnxExporterError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:160]
            entry = {"network": spec.name, "exporter": variant.exporter, "mode": variant.mode}
            skipped.append({**entry, "optimize": variant.optimize, "reason": reason})
            print(f"  skipped {variant.file(spec.name)}: {reason}")
    return cases, skipped


def summary(cases: list[dict]) -> dict[str, list[str]]:
    """Operator (with its domain, when not the default one) -> the exporters that write it."""
    found: dict[str, set[str]] = {}
    for case in cases:
        model = onnx.load(FOLDER / case["file"])
        for node in model.graph.node:
            key = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
            found.setdefault(key, set()).add(case["exporter"])
    return {name: sorted(found[name]) for name in sorted(found)}


def main(only: list[str]) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if not only:
        for pattern in ("*.onnx", "*.npz"):
            for path in FOLDER.glob(pattern):
                path.unlink()
    cases, skipped = [], []
    for seed, spec in enumerate([*NETWORKS, *ARCHITECTURES]):
        if not only or spec.name in only:
            made, failed = make_network(spec, seed)
            cases += made
            skipped += failed
    if only:
        return
    versions = {"torch": torch.__version__, "onnx": onnx.__version__}
    content = {"versions": versions, "cases": cases, "skipped": skipped, "operators": summary(cases)}
    (FOLDER / "index.json").write_text(json.dumps(content, indent=1) + "\n")
    total = sum(path.stat().st_size for path in FOLDER.iterdir() if path.is_file())
    print(f"{len(cases)} cases, {len(skipped)} skipped, {total / 1e6:.2f} MB")


if __name__ == "__main__":
    main(sys.argv[1:])
