"""Files of every kind that are as they should be, made here: networks of a few values, operators' samples."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import tempfile
import warnings
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

import recompute as rc
from recompute.cost import device

#: a device whose times are those of a data sheet, so that files do not depend on how fast this machine is
COST = device("v100-16")
KINDS = ("onnx", "text", "step", "plan", "state", "data")
#: compiled samples of operators in the quick corpus: every so many
_SPARSE = 12


def chain(depth: int = 5) -> onnx.ModelProto:
    """A narrow MLP at any batch: long enough that recomputing saves something."""
    draw = np.random.default_rng(1)
    nodes, weights, x = [], [], "x"
    for i in range(depth):
        w = draw.standard_normal((4, 4), np.float32)
        weights.append(onnx.numpy_helper.from_array(w, f"w{i}"))
        nodes.append(helper.make_node("MatMul", [x, f"w{i}"], [f"h{i}"]))
        nodes.append(helper.make_node("Tanh" if i % 2 else "Relu", [f"h{i}"], [f"a{i}"]))
        x = f"a{i}"
    return _model("chain", nodes, weights, ["n", 4], x, ["n", 4])


def image() -> onnx.ModelProto:
    """Convolution, batch normalisation, pooling, dropout, a classifier."""
    draw = np.random.default_rng(2)
    shapes = {"k": (2, 2, 3, 3), "s": (2,), "b": (2,), "m": (2,), "v": (2,), "w": (8, 3), "c": (3,)}
    arrays = {name: np.abs(draw.standard_normal(shape, np.float32)) for name, shape in shapes.items()}
    arrays["flat"] = np.array([0, 8])
    nodes = [
        helper.make_node("Conv", ["x", "k"], ["conv"], pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["conv", "s", "b", "m", "v"], ["norm"]),
        helper.make_node("Relu", ["norm"], ["relu"]),
        helper.make_node("MaxPool", ["relu"], ["pool"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Dropout", ["pool"], ["drop"]),
        helper.make_node("Reshape", ["drop", "flat"], ["rows"]),
        helper.make_node("Gemm", ["rows", "w", "c"], ["y"]),
    ]
    weights = [onnx.numpy_helper.from_array(a, name) for name, a in arrays.items()]
    return _model("image", nodes, weights, ["n", 2, 4, 4], "y", ["n", 3])


def rows() -> onnx.ModelProto:
    """Row products, a layer normalisation, a softmax, an embedding."""
    draw = np.random.default_rng(3)
    shapes = {"table": (5, 4), "q": (4, 4), "k": (4, 4), "s": (4,), "b": (4,)}
    weights = [onnx.numpy_helper.from_array(draw.standard_normal(s, np.float32), n) for n, s in shapes.items()]
    nodes = [
        helper.make_node("Gather", ["table", "x"], ["e"]),
        helper.make_node("LayerNormalization", ["e", "s", "b"], ["n"]),
        helper.make_node("MatMul", ["n", "q"], ["nq"]),
        helper.make_node("MatMul", ["n", "k"], ["nk"]),
        helper.make_node("Transpose", ["nk"], ["kt"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["nq", "kt"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["p"], axis=-1),
        helper.make_node("MatMul", ["p", "e"], ["y"]),
    ]
    return _model("rows", nodes, weights, ["batch", 3], "y", ["batch", 3, 4], TensorProto.INT64)


def _model(
    name: str, nodes: list, weights: list, given: list, out: str, gives: list, kind: int = TensorProto.FLOAT
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes, name, [helper.make_tensor_value_info("x", kind, given)],
        [helper.make_tensor_value_info(out, TensorProto.FLOAT, gives)], weights,
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@functools.cache
def loaded(name: str) -> tuple[rc.Program, str]:
    """A forward program of one of the networks here, with its loss: not to be changed."""
    from recompute.compiling.steps import attach_loss

    program = rc.load({"chain": chain, "image": image, "rows": rows}[name](), batch=4)
    return program, attach_loss(program, None)[0]


def compiled(name: str, **options: Any) -> Any:
    """A training step of a network of this module."""
    from recompute.compiling.compiler import compile_step

    program, loss = loaded(name)
    optimizer = options.pop("optimizer", rc.SGD(learning_rate=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return compile_step(program, loss, optimizer, **{"providers": providers(), "cost": COST, **options})


def providers() -> tuple[str, ...]:
    """Whose kernels there are on this machine."""
    from recompute.runtime.lowering import providers

    return providers()


@functools.cache
def steps() -> dict[str, Any]:
    """Compiled steps: plain and recomputed, for NumPy and for this machine's kernels, with copies to the host."""
    found = {}
    for name in ("chain", "image", "rows"):
        found[f"{name} numpy"] = compiled(name, providers=("numpy",))
        found[f"{name} native"] = compiled(name)
    found["chain adam"] = compiled("chain", optimizer=rc.Adam(learning_rate=0.1), providers=("numpy",))
    found["chain recomputed"] = compiled("chain", checkpoints=["a1", "a3"], providers=("numpy",))
    found["chain offloaded"] = compiled("chain", checkpoints=["a1", "a3"], offload=True, providers=("numpy",))
    found["image recomputed"] = compiled("image", checkpoints=["relu"], providers=("numpy",))
    found["chain mixed"] = compiled("chain", precision="fp16", providers=("numpy",))
    return found


