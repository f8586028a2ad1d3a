"""Random programs through every planner: skips, several outputs, shared inputs and tied weights, views (Reshape, Slice,
Split, Transpose), parts that are joined, in-place activations, dropout, batch normalisation with running statistics,
state that the forward pass reads, changes and reads again.

What comes out fits its budget, is what the judge said, and computes the plain step's bits, with every read and write
of the arena checked.
"""

from __future__ import annotations

import importlib.util
import random
from typing import Any

import numpy as np
import pytest
from checking import run_checked

import recompute as rc
from recompute import parse
from recompute.cost import Device
from recompute.errors import UsageError
from recompute.language.builder import Builder
from recompute.language.ir import Block, Role, Value
from recompute.language.op import op_class
from recompute.language.types import TensorType
from recompute.passes import DeadCode
from recompute.passes.planners import PLANNERS, plan_of, sequence_of, simulate
from recompute.passes.planners.base import import_all
from recompute.passes.planners.core.derive import derive
from recompute.passes.planners.core.schedules import keep_schedule
from recompute.passes.planners.core.simulate import pruned
from recompute.passes.planners.fit.plan import fit_within
from recompute.passes.planners.fit.problem import Fitted, Fitting
from recompute.passes.recomputation.recompute import apply
from recompute.passes.scheduling.schedule import live_peak
from recompute.planning import fitting_of
from recompute.runtime.cpu.session import Session

import_all()
COST = Device("a machine for tests", 1e9, 1e9, 1e-6)
#: of what lies between the least that can be and the plain step
SHARES = (0.92, 0.8, 0.65)
#: strategies that take seconds, unless told to take less
QUICK: dict[str, dict[str, Any]] = {
    "auto": {"moves": 300, "effort": 0.02, "rounds": 1},
    "optimal": {"moves": 600, "effort": 0.04, "rounds": 1},
    "checkmate": {"time_limit": 0.5},
    "checkmate-lp": {"time_limit": 1.0},
    "moccasin": {"time_limit": 0.5, "effort": 0.1},
    "kusumoto-exact": {"limit": 60},
    "kusumoto-exact-memory": {"limit": 60},
}
SOLVERS = ("auto", "optimal", "cut-sweep", "checkmate", "checkmate-lp", "moccasin", "min-cut")
HAS_SOLVER = importlib.util.find_spec("ortools") is not None
STRATEGIES = [s for s in sorted(PLANNERS) if HAS_SOLVER or s not in SOLVERS]


class _Writer:
    """Adds operators to a program; `values` are matrices, all that later ones may read."""

    def __init__(self, seed: int, joins: bool) -> None:
        self.draw, self.joins = random.Random(seed), joins
        d = self.draw
        self.rows, self.columns = d.choice((12, 24)), d.choice((6, 16))
        c = self.columns
        self.x, self.step = Value("x", TensorType("f32", (self.rows, c))), Value("step", TensorType("i64"))
        self.weights = [Value(f"w{i}", TensorType("f32", (c, c))) for i in range(2)]
        self.scales = [Value(n, TensorType("f32", (c,))) for n in ("scale", "bias")]
        self.running = [Value(n, TensorType("f32", (c,))) for n in ("mean", "var")]
        self.b = Builder.on(
            Block(
                inputs=(self.x,),
                parameters=(*self.weights, *self.scales),
                buffers=tuple(self.running),
                state=(self.step,),
            )
        )
        self.values = [self.b.MatMul(self.x, self.weights[0])]

    def near(self) -> Value:
        return self.draw.choice(self.values[-4:])

    def like(self, v: Value) -> Value:
        return self.draw.choice([u for u in self.values if u.shape == v.shape])

    def add(self, seed: int) -> None:
        d, b = self.draw, self.b
        kinds = [
            "matmul",
            "binary",
            "unary",
            "unary",
            "dropout",
            "reshape",
            "split",
            "slice",
            "norm",
            "state",
            "mean",
            "turn",
        ]
        kind = d.choice(kinds + (["join", "join"] if self.joins else []))
        v = self.near()
        if kind == "matmul" and v.shape[1] == self.columns:
            found = [b.MatMul(v, d.choice(self.weights))]
        elif kind == "binary":
            found = [getattr(b, d.choice(("Add", "Mul", "Sub")))(v, self.like(v))]
        elif kind == "dropout":
            found = [b.Dropout(v, self.step, ratio=0.25, seed=seed)]
        elif kind == "reshape":
            flat = b.Reshape(v, shape=(v.type.size,))
            found = (
                [b.Reshape(d.choice((b.Relu, b.Tanh))(flat), shape=v.shape)]
                if d.random() < 0.7
                else [b.Reshape(flat, shape=v.shape)]
            )
        elif kind == "split" and v.shape[0] > 1:
            first = d.randint(1, v.shape[0] - 1)
            found = list(b.Split(v, sizes=(first, v.shape[0] - first), axis=0))
        elif kind == "slice" and v.shape[0] > 1:
            begin = d.randint(0, v.shape[0] - 2)
            found = [b.Slice(v, starts=(begin,), ends=(d.randint(begin + 1, v.shape[0]),), axes=(0,))]
        elif kind == "norm" and v.shape[1] == self.columns and v.shape[0] > 1:
            y, mean, var = b.emit(op_class("BatchNormTrain")(epsilon=0.1), v, *self.scales, want=3)
            b.RunningUpdate(self.running[0], mean, momentum=0.9)
            b.RunningUpdate(self.running[1], var, momentum=0.9)
            found = [y]
        elif kind == "state" and v.shape[1] == self.columns:
            found = [b.Mul(v, d.choice(self.running))]
        elif kind == "mean":
            found = [b.Mul(v, b.ReduceMean(v, axes=(1,)))]
        elif kind == "turn":
            found = [b.Transpose(b.Sigmoid(b.Transpose(v, perm=(1, 0))), perm=(1, 0))]
        elif kind == "join":
            others = [u for u in self.values if u.shape[1] == v.shape[1]]
            found = [b.Concat(v, d.choice(others), axis=0)]
            if found[0].shape[0] > 40:
                found = [b.Relu(v)]
        else:
            found = [getattr(b, d.choice(("Relu", "Tanh", "Exp", "Sigmoid", "Neg")))(b.Tanh(v))]
        self.values += found


