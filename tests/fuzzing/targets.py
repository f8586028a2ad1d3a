"""What is done with a file of each kind: the whole way that a user would go with it.

Each target gives "ran" (or "loaded", where what it holds is too large to run here), or raises: a RecomputeError is a
refusal, everything else a finding.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import recompute as rc
from recompute.language.ir import Block, Free

from . import seeds
from .guard import guard

#: of one tensor of a model, and of all that is folded
MAX_BYTES = 1 << 28
#: programs that take more bytes, or more operations, are planned but not run
MAX_RUN, MAX_FLOPS = 1 << 25, 1e8


class Wrong(AssertionError):
    """A file that was accepted, and gave something else than it says."""


def _providers(number: int) -> tuple[str, ...] | None:
    """NumPy for most files, this machine's kernels for some."""
    return None if number % 4 == 0 else ("numpy",)


def too_large(block: Block) -> bool:
    """Whether a program would take more than a fuzzer has."""
    from recompute.cost import total_cost

    values = block.values().values()
    if max(block.addresses.values(), default=0) > MAX_RUN:
        return True
    return sum(v.nbytes for v in values) > MAX_RUN or total_cost(block.operators).flops > MAX_FLOPS


def feeds(block: Block, number: int, wild: bool = False) -> dict[str, np.ndarray]:
    """Contents of the inputs, the same for the same file."""
    draw = np.random.default_rng(number)
    return {v.name: seeds.contents(draw, v.type, wild) for v in block.inputs}


def persistent(block: Block, number: int) -> dict[str, np.ndarray]:
    """Contents of parameters, buffers and state."""
    draw = np.random.default_rng(number + 1)
    return {v.name: seeds.contents(draw, v.type) for v in (*block.parameters, *block.buffers, *block.state)}


def run(program: rc.Program, feed: Mapping[str, Any], number: int, steps: int = 1) -> list[np.ndarray]:
    """Runs a program in guarded memory and gives its outputs.  Wrong where a step that fails has changed something."""
    from recompute.runtime import Executor

    executor, outputs = Executor(providers=_providers(number)), list(program.block.outputs)
    found: list[np.ndarray] = []
    with guard(behind=number % 2 == 0):
        session = executor.session(program, outputs)
        before = {n: a.tobytes() for n, a in program.data.items()}
        try:
            for _ in range(steps):
                found = executor.run(program, feed, outputs)
                before = {n: a.tobytes() for n, a in program.data.items()}
        except rc.RecomputeError:
            if not program.broken and before != {n: a.tobytes() for n, a in program.data.items()}:
                raise Wrong("a step that failed has changed the program") from None
            raise
        finally:
            if number % 8 < 2 and session.arena.nbytes < 1 << 16:
                _checked(session, program)
    return found


def _checked(session: Any, program: rc.Program) -> None:
    """Wrong where an operator writes into other memory of the arena than its own, whether it fails or not."""
    from checking import run_checked

    before = {n: a.copy() for n, a in program.data.items()}
    try:
        run_checked(session)
    except rc.RecomputeError as e:
        if "were changed from outside" in str(e):
            raise Wrong(str(e)) from None
    for n, a in before.items():
        program.data[n][...] = a


def run_block(block: Block, data: dict[str, np.ndarray], number: int) -> str:
    """Runs a program of a text; one whose plan is part of the text must give what a plan of ours gives."""
    from recompute.passes import Target, plan_memory
    from recompute.runtime.lowering import resolved

    if too_large(block):
        if not block.addresses:
            plan_memory(block, resolved(Target(providers=_providers(number), schedule=False)))
        return "loaded"
    feed = feeds(block, number, wild=number % 10 == 5)
    compared = bool(block.addresses) and not any(op.kernel for op in block.operators)
    kept = {n: a.copy() for n, a in data.items()} if compared else {}
    program = rc.Program(block, data)
    found = run(program, feed, number | 1 if compared else number)
    if compared:
        _compare(block, kept, feed, [*found, *program.data.values()], [*block.outputs, *program.data])
    return "ran"


def _compare(block: Block, data: dict[str, np.ndarray], feed: Mapping[str, Any], found: list, names: list) -> None:
    """Wrong where a step in its own plan and one in a plan of ours differ by more than rounding."""
    from recompute.runtime import Executor

    operators = [replace(op, scratch=()) for op in block.operators if not isinstance(op.op, Free)]
    bare = block.with_operators(operators, addresses={})
    program = rc.Program(bare, data)
    wanted = Executor(providers=("numpy",), schedule=False, rebuild=False).run(program, feed, list(bare.outputs))
    for name, a, b in zip(names, found, [*wanted, *program.data.values()], strict=True):
        if not _close(a, b):
            raise Wrong(f"'{name}' is {a.reshape(-1)[:4]} in the plan of the text, {b.reshape(-1)[:4]} in another")


def _close(a: np.ndarray, b: np.ndarray) -> bool:
    if a.dtype.kind in "iub":
        return bool(np.array_equal(a, b))
    eps = {"float64": 1e-9, "float32": 1e-4}.get(a.dtype.name, 0.05)
    with np.errstate(all="ignore"):
        x, y = a.astype(np.float64), b.astype(np.float64)
        return bool(np.allclose(x, y, rtol=eps, atol=eps, equal_nan=True))


def text(path: Path, number: int, name: str) -> str:
    """A program's text: parsed, verified, printed and parsed again, planned, run."""
    block = rc.verify(rc.parse(path.read_text(errors="replace")))
    if rc.parse(rc.show(block)) != block:
        again = rc.show(rc.parse(rc.show(block)))
        if again != rc.show(block):  # NaN is not equal to itself
            raise Wrong("the text of the program does not parse back to it")
    return run_block(block, {} if too_large(block) else persistent(block, number), number)


