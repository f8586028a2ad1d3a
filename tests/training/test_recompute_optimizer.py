"""RecomputeOptimizer and fleet: which operators run again, what the user is told, and that values stay the same."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest

import recompute as rc
from recompute import Block, Operator, Role, TensorType, UsageError, Value, parse
from recompute.language.op import REGISTRY, op_class
from recompute.passes import Liveness, MemoryPlan, memory_report, run_passes
from recompute.passes.recomputation.recompute import Recompute, Rerun, plan_from_checkpoints
from recompute.training import fleet

_generator = np.random.default_rng


class Net:
    """Writes a program; every operator's output has the name given."""

    def __init__(self, x: str = "f64[8,16]") -> None:
        self.program = rc.Program(Block("net", inputs=(Value("x", TensorType.parse(x)),)))
        self.random = _generator(0)

    def parameter(self, name: str, shape: tuple[int, ...], dtype: str = "float64") -> Value:
        array = (self.random.standard_normal(shape) / np.sqrt(shape[0])).astype(dtype)
        return self.program.declare("parameters", name, array)

    def op(self, kind: str, name: str, *inputs: str, **attributes: object) -> str:
        b = self.program.builder()
        b.emit(op_class(kind)(**attributes), *(self.program[i].value for i in inputs), name=name)
        self.program.append(b)
        return name

    def layer(self, i: int, x: str, width: int, activation: str) -> str:
        v = self.program[x]
        self.parameter(f"w{i}", (v.shape[-1], width), v.value.type.numpy.name)
        self.parameter(f"b{i}", (width,), v.value.type.numpy.name)
        self.op("MatMul", f"mm{i}", x, f"w{i}")
        self.op("Add", f"add{i}", f"mm{i}", f"b{i}")
        return self.op(activation, f"act{i}", f"add{i}")

    def loss(self, x: str, name: str = "loss") -> rc.Program:
        self.op("ReduceMean", name, x, keepdims=0)
        return self.program


def mlp(activation: str = "Relu", layers: int = 4, width: int = 32, x: str = "f64[8,16]") -> rc.Program:
    net = Net(x)
    last = "x"
    for i in range(layers):
        last = net.layer(i, last, width, activation)
    return net.loss(last)


def paddle_example() -> rc.Program:
    """Paddle's own example: mul(x, y) → add b1 → add b2 → mean, trained by mul_x, b1 and b2."""
    net = Net("f64[4,3]")
    net.parameter("mul_x", (3, 5))
    net.parameter("b1", (5,))
    net.parameter("b2", (5,))
    net.op("MatMul", "mul_out", "x", "mul_x")
    net.op("Add", "b1_out", "mul_out", "b1")
    net.op("Add", "b2_out", "b1_out", "b2")
    return net.loss("b2_out", "mean_out")


def rerun(program: rc.Program) -> list[str]:
    """Names of what runs again, in order."""
    return [o.outputs[0].name for o in program.operators if o.role is Role.RECOMPUTE and o.outputs[0]]


def minimized(program: rc.Program, checkpoints: list, loss: str = "loss", optimizer: object = None) -> rc.Program:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rc.RecomputeWarning)
        rc.RecomputeOptimizer(optimizer or rc.SGD(0.1)).set_checkpoints(checkpoints).minimize(program[loss])
    return program


def losses(program: rc.Program, steps: int = 5, loss: str = "loss", fetch: tuple[str, ...] = ()) -> list[bytes]:
    executor, (x,) = rc.Executor(rc.CPUPlace()), program.inputs
    g = _generator(1)
    found = []
    for _ in range(steps):
        feed = {x.name: g.standard_normal(x.shape).astype(x.value.type.numpy)}
        found += [a.tobytes() for a in executor.run(program, feed, [loss, *fetch])]
    return found


# -- which operators run again --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "checkpoints",
    [
        ["b1_out"], ["mul_out", "b2_out"], ["b2_out", "mul_out"], ["mul_out", "b1_out"], ["mul_x", "b2_out"],
        ["mean_out"],
    ],
)  # fmt: skip
def test_paddles_examples_need_no_recomputation(checkpoints: list[str]) -> None:
    program = minimized(paddle_example(), checkpoints, "mean_out")
    assert rerun(program) == []
    plain = paddle_example()
    rc.SGD(0.1).minimize(plain["mean_out"])
    assert losses(program, loss="mean_out") == losses(plain, loss="mean_out")


def test_tanh_between_checkpoints_needs_none_either() -> None:
    assert rerun(minimized(mlp("Tanh"), ["act0", "act1", "act2"])) == []


