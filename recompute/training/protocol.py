"""The interface of optimizers, and the base class of optimizers that wrap another one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from ..errors import UsageError
from ..language.ir import Operator
from ..language.program import Program, Variable

__all__ = ["AnyOptimizer", "ParamsGrads", "StatefulWrapper", "WrappedOptimizer", "as_optimizer"]

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


def as_optimizer(optimizer: AnyOptimizer, what: str = "optimizer") -> AnyOptimizer:
    """The optimizer.  UsageError for what lacks its methods, and for a class of optimizers."""
    methods = all(callable(getattr(optimizer, name, None)) for name in ("minimize", "backward", "apply_gradients"))
    if isinstance(optimizer, type) or not methods:
        raise UsageError(f"{what} must be an optimizer, such as rc.Adam(), not {optimizer!r}")
    return optimizer


class WrappedOptimizer(AnyOptimizer):
    """An optimizer that wraps another one, `inner`, and forwards every method that a subclass does not override.

    A subclass overrides `_backward`, which `backward` and `minimize` call, and `apply_gradients` or `apply_optimize`.
    """

    def __init__(self, inner: Any) -> None:
        self.inner: Any = as_optimizer(inner, f"what {type(self).__name__} wraps")

    def backward(
        self,
        loss: Variable,
        startup_program: Program | None = None,
        parameter_list: Sequence[str | Variable] | None = None,
        no_grad_set: Iterable[str | Variable] | None = None,
        callbacks: Sequence[Callable[[Any, dict], None]] | None = None,
    ) -> ParamsGrads:
        """Adds the backward pass of `loss` to its program; returns (parameter, gradient) pairs.

        The arguments are those of `recompute.optimizers.Optimizer.backward`.
        """
        return self._backward(loss, startup_program, parameter_list, no_grad_set, callbacks)

    def _backward(self, loss: Variable, *options: Any) -> ParamsGrads:
        """`options`: the other arguments of `backward`, in order."""
        return self.inner.backward(loss, *options)

    def apply_gradients(self, params_grads: Sequence[tuple[Variable, Variable]]) -> list[Operator]:
        """Adds the updates to the program; returns the optimizer's operators."""
        return self.inner.apply_gradients(params_grads)

    def minimize(
        self,
        loss: Variable,
        startup_program: Program | None = None,
        parameter_list: Sequence[str | Variable] | None = None,
        no_grad_set: Iterable[str | Variable] | None = None,
    ) -> tuple[list[Operator], ParamsGrads]:
        """`backward` and `apply_gradients`; returns (optimizer operators, (parameter, gradient) pairs)."""
        params_grads = self._backward(loss, startup_program, parameter_list, no_grad_set)
        return self.apply_optimize(loss, startup_program, params_grads), params_grads

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


class StatefulWrapper(WrappedOptimizer):
    """A wrapper with state of its own in the program: `_state` names it, once `_program` is minimized."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self._program: Program | None = None
        self._state: list[str] = []

    def state_dict(self) -> dict[str, np.ndarray]:
        """The inner optimizer's state, and this one's."""
        own = {} if self._program is None else {n: np.array(self._program.data[n]) for n in self._state}
        return {**self.inner.state_dict(), **own}

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
