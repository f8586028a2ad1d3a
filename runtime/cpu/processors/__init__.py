"""Measurements of processors, by family: which kernels are the faster ones for which operators.

A family is a vendor and its widest vectors (`amd-avx2`).  Its file here, `FAMILY.json`, is written by
`benchmarks/processor_table.py --write` and kept in the repository: so the kernels of a step, its bits and its peak
follow from the program and the family, never from the moment.  A family without a file takes the nearest one's.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import platform
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from ....errors import UsageError
from ....language.kernels import bits_are_portable
from ...shared.convolved import Convolved
from ..code import matrix_products
from ..convolution import winograd
from ..device import native
from ..device.toolchain import FAMILY

#: channels on both sides from which on a convolution is wide
WIDE = 128
#: channels below which an operand is an image, not activations
IMAGE = 16
#: rows, columns or terms below which a product is thin
THIN = 16
#: times as many rows or columns as terms from which on a product is long; as many terms, and it is deep
LONG = 8
#: floating-point operations below which a product is small: threads that meet, and packing, count
SMALL = 1 << 28
#: our kernels are taken where they need less than this share of oneDNN's time: the rest is noise
FASTER = 0.93
#: the same for products: oneDNN's bits depend on the number of threads, ours do not
ALIKE = 1.02
#: the same for what oneDNN does in threads of its own, one part each: on a machine that has other work, all of them
#: wait for the one that is late
WAITING = 1.1


@dataclass(frozen=True)
class Processor:
    """A family's measurements.

    `about`: the processor, the day and the versions.  `ratios`: class (see `convolution_class`, `product_class`) → time
    of our kernels as a share of oneDNN's; a class that is not there was not measured, and oneDNN's are taken.  `blas`:
    the same of OpenBLAS, for products.
    """

    family: str
    about: str
    ratios: Mapping[str, float]
    blas: Mapping[str, float]


def folder() -> Path:
    """Where the files are."""
    return Path(__file__).parent


def families() -> list[str]:
    """All that have a file."""
    return sorted(p.stem for p in folder().glob("*.json"))


def family() -> str:
    """This processor's, a vendor and its widest vectors; or what $RECOMPUTE_PROCESSOR says; "portable" where bits are
    those of every machine.  UsageError for a name without a file."""
    if bits_are_portable():
        return "portable"
    if asked := os.environ.get(FAMILY):
        if asked not in families():
            raise UsageError(f"{FAMILY} is {asked!r}; families that were measured: {', '.join(families())}")
        return asked
    if platform.machine() not in ("x86_64", "AMD64") or native.unavailable():
        return platform.machine() or "unknown"
    tools = native.toolchain()
    features = tools.features.split(",")
    vendor = "amd" if tools.cpu.startswith(("znver", "bdver", "btver")) else "intel"
    vectors = "avx512" if "+avx512f" in features else "avx2" if "+avx2" in features else "sse"
    return f"{vendor}-{vectors}"


def nearest_first(wanted: str, known: list[str]) -> list[str]:
    """Families whose measurements another takes: with the same vectors first, then of the same vendor, then others."""
    vendor, _, vectors = wanted.partition("-")

    def distance(name: str) -> tuple[bool, bool, str]:
        their_vendor, _, their_vectors = name.partition("-")
        return vectors != their_vectors, vendor != their_vendor, name

    return sorted(known, key=distance)


def read(name: str) -> Processor:
    """A family's file."""
    content = json.loads((folder() / f"{name}.json").read_text(encoding="utf-8"))
    return Processor(name, content["about"], content["ratios"], content.get("blas", {}))


@functools.cache
def processor() -> Processor:
    """The measurements that count here: the nearest family's, and what was measured of convolutions only on others."""
    processors = [read(name) for name in nearest_first(family(), families())]
    if not processors:
        return Processor("", "", {}, {})
    ratios = dict(processors[0].ratios)
    for other in processors[1:]:
        ratios = {c: share for c, share in other.ratios.items() if "product" not in c} | ratios
    return dataclasses.replace(processors[0], ratios=ratios)


def convolution_class(c: Convolved) -> str:
    """A channels-last convolution's kind, form and how many channels it has."""
    g, w = c.geometry, c.geometry.window
    strided = " strided" if set(w.strides) != {1} else ""
    if g.group > 1:
        return f"{c.kind} {'depthwise' if g.cg == g.mg == 1 else 'grouped'}{strided}"
    if g.cg < IMAGE:
        return f"{c.kind} of an image"
    form = "pointwise" if w.taps == 1 else "winograd" if winograd.suits(c) else "spatial"
    return f"{c.kind} {form}{strided} {'wide' if min(g.cg, g.mg) >= WIDE else 'narrow'}"


def deep(m: int, n: int, k: int) -> bool:
    """Whether a product has many terms for its rows and columns."""
    return max(m, n) / k <= 1 / LONG


def product_class(m: int, n: int, k: int, ta: bool, tb: bool, *, small: bool = True) -> str:
    """Which factors of [m, k] times [k, n] lie transposed in memory, and its form: thin, small, long or of many terms.

    `small`: False for its form whatever its size.
    """
    if min(m, n, k) < THIN:
        form = "thin "
    elif small and 2 * m * n * k < SMALL:
        form = "small "
    else:
        form = "long " if max(m, n) / k >= LONG else "deep " if deep(m, n, k) else ""
    return f"{form}product {'t' if ta else 'n'}{'t' if tb else 'n'}"


def ours_are_faster(name: str, *, waiting: bool = False) -> bool:
    """Whether our kernels for a class of convolutions are the better ones on processors like this one.

    `waiting`: oneDNN's would run in threads of its own.
    """
    ratio = processor().ratios.get(name)
    return ratio is not None and ratio < (WAITING if waiting else FASTER)


def multiplier(shape: tuple[int, int, int, bool, bool], among: Collection[str]) -> str:
    """Which of "onednn", "products" (our kernels) and "blas" multiplies matrices, of those that are there.

    `shape`: rows, columns, terms, and whether the factors lie transposed (see `product_class`).

    BLAS has to be clearly faster than oneDNN.  Ours need not be: their bits do not depend on the threads.  But they are
    not taken where nothing was measured, or for small products, unless nothing else is there.
    """
    here, name = processor(), product_class(*shape)
    if name not in here.ratios and name not in here.blas:
        name = product_class(*shape, small=False)
    ours = here.ratios.get(name, math.inf) if matrix_products.worth_packing(*shape[:3]) else math.inf
    blas = here.blas.get(name, 1.0)
    share = {"onednn": 1.0, "products": ours / ALIKE, "blas": blas / FASTER}
    return min(among, key=lambda n: share[n], default="")


def multiplies() -> bool:
    """Whether our products of matrices were measured on processors like this one."""
    return any("product" in name for name in processor().ratios)
