"""Exported models: every operator's samples and whole steps through ONNX Runtime; files that are broken or foreign."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper

import recompute as rc
from recompute.data.batches import synthetic_batch
from recompute.errors import ModelError, UsageError
from recompute.exporter.function_builder import FunctionBuilder, Names
from recompute.exporter.step import DOMAIN
from recompute.language.builder import Builder
from recompute.language.ir import Block, Operator, Role, Value
from recompute.language.op import Op, op_class
from recompute.language.types import TensorType
from recompute.passes.gradient.autodiff import differentiate
from recompute.passes.recomputation.recompute import RecomputePlan, Rerun, apply, plan_from_checkpoints
from recompute.testing import Case, all_ops, case_block, cases, evaluate

ort = pytest.importorskip("onnxruntime")

#: operators whose ONNX form ONNX Runtime's CPU provider cannot run on some sample; ONNX's own evaluator does
NOT_IN_ORT: dict[str, str] = {}
#: what ONNX Runtime gets wrong before 1.24 (the last one for Python 3.10 is 1.23): ONNX's own evaluator judges there
WRONG_BEFORE_1_24 = {
    **dict.fromkeys(["ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceSumSquare"], "without axes it returns its input"),
    "ReverseSequence": "float64",
}
OLD_ORT = tuple(map(int, ort.__version__.split(".")[:2])) < (1, 24)
#: operators compared in float32 only, though there is a float64 kernel
FLOAT32_IN_ORT = {
    "GRU": "it lists a float64 kernel, which refuses to run",
    "LSTM": "it lists a float64 kernel, which refuses to run",
    "RandomNormal": "drawn in float32, whatever the element type",
    "Shrink": "its float64 kernel goes through float32",
}


def session(model: onnx.ModelProto | str):
    """An ONNX Runtime session without graph optimisation."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    source = model if isinstance(model, str) else model.SerializeToString()
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def metadata(model: onnx.ModelProto) -> dict[str, str]:
    return {p.key: p.value for p in model.metadata_props}


# -- every operator ------------------------------------------------------------------------------------------


def in_float32(case: Case) -> Case:
    """The case with float32 in place of float64, in its attributes too."""
    attributes = {f.name: "f32" for f in dataclasses.fields(case.op) if getattr(case.op, f.name) == "f64"}
    inputs = tuple(a.astype(np.float32) if a is not None and a.dtype == np.float64 else a for a in case.inputs)
    return dataclasses.replace(case, op=dataclasses.replace(case.op, **attributes), inputs=inputs)


def without_inexpressible(block: Block) -> Block:
    """The block without the optional outputs that the operator's expansion does not give."""
    (op,) = block.operators
    found = op.op.expand(Builder.on(block), *op.inputs)
    if found is None or op.op.updates or all(v is not None for v in found[: len(op.outputs)]):
        return block
    outs = tuple(o if v is not None else None for o, v in zip(op.outputs, found, strict=False))
    return block.with_operators(
        [dataclasses.replace(op, outputs=outs)], outputs=tuple(o.name for o in outs if o is not None)
    )


def exported(case: Case) -> tuple[onnx.ModelProto, dict[str, np.ndarray], list[np.ndarray]]:
    """The case as a model, what to feed, and our results in the order of its outputs."""
    block, feed = case_block(case)
    block = without_inexpressible(block)
    stored = {v.name for v in block.state}
    program = rc.Program(block, {n: a.copy() for n, a in feed.items() if n in stored})
    model = rc.export_step(program)
    onnx.checker.check_model(model, full_check=True)
    return model, {v.name: np.asarray(feed[v.name]) for v in block.inputs}, evaluate(block, feed)


def in_runtime(case: Case) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Results of ONNX Runtime and ours; in float32 where it has no float64 kernel."""
    if case.op.name in FLOAT32_IN_ORT:
        case = in_float32(case)
    model, feed, ours = exported(case)
    try:
        return session(model).run(None, feed), ours
    except ort.capi.onnxruntime_pybind11_state.NotImplemented:
        if not any(t is not None and t.dtype == np.float64 for t in (*case.inputs, *ours)):
            raise
    model, feed, ours = exported(in_float32(case))
    return session(model).run(None, feed), ours


def in_reference(case: Case) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Results of ONNX's own evaluator and ours."""
    from onnx.reference import ReferenceEvaluator

    model, feed, ours = exported(case)
    return ReferenceEvaluator(model).run(None, feed), ours


