"""Outputs that are no tensors of numbers, behind classifiers of scikit-learn's exporter: left out with a word."""

from __future__ import annotations

import warnings

import onnx

from ..errors import ModelWarning
from .graphs import names_read

_ML = "ai.onnx.ml"


def without_maps(graph: onnx.GraphProto) -> tuple[list[onnx.NodeProto], dict[str, str]]:
    """The nodes without those that make maps and strings for outputs alone; such outputs, and the scores behind each.

    ZipMap makes a list of dictionaries of the scores; classifiers also give labels, which may be strings.
    """
    outputs, read = {o.name for o in graph.output}, set(names_read(graph.node))
    nodes: list[onnx.NodeProto] = []
    left: dict[str, str] = {}
    for node in graph.node:
        first = node.output[0] if node.output else ""
        alone = node.domain == _ML and first in outputs and first not in read
        if alone and node.op_type == "ZipMap":
            left[first] = node.input[0]
            continue
        if (
            alone
            and len(node.output) > 1
            and any(a.name == "classlabels_strings" and a.strings for a in node.attribute)
        ):
            left[first] = node.output[1]
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            copy.output[0] = ""
            node = copy
        nodes.append(node)
    if left:
        warnings.warn(
            f"the outputs {', '.join(map(repr, left))} are maps or strings, which a step cannot hold: they are left "
            f"out, and the scores {', '.join(map(repr, dict.fromkeys(left.values())))} are the outputs",
            ModelWarning,
            stacklevel=2,
        )
    return nodes, left