@pytest.mark.parametrize(
    ("activation", "checkpoints", "expected"),
    [
        ("Relu", ["act0"], []),
        ("Relu", ["act1"], ["mm0@1", "add0@1", "act0@1"]),
        ("Relu", ["act2"], ["mm0@1", "add0@1", "act0@1", "mm1@1", "add1@1", "act1@1"]),
        ("Relu", ["act3", "act1"], ["mm2@1", "add2@1", "act2@1", "mm0@1", "add0@1", "act0@1"]),
        ("Relu", ["add1"], ["mm0@1", "add0@1", "act0@1"]),
        ("Gelu", ["act0"], ["mm0@1", "add0@1"]),
        ("Gelu", ["act1"], ["mm0@1", "add0@1", "act0@1", "mm1@1", "add1@1"]),
        ("Gelu", ["act0", "act1"], ["mm1@1", "add1@1", "mm0@1", "add0@1"]),
        ("Gelu", ["add0"], []),
    ],
)
def test_what_runs_again(activation: str, checkpoints: list[str], expected: list[str]) -> None:
    program = minimized(mlp(activation), checkpoints)
    assert sorted(rerun(program)) == sorted(expected)
    # last segment first
    first = [n[-3] for n in rerun(program)]
    assert first == sorted(first, reverse=True) or len(checkpoints) < 2
    assert program.plan.checkpoints == tuple(sorted(checkpoints))


def test_a_checkpoint_keeps_no_other_output_of_its_operator() -> None:
    block = parse("""program p {
  input %x: f32[4]
  %p: f32[2], %q: f32[2] = Split(%x) {sizes=[2,2]}
  %d: f32[2] = Exp(%p)
  backward %g: f32[2] = Mul(%d, %q)
  output %g
}""")
    assert plan_from_checkpoints(block, ["p"]).reruns == (Rerun(0, 2),)
    assert plan_from_checkpoints(block, ["p", "q"]).reruns == ()


def test_a_checkpoint_inside_of_what_became_one_operator_is_its_result() -> None:
    """If the forward pass in which it was named is known; else it is as good as gone."""
    named = parse("program p {\n  input %x: f32[4]\n  %a: f32[4] = Neg(%x)\n  %b: f32[4] = Exp(%a)\n  output %b\n}")
    fused = parse("program p {\n  input %x: f32[4]\n  %b: f32[4] = Tanh(%x)\n  output %b\n}")
    for before, kept in ((named, ("b",)), (None, ())):
        program = rc.Program(fused, {})
        program.begin_training("b")
        Recompute(("a",), named=before).rewrite(program)
        assert program.plan is not None and program.plan.checkpoints == kept


def test_what_reads_updated_statistics_is_kept() -> None:
    net = Net()
    v = net.program.declare("buffers", "seen", np.zeros((16,)))
    b = net.program.builder()
    drawn = b.ReduceMean(net.program["x"].value, axes=(0,), keepdims=0)
    b.operators += [Operator(op_class("RunningUpdate")(), (v, drawn), (v,), Role.FORWARD)]
    net.program.append(b)
    net.op("Add", "shifted", "x", "seen")
    last = net.layer(0, net.op("Gelu", "warm", "shifted"), 16, "Gelu")
    program = minimized(net.loss(last), ["act0"])
    assert "warm@1" in rerun(program) and "shifted@1" not in rerun(program)


def test_a_rerun_comes_right_before_what_needs_it() -> None:
    program = minimized(mlp("Relu"), ["act1"])
    roles = [o.role for o in program.operators]
    at = roles.index(Role.RECOMPUTE)
    after = next(o for o in program.operators[at:] if o.role is not Role.RECOMPUTE)
    assert any(v.name.endswith("@1") for v in after.reads())


def test_order_and_repetition_of_checkpoints_do_not_matter() -> None:
    wanted = str(minimized(mlp("Relu"), ["act0", "act1", "act2"]))
    for order in itertools.permutations(["act0", "act1", "act2", "act1"]):
        assert str(minimized(mlp("Relu"), list(order))) == wanted


def test_names_globs_variables_and_one_string() -> None:
    wanted = str(minimized(mlp("Relu"), ["act1"]))
    program = mlp("Relu")
    assert str(minimized(program, [program["act1"]])) == wanted
    assert str(minimized(mlp("Relu"), "act1")) == wanted  # type: ignore[arg-type]
    assert str(minimized(mlp("Relu"), ["act*"])) == str(minimized(mlp("Relu"), [f"act{i}" for i in range(4)]))
    program = mlp("Relu")
    program.aliases["another"] = "act1"
    assert str(minimized(program, ["another"])) == wanted
    program = mlp("Relu")
    program.aliases["another"] = "act1"
    assert str(minimized(program, ["ano*r"])) == wanted
    inner = rc.SGD(0.1)
    optimizer = rc.RecomputeOptimizer(inner)
    assert optimizer._set_checkpoints(["act1"]) is optimizer