def assert_close(got: np.ndarray, want: np.ndarray, what: str, coarsest: float = 0.0) -> None:
    """Equal types; equal integers; floats up to the rounding of a few hundred operations on the largest one.

    `coarsest`: the largest rounding unit among the inputs.  A runtime may compute a float32 result of float16 inputs
    in float16, so one such unit is allowed beside it.
    """
    assert got.dtype == want.dtype and got.shape == want.shape, f"{what}: {got.dtype}{got.shape}"
    if TensorType.of(want).is_float:
        eps = float(ml_dtypes.finfo(want.dtype).eps)
        exact, found = want.astype(np.float64), got.astype(np.float64)
        scale = float(np.max(np.abs(exact[np.isfinite(exact)]), initial=1.0))
        np.testing.assert_allclose(
            found, exact, rtol=max(200 * eps, coarsest), atol=max(200 * eps, coarsest) * scale, err_msg=what
        )
    else:
        np.testing.assert_array_equal(got, want, err_msg=what)


def rounded(case: Case) -> Case:
    """The case with attributes as ONNX keeps them: floating-point ones are float32."""
    floats = {f.name: getattr(case.op, f.name) for f in dataclasses.fields(case.op)}
    floats = {name: float(np.float32(v)) for name, v in floats.items() if isinstance(v, float)}
    return dataclasses.replace(case, op=dataclasses.replace(case.op, **floats))


@pytest.mark.parametrize("cls", list(all_ops()), ids=lambda cls: cls.__name__)
def test_operator(cls: type[Op]) -> None:
    """The exported samples give our numbers in ONNX Runtime."""
    for i, case in enumerate(cases(cls)):
        if case.export:
            check_export(cls.__name__, i, rounded(case))


def check_export(name: str, i: int, case: Case) -> None:
    try:
        old = OLD_ORT and name in WRONG_BEFORE_1_24
        results, ours = in_reference(case) if old else in_runtime(case)
    except (ValueError, AssertionError):
        raise
    except Exception:  # ONNX Runtime's errors have no base of their own
        if name not in NOT_IN_ORT:
            raise
        results, ours = in_reference(case)
    halves = (a.dtype for a in case.inputs if a is not None and TensorType.of(a).dtype in ("f16", "bf16"))
    coarsest = max((float(ml_dtypes.finfo(d).eps) for d in halves), default=0.0)
    for got, want in zip(results, ours, strict=True):
        assert_close(np.asarray(got), want, f"{name}-{i}", coarsest)


# -- a whole step --------------------------------------------------------------------------------------------


def mlp(seed: int = 0) -> rc.Program:
    """Two layers and a mean square, forward only."""
    g = np.random.default_rng(seed)
    x, t = Value("x", TensorType("f32", (5, 4))), Value("t", TensorType("f32", (5, 3)))
    program = rc.Program(Block("mlp", inputs=(x, t)))
    w1 = program.declare("parameters", "w1", g.normal(size=(4, 8)).astype(np.float32))
    b1 = program.declare("parameters", "b1", np.zeros(8, np.float32))
    w2 = program.declare("parameters", "w2", g.normal(size=(8, 3)).astype(np.float32))
    b = program.builder(prefix="net")
    h = b.Tanh(b.Gemm(x, w1, b1))
    y = b.Sub(b.MatMul(b.Relu(h), w2), t)
    loss = b.ReduceMean(b.Mul(y, y), keepdims=0)
    names = {loss.name: "loss", h.name: "h"}
    b.operators[:] = [o.renamed(names) for o in b.operators]
    program.append(b, outputs=["loss"])
    return program


def training(recompute: bool = True) -> rc.Program:
    """`mlp` with its backward pass, reruns and plain gradient descent."""
    program = mlp()
    rate = program.declare("state", "rate", np.array(0.1, np.float32))
    block, pairs = differentiate(program.block, "loss")
    if recompute:
        block = apply(block, plan_from_checkpoints(block, ["loss"]))
    b = Builder.on(block, role=Role.OPTIMIZE)
    for p, g in pairs:
        b.SGDUpdate(p, g, rate)
    program.block = rc.verify(block.with_operators([*block.operators, *b.operators]))
    program.gradients = [(p.name, g.name) for p, g in pairs]
    return program


