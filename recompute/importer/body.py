"""A builder of standard ONNX nodes that replace a node of another domain."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import DTypeLike

from ..errors import ModelError
from .fold import Known
from .graphs import first_output
from .state import ImportState

_COUNTER = itertools.count()
#: most positions of a constant range
_LONGEST = 1 << 24


class Body:
    """Collects nodes: `y = g.Add(g.ins[0], "k")` returns the name of the result; absent inputs are "".

    `ins`: the names of the node's inputs; those past the last one that is given are "" too.
    """

    def __init__(self, importer: ImportState, node: onnx.NodeProto) -> None:
        self._importer, self._node = importer, node
        self._prefix = f"{first_output(node)}.{next(_COUNTER)}"
        self._written = 0
        self._shared: set[str] = set()
        self.ins = [*node.input, *[""] * 32]
        self.nodes: list[onnx.NodeProto] = []

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        if not op_type[:1].isupper():
            raise AttributeError(op_type)

        def call(*ins: str, outputs: int = 1, domain: str = "", **attributes: Any) -> Any:
            names = [self._fresh() for _ in range(outputs)]
            inputs = list(ins)
            while inputs and not inputs[-1]:
                inputs.pop()
            name = f"{self._node.name or self._prefix}/{op_type}"
            self.nodes.append(
                onnx.helper.make_node(op_type, inputs, names, name=name, domain=domain, **without_none(attributes))
            )
            return names[0] if outputs == 1 else names

        return call

    def _fresh(self) -> str:
        self._written += 1
        return f"{self._prefix}.{self._written}"

    def constant(self, value: object, dtype: DTypeLike = np.int64) -> str:
        """A constant's name."""
        name = self._fresh()
        self._importer.known[name] = self._importer.constant(np.asarray(value, dtype))
        return name

    def weight(self, attribute: str, value: object, dtype: DTypeLike) -> str:
        """An attribute's contents as a weight of the file, called `OUTPUT/ATTRIBUTE` after the node's last output."""
        name = f"{self._node.output[-1]}/{attribute}"
        self._importer.known[name] = Known(self._importer.constant(np.asarray(value, dtype)).array, "initializer")
        return name

    def arange(self, n: int, dtype: DTypeLike = np.int64) -> str:
        """0, 1, ..., n - 1, with a dimension before them."""
        if n > _LONGEST:
            raise ModelError(f"{n:,} positions are too many")
        return self.constant(np.arange(n)[None], dtype)

    def shared(self, name: str, make: Callable[[], str]) -> str:
        """A value that nodes compute once for the whole model, under a fixed name."""
        if not self._importer.has(name) and name not in self._shared:
            self._shared.add(name)
            self.nodes.append(onnx.helper.make_node("Identity", [make()], [name]))
        return name

    def results(self, *names: str | None) -> list[onnx.NodeProto]:
        """The nodes, with these results as the node's outputs.  ModelError if a used one is None."""
        to: dict[str, str] = {}
        written = {o for n in self.nodes for o in n.output}
        outputs: Sequence[str | None] = [*names, *[None] * len(self._node.output)]
        for outer, name in zip(self._node.output, outputs, strict=False):
            if not outer:
                continue
            if name is None:
                raise ModelError(f"its output '{outer}' is not supported")
            if name in written and name not in to:
                to[name] = outer
            else:
                self.nodes.append(onnx.helper.make_node("Identity", [to.get(name, name)], [outer]))
        for n in self.nodes:
            n.input[:] = [to.get(i, i) for i in n.input]
            n.output[:] = [to.get(o, o) for o in n.output]
        return self.nodes


def without_none(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes that are not None."""
    return {k: v for k, v in attributes.items() if v is not None}
