"""Differentiation, reruns and early updates on small programs: which operators there are, and in which order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from recompute import parse, show, verify
from recompute.errors import UsageError
from recompute.language.ir import Block, Role
from recompute.language.op import op_class
from recompute.passes import Autodiff, pipeline, run_passes
from recompute.passes.gradient.autodiff import differentiate
from recompute.passes.recomputation.recompute import RecomputePlan, Rerun, apply, plan_from_checkpoints
from recompute.testing import evaluate


def program(body: str) -> str:
    return f"program p {{\n{body}\n}}"


# -- early updates ----------------------------------------------------------------------------------------------------


def moved(body: str) -> list[str]:
    """What each operator writes, in the order of `eager-updates`."""
    after = run_passes(parse(program(body)), pipeline("eager-updates"))
    return [next(op.writes()).name + ("'" if op.op.updates else "") for op in after.operators]


EARLY = """  input %x: f32[4,4]
  param %w1: f32[4,4]
  param %w2: f32[4,4]
  state %step: i64[]
  const %lr: f32[] = [0.5]
  %a: f32[4,4] = MatMul(%x, %w1)
  %b: f32[4,4] = MatMul(%a, %w2)
  backward %w2_grad: f32[4,4] = MatMul(%a, %b) {transA=1}
  backward %a_grad: f32[4,4] = MatMul(%b, %w2) {transB=1}
  backward %w1_grad: f32[4,4] = MatMul(%x, %a_grad) {transA=1}
"""


def test_eager_updates_run_right_behind_their_gradients() -> None:
    body = (
        EARLY
        + """  optimize %w1: f32[4,4] = SGDUpdate(%w1, %w1_grad, %lr)
  optimize %w2: f32[4,4] = SGDUpdate(%w2, %w2_grad, %lr)
  optimize %step: i64[] = Increment(%step)
  output %b"""
    )
    assert moved(body) == ["step'", "a", "b", "w2_grad", "a_grad", "w2'", "w1_grad", "w1'"]


def test_eager_updates_wait_for_what_other_updates_read() -> None:
    """%m reads %w2 with the last gradient: the update of %w2, ready long before, comes behind it."""
    body = (
        EARLY
        + """  optimize %m: f32[4,4] = Add(%w2, %w1_grad)
  optimize %w1: f32[4,4] = SGDUpdate(%w1, %m, %lr)
  optimize %w2: f32[4,4] = SGDUpdate(%w2, %w2_grad, %lr)
  output %b"""
    )
    assert moved(body) == ["a", "b", "w2_grad", "a_grad", "w1_grad", "m", "w1'", "w2'"]


def test_eager_updates_wait_for_what_other_updates_write() -> None:
    """What the optimizer makes is ready where its inputs are; two updates of one parameter stay in their order."""
    body = (
        EARLY
        + """  optimize %n: f32[4,4] = Neg(%w1_grad)
  optimize %w2: f32[4,4] = SGDUpdate(%w2, %n, %lr)
  optimize %w2: f32[4,4] = SGDUpdate(%w2, %w2_grad, %lr)
  optimize %q: f32[4,4] = Neg(%w2_grad)
  output %b, %q"""
    )
    assert moved(body) == ["a", "b", "w2_grad", "q", "a_grad", "w1_grad", "n", "w2'", "w2'"]


# -- reruns -----------------------------------------------------------------------------------------------------------


def test_reruns_move_updates_behind_them() -> None:
    """%a reads %w1; run again behind its update, it would see it changed."""
    body = (
        EARLY
        + """  optimize %w1: f32[4,4] = SGDUpdate(%w1, %w1_grad, %lr)
  backward %late: f32[4,4] = Mul(%a, %a_grad)
  output %late"""
    )
    block = parse(program(body))
    at = [next(op.writes()).name for op in block.operators]
    after = verify(apply(block, RecomputePlan((Rerun(0, at.index("late")),))))
    names = [next(op.writes()).name for op in after.operators]
    assert names.index("w1_grad") < names.index("a@1") < names.index("w1")
    lines = body.splitlines()
    block = parse(program("\n".join([*lines[:-3], lines[-2], lines[-3], lines[-1]])))
    plain = apply(block, RecomputePlan((Rerun(0, at.index("a_grad")),)))  # no update is in its way: none moves
    assert [next(op.writes()).name for op in plain.operators][-2:] == ["late", "w1"]
    again = apply(block, RecomputePlan((Rerun(1, at.index("a_grad")),)))  # reads %a, which no update changes
    assert [next(op.writes()).name for op in again.operators][-2:] == ["late", "w1"]


@pytest.mark.parametrize(("operator", "before"), [(-1, 3), (3, 3), (4, 3), (0, 5)])
def test_reruns_out_of_order_are_refused(operator: int, before: int) -> None:
    block = parse(program(EARLY + "  output %w1_grad"))
    with pytest.raises(UsageError, match="out of order"):
        apply(block, RecomputePlan((Rerun(operator, before),)))


def test_reruns_are_of_forward_operators() -> None:
    block = parse(program(EARLY + "  output %w1_grad"))
    with pytest.raises(UsageError, match="is not a forward operator: it cannot be recomputed"):
        apply(block, RecomputePlan((Rerun(2, 4),)))


NORMED = """  input %x: f32[4,8]
  param %w: f32[8,8]
  param %s: f32[8]
  param %o: f32[8]
  %a: f32[4,8] = MatMul(%x, %w)
  %y: f32[4,8], %mean: f32[4,1], %inverse: f32[4,1] = LayerNormalization(%a, %s, %o)
  %r: f32[4,8] = Relu(%y)
  %q: f32[4,8] = Tanh(%r)
  %z: f32[4,8] = MatMul(%q, %w)
  loss %loss: f32[] = ReduceMean(%z) {keepdims=0}
  output %loss
