"""Update operators and optimizers: against PyTorch, against their own expansion, and what they do to a program."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import recompute as rc
from recompute import Block, Role, TensorType, UsageError, Value
from recompute.language.builder import Builder
from recompute.language.op import op_class
from recompute.ops.optimizer.base import PART, Update
from recompute.ops.optimizer.norm_updates import LambUpdate, LarsUpdate
from recompute.testing import Case, all_ops, cases
from recompute.training import lr
from recompute.training.clip import ClipGradByGlobalNorm, ClipGradByNorm, ClipGradByValue
from recompute.training.optimizers import NAMES

DATA = np.load(Path(__file__).parents[1] / "data" / "optimizers.npz")
LR = 0.0625

PYTORCH = {
    "sgd": lambda: rc.SGD(LR),
    "sgd_decay": lambda: rc.SGD(LR, weight_decay=0.1),
    "momentum": lambda: rc.Momentum(LR),
    "momentum_decay": lambda: rc.Momentum(LR, weight_decay=0.1),
    "nesterov": lambda: rc.Nesterov(LR, momentum=0.8, weight_decay=0.1),
    "adagrad": lambda: rc.Adagrad(LR),
    "adagrad_decay": lambda: rc.Adagrad(LR, weight_decay=0.1, initial_accumulator_value=0.5),
    "rmsprop": lambda: rc.RMSProp(LR),
    "rmsprop_decay": lambda: rc.RMSProp(LR, weight_decay=0.1, rho=0.9),
    "rmsprop_momentum": lambda: rc.RMSProp(LR, momentum=0.9),
    "rmsprop_centered": lambda: rc.RMSProp(LR, centered=True, momentum=0.9, weight_decay=0.1),
    "adam": lambda: rc.Adam(LR),
    "adam_decay": lambda: rc.Adam(LR, weight_decay=0.1, beta1=0.8, beta2=0.95, epsilon=1e-3),
    "amsgrad": lambda: rc.Adam(LR, amsgrad=True, beta1=0.5, beta2=0.6),
    "adamw": lambda: rc.AdamW(LR),
    "adamw_decay": lambda: rc.AdamW(LR, weight_decay=0.3),
}


def linear_program(w: np.ndarray, *, names: tuple[str, ...] = ("w",)) -> rc.Program:
    """loss = Σ over parameters of Σ parameter · x: the gradient of every parameter is the feed x."""
    t = TensorType.of(w)
    program = rc.Program(Block("linear", inputs=(Value("x", t),)))
    for name in names:
        program.declare("parameters", name, w.copy())
    b = program.builder(Role.LOSS)
    products = [b.Mul(program[n].value, program["x"].value) for n in names]
    b.emit(op_class("ReduceSum")(keepdims=0), b.add_all(products), name="loss")
    program.append(b, outputs=["loss"])
    return program


def train(program: rc.Program, feeds: list[np.ndarray], name: str = "w") -> np.ndarray:
    executor, path = rc.Executor(rc.CPUPlace()), []
    for x in feeds:
        executor.run(program, {"x": x})
        path.append(program.data[name].copy())
    return np.array(path)


@pytest.mark.parametrize("key", PYTORCH)
def test_same_as_pytorch_in_float64(key: str) -> None:
    program = linear_program(DATA["w"])
    PYTORCH[key]().minimize(program["loss"])
    path = train(program, list(DATA["g"]))
    # a few dozen roundings a step, each of half a unit in the last place of numbers of size up to 4
    np.testing.assert_allclose(path, DATA[f"optimizer.{key}"], rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("key", ["adam", "adamw_decay", "nesterov", "rmsprop_momentum", "adagrad"])
def test_float32_is_near_pytorch(key: str) -> None:
    program = linear_program(DATA["w"].astype(np.float32))
    PYTORCH[key]().minimize(program["loss"])
    path = train(program, list(DATA["g"].astype(np.float32)))
    # the gradient is rounded once (2⁻²⁴ relative), each of 5 steps of at most ~1 adds some 16 roundings
    np.testing.assert_allclose(path, DATA[f"optimizer.{key}"], rtol=0, atol=5 * 16 * 2.0**-24 * 4)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_dampening_takes_the_first_gradient_whole(decay: float) -> None:
    """PyTorch's SGD: the buffer begins as the first gradient, (1 - dampening) comes with the second."""
    w, v, expected = DATA["w"].copy(), None, []
    for g in DATA["g"]:
        g = g + decay * w
        v = g if v is None else 0.9 * v + 0.7 * g
        w = w - LR * v
        expected.append(w)
    program = linear_program(DATA["w"])
    rc.Momentum(LR, dampening=0.3, weight_decay=decay).minimize(program["loss"])
    np.testing.assert_allclose(train(program, list(DATA["g"])), expected, rtol=1e-13, atol=1e-14)


