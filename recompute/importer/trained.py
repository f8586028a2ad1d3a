"""Which tensors of a model are trained, and why: what `--list-parameters` prints.

In this order: what the user names; what the file says (PyTorch's exporter writes which tensors are parameters and which
buffers); what the graph tells.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx

from ..errors import ModelError, ModelWarning, UsageError, nearest
from ..language.types import TensorType
from ..support.patterns import Patterns
from .fold import Known
from .origin import FLOATS, made_up, origin_of
from .roles import at_weight, roles_of

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
    """A floating-point tensor of the model, or integers that stand for one: its type, whether it trains, and why."""

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
    """Decides for every tensor of a model; `decided` keeps the answers.

    `copies`: a shared tensor's further names.
    """

    def __init__(
        self, source: onnx.ModelProto, graph: onnx.GraphProto, trainable: Sequence[str] | None, straight: bool = False
    ) -> None:
        self.origin = origin_of(source)
        self.from_pytorch = source.producer_name == "pytorch"
        #: whether initializers that have no made-up name are parameters of modules (the zoo's are, too)
        self.of_modules = source.producer_name in ("pytorch", "onnx-recompute")
        self.frozen = Patterns(said_to_train(source, FROZEN) or ())
        self.wanted = None if trainable is None else Patterns(trainable)
        self.roles = roles_of(graph)
        if straight:  # scales of what is quantised in the graph have a gradient
            self.roles.scales.difference_update(self.roles.measured)
        self.angles = angles(graph, self.roles.held) if trainable is None else set()
        self.decided: dict[str, Trained] = {}
        self.copies: dict[str, list[str]] = {}

    def trains(self, name: str, known: Known, op_type: str, position: int) -> bool:
        """Whether a constant that an operator reads at a position is trained."""
        if not known.type.is_float or not op_type:
            return False
        if name in self.decided and self.decided[name].trains:
            return True
        answer, why = self._decide(name, known, op_type, position)
        if answer or (self._of_the_file(name, known) and name not in self.decided):
            self.decided[name] = Trained(name, known.type, answer, why)
        return answer

    def is_parameter(self, name: str) -> bool:
        """Whether the user or the file says that a floating-point initializer is trained."""
        return self.origin.kinds.get(name) == "PARAMETER" if self.wanted is None else self._named(name)

    def _of_the_file(self, name: str, known: Known) -> bool:
        return known.origin == "initializer" or name in self.roles.constants

    def _named(self, name: str) -> bool:
        """Whether the user names a tensor, by any of its names."""
        assert self.wanted is not None
        return any(self.wanted.fit(n) for n in (name, *self.copies.get(name, ())))

    def _decide(self, name: str, constant: Known, op_type: str, position: int) -> tuple[bool, str]:
        if self.wanted is not None:
            return (True, "named by trainable") if self._named(name) else (False, "not named by trainable")
        if self.frozen.fit(name):
            return False, "the file says: frozen"
        kind = self.origin.kinds.get(name)
        if kind is not None:
            return kind == "PARAMETER", f"the file says: {kind.lower().replace('_', ' ')}"
        if name in self.roles.scales:
            return False, "a scale of integers, which do not train"
        weighs = at_weight(op_type, position)
        if constant.type.ndim == 0:
            return False, "a scalar, which --trainable may name"
        if constant.origin != "initializer":
            held = weighs and constant.origin in ("constant", "fill")
            what = f"a constant that {op_type} takes for a weight" if held else f"a constant that {op_type} reads"
            return held, what
        if self.origin.kinds and not (weighs and constant.type.ndim > 1):
            return False, "the exporter's own constant: no parameter of the module is called so"
        if name in self.angles:
            return False, "read by cos and sin of positions only"
        if weighs:
            return True, f"a weight of {op_type}"
        if name in self.roles.bounds:
            return False, f"a constant of {op_type}, not a weight"
        named = name in self.roles.held or (self.of_modules and not made_up(name))
        if constant.type.size == 1 and not (name in self.roles.biases or named):
            return False, "one number, which --trainable may name"
        return (False, "a mask") if constant.is_mask() else (True, self._form(name))

    def _form(self, name: str) -> str:
        return (
            "a constant in a file whose weights are constants"
            if name in self.roles.held
            else "a floating-point initializer"
        )

    def rest(self, known: Mapping[str, Known], read: Collection[str]) -> Iterator[Trained]:
        """The tensors of the file that no operator has asked for, and integers that stand for weights."""
        for name, k in known.items():
            if not self._of_the_file(name, k) or name in self.decided:
                continue
            if k.type.is_float:
                yield Trained(name, k.type, False, self._why_not(name, name in read))
            elif name in self.roles.codes and k.type.ndim:
                yield Trained(name, k.type, False, "integers of a frozen weight")

    def _why_not(self, name: str, read: bool) -> str:
        """Why a tensor that no operator takes as a value does not train."""
        if name in self.origin.kinds:
            return f"the file says: {self.origin.kinds[name].lower().replace('_', ' ')}"
        if name in self.roles.statistics:
            return "running statistics of a normalisation"
        if name in self.roles.scales:
            return "a scale of integers, which do not train"
        return "read when the model is loaded" if read else "nothing reads it"

    def warn(self, stacklevel: int) -> None:
        """Tells once what the exporter lost, and what it may have merged (ModelWarning), with the remedies."""
        self.origin.warn(stacklevel + 1)
        if self.from_pytorch and self.wanted is None and not self.origin.kinds:
            self._warn_of_guesses(stacklevel + 1)
        shared = [n for n in self.copies if n not in self.origin.kinds and n in self.decided and self.decided[n].trains]
        if shared and self.from_pytorch:
            names = "; ".join(f"'{n}' with {', '.join(self.copies[n][:3])}" for n in shared[:3])
            text = (
                f"{len(shared)} parameters are shared through Identity and train as one ({names}): if they only began "
                f"equal, rc.load(..., untie={shared[:3]}) trains them apart"
            )
            warnings.warn(text, ModelWarning, stacklevel=stacklevel)

    def _warn_of_guesses(self, stacklevel: int) -> None:
        """Tells which tensors train that the exporter computed, of what no file says (ModelWarning)."""
        free = [n for n, t in self.decided.items() if t.trains and t.why == self._form(n)]
        guesses = [f"'{n}'" for n in free if made_up(n) and n not in self.roles.held]
        if guesses:
            text = (
                f"the exporter computed {', '.join(guesses[:3])}, of parameters or of constants, and they train as "
                "parameters do: export with do_constant_folding=False, or name what trains: trainable=[...]"
            )
            warnings.warn(text, ModelWarning, stacklevel=stacklevel)

    def check(self, parameters: Iterable[str], floats: Iterable[str]) -> None:
        """UsageError where a name or glob of the user fits nothing that can be trained.

        Names of tied parameters, of which the file has one, are accepted.
        """
        if self.wanted is None:
            return
        names = {*parameters, *self.origin.missing}
        names.update(c for n, copies in self.copies.items() if n in names for c in copies)
        pattern = self.wanted.useless(names)
        if pattern is not None:
            others = [n for n in floats if n != pattern]
            if pattern in set(floats):
                raise UsageError(f"trainable: '{pattern}' is there, but nothing that depends on it is computed")
            raise UsageError(f"trainable: no float initializer is called '{pattern}'{nearest(pattern, others)}")


def rule_of(
    source: onnx.ModelProto, graph: onnx.GraphProto, trainable: Sequence[str] | None, straight: bool = False
) -> TrainRule:
    """The rule for a model whose prepared graph is `graph`: by what the user names, or else by what the file says.

    `straight`: gradients pass QuantizeLinear, and so reach its scales.
    """
    return TrainRule(source, graph, said_to_train(source) if trainable is None else trainable, straight)


def angles(graph: onnx.GraphProto, held: Collection[str] = ()) -> set[str]:
    """Initializers, and `held` constants, that only make angles for Cos and Sin, which do not depend on floating-point
    inputs: inverse frequencies of rotary embeddings, and tables of positions."""
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
    return {n for n in (*(t.name for t in graph.initializer), *held) if makes.get(n, False)}
