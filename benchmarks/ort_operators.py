"""ONNX Runtime training as an oracle for single operators: our samples, and ONNX's node cases.

    python benchmarks/ort_operators.py FOLDER --ort PYTHON [--only NAME ...] [--cases 8]

PYTHON: see ort_training.py; the node cases are those of its onnx.  Float32 inputs become parameters, each times the
input, which is 1; the loss is a weighted sum of the outputs, and the gradients of all parameters are compared.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from ort_training import by_oracle, row_of

#: "operator: verdict" → why
EXPLAINED: dict[str, str] = {}
#: ONNX Runtime's errors, and what they mean
MEANINGS = {"gradient_builder != nullptr": "it has no gradient of this operator"}


def node_cases(folder: Path, most: int, only: Sequence[str]) -> None:
    """Writes ONNX's node cases of one node and float32 inputs as models that train; `most` of an operator."""
    from onnx.backend.test.loader import load_model_tests

    seen: collections.Counter[str] = collections.Counter()
    for case in load_model_tests(kind="node"):
        model, data = onnx.load(f"{case.model_dir}/model.onnx"), Path(case.model_dir) / "test_data_set_0"
        op, domain = model.graph.node[0].op_type, model.graph.node[0].domain
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


def operator_table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The operators that agree, and a line for each verdict of another one."""
    by: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        by.setdefault(row["name"].partition("-")[0], {}).setdefault(row["verdict"], []).append(row["why"])
    counts = collections.Counter(row["verdict"] for row in rows)
    yield f"{len(by)} operators, {len(rows)} cases: " + ", ".join(f"{k} {n}" for k, n in counts.most_common())
    agree = [f"{op} {len(v['agrees'])}" for op, v in by.items() if set(v) == {"agrees"}]
    yield f"\nagree in all their cases ({len(agree)}):"
    for k in range(0, len(agree), 8):
        yield "    " + ", ".join(agree[k : k + 8])
    for word in ("differs", "refused", "no gradient", "refused there"):
        lines = [(op, v) for op, v in by.items() if word in v]
        yield f"\n{word} ({len(lines)}):"
        for op, v in lines:
            why = EXPLAINED.get(f"{op}: {word}") or EXPLAINED.get(op) or v[word][0][:160]
            yield f"    {op} ({', '.join(f'{k} {len(w)}' for k, w in v.items())}): {why}"


def main() -> None:
    """Writes models, runs the oracle, and compares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ort", default=sys.executable)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--cases", type=int, default=8)
    parser.add_argument("--oracle", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.oracle:
        node_cases(args.folder, args.cases, args.only)
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    write_samples(args.folder, args.only, args.cases)
    options = ["--cases", str(args.cases), "--only", *args.only]
    subprocess.run([args.ort, __file__, str(args.folder), "--oracle", *options], check=True)
    by_oracle(args.ort, args.folder)
    print(*operator_table([row_of(path) for path in sorted(args.folder.glob("*.onnx"))]), sep="\n")


if __name__ == "__main__":
    main()
