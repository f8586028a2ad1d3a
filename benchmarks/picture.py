"""Draws docs/memory.svg: bytes alive over one training step of ResNet-50, plain and recomputed.

    python benchmarks/picture.py [--batch 32] [--output docs/memory.svg]

Nothing is run: the curves are the compiler's own account of the planned program.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import recompute as rc
from recompute.compiling.compiler import CompiledStep, compile_step, resolve_checkpoints
from recompute.passes import live_profile

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 860, 300, 70, 40, 46
COLOURS = {"plain": "#c0504d", "recomputed": "#1f77b4"}


def curve(step: CompiledStep) -> list[tuple[float, int]]:
    """(share of the step's operators, bytes alive) for each operator."""
    persistent = step.figures.persistent_bytes
    points = [bytes_ + persistent for _, bytes_ in live_profile(step.program.block)]
    return [(i / (len(points) - 1), b) for i, b in enumerate(points)]


def draw(curves: dict[str, list[tuple[float, int]]], title: str) -> str:
    """The picture: one line a variant, its peak marked."""
    top = max(b for points in curves.values() for _, b in points) * 1.08
    unit = 2**30

    def place(x: float, b: float) -> tuple[float, float]:
        return LEFT + x * (WIDTH - LEFT - 20), HEIGHT - BOTTOM - b / top * (HEIGHT - BOTTOM - TOP)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{title}</text>',
        f'<text x="{WIDTH // 2}" y="{HEIGHT - 10}" text-anchor="middle">one training step, operator by operator</text>',
    ]
    for i in range(5):
        b = top / 1.08 * i / 4
        x, y = place(0, b)
        parts.append(f'<path d="M{x} {y:.1f} H{WIDTH - 20}" stroke="#ddd"/>')
        parts.append(f'<text x="{x - 6}" y="{y + 4:.1f}" text-anchor="end">{b / unit:.2f} GiB</text>')
    for name, points in curves.items():
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*p) for p in points))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[name]}" stroke-width="1.6"/>')
        peak = max(points, key=lambda p: p[1])
        x, y = place(*peak)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{COLOURS[name]}"/>')
        label = f"{name}: peak {peak[1] / unit:.2f} GiB"
        parts.append(f'<text x="{min(x, WIDTH - 190):.1f}" y="{y - 8:.1f}" fill="{COLOURS[name]}">{label}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    """Compiles both variants and writes the picture."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--output", type=Path, default=Path("docs/memory.svg"))
    args = p.parse_args()
    program = rc.load(rc.models.build("resnet50", batch=args.batch, weights=False))
    loss = rc.losses.cross_entropy(program).name
    blocks = resolve_checkpoints(program, ["layer?.?.out"])
    steps = {
        "plain": compile_step(program, loss, rc.Momentum(learning_rate=0.1)),
        "recomputed": compile_step(program, loss, rc.Momentum(learning_rate=0.1), checkpoints=blocks),
    }
    again = steps["recomputed"].figures.repeated_forward_share
    title = f"ResNet-50, batch {args.batch}: keeping 16 block outputs, recomputing {again:.0%} of the forward pass"
    args.output.write_text(draw({n: curve(s) for n, s in steps.items()}, title))
    print(f"wrote {args.output}: {title}")


if __name__ == "__main__":
    main()
