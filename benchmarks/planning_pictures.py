"""Draws docs/planning/*.svg, fills in the figures of docs/planning.md, and runs that document's examples.

    OPENBLAS_NUM_THREADS=1 python benchmarks/planning_pictures.py [--examples]

One small network, every method, the same budget.  A picture has a row for each forward node and a column for each
node that runs; below are the bytes alive.  Nothing is timed, so that the same code gives the same files.  It takes a
few minutes; `--examples` only runs the document's examples, and fails where one prints something else than it says.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from recompute.passes.planners import Outcome, RematerialisationProblem, plan, profile, sequence_of, simulate
from recompute.passes.planners.core.bound import lower_bound
from recompute.passes.planners.core.simulate import last_uses
from recompute.passes.planners.core.synthetic import residual_chain
from recompute.passes.planners.published.chen import segment_plan

BLOCKS = 8
SHARES = (0.7, 0.5, 0.35)
PICTURED = 0.5
#: width of pictures, in nodes that run; larger ones are squeezed
COLUMNS = 68
#: the last nodes of the segments of "user checkpoints": every other block's output
CHECKPOINTS = ("y1", "y3", "y5")
#: figure → what its panels show; solvers get more time than they need, so that the clock decides nothing
FIGURES: dict[str, tuple[str, ...]] = {
    "plain": ("plain",),
    "checkpoints": ("checkpoints",),
    "chen": ("chen", "chen-sweep", "chen-recursive"),
    "gruslys": ("gruslys-hidden", "gruslys-internal", "gruslys"),
    "kusumoto": ("kusumoto", "kusumoto-memory"),
    "feng-huang": ("feng-huang",),
    "rotor": ("rotor",),
    "min-cut": ("min-cut",),
    "checkmate": ("checkmate", "checkmate-lp"),
    "moccasin": ("moccasin",),
    "cut-sweep": ("cut-sweep",),
    "auto": ("auto",),
}
TABLED = (
    *(name for names in FIGURES.values() for name in names if name != "auto"),
    "kusumoto-exact",
    "kusumoto-exact-memory",
    "auto",
    "optimal",
)
OPTIONS: dict[str, dict[str, Any]] = {
    "checkmate": {"time_limit": 900.0},
    "checkmate-lp": {"time_limit": 900.0},
    "moccasin": {"time_limit": 900.0},
}
FIRST, AGAIN, BACKWARD, BUDGET = "#2166ac", "#d6610a", "#555555", "#c00000"
ALIVE, ALIVE_AGAIN, BELOW, ABOVE = "#bfd7ea", "#fbd9b5", "#cfd3d8", "#f0a8a0"


@dataclass(frozen=True)
class Result:
    """A method's plan for one budget: `bound` is the one that it proves itself."""

    name: str
    sequence: Sequence[int]
    outcome: Outcome
    bound: float | None


@dataclass
class Network:
    """The small network, and what methods make of it; each is asked once a budget."""

    problem: RematerialisationProblem
    results: dict[tuple[str, float], Result] = field(default_factory=dict)

    @cached_property
    def plain(self) -> Outcome:
        """The step without recomputation."""
        return simulate(self.problem, range(len(self.problem)))

    def budget(self, share: float) -> int:
        """Bytes of a share of the plain peak."""
        return int(self.plain.peak * share)

    def result(self, name: str, share: float) -> Result:
        """What a method makes of a budget; "plain" and "checkpoints" know none."""
        if (name, share) not in self.results:
            self.results[name, share] = self.ask(name, share)
        return self.results[name, share]

    def ask(self, name: str, share: float) -> Result:
        """See `result`."""
        problem = self.problem
        if name == "plain":
            return Result(name, range(len(problem)), self.plain, None)
        if name == "checkpoints":
            cuts = [problem.producer[problem.values.index(v)] for v in CHECKPOINTS]
            sequence = sequence_of(problem, segment_plan(problem, cuts))
            return Result(name, sequence, simulate(problem, sequence), None)
        found = plan(problem, budget=self.budget(share), strategy=name, **OPTIONS.get(name, {}))
        return Result(name, sequence_of(problem, found.plan), found.outcome, found.bound)

    def peak(self, result: Result) -> float:
        """Peak as a share of the plain one."""
        return result.outcome.peak / self.plain.peak

    def cost(self, cost: float) -> float:
        """Cost as a multiple of the plain one."""
        return cost / self.plain.cost


