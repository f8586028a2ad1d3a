"""Paddle's fleet interface: a strategy, and an optimizer made to follow it.  One process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .errors import UsageError, nearest
from .optimizers import RecomputeOptimizer

_CONFIGS = ("checkpoints", "budget", "strategy", "enable_offload", "checkpoint_shape")


class DistributedStrategy:
    """What a distributed optimizer does beside updating.

    `recompute`: whether forward values are dropped and computed again.  `recompute_configs`: {"checkpoints": [...]}
    (Paddle's), or {"budget": "8GiB"} and, if not the best, {"strategy": "chen"}; assigning it replaces what was there.
    "enable_offload": whether checkpoints wait in host memory (with a budget: as many values as make the step faster).
    "checkpoint_shape" may be given and is not needed, as every shape here is static and any will do.
    `forward_recompute` and `recompute_checkpoints` are their older names.
    """

    _known = ("forward_recompute", "recompute", "recompute_checkpoints", "recompute_configs")

    def __init__(self) -> None:
        self._recompute = False
        self._configs: dict[str, Any] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and name not in self._known:
            raise UsageError(
                f"DistributedStrategy has no option '{name}'{nearest(name, self._known)}; it has: "
                f"{', '.join(self._known)}"
            )
        object.__setattr__(self, name, value)

    @property
    def recompute(self) -> bool:
        """Whether to recompute."""
        return self._recompute

    @recompute.setter
    def recompute(self, value: bool) -> None:
        if not isinstance(value, bool):
            raise UsageError(f"strategy.recompute must be True or False, not {value!r}")
        self._recompute = value

    @property
    def recompute_configs(self) -> dict[str, Any]:
        """Options of recomputation, by name."""
        return self._configs

    @recompute_configs.setter
    def recompute_configs(self, value: Mapping[str, Any]) -> None:
        if not isinstance(value, Mapping):
            raise UsageError(f"strategy.recompute_configs must be a dict, not {value!r}")
        _check(value)
        self._configs = dict(value)

    @property
    def forward_recompute(self) -> bool:
        """`recompute`."""
        return self.recompute

    @forward_recompute.setter
    def forward_recompute(self, value: bool) -> None:
        self.recompute = value

    @property
    def recompute_checkpoints(self) -> Sequence[Any]:
        """recompute_configs["checkpoints"]."""
        return self._configs.get("checkpoints", ())

    @recompute_checkpoints.setter
    def recompute_checkpoints(self, value: Sequence[Any]) -> None:
        self.recompute_configs = {**self._configs, "checkpoints": value}


def _check(configs: Mapping[str, Any]) -> None:
    for key in configs:
        if key not in _CONFIGS:
            raise UsageError(
                f"recompute_configs has no key '{key}'{nearest(key, _CONFIGS)}; it has: {', '.join(_CONFIGS)}"
            )
    if not isinstance(configs.get("enable_offload", False), bool):
        raise UsageError(
            f"recompute_configs['enable_offload'] must be True or False, not {configs['enable_offload']!r}"
        )


def distributed_optimizer(optimizer: Any, strategy: DistributedStrategy | None = None) -> Any:
    """The optimizer that follows `strategy`: a RecomputeOptimizer around it where the strategy recomputes.

    UsageError where it recomputes without checkpoints, budget or strategy.
    """
    if strategy is None or not strategy.recompute:
        return optimizer
    _check(strategy.recompute_configs)
    configs = strategy.recompute_configs
    if not any(configs.get(key) for key in ("checkpoints", "budget", "strategy")):
        raise UsageError(
            "strategy.recompute needs checkpoints or a budget: set strategy.recompute_configs = "
            "{'checkpoints': ['name', ...]} or {'budget': '8GiB'}"
        )
    found = RecomputeOptimizer(optimizer)
    if configs.get("checkpoints"):
        found.set_checkpoints(configs["checkpoints"])
    if configs.get("budget"):
        found.set_budget(configs["budget"])
    if configs.get("strategy"):
        found.set_strategy(configs["strategy"])
    found.enable_offload = configs.get("enable_offload", False)
    found.request  # noqa: B018 - says here what contradicts itself, not in minimize
    return found