def batch(step: int = 0) -> dict[str, np.ndarray]:
    g = np.random.default_rng(step)
    return {"x": g.normal(size=(5, 4)).astype(np.float32), "t": g.normal(size=(5, 3)).astype(np.float32)}


def test_a_step_trains_in_onnx_runtime() -> None:
    """Three steps, the state fed back: losses and parameters as ours."""
    program = training()
    model = rc.export_step(program, fetch=["h"])
    onnx.checker.check_model(model, full_check=True)
    s = session(model)
    names = [o.name for o in s.get_outputs()]
    updates = json.loads(metadata(model)["recompute.updates"])  # in the order of the updates
    assert updates == {"w1": "w1.next", "b1": "b1.next", "w2": "w2.next"}
    assert names[0] == "loss" and set(names) == {*program.block.outputs, "h", *updates.values()}
    executor, state = rc.Executor(), {}
    for step in range(3):
        results = dict(zip(names, s.run(None, {**batch(step), **state}), strict=True))
        state = {name: results[after] for name, after in updates.items()}
        loss, h = executor.run(program, batch(step), ["loss", "h"])
        assert_close(results["loss"], loss, f"loss of step {step}")
        assert_close(results["h"], h, f"h of step {step}")
    for name, array in state.items():
        assert_close(array, program.data[name], name)


@pytest.mark.filterwarnings("ignore:checkpoint .* saves nothing")
@pytest.mark.parametrize("name", ["mlp", "lenet", "lstm"])
def test_networks_train_in_onnx_runtime(name: str) -> None:
    """Recomputed steps of the small networks: three losses, each after an update, as ours."""
    program = rc.load(Path(__file__).parents[2] / "recompute/models" / f"{name}.onnx", batch=3)
    loss = rc.losses.cross_entropy(program.outputs[0])
    forward = [v.name for op in program.operators for v in op.writes()]
    optimizer = rc.RecomputeOptimizer(rc.Momentum(learning_rate=0.01)).set_checkpoints(forward[1:-1:3])
    optimizer.minimize(loss)
    program.data = {n: np.array(a) for n, a in program.data.items()}
    model = rc.export_step(program)
    onnx.checker.check_model(model, full_check=True)
    updates = json.loads(metadata(model)["recompute.updates"])
    s, executor, g = session(model), rc.Executor(), np.random.default_rng(0)
    feed = {
        v.name: g.normal(size=v.shape).astype(v.value.type.numpy)
        if v.value.type.is_float
        else g.integers(0, 2, v.shape).astype(v.value.type.numpy)
        for v in program.inputs
    }
    state: dict[str, np.ndarray] = {}
    for step in range(3):
        names = [loss.name, *updates.values()]
        theirs, *after = s.run(names, {**feed, **state})
        state = dict(zip(updates, after, strict=True))
        assert_close(theirs, executor.run(program, feed, [loss])[0], f"loss of step {step}")


@pytest.mark.filterwarnings("ignore:checkpoint .* saves nothing", "ignore:checkpoint .* is off the path")
@pytest.mark.parametrize("name", ["mlp", "lenet", "bert-tiny"])
def test_first_loss_and_gradients_in_onnx_runtime(name: str) -> None:
    """A recomputed Adam step, dropout included: ONNX Runtime's loss and every gradient, to 1e-5 of the largest."""
    program = rc.load(rc.models.build(name, batch=4))
    loss = rc.losses.cross_entropy(program.outputs[0])
    checkpoints = list(rc.models.info(name).checkpoints)
    _, pairs = rc.RecomputeOptimizer(rc.Adam()).set_checkpoints(checkpoints).minimize(loss)
    names = [loss.name, *(g.name for _, g in pairs)]
    specs = {s.name: s for s in rc.models.info(name).inputs}
    feed = synthetic_batch(program, 0, specs)
    theirs = session(rc.export_step(program, fetch=names)).run(names, feed)
    ours = rc.Executor().run(program, feed, names)
    assert len(pairs) == len(program.parameters)
    for n, a, b in zip(names, theirs, ours, strict=True):
        assert np.abs(a - b).max() <= 1e-5 * max(np.abs(b).max(), 1e-3), n


