"""Which options of a strategy do not go together; all others do, and a test makes every pair."""

from __future__ import annotations

from ...errors import UsageError
from .strategy import DistributedStrategy

_NORM = "its update takes the norm of a whole parameter, of which a rank has a part: use Adam, AdamW or Momentum"
_HOST = "values in host memory are not combined with several micro-batches on a rank: leave one of them out"

#: option → its name in errors
OPTIONS = {
    "recompute": "strategy.recompute",
    "offload": "strategy.recompute_configs['enable_offload']",
    "amp": "strategy.amp",
    "gradient_merge": "strategy.gradient_merge",
    "sharding": "strategy.sharding",
    "lars": "strategy.lars",
    "lamb": "strategy.lamb",
    "sync_batch_norm": "strategy.sync_batch_norm",
    "sum": "strategy.gradient_scale_configs['scale_strategy'] = 'sum'",
    "hybrid": "strategy.hybrid_configs['dp_degree']",
    "ranks": "data parallelism on several ranks",
}

#: pairs that do not → why
REFUSED_PAIRS = {
    ("lars", "lamb"): "each replaces the optimizer: leave one of them out",
    ("sharding", "lars"): _NORM,
    ("sharding", "lamb"): _NORM,
    ("offload", "gradient_merge"): _HOST,
    ("gradient_merge", "sync_batch_norm"): "statistics of all ranks need one micro-batch a rank: leave one of them out",
    ("sharding", "hybrid"): "parameters are divided among all ranks, so that none have the same: leave dp_degree out",
}


def shards(strategy: DistributedStrategy) -> bool:
    """Whether parameters and state are divided among ranks."""
    return bool(strategy.sharding or strategy.configs("hybrid_configs")["sharding_degree"] > 1)


def micro_batches(strategy: DistributedStrategy) -> int | None:
    """Micro-batches of a step on each rank; None without gradient merge."""
    merge = int(strategy.configs("gradient_merge_configs")["k_steps"]) if strategy.gradient_merge else None
    other = int(strategy.configs("sharding_configs")["gradient_merge_acc_step"]) if shards(strategy) else 1
    if merge is not None and other not in (1, merge):
        raise UsageError(
            f"strategy.gradient_merge_configs['k_steps'] is {merge} and strategy.sharding_configs"
            f"['gradient_merge_acc_step'] is {other}, which say the same: give one of them"
        )
    return other if merge is None and other > 1 else merge


def switched_on(strategy: DistributedStrategy, ranks: int) -> list[str]:
    """The options that are on, in the order of `OPTIONS`."""
    hybrid = strategy.configs("hybrid_configs")
    switches = {
        "recompute": strategy.recompute,
        "offload": strategy.recompute and strategy.configs("recompute_configs")["enable_offload"],
        "amp": strategy.amp,
        "gradient_merge": (micro_batches(strategy) or 1) > 1,
        "sharding": shards(strategy),
        "lars": strategy.lars,
        "lamb": strategy.lamb,
        "sync_batch_norm": strategy.sync_batch_norm,
        "sum": strategy.configs("gradient_scale_configs")["scale_strategy"] == "sum",
        "hybrid": max(hybrid["dp_degree"], strategy.configs("sharding_configs")["dp_degree"]) > 1,
        "ranks": ranks > 1,
    }
    return [name for name in OPTIONS if switches[name]]


def refused_pair(on: list[str]) -> str:
    """Why the options that are on are refused: both names of the first pair that is not combined; "" for nothing."""
    for (a, b), why in REFUSED_PAIRS.items():
        if a in on and b in on:
            return f"{OPTIONS[a]} and {OPTIONS[b]} are not combined: {why}"
    return ""
