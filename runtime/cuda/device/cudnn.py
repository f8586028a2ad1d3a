"""cuDNN's graphs, through nvidia-cudnn-frontend: how one is begun, planned and run.

A plan is what cuDNN's heuristics like best of the engines that give the same bits at every run and need no more
workspace than they may have.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ....errors import JobError

#: element types of tensors, and what cuDNN calls them
FLOATS = {"f32": "FLOAT", "f16": "HALF", "bf16": "BFLOAT16"}


def unavailable() -> str:
    """Why cuDNN cannot be used; "" where it can."""
    if importlib.util.find_spec("cudnn") is None:
        return "nvidia-cudnn-frontend is not installed"
    from .device import unavailable as without_device

    if why := without_device():
        return why
    try:
        import cudnn

        return "" if cudnn.backend_version() >= 90000 else "cuDNN is older than 9"
    except Exception as e:  # whatever a missing or broken library does at import
        return f"cuDNN cannot be loaded: {e}"


def current_device() -> int:
    """The number of this thread's device."""
    from cupy_backends.cuda.api import runtime

    return int(runtime.getDevice())


@functools.cache
def _handle(device: int) -> Any:
    """cuDNN's handle on the current device: a number, or (from frontend 1.2x on) an object that has it."""
    import cudnn

    return cudnn.create_handle()


def _number(handle: Any) -> int:
    return int(getattr(handle, "backend_handle", handle))


def _graphs(cudnn: Any) -> Any:
    """The class of graphs in C++: newer frontends put one in Python before it, which has engines of its own and knows
    no alignment."""
    return getattr(getattr(cudnn, "_pybind_module", None), "backend_graph", None) or cudnn.pygraph


@dataclass(frozen=True)
class Plan:
    """cuDNN's graph with the numbers of its tensors, and the bytes that it works in."""

    graph: Any
    tensors: tuple[int, ...]
    workspace: int
    handle: Any

    def run(self, addresses: Sequence[int], workspace: int, stream: int) -> None:
        """Launches it on a stream; `addresses`: of the tensors, in their order."""
        import cudnn

        cudnn.set_stream(handle=self.handle, stream=stream)
        self.graph._execute(dict(zip(self.tensors, addresses, strict=True)), workspace, _number(self.handle))


def begun(name: str, dtype: str, device: int) -> Any:
    """A graph of tensors of one type that computes in float32."""
    import cudnn

    single = cudnn.data_type.FLOAT
    options = {"intermediate_data_type": single, "compute_data_type": single, "name": name}
    return _graphs(cudnn)(handle=_number(_handle(device)), io_data_type=kind(dtype), **options)


def kind(dtype: str) -> Any:
    """cuDNN's element type."""
    import cudnn

    return getattr(cudnn.data_type, FLOATS[dtype])


def planned(graph: Any, tensors: Sequence[Any], device: int, unwanted: Sequence[str], room: int) -> Plan:
    """The plan of a graph without engines of some properties, in `room` bytes.  Raises where there is none."""
    import cudnn

    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.deselect_numeric_notes([getattr(cudnn.numerical_note, n) for n in ("NONDETERMINISTIC", *unwanted)])
    graph.deselect_workspace_greater_than(room)
    graph.check_support()
    graph.build_plans()
    workspace = int(graph.get_workspace_size())
    if workspace > room:
        raise JobError(f"a plan of {workspace} bytes")
    return Plan(graph, tuple(int(t.get_uid()) for t in tensors), workspace, _handle(device))
