"""One program, two modes: evaluation with the weights that train, and parts of a model that are frozen.

`Program.for_test`, `Program.evaluate` and `Program.freeze` are defined here.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..boundary import as_names
from ..errors import JobError, ModelWarning, UsageError, expect, nearest
from ..language.ir import Block, Operator, Role, Value
from ..language.program import Program, Variable
from ..language.verify import verify
from ..passes import memory_report
from ..passes.base import Pass, apply_passes
from ..passes.cleanup.for_test import ForTest, in_inference
from ..passes.gradient.precision import StoreParameters
from ..passes.pipelines.forward import OwnForward
from ..passes.sharding.divide_axis import DivideForward
from ..passes.sharding.zero import GatherParameters
from ..places import as_place
from ..support.patterns import Patterns
from ..support.recent import OPERATOR_BYTES, Recent
from .averages import applied
from .origin import values_to_compare
from .programs import must_be_untrained
from .quantisation import must_have_ranges, running_ends
from .shardings import axes_of

__all__ = [
    "at_other_batches", "evaluate", "fed_batch", "for_test", "forward_at", "freeze", "share_arrays", "sizes_of",
    "values_to_compare",
]  # fmt: skip


#: how much the evaluations of a program (`evaluate`) may take; those that were used longest ago are forgotten
EVALUATIONS_BYTES = 1 << 30


def at_other_batches(function: Callable[..., Variable]) -> Callable[..., Variable]:
    """Makes a function that appends operators (a loss) do it again where its program is made at other sizes.

    The function's first argument is a Variable or a Program; Variables among the others are found by their names.
    """

    @functools.wraps(function)
    def append(output: Any, *others: Any, **options: Any) -> Variable:
        program = output.program if isinstance(output, Variable) else output
        before = getattr(program, "again", None)
        result = function(output, *others, **options)
        operands = [_by_name(o) for o in (output, *others)], {k: _by_name(o) for k, o in options.items()}

        def change(other: Program) -> None:
            function(*(_of(other, o) for o in operands[0]), **{k: _of(other, o) for k, o in operands[1].items()})

        if isinstance(program, Program):
            program.edited(before, function.__name__, change)
        return result

    return append


@dataclasses.dataclass(frozen=True)
class _Named:
    """A Variable by its name, or the program itself ("")."""

    name: str


def _by_name(x: Any) -> Any:
    if isinstance(x, Program):
        return _Named("")
    return _Named(x.name) if isinstance(x, Variable) else x


def _of(program: Program, x: Any) -> Any:
    if not isinstance(x, _Named):
        return x
    return program[x.name] if x.name else program


# -- evaluation -------------------------------------------------------------------------------------------------------


def for_test(
    program: Program,
    batch: int | None = None,
    outputs: Sequence[str | Variable] | None = None,
    dims: Mapping[str, int] | None = None,
) -> Program:
    """`Program.for_test`."""
    names = () if outputs is None else tuple(_name(program, o) for o in as_names(outputs, "outputs"))
    dims = checked_dims({} if dims is None else dims)
    if batch in (None, program.forward_block.batch) and dims.items() <= sizes_of(program).items():
        test = Program(program.forward_block, program.data, source=program.source)
        test.take_origin(program)
        test.forward = None
    else:
        test = forward_at(program, batch, dims)
        names = tuple(_name(test, n) for n in names)
        low = {v.name for v in program.forward_block.parameters if v.dtype == "bf16"}
        if stored := tuple(v.name for v in test.block.parameters if v.name in low and v.dtype == "f32"):
            apply_passes(test, [StoreParameters(stored)])
    test.divided = program.divided
    apply_passes(test, evaluation_passes(program, names))
    if test.data is not program.data:
        share_arrays(test, program)
    drawn = [next(op.writes()).name for op in test.operators if op.op.random]
    if drawn:
        warnings.warn(
            f"inference mode still draws random numbers: '{drawn[0]}' ({len(drawn)} in all) does, in a way that is not "
            "known as dropout. If it should be off: rc.from_torch(module), or a file that was exported in eval mode",
            ModelWarning,
            stacklevel=3,
        )
    return test


def evaluation_passes(program: Program, outputs: Sequence[str] = ()) -> list[Pass]:
    """The passes that make the forward pass of a trained program its evaluation; `outputs`: what is computed."""
    passes: list[Pass] = [ForTest(tuple(outputs))]
    if program.divided:
        passes.append(DivideForward(tuple(axis for axis, _ in axes_of(program.mesh))))
    if (how := program.division) is not None:  # a rank has parts of parameters: it gathers them
        passes.append(GatherParameters(how.axis, how.ranks, how.rank, how.parts, names=tuple(program.sharded)))
    if program.pipe is not None:
        passes.append(OwnForward(program.pipe))
    return passes


def forward_at(program: Program, batch: int | None, dims: Mapping[str, int]) -> Program:
    """The forward pass of a program at another batch (None: the same) and sizes of dimensions, with its own arrays.

    UsageError where it cannot be made.
    """
    if batch is not None and (isinstance(batch, bool) or not isinstance(batch, (int, np.integer)) or batch < 1):
        raise UsageError(f"batch must be a whole number of at least 1, not {batch!r}")
    if program.again is None:
        raise UsageError(
            f"program '{program.block.name}' is fixed at batch {program.block.batch}: it was not loaded from a model, "
            "or operators were appended to it by hand. Load the model again at the other batch or dimensions, or "
            f"evaluate batches of {program.block.batch}"
        )
    there = sizes_of(program)
    program.again.check(checked_dims(dims))
    wanted = program.forward_block.batch if batch is None else int(batch)
    return program.again(wanted, {**there, **dims})


def checked_dims(dims: Mapping[str, int]) -> Mapping[str, int]:
    """Sizes by dimension.  UsageError for what are none."""
    for name, size in expect("dims", dims, Mapping, "sizes by dimension, such as {'sequence': 64}").items():
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
            raise UsageError(f"dims: '{name}' must be a whole number of at least 1, not {size!r}")
    return dims


def sizes_of(program: Program, arrays: Mapping[str, Any] | None = None) -> dict[str, int]:
    """The sizes of a program's open dimensions besides the batch, by name; `arrays`: as they are in a feed."""
    if program.again is None:
        return {}
    shapes = {v.name: v.shape for v in program.forward_block.inputs}
    sizes: dict[str, int] = {}
    for name, places in program.again.dims.items():
        for where, axis in places:
            shape = np.shape(arrays[where]) if arrays is not None and where in arrays else shapes.get(where, ())
            if name not in sizes and len(shape) == len(shapes.get(where, ())) and axis < len(shape):
                sizes[name] = int(shape[axis])
    return sizes


