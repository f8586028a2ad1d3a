"""Base class of optimizers: backward pass, optimizer state, updates as operators."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from ..boundary import as_function, as_program, as_texts
from ..errors import UsageError, expect, nearest
from ..language.builder import Builder
from ..language.ir import Block, Operator, Role, Value
from ..language.program import Program, Variable
from ..language.types import DTYPES, TensorType
from ..language.verify import verify
from ..ops.optimizer.base import Update, work_dtype
from ..ops.optimizer.updates import Increment
from ..passes.attention.find_attention import find_attention
from ..passes.cleanup.eager_updates import EagerUpdates
from ..passes.gradient.autodiff import differentiate
from ..passes.loss.find_head import FindHead
from ..passes.patterns.find_gates import FindGates
from ..passes.patterns.find_norms import FindNorms
from .groups import Group, assigned, called, groups_from
from .protocol import AnyOptimizer, ParamsGrads


class Optimizer(AnyOptimizer):
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

    def backward(
        self,
        loss: Variable,
        startup_program: Program | None = None,
        parameter_list: Sequence[str | Variable] | None = None,
        no_grad_set: Iterable[str | Variable] | None = None,
        callbacks: Sequence[Callable[[Any, dict], None]] | None = None,
    ) -> ParamsGrads:
        """Adds the backward pass of `loss` to its program; returns (parameter, gradient) pairs.

        `loss`: one floating-point number.  `startup_program` is accepted for compatibility with Paddle.  Each of
        `callbacks` is called as `callback(block, {"operator": op})` for every backward operator, in order.
        A gradient is freed after its last use; it can be fetched by its name.
        """
        program = program_of(loss)
        must_be_untrained(program)
        wanted = parameter_list if parameter_list is not None else self._parameters
        names = names_of(program, () if wanted is None else wanted, "parameter_list")
        no_grad = names_of(program, () if no_grad_set is None else no_grad_set, "no_grad_set")
        begin_training(program, loss.name, no_grad)
        fuse_large_head(program, loss.name)
        before = len(program.operators)
        block, pairs = differentiate(program.block, loss.name, names, no_grad)
        if not pairs:
            raise UsageError(f"the loss '{loss.name}' depends on no parameter that is trained")
        assigned(self._groups, program, [p.name for p, _ in pairs])
        outputs = tuple(dict.fromkeys([*block.outputs, loss.name]))
        program.block = verify(block.with_operators(block.operators, outputs=outputs))
        program.gradients = [(p.name, g.name) for p, g in pairs]
        for callback in expect("callbacks", callbacks or (), Iterable, "a list of functions"):
            as_function(callback, "a callback", "a block and an operator")
            for op in program.operators[before:]:
                callback(program.block, {"operator": op})
        return [(Variable(program, p), Variable(program, g)) for p, g in pairs]

    def apply_gradients(
        self,
        params_grads: Sequence[tuple[Variable, Variable]],
        *,
        unscale: Callable[[Builder, Sequence[Value]], Value] | None = None,
    ) -> list[Operator]:
        """Adds clipping and updates to the program, and the step counter's increment; returns these operators.

        `unscale` emits the factor (f32[]) by which all gradients are multiplied first; if it is 0, the step is skipped.
        """
        pairs = _pairs(params_grads)
        if unscale is not None:
            as_function(unscale, "unscale", "a builder and gradients")
        program = program_of(pairs[0][0])
        must_be_untrained(program)
        if any(v.program is not program for pair in pairs for v in pair):
            raise UsageError("apply_gradients: all parameters and gradients must belong to one program")
        _check_pairs(program, pairs)
        members = assigned(self._groups, program, [p.name for p, _ in pairs])
        own = {group: group.applied(self) for group in self._groups}
        self._program = program
        self._state, self._named = [], {}
        step = self._declare_own("step", np.zeros((), np.int64))
        b = program.builder(Role.OPTIMIZE, "optimizer")
        rates: dict[Group | None, Value] = {None: self._learning_rate(b, step, self._rate, "learning_rate")}
        for group in self._groups:
            name = f"learning_rate_{group.index}"
            rates[group] = rates[None] if group.rate is None else self._learning_rate(b, step, group.rate, name)
        values = [(p.value, g.value) for p, g in pairs]
        factor = None if unscale is None else unscale(b, [g for _, g in values])
        if factor is not None and self._clip is not None:  # clipping sees the gradients without weight decay
            values, factor = [(p, _times(b, g, factor)) for p, g in values], b.Sign(factor)
        common = None if self._clip is None else self._clip.begin(b, [g for _, g in values])
        kinds = [own[members[p.name]] if p.name in members else self for p, _ in values]
        slots = self._declare_slots([p for p, _ in values], kinds)
        for (p, g), kind in zip(values, kinds, strict=True):
            clipped = g if self._clip is None else self._clip.scaled(b, g, common)
            op = kind.update(kind.weight_decay if self._decays(p.name) else 0.0)
            state = list(itertools.islice(slots, len(kind.slots_used())))
            _emit_update(b, op, [p, clipped], state, rates[members.get(p.name)], step, factor)
        program.append(b)
        program.block = EagerUpdates().run(program.block)
        b = program.builder(Role.OPTIMIZE)
        b.emit(Increment(), step, *([] if factor is None else [factor]))
        program.append(b)
        verify(program.block)
        return [o for o in program.operators if o.role is Role.OPTIMIZE]

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

    def _declare_slots(self, parameters: Sequence[Value], kinds: Sequence[Optimizer]) -> Iterator[Value | None]:
        """Declares the state of each parameter in turn, one array for each slot; None for unused slots.

        `kinds`: for each parameter, the optimizer with its hyper-parameters.
        """
        assert self._program is not None
        used = [(p, kind, kind.slots_used()) for p, kind in zip(parameters, kinds, strict=True)]
        arrays = [
            (f"{p.name}.{slot}", _filled(p.shape, kind.initial(slot), DTYPES[work_dtype(p.type)]))
            for p, kind, slots in used
            for slot, wanted in slots.items()
            if wanted
        ]
        self._state += [name for name, _ in arrays]
        declared = iter(self._program.declare_all("state", arrays))
        return (next(declared) if wanted else None for _, _, slots in used for wanted in slots.values())

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
        own = None if group is None else self._groups[group].rate
        return (self._rate, "learning_rate") if own is None else (own, f"learning_rate_{group}")

    def state_dict(self) -> dict[str, np.ndarray]:
        """A copy of the optimizer's state by name: step counter, learning rate, moments."""
        program = self._minimized()
        return {name: np.array(program.data[name]) for name in self._state}

    def set_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the state to what `state_dict` returned.  UsageError for names or shapes that do not fit."""
        program = self._minimized()
        own = set(self._state)
        missing = [n for n in self._state if n not in state]
        unknown = [n for n in state if n not in own]
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


def _filled(shape: tuple[int, ...], value: float, dtype: Any) -> np.ndarray:
    """An array filled with one number; it takes no memory until the executor makes it writable."""
    return np.broadcast_to(np.array(value, dtype), shape)


def _emit_update(
    b: Builder,
    op: Update,
    tensors: list[Value],
    slots: list[Value | None],
    rate: Value,
    step: Value,
    unscale: Value | None,
) -> None:
    """Emits an update with its inputs at the operator's `updates`, `rate_at`, `step_at` and `unscale_at`."""
    inputs: dict[int, Value | None] = dict(enumerate(tensors))
    inputs.update(zip(op.updates[1:], slots, strict=True))
    inputs[op.rate_at] = rate
    if op.step_at is not None:
        inputs[op.step_at] = step
    inputs[op.unscale_at] = unscale
    given = [inputs.get(i) for i in range(max(i for i, v in inputs.items() if v is not None) + 1)]
    outputs = [inputs[i] for i in op.updates]
    while outputs[-1] is None:
        outputs.pop()
    b.operators.append(Operator(op, tuple(given), tuple(outputs), b.role))


