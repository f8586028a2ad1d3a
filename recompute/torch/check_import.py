"""A program's outputs, gradients and buffers beside those of the network that it was imported from."""

from __future__ import annotations

import contextlib
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import numpy as np
import onnx

from ..boundary import as_path
from ..errors import ModelError, UsageError, nearest
from ..importer.load import load
from ..language.program import Program
from ..training.optimizers import SGD

__all__ = ["check_import"]

#: largest difference of an element, as a share of the tensor's largest magnitude, by the element type's digits
_LIMITS = {"f64": 1e-6, "f32": 1e-3, "f16": 3e-2, "bf16": 1e-1}
#: the allowance for the network's own rounding
_MOST_SLACK = 0.05
#: differences that one message tells
_MOST = 8
#: elements that are compared at a time
_PART = 1 << 20


@dataclass(frozen=True)
class Wanted:
    """Results of a network: arrays by the program's names.

    `gradients`: None where it gave none.  `exact`: by kind and name, what it gives in float64; what is near that is
    right, too, and what the network itself errs is no difference.  `rounding`: the largest difference of a gradient, of
    its largest magnitude, that may be rounding.
    """

    feed: Mapping[str, np.ndarray]
    outputs: Mapping[str, np.ndarray] = field(default_factory=dict)
    gradients: Mapping[str, np.ndarray | None] = field(default_factory=dict)
    buffers: Mapping[str, np.ndarray] = field(default_factory=dict)
    exact: Mapping[tuple[str, str], np.ndarray] = field(default_factory=dict)
    rounding: float = 0.0


def differences(program: Program, wanted: Wanted, loss: str) -> list[str]:
    """Sentences about what differs in one forward and backward pass of a program; [] where nothing does.

    `loss`: the value to differentiate.  The program is not changed.
    """
    return told(program, run_once(program, wanted, loss), wanted)


def told(program: Program, made: Mapping[tuple[str, str], np.ndarray | None], wanted: Wanted) -> list[str]:
    """`differences` of what a program gave already (`run_once`)."""
    lines = []
    for kind, there in (("output", wanted.outputs), ("gradient of", wanted.gradients), ("buffer", wanted.buffers)):
        largest = max((_largest(a) for a in there.values() if a is not None), default=0.0)
        for name, theirs in there.items():
            ours, exact = made.get((kind, name)), wanted.exact.get((kind, name))
            limit = max(_limit(program, name), wanted.rounding if kind == "gradient of" else 0.0)
            if ours is not None and theirs is not None and exact is not None and exact.shape == ours.shape:
                if distance(ours, exact, largest)[0] <= limit:
                    continue
                limit += min(10 * distance(theirs, exact, largest)[0], _MOST_SLACK)
            if said := _difference(ours, theirs, limit, largest):
                lines.append(f"{kind} '{name}' {said}")
    return listed(lines)


def listed(lines: Sequence[str]) -> list[str]:
    """The first sentences, and how many more there are."""
    return [*lines[:_MOST], f"and {len(lines) - _MOST} more"] if len(lines) > _MOST else list(lines)


