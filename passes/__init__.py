"""Passes: functions from block to block.  `pipeline("autodiff{loss=loss},liveness")` parses their textual form.

To add a pass, add a file with a subclass of `Pass` to one of these folders: every module in them is imported.
"""

from ..support.plug_ins import import_all
from .base import PASSES, Pass, pipeline, run_passes, without_gc
from .cleanup.commit_updates import CommitUpdates
from .cleanup.dead_code import DeadCode
from .cleanup.eager_updates import EagerUpdates
from .gradient.autodiff import Autodiff
from .gradient.precision import PRECISIONS, Precision, StoreParameters
from .lowering.channels_last import ChannelsLast
from .lowering.choose_kernels import ChooseKernels
from .lowering.fold_transposes import FoldTransposes
from .lowering.fusion import Fusion
from .memory.liveness import Liveness
from .memory.memory_plan import MemoryPlan, MemoryReport, live_profile, memory_report
from .memory.storage import ALIGNMENT
from .offloading.offload import Offload, offloaded
from .recomputation.rebuild import Rebuild
from .recomputation.recompute import Recompute, RecomputePlan, Rerun, plan_from_checkpoints
from .recomputation.split_norms import FuseNorms, OpenNorms, SplitNorms
from .recomputation.unplan import Unplan
from .scheduling.schedule import InBestOrder, Schedule
from .sequence import cleaned, plan_memory, step_passes
from .target import Target

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
    "StoreParameters",
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

import_all(__name__, skip=("planners",))  # planners are loaded when one is asked for
