"""Large graphs: work grows with the number of nodes, not with its square, and what is the same is not done twice."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import recompute as rc
from recompute.compiling.compiler import compile_step, resolve_checkpoints
from recompute.compiling.steps import attach_loss
from recompute.errors import UsageError
from recompute.language.builder import Builder
from recompute.language.ir import Block, Value
from recompute.language.types import TensorType
from recompute.language.verify import _Checker, verify
from recompute.passes import ALIGNMENT, Fusion, Liveness, Schedule
from recompute.passes.memory.packing import Lifetime, best_fit_in_time, pack
from recompute.passes.memory.storage import storages
from recompute.passes.scheduling.graph import Walk
from recompute.passes.scheduling.schedule import live_peak
from recompute.training.optimizers import Adam


def graph(nodes: list[onnx.NodeProto], outputs: list[str], weights: int = 1) -> onnx.ModelProto:
    """Reads `x` [2, 3] and weights `w0`, `w1`, ... [3]."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])
    out = [helper.make_tensor_value_info(o, TensorProto.FLOAT, None) for o in outputs]
    held = [helper.make_tensor(f"w{i}", TensorProto.FLOAT, [3], [1.0, 2.0, 3.0]) for i in range(weights)]
    made = helper.make_graph(nodes, "large", [x], out, held)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def node(kind: str, inputs: list[str], output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(kind, inputs, [output], **attributes)


def chain(n: int) -> onnx.ModelProto:
    names = ["a", *(f"v{i}" for i in range(n)), "y"]
    return graph([node("Add", ["x", "w0"], "a"), *(node("Relu", [a], b) for a, b in itertools.pairwise(names))], ["y"])


def fan(n: int, kind: str) -> onnx.ModelProto:
    parts = [f"v{i}" for i in range(n)]
    attributes = {"axis": 0} if kind == "Concat" else {}
    return graph(
        [
            node("Add", ["x", "w0"], "a"),
            *(node("Neg", ["a"], p) for p in parts),
            node(kind, parts, "y", **attributes),
        ],
        ["y"],
    )


def aliases(n: int) -> onnx.ModelProto:
    names = ["a", *(f"v{i}" for i in range(n))]
    copies = [node(("Identity", "Relu")[i % 2], [a], b) for i, (a, b) in enumerate(itertools.pairwise(names))]
    return graph([node("Add", ["x", "w0"], "a"), *copies, node("Neg", [names[-1]], "y")], ["y"])


def weighted(n: int) -> onnx.ModelProto:
    names = ["x", *(f"v{i}" for i in range(n))]
    return graph([node("Add", [a, f"w{i}"], b) for i, (a, b) in enumerate(itertools.pairwise(names))], [names[-1]], n)


def lines(run: Any, *arguments: Any) -> int:
    """How many lines of Python ran: a measure of work that no other process disturbs."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return note

    before = sys.gettrace()
    sys.settrace(note)
    try:
        run(*arguments)
    finally:
        sys.settrace(before)
    return count


def trained(model: onnx.ModelProto) -> None:
    program = rc.load(model)
    loss, _ = attach_loss(program, None)
    compile_step(program, loss, Adam(), providers=())


@pytest.mark.parametrize("kind", ["chain", "sum", "weighted"])
def test_twice_the_nodes_are_twice_the_work(kind: str) -> None:
    make = {"chain": chain, "sum": lambda n: fan(n, "Sum"), "weighted": weighted}[kind]
    trained(make(20))  # what is done once in a process
    assert lines(trained, make(160)) < 2.4 * lines(trained, make(80))


def test_an_operator_with_very_many_inputs_is_not_tried_for_each_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a loop of 400 iterations does: its results go into two Concats behind it."""
    x, w = Value("x", TensorType("f32", (4, 3))), Value("w", TensorType("f32", (3, 3)))
    b = Builder.on(Block(inputs=(x, w)))
    last, first, second = x, [], []
    for _ in range(400):
        last = b.Add(b.MatMul(last, w), x)
        first.append(last)
        second.append(b.Mul(last, x))
    ends = [b.Concat(*[b.Reshape(v, shape=(1, 4, 3)) for v in values], axis=0) for values in (first, second)]
    block = Block("loop", (x, w), operators=tuple(b.operators), outputs=(*(v.name for v in ends), last.name))
    calls = [0]
    change = Walk.change

    def counted(self: Walk, i: int) -> int:
        calls[0] += 1
        return change(self, i)

    monkeypatch.setattr(Walk, "change", counted)
    Schedule().run(block)
    assert calls[0] < 100 * len(block.operators)


def test_many_names_of_values_are_found_once() -> None:
    rc.load(aliases(10))
    assert lines(rc.load, aliases(600)) < 2.4 * lines(rc.load, aliases(300))


def test_many_readers_of_one_value_are_not_all_compared() -> None:
    def block(n: int) -> Block:
        x = Value("x", TensorType("f32", (128, 256)))
        b = Builder.on(Block(inputs=(x,)))
        for _ in range(n):  # a few become one loop, which the others will not join
            b.Tanh(x)
        names = tuple(v.name for o in b.operators for v in o.writes())
        return Block("f", (x,), constants=tuple(b.constants), operators=tuple(b.operators), outputs=names)

    Fusion().run(block(10))
    small, large = block(300), block(900)
    assert lines(Fusion().run, large) < 3.6 * lines(Fusion().run, small)


def test_names_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    program = rc.load(weighted(300))
    wanted = [f"w{i}" for i in range(0, 300, 2)]

    def compared(*_: Any) -> bool:
        raise AssertionError("a name without wildcards is compared with many")

    for module in ("recompute.support.patterns", "recompute.compiling.compiler"):
        monkeypatch.setattr(sys.modules[module].fnmatch, "fnmatchcase", compared)
        monkeypatch.setattr(sys.modules[module].fnmatch, "filter", compared)
    assert [v.name for v in rc.load(weighted(300), trainable=wanted).block.parameters] == wanted
    names = [f"v{i}" for i in range(299)]
    assert resolve_checkpoints(program, names[::-1]) == names


def test_trainable_takes_names_and_globs() -> None:
    found = rc.load(weighted(12), trainable=["w1", "w1[01]"]).block.parameters
    assert [v.name for v in found] == ["w1", "w10", "w11"]
    with pytest.raises(rc.UsageError, match=r"called 'w\[xy\]'"):
        rc.load(weighted(12), trainable=["w1", "w[xy]"])


def test_types_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[object] = []
    check = _Checker.check_types
    monkeypatch.setattr(_Checker, "check_types", lambda self, op: (checked.append(op), check(self, op))[1])
    block = rc.load(chain(5)).block
    verify(block)
    verify(block.with_operators(block.operators, outputs=("v2",)))
    assert len(checked) == len(block.operators)
    first = block.operators[0]
    other = dataclasses.replace(first, outputs=(Value(first.outputs[0].name, TensorType("f32", (7,))),))  # type: ignore[union-attr]
    with pytest.raises(rc.VerifyError, match="is declared"):
        verify(block.with_operators([other, *block.operators[1:]]))


def test_a_pass_that_changes_nothing_gives_the_block_itself() -> None:
    block = rc.load(chain(5)).block
    assert block.with_operators(list(block.operators)) is block
    assert block.with_operators(block.operators, outputs=block.outputs) is block
    assert block.with_operators(block.operators, outputs=()).outputs == ()
    assert block.with_operators(block.operators[:-1]) is not block


def test_live_peak_is_that_of_the_block_with_frees() -> None:
    for model in (fan(9, "Concat"), fan(9, "Sum"), chain(4)):
        program = rc.load(model)
        loss, _ = attach_loss(program, None)
        block = compile_step(program, loss, Adam(), providers=()).program.logical
        freed = Liveness().run(block)
        peaks = []
        for join in (False, True):
            found = storages(freed, join=join)
            size = {id(s): -(-s.nbytes // ALIGNMENT) * ALIGNMENT for s in found}
            moments = [i for i, o in enumerate(freed.operators) if o.op.name != "Free"]
            peaks.append(max(sum(size[id(s)] for s in found if s.start <= i <= s.end) for i in moments))
        assert live_peak(block) == min(peaks)


def test_very_many_operators_are_ordered_in_one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    block = rc.load(fan(40, "Sum")).block  # 40 values wait for the first addition
    monkeypatch.setattr("recompute.passes.scheduling.schedule._LOOKS", len(block.operators) - 1)
    ordered = Schedule().run(block)
    assert sorted(map(str, ordered.operators)) == sorted(map(str, block.operators))
    assert live_peak(block) >= 40 * ALIGNMENT and live_peak(verify(ordered)) <= 5 * ALIGNMENT


def test_best_fit_takes_the_smallest_hole_and_the_lowest_of_them() -> None:
    items = [
        Lifetime("a", 128, 0, 1),
        Lifetime("b", 64, 0, 9),
        Lifetime("c", 64, 0, 1),
        Lifetime("d", 64, 0, 9),
        Lifetime("e", 64, 0, 1),
        Lifetime("f", 64, 0, 9),
        Lifetime("g", 64, 2, 9),
        Lifetime("h", 64, 3, 9),
        Lifetime("i", 64, 4, 9),
        Lifetime("j", 128, 5, 9),
    ]
    plan = best_fit_in_time(items)
    assert [plan[x] for x in "ghij"] == [192, 320, 0, 448]


def test_best_fit_merges_holes() -> None:
    items = [Lifetime(str(i), 64, 0, i) for i in range(4)] + [Lifetime("all", 192, 3, 9), Lifetime("more", 256, 4, 9)]
    plan = best_fit_in_time(items)
    assert plan["all"] == 0 and plan["more"] == 192


def test_steps_larger_than_any_machine_are_refused() -> None:
    items = [Lifetime("a", 1 << 62, 0, 1), Lifetime("b", 1 << 70, 1, 2), Lifetime("c", 64, 2, 2)]
    with pytest.raises(UsageError, match="no machine has so much"):
        pack(items)


def test_a_fused_loop_has_a_bounded_body() -> None:
    shape = TensorType("f32", (128, 256))
    x = Value("x", shape)
    b = Builder.on(Block(inputs=(x,)))
    last = x
    for _ in range(300):
        last = b.Tanh(last)
    block = Block("f", (x,), operators=tuple(b.operators), outputs=(last.name,))
    fused = Fusion().run(block).operators
    members = [len(o.op.members) for o in fused]  # type: ignore[attr-defined]
    assert sum(members) == 300 and max(members) <= 48


@pytest.mark.parametrize("kind", ["chain", "sum"])
def test_twenty_thousand_nodes(kind: str) -> None:
    """They run; a quarter of them trains, with work that grows as their number (see above)."""
    make = chain if kind == "chain" else lambda n: fan(n, "Sum")
    model = make(20_000)
    program = rc.load(model)
    (y,) = rc.Executor().run(program, {"x": np.ones((2, 3), np.float32)}, ["y"])
    row = np.array([2.0, 3.0, 4.0], np.float32)
    assert np.array_equal(y, np.tile(row if kind == "chain" else -20_000 * row, (2, 1)))
    trained(make(5_000))
