"""The values alive at the peak of a compiled step, by role and by layer."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..language.ir import Block, Free, Role
from ..passes import memory_report
from ..passes.memory.memory_plan import collect_lifetimes

#: roles of bytes; "unused" is alignment and gaps of the arena
ROLES = (
    "parameter", "optimizer state", "buffer", "input", "activation", "gradient", "communication", "scratch", "unused"
)  # fmt: skip
_KIND = {
    Role.FORWARD: "activation", Role.LOSS: "activation", Role.RECOMPUTE: "activation", Role.BACKWARD: "gradient",
    Role.OPTIMIZE: "gradient", Role.COMMUNICATE: "activation",
}  # fmt: skip


@dataclass(frozen=True)
class Holding:
    """Bytes of one allocation (a value, or values that share a buffer) at the peak."""

    name: str
    role: str
    layer: str
    bytes: int


def holdings(block: Block) -> list[Holding]:
    """The bytes alive at the peak: persistent values, and allocations of the arena (aligned).

    If several values share an allocation, its role and layer are those of the value written last.
    """
    at = memory_report(block).peak_at
    kinds = roles_of(block)
    near = [v for v in block.persistent() if not v.type.host]
    values = [Holding(v.name, kinds[v.name], layer_of(v.name), v.nbytes) for v in near]
    alive = [x for x in collect_lifetimes(block) if x.start <= at <= x.end]
    newest = _newest(block, at, {x.name: x.size for x in alive})
    return values + [Holding(n, kinds[n], layer_of(n), x.size) for x in alive for n in [newest[x.name]]]


def _newest(block: Block, at: int, sizes: Mapping[str, int]) -> dict[str, str]:
    """Allocation → the value in it that was written last, up to operator `at`."""
    newest = {name: name for name in sizes}
    if not block.addresses:
        return newest
    places = sorted((block.addresses[name], name) for name in sizes if sizes[name])
    gone: set[str] = set()
    for op in reversed(block.operators[: at + 1]):
        if isinstance(op.op, Free):
            gone.update(v.name for v in op.reads())
            continue
        for v in op.writes():
            if v.name in gone or v.name not in block.addresses or not v.nbytes or v.type.host:
                continue
            i = bisect.bisect(places, (block.addresses[v.name], "\U0010ffff")) - 1
            if i >= 0 and block.addresses[v.name] < places[i][0] + sizes[places[i][1]]:
                newest[places.pop(i)[1]] = v.name
    return newest


def roles_of(block: Block) -> dict[str, str]:
    """Value name → one of `ROLES`."""
    roles = {v.name: "input" for v in block.inputs}
    for role, values in (("parameter", block.parameters), ("buffer", block.buffers), ("optimizer state", block.state)):
        roles.update((v.name, role) for v in values)
    roles.update((c.value.name, "buffer") for c in block.constants)
    for op in block.operators:
        kind = "communication" if op.op.communicates else _KIND[op.role]
        for v in op.writes():
            roles.setdefault(v.name, kind)
        roles.update((v.name, "scratch") for v in op.scratch)
        if op.op.moves_data and op.views():  # what a rank received, under another shape
            source = next(op.reads(), None)
            if source is not None and roles.get(source.name) == "communication":
                roles.update((v.name, "communication") for v in op.writes())
    return roles


def layer_of(name: str) -> str:
    """The layer in a value's name: up to its first number (`layer1.0.conv1@1` → `layer1.0`), else the first
    part (`fc.weight` → `fc`).  PyTorch's paths (`/layer1/layer1.0/conv1/Conv_output_0`) are read the same way."""
    base = re.split(r"[@#]", name)[0]
    base = re.sub(r"_grad(_\d+)?$", "", base)
    parts: list[str] = []
    for path in filter(None, base.split("/")):
        if parts and path.startswith(".".join(parts) + "."):
            parts = []
        parts += path.split(".")
    for i, part in enumerate(parts):
        if part.isdigit() and i:
            return ".".join(parts[: i + 1])
    return parts[0] if parts else name


def by_role(held: Iterable[Holding], peak: int) -> dict[str, int]:
    """Bytes of a peak by role; they add up to it."""
    roles = dict.fromkeys(ROLES, 0)
    for h in held:
        roles[h.role] += h.bytes
    roles["unused"] = peak - sum(roles.values())
    return roles
