"""What PyTorch's exporter wrote about a model: which tensors are parameters, which buffers, and what was lost.

The dynamo exporter (`torch.onnx.export(..., dynamo=True)`) puts the exported program's signature into the graph's
metadata: every parameter and buffer of the module by its own name, also those that optimisation merged, folded or
renamed afterwards.  Nodes say which operator of PyTorch they come from.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import dataclass, field

import onnx

from ..errors import ModelWarning
from .copies import copies_of

SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
#: metadata of models that `from_torch` exported: running variances divide by n - 1 as PyTorch's do (ONNX's by n), and
#: attributes are decimal numbers
FROM_TORCH = "recompute.from_torch"
_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
_FOLDED = "pkg.onnxscript.optimizer.folded_from"
_FX, _TRACE = "pkg.torch.onnx.fx_node", "pkg.torch.onnx.stack_trace"
_HIERARCHY = "pkg.torch.onnx.class_hierarchy"
_SCOPES = "pkg.torch.onnx.name_scopes"
#: entries of nodes' metadata that are read here
READ = (_HIERARCHY, _SCOPES)
_LINE = re.compile(r"^\w+: (PARAMETER|BUFFER|CONSTANT_TENSOR) target='([^'\n]+)'", re.MULTILINE)
_DETACHED = re.compile(r"%(detach(?:_\d+)?)\b")
#: a line of a region that the exporter inlined: its number, and in autocast's an argument's name
_INLINED = re.compile(r"<eval_with_key>\.(\d+)[^\n]*\n.*torch\.ops\.aten\.[^\n]*?(\barg\d+_1\b|$)", re.MULTILINE)
#: names that exporters give to tensors that they have made themselves
_MADE_UP = re.compile(r"^(val_\d+|onnx::\w+|(.*/)?Constant\w*_output_0)$")
#: element types of what may be trained
FLOATS = frozenset(
    {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16, onnx.TensorProto.DOUBLE}
)
#: names that are told in one message, at most
_MOST = 2


@dataclass(frozen=True)
class Origin:
    """Facts about a model's origin, from its file.

    `kinds`: "PARAMETER", "BUFFER" or "CONSTANT_TENSOR" by initializer's name.  `missing`: parameters of the module that
    no initializer is called after.  `lost`: sentences about what optimisation did to parameters.  `attached`: values
    that PyTorch detaches and the file does not.  `from_torch`: see FROM_TORCH.
    """

    kinds: dict[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    attached: tuple[str, ...] = ()
    from_torch: bool = False

    def warn(self, stacklevel: int) -> None:
        """Tells once what was lost (ModelWarning), with the remedy."""
        if self.lost:
            text = f"the exporter lost parameters: {'; '.join(self.lost)}. {REMEDY}"
            warnings.warn(text, ModelWarning, stacklevel=stacklevel)
        if self.attached:
            text = (
                f"the exporter lost that values are detached, and gradients pass there ({_some(self.attached)}): use "
                "rc.from_torch, or export with optimize=False and with detach() in place of torch.no_grad()"
            )
            warnings.warn(text, ModelWarning, stacklevel=stacklevel)


def origin_of(model: onnx.ModelProto) -> Origin:
    """Reads what an exporter wrote; nothing of it is trusted beyond which tensors train."""
    said = _metadata(model.graph.metadata_props).get(SIGNATURE, "")
    targets = {target: kind for kind, target in _LINE.findall(said)}
    for v in model.graph.value_info:
        kind = _metadata(v.metadata_props).get(_KIND)
        if kind in ("PARAMETER", "BUFFER", "CONSTANT_TENSOR"):
            targets.setdefault(v.name, kind)
    initializers = {t.name for t in model.graph.initializer}
    kinds = {n: k for n, k in targets.items() if n in initializers}
    missing = tuple(n for n, k in targets.items() if k == "PARAMETER" and n not in initializers)
    lost, attached = tuple(_lost(model, targets, missing)), tuple(dict.fromkeys(_attached(model, targets)))
    return Origin(kinds, missing, lost, attached, _metadata(model.metadata_props).get(FROM_TORCH) == "1")


def made_up(name: str) -> bool:
    """Whether an exporter gave a tensor its name, and not the module."""
    return _MADE_UP.match(name) is not None


def source_operator(node: onnx.NodeProto) -> str:
    """The PyTorch operator that a node was exported from, such as "aten.detach.default"; "" where nothing says it."""
    names = _strings(_metadata(node.metadata_props).get(_HIERARCHY, ""))
    return names[-1] if names else ""


def detached(node: onnx.NodeProto) -> None:
    """Marks an Identity node as one through which no gradient flows, as PyTorch's exporter does."""
    node.metadata_props.add(key=_HIERARCHY, value="['aten.detach.default']")


def described(name: str, kind: str) -> onnx.ValueInfoProto:
    """The entry of a graph that says what an initializer is: "PARAMETER" or "BUFFER"."""
    info = onnx.ValueInfoProto(name=name)
    info.metadata_props.add(key=_KIND, value=kind)
    return info


def module_path(node: onnx.NodeProto) -> list[str]:
    """The modules of PyTorch in which a node was exported, outermost first ("bert.encoder.layer.0"); [] if unknown."""
    return [n for n in _strings(_metadata(node.metadata_props).get(_SCOPES, "")) if n]


