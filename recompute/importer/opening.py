"""How a model that fixes its batch becomes one for any: what each node needs, found while it is imported at another.

Shapes of the file tell where the batch lies in a value: along the axis that is larger at a larger batch.  Nodes that
hold the batch in numbers, or join a value that has it with one that has not, get other inputs (`Change`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx

from ..errors import ModelError
from .graphs import first_output
from .state import ImportState

#: inputs that need the batch of input 0 along axis 0, by operator
_ALIKE = {"GridSample": (1,), "ScatterElements": (0, 1, 2), "GatherElements": (0, 1)}
#: operators whose inputs broadcast
_BROADCAST = ("Add", "Sub", "Mul", "Div", "Pow", "Min", "Max", "Mod", "Where", "PRelu", "And", "Or", "Xor", "Equal",
              "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "MatMul")  # fmt: skip
#: states of recurrent operators: [directions, batch, size], or [batch, directions, size] by their layout
_STATES = {"LSTM": (5, 6), "GRU": (5,), "RNN": (5,)}


@dataclass
class Change:
    """Replacements for a node's inputs, by position, and the nodes that compute them.

    `axes`: what a Squeeze removes instead ([]: nothing, which is Identity).
    """

    reads: dict[int, str] = field(default_factory=dict)
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    axes: list[int] | None = None

    def applied(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """The nodes in the place of one."""
        changed = onnx.NodeProto()
        changed.CopyFrom(node)
        for position, name in self.reads.items():
            changed.input[position] = name
        before = list(self.nodes)
        if self.axes is not None:
            kept = [a for a in changed.attribute if a.name != "axes"]
            as_attribute = len(kept) < len(changed.attribute)
            del changed.attribute[:], changed.input[1:]
            changed.attribute.extend(kept)
            if not self.axes:
                changed.op_type = "Identity"
            elif as_attribute:
                changed.attribute.append(onnx.helper.make_attribute("axes", self.axes))
            else:
                before.append(_constant(name := f"{first_output(node)}/axes_of_any_batch", self.axes))
                changed.input.append(name)
        return [*before, changed]


class Opening:
    """Changes of the nodes of a graph, made while it is imported at another batch than the file's.

    `shapes` and `contents`: of the file's values at its own batch `fixed`; `now`: the batch of this import; `source`:
    an input with its batch axis, from which other batches are read; `own`: outputs of the graph's own nodes.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], contents: Mapping[str, np.ndarray], sizes: tuple[int, int],
        source: tuple[str, int], own: set[str],
    ) -> None:  # fmt: skip
        self._shapes, self._contents, self._source, self._own = shapes, contents, source, own
        self._fixed, self._now = sizes
        self._outside: dict[str, int] = {}  # of values in whose axis more than the batch is: how much of it is outside
        self.changes: dict[str, Change] = {}
        self._rules: dict[str, Callable[[ImportState, onnx.NodeProto], Change | None]] = {
            "Reshape": self._reshape,
            "Expand": self._expand,
            "Concat": self._concat,
            "Resize": self._resize,
            "Squeeze": self._squeeze,
            "Gather": self._gather,
            "GatherND": self._gather,
            **dict.fromkeys(_STATES, self._states),
            **dict.fromkeys(_ALIKE, self._alike),
            **dict.fromkeys(_BROADCAST, self._broadcast),
        }

    def __call__(self, importer: ImportState, node: onnx.NodeProto) -> Sequence[onnx.NodeProto]:
        """The nodes that are imported instead of a node."""
        name = first_output(node)
        self._outside.update(dict.fromkeys(node.output, max([self._outside.get(n, 1) for n in node.input], default=1)))
        rule = self._rules.get(node.op_type) if node.domain in ("", "ai.onnx") and name in self._own else None
        if rule is None or any(n and not importer.has(n) for n in node.input):
            return (node,)
        change = rule(importer, node)
        if change is None:
            return (node,)
        self.changes[name] = change
        return change.applied(node)

    # -- where the batch is ---------------------------------------------------------------------------------------

    def _axis(self, importer: ImportState, name: str) -> int | None:
        """The axis along which a value has the batch; None where it has none."""
        before, after = self._shapes.get(name), importer.type_of(name).shape
        if before is None or len(before) != len(after):
            return None
        grown = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
        return grown[0] if len(grown) == 1 else None

    def _held(self, importer: ImportState, node: onnx.NodeProto, position: int) -> list[int] | None:
        """Numbers that the file holds as an input, which do not follow the batch themselves."""
        name = node.input[position] if len(node.input) > position else ""
        contents, before = importer.contents(name) if name else None, self._contents.get(name)
        if contents is None or before is None or not np.array_equal(contents.array, before):
            return None
        return [int(n) for n in contents.array.reshape(-1)]

    # -- what nodes need ------------------------------------------------------------------------------------------

    def _reshape(self, importer: ImportState, node: onnx.NodeProto) -> Change | None:
        """The batch comes to the axis before which are as many elements as before; its size is left open."""
        x, y = node.input[0], node.output[0]
        axis, held, after = self._axis(importer, x), self._held(importer, node, 1), self._shapes.get(y)
        if axis is None or after is None:
            return None
        place = self._place(math.prod(self._shapes[x][:axis]) * self._outside.get(x, 1), after, axis)
        if place is None:
            return None
        self._outside[y] = math.prod(self._shapes[x][:axis]) * self._outside.get(x, 1) // math.prod(after[:place])
        if held is None or (place < len(held) and (held[place] == -1 or (held[place] == 0 and axis == place))):
            return None
        return self._numbers(node, 1, [*after[:place], -1, *after[place + 1 :]])

    def _place(self, outside: int, shape: tuple[int, ...], axis: int) -> int | None:
        """The axis of a shape in which the batch is, inside of so many elements; rather not among the last one's."""
        starts = [math.prod(shape[:j]) for j in range(len(shape))]
        exact = [j for j, n in enumerate(starts) if n == outside and shape[j] == self._fixed]
        first = [j for j, n in enumerate(starts) if n == outside and shape[j] % self._fixed == 0]
        within = [j for j, n in enumerate(starts) if outside % max(n, 1) == 0 and n < outside <= n * shape[j]]
        places = [*exact, *first, *within]
        if axis in exact:
            return axis
        kept = [j for j in places if j in exact or j < len(shape) - 1]
        return next(iter([*kept, *places]), None)

    def _expand(self, importer: ImportState, node: onnx.NodeProto) -> Change | None:
        """A batch that x has already is 1 in the shape."""
        axis, held = self._axis(importer, node.input[0]), self._held(importer, node, 1)
        if held is None:
            return None
        if axis is None:
            return self._sizes(node, 1, held) if held[:1] == [self._fixed] != [1] else None
        place = axis - importer.type_of(node.input[0]).ndim + len(held)
        if place < 0 or held[place] in (1, self._now):
            return None
        return self._numbers(node, 1, [*held[:place], 1, *held[place + 1 :]])

    def _concat(self, importer: ImportState, node: onnx.NodeProto) -> Change | None:
        """Repeats values without the batch axis that are concatenated with values that have it."""
        axes = {a for n in node.input if (a := self._axis(importer, n)) is not None}
        joined = next(a.i for a in node.attribute if a.name == "axis") % importer.type_of(node.input[0]).ndim
        if len(axes) != 1 or joined in axes:
            return None
        (axis,) = axes
        return self._repeated(importer, node, dict.fromkeys(range(len(node.input)), axis))

    def _states(self, importer: ImportState, node: onnx.NodeProto) -> Change | None:
        """First states, and lengths of sequences, which the file holds for its batch."""
        layout = next((a.i for a in node.attribute if a.name == "layout"), 0)
        if self._axis(importer, node.input[0]) != 1 - layout:
            return None
        return self._repeated(importer, node, {**dict.fromkeys(_STATES[node.op_type], 1 - layout), 4: 0})

    def _alike(self, importer: ImportState, node: onnx.NodeProto) -> Change | None:
        """Operators that take the same batch several times."""
        if not any(n and self._axis(importer, n) == 0 for n in node.input):
            return None
        return self._repeated(importer, node, dict.fromkeys(_ALIKE[node.op_type], 0))

    def _resize(self, importer: ImportState, node: onnx.NodeProto) -> Change | None:
        """Sizes begin with the batch of x."""
        held = self._held(importer, node, 3)
        if (
            held is None
            or self._axis(importer, node.input[0]) != 0
            or len(held) != importer.type_of(node.input[0]).ndim
        ):
            return None
        return self._sizes(node, 3, held)

    def _squeeze(self, importer: ImportState, node: onnx.NodeProto) -> Change | None:
        """A batch of 1 is not removed where it may be more."""
        axis, ndim = self._axis(importer, node.input[0]), importer.type_of(node.input[0]).ndim
        given = next((list(a.ints) for a in node.attribute if a.name == "axes"), None) or self._held(importer, node, 1)
        if axis is None or given is None or axis not in (axes := [a % ndim for a in given]):
            return None
        return Change(axes=[a for a in axes if a != axis])

    def _gather(self, importer: ImportState, node: onnx.NodeProto) -> Change | None:
        """Indices that the file holds for its one sample are those of the first: others lie behind by what it takes."""
        x, indices = node.input[:2]
        if self._fixed != 1 or self._axis(importer, x) != 0 or indices not in self._shapes:
            return None
        shape, contents = self._shapes[indices], importer.contents(indices)
        options = {a.name: a.i for a in node.attribute}
        if (
            contents is None
            or len(shape) < 2
            or shape[0] != 1
            or options.get("axis", 0)
            or options.get("batch_dims", 0)
        ):
            return None
        steps = [self._shapes[x][0]] if node.op_type == "Gather" else [1, *[0] * (shape[-1] - 1)]
        name, make = f"{first_output(node)}/any_batch", onnx.helper.make_node
        nodes = [
            *self._batch(name),
            _constant(f"{name}/flat", [-1, *[1] * (len(shape) - 1)]),
            _constant(f"{name}/steps", steps),
            make("ConstantOfShape", [f"{name}/size"], [f"{name}/ones"], value=_number(1)),
            make("NonZero", [f"{name}/ones"], [f"{name}/counted"]),
            make("Reshape", [f"{name}/counted", f"{name}/flat"], [f"{name}/samples"]),
            make("Mul", [f"{name}/samples", f"{name}/steps"], [f"{name}/behind"]),
            make("Cast", [indices], [f"{name}/first"], to=onnx.TensorProto.INT64),
            make("Add", [f"{name}/first", f"{name}/behind"], [f"{name}/indices"]),
        ]
        return Change({1: f"{name}/indices"}, nodes)

    # -- nodes ----------------------------------------------------------------------------------------------------

    def _numbers(self, node: onnx.NodeProto, position: int, numbers: Sequence[int]) -> Change:
        name = f"{first_output(node)}/shape_of_any_batch"
        return Change({position: name}, [_constant(name, numbers)])

    def _sizes(self, node: onnx.NodeProto, position: int, held: Sequence[int]) -> Change:
        """Numbers of which the first is the batch."""
        name = f"{first_output(node)}/any_batch"
        joined = onnx.helper.make_node("Concat", [f"{name}/size", f"{name}/rest"], [f"{name}/sizes"], axis=0)
        return Change({position: f"{name}/sizes"}, [*self._batch(name), _constant(f"{name}/rest", held[1:]), joined])

    def _batch(self, name: str) -> list[onnx.NodeProto]:
        """Nodes that make NAME/size, the batch as a shape of one number."""
        source, axis = self._source
        make = onnx.helper.make_node
        return [
            make("Shape", [source], [f"{name}/dims"]),
            _constant(f"{name}/axis", [axis]),
            make("Gather", [f"{name}/dims", f"{name}/axis"], [f"{name}/size"]),
        ]

    def _broadcast(self, importer: ImportState, node: onnx.NodeProto) -> Change | None:
        """Reads one of the values that the file holds for each of its samples, where they are the same."""
        places = {a - importer.type_of(n).ndim for n in node.input if (a := self._axis(importer, n)) is not None}
        if self._fixed == 1 or len(places) != 1:
            return None
        (place,), change = places, Change()
        for position, name in enumerate(node.input):
            axis = place + importer.type_of(name).ndim
            if axis >= 0 and self._of_samples(importer, name, axis):
                change.reads[position] = f"{first_output(node)}/any_batch{position}"
                change.nodes += self._first(importer, name, change.reads[position], axis)
        return change if change.reads else None

    def _of_samples(self, importer: ImportState, name: str, axis: int) -> bool:
        """Whether a value has the file's batch along an axis, and does not grow with it."""
        shape = importer.type_of(name).shape
        return axis < len(shape) and shape[axis] == self._fixed and self._axis(importer, name) is None

    def _first(self, importer: ImportState, name: str, prefix: str, axis: int) -> list[onnx.NodeProto]:
        """Nodes that take one sample of a value.  ModelError where samples differ, or may."""
        contents = importer.contents(name)
        if contents is None or not np.array_equal(
            contents.array, np.repeat(contents.array.take([0], axis), self._fixed, axis)
        ):
            raise ModelError(f"'{name}' holds other numbers for each of the {self._fixed} samples of the file")
        return [
            _constant(f"{prefix}/0", [0]),
            onnx.helper.make_node("Gather", [name, f"{prefix}/0"], [prefix], axis=axis),
        ]

    def _repeated(self, importer: ImportState, node: onnx.NodeProto, axes: Mapping[int, int]) -> Change | None:
        """Inputs, by position, that have the file's batch along an axis, and do not grow with it, are repeated."""
        change = Change()
        for position, axis in axes.items():
            name = node.input[position] if position < len(node.input) else ""
            if name and self._of_samples(importer, name, axis):
                prefix = f"{first_output(node)}/any_batch{position}"
                if self._fixed > 1:
                    change.nodes += self._first(importer, name, f"{prefix}/one", axis)
                change.nodes += self._repeat(
                    f"{prefix}/one" if self._fixed > 1 else name, prefix, importer.type_of(name).ndim, axis
                )
                change.reads[position] = prefix
        return change if change.reads else None

    def _repeat(self, name: str, prefix: str, ndim: int, axis: int) -> Iterator[onnx.NodeProto]:
        """Nodes that expand a value along an axis of one element to the batch."""
        yield from self._batch(prefix)
        shape = [_constant(f"{prefix}/ones{i}", [1] * n) for i, n in enumerate((axis, ndim - 1 - axis)) if n]
        yield from shape
        parts = [s.output[0] for s in shape]
        parts.insert(1 if axis else 0, f"{prefix}/size")
        yield onnx.helper.make_node("Concat", parts, [f"{prefix}/shape"], axis=0)
        yield onnx.helper.make_node("Expand", [name, f"{prefix}/shape"], [prefix])


def _constant(name: str, numbers: Sequence[int] | int) -> onnx.NodeProto:
    value = onnx.numpy_helper.from_array(np.array(numbers, np.int64))
    return onnx.helper.make_node("Constant", [], [name], value=value)


def _number(number: int) -> onnx.TensorProto:
    return onnx.numpy_helper.from_array(np.array([number], np.int64))
