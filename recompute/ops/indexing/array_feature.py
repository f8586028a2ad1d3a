"""ai.onnx.ml's ArrayFeatureExtractor, which scikit-learn's exporter writes behind a classifier."""

from __future__ import annotations

from ...language.op import Imported, ImportedNode, imports


@imports("ArrayFeatureExtractor", domain="ai.onnx.ml")
def array_feature_extractor(node: ImportedNode) -> Imported:
    """x[..., indices] by a Gather along the last axis; of a vector a matrix of one row."""
    x, indices = node.need(0), node.need(1)
    flat = node.builder.Reshape(indices, shape=(indices.size,))
    y = node.builder.Gather(x, flat, axis=x.ndim - 1)
    return node.builder.Reshape(y, shape=(1, indices.size)) if x.ndim == 1 else y