# -- the same values ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [rc.SGD, rc.Momentum, rc.Adam, rc.AdamW, rc.Lamb, rc.Lars, rc.RMSProp, rc.Adagrad])
def test_same_bits_with_any_optimizer(make: object) -> None:
    x = "f32[8,16]"
    plain = mlp(x=x)
    make(0.05).minimize(plain["loss"])  # type: ignore[operator]
    again = minimized(mlp(x=x), ["act1"], optimizer=make(0.05))  # type: ignore[operator]
    assert rerun(again)
    grads = ("w0_grad", "b1_grad", "w3_grad")
    assert losses(plain, fetch=grads) == losses(again, fetch=grads)
    for v in plain.parameters:
        assert plain.data[v.name].tobytes() == again.data[v.name].tobytes()


def test_same_bits_with_dropout() -> None:
    op_class("Relu")
    if "Dropout" not in REGISTRY:
        pytest.skip("there is no Dropout yet")
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    g = _generator(0)
    nodes, x, initializers = [], "x", []
    for i in range(3):
        initializers.append(numpy_helper.from_array(g.standard_normal((8, 8)).astype("f4") * 0.3, f"w{i}"))
        nodes += [
            helper.make_node("MatMul", [x, f"w{i}"], [f"mm{i}"]),
            helper.make_node("Relu", [f"mm{i}"], [f"act{i}"]),
            helper.make_node("Dropout", [f"act{i}", "ratio", "training"], [f"drop{i}"]),
        ]
        x = f"drop{i}"
    initializers += [
        numpy_helper.from_array(np.array(0.3, np.float32), "ratio"),
        numpy_helper.from_array(np.array(True), "training"),
    ]
    nodes.append(helper.make_node("ReduceMean", [x], ["loss"], keepdims=0))
    graph = helper.make_graph(
        nodes, "dropout", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [16, 8])],
        [helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])], initializers,
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])
    onnx.checker.check_model(model)
    plain, again = rc.load(model), rc.load(model)
    rc.Adam(0.01).minimize(plain["loss"])
    minimized(again, ["drop1"], optimizer=rc.Adam(0.01))
    assert any("drop0@1" in n for n in rerun(again))
    curve = losses(plain)
    assert curve == losses(again)
    assert len(set(curve)) == len(curve)


def test_recomputation_saves_memory() -> None:
    def peak(program: rc.Program) -> int:
        return memory_report(run_passes(program.block, [Liveness(), MemoryPlan()])).arena

    plain = mlp("Relu", layers=16, x="f32[256,32]")
    rc.SGD(0.1).minimize(plain["loss"])
    again = minimized(mlp("Relu", layers=16, x="f32[256,32]"), ["act3", "act7", "act11"])
    assert peak(again) < 0.6 * peak(plain)


def test_gradients_of_gradients_through_recomputation() -> None:
    """Training by |dloss/dw|² gives the same with and without recomputation of the first backward pass."""
    found = []
    for checkpoints in ([], ["act1"]):
        program = mlp("Tanh", layers=3, width=8, x="f64[4,6]")
        optimizer = rc.SGD(0.1)
        if checkpoints:
            pairs = rc.RecomputeOptimizer(optimizer).set_checkpoints(checkpoints).backward(program["loss"])
            assert rerun(program)
        else:
            pairs = optimizer.backward(program["loss"])
        b = program.builder(Role.LOSS, "penalty")
        squares = [b.ReduceSum(b.Mul(g.value, g.value), keepdims=0) for _, g in pairs]
        b.emit(op_class("Add")(), b.add_all(squares), program["loss"].value, name="total")
        program.append(b, outputs=["total"])
        rc.SGD(0.1).minimize(program["total"])
        losses(program, 3)
        found.append({v.name: program.data[v.name] for v in program.parameters})
    for name, expected in found[0].items():
        # the same numbers, added in another order
        np.testing.assert_allclose(found[1][name], expected, rtol=1e-12, atol=1e-14)


# -- what the user is told ------------------------------------------------------------------------------------------


def test_unknown_checkpoint_names_the_nearest() -> None:
    program = mlp("Relu")
    before = program.block
    with pytest.raises(UsageError, match=r"no value 'act11' to checkpoint \(did you mean act1"):
        minimized(program, ["act11"])
    assert program.block is before
    with pytest.raises(UsageError, match="belongs to another program"):
        minimized(program, [mlp("Relu")["act1"]])


def test_no_checkpoints() -> None:
    program = mlp("Relu")
    with pytest.raises(UsageError, match=r"call set_checkpoints\(\['name', ...\]\) before minimize"):
        rc.RecomputeOptimizer(rc.SGD(0.1)).minimize(program["loss"])
    with pytest.raises(UsageError, match="no checkpoints"):
        rc.RecomputeOptimizer(rc.SGD(0.1)).set_checkpoints([]).minimize(program["loss"])
    for wrong in (None, 3, [3]):
        with pytest.raises(UsageError, match="checkpoint"):
            rc.RecomputeOptimizer(rc.SGD(0.1)).set_checkpoints(wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="wraps must be an optimizer"):
        rc.RecomputeOptimizer(0.1)


