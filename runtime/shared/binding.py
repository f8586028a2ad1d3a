"""Checks when a planned block is bound to memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...errors import UsageError
from ...language.ir import Block, Operator, Value
from ...ops.communication.base import Communication


def need_addresses(block: Block) -> None:
    """UsageError where memory is not planned for a value of the step."""
    kept = {v.name for v in block.persistent()}
    missing = next((n for n in block.values() if n not in kept and n not in block.addresses), None)
    if missing is not None:
        raise UsageError(f"'{missing}' has no address: plan the program's memory first, or run it with an Executor")


def already_there(block: Block, op: Operator) -> bool:
    """Whether the plan has put an operator's results where they already are: views, and parts joined in place."""
    at, views, joins = block.addresses, op.views(), op.joins()
    if joins and op.outputs[0] is not None and op.outputs[0].name in at:
        whole = at[op.outputs[0].name]
        return all(
            v is not None and o is not None and at.get(v.name) == whole + o
            for v, o in zip(op.inputs, joins, strict=True)
        )
    if not views or op.inputs[0] is None or op.inputs[0].name not in at:
        return False
    base = at[op.inputs[0].name]
    placed = [(v, o) for v, o in zip(op.outputs, views, strict=False) if v is not None]
    return len(placed) == len(list(op.writes())) and all(
        o is not None and at.get(v.name) == base + o for v, o in placed
    )


def far_waits(block: Block) -> frozenset[str]:
    """Names of results of communications with other ranks: only their waits read them."""
    begun = (o for o in block.operators if isinstance(o.op, Communication) and o.op.ranks > 1)
    return frozenset(v.name for o in begun for v in o.writes())


def need_separate(block: Block, arrays: Mapping[str, Any]) -> None:
    """UsageError where an array that the block updates has memory in common with another of its arrays."""
    updated = {v.name for o in block.operators if o.op.updates for v in o.writes()}
    kept = (v.name for v in (*block.parameters, *block.buffers, *block.state))
    held = sorted((a.ctypes.data, a.nbytes, n) for n in kept if isinstance(a := arrays.get(n), np.ndarray) and a.nbytes)
    end, last = 0, ""
    for start, nbytes, name in held if updated else ():
        if start < end and not updated.isdisjoint((last, name)):
            raise UsageError(
                f"'{last}' and '{name}' have memory in common, and the program updates them one by one: give each an "
                "array of its own (a copy)"
            )
        end, last = max((end, last), (start + nbytes, name))


def contents(v: Value, arrays: Mapping[str, Any]) -> np.ndarray:
    """The array of a persistent value.  UsageError where there is none, or of another type."""
    array = arrays.get(v.name)
    if array is None:
        raise UsageError(f"'{v.name}' ({v.type}) has no contents: load or initialise it first")
    if not isinstance(array, np.ndarray):
        raise UsageError(f"'{v.name}' holds a {type(array).__name__}, no array: the program says {v.type}")
    if tuple(array.shape) != v.shape or array.dtype != v.type.numpy:
        raise UsageError(f"'{v.name}' holds {array.dtype}{list(array.shape)}, the program says {v.type}")
    return array
