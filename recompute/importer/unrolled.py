"""Selection of recurrent operators to unroll, and the charge for unrolled nodes."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

import onnx

from ..boundary import as_texts
from ..errors import UsageError, nearest
from .graphs import first_output
from .limits import NODE, Budget


def charge(budget: Budget, nodes: int, what: str) -> None:
    """Charges unrolled nodes.  LimitError if the loops of a model become too many nodes."""
    budget.spend(max(nodes, 1) * NODE, f"{what}: written out, its loops become too many nodes")


class Unrolled:
    """The recurrent operators to unroll: all, or those that a name or glob matches."""

    def __init__(self, wanted: bool | Sequence[str]) -> None:
        self._all = wanted is True
        patterns = [] if isinstance(wanted, bool) else as_texts(wanted, "unroll")
        self._found = dict.fromkeys(patterns, False)

    def chooses(self, budget: Budget, node: onnx.NodeProto, steps: int) -> bool:
        """Whether a recurrent node is unrolled; if so, its nodes are charged to `budget`."""
        names = [n for n in (node.name, *node.output) if n]
        fits = [p for p in self._found if any(n == p or fnmatch.fnmatchcase(n, p) for n in names)]
        self._found.update(dict.fromkeys(fits, True))
        if self._all or fits:
            charge(budget, 16 * steps, f"{steps:,} steps")
        return self._all or bool(fits)

    def check(self, graph: onnx.GraphProto) -> None:
        """UsageError if a pattern matches no recurrent node."""
        for pattern, matches in self._found.items():
            if not matches:
                names = [n.name or first_output(n) for n in graph.node if n.op_type in ("RNN", "GRU", "LSTM")]
                raise UsageError(f"unroll: no recurrent node is called '{pattern}'{nearest(pattern, names)}")
