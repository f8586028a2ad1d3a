"""Checks copies between device and host: who touches host memory, and that each copy is awaited before it is used."""

from __future__ import annotations

from .ir import Operator, Value
from .text import show_name


class Copies:
    """Follows the operators of a block in order; `step` and `left` say what is wrong, "" where nothing is.

    What a copy writes is its target: nobody but one wait, which comes later and names the copy's source too, reads it.
    """

    def __init__(self, persistent: set[str]) -> None:
        self.persistent = persistent
        #: target of a copy that nobody has waited for yet → (its source, the copy's position)
        self.flying: dict[str, tuple[str, int]] = {}
        self.targets: set[str] = set()

    def unfit(self, v: Value) -> bool:
        """Whether a value is in host memory, or what a copy writes: only copies and waits may read it."""
        return v.type.host or v.name in self.targets

    def step(self, at: int, op: Operator) -> str:
        """What an operator does wrong (its types are right already)."""
        if not op.op.copies:
            if op.typed and not self.targets:  # seen before, and nothing that it could read is in host memory
                return ""
            touched = (*op.outputs, *op.scratch)
            if self.targets:
                touched = (*op.inputs, *touched)
            host = [v for v in touched if v is not None and v.type.host]
            if host:
                return f"{show_name(host[0].name)} is in host memory: only copies touch it, {op.op.name} is none"
            early = [v for v in op.reads() if v.name in self.targets] if self.targets else []
            return "" if not early else self._early(early[0])
        target, source = (op.outputs[0], op.inputs[0]) if len(op.inputs) == 1 else op.inputs
        assert target is not None and source is not None
        return self._wait(target, source) if len(op.inputs) > 1 else self._begin(at, target, source)

    def _begin(self, at: int, target: Value, source: Value) -> str:
        if source.name in self.persistent:
            return f"{show_name(source.name)} is persistent: only values of the step are moved to the host and back"
        if source.name in self.targets:
            return self._early(source)
        self.flying[target.name] = source.name, at
        self.targets.add(target.name)
        return ""

    def _wait(self, target: Value, source: Value) -> str:
        if target.name not in self.flying:
            again = "was awaited already" if target.name in self.targets else "is not what a copy writes"
            return f"{show_name(target.name)} {again}: a CopyWait takes the result of one Offload or Prefetch"
        known, _ = self.flying.pop(target.name)
        if known != source.name:
            return f"the copy to {show_name(target.name)} reads {show_name(known)}, not {show_name(source.name)}"
        return ""

    def left(self) -> tuple[int, str]:
        """(position, what is wrong) for a copy that nobody waits for; (-1, "") where there is none."""
        for target, (_, at) in self.flying.items():
            return at, f"no CopyWait follows the copy to {show_name(target)}: the step would end before it does"
        return -1, ""

    def _early(self, v: Value) -> str:
        return f"{show_name(v.name)} is read while a copy writes it: read the result of its CopyWait"
