"""LoRA (Hu et al. 2021, arXiv 2106.09685) and DoRA (Liu et al. 2024, arXiv 2402.09353) as an edit of the ONNX model.

Beside each chosen linear layer y = x·Wᵀ + b stands a product of two thin matrices, which alone train:

    y = x·Wᵀ + b + s·(dropout(x)·Aᵀ)·Bᵀ         s = alpha / r;  A [r, in], B [out, r], as PEFT stores them

DoRA divides the rows of W + s·B·A by their lengths, through which no gradient flows, and multiplies them by a trained
magnitude.  The lengths are those of W, corrected by thin products, so that W + s·B·A itself is never formed:

    |W + s·B·A|² = |W|² + 2·s·(W·Aᵀ ∘ B)·1 + s²·(B·A·Aᵀ ∘ B)·1
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper

from ..errors import ModelError, UsageError, expect, nearest
from ..importer.origin import detached
from ..language.draws import generator, normal
from ..language.types import DTYPES, dtype_from_onnx
from ..support.json_values import unfit
from ..support.patterns import Patterns
from .graph import Graph, edits
from .heads import drawn
from .weights import Site, Weight, matrices, weight_of

__all__ = ["Adapter", "adapters_of", "lora"]

#: the entry of the model's metadata that says which adapters it has
ADAPTERS = "recompute.adapters"
#: element types of quantised weights
_CODES = (onnx.TensorProto.INT8, onnx.TensorProto.UINT8, onnx.TensorProto.INT4, onnx.TensorProto.UINT4)


#: fields of the metadata on each adapter
_FIELDS = {
    "weight": str, "module": str, "kind": str, "turned": bool, "r": int, "alpha": float, "dropout": float,
    "factor": float, "dora": bool, "sites": [{"output": str, "base": str, "bias": str, "added": [str]}],
}  # fmt: skip


@dataclass(frozen=True)
class Adapter:
    """The adapter of one weight, as the model's metadata describes it.

    `weight`: the frozen weight; `module`: its name in PEFT; `kind`: "linear" or "embedding"; `turned`: the weight is
    stored [out, in].  `factor`: s.  `sites`: for each node that reads the weight its output, what it writes now, the
    values that were added, and the bias that was taken from it ("" for none).
    """

    weight: str
    module: str
    kind: str
    turned: bool
    r: int
    alpha: float
    dropout: float
    factor: float
    dora: bool
    sites: list[dict[str, Any]] = field(default_factory=list)

    @property
    def tensors(self) -> dict[str, str]:
        """The trained tensors by what they are ("A", "B", "magnitude"); the names in PEFT's files, without prefix."""
        if self.kind == "embedding":
            return {"A": f"{self.module}.lora_embedding_A", "B": f"{self.module}.lora_embedding_B"}
        names = {"A": f"{self.module}.lora_A.weight", "B": f"{self.module}.lora_B.weight"}
        return {**names, "magnitude": f"{self.module}.lora_magnitude_vector"} if self.dora else names


def adapters_of(model: onnx.ModelProto) -> list[Adapter]:
    """The adapters of a model.  ModelError where its metadata is damaged."""
    graph = [p.value for p in model.metadata_props if p.key == ADAPTERS]
    if not graph:
        return []
    import json

    try:
        entries = json.loads(graph[0])
        why = unfit(entries, [_FIELDS], "adapters") or next(
            (w for i, a in enumerate(entries) if (w := _unfit(i, a))), ""
        )
        adapters = [Adapter(**a) for a in entries] if not why else []
    except (ValueError, TypeError, RecursionError):
        why = "it is not JSON of this version"
    if not why and len({a.weight for a in adapters}) < len(adapters):
        why = "one weight has two adapters"
    if why:
        raise ModelError(f"the model has damaged metadata: {ADAPTERS} does not describe adapters ({why})")
    return adapters


def _unfit(i: int, a: dict[str, Any]) -> str:
    """Why the numbers of an adapter are impossible."""
    if a["kind"] not in ("linear", "embedding") or a["r"] < 1 or not 0 <= a["dropout"] < 1:
        return f"adapters[{i}] has an impossible kind, r or dropout"
    return ""


