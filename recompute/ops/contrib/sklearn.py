"""ai.onnx.ml's operators that scikit-learn's exporter (skl2onnx) writes around linear models, as plain ONNX nodes.

Each has the mathematics of ONNX's Operators-ml.md, and gradients.  Coefficients and intercepts of linear models train;
scales and offsets of Scaler do not.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...language.contexts import Imported, ImportedNode, NodeWriter
from ...language.op import imports

ML = "ai.onnx.ml"
#: nodes that turn scores into results, by `post_transform`
_TRANSFORMS = ("NONE", "LOGISTIC", "SOFTMAX")


def _floats(node: ImportedNode, g: NodeWriter) -> str:
    """The input, in float32 where it is no float."""
    return g.ins[0] if node.need_type(0).is_float else g.Cast(g.ins[0], to=1)


def _kind(node: ImportedNode) -> Any:
    """The NumPy type that the mathematics runs in."""
    t = node.need_type(0)
    return t.numpy if t.is_float else np.float32


def _each(node: ImportedNode, name: str, default: float) -> np.ndarray:
    """A list of one number, or one a feature."""
    values = np.asarray(node.attributes.get(name, (default,)), np.float64)
    features = node.need_type(0).shape[-1] if node.need_type(0).ndim else 1
    if values.size not in (1, features):
        raise node.fail(f"its {name} has {values.size} numbers for {features} features")
    return values


@imports("Scaler", domain=ML)
def scaler(node: ImportedNode) -> Imported:
    """(x - offset) · scale."""
    g, kind = node.body(), _kind(node)
    less = g.Sub(_floats(node, g), g.constant(_each(node, "offset", 0.0), kind))
    return g.results(g.Mul(less, g.constant(_each(node, "scale", 1.0), kind)))


@imports("Normalizer", domain=ML)
def normalizer(node: ImportedNode) -> Imported:
    """Rows over their largest element (MAX), their sum of magnitudes (L1), or their length (L2); rows of zeros stay."""
    g, norm = node.body(), node.attributes.get("norm", "MAX")
    x, axes, kind = _floats(node, g), g.constant([-1]), _kind(node)
    if norm == "MAX":  # ONNX Runtime and the reference divide by the largest element itself
        size = g.ReduceMax(x, axes)
    elif norm in ("L1", "L2"):
        size = g.ReduceSum(g.Abs(x) if norm == "L1" else g.Mul(x, x), axes)
    else:
        raise node.fail(f"its norm '{norm}' is not MAX, L1 or L2")
    one = g.constant(1.0, kind)
    size = g.Where(g.Equal(size, g.constant(0.0, kind)), one, size)  # before the root, whose slope at 0 is infinite
    return g.results(g.Div(x, g.Sqrt(size) if norm == "L2" else size))


@imports("Imputer", domain=ML)
def imputer(node: ImportedNode) -> Imported:
    """Missing values (a number, or NaN) are replaced by a number for their feature."""
    g, whole = node.body(), not node.need_type(0).is_float
    values = node.attributes.get("imputed_value_int64s" if whole else "imputed_value_floats", ())
    missing = node.attributes.get("replaced_value_int64" if whole else "replaced_value_float", 0)
    features = node.need_type(0).shape[-1] if node.need_type(0).ndim else 1
    if len(values) not in (1, features):
        raise node.fail(f"it has {len(values)} values for {features} features")
    kind = node.need_type(0).numpy
    x = g.ins[0]
    gone = g.IsNaN(x) if not whole and np.isnan(missing) else g.Equal(x, g.constant(missing, kind))
    return g.results(g.Where(gone, g.constant(values, kind), x))


@imports("Binarizer", domain=ML)
def binarizer(node: ImportedNode) -> Imported:
    """1 where x is greater than the threshold, else 0."""
    g = node.body()
    above = g.Greater(g.ins[0], g.constant(node.attributes.get("threshold", 0.0), node.need_type(0).numpy))
    return g.results(g.CastLike(above, g.ins[0]))


@imports("OneHotEncoder", domain=ML)
def one_hot_encoder(node: ImportedNode) -> Imported:
    """A last axis with 1 at the category that x is; x of no category gives zeros."""
    if not node.attributes.get("zeros", 1):
        return None  # an error for what is no category
    categories = node.attributes.get("cats_int64s")
    if categories is None:
        raise node.fail("its categories are strings, which a step cannot hold")
    g = node.body()
    x = g.Unsqueeze(g.ins[0], g.constant([-1]))
    same = g.Equal(x, g.constant(categories, node.need_type(0).numpy))
    return g.results(g.Cast(same, to=1))


# -- linear models -----------------------------------------------------------------------------------------------------


def _scores(node: ImportedNode, g: NodeWriter, rows: int, intercepts: str) -> str:
    """x · coefficientsᵀ + intercepts, [n, rows]; x of one dimension is one row."""
    coefficients = np.asarray(node.attributes.get("coefficients", ()), np.float32)
    features = node.need_type(0).shape[-1]
    coefficients = coefficients[: rows * features] if node.op_type == "LinearClassifier" else coefficients
    if rows < 1 or coefficients.size != rows * features:
        raise node.fail(f"it has {coefficients.size} coefficients for {rows} rows of {features} features")
    x = _floats(node, g)
    if node.need_type(0).ndim == 1:
        x = g.Unsqueeze(x, g.constant([0]))
    kind = _kind(node)
    weights = [g.weight("coefficients", coefficients.reshape(rows, features), kind)]
    offset = np.asarray(node.attributes.get(intercepts, ()), np.float32)
    if offset.size not in (0, rows):
        raise node.fail(f"it has {offset.size} intercepts for {rows} rows")
    if offset.size:
        weights.append(g.weight(intercepts, offset, kind))
    return g.Gemm(x, *weights, transB=1)


def _transformed(node: ImportedNode, g: NodeWriter, y: str, applied: tuple[str, ...] = _TRANSFORMS) -> str:
    how = node.attributes.get("post_transform", "NONE")
    if how not in _TRANSFORMS:
        raise node.fail(f"its post_transform {how} is not supported ({', '.join(_TRANSFORMS)} are)")
    if how not in applied:
        return y
    return g.Sigmoid(y) if how == "LOGISTIC" else g.Softmax(y, axis=-1) if how == "SOFTMAX" else y


@imports("LinearRegressor", domain=ML)
def linear_regressor(node: ImportedNode) -> Imported:
    """x · coefficientsᵀ + intercepts, [n, targets]."""
    g = node.body()
    return g.results(_transformed(node, g, _scores(node, g, node.attributes.get("targets", 1), "intercepts")))


@imports("LinearClassifier", domain=ML)
def linear_classifier(node: ImportedNode) -> Imported:
    """The label of the greatest score (integers only), and the scores of all classes [n, classes].

    A binary model with one row of coefficients has the scores 1 - s and s, s after LOGISTIC alone, as ONNX Runtime has.
    """
    g = node.body()
    labels = node.attributes.get("classlabels_ints")
    names = node.attributes.get("classlabels_strings")
    classes = len(labels or names or ())
    coefficients = len(node.attributes.get("coefficients", ()))
    # files exist whose coefficients are too many: ONNX Runtime counts intercepts, and reads the first
    rows = len(node.attributes.get("intercepts", ())) or coefficients // max(node.need_type(0).shape[-1], 1)
    raw = _scores(node, g, rows, "intercepts")
    binary = rows == 1 and classes == 2
    if not binary and rows != classes:
        raise node.fail(f"it has {rows} rows of coefficients for {classes} classes")
    scores = _transformed(node, g, raw, ("LOGISTIC",) if binary else _TRANSFORMS)
    if binary:
        scores = g.Concat(g.Sub(g.constant(1.0, _kind(node)), scores), scores, axis=1)
    if not node.outputs[0]:
        return g.results("", scores)
    if labels is None:
        raise node.fail(
            f"its labels '{node.outputs[0]}' are strings, which a step cannot hold: cut the model at its scores "
            f"'{node.outputs[1] if len(node.outputs) > 1 else ''}'"
        )
    best = g.ArgMax(g.Concat(g.Neg(raw), raw, axis=1) if binary else raw, axis=1, keepdims=0)
    return g.results(g.Gather(g.constant(labels), best, axis=0), scores)
