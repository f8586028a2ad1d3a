"""Makes docs/planner.html: ten networks, budgets of each, and what a plan keeps, recomputes and costs.

    python benchmarks/planner_page.py ROWS.jsonl [--only NAME ...] [--shares 60 30 ...]      plans that ROWS.jsonl lacks
    python benchmarks/planner_page.py ROWS.jsonl --page docs/planner.html

Nothing is run and no device is needed: steps are planned for an H100 by its data sheet (`rc.Target`), at shares of the
activations.  The page loads nothing; its numbers are in it.  Low shares take minutes each: the page in docs/ has all of
them for four networks (`llama-block`, `vit-base`, `bert-base`, `gpt2-small`), 4 to 6 for the others.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import recompute as rc
from recompute.compiling.compiler import CompiledStep, compile_step
from recompute.compiling.steps import attach_loss
from recompute.cost import kept_values
from recompute.language.ir import Role
from recompute.report.timeline import COLOURS, ROLES, columns, timeline

#: network → batch, options of the zoo
NETWORKS: dict[str, tuple[int, dict[str, Any]]] = {
    "resnet50": (64, {}),
    "mobilenet_v2": (96, {}),
    "densenet121": (64, {}),
    "vgg16": (64, {}),
    "unet": (4, {}),
    "vit-base": (64, {}),
    "bert-base": (32, {}),
    "gpt2-small": (8, {}),
    "llama-block": (8, {}),
    "lstm": (64, {"seq": 200, "features": 128, "hidden": 512}),
}
#: shares of the activations that are asked for, in percent
SHARES = (100, 90, 80, 70, 60, 50, 40, 30, 20, 15, 10)
TARGET = rc.Target("cuda:0", cost="h100-80")
COLUMNS = 240
KEPT = 12


def point(step: CompiledStep, share: int) -> dict[str, Any]:
    """A plan: figures, what is kept and recomputed most, and bytes by role over the step."""
    block, f, plan = step.program.block, step.figures, step.planned
    line = timeline(block, step.cost)
    kept = sorted(kept_values(block).items(), key=lambda x: -x[1])
    again: dict[str, float] = {}
    for o, seconds in zip(line.operators, line.seconds, strict=True):
        if o.role is Role.RECOMPUTE:
            again[o.op.name] = again.get(o.op.name, 0.0) + seconds
    return {
        "share": share,
        "peak": f.peak_bytes,
        "persistent": f.persistent_bytes,
        "seconds": f.estimated_step_seconds,
        "bound": plan.bound if plan is not None else None,
        "operators": f.operators,
        "recomputed": f.recomputed_operators,
        "slices": list(plan.slices) if plan is not None else [],
        "kept": kept[:KEPT],
        "values": len(kept),
        "kept_bytes": sum(n for _, n in kept),
        "again": sorted(again.items(), key=lambda x: -x[1])[:KEPT],
        "roles": _curves(line.totals()),
    }


def _curves(totals: dict[str, list[int]]) -> dict[str, list[list[int]]]:
    """Role → runs (columns, KiB), each column as at its operator of the highest sum; roles of no bytes are left out."""
    picked = [i for _, i in columns([sum(at) for at in zip(*totals.values(), strict=True)], COLUMNS)]
    curves = {}
    for role, levels in totals.items():
        column = [levels[i] >> 10 for i in picked]
        if any(column):
            curves[role] = [[len(list(same)), level] for level, same in itertools.groupby(column)]
    return curves


def planned(name: str, batch: int, options: dict[str, Any], share: int) -> dict[str, Any]:
    """The plan of a network within a share of its activations; `refused`: why there is none."""
    program = rc.load(rc.models.build(name, weights=False, **options), batch=batch)
    loss, _ = attach_loss(program, None)
    optimizer = rc.MixedPrecision(rc.AdamW(1e-4), "bf16")
    budget = None if share == 100 else f"{share}% of activations"
    try:
        return point(compile_step(program, loss, optimizer, target=TARGET, budget=budget), share)
    except rc.BudgetError as e:
        return {"share": share, "refused": str(e)}


def page(rows: list[dict[str, Any]]) -> str:
    """The page with its data."""
    networks: dict[str, Any] = {}
    for row in sorted(rows, key=lambda r: (list(NETWORKS).index(r["network"]), -r["share"])):
        entry = networks.setdefault(row["network"], {"batch": row["batch"], "points": []})
        entry["points"].append({k: v for k, v in row.items() if k not in ("network", "batch")})
    return filled({"networks": networks, "roles": ROLES, "colours": COLOURS, "columns": COLUMNS})


def filled(data: dict[str, Any]) -> str:
    """The page with this data, which it holds as JSON."""
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    template = Path(__file__).with_name("planner_page.html").read_text(encoding="utf-8")
    return template.replace("__DATA__", text)


def main() -> None:
    """Plans, or writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--only", nargs="*", default=list(NETWORKS))
    parser.add_argument("--shares", nargs="*", type=int, default=SHARES)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.rows.read_text().splitlines()] if options.rows.exists() else []
    if options.page:
        options.page.write_text(page(rows), encoding="utf-8")
        return
    ready = {(row["network"], row["share"]) for row in rows}
    for name in options.only:
        batch, more = NETWORKS[name]
        for share in options.shares:
            if (name, share) not in ready:
                row = {"network": name, "batch": batch, **planned(name, batch, more, share)}
                with options.rows.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(
                    name, share, row.get("refused", f"{row.get('peak', 0):,} bytes, {row.get('seconds')} s"), flush=True
                )
                if "refused" in row:
                    break


if __name__ == "__main__":
    main()
