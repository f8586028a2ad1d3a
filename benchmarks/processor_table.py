"""Which of our kernels are faster than oneDNN's on this processor, by classes of operators.

    python benchmarks/processor_table.py [--networks resnet18:8,bert-base:4:layers=1] [--write]

Every convolution, product and head's loss of the networks' training steps runs in turns by both providers; a class's
ratio is the geometric mean of its members'.  --write keeps the ratios for processors of
this family in runtime/cpu/processors/FAMILY.json, from where `choose-kernels` takes them: run the tests, and commit the
file.  Needs a quiet machine; five minutes.
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

NETWORKS = (
    "resnet18:8,resnet50:8,vgg16:2,mobilenet_v2:8,densenet121:4,unet:1,"
    "bert-mini:8,gpt2-mini:8,lstm:32,bert-base:4:layers=1,gpt2-small:2:layers=1,vit-base:4:layers=1"
)


def operators(networks: str) -> list[Any]:
    """Those of training steps that both sides have kernels for, one of each kind."""
    found: dict[Any, Any] = {}
    for text in networks.split(","):
        name, batch, *options = text.split(":")
        given = {k: int(v) for k, _, v in (o.partition("=") for o in options)}
        step, _ = zoo_step(name, int(batch), recompute=False, optimizer=rc.SGD(0.1), weights=False, **given)
        for op in step.program.block.operators:
            if processors.class_of(op)[0]:
                found.setdefault((op.op, *(v and v.type for v in (*op.inputs, *op.outputs))), op)
    return list(found.values())


def drawn(v: Any) -> Any:
    """Contents of an operand; labels are the first class."""
    if v is None or v.dtype != "f32":
        return v and np.zeros(v.shape, v.type.numpy)
    return np.random.default_rng(0).standard_normal(v.shape, np.float32)


def race(op: Any, sides: tuple[str, str], turns: int) -> dict[str, float]:
    """Least seconds of each provider; one that refuses the operator is not there."""
    ins, outs = [drawn(v) for v in op.inputs], [drawn(v) for v in op.outputs]
    tables: dict[str, tuple[Table, Any]] = {}
    for name in sides:
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
    p.add_argument("--networks", default=NETWORKS, help=f"network:batch:option=number, ... (default: {NETWORKS})")
    p.add_argument("--turns", type=int, default=7)
    p.add_argument("--write", action="store_true", help="keep the ratios for this family")
    p.add_argument("--verbose", action="store_true", help="a line for every convolution")
    args = p.parse_args()
    register_all()
    if missing := [n for n in ("convolution", "blas", "numba", "onednn") if n not in PROVIDERS]:
        p.error(f"no provider {', '.join(missing)} here: install the extras 'cpu' and 'onednn'")
    ratios: defaultdict[str, list[float]] = defaultdict(list)
    seconds: Counter[str] = Counter()
    todo = operators(args.networks)
    for done, op in enumerate(todo):
        if sys.stderr.isatty():
            print(f"\r{done} of {len(todo)}", end="", file=sys.stderr, flush=True)
        name, ours = processors.class_of(op)
        times = race(op, (ours, "onednn"), args.turns)
        if len(times) == 2:
            ratios[name].append(times[ours] / times["onednn"])
            seconds[name] += times["onednn"]
            if args.verbose:
                both = " ".join(f"{s} {1e3 * t:8.3f} ms" for s, t in times.items())
                shapes = " ".join(str(v.shape) for v in (*op.inputs, *op.outputs) if v is not None)
                print(f"{name:<34} {both}  {shapes}")
    means = {name: round(statistics.geometric_mean(found), 3) for name, found in sorted(ratios.items())}
    facts = machine()
    print(f"{headline(facts)}: {processors.family()}")
    for name, mean in means.items():
        chosen = "ours" if mean < processors.FASTER else "oneDNN's"
        print(f"{name:<34} {mean:6.3f}  {chosen:<9} of {len(ratios[name]):3}, {1e3 * seconds[name]:9.1f} ms")
    if args.write:
        library = dnnl.load()
        version = library.version if isinstance(library, dnnl.Library) else ""
        about = f"{headline(facts)}, oneDNN {version}, {native.threads()} threads, load {os.getloadavg()[0]:.2f}"
        path = processors.folder() / f"{processors.family()}.json"
        path.write_text(json.dumps({"about": about, "ratios": means}, indent=2) + "\n", encoding="utf-8")
        print(f"written: {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
