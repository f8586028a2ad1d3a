"""Milliseconds of training steps on a device that is not there, from their launches, machine code and bytes.

estimate.py [--cudnn] [--top N] [ROW...]      beginnings of rows' names (all)

Every step is planned and bound as a device would run it; NVRTC compiles its kernels for sm_90, and `cuobjdump` (the
package nvidia-cuda-cuobjdump) prints their instructions.  The assumptions stand in `Rates` and `Kernels`: a launch
takes as long as its bytes, its instructions or its multiplications take, whichever is longest.  Instructions of a loop
count as often as the loop must go round to move the launch's bytes or to do its operator's multiplications; other loops
count once.  `--cudnn`: convolutions and attention by cuDNN, which plans them without a device (tests/cudnn_nowhere.py),
at `Rates.cudnn` of the peak.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent / "stages")]
import common  # noqa: E402  the folders of the checkout

sys.path.insert(0, str(common.ROOT / "tests"))  # whose machine_code is meant
import cuda_cases  # noqa: E402
import cudnn_nowhere  # noqa: E402
from gpu_ours import compiled  # noqa: E402
from gpu_rows import STAGED, wanted  # noqa: E402
from machine_code import Entry, entries  # noqa: E402
from prepare import TARGET  # noqa: E402  whose device is described from here on

import recompute as rc  # noqa: E402
from recompute.cost import total_cost  # noqa: E402
from recompute.language.types import TensorType  # noqa: E402
from recompute.runtime.cuda.device import nvrtc  # noqa: E402
from recompute.runtime.cuda.device.kernel import C_TYPES, Buffer, Copy, Fill, Kernel, Launch, Library, Product  # noqa: E402
from recompute.runtime.cuda.session import CudaSession  # noqa: E402


@dataclass(frozen=True)
class Rates:
    """What an H100 SXM does (NVIDIA's datasheet and architecture paper), and the shares of it that are reached."""

    #: bytes a second: of 3.35e12, nine tenths
    memory: float = 3.0e12
    #: instructions a second of all warps: 132 multiprocessors, 4 schedulers, 1.7 GHz, seven of ten cycles
    issue: float = 132 * 4 * 1.7e9 * 0.7
    #: multiplications and additions a second of matrix products, by how numbers are multiplied: about two thirds of the
    #: dense peaks 67, 495 and 990 (float32 without tensor cores reaches more)
    products: tuple[tuple[str, float], ...] = (("f64", 52e12), ("f32", 52e12), ("tf32", 330e12), ("half", 620e12))
    #: multiprocessors, and the tile of a product that one of them computes at a time
    multiprocessors: int = 132
    tile: int = 128
    #: of a product whose rows do not begin at multiples of 16 bytes (no TMA, no wide loads): the share of its rate
    unaligned: float = 0.3
    #: of cuDNN's convolutions and attention: the share of `products` (attention on Hopper: 400 to 650e12)
    cudnn: float = 0.7
    #: seconds from the last block's count to the first number that another block has read behind it (1.5 to 2e-6 are
    #: likely where all blocks wait for all; here 8 wait for each other)
    barrier: float = 1.5e-6
    #: bytes a second from the cache that all multiprocessors share
    cache: float = 5.5e12
    #: seconds from the end of a kernel in a graph to the beginning of the next, and of the smallest product
    launch: float = 1.5e-6
    shortest: float = 4.0e-6


RATES = Rates()
_ITEMS = {c: TensorType(name, ()).numpy.itemsize for name, c in C_TYPES.items() if " " not in c}
_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")


@dataclass(frozen=True)
class Kernels:
    """The machine code of a kernel: instructions before its largest loop and behind it, and in it.

    `needs`: registers, stack, shared memory.  `outside`, `inside`: counts by a thread; `moved`: bytes that global loads
    and stores of one turn move; `tensor`: multiplications and additions of a warp's tensor-core instructions in one
    turn; `single`: those of a thread's FFMA.
    """

    needs: Entry
    outside: int
    inside: int
    moved: int
    still: int
    tensor: int
    single: int


def parsed(text: str, needs: Entry) -> Kernels:
    """Of cuobjdump's listing of one kernel."""
    found = [m for m in map(_LINE.match, text.splitlines()) if m]
    lines = [(int(m[1], 16), m[3], m[4]) for m in found]
    last = max(int(m[1], 16) for m in found if m[3] == "EXIT" and not m[2])  # behind it: functions that are called
    loops = []
    for at, name, rest in lines:
        if name.split(".")[0] == "BRA" and (m := re.search(r"0x([0-9a-f]+)", rest)) and int(m[1], 16) < at:
            loops.append((int(m[1], 16), at))
    outer = [(a, b) for a, b in loops if not any(c <= a and b <= d and (a, b) != (c, d) for c, d in loops)]
    counts = {x: [0, 0, 0, 0] for x in outer}
    outside, still = 0, 0
    for at, name, _ in lines:
        home = next(((a, b) for a, b in outer if a <= at <= b), None)
        bytes_ = _bytes(name)
        if home is None:
            outside += at <= last
            still += bytes_ if at <= last else 0
            continue
        one = counts[home]
        one[0] += 1
        one[1] += bytes_
        one[2] += _multiplied(name)
        one[3] += 2 if name.startswith("FFMA") else 0
    most = max(counts.values(), key=lambda c: (c[2], c[1], c[0]), default=[0, 0, 0, 0])
    outside += sum(c[0] for c in counts.values()) - most[0]
    return Kernels(needs, outside, most[0], most[1], still, most[2], most[3])


def _bytes(name: str) -> int:
    """Bytes that a thread's load from global memory or store moves."""
    if name.split(".")[0] not in ("LDG", "STG"):
        return 0
    widths = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
    return next((n for part, n in widths.items() if part in name.split(".")), 4)


def _multiplied(name: str) -> int:
    """Multiplications and additions of a warp's product on tensor cores."""
    m = re.match(r"HMMA\.(16)(8)(8|16|4)\.", name)
    return 2 * math.prod(map(int, m.groups())) if m else 0


def listed(kernels: dict[str, Kernel]) -> dict[str, Kernels]:
    """The machine code of kernels, by digest."""
    import nvidia

    there = (t for p in nvidia.__path__ for t in Path(p).glob("*/bin/cuobjdump"))
    tool = next(there, None) or shutil.which("cuobjdump")
    if tool is None:
        sys.exit("estimate.py needs cuobjdump: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    beside = {**os.environ, "PATH": f"{Path(tool).parent}{os.pathsep}{os.environ['PATH']}"}  # nvdisasm, which it starts

    def one(k: Kernel) -> Kernels:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            code = nvrtc.compiled(k, TARGET)
            file.write(code)
            file.flush()
            done = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True, env=beside)
        return parsed(done.stdout, entries(code)[k.name])

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(kernels, pool.map(one, kernels.values()), strict=True))


