"""The interface of optimizers, and the base classes of those that describe a step, and of those that wrap another."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from ..boundary import as_function
from ..errors import UsageError, expect
from ..language.ir import Operator, Role
from ..language.program import Program, Variable
from ..passes import Target
from ..passes.base import apply_passes
from ..passes.inserting import check_places
from ..planning.figures import interruption
from ..planning.step import plan_step, target_of
from ..runtime.communication.started import started_together
from .origin import held, origin_of
from .pipeline import backward_passes, pipeline, update_passes
from .programs import must_be_untrained, names_of, program_of
from .spec import Spec, StepAgain
from .updates import OtherRule

__all__ = [
    "AnyOptimizer", "ParamsGrads", "RecomputeWarning", "SpecOptimizer", "StatefulWrapper", "WrappedOptimizer",
    "as_optimizer",
]  # fmt: skip


class RecomputeWarning(UserWarning):
    """A checkpoint may not have the expected effect."""


ParamsGrads = list[tuple[Variable, Variable]]


class AnyOptimizer(Protocol):
    """The interface of every optimizer, as used by `compile_step`, `estimate` and wrappers.

    Names and arguments are Paddle's; see `recompute.optimizers.Optimizer` for what each method does.  Any class with
    these methods will do; one that inherits gets `apply_optimize`, `minimize` and `load`.
    """

    def backward(
        self,
        loss: Variable,
        startup_program: Program | None = None,
        parameter_list: Sequence[str | Variable] | None = None,
        no_grad_set: Iterable[str | Variable] | None = None,
        callbacks: Sequence[Callable[[Any, dict], None]] | None = None,
    ) -> ParamsGrads:
        """Adds the backward pass of `loss` to its program; returns (parameter, gradient) pairs."""
        ...

    def apply_gradients(self, params_grads: Sequence[tuple[Variable, Variable]]) -> list[Operator]:
        """Adds the updates to the program; returns the optimizer's operators."""
        ...

    def apply_optimize(
        self, loss: Variable, startup_program: Program | None, params_grads: Sequence[tuple[Variable, Variable]]
    ) -> list[Operator]:
        """`apply_gradients`, with Paddle's arguments."""
        return self.apply_gradients(params_grads)

    def minimize(
        self,
        loss: Variable,
        startup_program: Program | None = None,
        parameter_list: Sequence[str | Variable] | None = None,
        no_grad_set: Iterable[str | Variable] | None = None,
    ) -> tuple[list[Operator], ParamsGrads]:
        """`backward` and `apply_gradients`: makes the program a training step.

        Returns (optimizer operators, (parameter, gradient) pairs).  UsageError where the program is trained already.
        """
        params_grads = self.backward(loss, startup_program, parameter_list, no_grad_set)
        return self.apply_optimize(loss, startup_program, params_grads), params_grads

    def state_dict(self) -> dict[str, np.ndarray]:
        """A copy of the optimizer's state, by name."""
        ...

    def set_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the state to what `state_dict` returned."""
        ...

    def load(self, state: Mapping[str, Any]) -> None:
        """`set_state_dict`."""
        self.set_state_dict(state)

    def get_lr(self) -> float:
        """The learning rate of the next step."""
        ...

    def set_lr(self, value: float) -> None:
        """Sets the learning rate from the next step on."""
        ...


class SpecOptimizer(AnyOptimizer):
    """An optimizer, or a wrapper of one, that describes a training step (`spec`): passes make it (`pipeline`)."""

    @property
    def spec(self) -> Spec:
        """The description of the training step."""
        raise NotImplementedError

    def minimize(
        self,
        loss: Variable,
        startup_program: Program | None = None,
        parameter_list: Sequence[str | Variable] | None = None,
        no_grad_set: Iterable[str | Variable] | None = None,
    ) -> tuple[list[Operator], ParamsGrads]:
        """See `AnyOptimizer.minimize`; the program remembers how it was made, so that it can be at other sizes."""
        program = program_of(loss)
        forward, most = program.again, program.block.batch or 1
        no_grad_set = list(no_grad_set) if isinstance(no_grad_set, Iterator) else no_grad_set
        wanted = names_of(program, () if parameter_list is None else parameter_list, "parameter_list")
        no_grad = names_of(program, () if no_grad_set is None else no_grad_set, "no_grad_set")
        pairs = self.backward(loss, startup_program, parameter_list, no_grad_set)
        result = self.apply_optimize(loss, startup_program, pairs), pairs
        program.step_again = StepAgain(self.spec, forward, loss.name, wanted, no_grad, most, program.logical)
        return result

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
        A RecomputeWarning is given for checkpoints without effect and the like.  UsageError for what is not combined;
        the program is then as it was.
        """
        program = program_of(loss)
        must_be_untrained(program)
        spec = self.spec
        self._check()
        spec.check()
        with restored(program):
            if spec.parallel is not None and started_together() > 1:
                program.origin = origin_of(program, spec, divides=spec.parallel.divides)
            program.slices = spec.whole
            program.mesh = None if spec.parallel is None else spec.parallel.mesh
            wanted = spec.rule.parameters if parameter_list is None else parameter_list
            names = names_of(program, () if wanted is None else wanted, "parameter_list")
            no_grad = names_of(program, () if no_grad_set is None else no_grad_set, "no_grad_set")
            if spec.inserted:
                check_places(spec.inserted, pipeline(spec, program, loss.name))
            apply_passes(program, backward_passes(spec, program, loss.name, parameters=names, no_grad=no_grad))
            spec.rule.check(program, [p for p, _ in program.gradients])
        for note in program.plan.notes if spec.checkpoints and program.plan is not None else ():
            warnings.warn(note, RecomputeWarning, stacklevel=3)
        for callback in expect("callbacks", callbacks or (), Iterable, "a list of functions"):
            as_function(callback, "a callback", "a block and an operator")
            for op in program.operators:
                if op.role is Role.BACKWARD:
                    callback(program.block, {"operator": op})
        self._bind(program)
        return [(program[p], program[g]) for p, g in program.gradients]

    def apply_gradients(self, params_grads: Sequence[tuple[Variable, Variable]]) -> list[Operator]:
        """Adds clipping and updates to the program, and the step counter's increment; returns these operators.

        With a budget, strategy or plan the step is planned: `program.plan` is the plan, `program.planned` has its
        figures (`PlanFigures`).  UsageError for pairs that do not fit, and where no plan does.
        """
        pairs = _pairs(params_grads)
        program = program_of(pairs[0][0])
        must_be_untrained(program)
        if any(v.program is not program for pair in pairs for v in pair):
            raise UsageError("apply_gradients: all parameters and gradients must belong to one program")
        spec = self.spec
        with restored(program):
            program.gradients = [(p.name, g.name) for p, g in pairs]
            apply_passes(program, update_passes(spec, program))
            if spec.request is not None:
                planned(program, spec)
        self._bind(program)
        if program.origin is not None and program.origin.whole:
            program.origin.held = held(program)
        return [o for o in program.operators if o.role is Role.OPTIMIZE]

    def _check(self) -> None:
        """UsageError where it would do nothing."""

    def _bind(self, program: Program) -> None:
        """Notes the program whose state this optimizer, and those inside of it, have."""


