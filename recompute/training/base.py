"""Base class of optimizers: backward pass, optimizer state, updates as operators."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from ..boundary import as_function
from ..errors import UsageError, nearest
from ..language.builder import Builder
from ..language.ir import Operator, Role, Value
from ..language.program import Program, Variable
from ..language.types import TensorType
from ..ops.loss.scale import InverseIfFinite
from ..ops.optimizer.base import Update
from ..ops.optimizer.updates import Increment
from .groups import Group, assigned, called, groups_from
from .numbers import number
from .protocol import SpecOptimizer
from .spec import Spec

#: why some updates store nothing in fewer bits
_NORMS = "its update takes the norms of whole parameters; use SGD, Momentum, Adam or AdamW"


class Optimizer(SpecOptimizer):
    """Base class of the optimizers.

    `learning_rate`: a number, or a schedule of `recompute.lr` that the program itself evaluates at every step.
    `parameters`: names, globs or Variables of the parameters to train (default: all parameters of the program).
    `weight_decay`: L2 regularisation, added to the gradient as weight_decay·w (AdamW, Lamb and Lars: see there).
    `apply_decay_param_fun`: name → whether that parameter decays (default: all do).
    `grad_clip`: a `recompute.clip` object.
    `groups`: hyper-parameters of their own for some parameters, as PyTorch's param_groups: dicts with `match` (names,
    globs or Variables) and what differs, such as `{"match": "head.*", "lr": 1e-3, "weight_decay": 0}`.

    A subclass defines `update` (the operator) and `slots` (names of its state, one array of zeros per parameter each).
    """

    #: names of the state arrays of a parameter: NAME.slot; kept in f32 for f16 and bf16 parameters
    slots: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        learning_rate: Any = 0.001,
        *,
        parameters: Sequence[str | Variable] | None = None,
        weight_decay: float | None = None,
        apply_decay_param_fun: Callable[[str], bool] | None = None,
        grad_clip: Any = None,
        groups: Sequence[Mapping[str, Any]] = (),
        **unknown: Any,
    ) -> None:
        for name in unknown:
            raise UsageError(f"{type(self).__name__} has no option '{name}'{called(name, type(self))}")
        if not hasattr(learning_rate, "build"):
            learning_rate = number("learning_rate", learning_rate)
        self._rate = learning_rate
        self._parameters = parameters
        self.weight_decay = 0.0 if weight_decay is None else number("weight_decay", weight_decay)
        decays = apply_decay_param_fun or (lambda name: True)
        self._decays = as_function(decays, "apply_decay_param_fun", "a parameter's name")
        if grad_clip is not None and not hasattr(grad_clip, "scaled"):
            raise UsageError(f"grad_clip must be a ClipGradBy... object of recompute.clip, not {grad_clip!r}")
        self._clip = grad_clip
        self._groups = groups_from(type(self), groups)
        self._program: Program | None = None
        self._state: list[str] = []
        self._named: dict[str, str] = {}
        self._unscale: Value | None = None

    # -- defined by subclasses ------------------------------------------------------------------------------------

    def update(self, weight_decay: float) -> Update:
        """The update operator for a parameter with this weight decay."""
        raise NotImplementedError

    def slots_used(self) -> Mapping[str, bool]:
        """Slot → whether this optimizer's options use it."""
        return dict.fromkeys(self.slots, True)

    def initial(self, slot: str) -> float:
        """The initial value of all elements of a slot."""
        return 0.0

    # -- the training step ----------------------------------------------------------------------------------------

    @property
    def spec(self) -> Spec:
        """This optimizer alone."""
        return Spec(self)

    def add_updates(
        self,
        program: Program,
        pairs: Sequence[tuple[Value, Value]],
        scale: Value | None = None,
        *,
        stochastic: bool = False,
    ) -> None:
        """Adds clipping and the updates of (parameter, gradient) pairs to a program, and declares their state.

        `scale`: by which the gradients were multiplied (f32[]): they are divided by it first, and a step whose
        gradients are not finite is skipped.  `stochastic`: bfloat16 parameters and their state are rounded
        stochastically.  UsageError for state of 8 bits, or stochastic rounding, where ranks have parts of parameters.
        """
        _check_pairs(program, pairs)
        members = assigned(self._groups, program, [p.name for p, _ in pairs])
        settings = {group: group.applied(self) for group in self._groups}
        self._program = program
        self._state, self._named = [], {}
        step = self._declare_own("step", np.zeros((), np.int64))
        b = program.builder(Role.OPTIMIZE, "optimizer")
        rates: dict[Group | None, Value] = {None: self._learning_rate(b, step, self._rate, "learning_rate")}
        for group in self._groups:
            name = f"learning_rate_{group.index}"
            rates[group] = rates[None] if group.rate is None else self._learning_rate(b, step, group.rate, name)
        values = list(pairs)
        factor = None if scale is None else b.emit(InverseIfFinite(), scale, *(g for _, g in values), name="unscale")
        if factor is not None and self._clip is not None:  # clipping sees the gradients without weight decay
            values, factor = [(p, _times(b, g, factor)) for p, g in values], b.Sign(factor)
        common = None if self._clip is None else self._clip.begin(b, [g for _, g in values])
        kinds = [settings[members[p.name]] if p.name in members else self for p, _ in values]
        ops = [
            kind.stored(kind.update(kind.weight_decay if self._decays(p.name) else 0.0), program, p, stochastic)
            for (p, _), kind in zip(values, kinds, strict=True)
        ]
        slots = self._declare_slots([p for p, _ in values], kinds, ops)
        for (p, g), kind, op in zip(values, kinds, ops, strict=True):
            clipped = g if self._clip is None else self._clip.scaled(b, g, common)
            state = list(itertools.islice(slots, len(kind.slots_used())))
            _emit_update(b, op, [p, clipped], state, rates[members.get(p.name)], step, factor)
        program.append(b)
        self._unscale = factor

    def count_step(self, program: Program) -> None:
        """Adds the increment of the step counter, unless the step is skipped."""
        b = program.builder(Role.OPTIMIZE)
        b.emit(Increment(), program[self._named["step"]].value, *([] if self._unscale is None else [self._unscale]))
        program.append(b)

    @property
    def parameters(self) -> Sequence[str | Variable] | None:
        """Names, globs or Variables of the parameters to train; None for all."""
        return self._parameters

    @property
    def clips(self) -> bool:
        """Whether gradients are clipped."""
        return self._clip is not None

    def check(self, program: Program, names: Sequence[str]) -> None:
        """UsageError for groups that do not fit the parameters `names`, which train."""
        assigned(self._groups, program, names)

    def _learning_rate(self, b: Builder, step: Value, rate: Any, name: str) -> Value:
        if hasattr(rate, "build"):
            return rate.build(b, step, name=name)
        return self._declare_own(name, np.array(rate, np.float32))

    def _declare_own(self, wish: str, array: np.ndarray) -> Value:
        """Declares state under this name, or under a similar one if the model has a value of that name."""
        assert self._program is not None
        self._named[wish] = self._program.state_name(wish, TensorType.of(array))
        return self._declare(self._named[wish], array)

    def _declare(self, name: str, array: np.ndarray) -> Value:
        assert self._program is not None
        self._state.append(name)
        return self._program.declare("state", name, array)

    def stored(self, op: Update, program: Program, p: Value, stochastic: bool) -> Update:
        """The update of a parameter as it stores the parameter and its state."""
        stochastic = stochastic and p.dtype == "bf16"
        if not stochastic:
            return op
        if not op.each_alone:
            raise UsageError(f"bf16-pure and {type(self).__name__} are not combined: {_NORMS}")
        must_have_whole(program, "bf16-pure", instead="bf16")
        return dataclasses.replace(op, stochastic=True, seed=_seed(p.name))

    def _declare_slots(
        self, parameters: Sequence[Value], kinds: Sequence[Optimizer], ops: Sequence[Update]
    ) -> Iterator[Value | None]:
        """Declares the state of each parameter in turn, one array for each slot; None for unused slots.

        `kinds`: for each parameter, the optimizer with its hyper-parameters; `ops`: its update.
        """
        assert self._program is not None
        used = [(p, kind, kind.slots_used(), op) for p, kind, op in zip(parameters, kinds, ops, strict=True)]
        arrays = [
            (f"{p.name}.{slot}", _filled(op.state_type(p.type), kind.initial(slot)))
            for p, kind, slots, op in used
            for slot, wanted in slots.items()
            if wanted
        ]
        self._state += [name for name, _ in arrays]
        declared = iter(self._program.declare_all("state", arrays))
        return (next(declared) if wanted else None for _, _, slots, _ in used for wanted in slots.values())

    # -- state ----------------------------------------------------------------------------------------------------

    def get_lr(self, group: int | None = None) -> float:
        """The learning rate of the next step; with `group`, that of `groups[group]`."""
        rate, name = self._rate_of(group)
        if hasattr(rate, "build"):
            step = 0 if self._program is None else int(self._program.data[self._named["step"]])
            return rate.value(step)
        return float(rate if self._program is None else self._program.data[self._named[name]])

    def set_lr(self, value: float, group: int | None = None) -> None:
        """Sets the learning rate from the next step on; with `group`, that of `groups[group]`.

        Groups with a learning rate of their own keep it when the optimizer's is set.  UsageError if it is a schedule,
        or if the group has none of its own.
        """
        rate, name = self._rate_of(group)
        if hasattr(rate, "build"):
            raise UsageError(f"the learning rate cannot be set: it follows the schedule {rate!r}")
        value = number("learning_rate", value)
        if group is None:
            self._rate = value
        elif name == "learning_rate":
            raise UsageError(f"groups[{group}] has no learning rate of its own: give it one ('lr') before minimize")
        else:
            changed = dataclasses.replace(self._groups[group], rate=value)
            self._groups = (*self._groups[:group], changed, *self._groups[group + 1 :])
        if self._program is not None:
            self._program.data[self._named[name]][...] = value

    def _rate_of(self, group: int | None) -> tuple[Any, str]:
        """The learning rate of a group, or the optimizer's, and the name of its state."""
        if group is not None and not 0 <= group < len(self._groups):
            raise UsageError(f"there is no groups[{group}]: this optimizer has {len(self._groups)} groups")
        rate = None if group is None else self._groups[group].rate
        return (self._rate, "learning_rate") if rate is None else (rate, f"learning_rate_{group}")

    def state_dict(self) -> dict[str, np.ndarray]:
        """A copy of the optimizer's state by name: step counter, learning rate, moments."""
        program = self._minimized()
        return {name: np.array(program.data[name]) for name in self._state}

    def set_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the state to what `state_dict` returned.  UsageError for names or shapes that do not fit."""
        program = self._minimized()
        names = set(self._state)
        missing = [n for n in self._state if n not in state]
        unknown = [n for n in state if n not in names]
        if missing or unknown:
            what = f"lacks '{missing[0]}'" if missing else f"has '{unknown[0]}'{nearest(unknown[0], self._state)}"
            raise UsageError(f"this is not the state of this {type(self).__name__}: it {what}")
        arrays = {n: np.asarray(state[n]) for n in self._state}
        for name, array in arrays.items():
            if array.shape != program.data[name].shape:
                raise UsageError(f"'{name}' has shape {list(program.data[name].shape)}, not {list(array.shape)}")
        for name, array in arrays.items():
            if not program.data[name].flags.writeable:  # the initial contents, which no step has changed yet
                program.data[name] = np.array(program.data[name])
            program.data[name][...] = array

    def _minimized(self) -> Program:
        if self._program is None:
            raise UsageError(f"this {type(self).__name__} has no state yet: call minimize(loss) first")
        return self._program


def _filled(t: TensorType, value: float) -> np.ndarray:
    """An array filled with one number; it takes no memory until the executor makes it writable."""
    return np.broadcast_to(np.array(value, t.numpy), t.shape)


def _seed(name: str) -> int:
    """The seed of the random bits by which a parameter of this name is rounded: the same in every process."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")