# -- pictures ----------------------------------------------------------------------------------------------------------


def draw(network: Network, names: Sequence[str], columns: int, path: Path) -> None:
    """A figure with a panel for each method, side by side, all `columns` wide."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    settings: dict[Any, Any] = {"svg.hashsalt": "planning", "svg.fonttype": "none", "font.size": 8}
    settings |= {"font.family": "DejaVu Sans", "axes.linewidth": 0.6}
    with rc_context(settings):
        width = {1: 5.4, 2: 8.3}.get(len(names), 8.6)
        figure = Figure(figsize=(width, 3.7), layout="constrained", facecolor="white")
        FigureCanvasSVG(figure)
        grid = figure.subplots(2, len(names), sharex=True, sharey="row", squeeze=False, height_ratios=(2.6, 1.0))
        for column, name in enumerate(names):
            result = network.result(name, PICTURED)
            _nodes(grid[0, column], network, result)
            _memory(grid[1, column], network, result)
            grid[1, column].set_xlim(0, columns)
        grid[0, 0].set_ylabel("forward pass, by block")
        grid[1, 0].set_ylabel("bytes alive")
        marks = {
            "runs": FIRST,
            "alive": ALIVE,
            "recomputed": AGAIN,
            "alive, recomputed": ALIVE_AGAIN,
            "its gradient": BACKWARD,
        }
        figure.legend(handles=[_patch(c, t) for t, c in marks.items()], loc="outside lower center", ncols=5,
                      frameon=False, fontsize=7.5, handlelength=1.2, columnspacing=1.4)  # fmt: skip
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    path.write_text(_small(text.getvalue()))


def _small(svg: str) -> str:
    """The picture without metadata and with shorter numbers, a path on one line."""
    svg = re.sub(r"<!DOCTYPE.*?>\n|\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)

    def shorter(m: re.Match[str]) -> str:
        numbers = re.sub(r"\d+\.\d{2,}", lambda n: f"{float(n[0]):.1f}".removesuffix(".0"), m[2])
        numbers = re.sub(r"L (\S+) (\S+) L \1 (\S+) L (\S+) \3 z", r"H \1 V \3 H \4 z", " ".join(numbers.split()))
        return f'{m[1]}="{numbers}"'

    svg = re.sub(r'\b(d|x|y|transform)="([^"]*)"', shorter, svg)
    return re.sub(r"\s*\n\s*", "\n", svg)


def _patch(colour: str, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(facecolor=colour, label=label)


def _nodes(axes: Any, network: Network, result: Result) -> None:
    """A row a forward node, a column a node that runs: what runs, and what it wrote as long as it is alive."""
    problem, sequence = network.problem, result.sequence
    rows = {i: k for k, i in enumerate(problem.forward)}
    last, made = last_uses(problem, sequence)
    seen: set[int] = set()
    bars: dict[str, list[tuple[int, int, int]]] = {c: [] for c in (ALIVE, ALIVE_AGAIN, FIRST, AGAIN, BACKWARD)}
    occurrence = len(problem.inputs)
    for j, i in enumerate(sequence):
        for _ in problem.nodes[i].writes:
            if i in rows:
                light = ALIVE_AGAIN if i in seen else ALIVE
                bars[light].append((rows[i], j, last[occurrence] + 1 - j))
            occurrence += 1
        if i in rows:
            bars[AGAIN if i in seen else FIRST].append((rows[i], j, 1))
        else:
            bars[BACKWARD].append((_row_of_gradient(problem, i), j, 1))
        seen.add(i)
    assert occurrence == len(made)
    for colour, cells in bars.items():
        axes.add_patch(_cells(cells, colour))
    for k in range(1, BLOCKS):
        axes.axhline(3 * k, color="0.88", linewidth=0.5, zorder=0)
    axes.set_ylim(3 * BLOCKS, 0)
    axes.set_yticks([3 * k + 1.5 for k in range(BLOCKS)], [str(k) for k in range(BLOCKS)])
    axes.tick_params(length=0, labelsize=7)
    over = "" if result.outcome.peak <= network.budget(PICTURED) or result.name == "plain" else ", over the budget"
    figures = f"peak {network.peak(result):.1%}{over}, cost {network.cost(result.outcome.cost):.3f} ×"
    title = "user checkpoints" if result.name == "checkpoints" else result.name
    axes.set_title(f"{title}\n{figures}", fontsize=8, loc="left")
    _bare(axes)


def _cells(cells: Sequence[tuple[int, int, int]], colour: str) -> Any:
    """Rectangles (row, column, columns) as one path, which keeps files small."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    low, high = 0.06, 0.94
    corners: list[tuple[float, float]] = []
    for row, j, n in cells:
        a, b = row + low, row + high
        corners += [(j, a), (j + n, a), (j + n, b), (j, b), (j, a)]
    codes = [Outline.MOVETO, Outline.LINETO, Outline.LINETO, Outline.LINETO, Outline.CLOSEPOLY] * len(cells)
    return PathPatch(Outline(corners or [(0.0, 0.0)], codes or None), facecolor=colour, linewidth=0)


