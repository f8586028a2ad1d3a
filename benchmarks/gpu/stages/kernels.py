"""One step of some networks, launched kernel by kernel, for compute-sanitizer and ncu.

kernels.py [NAME...]      small networks (attention by tensor cores, convolutions, norms)
kernels.py --step         ResNet-50 as it is timed, in bfloat16
"""

from __future__ import annotations

import sys

import common  # noqa: F401  (finds the modules)
from gpu_ours import compiled, small
from gpu_rows import SMALL, STAGED, sampled

import recompute as rc

NAMES = ("bert-tiny bf16", "bert-tiny tf32", "vit-tiny bf16", "resnet18")
place = rc.CUDAPlace(0)


def steps() -> list[tuple[str, tuple[rc.Program, str, dict]]]:
    """(name, program, loss and feed) of what is to run."""
    if sys.argv[1:] == ["--step"]:
        row = next(r for r, _ in STAGED if r.network == "resnet50")
        made, loss = compiled(row, "ours", place)
        return [(row.title, (made.program, loss, sampled(row.network, row.batch, **row.options)))]
    found = ((n, small(SMALL[n], place)) for n in sys.argv[1:] or NAMES)
    return [(n, (made.program, loss, feed)) for n, (made, loss, feed) in found]


for name, (program, loss, feed) in steps():
    executor = rc.Executor(place)
    executor.session(program, [loss]).device.graphs = False
    print(name, float(executor.run(program, feed, [loss])[0]), flush=True)