def random_program(
    seed: int, *, joins: bool = False, length: int = 18
) -> tuple[rc.Program, str, dict[str, np.ndarray]]:
    """A program with its data, its loss's name, and what to feed it."""
    w = _Writer(seed, joins)
    for k in range(length):
        w.add(k)
    b = w.b
    read = {v.name for op in b.operators for v in op.reads()}
    ends = [v for v in w.values if v.name not in read][-5:]
    b.role = Role.LOSS
    parts = [b.emit(op_class("ReduceMean")(keepdims=0), b.Tanh(v)) for v in ends]
    loss = b.add_all(parts)
    kept = (loss.name, w.draw.choice(w.values).name) if w.draw.random() < 0.3 else (loss.name,)
    block = Block(
        f"random_{seed}",
        inputs=(w.x,),
        parameters=(*w.weights, *w.scales),
        buffers=tuple(w.running),
        state=(w.step,),
        constants=tuple(b.constants),
        operators=tuple(b.operators),
        outputs=kept,
    )
    g = np.random.default_rng(seed)
    data = {v.name: g.uniform(0.3, 0.9, v.shape).astype(np.float32) for v in (*block.parameters, *block.buffers)}
    data["step"] = np.array(3, np.int64)
    return rc.Program(rc.verify(block), data), loss.name, {"x": g.uniform(-0.5, 0.5, w.x.shape).astype(np.float32)}


def step_of(
    seed: int, *, joins: bool = False, schedule: bool = False, length: int = 18
) -> tuple[rc.Program, Fitting, dict[str, Any]]:
    """A program's training step as it stands, planners for it, and what to feed it."""
    program, loss, feed = random_program(seed, joins=joins, length=length)
    rc.Momentum(learning_rate=0.1).minimize(program[loss])
    return program, fitting_of(program.block, rc.Target(providers=(), cost=COST, schedule=schedule)), feed


def two_steps(step: rc.Program, block: Block, feed: dict[str, np.ndarray]) -> list[bytes]:
    """The bits of all outputs of two steps, and of all that lives across them: every access to the arena checked."""
    data = {name: array.copy() for name, array in step.data.items()}
    session, found = Session(block, data), []
    for _ in range(2):
        for name, array in feed.items():
            session.arrays[name][...] = array
        run_checked(session)
        found += [session.arrays[name].tobytes() for name in block.outputs]
    return found + [data[v.name].tobytes() for v in (*block.parameters, *block.buffers, *block.state)]