"""


def test_reruns_keep_small_outputs() -> None:
    """No normalisation runs again for its statistics alone: its gradient finds them where they were."""
    grads = run_passes(parse(program(NORMED.replace("Relu(%y)", "Tanh(%y)"))), pipeline("autodiff"))
    (norm,) = [op for op in grads.operators if op.op.name == "NormGrad"]
    assert {"a", "mean", "inverse"} <= {v.name for v in norm.reads()}
    assert plan_from_checkpoints(grads, ["a", "r", "q"]).reruns == ()
    assert [r.operator for r in plan_from_checkpoints(grads, ["r", "q"]).reruns] == [0]


SKIP = """  input %x: f32[4,4]
  param %w: f32[4,4]
  param %u: f32[4,4]
  %a: f32[4,4] = MatMul(%x, %w)
  %b: f32[4,4] = Gelu(%a)
  %c: f32[4,4] = MatMul(%b, %u)
  %d: f32[4,4] = Gelu(%c)
  %e: f32[4,4] = Add(%d, %b)
  %f: f32[4,4] = Gelu(%e)
  %g: f32[4,4] = MatMul(%f, %w)
  %idle: f32[4,4] = Tanh(%b)
  loss %loss: f32[] = ReduceMean(%g) {keepdims=0}
  output %loss
