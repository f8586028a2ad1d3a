"""Program and Variable: the user's handles, in the manner of Paddle.  What a program holds is an immutable block."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..errors import UsageError, nearest
from .builder import Builder
from .ir import Block, Operator, Role, Value
from .text import show
from .types import TensorType

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True)
class Variable:
    """A value of a program, for the user."""

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


class Holder(Protocol):
    """Who has the newest contents of a program's arrays."""

    def claim(self, name: str) -> None:
        """Brings the host's array up to date; it may be written until the next step begins."""


class Arrays(dict[str, np.ndarray]):
    """Contents by name, on the host.

    While a device trains, its memory has the newest ones: an array is brought up to date when it is asked for, and
    what is written into it is given back before the next step.  Ask again after a step.
    """

    _holder: Holder | None = None

    def held_by(self, holder: Holder | None) -> None:
        """From now on `holder` has the newest contents."""
        if self._holder is not None and holder is not self._holder:
            for name in dict.keys(self):
                self._holder.claim(name)
        self._holder = holder

    def let_go(self, holder: Holder) -> None:
        """Nobody holds them any more, if `holder` did."""
        if self._holder is holder:
            self._holder = None

    def __getitem__(self, name: str) -> np.ndarray:
        if self._holder is not None:
            self._holder.claim(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """The array, or `default`."""
        if name not in self:
            return default
        return self[name]  # not super().get: see __getitem__

    def __iter__(self) -> Iterator[str]:  # also keeps dict(arrays) from reading past __getitem__
        return super().__iter__()

    def values(self) -> Any:
        """All arrays."""
        return [self[name] for name in self]

    def items(self) -> Any:
        """All names with their arrays."""
        return [(name, self[name]) for name in self]

    def copy(self) -> Arrays:
        """The same arrays; nobody holds them."""
        return Arrays(self.items())


@dataclass(frozen=True)
class Compiled:
    """A step compiled for a target (`passes.Target`): `block` with kernels, frees and addresses, `logical` before.

    `budget`: the bytes that it must not exceed; `refit`: plans it for another target within what was asked for.
    """

    block: Block
    logical: Block
    target: Any
    budget: int | None = None
    refit: Callable[[Any], Compiled] | None = None


class Program:
    """A static program: its block, and the contents of what lives across steps.

    `data` maps the names of parameters, buffers and state to arrays; the executor updates them in place.
    """

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
        #: names that stand for other values (outputs of Identity and of operators that do nothing)
        self.aliases: dict[str, str] = {}
        #: floating-point tensors of the model, whether each is trained, and why (`recompute.importer.trained.Trained`)
        self.tensors: list[Any] = []
        #: what recomputation did: the plan that was applied last
        self.plan: Any = None
        #: figures of that plan, where a planner made it (`recompute.planning.PlanFigures`)
        self.planned: Any = None
        #: why parameters and state are neither those before nor those after a step; "" while they are whole.  Executors
        #: refuse to go on until a state is loaded
        self.broken = ""
        #: held by the thread that runs a step of this program, or binds it
        self.lock = threading.Lock()
        #: the block, or `block` itself, compiled; of use while one of its two blocks is the program's
        self.compiled: Compiled | None = None
        self._names: tuple[Block, dict[str, Value]] | None = None
        self._updates: tuple[Block, bool] | None = None
        self._known: tuple[Block, dict[str, Value]] | None = None

    @property
    def logical(self) -> Block:
        """The block before it was lowered and its memory planned; `block` itself where it was not."""
        made = self.compiled
        return made.logical if made is not None and made.block is self.block else self.block

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
        if name not in values:
            name = self.aliases.get(name, name)
        if name not in values and self.logical is not self.block:
            values = self.logical.values()
        if name not in values:
            raise UsageError(f"program '{self.block.name}' has no value '{name}'{nearest(name, values)}")
        return Variable(self, values[name])

    def __contains__(self, name: object) -> bool:
        return name in self._values() or name in self.aliases

    def _values(self) -> dict[str, Value]:
        """The block's values, found once for each block."""
        if self._known is None or self._known[0] is not self.block:
            self._known = (self.block, self.block.values())
        return self._known[1]

    def _variables(self, values: Sequence[Value]) -> list[Variable]:
        return [Variable(self, v) for v in values]

    @property
    def inputs(self) -> list[Variable]:
        """What must be fed."""
        return self._variables(self.block.inputs)

    @property
    def outputs(self) -> list[Variable]:
        """What survives to the end of a run."""
        values = self.block.values()
        return self._variables([values[n] for n in self.block.outputs])

    @property
    def parameters(self) -> list[Variable]:
        """What is trained."""
        return self._variables(self.block.parameters)

    @property
    def operators(self) -> tuple[Operator, ...]:
        """The operators in order of execution."""
        return self.block.operators

    def clone(self) -> Program:
        """An independent copy: same block, copied data."""
        other = Program(self.block, {k: v.copy() for k, v in self.data.items()}, source=self.source)
        other.aliases, other.tensors = dict(self.aliases), list(self.tensors)
        other.source_path, other.gradients = self.source_path, list(self.gradients)
        other.plan, other.planned, other.compiled = self.plan, self.planned, self.compiled
        return other

    def builder(self, role: Role = Role.FORWARD, prefix: str = "") -> Builder:
        """A builder for operators to be given to `append`."""
        return Builder.on(self.block, role=role, prefix=prefix)

    def append(self, b: Builder, *, outputs: Sequence[str] = (), inputs: Sequence[Value] = ()) -> None:
        """Adds what a builder collected, and declares further inputs and outputs."""
        old = self.block
        self.block = old.with_operators(
            (*old.operators, *b.operators),
            inputs=(*old.inputs, *inputs),
            constants=(*old.constants, *b.constants),
            outputs=tuple(dict.fromkeys([*old.outputs, *outputs])),
        )

    def declare(self, kind: str, name: str, array: np.ndarray) -> Value:
        """Declares a parameter, buffer or state (`kind`: the block's field) with its contents.

        One that is there already, with the same type, is taken over as it is.
        """
        return self.declare_all(kind, [(name, array)])[0]

    def declare_all(self, kind: str, arrays: Iterable[tuple[str, np.ndarray]]) -> list[Value]:
        """`declare` for many: the block is made anew once."""
        names = self._declared()
        values: list[Value] = []
        added: dict[str, tuple[Value, np.ndarray]] = {}
        for name, array in arrays:
            value = Value(name, TensorType.of(array))
            known = names.get(name)
            if known is None:
                known = added.setdefault(name, (value, array))[0]
            if known != value:
                raise UsageError(f"'{name}' is declared already, as {known.type}")
            values.append(value)
        if added:
            declared: dict[str, Any] = {kind: (*getattr(self.block, kind), *(v for v, _ in added.values()))}
            self.block = self.block.with_operators(self.block.operators, **declared)
            names.update((name, v) for name, (v, _) in added.items())
            self._names = (self.block, names)
            self.data.update((name, array) for name, (_, array) in added.items())
        return values

    def _declared(self) -> dict[str, Value]:
        """Declared values by name; kept from one declaration to the next, since an optimizer makes hundreds."""
        if self._names is None or self._names[0] is not self.block:
            self._names = (self.block, {v.name: v for v in self.block.declared()})
        return self._names[1]

    def state_name(self, wish: str, t: TensorType) -> str:
        """`wish`, or `wish_1`, `wish_2`, ... where the model has another value of that name already."""
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