def share_arrays(other: Program, program: Program) -> None:
    """Gives a program of another batch or other dimensions the arrays of the training program, by name.

    Tables that the importer computed for these sizes have other shapes or contents: they get names of their own.
    """
    loaded = {t.name for t in program.source.graph.initializer} if program.source is not None else None
    changing = {
        v.name for b in (program.block, other.block) for op in b.operators if op.op.updates for v in op.writes()
    }
    names: dict[str, str] = {}
    before = set(dict.keys(program.data))
    for v in (*other.block.parameters, *other.block.buffers, *other.block.state):
        array = other.data[v.name]
        there = dict.get(program.data, v.name)
        table = loaded is not None and v in other.block.buffers and v.name not in loaded and v.name not in changing
        if there is None or (there.shape, there.dtype) != (v.shape, v.type.numpy) or (table and _differ(there, array)):
            names[v.name] = _free_name(program, f"{v.name}@batch{other.block.batch}", array)
            program.data.setdefault(names[v.name], array)
    if names:
        other.block = _renamed(other.block, names)
        other.aliases.update({old: new for old, new in names.items() if old not in other.aliases})
    other.tables = tuple(n for n in names.values() if n not in before)
    other.data = program.data


def _differ(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether arrays have other shapes, types or bits."""
    return (a.shape, a.dtype) != (b.shape, b.dtype) or a.tobytes() != b.tobytes()


def _free_name(program: Program, wish: str, own: np.ndarray) -> str:
    """`wish`, or `wish_1`, `wish_2`, ... if the program has another array of that name."""
    wishes = itertools.chain([wish], (f"{wish}_{i}" for i in itertools.count(1)))
    return next(n for n in wishes if (there := dict.get(program.data, n)) is None or not _differ(there, own))


def _renamed(block: Block, names: Mapping[str, str]) -> Block:
    def named(values: Sequence[Value]) -> tuple[Value, ...]:
        return tuple(v.renamed(names.get(v.name, v.name)) for v in values)

    return block.with_operators(
        [op.renamed(names) for op in block.operators],
        parameters=named(block.parameters),
        buffers=named(block.buffers),
        state=named(block.state),
    )


def evaluate(
    program: Program,
    feed: Mapping[str, Any],
    fetch_list: Sequence[str | Variable] | None = None,
    place: Any = None,
    *,
    averaged: bool = False,
) -> list[np.ndarray]:
    """`Program.evaluate`."""
    from ..runtime import Executor

    if averaged:
        with applied(program):
            return evaluate(program, feed, fetch_list, place)

    if program.broken:
        raise JobError(f"program '{program.block.name}' is partly updated: {program.broken}; load a complete state")
    if not isinstance(feed, Mapping):
        raise UsageError(f"feed must be a dictionary of arrays by input, not {type(feed).__name__}")
    wanted = None if fetch_list is None else as_names(fetch_list, "fetch_list")
    place = as_place(place)
    source = program.forward_block
    key = (
        None if wanted is None else tuple(map(_text, wanted)),
        frozenset(feed),
        fed_batch(program, feed),
        str(place),
        tuple(sizes_of(program, feed).items()),
    )
    if program.evaluations is None:
        program.evaluations = Recent(EVALUATIONS_BYTES, lambda kept: kept.nbytes)
    evaluation = program.evaluations.get(key)
    if evaluation is None or evaluation.source is not source:
        names = _default_fetches(program, feed) if wanted is None else tuple(_name(program, f) for f in wanted)
        known = {v.name for v in source.inputs}
        unknown = [n for n in feed if n not in known]
        if unknown:
            raise UsageError(f"the program has no input '{unknown[0]}'{nearest(unknown[0], known)}")
        must_have_ranges(program)
        evaluation = _Evaluation(source, for_test(program, key[2], names, dict(key[4])), names, Executor(place))
        program.evaluations.put(key, evaluation)
    test, names, executor = evaluation.made, evaluation.names, evaluation.executor
    inputs = {v.name for v in test.block.inputs}
    return executor.run(test, {n: a for n, a in feed.items() if n in inputs}, list(names))


@dataclasses.dataclass(frozen=True)
class _Evaluation:
    """The evaluation of `source`, a forward pass, at some sizes, and what runs it."""

    source: Block
    made: Program
    names: tuple[str, ...]
    executor: Any

    @property
    def nbytes(self) -> int:
        """Bytes besides the weights: arena and operators."""
        arena = memory_report(self.executor.planned(self.made, self.names)).arena
        return arena + OPERATOR_BYTES * len(self.made.block.operators)


def _default_fetches(program: Program, feed: Mapping[str, Any]) -> tuple[str, ...]:
    """The outputs that can be computed from what is fed."""
    forward = program.forward_block
    reach = {v.name for v in forward.inputs if v.name not in feed}
    for op in forward.operators:
        if any(v.name in reach for v in op.reads()):
            reach.update(v.name for v in op.writes())
    written = {v.name for op in forward.operators for v in op.writes()}
    fetches = tuple(n for n in forward.outputs if n in written and n not in reach)
    if not fetches:
        missing = ", ".join(v.name for v in forward.inputs if v.name not in feed)
        raise UsageError(f"no output can be computed: not fed are {missing}")
    return fetches


def fed_batch(program: Program, feed: Mapping[str, Any]) -> int | None:
    """The batch of what is fed; None for the program's own."""
    for v in program.forward_block.inputs:
        shape = np.shape(feed[v.name]) if v.name in feed else v.shape
        if len(shape) == len(v.shape) > 0 and shape[0] != v.shape[0] == program.forward_block.batch:
            return int(shape[0])
    return None


def _name(program: Program, wanted: str | Variable) -> str:
    """The name of a value of the forward pass."""
    name = _text(wanted)
    values = program.forward_block.values()
    name = name if name in values else program.aliases.get(name, name)
    if name not in values:
        raise UsageError(f"the forward pass of program '{program.block.name}' has no value '{name}'"
                         f"{nearest(name, values)}")  # fmt: skip
    return name


def _text(wanted: str | Variable) -> str:
    return wanted.name if isinstance(wanted, Variable) else wanted


# -- frozen parts -----------------------------------------------------------------------------------------------------


def freeze(program: Program, patterns: str | Sequence[str], *, eval: bool = False) -> Program:
    """`Program.freeze`."""
    must_be_untrained(program)
    wanted = Patterns(patterns)
    block = program.block
    parameters = {v.name for v in block.parameters}
    aliases = {other: n for other, n in program.aliases.items() if n in parameters}
    frozen = {n for n in parameters if wanted.fit(n)}.union(n for other, n in aliases.items() if wanted.fit(other))
    known = parameters.union(aliases)
    useless = wanted.useless(known)
    if useless is not None:
        raise UsageError(f"freeze: no parameter is called '{useless}'{nearest(useless, known)}")
    kept = tuple(v for v in block.parameters if v.name not in frozen)
    moved = tuple(v for v in block.parameters if v.name in frozen)
    block = block.with_operators(block.operators, parameters=kept, buffers=(*block.buffers, *moved))
    if eval:
        inside = _frozen_part(block, frozen)
        # ranges of what is rounded still follow the data: a frozen part may have seen none yet
        block = in_inference(block, lambda op: id(op) in inside and not running_ends(op))
    program.block = verify(block)
    program.tensors = [
        dataclasses.replace(t, trains=False, why="frozen") if t.name in frozen else t for t in program.tensors
    ]
    program.edited(program.again, "freeze", lambda made: freeze(made, patterns, eval=eval))
    return program


def _frozen_part(block: Block, frozen: set[str]) -> set[int]:
    """Identities of the operators before which nothing trains, and which read frozen parameters or are followed by
    operators that do."""
    trained = {v.name for v in block.parameters}
    forward = [op for op in block.operators if op.role is Role.FORWARD]
    still: list[Operator] = []
    for op in forward:
        if any(v.name in trained for v in op.reads()):
            trained.update(v.name for v in op.writes())
        else:
            still.append(op)
    indices: set[int] = set()
    leads: set[str] = set()  # values from which a frozen parameter's reader is reached
    for op in reversed(still):
        if any(v.name in frozen for v in op.reads()) or any(v.name in leads for v in op.writes()):
            indices.add(id(op))
            leads.update(v.name for v in op.reads())
    return indices
