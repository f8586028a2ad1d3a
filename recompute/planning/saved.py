"""Saved plans: JSON files that name operators by their outputs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..language.ir import Block, Role
from ..passes import RecomputePlan, Rerun
from ..passes.approximation.choices import parse_choice
from ..passes.planners.core.problem import read_json
from ..passes.planners.fit.problem import Fitted
from ..passes.slicing.slicing import parse_slicing
from ..support.files import replacing
from .figures import PlanFigures

#: the value of the first field of a plan's file
FORMAT = "recompute-plan-1"
_FORWARD = (Role.FORWARD, Role.LOSS)


@dataclass(frozen=True)
class SavedPlan:
    """A plan that names operators, so that it also applies to other batches of the model.

    `reruns`: pairs of names, the first output of the recomputed operator and the first output of the operator before
    which it is recomputed; `scheduled`: whether the plan is for the order of operators made by the pass `schedule`;
    `offloads`: names of values that are offloaded to host memory; `slices`: parts that run in slices, applied first;
    `approximations`: values that do not wait, and what waits in their place, applied last; `before`: such that are
    applied before recomputation.
    """

    model: str
    batch: int | None
    strategy: str
    scheduled: bool
    reruns: tuple[tuple[str, str], ...]
    checkpoints: tuple[str, ...] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)
    offloads: tuple[str, ...] = ()
    slices: tuple[str, ...] = ()
    approximations: tuple[str, ...] = ()
    before: tuple[str, ...] = ()

    def for_block(self, base: Block) -> RecomputePlan:
        """The plan with operators by number.  UsageError that states the first name missing from the step."""
        number = {name: i for i, name in enumerate(_operator_names(base))}
        reruns = []
        for pair in self.reruns:
            for name in pair:
                if name not in number:
                    raise UsageError(
                        f"the plan is for another step: it names '{name}', which no operator here writes (it was made "
                        f"for {self.model}; options such as --option, --loss, --optimizer and --no-rebuild must be "
                        "the same, the batch may differ)"
                    )
            reruns.append(Rerun(number[pair[0]], number[pair[1]]))
        for r, pair in zip(reruns, self.reruns, strict=True):
            op = base.operators[r.operator]
            once = op.op.once or (op.role not in _FORWARD and not op.views())
            if r.operator >= r.before or once:
                what = f"here '{pair[0]}' cannot be recomputed before '{pair[1]}'"
                raise UsageError(f"the plan is for another step: {what}")
        reruns.sort(key=lambda r: r.before)  # operators that run before the same one keep their order
        return RecomputePlan(
            tuple(reruns),
            self.checkpoints,
            offloads=self.offloads,
            slices=self.slices,
            approximations=self.approximations,
            before=self.before,
        )

    def to_dict(self) -> dict[str, Any]:
        """The plan as the contents of its file."""
        fields = {"format": FORMAT, **asdict(self)}
        fields["reruns"] = [list(pair) for pair in self.reruns]
        for name in _NAMES:
            fields[name] = list(fields[name])
        return fields

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON."""
        with replacing(Path(path)) as temporary:
            temporary.write_text(json.dumps(self.to_dict(), indent=1) + "\n")


def saved_plan(fitted: Fitted, figures: PlanFigures, model: str, batch: int | None) -> SavedPlan:
    """The plan of a compiled step, by names."""
    names = _operator_names(fitted.base)
    return SavedPlan(
        model=model,
        batch=batch,
        strategy=figures.strategy,
        scheduled=fitted.scheduled,
        reruns=tuple((names[r.operator], names[r.before]) for r in fitted.plan.reruns),
        checkpoints=figures.kept,
        figures={k: v for k, v in figures.to_dict().items() if k not in ("kept", "strategy", "scheduled", *_NAMES)},
        offloads=fitted.plan.offloads,
        slices=fitted.plan.slices,
        approximations=fitted.plan.approximations,
        before=fitted.plan.before,
    )


def _operator_names(block: Block) -> list[str]:
    """A name for each operator: that of its first output, with a number appended if another operator has the name."""
    count: dict[str, int] = {}
    names = []
    for op in block.operators:
        name = next((v.name for v in op.writes()), op.op.name)
        count[name] = count.get(name, 0) + 1
        names.append(name if count[name] == 1 else f"{name}#{count[name]}")
    return names


def load_plan(path: str | os.PathLike[str]) -> SavedPlan:
    """Reads a file written by `SavedPlan.save`.  UsageError that names the wrong field for any other file."""
    data = read_json(path)
    if data.get("format") != FORMAT:
        raise UsageError(f"{path} is not a plan of format '{FORMAT}' (its 'format' is {data.get('format')!r})")
    for name, kind in _FIELDS.items():
        if name not in data:
            raise UsageError(f"{path} lacks the field '{name}'")
        if not isinstance(data[name], kind):
            raise UsageError(f"{path}: the field '{name}' is of the wrong kind: {data[name]!r}"[:300])
    for i, pair in enumerate(data["reruns"]):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(n, str) for n in pair):
            raise UsageError(f"{path}: reruns[{i}] is not a pair of names")
    fields: dict[str, Any] = {name: data[name] for name in _FIELDS}
    fields["reruns"] = tuple((a, b) for a, b in data["reruns"])
    for name in _NAMES:
        entries = data.get(name, [])  # plans of earlier versions do not have all of them
        if not isinstance(entries, list) or not all(isinstance(n, str) for n in entries):
            raise UsageError(f"{path}: {name} must be a list of texts")
        fields[name] = tuple(entries)
    for text in fields["slices"]:
        parse_slicing(text)
    for text in (*fields["approximations"], *fields["before"]):
        parse_choice(text)
    return SavedPlan(**fields)


#: the fields that are lists of texts
_NAMES = ("checkpoints", "offloads", "slices", "approximations", "before")

_FIELDS: dict[str, Any] = {
    "model": str,
    "batch": (int, type(None)),
    "strategy": str,
    "scheduled": bool,
    "reruns": list,
    "checkpoints": list,
    "figures": dict,
}