"""
INPUT = "checkpoint 'x' is an input or parameter: it is always kept and saves nothing"
IDLE = "checkpoint 'idle' is off the path to the loss 'loss': it saves nothing"
NONE = "checkpoint 'b' saves nothing: no gradient needs a value of the segment before it"


@pytest.mark.parametrize(
    ("checkpoints", "expected", "order", "notes"),
    [
        ("", "", "", ()),
        ("d", "c<c_grad a<a_grad", "d", ()),
        ("f d", "e<e_grad c<c_grad a<a_grad", "d f", ()),
        ("a b", "", "a b", ("checkpoint 'a' saves nothing: no gradient needs a value of the segment before it", NONE)),
        ("b", "a<a_grad", "b", ()),
        ("d x", "c<c_grad a<a_grad", "x d", (INPUT,)),
        ("idle d", "e<g.grad.matmul_1 f<g.grad.matmul_1 c<c_grad a<a_grad", "d idle", (IDLE,)),
        ("loss", " ".join(f"{n}<g.grad.matmul_1" for n in "abcdef"), "loss", ()),
    ],
)
def test_reruns_of_a_network_with_a_skip(checkpoints: str, expected: str, order: str, notes: tuple[str, ...]) -> None:
    """%b crosses the border at %d: it is kept.  Each rerun comes right before the first reader, last segment first."""
    grads = run_passes(parse(program(SKIP)), pipeline("autodiff"))
    plan = plan_from_checkpoints(grads, checkpoints.split(), "loss")
    names = [next(op.writes()).name for op in grads.operators]
    assert " ".join(f"{names[r.operator]}<{names[r.before]}" for r in plan.reruns) == expected
    assert plan.checkpoints == tuple(order.split()) and plan.notes == notes
    with pytest.raises(UsageError, match="no value 'dd' to checkpoint"):
        plan_from_checkpoints(grads, ["dd"])


def test_reruns_have_names_of_their_own() -> None:
    """Each time a new one; later readers see the latest; a name that is taken is left alone."""
    block = parse(
        program("""  input %x: f32[4]
  %a: f32[4] = Tanh(%x)
  %a@2: f32[4] = Exp(%x)
  backward %b: f32[4] = Neg(%a)
  backward %c: f32[4] = Add(%a, %b)
  backward %d: f32[4] = Mul(%a, %a@2)
  output %b, %c, %d""")
    )
    after = verify(apply(block, RecomputePlan((Rerun(0, 2), Rerun(0, 4), Rerun(1, 4)))))
    lines = [line.strip().split(": ")[0] + line[line.index("=") :] for line in show(after).splitlines() if "=" in line]
    assert lines == [
        "%a= Tanh(%x)", "%a@2= Exp(%x)", "recompute %a@1= Tanh(%x)", "backward %b= Neg(%a@1)",
        "backward %c= Add(%a@1, %b)", "recompute %a@3= Tanh(%x)", "recompute %a@2@1= Exp(%x)",
        "backward %d= Mul(%a@3, %a@2@1)",
    ]  # fmt: skip


def test_reruns_take_optional_outputs_along() -> None:
    """Statistics that only the rerun's readers want leave the first run; what nobody reads was asked for, and stays."""
    text = program(NORMED.replace("Relu(%y)", "Tanh(%y)"))
    grads = run_passes(parse(text), pipeline("autodiff"))
    at = [op.op.name for op in grads.operators].index("NormGrad")
    first, again = [op for op in apply(grads, RecomputePlan((Rerun(0, at), Rerun(1, at)))).operators
                    if op.op.name == "LayerNormalization"]  # fmt: skip
    assert [v.name for v in first.writes()] == ["y"] and again.role is Role.RECOMPUTE
    assert [v.name for v in again.writes()] == ["y@1", "mean@1", "inverse@1"]
    asked = parse(text)
    (kept,) = [op for op in apply(asked, RecomputePlan()).operators if op.op.name == "LayerNormalization"]
    assert [v.name for v in kept.writes()] == ["y", "mean", "inverse"]


def test_reruns_of_views_may_be_backward() -> None:
    block = parse(
        program("""  input %x: f32[4]
  backward %r: f32[2,2] = Reshape(%x) {shape=[2,2]}
  backward %s: f32[2,2] = Neg(%r)
  optimize %t: f32[2,2] = Exp(%r)
  output %s, %t""")
    )
    after = apply(block, RecomputePlan((Rerun(0, 2),)))
    assert [next(op.writes()).name for op in after.operators] == ["r", "s", "r@1", "t"]
    with pytest.raises(UsageError, match=r"Neg .backward. changes state or is not a forward operator"):
        apply(block, RecomputePlan((Rerun(1, 2),)))
    updating = parse(
        program("""  input %x: f32[4]
  buffer %seen: f32[4]
  %seen: f32[4] = RunningUpdate(%seen, %x)
  backward %s: f32[4] = Neg(%seen)
  output %s""")
    )
    with pytest.raises(UsageError, match=r"RunningUpdate .forward. changes state"):
        apply(updating, RecomputePlan((Rerun(0, 1),)))


# -- differentiation --------------------------------------------------------------------------------------------------


def differentiated(**options: Any) -> Block:
    from recompute.passes import Autodiff

    return run_passes(parse(program(NORMED)), [Autodiff(**options)])


def test_autodiff_stops_where_it_is_told_to() -> None:
    assert {"w_grad", "s_grad", "o_grad", "loss"} == set(differentiated().outputs)
    assert {"w_grad", "s_grad", "loss"} == set(differentiated(no_grad=("o",)).outputs)
    after = differentiated(no_grad=("q",))
    assert {"w_grad", "loss"} == set(after.outputs)
    assert not any(op.op.name == "NormGrad" for op in after.operators)
    assert {"x_grad", "s_grad", "loss"} == set(differentiated(parameters=("x", "s")).outputs)
    assert {"loss"} == set(differentiated(no_grad=("loss",)).outputs)
    assert differentiated(no_grad=("*",)).operators == parse(program(NORMED)).operators


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"loss": "lost"}, "there is no value 'lost' to differentiate"),
        ({"loss": "z"}, "must be one floating-point number, but 'z' is f32"),
        ({"parameters": ("v*",)}, "no parameter is called 'v*'"),
        ({"parameters": ("a",)}, "no parameter is called 'a'"),
        ({"no_grad": ("k",)}, "no value is called 'k'"),
    ],
)
def test_autodiff_refuses(options: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError) as e:
        differentiated(**options)
    assert why in str(e.value)


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_autodiff_begins_with_the_scale(kind: str) -> None:
    body = f"""  param %w: {kind}[2]
  buffer %scale: f32[]
  loss %loss: {kind}[] = ReduceSum(%w) {{keepdims=0}}
  output %loss"""
    after, ((_, grad),) = differentiate(parse(program(body)), "loss", scale="scale")
    given = {"w": np.ones(2, np.dtype(kind.replace("f", "float"))), "scale": np.array(4, np.float32)}
    assert evaluate(verify(after), given, [grad.name])[0].tolist() == [4, 4]


