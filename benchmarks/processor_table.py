"""Which of our kernels, and of OpenBLAS's, are faster than oneDNN's on this processor, by classes of operators.

    python benchmarks/processor_table.py [--networks resnet18:8,bert-base:4:layers=1] [--write]

Every convolution and product of the networks' training steps runs in turns by all of them; a class's
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
from recompute.runtime.cpu.code import matrix_products
from recompute.runtime.cpu.device import dnnl, native
from recompute.runtime.cpu.device.native import Table
from recompute.runtime.cpu.processors import Processor
from recompute.runtime.cpu.providers import blas, convolution
from recompute.runtime.cpu.providers.blas import product
from recompute.runtime.cpu.providers.products import sgemm
from recompute.runtime.shared.convolved import convolved

NETWORKS = (
    "resnet18:8,resnet50:8,vgg16:2,mobilenet_v2:8,densenet121:4,unet:1,"
    "bert-mini:8,gpt2-mini:8,lstm:32,bert-base:4:layers=1,gpt2-small:2:layers=1,vit-base:4:layers=1"
)


#: (m, n, k, whether the factors lie transposed)
Product = tuple[int, int, int, bool, bool]


def found_in(networks: str) -> tuple[list[Any], list[Product]]:
    """Convolutions of training steps, one operator of each kind, and products of matrices, those of losses and of 1x1
    convolutions included."""
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
            elif (c := convolved(op)) is not None and c.last:
                if c.geometry.pointwise and c.geometry.group == 1:
                    products[convolution.PixelProducts(c).shape()] = None
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
    c, room = np.empty((m, n), np.float32), np.empty(matrix_products.room(m, n, k), np.float32)
    return {
        "products": Table(matrix_products.calls(a, b, c, room)),
        "onednn": Table(blas.strided(a, b, c, by=sgemm())),
        "blas": Table(blas.strided(a, b, c)),
    }


def race(tables: dict[str, Table], turns: int) -> list[float]:
    """Least seconds of each side, ours first, then oneDNN's."""
    found = dict.fromkeys(tables, float("inf"))
    for turn in range(turns + 1):
        for name, table in tables.items():
            begin = time.perf_counter()
            table.run()
            if turn:
                found[name] = min(time.perf_counter() - begin, found[name])
    return list(found.values())


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
    convolutions, products = found_in(args.networks)
    found = Found(args.turns, args.verbose)
    for i, p in enumerate(products):
        found.race(processors.product_class(*p), of_product(p), p, f"{i} of {len(products)} products")
    # what multiplies the pixels of 1x1 convolutions follows from the products
    here = Processor(processors.family(), "", *found.means())
    processors.processor = lambda: here  # type: ignore[assignment]
    convolution._plan.cache_clear()
    for i, op in enumerate(convolutions):
        c, about = convolved(op), " ".join(str(v.shape) for v in (*op.inputs, *op.outputs) if v)
        assert c is not None
        tables = of_convolution(op)
        found.race(processors.convolution_class(c), tables, about, f"{i} of {len(convolutions)} convolutions")
    print(f"{headline(machine())}: {here.family}")
    found.report()
    if args.write:
        print(f"written: {write(*found.means())}")
    return 0


class Found:
    """What was measured, by class."""

    def __init__(self, turns: int, verbose: bool) -> None:
        self.turns, self.verbose = turns, verbose
        self.ours: defaultdict[str, list[float]] = defaultdict(list)
        self.blas: defaultdict[str, list[float]] = defaultdict(list)
        self.seconds: Counter[str] = Counter()

    def race(self, name: str, tables: dict[str, Table], about: Any, progress: str) -> None:
        """One more of a class; nothing where one side refuses it."""
        if sys.stderr.isatty():
            print(f"\r{progress:<30}", end="", file=sys.stderr, flush=True)
        if not tables:
            return
        ours, theirs, *others = race(tables, self.turns)
        self.ours[name].append(ours / theirs)
        if others:
            self.blas[name].append(others[0] / theirs)
        self.seconds[name] += theirs
        if self.verbose:
            times = "".join(f" {1e3 * s:8.3f}" for s in (ours, theirs, *others))
            print(f"{name:<34} ours, onednn, blas: {times} ms  {about}")

    def means(self) -> tuple[dict[str, float], dict[str, float]]:
        """Ours, and BLAS's, as a share of oneDNN's time."""
        ours, by_blas = (
            {name: round(statistics.geometric_mean(found), 3) for name, found in sorted(given.items())}
            for given in (self.ours, self.blas)
        )
        return ours, by_blas

    def report(self) -> None:
        """A line for each class."""
        ours, by_blas = self.means()
        print(f"{'as a share of oneDNN:':<34} {'ours':>6} {'BLAS':>6}")
        for name, mean in ours.items():
            other = f"{by_blas[name]:6.3f}" if name in by_blas else " " * 6
            print(f"{name:<34} {mean:6.3f} {other}  of {len(self.ours[name]):3}, {1e3 * self.seconds[name]:9.1f} ms")


def write(ratios: dict[str, float], by_blas: dict[str, float]) -> str:
    """Keeps a table for this family; the file's name."""
    library = dnnl.load()
    version = library.version if isinstance(library, dnnl.Library) else ""
    about = f"{headline(machine())}, oneDNN {version}, {native.threads()} threads, load {os.getloadavg()[0]:.2f}"
    path = processors.folder() / f"{processors.family()}.json"
    found = {"about": about, "ratios": ratios, "blas": by_blas}
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return path.name


if __name__ == "__main__":
    sys.exit(main())
