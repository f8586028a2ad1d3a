"""Draws docs/papers/*.svg: figures of the papers whose methods are here, with ours in the same axes.

    python benchmarks/paper_pictures.py [--only gruslys kusumoto feng-huang bershatsky paddle]
    OMP_NUM_THREADS=1 python benchmarks/paper_pictures.py --measure variance      trains what is missing
    OMP_NUM_THREADS=1 python benchmarks/paper_pictures.py --measure kusumoto      plans what is missing

The left half of `gruslys` is computed while it is drawn.  The others are drawn from benchmarks/results/: `feng-huang`
from seed_tables.txt (computed) and paper_measured.jsonl (measured, paper_measured.py), which is also the right half of
`gruslys`; `paddle` from cpu.json (measured), `bershatsky` from approximation.txt and variance_ratio.jsonl (measured),
`kusumoto` from kusumoto_batches.jsonl (computed).  `--measure` writes the last two .jsonl.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("svg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results"
FOLDER = Path(__file__).parents[1] / "docs" / "papers"
OURS, THEIRS, PLAIN, CPU = "#1f6fb5", "#d6610a", "#6c757d", "#2a9d4a"
#: Gruslys' figure: slots of memory, and the longest sequence
SLOTS, LENGTH = (5, 10, 20, 40, 80), 1000
#: slots that the internals of a step take
INTERNAL = 5
#: the paper's GPU has 12 GB; batches are multiples of those in its table
LIMIT, MULTIPLES = "12GB", (1, 2, 3, 4)
#: permissions whose variance is followed over training; every how many steps, and for how many seeds
KINDS, EVERY, SEEDS = ("sketch:0.2", "sketch:0.2:dct", "sketch:0.2:rademacher"), 20, 2


def gruslys() -> Figure:
    """Forward steps for each step of a sequence, against its length, for several memories; an LSTM, measured."""
    from recompute.passes.planners.published.gruslys_tables import step_tables

    figure, axes = _axes(2)
    tables = {"hidden": step_tables(LENGTH, SLOTS[-1]), "mixed": step_tables(LENGTH, SLOTS[-1], 1, INTERNAL)}
    lengths = np.arange(1, LENGTH + 1)
    for i, slots in enumerate(SLOTS):
        colour = plt.get_cmap("viridis")(i / len(SLOTS))
        for name, style in (("hidden", "-"), ("mixed", "--")):
            cost = tables[name].steps[slots - 1, 1:] / lengths
            label = f"{slots} slots" if name == "hidden" else None
            axes[0].plot(lengths, cost, style, color=colour, label=label, linewidth=1.4)
    axes[0].plot([], [], "--", color=PLAIN, label=f"with internals ({INTERNAL} slots)")
    axes[0].set(xscale="log", ylim=(0, 10), xlabel="length of the sequence", ylabel="forward steps for each step")
    axes[0].set_title("Backpropagation through time in a given memory\n(Gruslys et al. 2016), computed", fontsize=9)
    axes[0].legend(fontsize=8)
    rows = [r for r in _lines("paper_measured.jsonl") if r["table"] == "gruslys"]
    x = [r["length"] for r in rows]
    for key, label, colour in (("plain_seconds", "plain", PLAIN), ("seconds", "in 5 % of the activations", OURS)):
        axes[1].plot(x, [1e3 * r[key] for r in rows], "o-", color=colour, label=label)
    for r in rows:
        axes[1].annotate(
            f"{1 + r['more']:.2f} x",
            (r["length"], 1e3 * r["seconds"]),
            (-4, 6),
            textcoords="offset points",
            ha="right",
            fontsize=8,
        )
    same = "the same bits" if all(r["bits"] for r in rows) else "bits differ"
    axes[1].set(xlim=(0, None), ylim=(0, None), xlabel="length of the sequence", ylabel="time of a step, ms")
    axes[1].set_title(f"An LSTM of 64 units, 64 samples, measured on 2 cores;\nlosses and weights: {same}", fontsize=9)
    axes[1].legend(fontsize=8)
    return figure


def kusumoto() -> Figure:
    """Time of a sample against the batch, within one limit of memory."""
    rows = _lines("kusumoto_batches.jsonl")
    figure, axes = _axes(1)
    for i, network in enumerate(dict.fromkeys(r["network"] for r in rows)):
        able = [r for r in rows if r["network"] == network and r.get("seconds")]
        least = min(r["seconds"] / r["batch"] for r in able)
        colour = plt.get_cmap("tab10")(i)
        x, y = [r["batch"] / r["paper"] for r in able], [r["seconds"] / r["batch"] / least for r in able]
        axes[0].plot(x, y, "-", color=colour, linewidth=1.4, label=f"{network} (1 is batch {able[0]['paper']})")
        for r, a, b in zip(able, x, y, strict=True):
            axes[0].plot(a, b, "o", color=colour if r["recomputed"] else "white", markeredgecolor=colour, markersize=5)
    axes[0].set(xlabel="batch, as a multiple of the paper's", ylabel="time for each sample, over the least")
    axes[0].set_title(f"Batches within {LIMIT} (Kusumoto et al. 2019), computed; filled: with recomputation")
    axes[0].legend(fontsize=8)
    return figure


def feng_huang() -> Figure:
    """Peaks and extra times of 18 networks."""
    rows = list(feng_huang_rows())
    figure, axes = _axes(2, height=6.2)
    y = np.arange(len(rows))[::-1]
    for axis, (theirs, ours) in zip(axes, (("their_share", "our_share"), ("their_time", "our_time")), strict=True):
        first, second = ([100 * r[key] for r in rows] for key in (theirs, ours))
        axis.hlines(y, first, second, color=PLAIN, linewidth=0.8)
        axis.plot(first, y, "s", color=THEIRS, label="published, measured (RTX 2080 Ti)", markersize=5)
        axis.plot(second, y, "o", color=OURS, label="ours, computed (its data sheet)", markersize=5)
        axis.set_yticks(y, [f"{r['network']}, {r['batch']}" for r in rows], fontsize=8)
        axis.set_xlim(left=0)
    measured = {r["network"]: 100 * r["more"] for r in _lines("paper_measured.jsonl") if "more" in r and "network" in r}
    points = [(measured[r["network"]], at) for r, at in zip(rows, y, strict=True) if r["network"] in measured]
    axes[1].plot(
        *zip(*points, strict=True), "D", color=CPU, label="ours, measured at the published peak (2 cores)", markersize=4
    )
    axes[1].axvline(0, color=PLAIN, linewidth=0.8)
    axes[1].set_xlim(left=min(0, *(x - 3 for x, _ in points)))
    axes[1].legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    axes[0].set(xlabel="peak, % of the plain step's")
    axes[1].set(xlabel="extra time, %", yticklabels=[])
    axes[0].set_title("18 networks and batches of Feng & Huang (2021)")
    axes[0].legend(fontsize=8, loc="lower right")
    return figure


def bershatsky() -> Figure:
    """Accuracy by the rate of a sketch, and how the variance that it adds changes while a network trains."""
    figure, axes = _axes(2)
    for i, (task, points) in enumerate(_accuracies().items()):
        x, mean, deviation = np.array(points).T
        axes[0].errorbar(x, mean, deviation, fmt="o-", capsize=3, color=(OURS, CPU, THEIRS)[i], label=task)
    axes[0].set(xlabel="rate: rows that are kept (1: exact)", ylabel="accuracy, %: mean and deviation of 5 seeds")
    axes[0].set_title("Randomized weight gradients (Bershatsky et al. 2022), measured", fontsize=9)
    axes[0].legend()
    rows = _lines("variance_ratio.jsonl")
    for i, kind in enumerate(KINDS):
        points = [r for r in rows if r["permitted"] == kind]
        steps = sorted({r["step"] for r in points})
        ratios = [[r["ratio"] for r in points if r["step"] == s] for s in steps]
        low, median, high = np.percentile(ratios, (10, 50, 90), axis=1)
        colour = plt.get_cmap("viridis")(i / 3)
        axes[1].plot(steps, median, color=colour, label=kind.partition(":0.2:")[2] or "rows (the default)")
        axes[1].fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)
    axes[1].set(ylim=(0, None), xlabel="step", ylabel="variance of the sketch / of the batch")
    axes[1].set_title("digits, rate 0.2: median and 10 to 90 % of the layers, 2 seeds", fontsize=9)
    axes[1].legend(fontsize=8)
    return figure


def paddle() -> Figure:
    """Memory, speed and result with and without recomputation, as Paddle's examples are tabled."""
    figures = json.loads((RESULTS / "cpu.json").read_text())
    rows: dict[str, dict[str, Any]] = {}
    for row in figures["rows"]:
        rows.setdefault(row["network"], {})[row["variant"]] = row
    names = [n for n, row in rows.items() if {"ours", "recompute"} <= row.keys()]
    same = all(rows[n]["ours"]["losses"] == rows[n]["recompute"]["losses"] for n in names)
    figure, axes = _axes(2)
    x = np.arange(len(names))
    for axis, key in zip(axes, ("peak_bytes", "ms"), strict=True):
        for i, (variant, colour) in enumerate((("ours", PLAIN), ("recompute", OURS))):
            values = [rows[n][variant][key] / (2**20 if key == "peak_bytes" else 1) for n in names]
            label = ("plain", "recomputed")[i]
            bars = axis.bar(x + (i - 0.5) * 0.4, values, 0.4, color=colour, label=label)
            axis.bar_label(bars, fmt="{:,.0f}", fontsize=6, rotation=90, padding=2)
        axis.set_xticks(x, names, rotation=35, fontsize=8)
        axis.margins(y=0.18)
    axes[0].set(ylabel="peak of a step, MiB")
    axes[1].set(ylabel="time of a step, ms")
    axes[0].legend(fontsize=8)
    result = "losses of both: the same bits" if same else "losses differ"
    figure.suptitle(f"With and without recomputation (as Paddle's examples), measured on 2 cores; {result}", fontsize=9)
    return figure


