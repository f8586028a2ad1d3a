"""Verification of copies between device and host: each is awaited before its target is used."""

from __future__ import annotations

from collections.abc import Mapping

from .ir import Operator, Value
from .text import show_name


class Copies:
    """Follows the operators of a block in order; `step` and `left` return a description of a fault, or "".

    A copy writes its target, which only one later wait may read; the wait also names the copy's source.  What is
    fetched of a parameter, buffer or state in host memory, and updated, is stored there, after which the step does not
    fetch it again.
    """

    def __init__(self, persistent: Mapping[str, Value]) -> None:
        self.persistent = persistent
        self.far = {name for name, v in persistent.items() if v.type.host}
        #: target of a copy without a wait so far → (its source, the copy's position)
        self.flying: dict[str, tuple[str, int]] = {}
        self.targets: set[str] = set()
        #: fetched copies of persistent values, and updates of those → the persistent value
        self.fetched: dict[str, str] = {}
        #: updates that are not stored yet → their persistent values
        self.updated: dict[str, str] = {}
        self.stored: set[str] = set()

    def unfit(self, v: Value) -> bool:
        """Whether a value is in host memory, or the target of a copy: only copies and waits may read it."""
        return v.type.host or v.name in self.targets

    def step(self, at: int, op: Operator) -> str:
        """The fault of an operator whose types are correct; "" if there is none."""
        if not op.op.copies:
            if op.typed and not self.targets and not self.far:  # checked before, and no value is in host memory
                return ""
            touched = (*op.outputs, *op.scratch)
            if self.targets or self.far:
                touched = (*op.inputs, *touched)
            host = [v for v in touched if v is not None and v.type.host]
            if host:
                return f"{show_name(host[0].name)} is in host memory: only copies touch it, {op.op.name} is none"
            early = [v for v in op.reads() if v.name in self.targets] if self.targets else []
            return "" if not early else self._early(early[0])
        first, second = op.inputs[0], op.inputs[1] if len(op.inputs) > 1 else None
        value = op.outputs[0]
        assert first is not None and value is not None
        if second is None:
            return self._begin(at, value, first)
        if not op.op.updates:
            return self._wait(first, second, value)
        return self._landed(first, second) if first.name in self.flying else self._store(at, first, second)

    def update(self, name: str, made: str) -> None:
        """Notes that what was fetched is updated in place, and has another name then."""
        self.updated.pop(name, None)
        self.fetched[made] = self.updated[made] = self.fetched.pop(name)

    def _begin(self, at: int, target: Value, source: Value) -> str:
        if source.name in self.persistent and not source.type.host:
            return f"{show_name(source.name)} is persistent: only values of the step are moved to the host and back"
        if source.name in self.targets or source.name in self.stored or source.name in self.updated.values():
            return self._early(source)
        self.flying[target.name] = source.name, at
        self.targets.add(target.name)
        return ""

    def _wait(self, target: Value, source: Value, made: Value) -> str:
        if target.name in self.persistent:
            return f"{show_name(target.name)} is written by a Store: a StoreWait awaits it"
        why = self._landed(target, source)
        if not why and source.name in self.persistent:
            self.fetched[made.name] = source.name
        return why

    def _store(self, at: int, w: Value, x: Value) -> str:
        if w.name not in self.persistent:
            return f"{show_name(w.name)} is no parameter, buffer or state: an Offload copies values of the step"
        if w.name in self.stored or self.updated.pop(x.name, None) != w.name:
            return f"{show_name(x.name)} is not an update of the fetched copy of {show_name(w.name)}"
        if any(source == w.name for source, _ in self.flying.values()):
            return f"{show_name(w.name)} is stored while a copy reads it: its CopyWait comes first"
        self.flying[w.name] = x.name, at
        self.stored.add(w.name)
        return ""

    def _landed(self, target: Value, source: Value) -> str:
        if target.name not in self.flying:
            again = "was awaited already" if target.name in self.targets else "is not what a copy writes"
            return f"{show_name(target.name)} {again}: a CopyWait takes the result of one Offload or Prefetch"
        begun, _ = self.flying.pop(target.name)
        if begun != source.name:
            return f"the copy to {show_name(target.name)} reads {show_name(begun)}, not {show_name(source.name)}"
        return ""

    def left(self) -> tuple[int, str]:
        """(position, description) of a copy without a wait; (-1, "") if there is none."""
        for target, (_, at) in self.flying.items():
            return at, f"no CopyWait follows the copy to {show_name(target)}: the step would end before it does"
        for name, w in self.updated.items():
            return -1, f"{show_name(name)} is an update of {show_name(w)}, and no Store copies it to host memory"
        return -1, ""

    def _early(self, v: Value) -> str:
        return f"{show_name(v.name)} is read while a copy writes it: read the result of its CopyWait"
