"""Which ONNX nodes ONNX's reference evaluator may run in a step: what a file names here is not trusted."""

from __future__ import annotations

import base64
import binascii
import functools
import io
from typing import TYPE_CHECKING, Any

from ...errors import ModelError, TypeRuleError

if TYPE_CHECKING:
    import numpy as np
    import onnx

#: operators that onnx's evaluator may run: they have no gradient, or none that anybody trains
REFERENCE = {
    "": {
        "ImageDecoder", "NonMaxSuppression", "NonZero", "RegexFullMatch", "StringConcat",
        "StringNormalizer", "StringSplit", "TfIdfVectorizer", "Unique",
    },
    "ai.onnx.ml": {
        "ArrayFeatureExtractor", "Binarizer", "FeatureVectorizer", "Imputer", "LabelEncoder", "LinearClassifier",
        "LinearRegressor", "Normalizer", "OneHotEncoder", "SVMClassifier", "SVMRegressor", "Scaler", "TreeEnsemble",
        "TreeEnsembleClassifier", "TreeEnsembleRegressor",
    },
    "ai.onnx.preview.training": {"Adagrad", "Adam", "Momentum"},
}  # fmt: skip
#: Pillow's names of the formats of ImageDecoder
_IMAGES = ("BMP", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
#: attributes that loops of the evaluator go up to, for every row
_COUNTED, _MOST_COUNTED = ("max_skip_count", "max_gram_length", "min_gram_length"), 1000


def admitted(domain: str, op_type: str) -> bool:
    """Whether the evaluator may run an operator.

    Cast to f8e8m0, and what else a handler declines, is evaluated, too.
    """
    return op_type in REFERENCE.get(domain, ()) or (domain == "" and op_type in ("Cast", "CastLike"))


@functools.lru_cache(maxsize=256)
def node_of(text: str) -> onnx.NodeProto:
    """The NodeProto that a text in base64 holds.

    TypeRuleError where it is none, or one that the evaluator may not run: subgraphs may run for ever, and operators of
    ours count what they take.
    """
    import onnx

    try:
        node = onnx.NodeProto.FromString(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError):
        raise TypeRuleError("Reference: its 'node' is no ONNX node in base64") from None
    except Exception:  # protobuf's own error class differs from version to version
        raise TypeRuleError("Reference: its 'node' is no ONNX node") from None
    if not admitted(node.domain, node.op_type) or any(a.HasField("g") or a.graphs for a in node.attribute):
        raise TypeRuleError(f"Reference: '{node.op_type}' is no operator that ONNX's evaluator may run here")
    try:
        check_attributes(node)
    except ModelError as e:
        raise TypeRuleError(f"Reference: {node.op_type}: {e}") from None
    except Exception:
        raise TypeRuleError(f"Reference: the attributes of {node.op_type} do not describe trees") from None
    return node


def check_attributes(node: onnx.NodeProto) -> None:
    """ModelError where ONNX's evaluator would go on for very long, or for ever: endless counts, trees that are none."""
    for a in node.attribute:
        if a.name in _COUNTED and a.i > _MOST_COUNTED:
            raise ModelError(f"{a.name} is {_MOST_COUNTED:,} at the most, not {a.i:,}")
    check_trees(node)


def check_trees(node: onnx.NodeProto) -> None:
    """ModelError where the trees of a TreeEnsemble are none: ONNX's evaluator would follow a circle for ever.

    A node that two others lead to is refused as well: what the evaluator copies could double at every step.
    """
    if node.domain != "ai.onnx.ml" or not node.op_type.startswith("TreeEnsemble"):
        return
    attributes = {a.name: _listed(a) for a in node.attribute}
    if node.op_type == "TreeEnsemble":
        children = _children_by_place(attributes)
        roots = [int(r) for r in attributes.get("tree_roots", [])]
    else:
        children, roots = _children_by_name(attributes)
    seen: set[Any] = set()
    todo: list[Any] = list(dict.fromkeys(roots))
    while todo:
        at = todo.pop()
        if at in seen:
            raise ModelError("its trees are none: two branches lead to the same node, or one leads back")
        seen.add(at)
        todo += children.get(at, ())


def _listed(a: Any) -> list[Any]:
    if a.HasField("t"):
        import onnx

        return onnx.numpy_helper.to_array(a.t).reshape(-1).tolist()
    return list(a.ints or a.strings or a.floats)


def _children_by_place(attributes: dict[str, list[Any]]) -> dict[Any, list[Any]]:
    children: dict[Any, list[Any]] = {}
    for side in ("true", "false"):
        ids, leaves = attributes.get(f"nodes_{side}nodeids", []), attributes.get(f"nodes_{side}leafs", [])
        for i, (child, leaf) in enumerate(zip(ids, leaves, strict=False)):
            if not leaf:
                children.setdefault(i, []).append(int(child))
    return children


def _children_by_name(attributes: dict[str, list[Any]]) -> tuple[dict[Any, list[Any]], list[Any]]:
    trees, names = attributes.get("nodes_treeids", []), attributes.get("nodes_nodeids", [])
    modes = attributes.get("nodes_modes", [])
    yes, no = attributes.get("nodes_truenodeids", []), attributes.get("nodes_falsenodeids", [])
    children: dict[Any, list[Any]] = {}
    roots: dict[Any, Any] = {}
    for tree, name, mode, a, b in zip(trees, names, modes, yes, no, strict=False):
        if (tree, name) in children:
            raise ModelError(f"its tree {tree} has two nodes {name}")
        roots.setdefault(tree, (tree, name))
        children[tree, name] = [] if mode == b"LEAF" else [(tree, a), (tree, b)]
    return children, list(roots.values())


def pixels_of(encoded: np.ndarray) -> int:
    """How many pixels the bytes of an image say that it has; 0 without Pillow.

    ModelError for what is damaged, or of a format that ImageDecoder does not name: some of Pillow's start programs.
    """
    try:
        import PIL.Image
    except ImportError:  # the evaluator raises the error
        return 0
    try:
        with PIL.Image.open(io.BytesIO(encoded.tobytes()), formats=_IMAGES) as image:
            return image.size[0] * image.size[1]
    except Exception:  # damaged images raise exceptions of many kinds
        raise ModelError(f"its image is damaged, or of none of the formats {', '.join(_IMAGES)}") from None
