"""A step happens as a whole or not at all: what fails changes no parameter, statistic or counter."""

from __future__ import annotations

import signal
import threading

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import recompute as rc
from recompute.errors import JobError, UsageError
from recompute.language.ir import Block
from recompute.language.op import Op
from recompute.passes import CommitUpdates
from recompute.passes.cleanup.commit_updates import checking_operators
from recompute.runtime.cpu.session import Session
from recompute.testing import all_ops, case_block, cases
from recompute.training.state import set_state_dict, state_dict

CLASSES = 7


def network() -> onnx.ModelProto:
    """Convolution, batch norm, dropout, an embedding fed by number, two layers; scores of CLASSES classes."""
    g = np.random.default_rng(3)
    weights = {
        "conv.w": g.standard_normal((8, 3, 3, 3)) * 0.2,
        "bn.scale": np.ones(8),
        "bn.bias": np.zeros(8),
        "bn.mean": np.zeros(8),
        "bn.var": np.ones(8),
        "table": g.standard_normal((20, 8)),
        "fc.w": g.standard_normal((8, CLASSES)) * 0.3,
    }
    bn = ["conv", "bn.scale", "bn.bias", "bn.mean", "bn.var"]
    nodes = [
        helper.make_node("Conv", ["x", "conv.w"], ["conv"], pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", bn, ["norm", "m", "v"], training_mode=1),
        helper.make_node("Relu", ["norm"], ["relu"]),
        helper.make_node("GlobalAveragePool", ["relu"], ["pool"]),
        helper.make_node("Flatten", ["pool"], ["flat"]),
        helper.make_node("Gather", ["table", "word"], ["row"]),
        helper.make_node("Add", ["flat", "row"], ["sum"]),
        helper.make_node("Dropout", ["sum", "ratio", "training"], ["drop"], seed=5),
        helper.make_node("MatMul", ["drop", "fc.w"], ["scores"]),
    ]
    tensors = [numpy_helper.from_array(a.astype(np.float32), n) for n, a in weights.items()]
    tensors += [numpy_helper.from_array(np.float32(0.3), "ratio"), numpy_helper.from_array(np.bool_(True), "training")]
    inputs = [
        helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [16, 3, 12, 12]),
        helper.make_tensor_value_info("word", onnx.TensorProto.INT64, [16]),
    ]
    outputs = [helper.make_tensor_value_info("scores", onnx.TensorProto.FLOAT, [16, CLASSES])]
    graph = helper.make_graph(nodes, "net", inputs, outputs, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def step(checkpoints: list[str]) -> tuple[rc.Program, rc.Variable]:
    program = rc.load(network())
    loss = rc.losses.cross_entropy(program["scores"])
    optimizer: rc.RecomputeOptimizer = rc.RecomputeOptimizer(rc.Adam(0.01))
    (optimizer.set_checkpoints(checkpoints) if checkpoints else rc.Adam(0.01)).minimize(loss)
    return program, loss


def feed() -> dict[str, np.ndarray]:
    g = np.random.default_rng(0)
    return {
        "x": g.standard_normal((16, 3, 12, 12), dtype=np.float32),
        "word": g.integers(0, 20, 16),
        "label": g.integers(0, CLASSES, 16),
    }


def bad(name: str, value: int, good: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    array = good[name].copy()
    array[-1] = value
    return {**good, name: array}


@pytest.mark.parametrize("checkpoints", [[], ["relu"]], ids=["plain", "recomputed"])
@pytest.mark.parametrize(
    ("place", "providers"),
    [(None, None), (None, ("numpy",)), (rc.EmulatedCUDAPlace(), None)],
    ids=["native", "numpy", "emulated"],
)
def test_failing_steps_in_between_change_no_bit(
    place: rc.Place | None, providers: tuple | None, checkpoints: list[str]
) -> None:
    good = feed()
    failing = [bad("label", CLASSES, good), bad("label", -1, good), bad("word", 20, good), bad("word", -21, good)]
    found = []
    for failures in (0, 8 if place else 100):
        program, loss = step(checkpoints)
        executor = rc.Executor(place, providers=providers)
        losses = []
        for k in range(3):
            losses.append(executor.run(program, good, [loss])[0].tobytes())
            for i in range(failures if k == 1 else 0):
                before = {n: a.tobytes() for n, a in program.data.items()}
                with pytest.raises(JobError):
                    executor.run(program, failing[i % len(failing)], [loss])
                if i < len(failing):
                    assert {n: a.tobytes() for n, a in program.data.items()} == before
        found.append((losses, {n: a.tobytes() for n, a in program.data.items()}))
    assert found[0] == found[1]


def test_a_step_that_fails_while_it_updates_must_be_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    program, loss = step([])
    executor = rc.Executor(providers=("numpy",))
    executor.run(program, feed(), [loss])
    whole = state_dict(program)
    (update,) = {type(op.op) for op in program.block.operators if op.op.name == "AdamUpdate"}
    with monkeypatch.context() as m:
        m.setattr(update, "compute", lambda *_: 1 / 0)
        with pytest.raises(JobError, match="ZeroDivisionError"):
            executor.run(program, feed(), [loss])
    with pytest.raises(JobError, match=r"partly updated.*ZeroDivisionError.*rc\.load_state"):
        executor.run(program, feed(), [loss])
    with pytest.raises(JobError, match="partly updated"):
        rc.Executor().run(program, feed(), [loss])
    set_state_dict(program, {"table": whole["table"]}, strict=False)
    with pytest.raises(JobError, match="partly updated"):
        executor.run(program, feed(), [loss])
    set_state_dict(program, whole)
    executor.run(program, feed(), [loss])


def test_an_interrupt_waits_for_the_end_of_the_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    program, loss = step([])
    reference, same = step([])
    executor = rc.Executor(providers=("numpy",))
    for p, v in ((program, loss), (reference, same)):
        executor.run(p, feed(), [v])
    executor.run(reference, feed(), [same])
    update = next(type(op.op) for op in program.block.operators if op.op.name == "AdamUpdate")
    compute, calls = update.compute, []

    def interrupted(self: Op, *operands: object) -> None:
        if not calls:
            signal.raise_signal(signal.SIGINT)
        calls.append(1)
        compute(self, *operands)  # type: ignore[arg-type]

    monkeypatch.setattr(update, "compute", interrupted)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        executor.run(program, feed(), [loss])
    assert signal.getsignal(signal.SIGINT) is before
    monkeypatch.undo()
    assert not program.broken
    assert {n: a.tobytes() for n, a in program.data.items()} == {n: a.tobytes() for n, a in reference.data.items()}


def test_an_interrupt_before_the_updates_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    program, loss = step([])
    executor = rc.Executor(providers=("numpy",))
    executor.run(program, feed(), [loss])
    before = {n: a.tobytes() for n, a in program.data.items()}
    relu = next(type(op.op) for op in program.block.operators if op.op.name == "MatMul")
    monkeypatch.setattr(relu, "compute", lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        executor.run(program, feed(), [loss])
    assert {n: a.tobytes() for n, a in program.data.items()} == before and not program.broken


def test_updates_stand_behind_what_may_fail() -> None:
    program, loss = step([])
    session: Session = rc.Executor().session(program, [loss.name])
    operators = session.block.operators
    updates = [i for i, op in enumerate(operators) if op.op.updates]
    assert any(op.op.name == "RunningUpdate" for op in operators)
    assert max(checking_operators(session.block)) < min(updates)


def test_a_program_whose_checks_read_updated_state_stays_as_it_is() -> None:
    block = rc.parse(
        """program p {
  input %i: i64[2]
  state %step: i64[]
  buffer %x: f32[3]
  %step: i64[] = Increment(%step)
  %j: i64[2] = Add(%i, %step)
  %y: f32[2] = Gather(%x, %j)
  output %y
}
"""
    )
    assert CommitUpdates().run(block) is block


EXTREMES = {"i": (10**6, -(10**6)), "u": (200,), "f": (np.nan, np.inf)}
#: the step counter is state, and a pool's own positions are no input of the step
NOT_FED = {
    "Bernoulli",
    "Dropout",
    "RandomNormal",
    "RandomUniform",
    "GlobalMaxPoolGrad",
    "ChannelsLastGlobalMaxPoolGrad",
}


@pytest.mark.parametrize("cls", [c for c in all_ops() if c.__name__ not in NOT_FED], ids=lambda c: c.__name__)
def test_what_an_operator_refuses_is_declared(cls: type[Op]) -> None:
    for case in cases(cls):
        block, _ = case_block(case)
        asked = {i for i, _ in block.operators[0].checks()}
        for i, a in enumerate(case.inputs):
            if a is None or not a.size or i in asked:
                continue
            for extreme in EXTREMES.get(a.dtype.kind, ()):
                if a.dtype.kind in "iu" and not np.iinfo(a.dtype).min <= extreme <= np.iinfo(a.dtype).max:
                    continue
                _compute(block, case.inputs, i, extreme)


def _compute(block: Block, inputs: tuple, at: int, extreme: float) -> None:
    """The operator's numerics with one element changed: they must not raise."""
    op = block.operators[0]
    ins = [None if a is None else a.copy() for a in inputs]
    changed = ins[at]
    assert changed is not None
    changed.reshape(-1)[-1] = extreme
    types = [None if v is None else v.type for v in op.outputs]
    outs = [None if t is None else np.zeros(t.shape, t.numpy) for t in types]
    if op.op.updates:
        outs = [ins[i] for i in op.op.updates[: len(outs)]]
    scratch = [np.zeros(t.shape, t.numpy) for t in op.workspace()]
    with np.errstate(all="ignore"):
        op.op.compute(ins, outs, scratch)  # type: ignore[arg-type]


def test_two_threads_do_not_run_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    program, loss = step([])
    executor = rc.Executor(providers=("numpy",))
    executor.run(program, feed(), [loss])
    inside, go = threading.Event(), threading.Event()
    product = next(type(op.op) for op in program.block.operators if op.op.name == "MatMul")
    compute = product.compute

    def slow(self: Op, *operands: object) -> None:
        inside.set()
        assert go.wait(20)
        compute(self, *operands)  # type: ignore[arg-type]

    monkeypatch.setattr(product, "compute", slow)
    thread = threading.Thread(target=executor.run, args=(program, feed(), [loss]))
    thread.start()
    assert inside.wait(20)
    for other in (executor, rc.Executor(providers=("numpy",))):
        with pytest.raises(UsageError, match="running in another thread"):
            other.run(program, feed(), [loss])
    go.set()
    thread.join()
    executor.run(program, feed(), [loss])