def _axes(count: int, height: float = 4.2) -> tuple[Figure, list[Axes]]:
    figure, axes = plt.subplots(1, count, figsize=(9.5 if count > 1 else 7.5, height), layout="constrained")
    every = list(np.atleast_1d(axes))
    for axis in every:
        axis.grid(alpha=0.25)
        axis.set_axisbelow(True)
    return figure, every


def _lines(name: str) -> list[dict[str, Any]]:
    path = RESULTS / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def feng_huang_rows() -> Iterator[dict[str, Any]]:
    """Rows of seed_tables.txt: network, batch, regular, best, time, plain, default, ours, time, ..."""
    table = (RESULTS / "seed_tables.txt").read_text().partition("\nfeng-huang\n")[2].partition("\n\n")[0]
    for line in table.splitlines()[1:]:
        network, batch, regular, best, more, plain, _, ours, time, *_ = line.split()
        yield {
            "network": network, "batch": int(batch), "their_share": float(best) / float(regular),
            "our_share": float(ours) / float(plain), "their_time": float(more.rstrip("%")) / 100,
            "our_time": float(time.rstrip("%")) / 100,
        }  # fmt: skip


def _accuracies() -> dict[str, list[tuple[float, float, float]]]:
    """Task → rate, mean accuracy and standard deviation in percent, as approximation.txt has them."""
    accuracies: dict[str, list[tuple[float, float, float]]] = {}
    for part in re.split(r"\n(?=(?:digits|tumours|text): )", (RESULTS / "approximation.txt").read_text())[1:]:
        task = part.partition(":")[0]
        for rate, pattern in ((1.0, "exact"), (0.5, "sketch:0.5"), (0.2, "sketch:0.2"), (0.1, "sketch:0.1")):
            match = re.search(rf"^{re.escape(pattern)} .* (\d+\.\d+) ± +(\d+\.\d+) %", part, re.MULTILINE)
            assert match is not None, (task, pattern)
            accuracies.setdefault(task, []).append((rate, float(match[1]), float(match[2])))
    return accuracies


