"""The default kernel family: an operator's own numerics, traced as steps and replayed by launches.

`compute` runs once on arrays that have types only (traced_arrays.py); what it does to them is a list of steps
(traced_steps.py), each a launch of a kernel that is the same for all shapes (traced_kernels.py).  Temporaries that it
makes are planned as workspace.  Numerics that look at values, or do what no step does, stay with the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ....language.types import TensorType, Types, need
from ..device.kernel import Buffer, Call
from ..families import Buffers, Family
from .functions import FunctionRecorder, Module
from .steps import Step, View

if TYPE_CHECKING:
    from ....language.ir import Operator

#: recordings that are remembered
_REMEMBERED = 4096


@dataclass(frozen=True)
class Recording:
    """Steps, and the temporaries that they need besides the numerics' own workspace; `why` there are none."""

    steps: tuple[Step, ...] = ()
    scratch: tuple[TensorType, ...] = ()
    temps: tuple[TensorType, ...] = ()
    why: str = ""


_recordings: dict[Any, Recording] = {}


def recording(op: Operator) -> Recording:
    """What an operator's numerics do for its types; made once for all that are alike."""
    key = (op.op, *(v and v.type for v in op.inputs), None, *(v and v.type for v in op.outputs))
    found = _recordings.get(key)
    if found is None:
        if len(_recordings) >= _REMEMBERED:
            _recordings.clear()
        found = _recordings[key] = _record(op)
    return found


def _record(op: Operator) -> Recording:
    types = op.types
    if not any(t and t.size for t in types[1]):
        return Recording()
    workspace = op.op.scratch(*types)
    count = range(len(op.op.updates[: len(op.outputs)]))
    beside = {("out", i): {("in", j) for j in op.op.overwrites(i)} for i in range(len(op.outputs)) if i not in count}
    r = FunctionRecorder(beside)

    def arrays(kind: str, ts: Types) -> list[Any]:
        return [None if t is None else r.array((kind, i), t) for i, t in enumerate(ts)]

    ins, outs, scratch = arrays("in", types[0]), arrays("out", types[1]), arrays("scratch", workspace)
    for i in count:
        outs[i] = ins[op.op.updates[i]]
    try:
        with np.errstate(all="ignore"):
            op.op.compute(Module(r), ins, outs, scratch)
    except Exception as e:  # whatever NumPy or the numerics raise where an array has no values
        return Recording(why=f"{type(e).__name__}: {e}")
    return Recording(tuple(r.steps), tuple(workspace), tuple(r.temps))


class TracedFamily(Family):
    """See the module's text."""

    def accepts(self, op: Operator) -> bool:
        """Where the numerics can be recorded."""
        return not recording(op).why

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """The numerics' own, and the temporaries."""
        found = recording(op)
        return (*found.scratch, *found.temps)

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        """Step by step."""
        found = recording(op)
        own = len(found.scratch)
        parts = {"in": ins, "out": outs, "scratch": scratch[:own], "temp": scratch[own:]}

        def at(v: View) -> Buffer:
            whole = need(parts[v.base[0]][v.base[1]])
            size = (v.span()[1] - v.offset) // whole.type.with_dtype(v.dtype).numpy.itemsize if v.size else 0
            return Buffer(whole.address + v.offset, TensorType(v.dtype, (max(size, 0),)))

        return [c for s in found.steps for c in s.calls(at)]


TRACED = TracedFamily()