@edits
def lora(
    model: Graph,
    patterns: str | Sequence[str],
    *,
    r: int = 8,
    alpha: float = 16,
    dropout: float = 0.0,
    dora: bool = False,
    seed: int = 0,
    train: Sequence[str] = (),
) -> None:
    """Adds LoRA adapters to the weights that names or globs match, and freezes everything else.

    `model`: a path, a ModelProto, or a Program from before losses and `minimize`; it stays as it is.  The result is a
    ModelProto, or a Program for a Program; saved to a file and loaded again, the adapters are what trains.
    `patterns`: weights of linear layers (MatMul, Gemm), or tables of embeddings (Gather).  `r`: the rank; the factor is
    `alpha` / `r`.  `dropout`: of what A reads, in training.  `dora`: a trained magnitude for each output feature.
    `seed`: A is drawn uniformly from ±1/√in (tables: B normally), by the seed and its name; B (tables: A) is zero.
    `train`: names and globs of further tensors that train, such as a new head.

    UsageError for a pattern that matches no weight, and for a weight that is read in other ways.
    """
    if isinstance(r, bool) or not isinstance(r, (int, np.integer)) or r < 1:
        raise UsageError(f"r must be a whole number of at least 1, not {r!r}")
    number, flag = "a number", "True or False"
    expect("alpha", alpha, (int, float, np.number), number), expect("dora", dora, bool, flag)
    if not 0 <= expect("dropout", dropout, (int, float), number) < 1:
        raise UsageError(f"dropout must be a number from 0 to less than 1, not {dropout!r}")
    weights = chosen(model, patterns, "lora")
    wanted, floats = Patterns(train), _floats(model)
    useless = wanted.useless(floats)
    if useless is not None:
        raise UsageError(f"lora: nothing that can be trained is called '{useless}'{nearest(useless, floats)}")
    adapters = [
        Adapter(w.name, w.module, w.kind, w.turned, int(r), float(alpha), float(dropout), alpha / r, dora)
        for w in weights
    ]
    arrays = {name: array for a, w in zip(adapters, weights, strict=True) for name, array in initial(model, a, w, seed)}
    add_adapters(model, adapters, weights, arrays, [n for n in floats if wanted.fit(n)])


def chosen(model: Graph, patterns: str | Sequence[str], who: str) -> list[Weight]:
    """The weights that names and globs match.  UsageError for a pattern that matches none."""
    if model.said(ADAPTERS):
        raise UsageError("the model has adapters already: merge them first (rc.merge_adapters)")
    shapes = matrices(model)
    wanted = Patterns(patterns)
    useless = wanted.useless(shapes)
    if useless is not None:
        refuse_codes(model, useless, who)
        raise UsageError(f"{who}: no matrix of the model is called '{useless}'{nearest(useless, shapes)}")
    readers = model.reading()
    return [weight_of(readers, n, shape, kind) for n, (shape, kind) in shapes.items() if wanted.fit(n)]


def refuse_codes(model: Graph, pattern: str, who: str) -> None:
    """UsageError where a pattern names weights of whole numbers that no DequantizeLinear makes floats of."""
    wanted = Patterns(pattern)
    for t in model.tensors.values():
        if t.data_type in _CODES and len(t.dims) == 2 and wanted.fit(t.name):
            readers = [f"{n.op_type} (node '{n.name or n.output[0]}')" for n in model.nodes if t.name in n.input]
            raise UsageError(
                f"{who}: '{t.name}' holds whole numbers, which {', '.join(readers) or 'nothing'} reads: only weights "
                "of MatMul, Gemm and Gather are supported, in floats or behind DequantizeLinear, or Cast and Mul (by "
                "the name of what these make), and of products of what is quantized in the graph. Or take the model "
                "from before it was quantised, and rc.quantize_frozen, which stores its weights in 8 bits"
            )


def _floats(model: Graph) -> list[str]:
    return [t.name for t in model.tensors.values() if t.data_type in (1, 10, 11, 16)] + list(matrices(model))


def refuse_dora(a: Adapter, w: Weight) -> None:
    """UsageError for DoRA of a table, and of a weight in few bits."""
    if a.dora and (w.packed or a.kind == "embedding"):
        what = "weights in few bits" if w.packed else "tables"
        raise UsageError(
            f"DoRA of {what} is not supported: '{a.weight}' is read by {w.sites[0].node.op_type}; leave it out, or dora"
        )


