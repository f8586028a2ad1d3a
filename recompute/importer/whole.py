"""Straight-through gradients of integers: floats that hold the same whole numbers, and carry the gradient.

Integers have no gradient.  An operator that rounds floats to integers says which float stands for them (`Stand`);
what only moves or adds integers is done to the float too; and a cast to floats reads it.  So products of integers get
the gradient of the float products whose values they have (Bengio et al. 2013).
"""

from __future__ import annotations

import onnx

from .fold import Known
from .schema import describe
from .state import ImportState

#: operators on integers that do the same to floats that hold them
_SAME = frozenset(
    ["Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Slice", "Identity", "Gather", "MaxPool", "Concat",
     "Split", "Expand", "Pad", "Tile", "Add", "Sub", "Max", "Min", "DepthToSpace", "SpaceToDepth"]
)  # fmt: skip
#: the suffix of such a float's name
_ENDING = ".whole"


def follow(state: ImportState, node: onnx.NodeProto) -> None:
    """After a node on integers: imports it for the floats that hold them too, or notes that it has no gradient."""
    stands = [i for i in node.input if i in state.stands]
    lost = [o for o in node.output if o and o not in state.stands and o in state.env and _integers(state, o)]
    if not stands or not lost:
        return
    if node.op_type not in _SAME or node.domain not in ("", "ai.onnx"):
        state.without_gradient.append(describe(node))
        return
    kind, dtype = state.type_of(stands[0]).dtype, state.stands[stands[0]].value.dtype
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    for i, name in enumerate(node.input):
        if name and state.type_of(name).dtype == kind and not (node.op_type == "Gather" and i == 1):
            copy.input[i] = _float(state, name, dtype)
    copy.output[:] = [o and o + _ENDING for o in node.output]
    copy.name = f"{node.name or node.output[0]}{_ENDING}"
    state.run_plain(copy)
    for o in lost:
        state.stand(o, state.value(o + _ENDING, "", 0))


def _integers(state: ImportState, name: str) -> bool:
    t = state.type_of(name)
    return not t.is_float and t.dtype != "bool"


def _float(state: ImportState, name: str, dtype: str) -> str:
    """The name of a float of a type with the contents of integers."""
    made = f"{name}.{dtype}{_ENDING}"
    if made not in state.env and made not in state.known:
        if name in state.known:
            array = state.known[name].array
            state.known[made] = Known(array.astype(state.type_of(name).with_dtype(dtype).numpy), "folded")
        else:
            stand = state.stands.get(name)
            value = state.value(name, "", 0) if stand is None else stand.value
            state.env[made] = value if value.dtype == dtype else state.builder.Cast(value, to=dtype)
    return made
