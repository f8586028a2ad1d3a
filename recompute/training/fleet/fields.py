"""Paddle's fields of a DistributedStrategy: those that do something here, those that cannot change anything, and those
that are refused.  Defaults are Paddle's where a field does something."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import UsageError, nearest

#: switches that do something → their default
SWITCHES = {
    "amp": False,
    "gradient_merge": False,
    "lamb": False,
    "lars": False,
    "recompute": False,
    "sharding": False,
    "sync_batch_norm": False,
}

_SUMS = "gradients are summed in one fixed tree, whatever carries them"
_BUCKETS = "small values travel together and large ones alone, without a copy; the numbers do not depend on it"
_CUDNN = "kernels are chosen when the step is compiled"
_GRAPH = "the whole step is one program, which passes rewrite"

#: fields that are accepted and change nothing → (their default in Paddle, why)
WITHOUT_EFFECT: dict[str, tuple[Any, str]] = {
    "calc_comm_same_stream": (False, "communication has threads or streams of its own"),
    "conv_workspace_size_limit": (512, "workspaces lie in the arena, and count to the budget"),
    "cudnn_batchnorm_spatial_persistent": (False, _CUDNN),
    "cudnn_exhaustive_search": (False, _CUDNN),
    "find_unused_parameters": (False, "parameters on which the loss does not depend are always found"),
    "fuse_all_reduce_ops": (True, _BUCKETS),
    "fuse_grad_merge": (False, "gradients are added up in place where memory is planned so"),
    "fuse_grad_size_in_MB": (32, _BUCKETS),
    "fuse_grad_size_in_TFLOPS": (50.0, _BUCKETS),
    "fuse_grad_size_in_num": (8, _BUCKETS),
    "hierarchical_allreduce_inter_nranks": (1, _SUMS),
    "last_comm_group_size_MB": (1.0, _BUCKETS),
    "nccl_comm_num": (1, "each channel has a communicator of its own"),
    "split_data": (True, "each rank feeds its own batch"),
    "sync_nccl_allreduce": (True, "the program says where it waits for a sum"),
    "use_hierarchical_allreduce": (False, _SUMS),
    "without_graph_optimization": (True, _GRAPH),
}

_SERVERS = "there are no parameter servers: every rank computes, and sends what others need"
_AUTO = "what ranks do is not searched for; recompute-compile prints the memory and time of each choice"
_RANKS = "and the result would depend on the number of ranks, which it never does here"
#: switches that are refused → why, and what to do
REFUSED = {
    "a_sync": _SERVERS,
    "adam_d2sum": "use rc.Adam, whose update takes two moments",
    "adaptive_localsgd": f"ranks would train apart between sums, {_RANKS}; use gradient_merge, which sums less often",
    "asp": "parameters with half of their elements 0 have no kernels here",
    "auto": _AUTO,
    "auto_search": _AUTO,
    "dgc": f"each rank would leave out its own small elements of gradients, {_RANKS}; use gradient_merge, which sums "
    "less often",
    "elastic": "ranks do not come and go during a run: if one fails all end, and resume from a checkpoint on any "
    "number of ranks",
    "fp16_allreduce": f"partial sums would be rounded to float16, {_RANKS}; use amp, which makes gradients small",
    "heter_ccl_mode": "all ranks are of one kind",
    "is_fl_ps_mode": _SERVERS,
    "localsgd": f"ranks would train apart between sums, {_RANKS}; use gradient_merge, which sums less often",
    "pipeline": "layers are not dealt out to ranks yet; use sharding, which divides parameters and state",
    "qat": "call rc.prepare_qat(program) before minimize: it goes with every field here",
    "semi_auto": _AUTO,
    "tensor_parallel": "layers are not divided among ranks yet; use sharding, which divides parameters and state",
    "with_coordinator": _SERVERS,
}

#: objects of Paddle's that are accepted whatever they hold
OBJECTS = {"build_strategy": _GRAPH, "execution_strategy": _GRAPH}
_TABLES = ("downpour_table_param", "fs_client_param", "trainer_desc_configs")


@dataclass(frozen=True)
class Key:
    """A key of a field's configs.  `check`: what is wrong with a value, "" for nothing; `default`: Paddle's."""

    check: Callable[[Any], str]
    default: Any = None


def flag(value: Any) -> str:
    """True or False."""
    return "" if isinstance(value, bool) else "must be True or False"


def count(value: Any) -> str:
    """A whole number from 1."""
    return "" if isinstance(value, int) and not isinstance(value, bool) and value > 0 else "must be a number from 1"


def degree(value: Any) -> str:
    """A number of ranks, or -1 for what is left."""
    return "" if value == -1 and not isinstance(value, bool) else count(value)


def anything(value: Any) -> str:
    """No check: others do it, or the value changes nothing."""
    return ""


def only(*allowed: Any, why: str) -> Callable[[Any], str]:
    """One of few values."""
    names = " or ".join(repr(a) for a in allowed)
    return lambda value: "" if value in allowed and type(value) in map(type, allowed) else f"must be {names}: {why}"


def _no_names(why: str) -> Callable[[Any], str]:
    return lambda value: f"must be empty: {why}" if value else ""


def _stage(value: Any) -> str:
    good = value in (1, 2, 3) and not isinstance(value, bool)
    return "" if good else "must be 1 (state is divided), 2 (and gradients) or 3 (and parameters)"


_ONE = only(1, why="ranks divide samples, parameters and state, and single layers or the order of layers not yet")
_HOST = only(False, why="state stays where the step runs; values of the forward pass go to the host with "
             "recompute_configs['enable_offload']")  # fmt: skip
_KINDS = _no_names("which operators stay in float32 is said by values, custom_black_varnames")
_FULL = only(False, why="parameters and their updates stay in float32")

#: configs of fields that do something
CONFIGS: dict[str, dict[str, Key]] = {
    "recompute_configs": {
        "checkpoints": Key(anything, []),
        "budget": Key(anything),
        "strategy": Key(anything),
        "enable_offload": Key(flag, False),
        "checkpoint_shape": Key(anything, []),
        "enable_tuning": Key(only(False, why="give a budget, and a planner chooses what is recomputed"), False),
        "refined_ops_patterns": Key(_no_names("what is recomputed is chosen by checkpoints, or by a budget"), []),
    },
    "amp_configs": {
        "init_loss_scaling": Key(anything, 2.0**16),
        "incr_every_n_steps": Key(anything, 2000),
        "incr_ratio": Key(anything, 2.0),
        "decr_ratio": Key(anything, 0.5),
        "decr_every_n_nan_or_inf": Key(only(1, why="the scale falls after every step that is not finite"), 1),
        "use_dynamic_loss_scaling": Key(anything, True),
        "custom_black_varnames": Key(anything, []),
        "custom_white_list": Key(_KINDS, []),
        "custom_black_list": Key(_KINDS, []),
        "use_pure_fp16": Key(_FULL, False),
        "use_pure_bf16": Key(_FULL, False),
        "use_fp16_guard": Key(flag, True),
        "use_optimizer_fp16": Key(_FULL, False),
        "dtype": Key(anything, "float16"),
    },
    "gradient_merge_configs": {"k_steps": Key(count, 1), "avg": Key(flag, True)},
    "sharding_configs": {
        "stage": Key(_stage, 1),
        "sharding_degree": Key(count),
        "dp_degree": Key(count, 1),
        "mp_degree": Key(_ONE, 1),
        "pp_degree": Key(_ONE, 1),
        "gradient_merge_acc_step": Key(count, 1),
        "hybrid_dp": Key(only(False, why="parameters are divided among all ranks"), False),
        "offload": Key(_HOST, False),
        "optimize_offload": Key(_HOST, False),
        **dict.fromkeys(
            (
                "segment_anchors",
                "segment_broadcast_MB",
                "sharding_segment_strategy",
                "enable_tuning",
                "optimize_cast",
                "pp_allreduce_in_optimize",
                "use_calc_stream",
            ),
            Key(anything),
        ),
    },
    "lars_configs": {
        "lars_coeff": Key(anything, 0.001),
        "lars_weight_decay": Key(anything, 0.0005),
        "epsilon": Key(anything, 0.0),
        "exclude_from_weight_decay": Key(anything, []),
    },
    "lamb_configs": {"lamb_weight_decay": Key(anything, 0.01), "exclude_from_weight_decay": Key(anything, [])},
    "gradient_scale_configs": {
        "scale_strategy": Key(only("avg", "sum", why="a loss is multiplied before minimize, for other scales"), "avg"),
        "scale_gradient": Key(flag, False),
    },
    "hybrid_configs": {
        "dp_degree": Key(degree, -1),
        "sharding_degree": Key(count, 1),
        **dict.fromkeys(("mp_degree", "pp_degree", "sep_degree", "ep_degree", "cp_degree"), Key(_ONE, 1)),
        **dict.fromkeys(("moe_sharding_degree", "cp_sharding_degree"), Key(_ONE, 1)),
        **dict.fromkeys(
            (
                "order",
                "mp_configs",
                "pp_configs",
                "dp_configs",
                "sharding_configs",
                "sep_configs",
                "dp_sep_configs",
                "pp_tp_configs",
                "ep_configs",
                "moe_sharding_configs",
                "default_comm_group_configs",
                "cp_configs",
                "cp_sharding_configs",
                "dp_cp_configs",
                "cp_mp_configs",
                "enable_optimizer_timer",
                "split_norm_comm",
            ),
            Key(anything),
        ),
    },
}

#: configs of switches that are refused: their keys are Paddle's, and nothing reads them
_UNREAD = {
    "a_sync_configs": "k_steps max_merge_var_num send_queue_size independent_recv_thread min_send_grad_num_before_recv"
    " thread_pool_size send_wait_times runtime_split_send_recv launch_barrier heter_worker_device_guard lr_decay_steps"
    " use_ps_gpu use_gpu_graph",
    "adaptive_localsgd_configs": "init_k_steps begin_step",
    "dgc_configs": "rampup_begin_step rampup_step sparsity",
    "localsgd_configs": "k_steps begin_step",
    "pipeline_configs": "micro_batch_size accumulate_steps schedule_mode p2p_cache_shape enable_partial_send_recv",
    "qat_configs": "channel_wise_abs_max weight_bits activation_bits not_quant_pattern algo",
    "tensor_parallel_configs": "tensor_parallel_degree tensor_init_seed",
}
CONFIGS.update({name: dict.fromkeys(keys.split(), Key(anything)) for name, keys in _UNREAD.items()})

#: all names
KNOWN = tuple(sorted((*SWITCHES, *WITHOUT_EFFECT, *REFUSED, *OBJECTS, *CONFIGS)))


def checked(name: str, value: Any) -> Any:
    """The value of a field, if it is one.  UsageError that says what is wrong, why, and what to do."""
    if name in CONFIGS:
        return checked_configs(name, value)
    if name in OBJECTS:
        return value
    if name in _TABLES:
        raise UsageError(f"strategy.{name}: {_SERVERS}")
    if name not in KNOWN:
        raise UsageError(
            f"DistributedStrategy has no option '{name}'{nearest(name, KNOWN)}; it has: {', '.join(KNOWN)}"
        )
    default = WITHOUT_EFFECT[name][0] if name in WITHOUT_EFFECT else False
    if isinstance(default, bool):
        if flag(value):
            raise UsageError(f"strategy.{name} must be True or False, not {value!r}")
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UsageError(f"strategy.{name} must be a number, not {value!r}")
    if name in REFUSED and value:
        raise UsageError(f"strategy.{name} = True: {REFUSED[name]}")
    return value


def checked_configs(name: str, configs: Any) -> dict[str, Any]:
    """A copy of a field's configs.  UsageError for unknown keys and values that do not fit."""
    if not isinstance(configs, Mapping):
        raise UsageError(f"strategy.{name} must be a dict, not {configs!r}")
    defaults = CONFIGS[name]
    for key, value in configs.items():
        if key not in defaults:
            raise UsageError(f"{name} has no key '{key}'{nearest(key, defaults)}; it has: {', '.join(defaults)}")
        if wrong := defaults[key].check(value):
            raise UsageError(f"{name}['{key}'] is {value!r}, it {wrong}")
    return dict(configs)
