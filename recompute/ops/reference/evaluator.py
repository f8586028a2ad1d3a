"""ONNX nodes without kernels here, evaluated by ONNX's own reference evaluator on the CPU."""

from __future__ import annotations

import base64
import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import ModelError
from ...language.op import Op
from ...language.types import TensorType
from .nodes import node_of, pixels_of

if TYPE_CHECKING:
    import onnx


class Reference(Op):
    """`kind`, an ONNX operator that has no gradient, by `onnx.reference`.

    `node`: the NodeProto in base64, its inputs called x0, x1, ... and its outputs y0, y1, ... (absent ones "");
    `opset`: the version of its domain; `types`: of its outputs, as text.  The evaluator allocates as it likes: its
    temporaries are in no plan.
    """

    kind: str
    node: str
    opset: int
    types: tuple[str, ...]
    on_host = "ONNX's own code runs"

    def infer(self, *inputs):
        """The types that ONNX's rules gave at import.  TypeRuleError for a node that may not be evaluated."""
        node_of(self.node)
        return tuple(TensorType.parse(t) for t in self.types)

    def compute(self, ins, outs, scratch):
        """One run of the evaluator; arrays of a device are copied to the host and back."""
        feed = {f"x{i}": a.get() if hasattr(a, "get") else a for i, a in enumerate(ins) if a is not None}
        if self.kind == "ImageDecoder":
            pixels_of(feed["x0"])
        try:
            results = _evaluator(self.node, self.opset).run(None, feed)
        except Exception as e:
            raise ValueError(f"{self.kind}: ONNX's evaluator cannot run it: {e}") from None
        for i, (out, result) in enumerate(zip(outs, results, strict=True)):
            result = np.asarray(result)
            if result.shape != out.shape or result.dtype != out.dtype:
                raise ModelError(f"{self.kind}: output {i} is {result.dtype}{list(result.shape)}, not {self.types[i]}")
            out[...] = np.asarray(result)

    def gradient(self, b, ins, outs, grads):
        raise ModelError(f"{self.kind} has no gradient: stop it before with no_grad, or leave it out of the loss")

    @classmethod
    def samples(cls, draw):
        """A count of n-grams; the exported opset has no general form."""
        import onnx

        options: dict[str, Any] = {"mode": "TF", "min_gram_length": 1, "max_gram_length": 1, "max_skip_count": 0}
        options |= {"ngram_counts": [0], "ngram_indexes": [0, 1], "pool_int64s": [2, 3]}
        node = onnx.helper.make_node("TfIdfVectorizer", ["x0"], ["y0"], **options)
        yield draw.case(reference(node, 18, ("f32[2,2]",)), draw.ints("i64[2,5]", 0, 5), export=False)


def reference(node: onnx.NodeProto, opset: int, types: tuple[str, ...]) -> Reference:
    """The operator for a NodeProto whose names are x0, ..., y0, ... already."""
    kind = f"{node.domain}.{node.op_type}".lstrip(".")
    return Reference(kind, base64.b64encode(node.SerializeToString(deterministic=True)).decode(), opset, types)


@functools.lru_cache(maxsize=256)
def _evaluator(text: str, opset: int) -> Any:
    import onnx
    from onnx.reference import ReferenceEvaluator

    node = node_of(text)
    ins = [onnx.ValueInfoProto(name=n) for n in node.input if n]
    outs = [onnx.ValueInfoProto(name=n) for n in node.output if n]
    graph = onnx.helper.make_graph([node], "reference", ins, outs)
    imports = [onnx.helper.make_opsetid(node.domain, opset)]
    return ReferenceEvaluator(onnx.helper.make_model(graph, opset_imports=imports))
