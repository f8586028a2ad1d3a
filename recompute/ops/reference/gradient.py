"""ONNX's Gradient operator: reverse-mode differentiation inside a model (ai.onnx.preview.training)."""

from __future__ import annotations

from ...language.builder import Builder, reverse
from ...language.op import Imported, ImportedNode, imports


@imports("Gradient", domain="ai.onnx.preview.training")
def gradient(node: ImportedNode) -> Imported:
    """The gradients of the sum of `y` by the inputs `xs`: operators after those that give y.

    Its inputs must be the values that `xs` and `zs` name: y is not computed again from others.
    """
    b: Builder = node.builder
    names = [*node.attributes["xs"], *node.attributes.get("zs", ())]
    inputs = [node.name(i) for i in range(len(names))]
    if names != inputs:
        raise node.fail(f"its inputs are {inputs}, not the values that y depends on: {names}")
    y = node.named(node.attributes["y"])
    wanted = [node.need(i) for i in range(len(node.attributes["xs"]))]
    before = list(b.operators)
    gradients, changed = reverse(b, before, {y.name: b.fill(1.0, y)}, wanted)
    b.operators[: len(before)] = changed
    return tuple(gradients[v.name] if v.name in gradients else b.fill(0.0, v) for v in wanted)