class Made(Mapping[tuple[str, str], "np.ndarray | None"]):
    """Results of a program, by kind and name, copied one array at a time: all gradients are as large as the model.

    `names`: the values in the session, None for what is absent.
    """

    def __init__(self, session: Any, names: Mapping[tuple[str, str], str | None]) -> None:
        self._session, self._names = session, names

    def __getitem__(self, key: tuple[str, str]) -> np.ndarray | None:
        name = self._names[key]
        return None if name is None else self._session.fetch(name)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def run_once(program: Program, wanted: Wanted, loss: str) -> Mapping[tuple[str, str], np.ndarray | None]:
    """Results of a copy of the program for the same feed, differentiated as `minimize` does it."""
    from ..runtime.executor import Executor

    copy = beside(program)
    outputs = {n: str(program.aliases.get(n, n)) for n in wanted.outputs if n in program}
    copy.fetched = tuple(outputs.values())
    aliases = {n: str(program.aliases.get(n, n)) for n in wanted.gradients}
    buffers = {n: str(program.aliases.get(n, n)) for n in wanted.buffers}
    present = {v.name for v in copy.block.parameters}
    trained = list(dict.fromkeys(n for n in aliases.values() if n in present))
    grads: dict[str, str] = {}
    _also(copy, outputs.values())
    if trained:
        with contextlib.suppress(UsageError):  # the loss depends on none of them
            grads = {p.name: g.name for p, g in SGD(0.0).backward(copy[loss], parameter_list=trained)}
    _also(copy, grads.values())
    updated = {v.name for op in copy.operators if op.op.updates for v in op.writes()}
    for name, array in copy.data.items():
        copy.data[name] = array.copy() if name in updated else _writable(array)
    executor = Executor()
    with np.errstate(all="ignore"):
        executor.run(copy, dict(wanted.feed))
    names: dict[tuple[str, str], str | None] = {("output", n): v for n, v in outputs.items()}
    names |= {("gradient of", n): grads.get(p) for n, p in aliases.items()}
    names |= {("buffer", n): v if v in copy.data else None for n, v in buffers.items()}
    return Made(executor.session(copy), names)


def _also(program: Program, outputs: Iterable[str]) -> None:
    """Has the program compute these, too."""
    kept = tuple(dict.fromkeys([*program.block.outputs, *outputs]))
    program.block = program.block.with_operators(program.block.operators, outputs=kept)


def beside(program: Program) -> Program:
    """A program with the same arrays, to which others may be added."""
    other = Program(program.block, dict(program.data), source=program.source)
    other.take_origin(program)
    return other


def _writable(array: np.ndarray) -> np.ndarray:
    """The same elements for a session, which copies what is read-only; nothing writes into them."""
    root = array.base
    whole = isinstance(root, np.ndarray) and root.flags.writeable and root.nbytes == array.nbytes
    if root is not None and whole and root.flags.c_contiguous and array.flags.c_contiguous:  # else in another order
        return root.view(array.dtype).reshape(array.shape)
    return array.copy()


def _limit(program: Program, name: str) -> float:
    """The largest difference that is rounding."""
    return _LIMITS.get(str(program[name].dtype) if name in program else "f32", 1e-3)


def _difference(ours: np.ndarray | None, theirs: np.ndarray | None, limit: float, largest: float) -> str:
    """The difference between two arrays in words, "" for none; an absent gradient is 0."""
    if theirs is None or ours is None:
        there = ours if theirs is None else theirs
        if there is None or not np.any(there):
            return ""
        if theirs is None:
            return "is computed here, and the network has none"
        return f"is absent here (largest magnitude there {np.max(np.abs(theirs)):.3g})"
    if ours.shape != theirs.shape:
        return f"has shape {list(ours.shape)} here, {list(theirs.shape)} there"
    apart, at = distance(ours, theirs, largest)
    if apart <= limit:
        return ""
    return (
        f"differs by {apart:.1e} of its largest magnitude ({ours[at]:.6g} here, {theirs[at]:.6g} there, at {list(at)})"
    )


def _largest(array: np.ndarray) -> float:
    """The largest finite magnitude."""
    flat, largest = np.asarray(array).reshape(-1), 0.0
    for start in range(0, flat.size, _PART):
        part = np.abs(np.asarray(flat[start : start + _PART], np.float64))
        largest = max(largest, float(np.max(part, initial=0.0, where=np.isfinite(part))))
    return largest