def initial(model: Graph, a: Adapter, w: Weight, seed: int) -> Iterator[tuple[str, np.ndarray]]:
    """The first contents of an adapter, by which the model computes what it did before."""
    numbers = DTYPES[dtype_from_onnx(w.onnx_type) or "f32"]
    first, last = w.features
    refuse_dora(a, w)
    for what, name in a.tensors.items():
        if what == "magnitude":
            matrix = model.constant_matrix(w.name).astype(np.float64)
            yield name, np.sqrt((matrix**2).sum(axis=1 if w.turned else 0)).astype(numbers)
        elif a.kind == "embedding" and what == "B":
            yield name, normal(generator(seed, name), (last, a.r)).astype(numbers)
        elif a.kind == "linear" and what == "A":
            yield name, drawn(name, (a.r, first), 1 / math.sqrt(first), seed).astype(numbers)
        else:
            yield name, np.zeros((a.r, first) if what == "A" else (last, a.r), numbers)


def add_adapters(
    model: Graph,
    adapters: Sequence[Adapter],
    weights: Sequence[Weight],
    arrays: Mapping[str, np.ndarray],
    train: Sequence[str] = (),
) -> None:
    """Writes adapters with their contents into a graph, and into its metadata."""
    names = [n for a in adapters for n in a.tensors.values()]
    for name in names:
        if model.fresh(name) != name:
            raise UsageError(f"the model has a value '{name}' already, which an adapter would be called")
        model.add_tensor(name, arrays[name])
    before, after = defaultdict[int, list[onnx.NodeProto]](list), dict[int, list[onnx.NodeProto]]()
    places, makers = model.places(), model.makers()
    for a, w in zip(adapters, weights, strict=True):
        refuse_dora(a, w)
        first = min(places[id(s.node)] for s in w.sites)
        if a.dora and a.weight in makers:
            first = max(first, places[id(makers[a.weight])] + 1)
        shared, tensors = _Writer(model, a, w).written()
        before[id(model.nodes[first])] += shared
        after.update((id(site.node), nodes) for site, nodes in zip(w.sites, tensors, strict=True))
    model.insert(before, after)
    model.set_trained([*names, *train])
    model.say(ADAPTERS, [asdict(a) for a in adapters])


