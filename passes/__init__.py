"""Passes: functions from block to block.  `pipeline("autodiff{loss=loss},liveness")` reads their textual form.

To add a pass, add a file with a subclass of `Pass` to this folder: every module here is imported.
"""

import importlib
import pkgutil

from .autodiff import Autodiff
from .base import PASSES, Pass, pipeline, run_passes, without_gc
from .channels_last import ChannelsLast
from .choose_kernels import ChooseKernels
from .commit_updates import CommitUpdates
from .dead_code import DeadCode
from .eager_updates import EagerUpdates
from .fold_transposes import FoldTransposes
from .fusion import Fusion
from .liveness import Liveness
from .memory_plan import MemoryPlan, MemoryReport, live_profile, memory_report
from .offload import Offload, offloaded
from .precision import PRECISIONS, Precision
from .rebuild import Rebuild
from .recompute import Recompute, RecomputePlan, Rerun, plan_from_checkpoints
from .schedule import InBestOrder, Schedule
from .sequence import cleaned, plan_memory, step_passes
from .split_norms import FuseNorms, OpenNorms, SplitNorms
from .storage import ALIGNMENT
from .target import Target
from .unplan import Unplan

__all__ = [
    "ALIGNMENT",
    "PASSES",
    "PRECISIONS",
    "Autodiff",
    "ChannelsLast",
    "ChooseKernels",
    "CommitUpdates",
    "DeadCode",
    "EagerUpdates",
    "FoldTransposes",
    "FuseNorms",
    "Fusion",
    "InBestOrder",
    "Liveness",
    "MemoryPlan",
    "MemoryReport",
    "Offload",
    "OpenNorms",
    "Pass",
    "Precision",
    "Rebuild",
    "Recompute",
    "RecomputePlan",
    "Rerun",
    "Schedule",
    "SplitNorms",
    "Target",
    "Unplan",
    "cleaned",
    "live_profile",
    "memory_report",
    "offloaded",
    "pipeline",
    "plan_from_checkpoints",
    "plan_memory",
    "run_passes",
    "step_passes",
    "without_gc",
]

for _module in pkgutil.iter_modules(__path__):
    if not _module.ispkg:  # planners are loaded when one is asked for
        importlib.import_module(f"{__name__}.{_module.name}")
