"""Small faults that no other test would notice: found by changing the source on purpose (benchmarks/mutation.py)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import recompute as rc
from recompute.errors import JobError
from recompute.language.op import op_class
from recompute.passes.planners import Node, RematerialisationProblem, simulate
from recompute.passes.planners.core.simulate import profile
from recompute.runtime.cpu.families import ENOUGH
from recompute.runtime.executor import Executor

# -- losses and random numbers ----------------------------------------------------------------------------------------


def job(name: str, *inputs: np.ndarray | None, **attributes: Any) -> list[np.ndarray]:
    """One operator through the executor, on the kernels of this machine."""
    from recompute.testing import Case, case_block

    block, feed = case_block(Case(op_class(name)(**attributes), inputs))
    return Executor(schedule=False, rebuild=False).run(rc.Program(block, {}), feed, list(block.outputs))


@pytest.mark.parametrize("label", [-1, 5, 6, -(2**62), 2**62])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("rows", [4, ENOUGH // 5 + 1])
def test_losses_refuse_labels_outside_of_the_classes(label: int, weighted: bool, rows: int) -> None:
    """The first number behind the classes too: on NumPy and by the kernels, which take the larger ones."""
    g = np.random.default_rng(0)
    x, weights = g.standard_normal((rows, 5)).astype(np.float32), np.ones(5, np.float32) if weighted else None
    good, loss = np.arange(rows) % 5, np.array(1, np.float32)
    labels = good.copy()
    labels[2] = label
    options = {"reduction": "mean", "ignore_index": None}
    for name, behind in (
        ("SoftmaxCrossEntropyLoss", (weights,)),
        ("NegativeLogLikelihoodLoss", (weights,)),
        ("SoftmaxCrossEntropyGrad", (weights, loss)),
    ):
        assert np.isfinite(job(name, x, good, *behind, **options)[0]).all()
        with pytest.raises(JobError):
            job(name, x, labels, *behind, **options)
    assert np.isfinite(job("NegativeLogLikelihoodGrad", good, weights, loss, shape=(rows, 5), **options)[0]).all()
    with pytest.raises(JobError):
        job("NegativeLogLikelihoodGrad", labels, weights, loss, shape=(rows, 5), **options)
    ignored = {**options, "ignore_index": label}
    assert np.isfinite(job("SoftmaxCrossEntropyLoss", x, labels, weights, **ignored)[0]).all()


@pytest.mark.parametrize("name", ["SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"])
@pytest.mark.parametrize("label", [-1, 5])
def test_losses_read_nothing_outside_of_the_classes(name: str, label: int) -> None:
    """The kernel of a label behind the last class (or before the first) does not even look: there is NaN there."""
    from kernel_cases import applied

    from recompute.runtime.cpu.device import native
    from recompute.runtime.cpu.families import FAMILIES

    room = np.full(100, np.nan, np.float32)
    x = room[40:80].reshape(8, 5)
    x[...] = -1
    labels = np.array([label if label < 0 else 0, *[1] * 6, max(label, 0)])
    o = applied(op_class(name)(reduction="mean", ignore_index=None), x, labels, None)
    outs = [np.zeros(v.shape, v.type.numpy) for v in o.writes()]
    outs += [None] * (len(o.op.infer(*(None if v is None else v.type for v in o.inputs))) - len(outs))  # type: ignore[list-item]
    family = FAMILIES.table()[name]
    scratch = [np.full(t.shape, np.nan, t.numpy) for t in family.scratch(o)]
    table = native.Table(family.bind(o, [x, labels, None], outs, scratch))
    table.run()
    with pytest.raises(JobError, match=str(label)):
        table.check()
    assert np.isfinite(outs[0]).all() and np.isfinite(scratch[0]).all()


@pytest.mark.parametrize(
    ("name", "types", "at"),
    [
        ("SoftmaxCrossEntropyLoss", "f32[2,5,3] i64[2,3]", 1),
        ("SoftmaxCrossEntropyGrad", "f32[2,5,3] i64[2,3] _ f32[]", 1),
        ("NegativeLogLikelihoodLoss", "f32[2,5,3] i64[2,3]", 1),
        ("NegativeLogLikelihoodGrad", "i64[2,3] _ f32[]", 0),
    ],
)
def test_losses_say_which_labels_are_checked_first(name: str, types: str, at: int) -> None:
    more = {"shape": (2, 5, 3)} if at == 0 else {}
    op = op_class(name)(ignore_index=7, **more)
    ins = [None if t == "_" else rc.TensorType.parse(t) for t in types.split()]
    assert op.checks(ins, op.infer(*ins)) == ((at, ("label", 5, 7)),)


@pytest.mark.parametrize("rows", [2, ENOUGH])
def test_gradients_of_losses_keep_their_digits_where_the_label_is_almost_certain(rows: int) -> None:
    """exp(l) - 1 of a tiny l is l: not the difference of two numbers near 1."""
    lp = np.array([[-1e-12, -27.6], [-3e-10, -22.0]] * (rows // 2), np.float32)
    labels, one = np.zeros(rows, np.int64), np.array(1, np.float32)
    (dx,) = job("SoftmaxCrossEntropyGrad", lp, labels, None, one, reduction="sum", ignore_index=None)
    np.testing.assert_allclose(dx[:, 0], lp[:, 0], rtol=1e-6)
    np.testing.assert_allclose(dx[:, 1], np.exp(lp[:, 1]), rtol=1e-5)


@pytest.mark.parametrize("above", [0.0, 0.5])
def test_random_dropout_at_the_threshold(above: float) -> None:
    """A number that is the ratio is kept, one half a step below is dropped: the same on NumPy and by the kernel."""
    from kernel_cases import applied

    from recompute.ops.random.philox import stream
    from recompute.runtime.cpu.device import native
    from recompute.runtime.cpu.families import FAMILIES

    u = np.empty(4096, np.float32)
    stream(3, np.array(0))(u)
    number = int(u[u < 0.5].max() * 2**24)
    op = op_class("Dropout")(ratio=(number + above) / 2**24, seed=3)
    x = np.ones(4096, np.float32)
    inputs = x, np.array(0)
    o = applied(op, *inputs)
    found = []
    for own in (True, False):
        outs = [np.empty(4096, np.float32), np.empty(4096, np.bool_)]
        if own:
            op.compute(list(inputs), outs, [np.empty(t.shape, t.numpy) for t in o.workspace()])
        else:
            native.Table(FAMILIES.table()["Dropout"].bind(o, (*inputs, None), outs, [])).run()
        found.append([a.tobytes() for a in outs])
        assert bool(outs[1][int(np.argmax(u * (u < 0.5)))]) is (above == 0)
    assert found[0] == found[1]


# -- planners ---------------------------------------------------------------------------------------------------------


def problem(nodes: list[Node], sizes: tuple[int, ...], outputs: tuple[int, ...], inputs: tuple[int, ...] = (0,)) -> Any:
    names = tuple(f"v{i}" for i in range(len(sizes)))
    return RematerialisationProblem(tuple(nodes), sizes, names, inputs, outputs)


def test_only_a_place_of_the_same_size_is_taken() -> None:
    one = Node("n", 1.0, (0,), (1,), 0, False, True, (0,))
    assert profile(problem([one], (5, 5), (1,)), [0]) == [5]
    assert profile(problem([one], (7, 5), (1,)), [0]) == [12]
    assert simulate(problem([one], (7, 5), (0, 1)), [0]).peak == 12
    two = Node("n", 1.0, (0,), (1, 2), 3, False, True, (0,))
    assert profile(problem([two], (5, 4, 5), (1, 2)), [0]) == [5 + 4 + 3]


def test_the_bound_counts_all_that_is_there_while_a_node_runs() -> None:
    pytest.importorskip("ortools")
    from recompute.passes.planners.core.bound import Cut, least_budget

    nodes = [
        Node("a", 1.0, (0,), (1,), 0, False, True, ()),
        Node("b", 1.0, (1,), (2,), 30, False, True, ()),
        Node("c", 1.0, (1, 2), (3,), 0, True, False, ()),
    ]
    p = problem(nodes, (5, 7, 11, 13), (3,))
    assert Cut(p, 1).used == 7 + 11 + 30 and Cut(p, 2).used == 7 + 11 + 13
    assert least_budget(p) >= 7 + 11 + 30
    taking = [Node("a", 1.0, (0,), (1, 2), 3, False, True, (0,))]
    assert Cut(problem(taking, (5, 5, 6), (1,)), 0).used == 5 + (5 + 6 - 5) + 3


def test_the_bound_allows_for_its_own_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """With whole numbers of few units the cut chooses worse: what it proves is less, not more."""
    pytest.importorskip("ortools")
    from random_problems import random_problem

    from recompute.passes.planners.core import bound

    fine, said = bound._UNITS, 0
    for seed in range(12):
        p = random_problem(seed, 12)
        least, top = bound.least_budget(p), simulate(p, range(len(p))).peak
        for b in bound.turning_points(p, 4):
            for budget in range(least, top, max(1, (top - least) // 4)):
                monkeypatch.setattr(bound, "_UNITS", fine)
                exact = bound.extra_cost(bound.Cut(p, b), budget)
                monkeypatch.setattr(bound, "_UNITS", 200)
                found = bound.extra_cost(bound.Cut(p, b), budget)
                assert found <= exact * (1 + 1e-9) + 1e-9
                said += 0 < found < exact
    assert said


def test_gathers_along_the_first_axis_expand_without_moving_it() -> None:
    """Index: GatherGrad as a ScatterND, transposed only where the axis is another one."""
    from recompute.language.builder import Builder
    from recompute.language.ir import Block, Value
    from recompute.language.types import TensorType

    for axis in (0, 1):
        dy = Value("dy", TensorType("f32", (3, 5) if axis == 0 else (4, 3)))
        indices = Value("i", TensorType("i64", (3,)))
        b = Builder.on(Block(inputs=(indices, dy)))
        op_class("GatherGrad")(shape=(4, 5), axis=axis).expand(b, indices, dy)
        assert ("Transpose" in [o.op.name for o in b.operators]) is (axis != 0)
