"""Which of our kernels are faster than oneDNN's on this processor, by classes of operators.

    python benchmarks/processor_table.py [--networks resnet18:8,bert-base:4:layers=1] [--write]

Every convolution and product of the networks' training steps runs in turns by both providers; a class's
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
from recompute.ops.loss.linear_cross_entropy import LinearLoss
from recompute.ops.loss.linear_tiles import Sizes
from recompute.runtime.cpu import processors, register_all
from recompute.runtime.cpu.device import dnnl, native
from recompute.runtime.cpu.device.native import Table
from recompute.runtime.cpu.primitives.plans import library
from recompute.runtime.cpu.providers import blas
from recompute.runtime.cpu.providers.blas import product
from recompute.runtime.cpu.providers.onednn import class_of

NETWORKS = (
    "resnet18:8,resnet50:8,vgg16:2,mobilenet_v2:8,densenet121:4,unet:1,"
    "bert-mini:8,gpt2-mini:8,lstm:32,bert-base:4:layers=1,gpt2-small:2:layers=1,vit-base:4:layers=1"
)


#: (m, n, k, whether the factors lie transposed)
Product = tuple[int, int, int, bool, bool]


def found_in(networks: str) -> tuple[list[Any], list[Product]]:
    """Convolutions of training steps, one operator of each kind, and products of matrices, those of losses included."""
    convolutions: dict[Any, Any] = {}
    products: dict[Product, None] = {}
    for text in networks.split(","):
        name, batch, *options = text.split(":")
        given = {k: int(v) for k, _, v in (o.partition("=") for o in options)}
        step, _ = zoo_step(name, int(batch), recompute=False, optimizer=rc.SGD(0.1), weights=False, **given)
        for op in step.program.block.operators:
            if isinstance(op.op, LinearLoss):
                s = Sizes(op.inputs[0], op.inputs[1], op.inputs[3], transposed=bool(op.op.transB), held=True)
                rows, words, width = s.height, s.words, s.width
                new = [(rows, words, width, False, True), (rows, width, words, False, False),
                       (words, width, rows, True, False)]  # fmt: skip
                products |= dict.fromkeys(new)
            elif (p := product(op)) is not None and len(p.a) == 1:
                products[p.m, p.n, p.k, p.ta, p.tb] = None
            elif class_of(op)[0]:
                convolutions.setdefault((op.op, *(v and v.type for v in (*op.inputs, *op.outputs))), op)
    return list(convolutions.values()), list(products)


def drawn(*shape: int) -> np.ndarray:
    """Some numbers."""
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def of_convolution(op: Any) -> dict[str, Table]:
    """What each side runs; empty where one refuses the operator."""
    found = {}
    ins, outs = ([None if v is None else drawn(*v.shape) for v in vs] for vs in (op.inputs, op.outputs))
    for name in ("convolution", "onednn"):
        provider = PROVIDERS[name]
        if not provider.accepts(op):
            return {}
        found[name] = Table(
            list(provider.bind(op, ins, outs, [np.zeros(t.shape, t.numpy) for t in provider.scratch(op)]))
        )
    return found


def of_product(p: Product) -> dict[str, Table]:
    """What each side runs."""
    m, n, k, ta, tb = p
    a, b = drawn(k, m).T if ta else drawn(m, k), drawn(n, k).T if tb else drawn(k, n)
    theirs = blas.Routine(library().sgemm, status=True)
    c = np.empty((m, n), np.float32)
    return {"blas": Table(blas.strided(a, b, c)), "onednn": Table(blas.strided(a, b, c, by=lambda *_: theirs))}


def race(tables: dict[str, Table], turns: int) -> tuple[float, float]:
    """Least seconds of each side, ours first."""
    found = dict.fromkeys(tables, float("inf"))
    for turn in range(turns + 1):
        for name, table in tables.items():
            begin = time.perf_counter()
            table.run()
            if turn:
                found[name] = min(time.perf_counter() - begin, found[name])
    ours, theirs = found.values()
    return ours, theirs


def main() -> int:
    """Measures, prints, writes."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--networks", default=NETWORKS, help=f"network:batch:option=number, ... (default: {NETWORKS})")
    p.add_argument("--turns", type=int, default=7)
    p.add_argument("--write", action="store_true", help="keep the ratios for this family")
    p.add_argument("--verbose", action="store_true", help="a line for every convolution")
    args = p.parse_args()
    register_all()
    if missing := [n for n in ("convolution", "blas", "onednn") if n not in PROVIDERS]:
        p.error(f"no provider {', '.join(missing)} here: install the extras 'cpu' and 'onednn'")
    ratios: defaultdict[str, list[float]] = defaultdict(list)
    seconds: Counter[str] = Counter()
    convolutions, products = found_in(args.networks)
    todo = [(class_of(op)[0], op, of_convolution) for op in convolutions]
    todo += [(processors.product_class(*p), p, of_product) for p in products]
    for done, (name, what, made) in enumerate(todo):
        if sys.stderr.isatty():
            print(f"\r{done} of {len(todo)}", end="", file=sys.stderr, flush=True)
        if tables := made(what):
            ours, theirs = race(tables, args.turns)
            ratios[name].append(ours / theirs)
            seconds[name] += theirs
            if args.verbose:
                text = (
                    what if made is of_product else " ".join(str(v.shape) for v in (*what.inputs, *what.outputs) if v)
                )
                print(f"{name:<34} ours {1e3 * ours:8.3f} ms onednn {1e3 * theirs:8.3f} ms  {text}")
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