def _strings(said: str) -> list[str]:
    """A list of strings as Python writes it; [] for anything else."""
    try:
        names = ast.literal_eval(said) if said and len(said) < 1 << 16 else ()
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return []
    return names if isinstance(names, list) and all(isinstance(n, str) for n in names) else []


def _metadata(properties: object) -> dict[str, str]:
    return {p.key: p.value for p in properties if isinstance(p.value, str)}  # type: ignore[attr-defined]


def _lost(model: onnx.ModelProto, targets: dict[str, str], missing: tuple[str, ...]) -> Iterator[str]:
    """Sentences about parameters that the exporter's optimisation lost."""
    floats = {t.name: t for t in model.graph.initializer if t.data_type in FLOATS}
    lost = [n for n, t in floats.items() if _MADE_UP.match(n) and len(t.dims) > 1]
    norms = [n for n in missing if f"{n.rpartition('.')[0]}.running_mean" in targets]
    folded = [n for n in norms if f"{n.rpartition('.')[0]}.running_mean" not in floats]
    folded = folded or [n for n in lost if n.startswith("onnx::Conv_")]  # as TorchScript's exporter names them
    if folded:
        yield f"batch normalisation is folded into weights and does not train ({_some(folded)})"
    plain = any(node.op_type == "Constant" for node in model.graph.node)  # optimisation makes initializers of them
    shared = _merged(model, floats) if targets and not plain else {}
    if missing and shared:
        count, name = max((c, n) for n, c in shared.items())
        yield f"equal parameters are merged and train as one ('{name}' is read by {count} normalisations)"
    copies = copies_of(lost, floats) if missing or not targets else {}
    if copies:
        tied = _some([f"'{n}' of '{other}'" for n, other in copies.items()])
        yield f"copies of tied ones train apart ({tied})"
    computed = _computed(model, targets, missing, floats.keys() - copies)
    if computed:
        yield f"constants that were computed from parameters pass no gradient on to them ({_some(computed)})"
    fewer = len(missing) - len(lost)
    if fewer > 0 and not (folded or shared or copies or computed) and _optimized(model):
        nameless = f"{len(missing)} that have lost their names ({_some(missing)})"
        yield f"{fewer} of {nameless} are merged or folded into others"


def _merged(model: onnx.ModelProto, floats: dict[str, onnx.TensorProto]) -> dict[str, int]:
    """Initializers that are the scale or bias of several normalisations."""
    count = Counter(
        name
        for node in model.graph.node
        if node.op_type.endswith("Normalization")
        for name in set(node.input[1:3])
        if name in floats
    )
    return {n: c for n, c in count.items() if c > 1}


def _computed(model: onnx.ModelProto, targets: dict[str, str], missing: tuple[str, ...], known: Set[str]) -> list[str]:
    """Initializers that optimisation computed from parameters, with their names.

    A made-up one that stands for a single parameter, in another form, trains in its place.
    """
    made = [v for v in model.graph.value_info if v.name in known and v.name not in targets]
    sources = {v.name: _strings(_metadata(v.metadata_props).get(_FOLDED, "")) for v in made}
    readers = Counter(n for names in sources.values() for n in names)
    computed = []
    for name, names in sources.items():
        parameters = [n for n in names if targets.get(n) == "PARAMETER"]
        alone = len(parameters) == 1 and all(map(made_up, {name, *names} - {*parameters}))
        if parameters and not (alone and parameters[0] in missing and readers[parameters[0]] == 1):
            computed.append(f"'{name}' of {_some(parameters)}")
    return computed


def _attached(model: onnx.ModelProto, targets: dict[str, str]) -> Iterator[str]:
    """Values that depend on parameters, that PyTorch detaches, and that the file does not.

    Optimisation takes `detach` out, and nodes still say that they read it; what is computed under `torch.no_grad()` has
    lines of an exported region, not of the user's file.
    """
    made = {o for node in model.graph.node for o in node.output}
    kinds = {v.name: v.type.tensor_type.elem_type for v in model.graph.value_info}
    reached = {n for n, kind in targets.items() if kind == "PARAMETER"}
    reached.update(t.name for t in model.graph.initializer if made_up(t.name) and len(t.dims) > 1)
    regions = [_INLINED.findall(_metadata(node.metadata_props).get(_TRACE, "")) for node in model.graph.node]
    autocast = {region for found in regions for region, argument in found if argument}
    inside: set[str] = set()
    for node, found in zip(model.graph.node, regions, strict=True):
        read = reached.intersection(node.input)
        if not read:
            continue
        reached.update(node.output)
        if any(region not in autocast for region, _ in found):
            inside.update(node.output)
        elif set(_DETACHED.findall(_metadata(node.metadata_props).get(_FX, ""))) - made:
            yield node.output[0]
        else:
            yield from sorted(n for n in read & inside if kinds.get(n, onnx.TensorProto.FLOAT) in FLOATS)


def _optimized(model: onnx.ModelProto) -> bool:
    """Whether constants were lifted into initializers, which PyTorch's optimisation does."""
    return any(re.match(r"^val_\d+$", t.name) for t in model.graph.initializer)


def _some(names: list[str] | tuple[str, ...]) -> str:
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return ", ".join(names[:_MOST]) + more


#: how to export so that nothing is lost
REMEDY = "Export with optimize=False, use rc.from_torch, or repair this file with untie= and tie=: docs/pytorch.md"
