"""ONNX Runtime training as an oracle for single operators: our samples, and ONNX's node cases.

    python benchmarks/ort_operators.py FOLDER --ort PYTHON [--only NAME ...] [--cases 8]

PYTHON: see ort_training.py; the node cases are those of its onnx.  Float32 inputs become parameters, each times the
input, which is 1; the loss is a weighted sum of the outputs, and the gradients of all parameters are compared.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import re
import subprocess
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from ort_training import arguments, by_oracle, row_of, trained_here

#: of the differences that judge gradients
_STEP = 5e-3
#: why gradients differ, where differences of the loss say that ours is the derivative
PURPOSE = {
    "AveragePool": "there the gradient leaves out dilations; ceil_mode with count_include_pad counts other padding",
    "BatchNormalization": "there the batch's statistics are used where the file says running ones, and the running "
    "statistics that a node gives have no gradient",
    "Conv": "there the gradient with auto_pad is another one",
    "Dropout": "there the gradient is scaled although the node is in inference",
    "Gelu": "there the gradient of the tanh form is that of the erf form",
    "LayerNormalization": "there mean and deviation, which a node may give, have no gradient",
    "LeakyRelu": "there the gradient reads the result's sign, which a negative slope turns",
    "ReduceL2": "there noop_with_empty_axes gives the input, not its absolute value",
    "ScatterElements": "there the gradient leaves out the reduction",
    "ScatterND": "there the gradient leaves out the reduction",
    "SoftmaxCrossEntropyLoss": "there the second result, log_prob, has no gradient",
    "Where": "there the gradient of inputs that are broadcast is another one",
}
#: texts of ONNX Runtime's errors, and what they mean
MEANINGS = {
    "GradientBuilderBase": "its gradient wants inputs or results that the node leaves out",
    "gradient_builder": "no gradient is registered",
    "Could not find an implementation": "its gradient has no kernel for the CPU",
    "GRUAttributes|kForward|C0 must have|sequence length": "one direction and plain states only",
    "nvalid model|type information|Type parameter|No Op registered|InferenceError|producer node|feed names": "the "
    "gradients' graph that it writes is not valid here",
    "Non-zero status code|was false": "its kernel fails",
}


def node_cases(folder: Path, most: int, only: Sequence[str]) -> None:
    """Writes ONNX's node cases of one node and float32 inputs as models that train; `most` of an operator."""
    from onnx.backend.test.loader import load_model_tests

    seen: collections.Counter[str] = collections.Counter()
    for case in load_model_tests(kind="node"):
        model, data = onnx.load(f"{case.model_dir}/model.onnx"), Path(case.model_dir) / "test_data_set_0"
        op, domain = model.graph.node[0].op_type, model.graph.node[0].domain
        if any(a.HasField("g") for a in model.graph.node[0].attribute):
            continue
        if len(model.graph.node) > 1 or domain or seen[op] >= most or (only and op not in only):
            continue
        ports = {"input": model.graph.input, "output": model.graph.output}
        if not all(p.type.HasField("tensor_type") for kind in ports.values() for p in kind):
            continue
        ends = [[read(data / f"{kind}_{i}.pb") for i in range(len(there))] for kind, there in ports.items()]
        if write(folder / f"{op}-{case.name.removeprefix('test_')}.onnx", model, *ends):
            seen[op] += 1


def read(path: Path) -> np.ndarray:
    """A tensor's file."""
    return numpy_helper.to_array(onnx.TensorProto.FromString(path.read_bytes()))


def write(path: Path, model: onnx.ModelProto, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> bool:
    """Writes the model with float32 inputs as parameters, times an input that is 1, and a weighted sum as its loss."""
    graph, draw = model.graph, np.random.default_rng(0)
    names, results = [i.name for i in graph.input], [o.name for o in graph.output]
    floats = [n for n, a in zip(names, inputs, strict=True) if a.dtype == np.float32 and a.size]
    floats = [n for n, a in zip(names, inputs, strict=True) if n in floats and (a.ndim or len(names) == 1)]
    losses = [(n, a) for n, a in zip(results, outputs, strict=True) if a.dtype == np.float32 and a.size]
    if not floats or not losses:
        return False
    before = [helper.make_node("Mul", [f"p_{n}", "one"], [n]) for n in floats]
    after, total = [], ""
    for name, a in losses:
        weights = np.asarray(draw.standard_normal(a.shape), np.float32)
        graph.initializer.append(numpy_helper.from_array(weights, f"{name}.weights"))
        after.append(helper.make_node("Mul", [name, f"{name}.weights"], [f"{name}.weighted"]))
        after.append(helper.make_node("ReduceSum", [f"{name}.weighted"], [f"{name}.sum"], keepdims=0))
        if total:
            after.append(helper.make_node("Add", [total, f"{name}.sum"], [f"{name}.total"]))
        total = after[-1].output[0]
    for name, a in zip(names, inputs, strict=True):
        graph.initializer.append(numpy_helper.from_array(np.asarray(a), f"p_{name}" if name in floats else name))
    nodes = [*before, *graph.node, *after]
    opsets = list(model.opset_import)
    graph = helper.make_graph(
        nodes, "case", [helper.make_tensor_value_info("one", TensorProto.FLOAT, [])],
        [helper.make_tensor_value_info(total, TensorProto.FLOAT, [])], list(graph.initializer),
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), str(path))
    return True