class _Writer:
    """Writes the nodes of one adapter."""

    def __init__(self, model: Graph, a: Adapter, w: Weight) -> None:
        self.model, self.a, self.w = model, a, w
        self.numbers = DTYPES[dtype_from_onnx(w.onnx_type) or "f32"]
        self.made: list[onnx.NodeProto] = []

    def put(self, op_type: str, ins: Sequence[str], what: str, **attributes: Any) -> str:
        name = self.model.fresh(f"{self.a.module}.{what}")
        self.made.append(helper.make_node(op_type, ins, [name], name=name, **attributes))
        return name

    def number(self, value: float | int, what: str) -> str:
        array = np.array(value, self.numbers) if isinstance(value, float) else np.array([value], np.int64)
        return self.put("Constant", [], what, value=onnx.numpy_helper.from_array(array))

    def written(self) -> tuple[list[onnx.NodeProto], list[list[onnx.NodeProto]]]:
        """The nodes that all readers of the weight share, and those behind each."""
        a, names = self.a, self.a.tensors
        down = self.put("Transpose", [names["A"]], "lora_A.turned", perm=[1, 0])
        up = self.put("Transpose", [names["B"]], "lora_B.turned", perm=[1, 0])
        factor = self.number(a.factor, "lora_factor")
        ratio = self.ratio(down, up, factor) if a.dora else ""
        shared, self.made = self.made, []
        tensors = []
        for k, site in enumerate(self.w.sites):
            nodes = self.site(site, down, up, factor, ratio)
            nodes["added"] = [n.output[0] for n in (*self.made, *(shared if k == 0 else ()))]
            nodes["added"].append(nodes["output"])
            tensors.append(self.made)
            self.made = []
            a.sites.append(nodes)
        return shared, tensors

    def site(self, site: Site, down: str, up: str, factor: str, ratio: str) -> dict[str, Any]:
        """Writes what is added to one reader of the weight; its entry of the metadata."""
        a, node = self.a, site.node
        y, base = node.output[0], self.model.fresh(f"{node.output[0]}.base")
        x, bias = site.x or node.input[0], ""
        node.output[0] = base
        if a.kind == "embedding":
            thin = self.put("Gather", [down, node.input[1]], "lora_A.out", axis=0)
        else:
            x = self.dropout(x) if a.dropout else x
            thin = self.put("MatMul", [x, down], "lora_A.out")
        change = self.put("MatMul", [self.put("Mul", [thin, factor], "lora_scaled"), up], "lora_B.out")
        weight = base
        if a.dora and len(node.input) > 2 and node.input[2]:
            bias = node.input[2]
            del node.input[2:]
            if self.model.opset < 11:  # a Gemm has a bias
                node.input.append(self.model.fresh(f"{a.module}.lora_no_bias"))
                self.model.add_tensor(node.input[2], np.zeros(1, self.numbers))
        if a.dora and a.dropout:  # the magnitude scales what dropout leaves of x, as in PEFT
            again = onnx.NodeProto.FromString(node.SerializeToString())
            again.name = again.output[0] = self.model.fresh(f"{a.module}.lora_base")
            again.input[0] = x
            self.made.append(again)
            less = self.put("Sub", [ratio, self.number(1.0, "lora_one")], "lora_ratio_less_one")
            weight = self.put("Add", [base, self.put("Mul", [again.output[0], less], "lora_rescaled")], "lora_own")
            change = self.put("Mul", [change, ratio], "lora_change")
        last = [weight, change]
        if a.dora and not a.dropout:
            last = [self.put("Add", last, "lora_sum"), ratio]
        op_type = "Mul" if a.dora and not a.dropout else "Add"
        if bias:
            last, op_type = [self.last(op_type, last), bias], "Add"
        self.made.append(helper.make_node(op_type, last, [y], name=self.model.fresh(f"{a.module}.lora_result")))
        return {"output": y, "base": base, "bias": bias}

    def total(self, x: str, axis: int, what: str) -> str:
        if self.model.opset < 13:
            return self.put("ReduceSum", [x], what, keepdims=0, axes=[axis])
        return self.put("ReduceSum", [x, self.number(axis, f"{what}_axis")], what, keepdims=0)

    def last(self, op_type: str, ins: Sequence[str]) -> str:
        return self.put(op_type, ins, "lora_scaled_sum")

    def dropout(self, x: str) -> str:
        if self.model.opset < 12:  # trains where the program does
            return self.put("Dropout", [x], "lora_dropout", ratio=self.a.dropout)
        ratio, on = (
            self.number(self.a.dropout, "lora_dropout_ratio"),
            self.model.fresh(f"{self.a.module}.lora_training"),
        )
        self.made.append(
            helper.make_node("Constant", [], [on], name=on, value=onnx.numpy_helper.from_array(np.array(True)))
        )
        return self.put("Dropout", [x, ratio, on], "lora_dropout")

    def ratio(self, down: str, up: str, factor: str) -> str:
        """The magnitude over the lengths of the rows of W + s·B·A, which pass no gradient on."""
        w, names = self.w, self.a.tensors
        rows = 1 if w.turned else 0
        squares = self.total(self.put("Mul", [w.name, w.name], "lora_square"), rows, "lora_squares")
        if w.turned:
            cross = self.put("Mul", [self.put("MatMul", [w.name, down], "lora_WA"), names["B"]], "lora_cross")
        else:
            cross = self.put("Mul", [self.put("MatMul", [names["A"], w.name], "lora_WA"), up], "lora_cross")
        cross = self.total(cross, rows, "lora_cross_sum")
        gram = self.put("MatMul", [names["A"], down], "lora_AA")
        total = self.put("Mul", [self.put("MatMul", [names["B"], gram], "lora_BAA"), names["B"]], "lora_BAAB")
        total = self.total(total, 1, "lora_BAAB_sum")
        twice = self.put("Add", [cross, cross], "lora_cross_twice")
        inner = self.put("Add", [twice, self.put("Mul", [total, factor], "lora_BAAB_scaled")], "lora_inner")
        whole = self.put("Add", [squares, self.put("Mul", [inner, factor], "lora_inner_scaled")], "lora_squared_norm")
        norm = self.put("Identity", [self.put("Sqrt", [whole], "lora_norm")], "lora_norm_detached")
        detached(self.made[-1])
        return self.put("Div", [names["magnitude"], norm], "lora_ratio")