def test_lamb_against_numpy() -> None:
    w, m, v = DATA["w"].copy(), np.zeros((3, 4)), np.zeros((3, 4))
    expected = []
    for t, g in enumerate(DATA["g"], 1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        r = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-6) + 0.01 * w
        w = w - LR * np.linalg.norm(w) / np.linalg.norm(r) * r
        expected.append(w)
    program = linear_program(DATA["w"])
    rc.Lamb(LR).minimize(program["loss"])
    np.testing.assert_allclose(train(program, list(DATA["g"])), expected, rtol=1e-13, atol=1e-14)


def test_lars_against_numpy() -> None:
    w, v = DATA["w"].copy(), np.zeros((3, 4))
    expected = []
    for g in DATA["g"]:
        nw, ng = np.linalg.norm(w), np.linalg.norm(g)
        v = 0.9 * v + LR * 0.02 * nw / (ng + 0.1 * nw) * (g + 0.1 * w)
        w = w - v
        expected.append(w)
    program = linear_program(DATA["w"])
    rc.Lars(LR, lars_coeff=0.02, weight_decay=0.1).minimize(program["loss"])
    np.testing.assert_allclose(train(program, list(DATA["g"])), expected, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("op", [LambUpdate(weight_decay=0.0), LarsUpdate()])
def test_trust_ratio_is_one_where_a_norm_is_zero(op: Update) -> None:
    zeros, g = np.zeros(3), np.array([1.0, -2.0, 0.5])
    lr_, step = np.array(0.5, np.float32), np.array(0, np.int64)
    ins = [zeros.copy(), g, zeros.copy()] + ([zeros.copy(), lr_, step] if op.step_at else [lr_])
    run(op, ins)
    expected = -0.5 * (g / (np.abs(g) + 1e-6) if op.step_at else g)
    np.testing.assert_allclose(ins[0], expected, rtol=1e-12)


def run(op: Update, ins: list) -> None:
    """Computes in place."""
    types = [None if a is None else TensorType.of(a) for a in ins]
    scratch = [np.empty(t.shape, t.numpy) for t in op.scratch(types, op.infer(*types))]
    with np.errstate(invalid="ignore"):  # infinity times 0, in an update that is skipped
        op.compute(ins, [ins[i] for i in op.updates if i < len(ins)], scratch)


UPDATE_CASES = [
    (f"{cls.__name__}-{i}", case)
    for cls in all_ops()
    if issubclass(cls, Update) or cls.__name__ == "Increment"
    for i, case in enumerate(cases(cls))
    if case.export  # what is stored in fewer bits has no expansion: tests/ops/test_stored_updates.py
]


@pytest.mark.parametrize("case", [c for _, c in UPDATE_CASES], ids=[n for n, _ in UPDATE_CASES])
def test_expansion_gives_the_new_values(case: Case) -> None:
    ins = [None if a is None else a.copy() for a in case.inputs]
    values = [None if a is None else Value(f"x{i}", TensorType.of(a)) for i, a in enumerate(ins)]
    b = Builder.on(Block(inputs=tuple(v for v in values if v is not None)), prefix="e")
    outs = case.op.expand(b, *values)
    assert outs is not None
    names = [v.name for v in outs if v is not None]
    block = Block(
        inputs=tuple(v for v in values if v is not None),
        operators=tuple(b.operators), constants=tuple(b.constants), outputs=tuple(names),
    )  # fmt: skip
    feed = {v.name: a for v, a in zip(values, case.inputs, strict=True) if v is not None}
    expected = rc.Executor().run(rc.Program(rc.verify(block)), feed, names)
    if isinstance(case.op, Update):
        run(case.op, ins)
    else:
        case.op.compute(ins, [ins[0]], ())
    got = [ins[case.op.updates[i]] for i, v in enumerate(outs) if v is not None]
    for g, e in zip(got, expected, strict=True):
        assert g.dtype == e.dtype
        if g.dtype.kind == "f":
            # the same formula in another order; m / (√v + ε) has no cancellation, w - step at most one
            eps = float(np.finfo(g.dtype).eps)
            np.testing.assert_allclose(g, e, rtol=64 * eps, atol=64 * eps)
        else:
            np.testing.assert_array_equal(g, e)


@pytest.mark.parametrize("name", NAMES)
def test_temporaries_are_small(name: str) -> None:
    op = getattr(rc, name)().update(0.1)
    big = TensorType("f32", (1 << 24,))
    lr_, step = TensorType("f32", ()), TensorType("i64", ())
    ins = [big] * op.unscale_at
    ins[op.rate_at] = lr_
    if op.step_at is not None:
        ins[op.step_at] = step
    assert sum(t.nbytes for t in op.scratch(ins, ins)) <= 4 * 4 * PART
    assert sum(t.nbytes for t in op.scratch([*ins, lr_], ins)) <= 9 * 4 * PART


def test_half_precision_keeps_its_state_in_float32() -> None:
    program = linear_program(DATA["w"].astype(np.float16))
    rc.AdamW(LR).minimize(program["loss"])
    assert program["w.moment1"].dtype == program["w.moment2"].dtype == "f32"
    path = train(program, list(DATA["g"].astype(np.float16)))
    np.testing.assert_allclose(path.astype(np.float64), DATA["optimizer.adamw"], rtol=0, atol=5 * 4 * 2.0**-10)


# -- what an optimizer does to a program --------------------------------------------------------------------------


def test_minimize_declares_state_and_updates() -> None:
    program = linear_program(DATA["w"], names=("w", "v"))
    optimizer = rc.Adam(LR)
    operators, params_grads = optimizer.minimize(program["loss"])
    assert [(p.name, g.name) for p, g in params_grads] == [("w", "w_grad"), ("v", "v_grad")] == program.gradients
    assert [o.op.name for o in operators] == ["AdamUpdate", "AdamUpdate", "Increment"]
    assert program.operators[-1].op.name == "Increment"
    assert program.block.outputs == ("loss",)
    state = {"step", "learning_rate", "w.moment1", "w.moment2", "v.moment1", "v.moment2"}
    assert {v.name for v in program.block.state} == state == set(optimizer.state_dict())


def test_gradients_can_be_fetched_by_name() -> None:
    program = linear_program(DATA["w"])
    rc.SGD(LR).minimize(program["loss"])
    (grad,) = rc.Executor().run(program, {"x": DATA["g"][0]}, ["w_grad"])
    np.testing.assert_array_equal(grad, DATA["g"][0])


def test_parameters_by_name_glob_and_variable() -> None:
    for wanted in (["v"], ["v*"], "v", [None]):
        program = linear_program(DATA["w"], names=("w", "v"))
        chosen = [program["v"]] if wanted == [None] else wanted
        _, pairs = rc.SGD(LR).minimize(program["loss"], parameter_list=chosen)
        assert [p.name for p, _ in pairs] == ["v"]
    program = linear_program(DATA["w"], names=("w", "v"))
    _, pairs = rc.SGD(LR, parameters=["w", "v"]).minimize(program["loss"], no_grad_set={"v"})
    assert [p.name for p, _ in pairs] == ["w"]
    program = linear_program(DATA["w"], names=("w", "v"))
    _, pairs = rc.SGD(LR).minimize(program["loss"], no_grad_set=["v*"])
    assert [p.name for p, _ in pairs] == ["w"]


def test_wrong_names_and_pairs_leave_no_updates_behind() -> None:
    program = linear_program(DATA["w"], names=("w", "v"))
    with pytest.raises(UsageError, match="no value is called 'ww'"):
        rc.SGD(LR).backward(program["loss"], no_grad_set=["ww"])
    with pytest.raises(UsageError, match="depends on no parameter"):
        rc.SGD(LR).backward(program["loss"], no_grad_set=["loss"])
    ((w, grad),) = rc.SGD(LR).backward(program["loss"], parameter_list=["w"])
    for pairs, why in (
        ([(program["x"], grad)], "'x' is not a parameter of the program"),
        ([(w, grad), (w, grad)], "'w' is given twice"),
        ([(w, program["loss"])], "its gradient 'loss' is"),
    ):
        with pytest.raises(UsageError, match=why):
            rc.SGD(LR).apply_gradients(pairs)
    assert not any(o.role is Role.OPTIMIZE for o in program.operators)
    rc.SGD(LR).apply_gradients([(w, grad)])


def test_callbacks_see_every_backward_operator() -> None:
    program = linear_program(DATA["w"])
    seen: list[str] = []
    rc.SGD(LR).backward(program["loss"], callbacks=[lambda block, context: seen.append(context["operator"].op.name)])
    assert seen == [o.op.name for o in program.operators if o.role is Role.BACKWARD] != []


def test_the_step_counter_of_the_program_is_shared() -> None:
    program = linear_program(DATA["w"])
    program.declare("state", "step", np.array(7, np.int64))
    rc.SGD(LR).minimize(program["loss"])
    train(program, list(DATA["g"]))
    assert program.data["step"] == 12
    assert sum(o.op.name == "Increment" for o in program.operators) == 1


def test_weight_decay_can_leave_parameters_out() -> None:
    program = linear_program(DATA["w"], names=("w", "v"))
    rc.SGD(LR, weight_decay=0.1, apply_decay_param_fun=lambda n: n != "v").minimize(program["loss"])
    decays = {o.outputs[0].name: o.op.weight_decay for o in program.operators if o.op.name == "SGDUpdate"}
    assert decays == {"w": 0.1, "v": 0.0}


def test_set_lr_acts_at_once() -> None:
    program = linear_program(DATA["w"])
    optimizer = rc.SGD(1.0)
    optimizer.minimize(program["loss"])
    assert optimizer.get_lr() == 1.0
    optimizer.set_lr(0.0)
    assert optimizer.get_lr() == 0.0
    np.testing.assert_array_equal(train(program, [DATA["g"][0]])[0], DATA["w"])


def test_state_round_trip() -> None:
    paths = []
    state: dict = {}
    weights = DATA["w"]
    for start in (0, 2):
        program = linear_program(weights)
        optimizer = rc.Adam(LR)
        optimizer.minimize(program["loss"])
        if start:
            optimizer.set_state_dict(state)
        paths.append(train(program, list(DATA["g"][start : start + 2] if not start else DATA["g"][start:])))
        state, weights = optimizer.state_dict(), program.data["w"]
    np.testing.assert_allclose(np.concatenate(paths), DATA["optimizer.adam"], rtol=1e-13, atol=1e-14)
    with pytest.raises(UsageError, match="not the state of this Adam: it lacks 'step'"):
        optimizer.set_state_dict({})
    with pytest.raises(UsageError, match=r"has 'w.momentum' \(did you mean w.moment"):
        optimizer.load({**state, "w.momentum": 0})
    with pytest.raises(UsageError, match=r"'w.moment1' has shape \[3, 4\], not \[\]"):
        optimizer.load({**state, "w.moment1": 0})


def test_updates_run_as_soon_as_their_gradient_is_final() -> None:
    program = rc.load(rc.models.build("mlp4"), batch=4)
    rc.SGD(LR).minimize(program["loss"])
    operators = program.operators
    last_backward = max(i for i, o in enumerate(operators) if o.role is Role.BACKWARD)
    first_update = min(i for i, o in enumerate(operators) if o.op.name == "SGDUpdate")
    assert first_update < last_backward - 4


@pytest.mark.parametrize(
    ("clip", "expected"),
    [
        (ClipGradByValue(0.5), lambda gs: [np.clip(g, -0.5, 0.5) for g in gs]),
        (ClipGradByValue(0.5, -0.1), lambda gs: [np.clip(g, -0.1, 0.5) for g in gs]),
        (ClipGradByNorm(1.0), lambda gs: [g / np.linalg.norm(g) for g in gs]),
        (ClipGradByNorm(100.0), lambda gs: gs),
        (ClipGradByGlobalNorm(1.0), lambda gs: [g / np.sqrt(sum((h * h).sum() for h in gs)) for g in gs]),
        (ClipGradByGlobalNorm(100.0), lambda gs: gs),
    ],
)
def test_clipping(clip: object, expected: object) -> None:
    program = linear_program(DATA["w"], names=("w", "v"))
    rc.SGD(1.0, grad_clip=clip).minimize(program["loss"])
    g = DATA["g"][0]
    train(program, [g])
    for name, e in zip(("w", "v"), expected([g, g]), strict=True):  # type: ignore[operator]
        np.testing.assert_allclose(DATA["w"] - program.data[name], e, rtol=0, atol=1e-15)


def test_schedule_in_the_program() -> None:
    program = linear_program(DATA["w"])
    optimizer = rc.SGD(lr.PiecewiseDecay([1, 3], [1.0, 0.5, 0.25]))
    optimizer.minimize(program["loss"])
    executor, seen = rc.Executor(), []
    for g in DATA["g"]:
        announced = optimizer.get_lr()
        seen.append(float(executor.run(program, {"x": g}, ["learning_rate"])[0]))
        assert seen[-1] == announced
    assert seen == [1.0, 0.5, 0.5, 0.25, 0.25]
    with pytest.raises(UsageError, match="follows the schedule PiecewiseDecay"):
        optimizer.set_lr(1.0)


# -- errors ---------------------------------------------------------------------------------------------------------


def test_errors() -> None:
    program = linear_program(DATA["w"])
    with pytest.raises(UsageError, match=r"the loss must be one floating-point number, but 'w' is f64\[3,4\]"):
        rc.SGD(LR).minimize(program["w"])
    with pytest.raises(UsageError, match="loss must be a Variable"):
        rc.SGD(LR).minimize("loss")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no parameter is called 'weight'"):
        rc.SGD(LR, parameters=["weight"]).minimize(program["loss"])
    with pytest.raises(UsageError, match="belongs to another program"):
        rc.SGD(LR).minimize(program["loss"], parameter_list=[linear_program(DATA["w"])["w"]])
    with pytest.raises(UsageError, match="depends on no parameter"):
        rc.SGD(LR).minimize(program["loss"], no_grad_set=["w"])
    with pytest.raises(UsageError, match="no state yet: call minimize"):
        rc.SGD(LR).state_dict()
    with pytest.raises(UsageError, match="at least one"):
        rc.SGD(LR).apply_gradients([])
    for make in (lambda: rc.SGD(-1.0), lambda: rc.SGD("0.1"), lambda: rc.Adam(beta1=1.0), lambda: rc.SGD(True),
                 lambda: rc.Momentum(use_nesterov=True, dampening=0.1), lambda: rc.SGD(grad_clip=1.0)):  # fmt: skip
        with pytest.raises(UsageError):
            make()
    rc.SGD(LR).minimize(program["loss"])
    with pytest.raises(UsageError, match="is already a training step"):
        rc.SGD(LR).minimize(program["loss"])
