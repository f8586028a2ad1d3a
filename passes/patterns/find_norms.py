"""Layer and RMS normalisation as one operator: found where a row is divided by the root of its mean square."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...errors import RecomputeError
from ...language.builder import Builder
from ...language.ir import Block, Operator, Role, Value
from ...language.op import Op
from ...ops.norm.fused import LayerNormalization, RMSNormalization
from ..attention.known import Known
from ..base import ForwardPass
from ..cleanup.dead_code import prune


@dataclass(frozen=True)
class FindNorms(ForwardPass):
    """Replace x / √(mean(x²) + ε) · scale by RMSNormalization, and what centres x before by LayerNormalization.

    For the forward pass, before differentiation.  What the exporters of PyTorch write is found: a square root and its
    reciprocal, a quotient by either or a division by the root, the mean taken off once or twice, casts of x to float32
    and back.  The gradient keeps x and one or two numbers a row, in place of the squares' source, the
    normalised rows and the roots.  Results agree to rounding.
    """

    def run(self, block: Block) -> Block:
        """The block itself if there is no such normalisation."""
        return find_norms(block)


class _NotNormError(Exception):
    """A square root is not that of a normalisation."""


def find_norms(block: Block) -> Block:
    """The block with normalisations as operators; values on the way that are read elsewhere, or outputs, stay."""
    roots = [op for op in block.operators if op.op.name == "Sqrt" and op.role is Role.FORWARD]
    if not roots:
        return block
    search = _Search(block)
    made: dict[int, list[Operator]] = {}
    for root in roots:
        search.builder.operators.clear()
        try:
            at, operators = search.norm(root)
        except _NotNormError:
            continue
        made[at] = operators
    if not made:
        return block
    operators = [new for i, op in enumerate(block.operators) for new in made.get(i, [op])]
    return block.with_operators(prune(operators, block.outputs, (Role.FORWARD,)))


class _Search:
    """Follows the operators around a square root."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.known = Known(block, {})
        self.builder = Builder.on(block)
        self.producers, self.readers = block.producers(), block.consumers()

    def norm(self, root: Operator) -> tuple[int, list[Operator]]:
        """The index of a normalisation's last operator, and what takes its place.  _NotNormError where it is none."""
        square, epsilon, axes = self.mean_square(root)
        at, normal, source = self.quotient(root)
        if not self.same(square, source):
            raise _NotNormError
        x = self.centred(source, axes)
        centre, x = x is not None, x or source
        axis = self.axis(axes, x)
        at, normal, x = self.narrowed(at, normal, x)
        at, y, scale = self.applied(at, "Mul", normal, x.shape[axis:])
        vectors, op = [scale], RMSNormalization(axis=axis, epsilon=epsilon)
        found: Op = op
        if centre:
            found = LayerNormalization(axis=axis, epsilon=epsilon)
            try:
                at, y, bias = self.applied(at, "Add", y, x.shape[axis:])
                vectors.append(bias)
            except _NotNormError:
                pass  # without a bias
        return at, self.emitted(found, x, vectors, y)

    def emitted(self, op: Op, x: Value, vectors: Sequence[Value], y: Value) -> list[Operator]:
        """The normalisation, which makes y."""
        b, axis = self.builder, op.axis  # type: ignore[attr-defined]
        shape = x.shape[axis:]
        try:
            flat = [v if v.shape == shape else b.Reshape(v, shape=shape) for v in vectors]
            made = b.emit(op, x, *flat, want=1)
        except RecomputeError:
            raise _NotNormError from None
        assert isinstance(made, Value)
        if made.type != y.type:
            raise _NotNormError
        return [replace(o, role=Role.FORWARD).renamed({made.name: y.name}) for o in b.operators]

    # -- parts --------------------------------------------------------------------------------------------------

    def producer(self, v: Value | None, *names: str) -> Operator:
        at = None if v is None else self.producers.get(v.name)
        op = None if at is None else self.block.operators[at]
        if op is None or (names and op.op.name not in names) or op.role is not Role.FORWARD:
            raise _NotNormError
        return op

    def only_reader(self, v: Value) -> tuple[int, Operator]:
        """The one operator that reads a value, once."""
        readers = self.readers.get(v.name, [])
        if len(readers) != 1 or v.name in self.block.outputs:
            raise _NotNormError
        op = self.block.operators[readers[0]]
        if op.role is not Role.FORWARD or sum(r == v for r in op.inputs) != 1:
            raise _NotNormError
        return readers[0], op

    def mean_square(self, root: Operator) -> tuple[Value, float, tuple[int, ...]]:
        """What is squared below a root, what is added to the mean of squares, and the mean's axes."""
        total = self.producer(root.inputs[0], "Add")
        for mean, added in (total.inputs, total.inputs[::-1]):
            epsilon = self.known.number(added)
            if epsilon is not None and mean is not None and epsilon >= 0:
                squares, axes = self.mean(mean)
                product = self.producer(squares, "Mul")
                a, b = product.inputs
                if a is not None and b is not None and self.same(a, b):
                    return a, epsilon, axes
        raise _NotNormError

    def mean(self, v: Value) -> tuple[Value, tuple[int, ...]]:
        """What a mean over the last axes, which are kept with size 1, is taken of, and these axes."""
        op = self.producer(v, "ReduceMean")
        x = op.inputs[0]
        if x is None or not op.op.keepdims or op.op.axes is None or len(op.inputs) > 1:  # type: ignore[attr-defined]
            raise _NotNormError
        axes = tuple(sorted(a % x.ndim for a in op.op.axes))  # type: ignore[attr-defined]
        self.axis(axes, x)
        return x, axes

    @staticmethod
    def axis(axes: Sequence[int], x: Value) -> int:
        """The first of the last axes."""
        first = x.ndim - len(axes)
        if not axes or tuple(axes) != tuple(range(first, x.ndim)) or not math.prod(x.shape):
            raise _NotNormError
        return first

    def same(self, a: Value, b: Value) -> bool:
        """Whether both are one value, or one difference that is made twice."""
        if a == b:
            return True
        try:
            return self.producer(a, "Sub").inputs == self.producer(b, "Sub").inputs
        except _NotNormError:
            return False

    def centred(self, v: Value, axes: Sequence[int]) -> Value | None:
        """x where `v` is x without its mean over the axes."""
        try:
            x, mean = self.producer(v, "Sub").inputs
            of, over = self.mean(mean)  # type: ignore[arg-type]
        except _NotNormError:
            return None
        return x if x == of and over == tuple(axes) else None

    def quotient(self, root: Operator) -> tuple[int, Value, Value]:
        """Where something is divided by a root, the quotient, and what is divided."""
        s = next(root.writes())
        at, op = self.only_reader(s)
        inverse = op.op.name == "Reciprocal" or (op.op.name == "Div" and self.known.number(op.inputs[0]) == 1)
        if inverse:
            at, product = self.only_reader(next(op.writes()))
            if product.op.name != "Mul":
                raise _NotNormError
            source = next(v for v in product.inputs if v != next(op.writes()))
            op = product
        elif op.op.name == "Div" and op.inputs[1] == s:
            source = op.inputs[0]
        else:
            raise _NotNormError
        made = next(op.writes())
        if source is None or source.shape != made.shape:
            raise _NotNormError
        return at, made, source

    def narrowed(self, at: int, normal: Value, x: Value) -> tuple[int, Value, Value]:
        """The same behind a cast back to the type that x had before it was cast to float32; the operator does both."""
        try:
            cast = self.producer(x, "Cast")
            back, op = self.only_reader(normal)
        except _NotNormError:
            return at, normal, x
        before, made = cast.inputs[0], next(op.writes())
        wide = before is not None and before.dtype in ("f16", "bf16") and x.dtype == "f32"
        if op.op.name != "Cast" or before is None or not wide or made.dtype != before.dtype:
            return at, normal, x
        return back, made, before

    def applied(self, at: int, name: str, v: Value, shape: Sequence[int]) -> tuple[int, Value, Value]:
        """Where the only reader of `v` multiplies it by, or adds, a vector of the normalised axes."""
        at, op = self.only_reader(v)
        if op.op.name != name:
            raise _NotNormError
        vector = next((r for r in op.inputs if r != v), None)
        made = next(op.writes())
        if vector is None or made.shape != v.shape or vector.size != math.prod(shape):
            raise _NotNormError
        if tuple(vector.shape[-len(shape) :]) != tuple(shape):
            raise _NotNormError
        return at, made, vector