def _row_of_gradient(problem: RematerialisationProblem, i: int) -> int:
    """Backward nodes stand in their forward node's row, the loss in the last one's."""
    name = problem.nodes[i].name
    for k, prefix in enumerate(("dx", "drelu", "dg")):
        if name.startswith(prefix):
            return 3 * int(name[len(prefix) :]) + k
    return 3 * BLOCKS - 1


def _memory(axes: Any, network: Network, result: Result) -> None:
    """Bytes alive as a share of the plain peak, the budget as a line."""
    live = [b / network.plain.peak * 100 for b in profile(network.problem, result.sequence)]
    x = [*range(len(live)), len(live)]
    y = [*live, live[-1]]
    limit = network.budget(PICTURED) / network.plain.peak * 100
    axes.fill_between(x, [min(b, limit) for b in y], step="post", color=BELOW, linewidth=0)
    if max(live) > limit:
        axes.fill_between(x, limit, [max(b, limit) for b in y], step="post", color=ABOVE, linewidth=0)
    axes.step(x, y, where="post", color="0.25", linewidth=0.9)
    axes.axhline(limit, color=BUDGET, linewidth=0.9, linestyle=(0, (4, 2)))
    axes.set_ylim(0, 106)
    axes.set_yticks([0, 50, 100], ["0", "50 %", "100 %"])
    axes.set_xlabel("nodes that run, in order", fontsize=7.5)
    axes.tick_params(length=2, labelsize=7, width=0.5)
    _bare(axes)