def test_autodiff_names_a_shared_gradient_after_what_was_asked_for() -> None:
    """%w, %a and %b have one gradient: it is the parameter's; NAME_grad that is taken gets a number."""
    body = """  input %x: f32[4]
  param %w: f32[4]
  %w_grad: f32[4] = Tanh(%x)
  %a: f32[4] = Add(%x, %w)
  %b: f32[4] = Add(%a, %w_grad)
  loss %loss: f32[] = ReduceSum(%b) {keepdims=0}
  output %loss"""
    after = run_passes(parse(program(body)), pipeline("autodiff"))
    assert after.outputs == ("loss", "w_grad_1")
    made = [v.name for op in after.operators if op.role is Role.BACKWARD for v in op.writes()]
    assert "w_grad_1" in made and not {"a_grad", "b_grad"} & set(made)


def test_autodiff_with_updated_state_and_absent_operands() -> None:
    """Absent inputs and outputs stay absent beside state that is renamed for a while, and nothing unread is added."""
    body = """  input %x: f32[4,8]
  input %t: f32[4]
  param %s: f32[8]
  param %o: f32[8]
  buffer %seen: f32[4]
  const %low: f32[] = [-1.0]
  %y: f32[4,8], _, %i: f32[4,1] = LayerNormalization(%x, %s, %o)
  %c: f32[4,8] = Clip(%y, %low, _)
  %d: f32[4,8] = Clip(%c, _, %low)
  %seen: f32[4] = RunningUpdate(%seen, %t)
  %m: f32[4] = ReduceSum(%d) {axes=[1], keepdims=0}
  %q: f32[4] = Mul(%m, %seen)
  loss %loss: f32[] = ReduceSum(%q) {keepdims=0}
  output %loss"""
    block = parse(program(body))
    after = verify(run_passes(block, pipeline("autodiff")))
    forward = [op for op in after.operators if op.role in (Role.FORWARD, Role.LOSS)]
    assert [op.inputs for op in forward] == [op.inputs for op in block.operators]
    assert {"y", "i", "c", "d", "seen", "m", "q", "loss"} <= {v.name for op in forward for v in op.writes()}
    read = {v.name for op in after.operators for v in op.reads()}
    assert {c.value.name for c in after.constants} <= read
    assert set(after.outputs) == {"loss", "s_grad", "o_grad"}
    given = {n: np.random.default_rng(i).uniform(0.5, 1.5, v.shape).astype(np.float32)
             for i, (n, v) in enumerate(block.values().items()) if n in ("x", "t", "s", "o", "seen")}  # fmt: skip
    asked = run_passes(parse(program(body.replace(", _, %i", ", %mean: f32[4,1], %i"))), pipeline("autodiff"))
    for a, b in zip(evaluate(after, given, after.outputs), evaluate(asked, given, after.outputs), strict=True):
        assert a.tobytes() == b.tobytes()


def test_autodiff_makes_what_a_gradient_reads() -> None:
    """The statistics alone are read: neither the result, which no gradient needs, nor a second run of it."""
    block = parse(
        program("""  input %x: f32[4,8]
  param %s: f32[8]
  param %o: f32[8]
  %y: f32[4,8] = LayerNormalization(%x, %s, %o)
  loss %loss: f32[] = ReduceMean(%y) {keepdims=0}
  output %loss""")
    )
    after = verify(run_passes(block, pipeline("autodiff")))
    (norm,) = [op for op in after.operators if op.op.name == "LayerNormalization"]
    (grad,) = [op for op in after.operators if op.op.name == "NormGrad"]
    made, read = [v.name for v in norm.writes()], {v.name for v in grad.reads()}
    assert len(made) == 3 and set(made) - read == {"y"}