def samples(everything: bool, stored: bool = False) -> Iterator[tuple[str, rc.Block]]:
    """Operators' samples as planned programs: for NumPy, and in single precision for kernels where there are some.

    `stored`: with buffers, which a file holds, in place of inputs.
    """
    from recompute.passes import Target, plan_memory
    from recompute.runtime.lowering import resolved
    from recompute.testing import all_ops, case_block, cases

    own, native = (resolved(Target(providers=p, schedule=False)) for p in (("numpy",), None))
    for number, cls in enumerate(all_ops()):
        for i, case in enumerate(cases(cls)[: 3 if everything else 1]):
            if not everything and number % _SPARSE:
                continue
            block, _ = case_block(case)
            if stored:
                block = replace(block, inputs=(), buffers=(*block.buffers, *block.inputs))
            yield f"{cls.__name__} {i}", plan_memory(block, own)
            with contextlib.suppress(rc.VerifyError):  # not every operator takes another element type
                single = rc.verify(rc.parse(rc.show(block).replace("f64", "f32")))
                planned = plan_memory(single, native)
                if any(op.kernel for op in planned.operators):
                    yield f"{cls.__name__} {i} native", planned


def _texts(everything: bool) -> list[tuple[str, bytes]]:
    found = [(name, rc.show(step.program.block).encode()) for name, step in steps().items()] * 3
    found += [(f"{n} unplanned", rc.show(s.program.logical).encode()) for n, s in steps().items() if "numpy" in n]
    single = [(name, rc.show(block).encode()) for name, block in samples(everything)]
    return found + single + [s for s in single if "native" in s[0]] * 2


def _exported(everything: bool) -> list[tuple[str, bytes]]:
    found = []
    for name, step in steps().items():
        if "offloaded" not in name:
            found += [(name, rc.export_step(step.program).SerializeToString())] * 4
    draw = np.random.default_rng(4)
    for name, block in samples(everything, stored=True):
        data = {v.name: contents(draw, v.type) for v in (*block.buffers, *block.state)}
        if all(v.dtype in onnx_types() for v in block.values().values()):
            found.append((name, _bare_step(name, block, data)))
    return found