def test_structure() -> None:
    """Names, roles, defaults, functions and types are there."""
    program = training()
    model = rc.export_step(program)
    graph = model.graph
    assert [i.name for i in graph.input] == ["x", "t", "w1", "b1", "w2", "rate"]
    assert {"w1", "b1", "w2", "rate"} <= {t.name for t in graph.initializer}
    roles = {n.metadata_props[0].value for n in graph.node if n.metadata_props}
    assert roles == {o.role.value for o in program.operators}
    assert all(n.name == n.output[0] for n in graph.node)
    written = {o for n in graph.node for o in n.output}
    assert {v.name for o in program.operators for v in o.writes()} - {"w1", "b1", "w2"} <= written
    assert {i.name for i in graph.value_info} >= {"h", "w1_grad"}
    assert {f.name for f in model.functions} >= {"TanhGrad", "ReluGrad", "SGDUpdate"}
    assert all(f.domain == DOMAIN for f in model.functions)
    assert {(o.domain, o.version) for o in model.opset_import} == {("", 21), (DOMAIN, 1)}
    assert model.ir_version == 10


def test_a_function_for_each_signature() -> None:
    """Equal applications share a function, others get one of their own."""
    x, y = (Value(n, TensorType("f32", s)) for n, s in (("x", (2,)), ("y", (3,))))
    b = Builder()
    outs = [b.TanhGrad(x, x), b.TanhGrad(x, x), b.TanhGrad(y, y)]
    block = Block("f", inputs=(x, y), operators=tuple(b.operators), outputs=tuple(v.name for v in outs))
    model = rc.export_step(rc.Program(block))
    assert [f.name for f in model.functions] == ["TanhGrad", "TanhGrad_1"]
    assert [n.op_type for n in model.graph.node] == ["TanhGrad", "TanhGrad", "TanhGrad_1"]


def test_planned_programs_export_alike() -> None:
    """Frees and addresses change the text in the metadata and nothing else."""
    from recompute.passes import run_passes
    from recompute.passes.memory.liveness import Liveness
    from recompute.passes.memory.memory_plan import MemoryPlan

    program = training()
    plain = rc.export_step(program)
    program.block = run_passes(program.block, [Liveness(), MemoryPlan()])
    planned = rc.export_step(program)
    assert list(planned.graph.node) == list(plain.graph.node)
    assert rc.load_compiled(planned).block == program.block


def test_several_writes_of_one_state() -> None:
    """Every write has a name of its own; reads see the latest before them."""
    step, out = Value("step", TensorType("i64")), Value("out", TensorType("i64"))
    b = Builder()
    b.Increment(step)
    between = b.Identity(step)
    b.Increment(step)
    after = Operator(b.operators[1].op, (step,), (out,))
    block = Block("s", state=(step,), operators=(*b.operators, after), outputs=(between.name, "out", "step"))
    program = rc.Program(rc.verify(block), {"step": np.array(4, np.int64)})
    model = rc.export_step(program)
    s = session(model)
    results = dict(zip([o.name for o in s.get_outputs()], s.run(None, {}), strict=True))
    assert results == {between.name: 5, "out": 6, "step.next": 6}


def test_an_output_may_be_a_parameter_or_input() -> None:
    """What is not computed comes out as it went in."""
    x, w = Value("x", TensorType("f32", (2,))), Value("w", TensorType("f32", (2,)))
    b = Builder()
    y = b.Add(x, w)
    block = Block("p", inputs=(x,), parameters=(w,), operators=tuple(b.operators), outputs=("x", "w", y.name))
    model = rc.export_step(rc.Program(block, {"w": np.ones(2, np.float32)}))
    onnx.checker.check_model(model, full_check=True)
    got = session(model).run(None, {"x": np.array([1, 2], np.float32)})
    np.testing.assert_array_equal(got, [[1, 2], [1, 1], [2, 3]])


