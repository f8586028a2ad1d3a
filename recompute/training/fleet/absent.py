"""Functions of Paddle's Fleet that are not here, each with what to do instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...errors import UsageError

_SERVERS = "there are no parameter servers: every rank has all parameters, or its part of them (strategy.sharding)"
_DYNAMIC = "programs are static: call minimize(loss) of what fleet.distributed_optimizer returns, then Executor.run"
_OF_OPTIMIZER = "call it on what fleet.distributed_optimizer returns"
_EXPORT = "rc.export_trained(program, path) writes the trained model, on rank 0: `if fleet.is_first_worker()`"

#: name → why it is not here, and what to do
ABSENT = {
    **dict.fromkeys(
        (
            "init_coordinator",
            "init_server",
            "load_inference_model",
            "make_fl_strategy",
            "run_server",
            "save_cache_model",
            "save_cache_table",
            "save_dense_params",
            "save_one_table",
            "server_endpoints",
            "server_index",
            "server_num",
            "set_date",
            "shrink",
        ),
        _SERVERS,
    ),
    **dict.fromkeys(("clear_grad", "collective_perf", "distributed_model", "distributed_scaler", "step"), _DYNAMIC),
    **dict.fromkeys(("get_lr", "minimize", "set_lr", "set_state_dict", "state_dict"), _OF_OPTIMIZER),
    **dict.fromkeys(("save", "save_inference_model"), _EXPORT),
    "load_model": "rc.load_state(program, path) loads a file of fleet.save_persistables",
}


def absent(name: str, module: str) -> Callable[..., Any]:
    """A function that says why Paddle's function of this name is not here.  AttributeError for other names."""
    if name not in ABSENT:
        raise AttributeError(f"module '{module}' has no attribute '{name}'")

    def function(*args: Any, **options: Any) -> Any:
        raise UsageError(f"fleet.{name}: {ABSENT[name]}")

    function.__name__ = name
    return function
