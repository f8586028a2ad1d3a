"""When two masks are the same: values get numbers, equal for values that are computed alike.

Exporters write a mask again wherever it is used.  Numbers do not see shapes where only the order of elements matters
(`(y >= 0).view(-1)` is `y.view(-1) >= 0`).
"""

from __future__ import annotations

from typing import Any

from ..language.builder import Builder
from ..language.ir import Operator, Value

_SAME_ORDER = frozenset({"Reshape", "Identity", "Detach", "Flatten", "Squeeze", "Unsqueeze"})
_ELEMENTWISE = frozenset(
    {"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "And", "Or", "Xor", "Not", "Cast", "Where", "IsNaN"}
)


class Numbering:
    """Numbers of the values of a block under construction."""

    def __init__(self, builder: Builder) -> None:
        self._builder = builder
        self._numbers: dict[str, int] = {}
        self._keys: dict[Any, int] = {}
        self._makers: dict[str, Operator] = {}
        self._done = self._constants = 0

    def number(self, v: Value) -> int:
        """The number of a value."""
        self._catch_up()
        return self._of(v)

    def base(self, v: Value) -> tuple[Value, int]:
        """The mask that a bool value repeats, and how many neighbours share each of its elements."""
        self._catch_up()
        times = 1
        while (maker := self._makers.get(v.name)) is not None and maker.inputs and maker.inputs[0] is not None:
            x = maker.inputs[0]
            if maker.op.name in _SAME_ORDER or (maker.op.name == "Cast" and x.dtype == "bool"):
                v = x
            elif maker.op.name == "Expand" and (inner := _repeats(x.shape, v.shape)):
                v, times = x, times * inner
            else:
                break
        return v, times

    def counted(self, v: Value) -> Value | None:
        """The bool value whose true elements an integer value counts: `mask.sum()`."""
        self._catch_up()
        maker = self._makers.get(v.name)
        while maker is not None and maker.op.name in _SAME_ORDER and maker.inputs[0] is not None:
            maker = self._makers.get(maker.inputs[0].name)
        if maker is None or maker.op.name != "ReduceSum" or maker.outputs[0] is None or maker.outputs[0].type.size != 1:
            return None
        return None if maker.inputs[0] is None else self.cast_from_bool(maker.inputs[0])

    def cast_from_bool(self, v: Value) -> Value | None:
        """The bool value that a value of numbers is, in another type and perhaps in another shape."""
        self._catch_up()
        x: Value | None = v
        while x is not None and (before := self._makers.get(x.name)) is not None:
            if before.op.name == "Cast" and before.inputs[0] is not None and before.inputs[0].dtype == "bool":
                return before.inputs[0]
            if before.op.name not in _SAME_ORDER:
                return None
            x = before.inputs[0]
        return None

    def _catch_up(self) -> None:
        for c in self._builder.constants[self._constants :]:
            if c.value.type.size == 1:
                self._numbers[c.value.name] = self._keep(("constant", c.value.dtype, repr(c.data)))
        self._constants = len(self._builder.constants)
        for o in self._builder.operators[self._done :]:
            for i, v in enumerate(o.outputs):
                if v is not None and not o.op.updates:
                    self._makers[v.name] = o
                    self._numbers[v.name] = self._keep(self._key(o, i))
        self._done = len(self._builder.operators)

    def _key(self, o: Operator, output: int) -> Any:
        ins = tuple(None if v is None else self._of(v) for v in o.inputs)
        if o.op.name in _SAME_ORDER:
            return ("same", ins[0])
        if o.op.random:
            return ("random", o.outputs[output])
        value = o.outputs[output]
        plain = value is not None and all(v.type.size in (1, value.type.size) for v in o.reads())
        if plain and o.op.name in _ELEMENTWISE:
            return (repr(o.op), ins)
        return (repr(o.op), ins, tuple(None if v is None else v.type for v in o.inputs), output)

    def _keep(self, key: Any) -> int:
        if key[0] == "same":
            return int(key[1])
        return self._keys.setdefault(key, len(self._keys))

    def _of(self, v: Value) -> int:
        if v.name not in self._numbers:
            self._numbers[v.name] = self._keep(("named", v.name))
        return self._numbers[v.name]


def _repeats(small: tuple[int, ...], large: tuple[int, ...]) -> int:
    """How often each element is repeated in place where dimensions of 1 at the end are expanded; 0: otherwise."""
    padded = (1,) * (len(large) - len(small)) + tuple(small)
    last = len(large)
    times = 1
    while last and padded[last - 1] == 1:
        last -= 1
        times *= large[last]
    return times if padded[:last] == tuple(large[:last]) else 0
