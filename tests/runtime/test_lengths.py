"""`Executor.run` and `evaluate` at other sizes than the program was loaded with: compiled once, kept, one arena."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from text_cases import text_model

import recompute as rc
from recompute.passes import memory_report
from recompute.passes.scheduling.schedule import Schedule, in_order_of
from recompute.support.recent import Recent


def step(length: int = 16, batch: int = 4, optimizer: Any = None) -> rc.Program:
    program = rc.load(text_model(), batch=batch, dims={"sequence": length})
    (optimizer or rc.Adam(1e-2)).minimize(rc.losses.cross_entropy(program["logits"]))
    return program


def feed(batch: int, length: int, seed: int = 0) -> dict[str, np.ndarray]:
    x = np.random.default_rng(seed).integers(0, 32, (batch, length))
    return {"input_ids": x, "label": x}


SIZES = ((4, 16), (4, 8), (4, 20), (2, 8), (4, 16), (4, 8))


def test_a_step_at_other_sizes_trains_the_same_weights_with_the_same_state() -> None:
    program, executor = step(), rc.Executor()
    losses = [executor.run(program, feed(*s, seed=i), ["loss"])[0] for i, s in enumerate(SIZES)]
    state: dict[str, np.ndarray] = {}
    for i, (batch, length) in enumerate(SIZES):
        alone = step(length, batch)
        alone.data.update({n: a.copy() for n, a in state.items()})
        (loss,) = rc.Executor().run(alone, feed(batch, length, seed=i), ["loss"])
        assert loss == losses[i]
        state = {v.name: alone.data[v.name] for v in (*alone.block.parameters, *alone.block.state)}
    assert all((program.data[n] == a).all() for n, a in state.items())


def test_they_are_made_once_and_share_one_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    program, executor, made = step(), rc.Executor(), []
    at = rc.Program.at

    def counted(self: rc.Program, *sizes: Any) -> rc.Program:
        made.append(sizes)
        return at(self, *sizes)

    monkeypatch.setattr(rc.Program, "at", counted)
    for _ in range(2):
        for size in SIZES:
            executor.run(program, feed(*size), ["loss"])
    assert len(made) == 3
    assert len({id(bound.session.arena) for bound in executor._sessions.values()}) == 1


def test_a_forward_pass_and_an_evaluation_at_other_sizes() -> None:
    program, executor = step(), rc.Executor()
    whole = rc.load(text_model(), batch=4, dims={"sequence": 8})
    ids = {"input_ids": feed(4, 8)["input_ids"]}
    (expected,) = rc.Executor().run(whole, ids, ["logits"])
    np.testing.assert_allclose(program.evaluate(ids, ["logits"])[0], expected, rtol=1e-5, atol=1e-6)
    plain = rc.load(text_model(), batch=4, dims={"sequence": 16})
    assert (executor.run(plain, ids, ["logits"])[0] == expected).all()
    assert program.for_test(dims={"sequence": 8}).block.inputs[0].shape == (4, 8)
    with pytest.raises(rc.UsageError, match="no open dimension 'length'"):
        program.for_test(dims={"length": 8})


def test_those_used_longest_ago_are_forgotten() -> None:
    program, executor = step(), rc.Executor(kept_bytes=1 << 20)
    for _ in range(2):
        for length in range(4, 14):
            executor.run(program, feed(4, length), ["loss"])
    kept = executor._others[program]
    assert 1 < len(kept) < 10
    assert len(executor._sessions) <= len(kept) + 1
    assert not [n for n in program.data if "@" in n and not any(n in p.data for p in kept)]
    gone = weakref.ref(program)
    del program, kept
    gc.collect()
    gc.collect()
    assert gone() is None
    assert not len(executor._sessions)


def test_what_cannot_be_made_again_is_refused_as_before() -> None:
    program = rc.load(text_model(), batch=4, dims={"sequence": 16})
    loss = rc.losses.cross_entropy(program["logits"])
    optimizer = rc.SGD(0.1)
    optimizer.apply_gradients(optimizer.backward(loss))
    with pytest.raises(rc.UsageError, match="was not made a training step by minimize"):
        rc.Executor().run(program, feed(4, 8), ["loss"])
    with pytest.raises(rc.UsageError, match=r"input 'label' has shape \[4, 16\], the program expects \[4, 8\]"):
        rc.Executor().run(step(), {**feed(4, 16), "input_ids": feed(4, 8)["input_ids"]}, ["loss"])


def test_a_failed_step_is_said_of_all_sizes() -> None:
    program, executor = step(), rc.Executor()
    program.broken = "a step failed"
    with pytest.raises(rc.errors.JobError, match="partly updated"):
        executor.run(program, feed(4, 8), ["loss"])


def test_recent_keeps_what_was_used_last() -> None:
    kept: Recent[str, int] = Recent(10, lambda value: value)
    assert [kept.put(k, v) for k, v in (("a", 4), ("b", 5))] == [[], []]
    assert kept.get("a") == 4
    assert kept.put("c", 3) == [5]
    assert kept.put("d", 20) == [4, 3]
    assert kept.get("b") is None
    assert list(kept) == [20]
    assert kept.put("d", 1) == [20]


def test_the_order_of_another_length_is_taken_where_the_operators_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[int] = []
    run = Schedule.run

    def counted(self: Schedule, block: Any) -> Any:
        searched.append(len(block.operators))
        return run(self, block)

    monkeypatch.setattr(Schedule, "run", counted)
    program, executor = step(64), rc.Executor()
    executor.run(program, feed(4, 64), ["loss"])
    assert len(searched) == 1
    losses = [executor.run(program, feed(4, length), ["loss"])[0] for length in (60, 56)]
    assert len(searched) == 1
    executor.run(program, feed(4, 128), ["loss"])  # takes more memory than any before: an order of its own
    assert len(searched) == 2
    assert all(memory_report(b.session.block).arena <= b.session.arena.nbytes for b in executor._sessions.values())
    alone = step(64)
    rc.Executor().run(alone, feed(4, 64), ["loss"])
    for length, loss in zip((60, 56), losses, strict=True):
        other = step(length)
        other.data.update({v.name: alone.data[v.name].copy() for v in (*alone.block.parameters, *alone.block.state)})
        assert rc.Executor().run(other, feed(4, length), ["loss"])[0] == loss
        alone = other


def test_programs_with_other_operators_have_orders_of_their_own() -> None:
    text = "program p {{\n input %x: f32[{n}]\n %a: f32[{n}] = {first}(%x)\n %b: f32[{n}] = Neg(%x)\n"
    text += " %y: f32[{n}] = Add(%a, %b)\n output %y\n}}"
    small, large, other = (rc.parse(text.format(n=n, first=f)) for n, f in ((2, "Exp"), (4, "Exp"), (4, "Tanh")))
    turned = large.with_operators([large.operators[i] for i in (1, 0, 2)])
    found = in_order_of([other, turned], small)
    assert found is not None
    assert [op.op.name for op in found.operators] == ["Neg", "Exp", "Add"]
    assert in_order_of([other], small) is None
    assert in_order_of([], small) is None