def write_samples(folder: Path, only: Sequence[str], most: int) -> None:
    """Our operators' samples in float32, of those that ONNX has too."""
    import recompute as rc
    from recompute.testing import all_ops, case_block, cases, evaluate

    for cls in all_ops():
        if not onnx.defs.has(cls.__name__) or (only and cls.__name__ not in only):
            continue
        samples = [c for c in cases(cls) if c.gradient and not c.op.updates and c.export][:most]
        for k, case in enumerate(samples):
            wide = {f.name: "f32" for f in dataclasses.fields(case.op) if getattr(case.op, f.name) == "f64"}
            inputs = tuple(a.astype("f4") if a is not None and a.dtype == "f8" else a for a in case.inputs)
            block, feed = case_block(dataclasses.replace(case, op=dataclasses.replace(case.op, **wide), inputs=inputs))
            with contextlib.suppress(rc.errors.RecomputeError):
                model = rc.export_step(rc.Program(block, {}))
                if not model.functions and any(n.op_type == cls.__name__ for n in model.graph.node):
                    ends = [feed[i.name] for i in model.graph.input], evaluate(block, feed)
                    write(folder / f"{cls.__name__}-ours_{k}.onnx", model, *ends)


def judged(path: Path) -> dict[str, Any]:
    """A model's row; where gradients differ, differences of the loss by ONNX's own evaluator say who is right.

    The direction is that in which the two gradients differ most.
    """
    row = row_of(path)
    if row["verdict"] != "differs":
        return row
    from onnx.reference import ReferenceEvaluator

    model, here, there = onnx.load(str(path)), trained_here(path), np.load(path.with_suffix(".there.npz"))
    tensors = {t.name: (t, numpy_helper.to_array(t)) for t in model.graph.initializer}
    names = [n for n in there if n.startswith("gradient/")]
    gaps = {n: np.float64(here.get(n, 0.0)) - there[n] for n in names}
    size = np.sqrt(sum((gap**2).sum() for gap in gaps.values()))

    def loss(step: float) -> float:
        for name, gap in gaps.items():
            tensor, start = tensors[name.removeprefix("gradient/")]
            moved = (start + step * gap / size).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(moved, tensor.name))
        return float(ReferenceEvaluator(model).run(None, {"one": np.array(1, np.float32)})[0])

    try:
        slope = (loss(_STEP) - loss(-_STEP)) / (2 * _STEP)
    except Exception as e:  # the evaluator does not run everything
        return row | {"why": f"{row['why']}; no judge: {type(e).__name__}"}
    apart = [abs(slope - sum((g[n] * gaps[n]).sum() for n in names if n in g) / size) / size for g in (here, there)]
    verdict = "differs on purpose" if apart[0] < 0.1 < apart[1] else "differs"
    if verdict == "differs" and path.stem.startswith("Dropout"):
        return row | {"verdict": "random", "why": "draws other numbers"}
    return row | {"verdict": verdict, "why": f"{row['why']}; from the slope {apart[0]:.1g}, {apart[1]:.1g}"}


def reason(row: dict[str, Any]) -> str:
    """Why a model does not agree, in words for several models."""
    if row["verdict"] == "differs on purpose":
        return PURPOSE.get(row["name"].partition("-")[0], row["why"])
    if row["verdict"] == "not supported there":
        return next((text for pattern, text in MEANINGS.items() if re.search(pattern, row["why"])), row["why"][-100:])
    return str(row["why"])


def operator_table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """For each verdict and reason the operators, and how many cases each."""
    counts = collections.Counter(row["verdict"] for row in rows)
    operators = {row["name"].partition("-")[0] for row in rows}
    yield f"{len(operators)} operators, {len(rows)} cases: " + ", ".join(f"{k} {n}" for k, n in counts.most_common())
    for word, _ in counts.most_common():
        yield f"\n{word}"
        by: dict[str, collections.Counter[str]] = {}
        for row in rows:
            if row["verdict"] == word:
                why = "" if word == "agrees" else reason(row)
                by.setdefault(why, collections.Counter())[row["name"].partition("-")[0]] += 1
        for why, ops in by.items():
            listed = ", ".join(f"{op} {n}" for op, n in sorted(ops.items()))
            yield textwrap.fill(
                f"{why}: {listed}" if why else listed, 118, initial_indent="  ", subsequent_indent="    "
            )


def main() -> None:
    """Writes models, runs the oracle, and compares."""
    parser = arguments(__doc__, "ort")
    parser.add_argument("--cases", type=int, default=8)
    args = parser.parse_args()
    if args.oracle:
        node_cases(args.folder, args.cases, args.only)
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    write_samples(args.folder, args.only, args.cases)
    options = ["--cases", str(args.cases), "--only", *args.only]
    subprocess.run([args.ort, __file__, str(args.folder), "--oracle", *options], check=True)
    by_oracle(args.ort, args.folder)
    print(*operator_table([judged(path) for path in sorted(args.folder.glob("*.onnx"))]), sep="\n")


if __name__ == "__main__":
    main()