def _times(b: Builder, g: Value, factor: Value) -> Value:
    return b.Mul(g, factor if g.dtype == factor.dtype else b.Cast(factor, to=g.dtype))


def begin_training(program: Program, loss: str, kept: Iterable[str] = ()) -> None:
    """What comes before the backward pass: normalisations and activations that are written out become one operator
    each, and so does attention, unless the program says no.

    `kept`: values that stay because the user named them.
    """
    must_be_untrained(program)
    if program.forward is None:
        if with_patterns(program, (loss, *kept)):
            program.also_at_other_batches(program.again, with_patterns)
        if program.fuse_attention:
            with_attention(program, (loss, *kept))
            program.also_at_other_batches(program.again, with_attention)
    program.begin_training(loss)


def with_patterns(program: Program, kept: Iterable[str] = ()) -> bool:
    """Makes normalisations and gated activations one operator each; returns whether there were any."""
    marked = _keeping(program, kept)
    found = FindGates().run(FindNorms().run(marked))
    if found is not marked:
        program.block = verify(found.with_operators(found.operators, outputs=program.block.outputs))
    return found is not marked


def with_attention(program: Program, kept: Iterable[str] = ()) -> list[str]:
    """Makes attention in a program one operator, where this leaves the values `kept`; returns the notes."""
    found, notes = find_attention(_keeping(program, kept), program.data)
    if any("' is attention" in note for note in notes):
        program.block = verify(found.with_operators(found.operators, outputs=program.block.outputs))
    return notes


