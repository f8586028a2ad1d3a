"""Which tensors of a model are trained, and why: what `--list-parameters` prints.

In this order: what the user names; what the file says (PyTorch's exporter writes which tensors are parameters and which
buffers); what the graph tells.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import onnx

from ..errors import ModelError, UsageError, nearest
from ..language.op import REGISTRY
from ..language.types import TensorType
from ..support.patterns import Patterns
from .fold import Known
from .origin import FLOATS, Origin, origin_of

#: metadata of models that say themselves what trains: a list of names and globs, as JSON
TRAINABLE = "recompute.trainable"
#: metadata of models that say what does not train unless it is named, in the same form
FROZEN = "recompute.frozen"
#: operators behind which a table of angles is still one
_PASSING = frozenset(
    ["Mul", "MatMul", "Gemm", "Einsum", "Unsqueeze", "Squeeze", "Expand", "Reshape", "Transpose", "Cast", "Concat",
     "Identity", "Div", "Tile", "Flatten"]
)  # fmt: skip


@dataclass(frozen=True)
class Trained:
    """A floating-point tensor of the model: its type, whether it is trained, and why."""

    name: str
    type: TensorType
    trains: bool
    why: str


def said_to_train(model: onnx.ModelProto, key: str = TRAINABLE) -> list[str] | None:
    """The names and globs that the model itself says are trained (or, by `key`, frozen); None where it says nothing.

    ModelError for metadata that is no list of names.
    """
    text = next((p.value for p in model.metadata_props if p.key == key), None)
    if text is None:
        return None
    try:
        names = json.loads(text)
    except (ValueError, RecursionError, TypeError):
        names = None
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise ModelError(f"the model has damaged metadata: {key} is not a list of names")
    return names


class TrainRule:
    """Decides for every tensor of a model; `decided` keeps the answers."""

    def __init__(
        self, graph: onnx.GraphProto, origin: Origin, trainable: Sequence[str] | None, frozen: Sequence[str] = ()
    ) -> None:
        self.origin = origin
        self.frozen = Patterns(frozen)
        self.wanted = None if trainable is None else Patterns(trainable)
        self.angles = angles(graph) if trainable is None else set()
        self.decided: dict[str, Trained] = {}

    def trains(self, name: str, known: Known, op_type: str, position: int) -> bool:
        """Whether a constant that an operator reads at a position is trained."""
        if not known.type.is_float or not op_type:
            return False
        if name in self.decided and self.decided[name].trains:
            return True
        found, why = self._decide(name, known, op_type, position)
        if found or (known.origin == "initializer" and name not in self.decided):
            self.decided[name] = Trained(name, known.type, found, why)
        return found

    def is_parameter(self, name: str) -> bool:
        """Whether the user or the file says that a floating-point initializer is trained."""
        return self.origin.kinds.get(name) == "PARAMETER" if self.wanted is None else self.wanted.fit(name)

    def _decide(self, name: str, known: Known, op_type: str, position: int) -> tuple[bool, str]:
        if self.wanted is not None:
            return (True, "named by trainable") if self.wanted.fit(name) else (False, "not named by trainable")
        if self.frozen.fit(name):
            return False, "the file says: frozen"
        kind = self.origin.kinds.get(name)
        if kind is not None:
            return kind == "PARAMETER", f"the file says: {kind.lower().replace('_', ' ')}"
        at_weight = op_type in REGISTRY and position in REGISTRY[op_type].weights
        if known.type.ndim == 0:
            return False, "a scalar, which --trainable may name"
        if known.origin != "initializer":
            return at_weight and known.origin in ("constant", "fill"), f"a constant that {op_type} takes for a weight"
        if self.origin.kinds and not (at_weight and known.type.ndim > 1):
            return False, "the exporter's own constant: no parameter of the module is called so"
        if name in self.angles:
            return False, "read by cos and sin of positions only"
        if at_weight:
            return True, f"a weight of {op_type}"
        return (False, "a mask") if known.is_mask() else (True, "a floating-point initializer")

    def check(self, parameters: Iterable[str], floats: Iterable[str]) -> None:
        """UsageError where a name or glob of the user fits nothing that can be trained.

        Names of tied parameters, of which the file has one, are accepted.
        """
        if self.wanted is None:
            return
        pattern = self.wanted.useless({*parameters, *self.origin.missing})
        if pattern is not None:
            others = [n for n in floats if n != pattern]
            if pattern in set(floats):
                raise UsageError(f"trainable: '{pattern}' is there, but nothing that depends on it is computed")
            raise UsageError(f"trainable: no float initializer is called '{pattern}'{nearest(pattern, others)}")


def rule_of(source: onnx.ModelProto, graph: onnx.GraphProto, trainable: Sequence[str] | None) -> TrainRule:
    """The rule for a model whose prepared graph is `graph`: by what the user names, or else by what the file says."""
    named = said_to_train(source) if trainable is None else trainable
    return TrainRule(graph, origin_of(source), named, said_to_train(source, FROZEN) or ())


def angles(graph: onnx.GraphProto) -> set[str]:
    """Initializers that only make angles for Cos and Sin, which do not depend on floating-point inputs: inverse
    frequencies of rotary embeddings, and tables of positions."""
    nodes = list(graph.node)
    if not any(n.op_type in ("Cos", "Sin") for n in nodes):
        return set()
    floats = {i.name for i in graph.input if i.type.tensor_type.elem_type in FLOATS}
    floats -= {t.name for t in graph.initializer}
    for n in nodes:
        if n.op_type not in ("Shape", "Size") and any(i in floats for i in n.input):
            floats.update(n.output)
    makes: dict[str, bool] = {}  # value → whether all that reads it makes angles
    kept = {o.name for o in graph.output}
    for n in reversed(nodes):
        plain = n.op_type in ("Cos", "Sin") and n.input[0] not in floats
        passes = (
            n.op_type in _PASSING and bool(n.output) and all(makes.get(o, False) and o not in kept for o in n.output)
        )
        for i in n.input:
            makes[i] = makes.get(i, True) and (plain or passes)
    return {t.name for t in graph.initializer if makes.get(t.name, False)}