def test_a_checkpoint_of_no_use_is_warned_about() -> None:
    program = mlp("Relu")
    with pytest.warns(rc.RecomputeWarning, match="'act0' saves nothing: no gradient needs") as found:
        rc.RecomputeOptimizer(rc.SGD(0.1)).set_checkpoints(["act0"]).minimize(program["loss"])
    assert found[0].filename == __file__
    with pytest.warns(rc.RecomputeWarning, match="'w1' is an input or parameter"):
        rc.RecomputeOptimizer(rc.SGD(0.1)).set_checkpoints(["w1"]).minimize(mlp("Relu")["loss"])


def test_a_checkpoint_off_the_path_is_warned_about() -> None:
    net = Net()
    hidden = net.layer(0, "x", 8, "Relu")
    net.op("Tanh", "aside", hidden)
    program = net.loss(hidden)
    with pytest.warns(rc.RecomputeWarning, match="'aside' is off the path to the loss 'loss'"):
        rc.RecomputeOptimizer(rc.SGD(0.1)).set_checkpoints(["aside"]).minimize(program["loss"])


def test_no_warning_where_all_is_well() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rc.RecomputeOptimizer(rc.SGD(0.1)).set_checkpoints(["act1"]).minimize(mlp("Relu")["loss"])


def test_the_inner_optimizer_does_the_rest() -> None:
    program, inner = mlp("Relu"), rc.Adam(0.25)
    optimizer = rc.RecomputeOptimizer(inner).set_checkpoints(["act1"])
    pairs = optimizer.backward(program["loss"])
    assert [p.name for p, _ in pairs] == [v.name for v in program.parameters]
    operators = optimizer.apply_gradients(pairs)
    assert operators[-1].op.name == "Increment"
    assert optimizer.get_lr() == 0.25
    optimizer.set_lr(0.5)
    assert inner.get_lr() == 0.5
    state = optimizer.state_dict()
    optimizer.load({**state, "step": np.array(3, np.int64)})
    assert program.data["step"] == 3
    with pytest.raises(UsageError, match="already a training step"):
        optimizer.minimize(program["loss"])


# -- fleet ----------------------------------------------------------------------------------------------------------


def test_fleet_recomputes() -> None:
    strategy = fleet.DistributedStrategy()
    inner = rc.SGD(0.1)
    assert fleet.distributed_optimizer(inner, strategy) is inner
    strategy.recompute = True
    strategy.recompute_configs = {"checkpoints": ["act0"]}
    strategy.recompute_configs = {"checkpoints": ["act1"], "enable_offload": False, "checkpoint_shape": []}
    optimizer = fleet.distributed_optimizer(inner, strategy)
    program = mlp("Relu")
    optimizer.minimize(program["loss"])
    assert str(program) == str(minimized(mlp("Relu"), ["act1"]))


def test_fleets_older_names() -> None:
    strategy = fleet.DistributedStrategy()
    strategy.forward_recompute = True
    strategy.recompute_checkpoints = ["act1"]
    assert strategy.recompute and strategy.recompute_configs == {"checkpoints": ["act1"]}
    assert strategy.forward_recompute and strategy.recompute_checkpoints == ["act1"]


def test_fleet_errors() -> None:
    strategy = fleet.DistributedStrategy()
    with pytest.raises(UsageError, match=r"no option 'recomputed' \(did you mean recompute"):
        strategy.recomputed = True
    with pytest.raises(UsageError, match=r"no key 'checkpoint' \(did you mean checkpoints"):
        strategy.recompute_configs = {"checkpoint": ["act1"]}
    with pytest.raises(UsageError, match=r"'enable_offload'.* must be True or False"):
        strategy.recompute_configs = {"checkpoints": ["act1"], "enable_offload": "yes"}
    with pytest.raises(UsageError, match="must be a dict"):
        strategy.recompute_configs = ["act1"]  # type: ignore[assignment]
    with pytest.raises(UsageError, match="True or False"):
        strategy.recompute = ["act1"]  # type: ignore[assignment]
    strategy.recompute = True
    with pytest.raises(UsageError, match=r"strategy\.recompute needs checkpoints"):
        fleet.distributed_optimizer(rc.SGD(0.1), strategy)
    strategy.recompute_configs["checkpoint"] = ["act1"]
    with pytest.raises(UsageError, match="no key 'checkpoint'"):
        fleet.distributed_optimizer(rc.SGD(0.1), strategy)