def must_have_whole(program: Program, what: str, *, instead: str) -> None:
    """UsageError where ranks have parts of parameters."""
    if program.sharded or program.divided:
        how = "zero" if program.sharded else f"mesh {program.mesh}"
        raise UsageError(
            f"{what} and {how} are not combined yet: its bits would depend on how ranks divide a parameter; "
            f"give {instead}, or a mesh of data parallelism alone"
        )


def _emit_update(
    b: Builder,
    op: Update,
    tensors: list[Value],
    slots: list[Value | None],
    rate: Value,
    step: Value,
    unscale: Value | None,
) -> None:
    """Emits an update with its inputs at the operator's `updates`, `rate_at`, `counter_at` and `unscale_at`."""
    inputs: dict[int, Value | None] = dict(enumerate(tensors))
    inputs.update(zip(op.updates[1:], slots, strict=True))
    inputs[op.rate_at] = rate
    if op.counter_at is not None:
        inputs[op.counter_at] = step
    inputs[op.unscale_at] = unscale
    operands = [inputs.get(i) for i in range(max(i for i, v in inputs.items() if v is not None) + 1)]
    outputs = [inputs[i] for i in op.updates]
    while outputs[-1] is None:
        outputs.pop()
    b.operators.append(Operator(op, tuple(operands), tuple(outputs), b.role))


def _times(b: Builder, g: Value, factor: Value) -> Value:
    return b.Mul(g, factor if g.dtype == factor.dtype else b.Cast(factor, to=g.dtype))


def _check_pairs(program: Program, pairs: Sequence[tuple[Value, Value]]) -> None:
    """UsageError unless each parameter is given once, with a gradient of its shape."""
    parameters = set(program.block.parameters)
    seen: set[str] = set()
    for p, g in pairs:
        if p not in parameters:
            raise UsageError(f"'{p.name}' is not a parameter of the program: only parameters are updated")
        if p.name in seen:
            raise UsageError(f"apply_gradients: '{p.name}' is given twice")
        if p.shape != g.shape or not g.type.is_float:
            raise UsageError(f"'{p.name}' is {p.type}, but its gradient '{g.name}' is {g.type}")
        seen.add(p.name)