def product_seconds(p: Product) -> float:
    """Of cuBLAS: full waves of tiles at the rate of their type, or the operands' bytes."""
    kind = "tf32" if p.tf32 else p.a.dtype if p.a.dtype in ("f32", "f64") else "half"
    tiles = math.ceil(p.m / RATES.tile) * math.ceil(p.n / RATES.tile) * p.batch
    spread = max(1, RATES.multiprocessors // tiles) if tiles < RATES.multiprocessors else 1  # along k
    waves = math.ceil(tiles * spread / RATES.multiprocessors)
    rate = dict(RATES.products)[kind]
    if any(x * p.c.type.numpy.itemsize % 16 for x in (p.lda, p.ldb, p.ldc)) and kind != "f32":
        rate *= RATES.unaligned
    flops = 2 * RATES.tile**2 * p.k / spread * RATES.multiprocessors * waves
    moved = (p.m * p.k + p.k * p.n + p.m * p.n) * p.batch * p.c.type.numpy.itemsize
    return max(flops / rate, moved / RATES.memory, RATES.shortest)


def instructions(launch: Launch, code: Kernels, flops: float) -> float:
    """Of all warps of one launch.  `flops`: of its operator, shared by its launches."""
    threads = math.prod(launch.grid) * math.prod(launch.block)
    if launch.kernel.resident:
        (within,) = launch.within(RATES.multiprocessors)
        begin, end = launch.args[-2:]
        threads = math.prod(within.grid) * math.prod(launch.block)
        return threads / 32 * (code.outside + (end - begin) * launch.grid[1] / within.grid[1] * code.inside)
    turns = 1.0
    if code.moved:
        turns = max(turns, (bytes_of(launch) / threads - code.still) / code.moved)
    if code.tensor:
        turns = max(turns, flops / (threads / 32 * code.tensor))
    elif code.single:
        turns = max(turns, flops / (threads * code.single))
    return threads / 32 * (code.outside + turns * code.inside)


def bytes_of(launch: Launch) -> int:
    """Bytes of its buffers, each of them once, and of the arrays of a table (runtime/cuda/loops/many.py)."""
    found = {a.address: a.nbytes for a in launch.args if isinstance(a, Buffer)}
    for t in (a for a in launch.args if hasattr(a, "at") and hasattr(a, "first")):
        items = [_ITEMS[kind] for kind in re.findall(r"(\w+)\* x\d+ = \(\w+\*\)t\.at", launch.kernel.text)]
        found |= {t.at[row][k]: t.n[k] * item for row, item in enumerate(items) for k in range(t.count)}
    return sum(found.values())


def launch_seconds(launch: Launch, code: Kernels, flops: float) -> float:
    """Of one kernel.  `flops`: see `instructions`."""
    if launch.kernel.resident:
        return resident_seconds(launch, code)
    return max(bytes_of(launch) / RATES.memory, instructions(launch, code, flops) / RATES.issue)


def resident_seconds(launch: Launch, code: Kernels) -> float:
    """Of a kernel whose blocks stay and wait for each other between steps (runtime/cuda/code/resident.py).

    A block has a multiprocessor.  Its step is, for each of its parts of the batch, the instructions of one turn behind
    the reads of what the weights meet, which all blocks make at once, from the cache.  While it does other parts, the
    barrier of one is over or not.
    """
    (within,) = launch.within(RATES.multiprocessors)
    names = [p.split()[-1] for p in launch.kernel.parameters.replace("*", "* ").split(",")]
    args = dict(zip(names, launch.args, strict=True))
    turns = args["end"] - args["begin"]
    parts = math.ceil(launch.grid[1] / within.grid[1])
    weights, state = args["weights"], (args["all_dg"] if "all_dg" in args else args["all_y"]).type
    met = weights.shape["all_dg" not in args] * args["rows"] * state.numpy.itemsize * launch.grid[0]
    warps = math.prod(launch.block) / 32 * RATES.multiprocessors / RATES.issue
    part = warps * code.inside + met / parts / RATES.cache
    return max(bytes_of(launch) / RATES.memory, warps * code.outside + turns * max(parts * part, part + RATES.barrier))


def flops_of(step: Any, code: dict[str, Kernels]) -> dict[int, float]:
    """Of an operator's launches, by their `id`: what its products do not do, in equal shares."""
    multiplied = sum(2 * c.m * c.n * c.k * c.batch for c in step.calls if isinstance(c, Product))
    launches = [c for c in step.calls if isinstance(c, Launch)]
    # by those with products on tensor cores, where there are any
    multiply = {id(c) for c in launches if code[c.kernel.digest].tensor} or {id(c) for c in launches}
    return dict.fromkeys(multiply, max(total_cost([step.op]).flops - multiplied, 0) / (len(multiply) or 1))


def step_seconds(session: Any, code: dict[str, Kernels]) -> tuple[dict[str, float], int]:
    """Seconds of a step by operator and kernel, and how many launches it has."""
    found: dict[str, float] = collections.defaultdict(float)
    count = 0
    for step in session.steps:
        cost = total_cost([step.op])
        flops = flops_of(step, code)
        kinds = {v.dtype for v in (*step.op.reads(), *step.op.writes())}
        kind = "half" if kinds & {"f16", "bf16"} else "tf32" if "tf32" in step.op.kernel else "f32"
        rate = dict(RATES.products)[kind]
        for call in step.calls:
            count += 1
            name = f"{step.op.op.name} {step.op.kernel}"
            seconds = 0.0
            if isinstance(call, Launch):
                seconds = launch_seconds(call, code[call.kernel.digest], flops.get(id(call), 0.0))
            elif isinstance(call, Product):
                seconds = product_seconds(call)
            elif isinstance(call, Library):
                seconds = max(cost.flops / (rate * RATES.cudnn), cost.bytes / RATES.memory)
            elif isinstance(call, (Copy, Fill)):
                seconds = call.target.nbytes * (2 if isinstance(call, Copy) else 1) / RATES.memory
            found[name] += seconds + RATES.launch
    return dict(found), count


def sessions(rows: Sequence[str]) -> Iterator[tuple[str, Any, Any, dict[str, Kernel]]]:
    """Rows' titles, compiled steps, their sessions, and the kernels of these by digest."""
    for row, _ in STAGED:
        if wanted(row.title, rows):
            made = compiled(row, "ours", rc.CUDAPlace(0))[0]
            session = CudaSession(made.program.block, made.program.data, cuda_cases.Nowhere())
            calls = (c for s in session.steps for c in s.calls if isinstance(c, Launch))
            yield row.title, made, session, {c.kernel.digest: c.kernel for c in calls}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*")
    parser.add_argument("--top", type=int, default=12, help="operators to name for each step")
    parser.add_argument("--cudnn", action="store_true", help="with cuDNN")
    given = parser.parse_args()
    if given.cudnn:
        cudnn_nowhere.install()
    for title, made, session, kernels in sessions(given.rows):
        seconds, count = step_seconds(session, listed(kernels))
        said = f"{sum(seconds.values()) * 1e3:.2f} ms, {count:,} launches, {len(kernels)} kernels"
        print(f"{title}: {said}, peak {made.figures.peak_bytes:,} bytes", flush=True)
        for name, s in sorted(seconds.items(), key=lambda x: -x[1])[: given.top]:
            print(f"    {s * 1e3:7.3f} ms  {name}")


if __name__ == "__main__":
    main()
