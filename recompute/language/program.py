"""Program and Variable, the user's handles, as in Paddle.  A program holds an immutable block."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UsageError, expect, nearest
from ..support.notebook import Shown
from .arrays import Arrays
from .builder import Builder
from .ir import Block, Operator, Role, Value
from .text import show
from .types import TensorType

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True)
class Variable:
    """A value of a program, as the user's handle."""

    program: Program
    value: Value

    @property
    def name(self) -> str:
        """Its name in the program."""
        return self.value.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions."""
        return self.value.shape

    @property
    def dtype(self) -> str:
        """Short name of the element type (`f32`, `i64`, ...)."""
        return self.value.dtype

    def __repr__(self) -> str:
        return f"<Variable {self.name}: {self.value.type}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Variable) and self.program is other.program and self.value == other.value

    def __hash__(self) -> int:
        return hash((id(self.program), self.value))


@dataclass(frozen=True)
class Compiled:
    """A step compiled for a target (`passes.Target`): `block` with kernels, frees and addresses, `logical` before.

    `budget`: the limit of its peak in bytes; `refit`: plans it for another target by the same request.
    """

    block: Block
    logical: Block
    target: Any
    budget: int | None = None
    refit: Callable[[Any], Compiled] | None = None


@dataclass(frozen=True)
class Edit:
    """A change of a forward pass since it was loaded: its name, and what makes it in a program of other sizes."""

    name: str
    make: Callable[[Program], Any]


@dataclass(frozen=True)
class Again:
    """Makes a forward pass again, at another batch or other dimensions: loads its model, and makes the same edits.

    `load`: of a batch (None: the program's own) and sizes of `dims`.  `files`: those that the model's contents are in,
    which are mapped for as long as this lives.  `dims`: where each open dimension besides the batch stands, as (input,
    axis), by its name in the model (`INPUT.AXIS` where it has none).
    """

    load: Callable[[int | None, Mapping[str, int]], Program]
    edits: tuple[Edit, ...] = ()
    files: Sequence[object] = ()
    dims: Mapping[str, Sequence[tuple[str, int]]] = field(default_factory=dict)

    def __call__(self, batch: int | None = None, dims: Mapping[str, int] = MappingProxyType({})) -> Program:
        """The program at a batch (None: its own) and sizes of dimensions, with arrays of its own."""
        self.check(dims)
        program = self.load(batch, dims)
        for edit in self.edits:
            edit.make(program)
        return program

    def check(self, dims: Iterable[str]) -> None:
        """UsageError for a name that is no open dimension."""
        for name in dims:
            if name not in self.dims:
                has = f"open are: {', '.join(self.dims)}" if self.dims else "none but the batch is open"
                raise UsageError(f"the model has no open dimension '{name}'{nearest(name, self.dims)}; {has}")


#: functions that return the module with `for_test`, `evaluate`, `freeze` and so on, set by the package root
_MODES: list[Callable[[], Any]] = []


def modes_from(source: Callable[[], Any]) -> None:
    """Sets the function that returns the implementation of `for_test`, `evaluate`, `freeze` and so on."""
    _MODES.append(source)


def _modes() -> Any:
    return _MODES[-1]()


class Program(Shown):
    """A static program: its block, and the contents of its persistent values.

    `data` maps the names of parameters, buffers and state to arrays; the executor updates them in place.
    """

    #: the forward pass, from before the backward pass was added (None: nothing was added yet)
    forward: Block | None = None
    #: how it became a training step (`recompute.training.resized.StepAgain`)
    step_again: Any = None
    #: arrays that only this program has of those that it shares with one of other sizes
    tables: tuple[str, ...] = ()
    #: the loss that is trained
    loss = ""
    #: whether `minimize` makes attention one operator (see `rc.fuse_attention`)
    fuse_attention = True
    #: whether training may make a large head one operator (passes/loss/find_head.py)
    fuse_head = True
    #: values that every step fetches, for which a head has to make its logits
    fetched: tuple[str, ...] = ()
    #: the slices in which an optimizer has the whole step run, gradients being added up over them
    slices: tuple[str, ...] = ()
    #: the parameters of which this rank has a part, with the types of the whole ones (ZeRO)
    sharded: Mapping[str, TensorType] = MappingProxyType({})
    #: the ranks that train it together (`recompute.Mesh`); None: it communicates with no other
    mesh: Any = None
    #: how they are divided (`passes.sharding.zero.Sharded`)
    division: Any = None
    #: the first stage of a pipeline that has each parameter; {} without one
    first_stages: Mapping[str, int] = MappingProxyType({})
    #: this rank's place in a pipeline, where it is evaluated in one (`passes.pipelines.schedules.Pipe`)
    pipe: Any = None
    #: the values that axes of the mesh divide, as the user wishes (`recompute.training.shardings.Sharding`)
    shardings: Mapping[str, Any] = MappingProxyType({})
    #: the parameters and state that they do divide (`recompute.training.shardings.DividedValue`)
    divided: Mapping[str, Any] = MappingProxyType({})
    #: its origin, as ranks compare it (`recompute.training.origin.Origin`)
    origin: Any = None
    #: the block as it was loaded from `source`
    imported: Block | None = None
    #: the recomputation plan that was applied last
    plan: Any = None
    #: figures of that plan, if a planner made it (`recompute.planning.PlanFigures`)
    planned: Any = None
    #: why parameters and state are only partly updated, after a failed step; "" if they are consistent.  Executors
    #: refuse to continue until a state is loaded
    broken = ""
    #: whether parameters hold their averages for now (`recompute.training.averages`): no step may train them
    averaged = False
    #: the compiled block; valid while one of its two blocks is the program's
    compiled: Compiled | None = None

    def __init__(
        self,
        block: Block | None = None,
        data: dict[str, np.ndarray] | None = None,
        *,
        source: onnx.ModelProto | None = None,
        source_path: str | None = None,
    ) -> None:
        self.block = block or Block()
        self.data = data if isinstance(data, Arrays) else Arrays(data or {})
        self.source = source
        self.source_path = source_path
        #: (parameter, gradient) pairs of the last backward pass, by name
        self.gradients: list[tuple[str, str]] = []
        #: further names of values (outputs of Identity and of operators without effect)
        self.aliases: dict[str, str] = {}
        #: floating-point tensors of the model, whether each is trained, and why (`recompute.importer.trained.Trained`)
        self.tensors: list[Any] = []
        #: the options by which it was loaded, input shapes and batch aside
        self.loaded: dict[str, Any] = {}
        #: makes the same forward pass at another batch, by its edits (None: operators were appended by hand)
        self.again: Again | None = None
        #: the cache of `evaluate`
        self.evaluations: Any = None
        #: held by the thread that runs a step of this program, or binds it
        self.lock = threading.Lock()
        self._names: tuple[Block, dict[str, Value]] | None = None
        self._updates: tuple[Block, bool] | None = None
        self._known: tuple[Block, dict[str, Value]] | None = None

    @property
    def logical(self) -> Block:
        """The block before lowering and memory planning; `block` itself if it was not lowered."""
        compiled = self.compiled
        return compiled.logical if compiled is not None and compiled.block is self.block else self.block

    @property
    def forward_block(self) -> Block:
        """The block before the backward pass was added; of a step from a file, the whole block before lowering."""
        return self.logical if self.forward is None else self.forward

    @property
    def updates(self) -> bool:
        """Whether a run changes parameters, buffers or state."""
        if self._updates is None or self._updates[0] is not self.block:
            self._updates = self.block, any(op.op.updates for op in self.block.operators)
        return self._updates[1]

    def lower_to(self, compiled: Compiled) -> None:
        """Replaces the block by the compiled one."""
        self.block, self.compiled = compiled.block, compiled

    def __getitem__(self, name: str) -> Variable:
        values = self._values()
        if expect("a value's name", name, str, "a text") not in values:
            name = self.aliases.get(name, name)
        if name not in values and self.logical is not self.block:
            values = self.logical.values()
        if name not in values:
            raise UsageError(f"program '{self.block.name}' has no value '{name}'{nearest(name, values)}")
        return Variable(self, values[name])

    def __contains__(self, name: object) -> bool:
        return name in self._values() or name in self.aliases

    def edited(self, before: Again | None, name: str, make: Callable[[Program], Any]) -> None:
        """Notes an edit, which is made again at another batch; `before`: `again` until then."""
        self.again = None if before is None else replace(before, edits=(*before.edits, Edit(name, make)))

    def begin_training(self, loss: str) -> None:
        """Remembers the forward pass and its loss, before an optimizer rewrites the block."""
        if self.forward is None:
            self.forward, self.loss = self.block, loss

    def _values(self) -> dict[str, Value]:
        """The block's values, found once for each block."""
        if self._known is None or self._known[0] is not self.block:
            self._known = (self.block, self.block.values())
        return self._known[1]

    def _variables(self, values: Sequence[Value]) -> list[Variable]:
        return [Variable(self, v) for v in values]

    @property
    def inputs(self) -> list[Variable]:
        """The inputs, which must be fed."""
        return self._variables(self.block.inputs)

    @property
    def outputs(self) -> list[Variable]:
        """The outputs, which live to the end of a run."""
        values = self.block.values()
        return self._variables([values[n] for n in self.block.outputs])

    @property
    def parameters(self) -> list[Variable]:
        """The parameters, which are trained."""
        return self._variables(self.block.parameters)

    @property
    def operators(self) -> tuple[Operator, ...]:
        """The operators in order of execution."""
        return self.block.operators

    def clone(self) -> Program:
        """An independent copy: same block, copied data."""
        other = Program(self.block, {k: v.copy() for k, v in self.data.items()}, source=self.source)
        other.gradients = list(self.gradients)
        other.plan, other.planned, other.compiled = self.plan, self.planned, self.compiled
        other.sharded, other.divided, other.division = self.sharded, self.divided, self.division
        other.first_stages, other.pipe = self.first_stages, self.pipe
        other.slices, other.fetched, other.step_again = self.slices, self.fetched, self.step_again
        other.take_origin(self)
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> Program:
        return self.clone()

    def take_origin(self, other: Program) -> None:
        """Takes over where another program of the same model comes from: its forward pass, names and reasons."""
        self.aliases, self.tensors, self.source_path = dict(other.aliases), list(other.tensors), other.source_path
        self.forward, self.imported, self.again, self.loss = other.forward, other.imported, other.again, other.loss
        self.loaded, self.fuse_attention = dict(other.loaded), other.fuse_attention
        self.fuse_head = other.fuse_head
        self.mesh, self.shardings = other.mesh, other.shardings

    # -- training and evaluation ----------------------------------------------------------------------------------

    def for_test(
        self,
        batch: int | None = None,
        outputs: Sequence[str | Variable] | None = None,
        dims: Mapping[str, int] | None = None,
    ) -> Program:
        """The forward pass in inference mode, with this program's own arrays: what trains here is evaluated there.

        Dropout is off and batch normalisation uses its running statistics, which do not change.  `outputs`: what is
        computed (default: the outputs of the forward pass); inputs that nothing reads are dropped.  `batch`: another
        batch, for models whose batch is dynamic; `dims`: other sizes of dynamic dimensions, by their names in the
        model.  UsageError where that cannot be made.  (Paddle's `clone(for_test=True)`.)
        """
        return _modes().for_test(self, batch, outputs, dims)

    def evaluate(
        self,
        feed: Mapping[str, Any],
        fetch_list: Sequence[str | Variable] | None = None,
        place: Any = None,
        *,
        averaged: bool = False,
    ) -> list[np.ndarray]:
        """Runs `for_test` on what is fed, at the batch and sizes that are fed; returns the fetched values in order.

        `fetch_list` (default: all outputs that the fed inputs suffice for); labels need not be fed for scores.
        `place`: where it runs (None: the CPU).  Each batch and length is compiled once.  `averaged`: with the moving
        averages of the weights (`rc.ExponentialMovingAverage`); for many batches, `with applied(program)` exchanges
        them once.
        """
        return _modes().evaluate(self, feed, fetch_list, place, averaged=averaged)

    def at_fed(self, feed: Mapping[str, Any]) -> Any:
        """The sizes (batch, dimensions) that are fed, where they are others than this program's; else None."""
        return _modes().for_feed(self, feed)

    def at(self, batch: int | None = None, dims: Mapping[str, int] = MappingProxyType({})) -> Program:
        """The same program at another batch and other sizes of its model's open dimensions, with the same arrays.

        A training step trains the same weights with the same state.  UsageError where it cannot be made.
        """
        return _modes().at_sizes(self, batch, dims)

    def digests(self, mesh: Any = None, rank: int = 0) -> dict[str, str]:
        """Digests of parameters, buffers and state, by name and part, as ranks compare them.  Linear in their bytes.

        `mesh`, `rank`: where it runs, if it was written for ranks by hand (`Program.mesh` is None).
        """
        return _modes().values_to_compare(self, mesh, rank)

    def freeze(self, patterns: str | Sequence[str], *, eval: bool = False) -> Program:
        """Stops the training of parameters that names or globs match; returns the program.

        They get no gradients and no optimizer state.  `eval`: the part of the model before which nothing trains
        computes as in inference: dropout off, running statistics used and unchanged.  Before `minimize`; UsageError
        for a pattern that matches no parameter.
        """
        return _modes().freeze(self, patterns, eval=eval)

    def builder(self, role: Role = Role.FORWARD, prefix: str = "") -> Builder:
        """A builder; `append` adds its operators to the program."""
        return Builder.on(self.block, role=role, prefix=prefix)

    def append(self, b: Builder, *, outputs: Sequence[str] = (), inputs: Sequence[Value] = ()) -> None:
        """Adds the operators of a builder, and declares further inputs and outputs."""
        old = self.block
        if any(op.role in (Role.FORWARD, Role.LOSS) for op in b.operators):
            self.again = None
        self.block = old.with_operators(
            (*old.operators, *b.operators),
            inputs=(*old.inputs, *inputs),
            constants=(*old.constants, *b.constants),
            outputs=tuple(dict.fromkeys([*old.outputs, *outputs])),
        )

    def declare(self, kind: str, name: str, array: np.ndarray) -> Value:
        """Declares a parameter, buffer or state (`kind`: the block's field) with its contents.

        An existing one of the same type is used unchanged.
        """
        return self.declare_all(kind, [(name, array)])[0]

    def declare_all(self, kind: str, arrays: Iterable[tuple[str, np.ndarray]]) -> list[Value]:
        """`declare` for many values: the block is replaced only once."""
        names = self._declared()
        values: list[Value] = []
        added: dict[str, tuple[Value, np.ndarray]] = {}
        for name, array in arrays:
            value = Value(name, TensorType.of(array))
            entry = names.get(name)
            if entry is None:
                entry = added.setdefault(name, (value, array))[0]
            if entry != value:
                raise UsageError(f"'{name}' is declared already, as {entry.type}")
            values.append(value)
        if added:
            declared: dict[str, Any] = {kind: (*getattr(self.block, kind), *(v for v, _ in added.values()))}
            self.block = self.block.with_operators(self.block.operators, **declared)
            names.update((name, v) for name, (v, _) in added.items())
            self._names = (self.block, names)
            self.data.update((name, array) for name, (_, array) in added.items())
        return values

    def _declared(self) -> dict[str, Value]:
        """Declared values by name; cached between declarations, since an optimizer makes hundreds."""
        if self._names is None or self._names[0] is not self.block:
            self._names = (self.block, {v.name: v for v in self.block.declared()})
        return self._names[1]

    def state_name(self, wish: str, t: TensorType) -> str:
        """`wish`, or `wish_1`, `wish_2`, ... if the model already has a value of that name."""
        values = self.block.values()
        state = set(self.block.state)
        name, i = wish, 0
        while name in values and Value(name, t) not in state:
            i += 1
            name = f"{wish}_{i}"
        return name

    def __str__(self) -> str:
        return show(self.block)

    def __repr__(self) -> str:
        b = self.block
        return f"<Program {b.name}: {len(b.operators)} operators, {len(b.parameters)} parameters>"
