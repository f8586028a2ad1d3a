"""Names, options and entries of the zoo. A family file registers itself here when it is imported."""

import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import onnx

from ..errors import UsageError, expect
from .common import BATCH, Dim, InputSpec, Net, integers


@dataclass(frozen=True)
class Family(ABC):
    """A kind of network. A subclass is a frozen dataclass whose fields are the options, with their defaults.

    Attributes:
        task: "classification" (integer labels, logits or probabilities), "binary" (the loss is inside),
            "language-model" (an integer label for every position), "segmentation" (one for every pixel) or
            "detection" (boxes; the loss is inside).
        output: the name of the graph's output.
    """

    task: ClassVar[str]
    output: ClassVar[str] = "logits"

    @abstractmethod
    def inputs(self) -> tuple[InputSpec, ...]:
        """The graph's inputs, in order."""

    @abstractmethod
    def label(self) -> InputSpec | None:
        """The label that a loss on the output needs; None when the graph holds its own loss."""

    @abstractmethod
    def checkpoints(self) -> tuple[str, ...]:
        """Values worth keeping in a recompute plan, in graph order."""

    @abstractmethod
    def build(self, net: Net) -> None:
        """Adds the nodes and outputs to `net`, which already has the inputs."""


class Classifier(Family):
    """A family that gives square images of 3 channels, float32 [N, 3, image, image], one of `classes` each."""

    task = "classification"
    image: int
    classes: int

    def inputs(self) -> tuple[InputSpec, ...]:
        return (InputSpec("x", "float32", (BATCH, 3, self.image, self.image)),)

    def label(self) -> InputSpec:
        return integers("label", (BATCH,), high=self.classes)


@dataclass(frozen=True)
class Variant:
    """A name of the zoo: a family with some options set."""

    name: str
    description: str
    default_batch: int
    table_batch: int
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ZooEntry:
    """What there is to know about a network before building it.

    Attributes:
        name: the name to build it by.
        description: one line for a person.
        task: "classification", "binary", "language-model", "segmentation" or "detection".
        output: the name of the graph's output: "logits", "pred" (probabilities) or "loss" (a scalar).
        default_batch: a batch size for trying it out.
        table_batch: the batch size that benchmark tables use.
        options: every option that `build` takes for it, with its value here.
        inputs: the graph's inputs, with shapes (the batch is "N") and data ranges.
        label: the label that a loss on the output needs, or None when the loss is inside the graph.
        checkpoints: values worth keeping in a recompute plan, in graph order.
    """

    name: str
    description: str
    task: str
    output: str
    default_batch: int
    table_batch: int
    options: Mapping[str, Any]
    inputs: tuple[InputSpec, ...]
    label: InputSpec | None
    checkpoints: tuple[str, ...]


FamilyType = TypeVar("FamilyType", bound=type[Family])

_REGISTRY: dict[str, tuple[type[Family], Variant]] = {}


def register(*variants: Variant) -> Callable[[FamilyType], FamilyType]:
    """Decorates a family with the names that it is known by."""

    def decorate(family: FamilyType) -> FamilyType:
        for variant in variants:
            if variant.name in _REGISTRY:
                raise UsageError(f"two networks are called {variant.name!r}")
            _REGISTRY[variant.name] = (family, variant)
        return family

    return decorate


def names() -> list[str]:
    """Every name of the zoo, family by family."""
    return list(_REGISTRY)


def info(name: str, **options: Any) -> ZooEntry:
    """The entry of a network; with options, the entry of the network that `build` makes with them.

    Raises:
        UsageError: the name or an option is unknown, or an option's value does not fit.
    """
    variant, family = _resolve(name, options)
    return ZooEntry(
        name=variant.name,
        description=variant.description,
        task=family.task,
        output=family.output,
        default_batch=variant.default_batch,
        table_batch=variant.table_batch,
        options=MappingProxyType(_options(family)),
        inputs=family.inputs(),
        label=family.label(),
        checkpoints=family.checkpoints(),
    )


def build(
    name: str, *, batch: Dim | None = None, weights: bool = True, seed: int = 0, **options: Any
) -> onnx.ModelProto:
    """Builds a network of the zoo as an ONNX model (opset 20, IR version 9, float32).

    Args:
        name: one of `names()`.
        batch: the first dimension of every input: a size, or a symbol; None is the symbol "N".
        weights: whether to draw the parameters. Without them each one is a ConstantOfShape node of the same
            name, so that the largest network takes milliseconds: enough to plan its memory, not to train it.
        seed: the same seed gives the same weights; each parameter has its own stream.
        options: see `info(name).options`.

    Raises:
        UsageError: the name or an option is unknown, or a value does not fit.
    """
    variant, family = _resolve(name, options)
    if not 0 <= expect("seed", seed, int, "a whole number") < 1 << 64:
        raise UsageError(f"seed must be in [0, 2**64), not {seed}")
    net = Net(batch=_check_batch(batch), weights=weights, seed=seed)
    for spec in family.inputs():
        net.input(spec)
    family.build(net)
    return net.model(name.replace("-", "_"), description=variant.description)


def _resolve(name: str, options: Mapping[str, Any]) -> tuple[Variant, Family]:
    if expect("network", name, str, "the name of one") not in _REGISTRY:
        raise UsageError(f"unknown network {name!r}; {_nearest(name, names())}")
    family_type, variant = _REGISTRY[name]
    family = family_type(**variant.options)
    defaults = _options(family)
    checked = {}
    for key, value in options.items():
        if key not in defaults:
            raise UsageError(f"network {name!r} has no option {key!r}; {_nearest(key, list(defaults))}")
        checked[key] = _check_option(name, key, value, defaults[key])
    return variant, replace(family, **checked)


def _options(family: Family) -> dict[str, Any]:
    return {item.name: getattr(family, item.name) for item in fields(family)}


def _nearest(word: str, choices: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, choices, n=3, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(repr(match) for match in close) + "?"
    return "there are " + ", ".join(choices)


def _check_option(name: str, key: str, value: Any, default: Any) -> Any:
    if type(default) is float and type(value) is int:
        value = float(value)
    if key == "image" and type(default) is tuple and type(value) is int:
        value = (value,) * len(default)
    where = f"option {key!r} of network {name!r}"
    if type(value) is not type(default):
        wanted, actual = type(default).__name__, type(value).__name__
        raise UsageError(f"{where} must be of type {wanted} like its default {default!r}, not {actual} {value!r}")
    if type(value) is int and value < 1:
        raise UsageError(f"{where} must be at least 1, not {value}")
    if key == "image" and type(value) is tuple and [type(v) is int and v > 0 for v in value] != [True, True]:
        raise UsageError(f"{where} must be a size or (height, width), each at least 1, not {value!r}")
    if type(value) is float and not 0.0 <= value < 1.0:
        raise UsageError(f"{where} must be in [0, 1), not {value}")
    return value


def _check_batch(batch: Dim | None) -> Dim:
    if batch is None:
        return BATCH
    sized = type(batch) is int and batch >= 1
    named = isinstance(batch, str) and batch.isidentifier()
    if not (sized or named):
        raise UsageError(f"batch must be a size of at least 1, a symbol such as 'N', or None, not {batch!r}")
    return batch