def _bare(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


# -- the document ------------------------------------------------------------------------------------------------------


def captions(network: Network) -> Iterator[tuple[str, str]]:
    """(name of the part, Markdown) for each figure."""
    for figure, names in FIGURES.items():
        said = []
        for name in names:
            r = network.result(name, PICTURED)
            over = "" if r.outcome.peak <= network.budget(PICTURED) or name == "plain" else " (over the budget)"
            said.append(f"`{name}`: {network.peak(r):.1%} of the plain peak{over} at {_times(network, r.outcome.cost)}")
        text = "; ".join(said) if figure not in ("plain", "checkpoints") else said[0].split(": ", 1)[1]
        yield figure, f"![{figure}](planning/{figure}.svg)\n\n*{text[0].upper() + text[1:]}.*"


def _times(network: Network, cost: float) -> str:
    return f"{network.cost(cost):.3f} ×"


def table(network: Network) -> str:
    """All methods at all budgets."""
    head = "".join(f" {s:.0%}: peak | cost | bound |" for s in SHARES)
    lines = [f"| method |{head}", "|---|" + "--:|--:|--:|" * len(SHARES)]
    for name in TABLED:
        cells = []
        for share in SHARES:
            r = network.result(name, share)
            over = " ✗" if r.outcome.peak > network.budget(share) else ""
            bound = "" if r.bound is None else f"{network.cost(r.bound):.4f}"
            cells += [f"{network.peak(r):.1%}{over}", f"{network.cost(r.outcome.cost):.4f}", bound]
        label = {"checkpoints": "user checkpoints", "plain": "plain step"}.get(name, f"`{name}`")
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def proof(network: Network) -> str:
    """What the certificate says of the best plans, costs of the network being whole numbers of half units."""
    least, best = [], []
    for share in SHARES:
        bound = lower_bound(network.problem, network.budget(share))
        least.append(f"{network.cost(bound):.4f}")
        steps = -int(-2 * (bound - 1e-6) // 1)  # costs of plans come in halves
        best.append(network.cost(steps / 2))
    found = [network.cost(network.result("auto", share).outcome.cost) for share in SHARES]
    same = all(abs(a - b) < 1e-9 for a, b in zip(found, best, strict=True))
    unit = network.cost(0.5)
    return (
        f"The certificate at {', '.join(f'{s:.0%}' for s in SHARES)}: no plan costs less than {', '.join(least)}. "
        f"Costs here come in steps of {unit:.4f}, so that none costs less than {', '.join(f'{b:.4f}' for b in best)}: "
        + ("`auto` is optimal at all three." if same else "`auto` is not proven optimal at all three.")
    )


def filled(text: str, part: str, content: str) -> str:
    """The document with new content between `<!-- part -->` and `<!-- end -->`."""
    pattern = re.compile(rf"(<!-- {re.escape(part)} -->\n).*?(<!-- end -->)", re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"the document has no '<!-- {part} -->'")
    return pattern.sub(lambda m: m[1] + content + "\n" + m[2], text)


def run_examples(text: str) -> int:
    """Runs the document's Python in order, in a folder with its other named blocks as files; returns how many ran.

    A block of kind `text` right behind one of Python is what that must print.
    """
    blocks = re.findall(r"```(\w+)(?: (\S+))?\n(.*?)```(?=\n)", text, re.DOTALL)
    space: dict[str, Any] = {"__name__": "planning_examples"}
    ran, here = 0, os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for k, (kind, name, body) in enumerate(blocks):
            if name:
                Path(name).write_text(body)
            if kind != "python":
                continue
            said = io.StringIO()
            with contextlib.redirect_stdout(said):
                exec(compile(body, f"example {ran + 1}", "exec"), space)
            ran += 1
            wanted = blocks[k + 1][2] if k + 1 < len(blocks) and blocks[k + 1][0] == "text" else ""
            if said.getvalue() != wanted:
                os.chdir(here)
                os.chdir(here)
                raise SystemExit(f"this example:\n{body}\nprints\n{said.getvalue()}\nnot\n{wanted}")
        os.chdir(here)
        os.chdir(here)
    return ran


def main() -> None:
    """Pictures, figures, examples."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--docs", type=Path, default=Path(__file__).parent.parent / "docs")
    p.add_argument("--examples", action="store_true", help="only run the document's examples")
    args = p.parse_args()
    document = args.docs / "planning.md"
    if not args.examples:
        network = Network(residual_chain(BLOCKS))
        (args.docs / "planning").mkdir(exist_ok=True)
        for name, names in FIGURES.items():
            columns = max([COLUMNS, *(len(network.result(n, PICTURED).sequence) for n in names)])
            draw(network, names, columns, args.docs / "planning" / f"{name}.svg")
        text = document.read_text()
        for figure, caption in captions(network):
            text = filled(text, f"picture: {figure}", caption)
        text = filled(text, "table", f"{table(network)}\n\n{proof(network)}")
        document.write_text(text)
        print(f"drew {len(FIGURES)} figures")
    print(f"ran {run_examples(document.read_text())} examples")


if __name__ == "__main__":
    main()