def step(path: Path, number: int, name: str) -> str:
    """A compiled step: loaded and run twice."""
    program = rc.load_compiled(path, max_bytes=MAX_BYTES)
    if too_large(program.block):
        return "loaded"
    run(program, feeds(program.block, number, wild=number % 10 == 5), number, steps=2)
    return "ran"


def model(path: Path, number: int, name: str) -> str:
    """An ONNX model: loaded, run forward, and for some files compiled into a training step that runs once."""
    batch = (2, 2, 2, 1, 3, 2, 0)[number % 7]
    program = rc.load(path, batch=batch, max_bytes=MAX_BYTES, unroll=number % 3 == 0, **_import_limits())
    rc.verify(program.block)
    if too_large(program.block):
        return "loaded"
    from recompute.data.batches import synthetic_batch

    feed = synthetic_batch(program, number)
    if number % 3:
        run(program, feed, number)
    else:
        _train(program, feed, number)
    return "ran"


def _import_limits() -> dict[str, Any]:
    import inspect

    return {"max_seconds": 8.0} if "max_seconds" in inspect.signature(rc.load).parameters else {}


def _train(program: rc.Program, feed: dict[str, np.ndarray], number: int) -> None:
    from recompute.compiling.compiler import compile_step
    from recompute.compiling.steps import attach_loss
    from recompute.data.batches import synthetic_batch

    loss, _ = attach_loss(program, None)
    if too_large(program.block):
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = compile_step(program, loss, rc.SGD(learning_rate=0.1), providers=_providers(number), cost=seeds.COST)
    if not too_large(compiled.program.block):
        run(compiled.program, {**synthetic_batch(compiled.program, number), **feed}, number)


def plan(path: Path, number: int, name: str) -> str:
    """A saved plan: applied to its network, whose step must stay the same; a problem: read and planned."""
    if name in ("problem", "links"):
        return _problem(path)
    from recompute.compiling.compiler import compile_step

    program, loss = seeds.loaded(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = rc.SGD(learning_rate=0.1)
        made = compile_step(program, loss, optimizer, plan=path, providers=("numpy",), cost=seeds.COST)
    made.saved.to_dict()  # type: ignore[union-attr]
    rc.verify(made.program.block)
    found = run(made.program, feeds(made.program.block, 7), number | 1)
    wanted, parameters = plain_step(name)
    if [a.tobytes() for a in found] != wanted:
        raise Wrong("the step with this plan gives other numbers than the plain one")
    for parameter, contents in parameters.items():
        if made.program.data[parameter].tobytes() != contents:
            raise Wrong(f"the step with this plan makes another '{parameter}' than the plain one")
    return "ran"


@functools.cache
def plain_step(name: str) -> tuple[list[bytes], dict[str, bytes]]:
    """What one step of a network gives, and what its parameters are afterwards."""
    program = seeds.steps()[f"{name} numpy"].program.clone()
    found = run(program, feeds(program.block, 7), 1)
    return [a.tobytes() for a in found], {v.name: program.data[v.name].tobytes() for v in program.block.parameters}


def _problem(path: Path) -> str:
    from recompute.passes.planners import plan as planned
    from recompute.passes.planners import simulate
    from recompute.passes.planners.core.adapters import read_problem
    from recompute.passes.planners.methods.local_search import Schedule, Search

    problem = read_problem(path)
    plain = simulate(problem, range(len(problem)))
    planned(problem, budget=None, strategy="feng-huang")
    search = Search(Schedule(problem, range(len(problem))), plain.peak * 3 // 4)
    search.run(200, 3e-2)
    search.descend()
    return "ran"


def state(path: Path, number: int, name: str) -> str:
    """A state: all of it is in the program afterwards, or nothing has changed."""
    program = seeds.fresh_state()
    before = {n: a.copy() for n, a in program.data.items()}
    arrays = dict(program.data)
    try:
        rc.load_state(program, path, strict=number % 3 != 0)
    except rc.RecomputeError:
        for n, a in before.items():
            if program.data[n] is not arrays[n] or program.data[n].tobytes() != a.tobytes():
                raise Wrong(f"'{n}' was changed by a state that was refused") from None
        raise
    for v in (*program.block.parameters, *program.block.buffers, *program.block.state):
        array = program.data[v.name]
        if array.shape != v.shape or array.dtype != v.type.numpy:
            raise Wrong(f"'{v.name}' is {array.dtype}{list(array.shape)} after loading, the program says {v.type}")
    run(program, feeds(program.block, number), number)
    return "ran"


def data(path: Path, number: int, name: str) -> str:
    """Data: as a dataset whose samples are taken, and for `--run`: two batches read, and a step run with each."""
    from recompute.data.batches import npz_batches
    from recompute.data.npz import from_npz

    with contextlib.suppress(rc.RecomputeError):
        found = from_npz(path)
        for column, array in found.take(np.arange(len(found))[-2:]).items():
            if (array.dtype, array.shape[1:]) != found.columns[column]:
                raise Wrong(
                    f"'{column}' is {array.dtype}{list(array.shape)}, but its dataset says {found.columns[column]}"
                )
    program = seeds.steps()[f"{name} numpy"].program
    batches = npz_batches(path, program)
    for _ in range(2):
        run(program, next(batches), number)
    return "ran"


TARGETS: dict[str, Callable[[Path, int, str], str]] = {
    "onnx": model,
    "text": text,
    "step": step,
    "plan": plan,
    "state": state,
    "data": data,
}