def measure_variance() -> None:
    """Trains the digits of approximation.py with each kind, and writes the variance of each layer's sketch."""
    from approximation_tasks import Digits

    import recompute as rc
    from recompute.analysis.gradient_error import sketch_variances

    path = RESULTS / "variance_ratio.jsonl"
    rows = _lines(path.name)
    task = Digits(400, 64)
    for permitted, seed in itertools.product(KINDS, range(SEEDS)):
        key = {"permitted": permitted, "seed": seed}
        if any(key.items() <= row.items() for row in rows):
            continue
        program = rc.load(task.model(seed), batch=task.batch)
        loss = task.loss(program)
        rc.RecomputeOptimizer(task.optimizer()).set_approximations(permitted).minimize(loss)
        executor = rc.Executor()
        for step, feed in enumerate(task.batches(seed)):
            if step % EVERY:
                executor.run(program, feed, [loss])
                continue
            for layer in sketch_variances(program, feed, executor):  # this is a step, too
                rows.append({**key, "step": step, "gradient": layer["gradient"], "ratio": round(layer["ratio"], 4)})
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(*key.values(), flush=True)


def measure_kusumoto() -> None:
    """Plans the paper's networks within one limit, at more and more samples, for its GPU by its data sheet."""
    from seed_rows import ROWS

    import recompute as rc
    from recompute.compiling.compiler import compile_step
    from recompute.compiling.steps import attach_loss

    path = RESULTS / "kusumoto_batches.jsonl"
    ready = {(r["network"], r["batch"]) for r in _lines(path.name)}
    for row in (r for r in ROWS if r.table == "kusumoto"):
        for multiple in MULTIPLES:
            batch = int(row.batch * multiple)
            if (row.network, batch) in ready:
                continue
            program = rc.load(rc.models.build(row.network, weights=False, **row.options), batch=batch)
            loss, _ = attach_loss(program, None)
            line: dict[str, Any] = {"network": row.network, "paper": row.batch, "batch": batch}
            try:
                target = rc.Target("cuda:0", cost=row.device)
                step = compile_step(program, loss, rc.Momentum(0.01), target=target, budget=LIMIT, slicing=False)
                line |= {"seconds": step.figures.estimated_step_seconds, "peak": step.figures.peak_bytes}
                line |= {"recomputed": step.figures.recomputed_operators}
            except rc.BudgetError as e:
                line["refused"] = str(e)
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(line, flush=True)
            if "refused" in line:
                break


PICTURES: dict[str, Callable[[], Figure]] = {
    "gruslys": gruslys, "kusumoto": kusumoto, "feng-huang": feng_huang, "bershatsky": bershatsky, "paddle": paddle,
}  # fmt: skip


def main() -> None:
    """Measures, or draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PICTURES, default=list(PICTURES))
    parser.add_argument("--measure", choices=("variance", "kusumoto"))
    options = parser.parse_args()
    if options.measure:
        (measure_variance if options.measure == "variance" else measure_kusumoto)()
        return
    mpl.rcParams.update({"svg.hashsalt": "papers", "font.size": 9, "svg.fonttype": "path"})
    FOLDER.mkdir(exist_ok=True)
    for name in options.only:
        figure = PICTURES[name]()
        figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    main()
