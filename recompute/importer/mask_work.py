"""One node at work on values with selections: what rules ask of it, and how they write nodes on full tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import DTypeLike

from ..errors import ModelError
from ..language.types import TensorType, dtype_to_onnx
from .graphs import first_output
from .mask_selection import Extent, Marks, Selection
from .schema import attribute_value
from .state import ImportState

#: replacements to suggest in errors
IDIOM = (
    "a static program computes all entries: write torch.where(mask, x, 0).sum() / mask.sum() for x[mask].mean(), "
    "torch.where(mask, v, x) for x[mask] = v, ignore_index for labels that do not count (docs/pytorch.md)"
)


#: constants of fewer elements are shared
_SMALL = 64


class Work:
    """A node, the selections of its inputs, and `full` to write nodes that run on full tensors."""

    def __init__(self, importer: ImportState, node: onnx.NodeProto) -> None:
        self.importer, self.node, self.selected = importer, node, importer.selected
        self.attributes = {a.name: attribute_value(a) for a in node.attribute}
        self._base = first_output(node)

    # -- the inputs ----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.node.input)

    def name(self, i: int) -> str:
        """The name of input `i`, "" where it is absent."""
        return self.node.input[i] if i < len(self.node.input) else ""

    def marks(self, i: int) -> Marks:
        """The selections of input `i`, by axis."""
        return self.selected.marks.get(self.name(i), {})

    def type(self, i: int) -> TensorType:
        """The full type of input `i`."""
        return self.importer.type_of(self.name(i))

    def known(self, i: int | str) -> np.ndarray | None:
        """The contents of an input where they are known."""
        constant = self.importer.contents(self.name(i) if isinstance(i, int) else i)
        return None if constant is None else constant.array

    def need(self, i: int, what: str) -> np.ndarray | None:
        """The contents of input `i`, None where it is absent.  ModelError where they are computed from data."""
        if not self.name(i):
            return None
        constant = self.known(i)
        if constant is None:
            raise self.fail(i, f"its {what} must be known")
        return constant

    def axis(self, i: int = 0, default: int = 0) -> int:
        """The attribute `axis`, counted from the front of input `i`."""
        return int(self.attributes.get("axis", default)) % max(self.type(i).ndim, 1)

    def extent(self, i: int, axis: int) -> Extent | int:
        """How many entries of an axis of input `i` count."""
        mark = self.marks(i).get(axis)
        return self.type(i).shape[axis] if mark is None else mark.count

    def labels(self) -> str:
        """The masks of the inputs, for errors."""
        marks = {s.label: 0 for n in self.node.input for s in self.selected.marks.get(n, {}).values()}
        return " and ".join(f"'{label}'" for label in marks) or "a mask"

    def fail(self, i: int, why: str) -> ModelError:
        """The error about input `i`."""
        return ModelError(
            f"'{self.name(i)}' holds the entries where {self.labels()} is true, how many depends on data, and {why}; "
            f"{IDIOM}"
        )

    def unmarked(self, i: int, axes: Iterable[int], why: str) -> None:
        """ModelError where input `i` has a selection along one of the axes."""
        if any(a in self.marks(i) for a in axes):
            raise self.fail(i, why)

    # -- nodes on full tensors -----------------------------------------------------------------------------------

    def full(self, op_type: str, *ins: str, **attributes: Any) -> str:
        """Runs a node on the full tensors, once for the same inputs; returns the name of its result."""
        operands = list(ins)
        while operands and not operands[-1]:
            operands.pop()
        key = (op_type, *operands, repr(sorted(attributes.items())))
        name = self.selected.made.get(key, "")
        if name and self.importer.has(name):
            return name
        name = self.selected.made[key] = self.importer.builder.names.take(f"{self._base}.{op_type.lower()}")
        self._run(onnx.helper.make_node(op_type, operands, [name], name=f"{self._base}/{op_type}", **attributes))
        return name

    def whole(self, ins: Sequence[str] | None = None, **attributes: Any) -> None:
        """Runs the node itself on the full tensors, with other inputs or attributes where they are given."""
        copy = onnx.NodeProto()
        copy.CopyFrom(self.node)
        if ins is not None:
            copy.input[:] = list(ins)
        for name, value in attributes.items():
            kept = [a for a in copy.attribute if a.name != name]
            del copy.attribute[:]
            copy.attribute.extend([*kept, onnx.helper.make_attribute(name, value)])
        self._run(copy)

    def whole_as(self, op_type: str, *ins: str, **attributes: Any) -> None:
        """Runs a node on the full tensors that writes this node's output."""
        self._run(onnx.helper.make_node(op_type, list(ins), [self.node.output[0]], name=self.node.name, **attributes))

    def _run(self, node: onnx.NodeProto) -> None:
        self.importer.used.update([*node.input, *node.output])
        before, self.selected.whole = self.selected.whole, True
        try:
            self.importer.run_plain(node)
        finally:
            self.selected.whole = before

    def constant(self, value: Any, dtype: DTypeLike = np.int64) -> str:
        """The name of a constant."""
        array = np.asarray(value, dtype)
        key = ("", str(array.dtype), repr(array.shape), array.tobytes().hex() if array.size < _SMALL else "")
        name = self.selected.made.get(key, "") if array.size < _SMALL else ""
        if not name:
            name = self.selected.made[key] = self.importer.builder.names.take(f"{self._base}.constant")
            self.importer.known[name] = self.importer.constant(array)
        return name

    def grid(self, shape: Sequence[int], turned: bool = False) -> np.ndarray:
        """The coordinates of all entries of a shape: [dimensions, entries], or turned."""
        grids, key = self.selected.grids, tuple(shape)
        if (key, turned) not in grids:
            places = np.indices(key, np.int64).reshape(len(key), -1)
            grids[key, False] = self.importer.constant(places).array
            grids[key, True] = self.importer.constant(np.ascontiguousarray(places.T)).array
        return grids[key, turned]

    def like(self, value: Any, name: str) -> str:
        """A constant of the element type of a value."""
        return self.constant(value, self.importer.type_of(name).numpy)

    def reshaped(self, name: str, shape: Sequence[int]) -> str:
        """A value in another shape."""
        return name if self.importer.type_of(name).shape == tuple(shape) else self.full(
            "Reshape", name, self.constant(list(shape)), allowzero=1
        )  # fmt: skip

    def cast(self, name: str, dtype: str) -> str:
        """A value in another element type."""
        same = self.importer.type_of(name).dtype == dtype
        return name if same else self.full("Cast", name, to=dtype_to_onnx(dtype))

    # -- masks ---------------------------------------------------------------------------------------------------

    def mask(self, selection: Selection, ndim: int = 1, axis: int = 0) -> str:
        """The mask as a bool value that broadcasts along an axis of a tensor of `ndim` dimensions."""
        name = selection.mask
        if selection.repeat > 1:
            wide = self.constant([selection.length, selection.repeat])
            name = self.full("Expand", self.reshaped(name, (selection.length, 1)), wide)
            name = self.reshaped(name, (selection.size,))
        return self.reshaped(name, [selection.size if a == axis else 1 for a in range(ndim)])

    def both(self, marks: Marks, ndim: int) -> str:
        """Whether each entry counts, along all marked axes."""
        masks = [self.mask(s, ndim, axis) for axis, s in sorted(marks.items())]
        mask = masks[0]
        for m in masks[1:]:
            mask = self.full("And", mask, m)
        return mask

    def filled(self, name: str, marks: Marks, value: Any) -> str:
        """The value, with `value` where entries do not count: no gradient flows there, whatever it is."""
        if not marks:
            return name
        return self.full("Where", self.both(marks, self.importer.type_of(name).ndim), name, self.like(value, name))

    def selection(self, name: str, label: str, extent: Extent | None = None) -> Selection:
        """The selection of the true elements of a bool value; `extent`: how many, where that is known."""
        value, times = self.importer.numbering.base(self.importer.value(name, "", 0))
        number = self.importer.numbering.number(value)
        found = self.selected.masks.get(number)
        if found is None:
            self.importer.env.setdefault(value.name, value)
            base = value.name
            if value.dtype != "bool":
                base = self.cast(base, "bool")
            size = value.type.size
            count = extent if extent is not None and times == 1 else Extent(1, (number,))
            found = Selection(number, 1, self.reshaped(base, (size,)), size, label, count)
            self.selected.masks[number] = found
            self.selected.extents.setdefault(count, found)
        return found if times == 1 else found.repeated(times)

    def count(self, length: Extent | int) -> str:
        """An extent as an i64 scalar of the program."""
        if not isinstance(length, Extent):
            return self.constant(length)
        names = [self._count_of(number) for number in length.masks]
        if length.factor != 1 or not names:
            names.append(self.constant(length.factor))
        found = names[0]
        for n in names[1:]:
            found = self.full("Mul", found, n)
        return found

    def _count_of(self, number: int) -> str:
        if number not in self.selected.counts:
            ones = self.cast(self.selected.masks[number].mask, "i64")
            self.selected.counts[number] = self.full("ReduceSum", ones, keepdims=0)
        return self.selected.counts[number]

    # -- the outputs ---------------------------------------------------------------------------------------------

    def mark(self, marks: Marks, output: int = 0, space: Marks | None = None) -> None:
        """Gives an output its selections; `space`: see Selected.spaces."""
        if output >= len(self.node.output) or not self.node.output[output]:
            return
        name = self.node.output[output]
        if marks:
            self.selected.marks[name] = dict(marks)
        if space:
            self.selected.spaces[name] = space

    def result(self, name: str, marks: Marks, space: Marks | None = None) -> None:
        """The node's output is another value."""
        self.importer.used.add(name)
        self.importer.alias(self.node.output[0], name)
        self.selected.forget(self.node.output[0])
        self.mark(marks, 0, space)

    def lengths(self, found: np.ndarray) -> None:
        """The node's output is a shape; it is known where no extent is in it."""
        out = self.node.output[0]
        if any(isinstance(e, Extent) for e in found.reshape(-1)):
            self.selected.lengths[out] = found
        else:
            self.importer.known[out] = self.importer.constant(found.astype(np.int64))


def product(lengths: Iterable[Any]) -> Any:
    """The product of lengths, extents among them."""
    return math.prod(lengths)