def distance(ours: np.ndarray, theirs: np.ndarray, largest: float = 0.0) -> tuple[float, tuple[int, ...]]:
    """The largest difference of an element, as a share of `theirs`' largest magnitude, and where it is.

    `largest`: the largest magnitude of all tensors of the kind; one of less than a thousandth of it is as good as 0.
    Elements that are not finite must be the same.
    """
    if not ours.size:
        return 0.0, ()
    scale = max(_largest(theirs), 1e-3 * largest)
    apart, at = 0.0, 0
    for start in range(0, ours.size, _PART):  # in float64 the whole would take eight times its memory
        a, b = (np.asarray(x.reshape(-1)[start : start + _PART], np.float64) for x in (ours, theirs))
        error = _apart(a, b, scale)
        worst = int(np.argmax(error))
        if not error[worst] <= apart:
            apart, at = float(error[worst]), start + worst
    return apart, tuple(int(i) for i in np.unravel_index(at, ours.shape))


def _apart(a: np.ndarray, b: np.ndarray, scale: float) -> np.ndarray:
    """The difference of each element as a share of `scale`."""
    finite = np.isfinite(a) & np.isfinite(b)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        apart = np.where(same, 0.0, np.where(finite, np.abs(a - b) / max(scale, 1e-30), np.inf))
        if scale < 1e-12:  # rounding of zero
            apart = np.where(finite & (np.abs(a - b) < 1e-6), 0.0, apart)
    return apart


def check_import(
    model: str | PathLike[str] | onnx.ModelProto,
    reference: str | PathLike[str] | Mapping[str, Any],
    *,
    loss: str | None = None,
    **options: Any,
) -> Program:
    """Loads a model, and compares one forward and backward pass with values from the framework that made it.

    `reference`: a `.npz` file or a mapping of arrays: every input by its name; any outputs or inner values by theirs;
    gradients as "NAME_grad", and buffers afterwards as "NAME_after", by the names of the model's tensors.  `loss`: the
    scalar that was differentiated (default: the only scalar among the outputs).  `options`: those of `rc.load`
    (default `mode="file"`).

    Returns the program.  ModelError that names the tensors that differ; UsageError for a reference that does not fit.
    """
    arrays = _arrays(reference)
    program = load(model, **{"mode": "file", **options})
    inputs = {v.name for v in program.inputs}
    if lacking := sorted(inputs - arrays.keys()):
        raise UsageError(f"the reference lacks the input{'s' * (len(lacking) > 1)} {', '.join(lacking)}")
    if loss is None:
        scalars = [v.name for v in program.outputs if v.shape in ((), (1,)) and v.dtype.startswith(("f", "bf"))]
        if len(scalars) != 1:
            raise UsageError("loss: name the scalar whose gradients the reference has")
        loss = scalars[0]
    wanted = _wanted(program, {n: arrays.pop(n) for n in inputs}, arrays)
    if lines := differences(program, wanted, loss):
        raise ModelError("the program differs from its reference:\n  " + "\n  ".join(lines))
    return program


def _arrays(reference: str | PathLike[str] | Mapping[str, Any]) -> dict[str, np.ndarray]:
    if isinstance(reference, Mapping):
        return {n: np.asarray(a) for n, a in reference.items()}
    try:
        with np.load(as_path(reference, "reference"), allow_pickle=False) as file:
            return {n: file[n] for n in file.files}
    except (OSError, ValueError, AttributeError, EOFError, zipfile.BadZipFile) as e:
        raise UsageError(f"cannot read the reference '{reference}': {e}") from None


def _wanted(program: Program, feed: dict[str, np.ndarray], arrays: Mapping[str, np.ndarray]) -> Wanted:
    """Outputs, gradients and buffers of a reference."""
    outputs: dict[str, np.ndarray] = {}
    gradients: dict[str, np.ndarray | None] = {}
    buffers: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        if name in program:
            outputs[name] = array
        elif name.endswith("_grad") and name.removesuffix("_grad") in program:
            gradients[name.removesuffix("_grad")] = array
        elif name.endswith("_after") and name.removesuffix("_after") in program.data:
            buffers[name.removesuffix("_after")] = array
        else:
            raise UsageError(f"the reference has '{name}', which the model does not{nearest(name, program.data)}")
    return Wanted(feed, outputs, gradients, buffers)
