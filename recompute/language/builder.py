"""The builder, with which gradients, expansions, losses and importers emit operators (fresh names, inferred types)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import TypeRuleError
from .exact import exact
from .ir import Block, Constant, Operator, Role, Value
from .op import Op, op_class
from .types import DTYPES, TensorType, Values


class Names:
    """Generates unused names."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = set(taken)
        self._next: dict[str, int] = {}

    def take(self, wish: str) -> str:
        """`wish` if it is unused, else `wish_1`, `wish_2`, ..."""
        if wish not in self._taken:
            self._taken.add(wish)
            return wish
        i = self._next.get(wish, 1)
        while f"{wish}_{i}" in self._taken:
            i += 1
        self._next[wish] = i + 1
        self._taken.add(f"{wish}_{i}")
        return f"{wish}_{i}"

    def __contains__(self, name: str) -> bool:
        return name in self._taken


class Builder:
    """Collects emitted operators.  `b.Relu(x)`, `b.Gemm(x, w, transB=1)`: any registered operator is a method.

    A call returns the output value, or a tuple if the operator has several required outputs.  `want`: the number of
    outputs instead.  `prefix` is the prefix of all generated names.
    """

    def __init__(
        self,
        names: Names | None = None,
        *,
        role: Role = Role.FORWARD,
        prefix: str = "",
        constants: Iterable[Constant] = (),
    ) -> None:
        self.names = names or Names()
        self.role = role
        self.prefix = prefix
        self.operators: list[Operator] = []
        self.constants: list[Constant] = []
        self._known = {(c.value.type, exact(c.data)): c.value for c in constants}
        self._shared: dict[tuple, Value] = {}

    @staticmethod
    def on(block: Block, **options: Any) -> Builder:
        """A builder whose names do not clash with those of `block` and which shares its constants."""
        return Builder(Names(block.values()), constants=block.constants, **options)

    def emit(self, op: Op, *inputs: Value | None, name: str | None = None, want: int | None = None) -> Any:
        """Applies `op`; `name` names the first output (further ones get it with their position)."""
        types = op.infer(*(None if v is None else v.type for v in inputs))
        count = op.required_outputs if want is None else want
        base = name or (f"{self.prefix}.{op.name.lower()}" if self.prefix else op.name.lower())
        outputs = []
        for i, t in enumerate(types[:count]):
            if why := "lacks a type: a required input is absent" if t is None else t.impossible():
                raise op.fail(f"its output {why}", *(None if v is None else v.type for v in inputs))
            if op.updates:  # an update: its output has the name of the input
                target = inputs[op.updates[i]]
                assert target is not None
                outputs.append(target)
            else:
                outputs.append(Value(self.names.take(base if i == 0 else f"{base}.{i}"), t))
        self.operators.append(Operator(op, tuple(inputs), tuple(outputs), self.role))
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name[:1].isupper():
            raise AttributeError(name)
        cls = op_class(name)

        def apply(*inputs: Value | None, want: int | None = None, **attributes: Any) -> Any:
            return self.emit(cls(**attributes), *inputs, want=want)

        return apply

    def constant(self, value: object, like: Value | TensorType | str) -> Value:
        """A declared constant of `like`'s element type; equal constants are shared."""
        dtype = like if isinstance(like, str) else like.dtype
        array = np.asarray(value, dtype=DTYPES[dtype])
        t = TensorType.of(array)
        data = tuple(array.reshape(-1).tolist())
        found = self._known.get((t, exact(data)))
        if found is None:
            found = Value(self.names.take(_constant_name(data, t)), t)
            self._known[(t, exact(data))] = found
            self.constants.append(Constant(found, data))
        return found

    def fill(self, value: float, like: Value | TensorType) -> Value:
        """A value of `like`'s type, every element `value`."""
        t = like.type if isinstance(like, Value) else like
        return self.Fill(dtype=t.dtype, shape=t.shape, value=value)

    def sum_to(self, x: Value, shape: Sequence[int]) -> Value:
        """Undoes NumPy broadcasting: sums `x` over the axes along which `shape` was repeated."""
        shape = tuple(shape)
        if x.shape == shape:
            return x
        lead = x.ndim - len(shape)
        axes = tuple(i for i in range(x.ndim) if i < lead or (shape[i - lead] == 1 and x.shape[i] != 1))
        if axes:
            x = self.ReduceSum(x, axes=axes, keepdims=0 if axes == tuple(range(lead)) else 1)
        return x if x.shape == shape else self.Reshape(x, shape=shape)

    def gradient_of_expansion(self, op: Op, ins: Values, grads: Values) -> list[Value | None]:
        """The gradient of an operator that has no rule of its own (see `gradient_through_expansion`)."""
        return gradient_through_expansion(op, self, ins, grads)

    def add_all(self, values: Sequence[Value]) -> Value:
        """The sum of one or more values of one type, from left to right."""
        total = values[0]
        for v in values[1:]:
            total = self.Add(total, v)
        return total