def _keeping(program: Program, kept: Iterable[str]) -> Block:
    """The program's block with more outputs, which passes leave in it: those of the values `kept` that it has."""
    block = program.block
    values = block.values()
    outputs = dict.fromkeys([*block.outputs, *(n for n in kept if n in values)])
    return block.with_operators(block.operators, outputs=tuple(outputs))


def number(name: str, value: Any) -> float:
    """The value if it is finite and not negative, else UsageError."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise UsageError(f"{name} must be a number, not {value!r}")
    if not 0 <= value < float("inf"):
        raise UsageError(f"{name} must be finite and not negative, but it is {value}")
    return float(value)


def fraction(name: str, value: Any) -> float:
    """A number of at least 0 and below 1.  UsageError for others."""
    if not 0 <= number(name, value) < 1:
        raise UsageError(f"{name} must be at least 0 and below 1, but it is {value}")
    return float(value)


def program_of(v: Any) -> Program:
    """The program of a Variable.  UsageError for what is no Variable."""
    return expect("loss", v, Variable, "a Variable, such as a loss function returns, or program['loss']").program


def fuse_large_head(program: Program, loss: str) -> None:
    """Makes a large head one operator (see `recompute.fuse_head`), unless the program leaves it out."""
    if program.fuse_head:
        program.block = FindHead(loss, program.fetched).run(program.block)


def must_be_untrained(program: Program) -> None:
    """UsageError where the program has updates already."""
    if any(o.role is Role.OPTIMIZE for o in as_program(program).operators):
        raise UsageError(
            f"program '{program.block.name}' is already a training step: its parameters are updated once per step; "
            "call minimize on a program without updates (clone() it before)"
        )


def _pairs(params_grads: Iterable[tuple[Variable, Variable]]) -> ParamsGrads:
    """The pairs of parameters and gradients.  UsageError for all else, and for none."""
    wanted = "at least one (parameter, gradient) pair, as backward returns them"
    pairs = list(expect("params_grads", params_grads, Iterable, wanted))
    fit = all(isinstance(p, tuple) and len(p) == 2 and all(isinstance(v, Variable) for v in p) for p in pairs)
    if not pairs or not fit:
        raise UsageError(f"params_grads must be {wanted}, not {params_grads!r}")
    return pairs


def _check_pairs(program: Program, pairs: Sequence[tuple[Variable, Variable]]) -> None:
    """UsageError unless each parameter is given once, with a gradient of its shape."""
    parameters = set(program.block.parameters)
    seen: set[str] = set()
    for p, g in pairs:
        if p.value not in parameters:
            raise UsageError(f"'{p.name}' is not a parameter of the program: only parameters are updated")
        if p.name in seen:
            raise UsageError(f"apply_gradients: '{p.name}' is given twice")
        if p.shape != g.shape or not g.value.type.is_float:
            raise UsageError(f"'{p.name}' is {p.value.type}, but its gradient '{g.name}' is {g.value.type}")
        seen.add(p.name)


def names_of(program: Program, wanted: Any, what: str) -> list[str]:
    """Value names of names, aliases, globs and Variables.  UsageError for Variables of another program."""
    return [program.aliases.get(name, name) for name in as_texts(wanted, what, program)]