@functools.cache
def onnx_types() -> frozenset[str]:
    """Element types that ordinary initializers have."""
    return frozenset({"f16", "f32", "f64", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64", "bool"})


def _bare_step(name: str, block: rc.Block, data: dict[str, np.ndarray]) -> bytes:
    """A compiled step's file without the graph that other runtimes would run."""
    tensors = [onnx.numpy_helper.from_array(a, n) for n, a in data.items()]
    names = [t.name for t in tensors]
    graph = helper.make_graph([helper.make_node("Identity", names[:1], ["_"])], name, [], [], tensors)
    model = helper.make_model(graph)
    model.metadata_props.add(key="recompute.program", value=rc.show(block))
    model.metadata_props.add(key="recompute.gradients", value="[]")
    return model.SerializeToString()


def contents(draw: np.random.Generator, t: rc.TensorType, wild: bool = False) -> np.ndarray:
    """Elements of a type: small ones, or any."""
    if t.is_float:
        scale = 10.0 ** draw.integers(-3, 30, t.shape) if wild else 1.0
        with np.errstate(all="ignore"):
            return np.asarray(draw.standard_normal(t.shape) * scale).astype(t.numpy)
    if t.dtype == "bool":
        return np.asarray(draw.random(t.shape) < 0.5)
    low, high = (-1000, 1000) if wild else (0, 2)
    return np.asarray(draw.integers(low, high, t.shape)).astype(t.numpy)


def _plans() -> list[tuple[str, bytes]]:
    """Saved plans of the networks, and planners' problems."""
    wanted: list[tuple[str, dict[str, Any]]] = [
        ("chain", {"strategy": "feng-huang"}),
        ("chain", {"strategy": "chen"}),
        ("chain", {"plan": compiled("chain", checkpoints=["a1", "a3"], offload=True, schedule=False).plan}),
        ("image", {"strategy": "feng-huang"}),
        ("rows", {"strategy": "feng-huang"}),
    ]
    found = [(name, _saved(name, **options)) for name, options in wanted] * 3
    links = {"directed": True, "graph": {"name": "three", "order": [0, 1, 2]},
             "nodes": [{"id": i, "backward": i == 2, "cost_cpu": i + 1, "cost_ram": 10 * i} for i in range(3)],
             "links": [{"source": 0, "target": 1}, {"0": 0, "1": 2}, {"source": 1, "target": 2}]}  # fmt: skip
    ours = json.dumps(_problem().to_dict()).encode()
    return [*found, ("problem", ours), ("problem", ours), ("links", json.dumps(links).encode())]


def _saved(name: str, **options: Any) -> bytes:
    """A plan's file, without the seconds that finding it took."""
    plan = compiled(name, providers=("numpy",), **options).saved
    figures = {**plan.figures, "planning_seconds": 0.5}
    return (json.dumps({**plan.to_dict(), "figures": figures}, indent=1) + "\n").encode()


def _problem() -> Any:
    from recompute.passes.planners.core.derive import derive

    return derive(compiled("chain", providers=("numpy",)).program.logical, lambda op: 1.0).problem


@functools.cache
def _state_program() -> rc.Program:
    return compiled("image", optimizer=rc.Adam(learning_rate=0.1), providers=("numpy",)).program


def fresh_state() -> rc.Program:
    """A program with parameters, statistics and optimizer state, whose contents a state file replaces."""
    return _state_program().clone()


def _states() -> list[tuple[str, bytes]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "state.safetensors")
        rc.save_state(_state_program(), path)
        return [("image", path.read_bytes())]


def _data() -> list[tuple[str, bytes]]:
    found = []
    draw = np.random.default_rng(5)
    for name in ("chain", "image", "rows"):
        for kind, many in ((zipfile.ZIP_STORED, 1), (zipfile.ZIP_DEFLATED, 3)):
            inputs = steps()[f"{name} numpy"].program.block.inputs
            arrays = {v.name: np.concatenate([contents(draw, v.type)] * many) for v in inputs}
            found.append((name, archive({f"{n}.npy": npy(a) for n, a in arrays.items()}, kind)))
    return found


def npy(array: np.ndarray) -> bytes:
    """An array as an .npy file."""
    out = io.BytesIO()
    np.save(out, array, allow_pickle=True)
    return out.getvalue()


def archive(members: dict[str, bytes], kind: int) -> bytes:
    """An .npz file of these members, without the time of day that NumPy would write into it."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as target:
        for name, data in members.items():
            target.writestr(zipfile.ZipInfo(name), data, kind)
    return out.getvalue()


@functools.cache
def corpus(kind: str, everything: bool) -> list[tuple[str, bytes]]:
    """(name, file) of one kind; `everything`: with all operators' samples, and onnx's own test models."""
    from . import onnx_files

    if kind == "onnx":
        own = [(m.graph.name, m.SerializeToString()) for m in (chain(), image(), rows())] * 20
        return own + onnx_files.corpus(everything)
    if kind == "text":
        return _texts(everything)
    if kind == "step":
        return _exported(everything)
    return {"plan": _plans, "state": _states, "data": _data}[kind]()