def check_judge(fit: Fitting, found: Fitted) -> None:
    """What is run again is for somebody, nothing takes it out, and bytes alive are what the judge said."""
    derived = next(d for d, scheduled in fit.bases() if scheduled == found.scheduled)
    assert found.planned is not None
    problem, sequence = derived.problem, sequence_of(derived.problem, found.planned.plan)
    assert pruned(problem, sequence) == sequence
    assert found.planned.outcome == simulate(problem, sequence)
    assert found.planned.bound is None or not found.planned.fits or found.planned.gap is not None
    applied = apply(found.base, found.plan)
    again = [op for op in applied.operators if op.role is Role.RECOMPUTE]
    assert not any(op.op.updates for op in again)
    live = live_peak(found.block) + problem.fixed
    if _first_runs(found.block) < _first_runs(found.base):
        # a node that runs again before anything has read its first run: the program just runs it later
        assert live <= found.planned.outcome.peak
        return
    assert [op for op in found.block.operators if op.role is Role.RECOMPUTE] == again
    read = {v.name for op in applied.operators for v in op.reads()}
    assert all(any(v.name in read for v in op.writes()) for op in again)
    assert live <= found.planned.outcome.peak if problem.shared else live == found.planned.outcome.peak


def _first_runs(block: Block) -> int:
    return sum(op.role is not Role.RECOMPUTE for op in block.operators)


def check(seed: int, strategies: list[str], joins: bool, length: int = 18) -> int:
    """How many plans there were."""
    step, fit, feed = step_of(seed, joins=joins, schedule=seed % 4 == 3, length=length)
    expected, least, count = two_steps(step, fit.plain.compiled, feed), floor(fit), 0
    for k, strategy in enumerate(strategies):
        budget = least + int((fit.plain.peak - least) * SHARES[(seed + k) % len(SHARES)])
        try:
            found = fit_within(fit, budget, strategy, QUICK.get(strategy, {}))
        except UsageError as e:
            assert f"{budget:,}" in str(e) or "takes up to" in str(e) or "lower sets" in str(e)
            continue
        assert found.peak <= budget
        if found.planned is not None:
            check_judge(fit, found)
            count += bool(found.plan.reruns)
        assert two_steps(step, found.compiled, feed) == expected
    return count


def floor(fit: Fitting) -> int:
    """Bytes that one operator touches at the least."""
    p = fit.derived.problem
    return p.fixed + max(sum(p.sizes[v] for v in n.reads) + n.scratch for n in p.nodes)


@pytest.mark.parametrize("joins", (False, True), ids=("apart", "joined"))
@pytest.mark.parametrize("group", range(7))
def test_every_planner_keeps_every_bit(group: int, joins: bool) -> None:
    """Strategies take turns: in each group every quick one meets a program, and a dear one meets another,
    which is shorter."""
    quick, dear = [s for s in STRATEGIES if s not in QUICK], [s for s in STRATEGIES if s in QUICK]
    seeds = [1000 * joins + 5 * group + k for k in range(5)]
    count = sum(check(seed, quick[k::4], joins) for k, seed in enumerate(seeds[:4]))
    if group % 2 == joins:
        count += check(seeds[4], dear[group % len(dear) :][:1], joins, 12)
    assert count, "nothing was run again"


@pytest.mark.parametrize("seed", range(40))
def test_the_judge_knows_every_byte(seed: int) -> None:
    """Whatever is kept, the bytes alive in the compiled program are the simulated ones: views, in-place and scratch."""
    d = step_of(seed)[1].derived
    p, draw = d.problem, random.Random(seed)
    for share in (1.0, 0.6, 0.3, 0.0):
        sequence = pruned(p, keep_schedule(p, {v for v in p.saved if draw.random() < share}))
        block = DeadCode().run(apply(d.block, d.for_block(plan_of(sequence))))
        live = simulate(p, sequence).peak - p.fixed
        assert live_peak(block) <= live if p.shared else live_peak(block) == live


def test_parts_that_are_not_aligned_are_copies() -> None:
    """Views of some parts of a Split and copies of the others would hold those bytes twice, unseen by the judge."""
    block = parse(
        "program split {\n  input %x: f32[4,6]\n  %a: f32[4,6] = Relu(%x)\n"
        "  %p: f32[1,6], %q: f32[3,6] = Split(%a) {sizes=[1,3]}\n"
        "  %r: f32[3,6] = Relu(%q)\n  %s: f32[1,6] = Relu(%p)\n  output %r, %s\n}\n"
    )
    p = derive(block, lambda op: 1.0).problem
    assert [len(n.writes) for n in p.nodes] == [1, 2, 1, 1]
    assert live_peak(block) == simulate(p, range(len(p))).peak