@contextlib.contextmanager
def restored(program: Program) -> Iterator[None]:
    """Inside, an error leaves the program as it was: its block, its facts, and which arrays it has."""
    before, arrays = dict(vars(program)), {n: dict.__getitem__(program.data, n) for n in dict.keys(program.data)}
    try:
        yield
    except BaseException:
        vars(program).clear()
        vars(program).update(before)
        dict.clear(program.data)
        dict.update(program.data, arrays)
        raise


def _pairs(params_grads: Iterable[tuple[Variable, Variable]]) -> ParamsGrads:
    """The pairs of parameters and gradients.  UsageError for all else, and for none."""
    wanted = "at least one (parameter, gradient) pair, as backward returns them"
    pairs = list(expect("params_grads", params_grads, Iterable, wanted))
    fit = all(isinstance(p, tuple) and len(p) == 2 and all(isinstance(v, Variable) for v in p) for p in pairs)
    if not pairs or not fit:
        raise UsageError(f"params_grads must be {wanted}, not {params_grads!r}")
    return pairs


def planned(program: Program, spec: Spec) -> None:
    """Plans a training step as `spec` asks."""
    assert spec.request is not None
    target = spec.target or Target()
    if spec.cost is not None:
        target = dataclasses.replace(target, cost=spec.cost)
    plan_step(program, spec.request, target_of(target), apart=True)
    if program.planned.interrupted:
        warnings.warn(interruption(program.planned), RecomputeWarning, stacklevel=4)


