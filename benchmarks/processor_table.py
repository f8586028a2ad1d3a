"""Which of our kernels are faster than oneDNN's on this processor, by classes of convolutions.

    python benchmarks/processor_table.py [--networks resnet18:8,mobilenet_v2:8] [--write]

Every convolution of the networks' training steps, and its gradients, run in turns by both providers; a class's ratio is
the geometric mean of its members'.  --write keeps the ratios for processors of
this family in runtime/cpu/processors/FAMILY.json, from where `choose-kernels` takes them: run the tests, and commit the
file.  Needs a quiet machine; four minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import Counter, defaultdict
from typing import Any

import numpy as np
from zoo_steps import headline, machine, zoo_step

import recompute as rc
from recompute.language.kernels import PROVIDERS
from recompute.runtime.cpu import processors, register_all
from recompute.runtime.cpu.device import dnnl, native
from recompute.runtime.cpu.device.native import Table
from recompute.runtime.shared.convolved import Convolved, convolved

NETWORKS = "resnet18:8,resnet50:8,vgg16:2,mobilenet_v2:8,densenet121:4,unet:1"
SIDES = ("convolution", "onednn")


def convolutions(networks: str) -> dict[Convolved, Any]:
    """Those of training steps, each with an operator that computes it."""
    found: dict[Convolved, Any] = {}
    for text in networks.split(","):
        name, _, batch = text.partition(":")
        step, _ = zoo_step(name, int(batch), recompute=False, optimizer=rc.SGD(0.1), weights=False)
        for op in step.program.block.operators:
            if (c := convolved(op)) is not None and c.last:
                found.setdefault(c, op)
    return found


def race(op: Any, turns: int) -> dict[str, float]:
    """Least seconds of each provider; one that refuses the operator is not there."""
    draw = np.random.default_rng(0)
    ins, outs = (
        [None if v is None else draw.standard_normal(v.shape, np.float32) for v in vs] for vs in (op.inputs, op.outputs)
    )
    tables: dict[str, tuple[Table, Any]] = {}
    for name in SIDES:
        provider = PROVIDERS[name]
        if provider.accepts(op):
            scratch = [np.zeros(t.shape, t.numpy) for t in provider.scratch(op)]
            tables[name] = Table(list(provider.bind(op, ins, outs, scratch))), scratch
    found: dict[str, float] = {}
    for turn in range(turns + 1):
        for name, (table, _) in tables.items():
            begin = time.perf_counter()
            table.run()
            seconds = time.perf_counter() - begin
            if turn:
                found[name] = min(seconds, found.get(name, seconds))
    return found


def main() -> int:
    """Measures, prints, writes."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--networks", default=NETWORKS, help=f"network:batch, ... (default: {NETWORKS})")
    p.add_argument("--turns", type=int, default=7)
    p.add_argument("--write", action="store_true", help="keep the ratios for this family")
    p.add_argument("--verbose", action="store_true", help="a line for every convolution")
    args = p.parse_args()
    register_all()
    if missing := [n for n in SIDES if n not in PROVIDERS]:
        p.error(f"no provider {', '.join(missing)} here: install the extras 'cpu' and 'onednn'")
    operators = convolutions(args.networks)
    ratios: defaultdict[str, list[float]] = defaultdict(list)
    seconds: Counter[str] = Counter()
    for done, (c, op) in enumerate(operators.items()):
        if sys.stderr.isatty():
            print(f"\r{done} of {len(operators)}", end="", file=sys.stderr, flush=True)
        times = race(op, args.turns)
        if set(times) == set(SIDES):
            name = processors.class_of(c)
            ratios[name].append(times["convolution"] / times["onednn"])
            seconds[name] += times["onednn"]
            if args.verbose:
                both = " ".join(f"{s} {1e3 * t:8.3f} ms" for s, t in times.items())
                print(f"{name:<34} {c.x} {c.w} {both}")
    means = {name: round(statistics.geometric_mean(found), 3) for name, found in sorted(ratios.items())}
    facts = machine()
    print(f"{headline(facts)}: {processors.family()}")
    for name, mean in means.items():
        ours = "ours" if mean < processors.FASTER else "oneDNN's"
        print(f"{name:<34} {mean:6.3f}  {ours:<9} of {len(ratios[name]):3}, {1e3 * seconds[name]:9.1f} ms")
    if args.write:
        library = dnnl.load()
        version = library.version if isinstance(library, dnnl.Library) else ""
        about = f"{headline(facts)}, oneDNN {version}, {native.threads()} threads, load {os.getloadavg()[0]:.2f}"
        path = processors.folder() / f"{processors.family()}.json"
        path.write_text(json.dumps({"about": about, "convolutions": means}, indent=2) + "\n", encoding="utf-8")
        print(f"written: {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
