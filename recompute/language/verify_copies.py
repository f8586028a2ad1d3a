"""Verification of copies between device and host: each is awaited before its target is used."""

from __future__ import annotations

from .ir import Operator, Value
from .text import show_name


class Copies:
    """Follows the operators of a block in order; `step` and `left` return a description of a fault, or "".

    A copy writes its target, which only one later wait may read; the wait also names the copy's source.
    """

    def __init__(self, persistent: set[str]) -> None:
        self.persistent = persistent
        #: target of a copy without a wait so far → (its source, the copy's position)
        self.flying: dict[str, tuple[str, int]] = {}
        self.targets: set[str] = set()

    def unfit(self, v: Value) -> bool:
        """Whether a value is in host memory, or the target of a copy: only copies and waits may read it."""
        return v.type.host or v.name in self.targets

    def step(self, at: int, op: Operator) -> str:
        """The fault of an operator whose types are correct; "" if there is none."""
        if not op.op.copies:
            if op.typed and not self.targets:  # checked before, and no value is in host memory
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
        """(position, description) of a copy without a wait; (-1, "") if there is none."""
        for target, (_, at) in self.flying.items():
            return at, f"no CopyWait follows the copy to {show_name(target)}: the step would end before it does"
        return -1, ""

    def _early(self, v: Value) -> str:
        return f"{show_name(v.name)} is read while a copy writes it: read the result of its CopyWait"