def spec_of(optimizer: Any) -> Spec:
    """The spec of an optimizer, or a spec itself; of any other class with an optimizer's methods, a rule that calls it.

    UsageError if it is no optimizer.
    """
    if isinstance(optimizer, Spec):
        return optimizer
    as_optimizer(optimizer)
    return optimizer.spec if hasattr(optimizer, "spec") else Spec(OtherRule(optimizer))


def as_optimizer(optimizer: AnyOptimizer, what: str = "optimizer") -> AnyOptimizer:
    """The optimizer.  UsageError for what lacks its methods, and for a class of optimizers."""
    methods = all(callable(getattr(optimizer, name, None)) for name in ("backward", "apply_gradients"))
    if isinstance(optimizer, type) or not methods:
        raise UsageError(f"{what} must be an optimizer, such as rc.Adam(), not {optimizer!r}")
    return optimizer


class WrappedOptimizer(SpecOptimizer):
    """An optimizer that wraps another one, `inner`, and changes what it describes: a subclass overrides `spec`."""

    def __init__(self, inner: Any) -> None:
        self.inner: Any = as_optimizer(inner, f"what {type(self).__name__} wraps")

    @property
    def spec(self) -> Spec:
        return spec_of(self.inner)

    def _bind(self, program: Program) -> None:
        if hasattr(self.inner, "_bind"):
            self.inner._bind(program)

    def state_dict(self) -> dict[str, np.ndarray]:
        """A copy of the optimizer's state, by name."""
        return self.inner.state_dict()

    def set_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the state to what `state_dict` returned."""
        self.inner.set_state_dict(state)

    def get_lr(self, **group: Any) -> float:
        """The learning rate of the next step; `group`: of which group, where the optimizer has groups."""
        return self.inner.get_lr(**group)

    def set_lr(self, value: float, **group: Any) -> None:
        """Sets the learning rate from the next step on; `group`: as for `get_lr`."""
        self.inner.set_lr(value, **group)


class Described(WrappedOptimizer):
    """The optimizer of a spec."""

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec.rule.optimizer if isinstance(spec.rule, OtherRule) else spec.rule)
        self._spec = spec

    @property
    def spec(self) -> Spec:
        return self._spec


class StatefulWrapper(WrappedOptimizer):
    """A wrapper with state of its own in the program: `_state` names it, once `_program` is minimized."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self._program: Program | None = None
        self._state: list[str] = []

    def _bind(self, program: Program) -> None:
        super()._bind(program)
        self._program, self._state = program, self._own_state(program)

    def _own_state(self, program: Program) -> list[str]:
        """The names of its state in a program."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, np.ndarray]:
        """The inner optimizer's state, and this one's."""
        arrays = {} if self._program is None else {n: np.array(self._program.data[n]) for n in self._state}
        return {**self.inner.state_dict(), **arrays}

    def set_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the state to what `state_dict` returned."""
        missing = [n for n in self._state if n not in state]
        if missing:
            raise UsageError(f"this is not the state of this {type(self).__name__}: it lacks '{missing[0]}'")
        self.inner.set_state_dict({n: a for n, a in state.items() if n not in self._state})
        for name in self._state:
            assert self._program is not None
            if not self._program.data[name].flags.writeable:  # the initial contents, which no step has changed yet
                self._program.data[name] = np.array(self._program.data[name])
            self._program.data[name][...] = np.asarray(state[name])