def test_plan_metadata() -> None:
    """What JSON can say, and dataclasses; anything else is refused."""
    program = training()
    program.plan = plan_from_checkpoints(program.block, ["h"])
    model = rc.export_step(program)
    assert json.loads(metadata(model)["recompute.plan"])["checkpoints"] == ["h"]
    assert rc.load_compiled(model).plan == program.plan
    program.plan = RecomputePlan((Rerun(0, 5), Rerun(1, 5)), ("h",), ("a note",), approximations=("h=store:8",))
    assert rc.load_compiled(rc.export_step(program)).plan == program.plan
    for damage in ('"reruns": 3', '"reruns": [{"operator": "a", "before": 1}]', '"reruns": [], "notes": [1]'):
        text = '{"checkpoints": [], "notes": [], ' + damage + "}"
        with pytest.raises(rc.ModelError, match="is not a plan"):
            rc.load_compiled(rc.export_step(program, plan_metadata=text))
    model = rc.export_step(program, plan_metadata={"peak": np.int64(3)})
    assert json.loads(metadata(model)["recompute.plan"]) == {"peak": 3}
    assert rc.load_compiled(model).plan == {"peak": 3}
    with pytest.raises(UsageError, match="contains a set, which JSON cannot represent"):
        rc.export_step(program, plan_metadata={"a": {1}})


def test_wrong_requests() -> None:
    """Unknown fetches, missing contents, operators without ONNX form."""
    program = training()
    with pytest.raises(UsageError, match=r"no value 'hh' \(did you mean h"):
        rc.export_step(program, fetch=["hh"])
    del program.data["w1"]
    with pytest.raises(UsageError, match=r"'w1' \(f32\[4,8\]\) has no contents"):
        rc.export_step(program)


@pytest.mark.parametrize(("kernel", "pads"), [([1, 1], None), ([1, 2], [0, 1, 0, 1])])
def test_a_pooling_that_rounds_up_to_windows_behind_the_end(kernel: list[int], pads: list[int] | None) -> None:
    """ONNX's inference counts them up to opset 21, and ONNX Runtime then refuses what follows."""
    ort = pytest.importorskip("onnxruntime")
    pool = helper.make_node("MaxPool", ["x"], ["p"], kernel_shape=kernel, strides=[2, 3], ceil_mode=1, pads=pads)
    nodes = [pool, helper.make_node("Mul", ["p", "w"], ["y"])]
    inputs, outputs = (helper.make_tensor_value_info(n, 1, s) for n, s in (("x", [1, 1, 3, 5]), ("y", None)))
    weight = onnx.numpy_helper.from_array(np.ones(1, np.float32), "w")
    graph = helper.make_graph(nodes, "g", [inputs], [outputs], [weight])
    program = rc.load(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), trainable=["w"]
    )
    rc.SGD(0.1).minimize(rc.losses.mse(program["y"]))
    feed = {v.name: np.ones(v.shape, np.float32) * (v.name == "x") for v in program.inputs}
    session = ort.InferenceSession(rc.export_step(program, fetch=["loss"]).SerializeToString())
    assert session.run(["loss"], feed) == rc.Executor().run(program, feed, ["loss"])


def test_an_operator_that_onnx_has_not_in_this_type_is_named() -> None:
    g = FunctionBuilder(Names(["x", "w"]), {n: TensorType("bf16", (1, 1, 3, 3)) for n in "xw"})
    with pytest.raises(ModelError, match="operator Conv of bf16 has no form in ONNX's opset 21"):
        g.apply(op_class("Conv")(), ["x", "w"], ["y"])


def test_function_builder_knows_types() -> None:
    """Types of what `node` made come from ONNX's inference."""
    g = FunctionBuilder(Names(["x"]), {"x": TensorType("f64", (2, 3))})
    flat = g.call("Reshape", "x", g.ints([-1]))
    assert g.type(flat) == TensorType("f64", (6,))
    assert g.type(g.cast_like(g.call("Greater", flat, g.zero("x")), "x")) == TensorType("f64", (6,))
    assert g.ints([-1]) == g.ints([-1]) and g.zero("x") == g.zero(flat)
    with pytest.raises(ModelError, match="no operator 'Reshap'"):
        g.node("Reshap", ["x"], ["y"])
    with pytest.raises(ModelError, match="Relu has no attribute 'alpha'"):
        g.node("Relu", ["x"], ["y"], alpha=1.0)
