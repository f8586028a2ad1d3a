"""What the cases on ONNX files compare: values with ONNX Runtime's or given ones, gradients with differences."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

import recompute as rc
from recompute.cli.command import main as compile_main
from recompute.cli.train import main as train_main
from recompute.testing import check_gradient, in_float64

Verdict = tuple[str, str]
Feed = Mapping[str, Any]
GITHUB = "https://github.com/"


def wave(*shape: int, phase: float = 0.3) -> np.ndarray:
    """Numbers between -1 and 1 without ties, the same on every machine."""
    count = int(np.prod(shape))
    return np.sin(np.arange(count) * 1.7 + phase).astype(np.float32).reshape(shape)


def node(op: str, inputs: str, outputs: str = "y", **attributes: Any) -> onnx.NodeProto:
    """A node from names parted by spaces; `_` is an input or output that is left out."""
    domain = attributes.pop("domain", "")
    given, made = ([n if n != "_" else "" for n in names.split()] for names in (inputs, outputs))
    return helper.make_node(op, given, made, domain=domain, **attributes)


def model(
    nodes: Sequence[onnx.NodeProto],
    feed: Feed,
    held: Feed | None = None,
    outputs: Sequence[str] = ("y",),
    opset: int = 20,
    ir: int = 9,
    **more: Any,
) -> onnx.ModelProto:
    """A model whose inputs are `feed`'s arrays and whose initializers are `held`'s."""
    kinds = {n: helper.np_dtype_to_tensor_dtype(np.asarray(a).dtype) for n, a in feed.items()}
    inputs = [helper.make_tensor_value_info(n, kinds[n], np.shape(a)) for n, a in feed.items()]
    results = [onnx.ValueInfoProto(name=n) for n in outputs]
    tensors = [numpy_helper.from_array(np.asarray(a), n) for n, a in (held or {}).items()]
    graph = helper.make_graph(list(nodes), "g", inputs, results, tensors)
    domains = {"": opset, "com.microsoft": 1, "ai.onnx.ml": 3, **more.pop("domains", {})}
    opsets = [helper.make_opsetid(d, v) for d, v in domains.items()]
    return helper.make_model(graph, opset_imports=opsets, ir_version=ir, **more)


def by_runtime(made: onnx.ModelProto, feed: Feed) -> list[np.ndarray]:
    """What ONNX Runtime gives."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(made.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, dict(feed))


def operator(
    nodes: onnx.NodeProto | Sequence[onnx.NodeProto],
    feed: Feed,
    held: Feed | None = None,
    *,
    want: Sequence[Any] | None = None,
    gradient: bool = True,
    wrt: Sequence[str] | None = None,
    tolerance: float = 2e-5,
    load: Mapping[str, Any] | None = None,
    **made: Any,
) -> Callable[[], Verdict]:
    """A case: the values of a small model (ONNX Runtime's, or `want`), and its gradients in float64 (by `wrt`)."""

    def run() -> Verdict:
        file = model([nodes] if isinstance(nodes, onnx.NodeProto) else nodes, feed, held, **made)
        options = {"mode": "file", **(load or {})}
        program = rc.load(file, **options)
        expected = by_runtime(file, feed) if want is None else [np.asarray(a) for a in want]
        found = rc.Executor().run(program, {v.name: feed[v.name] for v in program.block.inputs}, list(program.outputs))
        for a, b in zip(found, expected, strict=True):
            if a.shape != b.shape:
                return "wrong", f"shape {a.shape}, not {b.shape}"
            if not np.allclose(a, b, tolerance, tolerance, equal_nan=True):
                return "wrong", f"values differ by {np.nanmax(np.abs(np.float64(a) - np.float64(b))):.3g}"
        kinds = program.block.values()
        if not gradient or not any(kinds[n].dtype == "f32" for n in program.block.outputs):
            return "right", "values"
        wide = in_float64(program)
        numbers = {**wide.data, **{v.name: np.asarray(feed[v.name]) for v in program.block.inputs}}
        for v in wide.block.inputs:
            numbers[v.name] = numbers[v.name].astype(np.float64) if v.dtype == "f64" else numbers[v.name]
        check_gradient(wide.block, numbers, wrt=wrt, tolerance=1e-5)
        return "right", "values and gradients"

    return run


def judged(case: Callable[[], Verdict]) -> Verdict:
    """The verdict of a case; a refusal is an error of this package in one sentence or more, anything else a fault."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return case()
    except rc.RecomputeError as e:
        return "refused", re.sub(r"/\S*/", "", " ".join(str(e).split()))[:300]
    except AssertionError as e:
        return "wrong", " ".join(str(e).split())[:300]
    except Exception as e:
        return "wrong", f"{type(e).__name__}: {' '.join(str(e).split())[:240]}"


def command(name: str, *arguments: str) -> tuple[int, str, str]:
    """Exit code, output and errors of `recompute-compile` or `recompute-train` in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            code = (train_main if name == "train" else compile_main)(list(arguments))
        except SystemExit as e:
            code = int(e.code or 0)
    return code, out.getvalue(), err.getvalue()


def refused(result: tuple[int, str, str], code: int, pattern: str) -> Verdict:
    """ "refused" where the command ends with this exit code and one message that says what `pattern` looks for."""
    got, _, err = result
    text = " ".join(err.split())
    if got != code or "Traceback" in err or not re.search(pattern, text):
        return "wrong", f"exit code {got}: {text[:240]}"
    return "refused", text[:300]


def classifier(folder: Path, inputs: int = 4, classes: int = 3, **more: Any) -> Path:
    """A file with one layer and an open batch."""
    held = {"w": wave(inputs, classes), "b": wave(classes)}
    made = model([node("Gemm", "x w b", "logits")], {"x": wave(1, inputs)}, held, ("logits",), **more)
    made.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "N"
    made.graph.output[0].CopyFrom(helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, ["N", classes]))
    path = folder / "model.onnx"
    onnx.save(made, path)
    return path