def _constant_name(data: tuple, t: TensorType) -> str:
    if t.size == 1:
        text = f"{data[0]:.6g}" if isinstance(data[0], float) else str(data[0]).lower()
        return f"c.{text}.{t.dtype}"
    return f"c.{t.dtype}.{'x'.join(map(str, t.shape))}"


def gradient_through_expansion(op: Op, b: Builder, ins: Values, grads: Values) -> list[Value | None]:
    """The gradient of an operator by differentiating its `expand` (whose forward part is recomputed)."""
    start = len(b.operators)
    outs = op.expand(b, *ins)
    if outs is None:
        raise TypeRuleError(f"{op.name} has no gradient")
    body = b.operators[start:]
    seeds: dict[str, Value] = {}
    for out, g in zip(outs, grads, strict=False):
        if out is not None and g is not None:
            seeds[out.name] = g if out.name not in seeds else b.Add(seeds[out.name], g)
    wanted = [v for v in ins if v is not None and v.type.is_float]
    gradients, body = reverse(b, body, seeds, wanted)
    b.operators[start : start + len(body)] = body
    return [None if v is None else gradients.get(v.name) for v in ins]


def reverse(
    b: Builder,
    operators: Sequence[Operator],
    seeds: Mapping[str, Value],
    wanted: Iterable[Value],
    stop: Iterable[str] = (),
) -> tuple[dict[str, Value], list[Operator]]:
    """Reverse-mode differentiation over a list of operators; the gradient's operators go to `b`.

    `seeds` gives the gradients that flow in from outside, `stop` names values through which none flows.
    Contributions are added as soon as there are two, so that at most one partial sum is alive per value.
    Returns the gradients, by value name, and the operators with those optional outputs present that a gradient reads.
    """
    needs = {v.name for v in wanted}.difference(stop)
    stop = set(stop)
    for o in operators:
        if any(v.name in needs for v in o.reads()):
            needs.update(v.name for v in o.writes() if v.type.is_float and v.name not in stop)
    grads = dict(seeds)
    result = list(operators)
    for i in range(len(result) - 1, -1, -1):
        o = result[i]
        if not any(v.name in needs for v in o.reads()):
            continue
        if any(v.name in grads for v in o.writes()):
            result[i] = _reverse_one(b, o, grads, needs)
    return grads, result


def _reverse_one(b: Builder, o: Operator, grads: dict[str, Value], needs: set[str]) -> Operator:
    """Adds the gradients of one operator's inputs to `grads`."""
    b.prefix = next(o.writes()).name + ".grad"
    outs = _all_outputs(b, o)
    flowing = [grads.get(v.name) for v in outs]
    start = len(b.operators)
    gradients = o.op.gradient(b, o.inputs, outs, flowing)
    for v, g in zip(o.inputs, gradients, strict=False):
        if v is None or g is None or v.name not in needs:
            continue
        grads[v.name] = b.Add(grads[v.name], g) if v.name in grads else g
    read = {v.name for results in b.operators[start:] for v in results.reads()}
    present = list(o.outputs) + [None] * (len(outs) - len(o.outputs))
    results = [p if p is not None else (v if v.name in read else None) for p, v in zip(present, outs, strict=True)]
    while results and results[-1] is None:
        results.pop()
    return o if tuple(results) == o.outputs else dataclasses.replace(o, outputs=tuple(results))


def _all_outputs(b: Builder, o: Operator) -> list[Value]:
    """Every output of an operator; absent optional ones with the names that they would get."""
    outs = list(o.outputs)
    types = o.op.infer(*(None if v is None else v.type for v in o.inputs))
    if len(outs) == len(types) and None not in outs:
        return outs  # type: ignore[return-value]
    outs += [None] * (len(types) - len(outs))
    base = next(o.writes()).name
    return [
        v if v is not None else Value(b.names.take(f"{base}.{i}"), t)
        for i, (v, t) in enumerate(zip(outs, types, strict=True))
    ]
