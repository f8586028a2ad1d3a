"""`DistributedStrategy`: Paddle's options of a distributed optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .fields import CONFIGS, KNOWN, OBJECTS, REFUSED, SWITCHES, WITHOUT_EFFECT, checked, checked_configs

#: Paddle's values of fields that are something from the start
_FIRST: dict[str, dict[str, Any]] = {"gradient_merge_configs": {"k_steps": 1, "avg": True}}


class DistributedStrategy:
    """Options of a distributed optimizer, by Paddle's names; docs/fleet.md lists all of them.

    `recompute`: whether forward values are dropped and recomputed.  `recompute_configs`: {"checkpoints": [...]}
    (Paddle's), or {"budget": "8GiB"} and optionally {"strategy": "chen"}; an assignment replaces all previous keys.
    "enable_offload": whether checkpoints are offloaded to host memory (with a budget: the values for which this is
    faster than recomputing).  "checkpoint_shape" is accepted and ignored, as every shape is static.
    `forward_recompute` and `recompute_checkpoints` are their older names.

    `amp`: whether the forward pass is in mixed precision.  `amp_configs`: what `recompute.amp.decorate` takes, such as
    {"dtype": "bfloat16"} (default: "float16") or {"init_loss_scaling": 32768.0}.

    `gradient_merge`: whether a step takes several micro-batches (see `GradientMergeOptimizer`).
    `gradient_merge_configs`: {"k_steps": 4, "avg": True}.

    `sharding`: whether parameters and state are divided among ranks.  `sharding_configs`: {"stage": 1} to 3.

    `lars`, `lamb`: whether Momentum becomes Lars, Adam Lamb.  `lars_configs`: {"lars_coeff": 0.001,
    "lars_weight_decay": 0.0005, "epsilon": 0, "exclude_from_weight_decay": []}; `lamb_configs`: {"lamb_weight_decay":
    0.01, "exclude_from_weight_decay": []}.

    `gradient_scale_configs`: {"scale_strategy": "avg"}, or "sum" for the sum of ranks' gradients.  `hybrid_configs`:
    {"dp_degree": -1, "sharding_degree": 1}.

    What only tunes Paddle's own machinery is accepted and has no effect; what would change the numbers and is not here
    is an error when it is switched on.
    """

    def __init__(self) -> None:
        self._values: dict[str, Any] = {
            **SWITCHES,
            **{name: default for name, (default, _) in WITHOUT_EFFECT.items()},
            **dict.fromkeys(REFUSED, False),
            **dict.fromkeys(OBJECTS),
            **{name: dict(_FIRST.get(name, {})) for name in CONFIGS},
        }

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or isinstance(getattr(type(self), name, None), property):
            object.__setattr__(self, name, value)
        else:
            self._values[name] = checked(name, value)

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("_values", {})
        if name not in values:
            raise AttributeError(f"'DistributedStrategy' object has no attribute '{name}'")
        return values[name]

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *KNOWN})

    def __repr__(self) -> str:
        new = DistributedStrategy()
        set_here = [f"{n}={v!r}" for n, v in self._values.items() if v != new._values[n]]
        return f"DistributedStrategy({', '.join(set_here)})"

    def configs(self, name: str) -> dict[str, Any]:
        """A field's configs, with Paddle's values for keys that were not given.  UsageError where they do not fit."""
        options = checked_configs(name, self._values[name])
        defaults = {key: k.default for key, k in CONFIGS[name].items() if k.default is not None}
        return {**defaults, **options}

    def given(self, name: str) -> dict[str, Any]:
        """A field's configs as they were given.  UsageError where they do not fit."""
        return checked_configs(name, self._values[name])

    @property
    def forward_recompute(self) -> bool:
        """`recompute`."""
        return bool(self._values["recompute"])

    @forward_recompute.setter
    def forward_recompute(self, value: bool) -> None:
        self.recompute = value

    @property
    def recompute_checkpoints(self) -> Sequence[Any]:
        """recompute_configs["checkpoints"]."""
        checkpoints: Sequence[Any] = self._values["recompute_configs"].get("checkpoints", ())
        return checkpoints

    @recompute_checkpoints.setter
    def recompute_checkpoints(self, value: Sequence[Any]) -> None:
        self.recompute_configs = {**self._values["recompute_configs"], "checkpoints": value}
