"""One run: its options, where it is, and how it is saved and taken up again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import UsageError, printable
from ..language.program import Program
from .batches import Epoch
from .callbacks import Callback
from .feeding import Feeding
from .history import History
from .log import Log
from .progress import Progress
from .ranks import ONE, Ranks
from .saving import Checkpoint, Checkpoints, Saving, digest_of, load

#: characters of an option that an error shows
_LONGEST = 200
#: values of options that change nothing
_NEUTRAL = {"none", "None", "[]", "False"}


@dataclass
class Run:
    """One call of `fit`: its options, and where it is."""

    data: Feeding
    eval_data: Feeding | None
    epochs: int
    epoch: Epoch | None
    saving: Saving | None
    drop_last: bool = False
    monitor: str = ""
    log: Log = field(default_factory=lambda: Log(None, None))
    history: History = field(default_factory=History)
    first_epoch: int = 1
    first_batch: int = 0
    total: float = 0.0  # of losses of the epoch, times samples
    samples: int = 0  # of the epoch, so far
    asked: str = ""  # why this process wants to stop
    reason: str = ""  # why all of them do
    best_step: int | None = None
    ranks: Ranks = ONE
    peaks: list[int] = field(default_factory=list)  # predicted, of all ranks
    progress: Progress = field(default_factory=Progress)

    @property
    def checkpoints(self) -> Checkpoints | None:
        """Where checkpoints are, if the run saves some."""
        return None if self.saving is None else self.saving.checkpoints


def save(run: Run, program: Program, position: dict[str, Any], callbacks: Sequence[Callback]) -> None:
    """A checkpoint, where the run has a folder for them; `position`: where the next step reads its data."""
    if run.checkpoints is None:
        return
    facts = {
        **position, "total": run.total, "samples": run.samples, "epochs": run.history.epochs,
        "best": run.history.best, "callbacks": [c.state() for c in callbacks], "plan": _plan_facts(program),
    }  # fmt: skip
    best = () if run.best_step is None else (run.best_step,)
    run.log.flush()  # a run that is killed right behind the checkpoint goes on with a log of all steps before it
    path = run.checkpoints.save(program, run.history.steps, facts, best, run.ranks)
    run.log.write("checkpoint", run.history.steps, path=path.name)


def must_be_fresh(run: Run) -> None:
    """UsageError where a folder has a run already: it would be overwritten."""
    there = run.checkpoints
    if there is not None and run.ranks.first("a look for checkpoints", there.newest) is not None:
        raise UsageError(
            f"'{there.root.parent}' has the checkpoints of a run already: resume it (resume=True, --resume), or give "
            "another folder"
        )


def take_over(run: Run, program: Program, facts: dict[str, Any], callbacks: Sequence[Callback]) -> int | None:
    """Goes on from the newest checkpoint; returns its step, None where there is none yet.

    UsageError where `facts` (data, batch, seed) are not those of the run that was saved.
    """
    there = run.checkpoints
    if there is None:
        raise UsageError("resume needs save, the folder of the checkpoints")
    checkpoint, damaged = run.ranks.first("the newest checkpoint", lambda: (there.newest(), there.damaged))
    run.history.notes += [f"passed over: {text}" for text in damaged]
    if checkpoint is None:
        return None
    p = checkpoint.position
    for name, now in facts.items():
        if name == "options":
            continue
        if p.get(name) != now and name == "micro_batches":
            raise UsageError(_other_pieces(str(there.root.parent), p.get(name), now))
        if p.get(name) != now:
            raise UsageError(
                f"the run in '{there.root.parent}' cannot go on: its {name.replace('_', ' ')} was "
                f"{p.get(name)}, now it is {now}; the same bits need the same data, batch and seed"
            )
    run.history.notes += _other_options(str(there.root.parent), p.get("options"), facts["options"])
    wrong = _wrong(p, checkpoint.step)
    if wrong:
        raise UsageError(_changed(checkpoint, wrong, str(p.get(wrong))))
    load(program, checkpoint)
    run.history.steps = run.history.resumed_at = checkpoint.step
    run.history.epochs, run.history.best = list(p["epochs"]), p["best"]
    run.best_step = None if p["best"] is None else int(p["best"]["step"])
    run.first_epoch, run.first_batch = int(p["epoch"]), int(p["batch"])
    run.total, run.samples = float(p["total"]), int(p["samples"])
    for callback, state in zip(callbacks, p["callbacks"], strict=False):
        try:
            callback.set_state(state)
        except (AttributeError, KeyError, TypeError, ValueError) as e:
            raise UsageError(_changed(checkpoint, "callbacks", str(e))) from None
    if p.get("sha256", "") not in ("", contents := digest_of(p)):  # earlier versions have written none
        raise UsageError(_changed(checkpoint, "sha256", f"the contents have {contents}"))
    return checkpoint.step


def _changed(found: Checkpoint, name: str, why: str) -> str:
    """Why a checkpoint cannot be resumed that no run has written."""
    return (
        f"'{found.folder}' cannot be resumed: '{name}' in its trainer.json is missing or has no possible value "
        f"({printable(why)[:40]}); the file was changed. Remove this folder to go on from the checkpoint before"
    )


def _other_options(folder: str, before: Any, now: dict[str, str]) -> list[str]:
    """Notes on options that may differ from those of the run that was saved: more epochs, and a schedule over them.

    UsageError that names another option with both values.
    """
    if not isinstance(before, dict):  # of a version that did not write them
        return []
    notes, longer = [], before.get("epochs") != now["epochs"]
    for name in sorted({*now, *before} - {"epochs", "optimizer"}):
        was, is_now = (printable(str(options.get(name, "none")), _LONGEST) for options in (before, now))
        if was == is_now or {was, is_now} <= _NEUTRAL:
            continue
        alike = [re.sub(r"-?[0-9][0-9.e+-]*", "0", text) for text in (was, is_now)]
        if longer and name.endswith(".learning_rate") and "(" in is_now and alike[0] == alike[1]:
            notes.append(f"the schedule is another one, for other epochs: {was} before, {is_now} now")
            continue
        raise UsageError(
            f"the run in '{folder}' cannot go on: its option {name} was {was}, now it is {is_now}; resume it with the "
            "same options, or begin another run from its model.onnx (another --save)"
        )
    return notes


def _other_pieces(folder: str, before: Any, now: Any) -> str:
    """Why a run with other micro-batches cannot go on."""
    was, is_now = (
        "without a mesh" if n is None else f"with a mesh and {n} micro-batches a step" for n in (before, now)
    )
    how = (
        "without mesh"
        if before is None
        else f"mesh='dp=N', micro_batches={before} (--mesh dp=N --micro-batches {before})"
    )
    return f"the run in '{folder}' was {was}, this is {is_now}, which adds in another order: resume it {how}"


def _plan_facts(program: Program) -> dict[str, Any]:
    """The recomputations, for people who read a checkpoint: the bits do not depend on them."""
    plan = program.plan
    return {} if plan is None else {"recomputed": len(plan.reruns), "checkpoints": list(plan.checkpoints)}


def _is_result(epoch: dict[str, Any]) -> bool:
    """Whether it may be the results of an epoch."""
    train = epoch.get("train")
    return isinstance(train, dict) and isinstance(train.get("loss"), float)


def _wrong(p: dict[str, Any], step: int) -> str:
    """The first entry of a trainer.json that no run has written; "" if there is none."""

    def count(value: Any, least: int, most: int) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most

    best = p.get("best", ())
    dicts = {n: isinstance(p.get(n), list) and all(isinstance(e, dict) for e in p[n]) for n in ("epochs", "callbacks")}
    fits = {
        "step": count(p.get("step"), step, step),
        "epoch": count(p.get("epoch"), 1, step + 1),
        "batch": count(p.get("batch"), 0, step),
        "samples": count(p.get("samples"), 0, 1 << 63),
        "total": isinstance(p.get("total"), float),
        **dicts,
        "epochs": dicts["epochs"] and all(_is_result(e) for e in p["epochs"]),
        "best": best is None
        or (isinstance(best, dict) and count(best.get("step"), 0, step) and isinstance(best.get("value"), float)),
    }
    return next((name for name, fine in fits.items() if not fine), "")
