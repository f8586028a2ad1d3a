"""Boolean-mask indexing (`h[mask]`, `nonzero()`, `index_put`), whose results are as long as the data says.

A program is static, so such a value keeps its full size here, and a *selection* says which entries of an axis count.
Every operator on it runs on the full tensor; reductions leave out what does not count, and means divide by the number
of what does:

    h[mask]                    →  where(mask, h, 0), as [entries of the mask, ...]
    h[mask].sum(), .mean()     →  where(mask, h, 0).sum(), the same / mask.sum()
    h[mask] = v                →  where(mask, v, h)
    len(h[mask])               →  mask.sum() where it is used as a number

Nothing outside these files sees selections: what it leaves is a program of plain operators.

This file is the table of rules, and where the importer comes in; `mask_selection.py`: selections and lengths;
`mask_numbering.py`: when two masks are the same; `mask_work.py`: one node at work; the other `mask_*.py`: a rule for
each operator.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx

from ..errors import ModelError
from . import mask_elementwise as elementwise
from . import mask_indexing as indexing
from . import mask_layout as layout
from . import mask_lengths as lengths
from . import mask_network as network
from . import mask_reductions as reductions
from .function import expand_function
from .mask_work import Work
from .state import ImportState

_OURS = ("", "ai.onnx")

#: operator → what it does with selections
RULES: dict[str, Callable[[Work], None]] = {
    **dict.fromkeys((*elementwise.UNARY, *elementwise.NARY), elementwise.elementwise),
    **dict.fromkeys(("CastLike", "Dropout"), elementwise.like_first),
    **dict.fromkeys(reductions.REDUCTIONS, reductions.reduction),
    **dict.fromkeys(reductions.ALONG, reductions.along),
    **dict.fromkeys(("CumSum", "CumProd"), reductions.running),
    **dict.fromkeys(("Shape", "Size"), lengths.shape),
    "ConstantOfShape": lengths.fill,
    "Expand": lengths.expand,
    "Range": lengths.counting,
    "Transpose": layout.transpose,
    "Squeeze": layout.squeeze,
    "Unsqueeze": layout.unsqueeze,
    "Flatten": layout.flatten,
    "Reshape": layout.reshape,
    "Concat": layout.concat,
    "Split": layout.split,
    "Slice": layout.slices,
    "Tile": layout.tile,
    "EyeLike": layout.eye,
    "NonZero": indexing.nonzero,
    "Compress": indexing.compress,
    "Gather": indexing.gather,
    "GatherND": indexing.gather_nd,
    "GatherElements": indexing.gather_elements,
    "OneHot": indexing.one_hot,
    "ScatterND": indexing.scatter_nd,
    "ScatterElements": indexing.scatter_elements,
    "MatMul": network.matmul,
    "Gemm": network.gemm,
    "Einsum": network.einsum,
    **dict.fromkeys((*network.SAMPLES, "BatchNormalization"), network.samples),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), network.layer_norm),
    **dict.fromkeys(("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"), network.label_loss),
}
#: operators that read shapes as shapes; all others read numbers
_SHAPES = frozenset({"ConstantOfShape", "Expand", "Reshape", "Slice", "Range"})
#: operators that pass coordinates within selected entries on, or take entries by them
_TAKE_SPACES = frozenset(
    {"Transpose", "Squeeze", "Unsqueeze", "Reshape", "Concat", "Identity", "Cast", "Max", "Min", "Sum", "Mean", "Shape",
     "Expand", "Gather", "GatherND", "GatherElements", "ScatterND", "Size"}
)  # fmt: skip


def concerns(importer: ImportState, node: onnx.NodeProto) -> bool:
    """Whether a node makes a selection, or reads a value that has one."""
    selected = importer.selected
    if selected.whole:
        return False
    if selected.marks and any(n in selected.marks or n in selected.lengths for n in node.input):
        return True
    if node.domain not in _OURS:
        return False
    if node.op_type in ("NonZero", "Compress"):
        return node.input[-1] not in importer.known
    counts = node.op_type == "ReduceSum" and bool(selected.masks) and node.input[0] in importer.env
    return counts and importer.type_of(node.input[0]).dtype in ("i32", "i64")


def run(importer: ImportState, node: onnx.NodeProto) -> None:
    """Imports a node that concerns selections.  ModelError, with the idiom that works, for what has no static form."""
    work, selected = Work(importer, node), importer.selected
    named = [n for n in node.input if n in selected.lengths]
    if named:
        if lengths.arithmetic(work) or (node.op_type == "Equal" and lengths.compare(work)):
            return
        if node.op_type not in _SHAPES or node.domain not in _OURS:
            for i, n in enumerate(node.input):
                if n in selected.lengths:
                    node = _with_input(node, i, lengths.number(work, n))
            work = Work(importer, node)
    marked = [i for i, n in enumerate(node.input) if n in selected.marks]
    if not marked and not concerns(importer, node):
        importer.run_plain(node)
        return
    if node.op_type == "ReduceSum" and not marked:
        lengths.counted(work)
        return
    spaces = [i for i in marked if node.input[i] in selected.spaces]
    if spaces and node.op_type not in _TAKE_SPACES:
        raise work.fail(spaces[0], f"{node.op_type} computes with places among entries that a mask keeps")
    rule = RULES.get(node.op_type) if node.domain in _OURS else None
    if rule is not None:
        rule(work)
    elif _has_body(importer, node):
        importer.expand_node(node)
    else:
        raise work.fail(marked[0], f"{node.op_type} does not leave out what a mask leaves out")


def check_output(importer: ImportState, name: str) -> None:
    """ModelError where an output of the model has a selection; a length becomes a number."""
    selected = importer.selected
    if name in selected.marks:
        work = Work(importer, onnx.helper.make_node("Identity", [name], [name]))
        raise ModelError(f"output {work.fail(0, 'an output has a static shape')}")
    if name in selected.lengths and name not in importer.env:
        work = Work(importer, onnx.helper.make_node("Identity", [name], [name]))
        importer.alias(name, lengths.number(work, name))


def _with_input(node: onnx.NodeProto, i: int, name: str) -> onnx.NodeProto:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.input[i] = name
    return copy


def _has_body(importer: ImportState, node: onnx.NodeProto) -> bool:
    types = {n: importer.type_of(n) for n in node.input if n and n not in importer.sequences}
    return node.domain in _OURS and expand_function(node, types, importer.opset_of(node.domain)) is not None
