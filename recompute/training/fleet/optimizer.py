"""`distributed_optimizer`: an optimizer configured by a strategy, for all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...errors import UsageError
from ..amp import decorate
from ..optimizers import Adam, AdamW, GradientMergeOptimizer, Lamb, Lars, Momentum, Optimizer, RecomputeOptimizer
from ..parallel import DataParallel
from ..protocol import AnyOptimizer, as_optimizer, spec_of
from .combining import micro_batches, refused_pair, shards, switched_on
from .strategy import DistributedStrategy
from .world import World, current_or_one

#: keys of amp_configs that `decorate` takes
_SCALING = (
    "init_loss_scaling",
    "incr_every_n_steps",
    "incr_ratio",
    "decr_ratio",
    "use_dynamic_loss_scaling",
    "custom_black_varnames",
    "dtype",
)


def distributed_optimizer(optimizer: Any, strategy: DistributedStrategy | None = None) -> Any:
    """The optimizer configured by `strategy` (None: that of `fleet.init`), for the ranks that `fleet.init` has found.

    With mixed precision, gradient merge, recomputation, LARS or LAMB, then data parallel.  The program is loaded with
    the batch of one rank's micro-batch; the loss and gradients are those of all ranks' samples.  UsageError for options
    that do not go together, naming both, and if it recomputes without checkpoints, budget or strategy.
    """
    optimizer, world = as_optimizer(optimizer), current_or_one()
    if strategy is None:
        strategy = world.strategy if world is not None and world.strategy is not None else DistributedStrategy()
    if not isinstance(strategy, DistributedStrategy):
        raise UsageError(f"distributed_optimizer: strategy must be a DistributedStrategy, not {strategy!r}")
    ranks = 1 if world is None else world.size
    if wrong := refused_pair(switched_on(strategy, ranks)):
        raise UsageError(wrong)
    zero, k_steps = _stage(strategy, ranks), micro_batches(strategy)
    optimizer = _of_large_batches(optimizer, strategy)
    if strategy.amp:
        configs = strategy.given("amp_configs")
        optimizer = decorate(optimizer, **{k: v for k, v in configs.items() if k in _SCALING})
    if k_steps is not None:
        optimizer = GradientMergeOptimizer(optimizer, k_steps, strategy.configs("gradient_merge_configs")["avg"])
    if strategy.recompute:
        optimizer = _recomputing(optimizer, strategy)
    return optimizer if world is None else _of_ranks(optimizer, strategy, world, zero)


def _of_ranks(optimizer: AnyOptimizer, strategy: DistributedStrategy, world: World, zero: int) -> AnyOptimizer:
    """The optimizer for all ranks; as it is where there is one, without micro-batches."""
    merge = spec_of(optimizer).merge
    if world.size == 1 and (merge is None or merge.k_steps == 1):
        return optimizer
    add = strategy.configs("gradient_scale_configs")["scale_strategy"] == "sum"
    return DataParallel(optimizer, world.mesh, world.rank, zero=zero, add=add, sync_batch_norm=strategy.sync_batch_norm)


def _stage(strategy: DistributedStrategy, ranks: int) -> int:
    """The stage of ZeRO; 0: nothing is sharded.  UsageError for degrees that are not those of the ranks."""
    key = "sharding_degree" if shards(strategy) else "dp_degree"
    for name in ("hybrid_configs", *(("sharding_configs",) if shards(strategy) else ())):
        value = strategy.given(name).get(key, -1)
        if value not in (-1, ranks) and not (value == 1 and name == "hybrid_configs" and shards(strategy)):
            whole = "parameters are divided among all of them" if shards(strategy) else "all of them share the samples"
            raise UsageError(
                f"strategy.{name}['{key}'] is {value}, but there are {ranks} ranks, and {whole}: leave it out, or "
                f"start {value} processes"
            )
    return int(strategy.configs("sharding_configs")["stage"]) if shards(strategy) else 0


def _recomputing(optimizer: AnyOptimizer, strategy: DistributedStrategy) -> RecomputeOptimizer:
    configs = strategy.given("recompute_configs")
    if not any(configs.get(key) for key in ("checkpoints", "budget", "strategy")):
        raise UsageError(
            "strategy.recompute needs checkpoints or a budget: set strategy.recompute_configs = "
            "{'checkpoints': ['name', ...]} or {'budget': '8GiB'}"
        )
    result = RecomputeOptimizer(optimizer)
    if configs.get("checkpoints"):
        result.set_checkpoints(configs["checkpoints"])
    if configs.get("budget"):
        result.set_budget(configs["budget"])
    if configs.get("strategy"):
        result.set_strategy(configs["strategy"])
    result.enable_offload = configs.get("enable_offload", False)
    result.spec.check()  # contradictions are found here, not in minimize
    return result


def _of_large_batches(optimizer: Any, strategy: DistributedStrategy) -> Any:
    """Lars in place of Momentum, or Lamb in place of Adam.  UsageError for optimizers that they cannot replace."""
    if strategy.lars:
        _must_be("lars", Momentum, optimizer, "lars_weight_decay")
        if optimizer.use_nesterov or optimizer.dampening:
            what = "use_nesterov" if optimizer.use_nesterov else "dampening"
            raise UsageError(f"strategy.lars and Momentum's {what} are not combined: Lars has none; leave one out")
        c = strategy.configs("lars_configs")
        return Lars(
            momentum=optimizer.momentum,
            lars_coeff=c["lars_coeff"],
            weight_decay=c["lars_weight_decay"],
            epsilon=c["epsilon"],
            **_common(optimizer, c["exclude_from_weight_decay"]),
        )
    if strategy.lamb:
        _must_be("lamb", Adam, optimizer, "lamb_weight_decay")
        if optimizer.amsgrad:
            raise UsageError("strategy.lamb and Adam's amsgrad are not combined: Lamb has none; leave one out")
        c = strategy.configs("lamb_configs")
        return Lamb(
            beta1=optimizer.beta1,
            beta2=optimizer.beta2,
            epsilon=optimizer.epsilon,
            weight_decay=c["lamb_weight_decay"],
            **_common(optimizer, c["exclude_from_weight_decay"]),
        )
    return optimizer


def _must_be(switch: str, kind: type[Optimizer], optimizer: Any, decay: str) -> None:
    if not isinstance(optimizer, kind) or isinstance(optimizer, AdamW):
        raise UsageError(
            f"strategy.{switch} replaces {kind.__name__}, but the optimizer is {type(optimizer).__name__}: give "
            f"{kind.__name__}, or leave strategy.{switch} out"
        )
    if optimizer.weight_decay or optimizer._groups:
        what = "weight_decay" if optimizer.weight_decay else "groups"
        raise UsageError(
            f"strategy.{switch} and {kind.__name__}'s {what} are not combined: weights decay by "
            f"strategy.{switch}_configs['{decay}']"
        )


def _common(optimizer: Any, excluded: Sequence[str]) -> dict[str, Any]:
    """Options that Lars and Lamb take over; `excluded`: parts of names of parameters that do not decay."""
    parts = [excluded] if isinstance(excluded, str) else list(excluded)
    return {
        "learning_rate": optimizer._rate,
        "parameters": optimizer._parameters,
        "grad_clip": optimizer._clip,
        "apply_decay_param_fun": lambda name: optimizer._decays(name) and not any(part in name for part in parts),
    }
