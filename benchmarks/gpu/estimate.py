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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent / "stages")]
import common  # noqa: E402, F401  the folders of the checkout
import cuda_cases  # noqa: E402
import cudnn_nowhere  # noqa: E402
from gpu_ours import compiled  # noqa: E402
from gpu_rows import STAGED, wanted  # noqa: E402
from prepare import TARGET  # noqa: E402  whose device is described from here on

import recompute as rc  # noqa: E402
from recompute.cost import total_cost  # noqa: E402
from recompute.runtime.cuda.device import nvrtc  # noqa: E402
from recompute.runtime.cuda.device.kernel import Buffer, Copy, Fill, Kernel, Launch, Library, Product  # noqa: E402
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
_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")


@dataclass(frozen=True)
class Kernels:
    """The machine code of a kernel: instructions before its largest loop and behind it, and in it.

    `outside`, `inside`: counts by a thread; `moved`: bytes that global loads and stores of one turn move; `tensor`:
    multiplications and additions of a warp's tensor-core instructions in one turn; `single`: those of a thread's FFMA.
    """

    outside: int
    inside: int
    moved: int
    still: int
    tensor: int
    single: int


def parsed(text: str) -> Kernels:
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
    return Kernels(outside, most[0], most[1], still, most[2], most[3])


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
            file.write(nvrtc.compiled(k, TARGET))
            file.flush()
            done = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True, env=beside)
        return parsed(done.stdout)

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


def launch_seconds(launch: Launch, code: Kernels, flops: float) -> float:
    """Of one kernel.  `flops`: of its operator, shared by its launches."""
    threads = math.prod(launch.grid) * math.prod(launch.block)
    buffers = {a.address: a.nbytes for a in launch.args if isinstance(a, Buffer)}
    moved = sum(buffers.values())
    turns = 1.0
    if code.moved:
        turns = max(turns, (moved / threads - code.still) / code.moved)
    if code.tensor:
        turns = max(turns, flops / (threads / 32 * code.tensor))
    elif code.single:
        turns = max(turns, flops / (threads * code.single))
    instructions = threads / 32 * (code.outside + turns * code.inside)
    return max(moved / RATES.memory, instructions / RATES.issue)


def resident_seconds(launch: Launch, code: Kernels) -> float:
    """Of a kernel whose blocks stay and wait for each other between steps (runtime/cuda/code/resident.py).

    A block has a multiprocessor.  Its step is, for each of its parts of the batch, the instructions of one turn behind
    the reads of what the weights meet, which all blocks make at once, from the cache.  While it does other parts, the
    barrier of one is over or not.
    """
    (within,) = launch.within(RATES.multiprocessors)
    args = dict(
        zip((p.split()[-1] for p in launch.kernel.parameters.replace("*", "* ").split(",")), launch.args, strict=True)
    )
    turns = args["end"] - args["begin"]
    parts = math.ceil(launch.grid[1] / within.grid[1])
    weights, state = args["weights"], (args["all_dg"] if "all_dg" in args else args["all_y"]).type
    met = weights.shape["all_dg" not in args] * args["rows"] * state.numpy.itemsize * launch.grid[0]
    warps = math.prod(launch.block) / 32 * RATES.multiprocessors / RATES.issue
    part = warps * code.inside + met / parts / RATES.cache
    moved = sum(a.nbytes for a in {a.address: a for a in launch.args if isinstance(a, Buffer)}.values())
    return max(moved / RATES.memory, warps * code.outside + turns * max(parts * part, part + RATES.barrier))


def step_seconds(session: Any, code: dict[str, Kernels]) -> tuple[dict[str, float], int]:
    """Seconds of a step by operator and kernel, and how many launches it has."""
    found: dict[str, float] = collections.defaultdict(float)
    count = 0
    for step in session.steps:
        cost = total_cost([step.op])
        multiplied = sum(2 * c.m * c.n * c.k * c.batch for c in step.calls if isinstance(c, Product))
        launches = [c for c in step.calls if isinstance(c, Launch)]
        # by those with products on tensor cores, where there are any
        multiply = {id(c) for c in launches if code[c.kernel.digest].tensor} or {id(c) for c in launches}
        own = max(cost.flops - multiplied, 0) / (len(multiply) or 1)
        kinds = {v.dtype for v in (*step.op.reads(), *step.op.writes())}
        kind = "half" if kinds & {"f16", "bf16"} else "tf32" if "tf32" in step.op.kernel else "f32"
        rate = dict(RATES.products)[kind]
        for call in step.calls:
            count += 1
            name = f"{step.op.op.name} {step.op.kernel}"
            seconds = 0.0
            if isinstance(call, Launch):
                machine = code[call.kernel.digest]
                seconds = launch_seconds(call, machine, own if id(call) in multiply else 0.0)
                if call.kernel.resident:
                    seconds = resident_seconds(call, machine)
            elif isinstance(call, Product):
                seconds = product_seconds(call)
            elif isinstance(call, Library):
                seconds = max(cost.flops / (rate * RATES.cudnn), cost.bytes / RATES.memory)
            elif isinstance(call, (Copy, Fill)):
                seconds = call.target.nbytes * (2 if isinstance(call, Copy) else 1) / RATES.memory
            found[name] += seconds + RATES.launch
    return dict(found), count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*")
    parser.add_argument("--top", type=int, default=12, help="operators to name for each step")
    parser.add_argument("--cudnn", action="store_true", help="with cuDNN")
    given = parser.parse_args()
    if given.cudnn:
        cudnn_nowhere.install()
    place = rc.CUDAPlace(0)
    for row, _ in STAGED:
        if not wanted(row.title, given.rows):
            continue
        nowhere = cuda_cases.Nowhere()
        made = compiled(row, "ours", place)[0]
        program = made.program
        session = CudaSession(program.block, program.data, nowhere)
        kernels = {c.kernel.digest: c.kernel for s in session.steps for c in s.calls if isinstance(c, Launch)}
        seconds, count = step_seconds(session, listed(kernels))
        said = f"{sum(seconds.values()) * 1e3:.2f} ms, {count:,} launches, {len(kernels)} kernels"
        print(f"{row.title}: {said}, peak {made.figures.peak_bytes:,} bytes", flush=True)
        for name, s in sorted(seconds.items(), key=lambda x: -x[1])[: given.top]:
            print(f"    {s * 1e3:7.3f} ms  {name}")


if __name__ == "__main__":
    main()
