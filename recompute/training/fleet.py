"""Paddle's fleet interface for one process: a strategy, and an optimizer configured by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import UsageError, nearest
from .amp import decorate
from .optimizers import GradientMergeOptimizer, RecomputeOptimizer
from .protocol import AnyOptimizer

__all__ = [
    "DistributedStrategy",
    "distributed_optimizer",
]

_CONFIGS = {
    "recompute_configs": ("checkpoints", "budget", "strategy", "enable_offload", "checkpoint_shape"),
    "amp_configs": (
        "init_loss_scaling",
        "incr_every_n_steps",
        "incr_ratio",
        "decr_ratio",
        "use_dynamic_loss_scaling",
        "custom_black_varnames",
        "dtype",
    ),
    "gradient_merge_configs": ("k_steps", "avg"),
}


class DistributedStrategy:
    """Options of a distributed optimizer.

    `recompute`: whether forward values are dropped and recomputed.  `recompute_configs`: {"checkpoints": [...]}
    (Paddle's), or {"budget": "8GiB"} and optionally {"strategy": "chen"}; an assignment replaces all previous keys.
    "enable_offload": whether checkpoints are offloaded to host memory (with a budget: the values for which this is
    faster than recomputing).  "checkpoint_shape" is accepted and ignored, as every shape is static.
    `forward_recompute` and `recompute_checkpoints` are their older names.

    `amp`: whether the forward pass is in mixed precision.  `amp_configs`: what `recompute.amp.decorate` takes, such as
    {"dtype": "bfloat16"} (default: "float16") or {"init_loss_scaling": 32768.0}.

    `gradient_merge`: whether a step takes several micro-batches (see `GradientMergeOptimizer`).
    `gradient_merge_configs`: {"k_steps": 4, "avg": True}.
    """

    _known = (
        "amp",
        "amp_configs",
        "forward_recompute",
        "gradient_merge",
        "gradient_merge_configs",
        "recompute",
        "recompute_checkpoints",
        "recompute_configs",
    )

    def __init__(self) -> None:
        self._recompute = self._amp = self._merge = False
        self._configs: dict[str, Any] = {}
        self._amp_configs: dict[str, Any] = {}
        self._merge_configs: dict[str, Any] = {"k_steps": 1, "avg": True}

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
        self._recompute = _flag("recompute", value)

    @property
    def amp(self) -> bool:
        """Whether the forward pass is in mixed precision."""
        return self._amp

    @amp.setter
    def amp(self, value: bool) -> None:
        self._amp = _flag("amp", value)

    @property
    def amp_configs(self) -> dict[str, Any]:
        """Options of mixed precision, by name."""
        return self._amp_configs

    @amp_configs.setter
    def amp_configs(self, value: Mapping[str, Any]) -> None:
        self._amp_configs = _checked("amp_configs", value)

    @property
    def gradient_merge(self) -> bool:
        """Whether a step takes several micro-batches."""
        return self._merge

    @gradient_merge.setter
    def gradient_merge(self, value: bool) -> None:
        self._merge = _flag("gradient_merge", value)

    @property
    def gradient_merge_configs(self) -> dict[str, Any]:
        """Options of gradient merge, by name."""
        return self._merge_configs

    @gradient_merge_configs.setter
    def gradient_merge_configs(self, value: Mapping[str, Any]) -> None:
        self._merge_configs = _checked("gradient_merge_configs", value)

    @property
    def recompute_configs(self) -> dict[str, Any]:
        """Options of recomputation, by name."""
        return self._configs

    @recompute_configs.setter
    def recompute_configs(self, value: Mapping[str, Any]) -> None:
        self._configs = _checked("recompute_configs", value)

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


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"strategy.{name} must be True or False, not {value!r}")
    return value


def _checked(name: str, configs: Any) -> dict[str, Any]:
    if not isinstance(configs, Mapping):
        raise UsageError(f"strategy.{name} must be a dict, not {configs!r}")
    known = _CONFIGS[name]
    for key in configs:
        if key not in known:
            raise UsageError(f"{name} has no key '{key}'{nearest(key, known)}; it has: {', '.join(known)}")
    if not isinstance(configs.get("enable_offload", False), bool):
        raise UsageError(f"{name}['enable_offload'] must be True or False, not {configs['enable_offload']!r}")
    return dict(configs)


def distributed_optimizer(optimizer: AnyOptimizer, strategy: DistributedStrategy | None = None) -> AnyOptimizer:
    """The optimizer configured by `strategy`: with mixed precision, gradient merge, in a RecomputeOptimizer, or all.

    UsageError if it recomputes without checkpoints, budget or strategy.
    """
    if strategy is not None and strategy.amp:
        optimizer = decorate(optimizer, **_checked("amp_configs", strategy.amp_configs))
    if strategy is not None and strategy.gradient_merge:
        options = _checked("gradient_merge_configs", strategy.gradient_merge_configs)
        optimizer = GradientMergeOptimizer(optimizer, **options)
    if strategy is None or not strategy.recompute:
        return optimizer
    configs = _checked("recompute_configs", strategy.recompute_configs)
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
    found.request  # noqa: B018 - raises for contradictions here, not in minimize
    return found
