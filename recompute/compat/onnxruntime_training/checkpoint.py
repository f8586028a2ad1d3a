"""`CheckpointState`: the weights, their gradients, the optimizer's state and the user's properties."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ...errors import ModelError, UsageError
from ...support.files import regular
from ...support.json_values import unfit
from ...support.tensor_file import write_arrays

_ENTRY = "recompute.checkpoint"
#: types of the fields in the file
_TOLD = {"weights": [str], "trained": [str], "properties": {...: (int, float, str)}, "optimizer": {...: float}}


class Parameter:
    """A weight of the model."""

    def __init__(self, state: CheckpointState, name: str) -> None:
        self._state, self.name = state, name

    @property
    def data(self) -> np.ndarray:
        """A copy of its contents."""
        return self._state.arrays[self.name].copy()

    @data.setter
    def data(self, value: Any) -> None:
        self._state.put(self.name, value)

    @property
    def grad(self) -> np.ndarray | None:
        """A copy of the gradient that was accumulated; None before the first training step, and where frozen."""
        gradient = self._state.gradients.get(self.name)
        return None if gradient is None else gradient.copy()

    @property
    def requires_grad(self) -> bool:
        """Whether it is trained."""
        return self.name in self._state.trained

    def __repr__(self) -> str:
        return f"Parameter(name={self.name}, requires_grad={self.requires_grad})"


class Parameters:
    """The weights by name; iteration gives (name, Parameter) pairs."""

    def __init__(self, state: CheckpointState) -> None:
        self._state = state

    def __getitem__(self, name: str) -> Parameter:
        if name not in self:
            raise KeyError(f"Parameter {name} not found.")
        return Parameter(self._state, name)

    def __setitem__(self, name: str, value: Any) -> None:
        self[name].data = value

    def __contains__(self, name: object) -> bool:
        return name in self._state.arrays

    def __iter__(self) -> Iterator[tuple[str, Parameter]]:
        return ((name, self[name]) for name in sorted(self._state.arrays))

    def __len__(self) -> int:
        return len(self._state.arrays)


class Properties:
    """The user's numbers and texts by name; iteration gives pairs."""

    def __init__(self, found: dict[str, int | float | str]) -> None:
        self._found = found

    def __getitem__(self, name: str) -> int | float | str:
        if name not in self:
            raise KeyError(f"Property {name} not found.")
        return self._found[name]

    def __setitem__(self, name: str, value: int | float | str) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise UsageError(f"property '{name}' must be an int, a float or a str, not {value!r}")
        self._found[name] = value

    def __contains__(self, name: object) -> bool:
        return name in self._found

    def __iter__(self) -> Iterator[tuple[str, int | float | str]]:
        return iter(sorted(self._found.items()))

    def __len__(self) -> int:
        return len(self._found)


def _check(state: CheckpointState) -> None:
    """ValueError where the parts of a checkpoint do not fit each other."""
    for name in state.trained:
        if name not in state.arrays or state.arrays[name].dtype.kind != "f":
            raise ValueError(f"'{name}' is trained, but no weight of floating-point numbers")
    if len(set(state.trained)) < len(state.trained):
        raise ValueError("it trains a weight twice")
    for name, moment in state.moments.items():
        weight = state.arrays.get(name.removesuffix("/m").removesuffix("/v"))
        if weight is None or (moment.shape, moment.dtype) != (weight.shape, weight.dtype):
            raise ValueError(f"the optimizer's state '{name}' fits no weight")
    steps = state.optimizer.get("steps", 0)
    if type(steps) is not int or not 0 <= steps < 1 << 53 or set(state.optimizer) - {"steps", "learning_rate"}:
        raise ValueError("the optimizer's steps must be a whole number of at least 0, beside a learning_rate")


class CheckpointState:
    """The state of a training: made by `load_checkpoint`, changed by `Module` and `Optimizer`."""

    def __init__(self, arrays: dict[str, np.ndarray], trained: Iterable[str]) -> None:
        self.arrays, self.trained = arrays, list(trained)
        self.gradients: dict[str, np.ndarray] = {}
        #: of the optimizer: arrays of each weight, learning rate and number of steps
        self.moments: dict[str, np.ndarray] = {}
        self.optimizer: dict[str, float | int] = {}
        self.own: dict[str, int | float | str] = {}
        #: counts changes of weights that are not trained, with which compiled programs may have been simplified
        self.version = 0

    @property
    def parameters(self) -> Parameters:
        """The weights."""
        return Parameters(self)

    @property
    def properties(self) -> Properties:
        """The user's numbers and texts."""
        return Properties(self.own)

    def put(self, name: str, value: Any) -> None:
        """Replaces the contents of a weight.  UsageError for another shape or element type."""
        there, array = self.arrays[name], np.asarray(value)
        if array.shape != there.shape or array.dtype != there.dtype:
            raise UsageError(
                f"'{name}' is {there.dtype}{list(there.shape)}, but the new contents are {array.dtype}"
                f"{list(array.shape)}"
            )
        there[...] = array
        self.version += name not in self.trained

    @classmethod
    def load_checkpoint(cls, checkpoint_uri: str | os.PathLike[str]) -> CheckpointState:
        """Reads a file of `save_checkpoint` or `generate_artifacts`.  ModelError for other files."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(regular(checkpoint_uri), framework="np") as file:
                told = json.loads((file.metadata() or {})[_ENTRY])
                if why := unfit(told, _TOLD, "its description"):
                    raise ValueError(why)
                arrays = {n: np.array(file.get_tensor(n)) for n in file.keys()}  # noqa: SIM118  no mapping
            state = cls({n: arrays[f"weight/{n}"] for n in told["weights"]}, told["trained"])
            state.moments = {n[7:]: a for n, a in arrays.items() if n.startswith("moment/")}
            state.optimizer, state.own = dict(told["optimizer"]), dict(told["properties"])
            _check(state)
        except FileNotFoundError:
            raise ModelError(f"cannot read '{checkpoint_uri}': there is no such file") from None
        except (OSError, SafetensorError, KeyError, TypeError, ValueError, RecursionError) as e:
            raise ModelError(f"cannot read '{checkpoint_uri}': it is no checkpoint of this package ({e})") from None
        return state

    @classmethod
    def save_checkpoint(
        cls, state: CheckpointState, checkpoint_uri: str | os.PathLike[str], include_optimizer_state: bool = False
    ) -> None:
        """Writes a checkpoint, atomically; with the optimizer's state, a training goes on from there."""
        arrays = {f"weight/{n}": a for n, a in state.arrays.items()}
        if include_optimizer_state:
            arrays |= {f"moment/{n}": a for n, a in state.moments.items()}
        told = {
            "weights": list(state.arrays),
            "trained": state.trained,
            "properties": state.own,
            "optimizer": state.optimizer if include_optimizer_state else {},
        }
        write_arrays(arrays, os.fspath(checkpoint_uri), {"format": "np", _ENTRY: json.dumps(told)})
