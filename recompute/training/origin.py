"""What ranks compare before they train one model together: the model, its weights and state, the optimizer.

A rank may have parts of values (ZeRO, tensor parallelism) or some of the layers (pipelines).  What several ranks have
alike must be the same; and what was divided must have been cut out of the same whole values.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..communication.mesh import Mesh
from ..communication.replicated import HIDDEN, replicated
from ..language.program import Program, Variable
from ..language.text import show
from .parts import Part, parts_of, stored
from .spec import Spec
from .updates import OtherRule

#: elements that are hashed at a time
_PIECE = 1 << 20
#: how deep options are described, and how many characters of them are shown
_DEEP, _LONG = 8, 600
#: options that say which rank this is, or on which machine, and what belongs to a program that was made
_OWN = frozenset({"rank", "_program", "_state", "_named", "_unscale"})
#: the fields of a spec that ranks must have alike, and those among them that change results
_COMPARED = frozenset(f.name for f in dataclasses.fields(Spec)) - {"rule", "target", "cost", "later"}
CHANGING = frozenset({"precision", "full", "scaling", "average", "slices", "allowed", "merge", "inserted"})


@dataclass
class Origin:
    """The origin of a program of several ranks.

    `facts`: what must be the same on all ranks; `whole`: digests of values before they were divided; `held`: those of
    what this rank got of them.  A program that was changed since has other ones: then `whole` says nothing.
    """

    facts: dict[str, str]
    whole: dict[str, str] = field(default_factory=dict)
    held: dict[str, str] = field(default_factory=dict)


def origin_of(program: Program, spec: Spec, *, divides: bool) -> Origin:
    """The origin of a program before its backward pass is added; `divides`: ranks will have parts of it.

    Linear in the model's bytes if it divides.
    """
    whole = {v.name: digest(program.data[v.name]) for v in stored(program) if v.name in program.data} if divides else {}
    return Origin({**options_of(spec), "model": _short(show(program.block))}, whole)


def held(program: Program) -> dict[str, str]:
    """Digests of what this rank has of parameters, buffers and state, by name and part.  Linear in their bytes."""
    parts = parts_of(program)
    there = [v for v in stored(program) if dict.get(program.data, v.name) is not None]
    return {f"'{v.name}'{_place(parts.get(v.name))}": digest(program.data[v.name]) for v in there}


def values_to_compare(program: Program, mesh: Mesh | None = None, rank: int = 0) -> dict[str, str]:
    """`held`, and digests of the whole values that were divided, if nothing was changed since.

    Of a program that was made for no mesh: what a rank of `mesh` must have alike with others (see `replicated`).
    """
    if program.mesh is None and mesh is not None:
        return _written_by_hand(program, mesh, rank)
    values = held(program)
    origin = program.origin
    if origin is not None and origin.whole and all(values.get(n) == d for n, d in origin.held.items()):
        return {**values, **{f"'{n}' (whole)": d for n, d in origin.whole.items()}}
    return values


def _written_by_hand(program: Program, mesh: Mesh, rank: int) -> dict[str, str]:
    arrays = {c.value.name: c.numpy() for c in program.logical.constants}
    values = {}
    for name, replica in replicated(program.logical).items():
        array = arrays.get(name, dict.get(program.data, name))
        if array is not None:
            at = [f"{axis}={mesh.coordinate(rank, axis)}" for axis, _ in mesh.axes if axis not in replica.axes]
            place = f" (at {', '.join(at)})" * bool(at)
            values[f"'{name}'{place}{HIDDEN}{replica.how}"] = digest(array)
    return values


def _place(part: Part | None) -> str:
    """Which part of a value it is: the same text on the ranks that have the same part."""
    if part is None:
        return ""
    where = [(how.axis, part.mesh.coordinate(part.rank, how.axis)) for how, _ in part.cuts]
    return f" (part {', '.join(f'{axis}={at}' for axis, at in where)}{' ' * bool(where)}from {part.low})"


def digest(array: Any) -> str:
    """A digest of an array's type, shape and contents, which takes no memory of its size."""
    host = array.get() if hasattr(array, "get") else np.asarray(array)
    found = hashlib.sha256(f"{host.dtype}{host.shape}".encode())
    if host.dtype == object:
        found.update("\0".join(map(str, host.reshape(-1))).encode())
    elif host.size and not any(host.strides):  # one number everywhere, which takes no memory
        piece = np.full(min(host.size, _PIECE), host[(0,) * host.ndim], host.dtype)
        for begin in range(0, host.size, _PIECE):
            found.update(_bytes(piece[: host.size - begin]))
    elif host.flags.c_contiguous:
        found.update(_bytes(host))
    else:
        for begin in range(0, host.size, _PIECE):
            found.update(_bytes(host.flat[begin : begin + _PIECE]))
    return found.hexdigest()[:16]


def _bytes(array: np.ndarray) -> Any:
    return array.reshape(-1).view(np.uint8).data if array.size else b""


def options_of(spec: Spec, only: Collection[str] = _COMPARED) -> dict[str, str]:
    """The options of a step: its rule's, `Adam.learning_rate` → "0.001", and the fields `only` of its spec."""
    rule = spec.rule.optimizer if isinstance(spec.rule, OtherRule) else spec.rule
    name = type(rule).__name__
    options = {"optimizer": name}
    options |= {f"{name}.{_public(n)}": _described(v) for n, v in vars(rule).items() if n not in _OWN}
    for part in sorted(only):
        value = getattr(spec, part)
        options |= _fields(value, 1) if part == "parallel" and value is not None else {part: _described(value)}
    return {name: text if len(text) < _LONG else _short(text) for name, text in options.items()}


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _public(option: str) -> str:
    return {"_rate": "learning_rate", "_clip": "grad_clip"}.get(option, option.lstrip("_"))


def _described(value: Any, depth: int = 0) -> str:
    """A text that is the same for equal options, in every process."""
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return repr(value)
    if isinstance(value, np.generic):
        return repr(value.item())
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)} {digest(value)}"
    if isinstance(value, Variable):
        return value.name
    if depth > _DEEP:
        return type(value).__name__
    if isinstance(value, Mapping):
        pairs = (f"{k}: {_described(v, depth + 1)}" for k, v in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, (Sequence, set, frozenset)):
        each = [_described(v, depth + 1) for v in value]
        return f"[{', '.join(each if isinstance(value, Sequence) else sorted(each))}]"
    if callable(value) and hasattr(value, "__qualname__"):
        return str(value.__qualname__)
    inside = (f"{name}={text}" for name, text in _fields(value, depth + 1).items())
    return f"{type(value).__name__}({', '.join(inside)})"


def _fields(value: Any, depth: int) -> dict[str, str]:
    if dataclasses.is_dataclass(value):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    else:
        fields = dict(getattr(value, "__dict__", {}))
    return {n.lstrip("_"): _described(v, depth) for n, v in fields.items() if n not in _OWN}