def test_autodiff_leaves_nothing_behind_of_what_it_drops() -> None:
    """No gradient passes Sign: the normalisation's is dropped, with the statistics and constants made for it."""
    block = parse(
        program("""  input %x: f32[4,8]
  input %s: f32[8]
  input %o: f32[8]
  param %w: f32[8,8]
  param %b: f32[8]
  %m: f32[4,8] = MatMul(%x, %w)
  %g: f32[4,8] = Sign(%m)
  %y: f32[4,8] = LayerNormalization(%g, %s, %o)
  %c: f32[4,8] = Add(%y, %b)
  loss %loss: f32[] = ReduceMean(%c) {keepdims=0}
  output %loss""")
    )
    after = run_passes(block, pipeline("autodiff"))
    (norm,) = [op for op in after.operators if op.op.name == "LayerNormalization"]
    assert [v.name for v in norm.writes()] == ["y"]
    assert not any(op.op.name == "NormGrad" for op in after.operators)
    assert "b_grad" in after.outputs
    gemm = parse(
        program("""  input %x: f32[4,8]
  param %w: f32[8,3]
  param %b: f32[3]
  %y: f32[4,3] = Gemm(%x, %w, %b) {alpha=1.5, beta=0.25}
  loss %loss: f32[] = ReduceSum(%y) {keepdims=0}
  output %loss""")
    )
    after = run_passes(gemm, [Autodiff(parameters=("w",))])
    read = {v.name for op in after.operators for v in op.reads()}
    assert after.constants and {c.value.name for c in after.constants} <= read


def test_eager_updates_that_read_nothing_come_first() -> None:
    body = (
        EARLY
        + """  optimize %z: f32[4,4] = Fill() {dtype="f32", shape=[4,4], value=0.5}
  optimize %w2: f32[4,4] = SGDUpdate(%w2, %z, %lr)
  output %b"""
    )
    assert moved(body) == ["z", "a", "b", "w2_grad", "a_grad", "w2'", "w1_grad"]


def test_reruns_that_share_a_part() -> None:
    """%b runs again for the first gradient; for the second, %a is still missing, and %b is not made once more."""
    block = parse(
        program("""  input %x: f32[4]
  %a: f32[4] = Tanh(%x)
  %b: f32[4] = Exp(%x)
  %c: f32[4] = Mul(%a, %b)
  %d: f32[4] = Exp(%c)
  backward %g: f32[4] = Mul(%d, %b)
  backward %h: f32[4] = Mul(%g, %c)
  output %h""")
    )
    plan = plan_from_checkpoints(block, ["d"])
    assert [(r.operator, r.before) for r in plan.reruns] == [(1, 4), (0, 5), (2, 5)]


def test_what_comes_from_another_stage_is_not_sent_again_by_a_rerun() -> None:
    block = parse(
        program("""  input %x: f32[4]
  %a: f32[4] = Tanh(%x)
  %b: f32[4] = Border(%a) {source=0, target=1}
  %c: f32[4] = Exp(%b)
  %d: f32[4] = Exp(%c)
  backward %g: f32[4] = Mul(%d, %b)
  backward %h: f32[4] = Mul(%g, %c)
  output %h""")
    )
    plan = plan_from_checkpoints(block, ["d"])
    assert [(r.operator, r.before) for r in plan.reruns] == [(2, 5)]
    with pytest.raises(UsageError, match=r"Border .*: it cannot be recomputed") as told:
        apply(block, RecomputePlan(reruns=(Rerun(1, 4),)))
    assert "communicates with other ranks" in str(told.value)


def test_updates_that_no_rerun_reads_stay_where_they_are() -> None:
    """What reads an updated parameter and is no rerun is behind the update already."""
    body = (
        EARLY
        + """  optimize %w1: f32[4,4] = SGDUpdate(%w1, %w1_grad, %lr)
  optimize %w2: f32[4,4] = SGDUpdate(%w2, %w2_grad, %lr)
  optimize %z: f32[4,4] = Mul(%w1, %lr)
  output %b, %z"""
    )
    after = apply(parse(program(body)), RecomputePlan(reruns=(Rerun(0, 2),)))
    assert [next(op.writes()).name for op in after.operators[-3:]] == ["w1", "w2", "z"]


def test_an_operator_is_of_its_class() -> None:
    (relu,) = parse(program("  input %x: f32[2]\n  %y: f32[2] = Relu(%x)\n  output %y")).operators
    assert relu.of(op_class("Relu")) is relu.op
    with pytest.raises(AssertionError):
        relu.of(op_class("Gemm"))
