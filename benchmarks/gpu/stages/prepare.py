"""Without a device: machine code of all that the stages launch, in carry/machine_code.tar.xz.

prepare.py [ROW...]      beginnings of rows' and small networks' names (all, all operators' samples, and the kernels
                         that tests have launched: carry/launched.txt)
"""

from __future__ import annotations

import concurrent.futures
import io
import os
import sys
import tarfile

import rich.progress
from common import CARRY
from gpu_ours import compiled, small
from gpu_rows import SMALL, STAGED, wanted

import recompute as rc
from recompute.runtime.cuda.device import device as devices
from recompute.runtime.cuda.device import nvrtc

#: whose prices decide what is fused, and whose machine code is made
DEVICE, TARGET = ("NVIDIA H100 80GB HBM3", 85_520_809_984), "sm_90"
devices.described = lambda number: DEVICE

import cuda_cases  # noqa: E402

from recompute.runtime.cuda.session import CudaSession  # noqa: E402
from recompute.testing import all_ops, cases  # noqa: E402


def main(rows: list[str]) -> None:
    """Plans every step, binds every sample, compiles the kernels, and packs them."""
    nowhere, place = cuda_cases.Nowhere(), rc.CUDAPlace(0)
    steps = [(r.title, lambda r=r: compiled(r, "ours", place)[0]) for r, _ in STAGED]
    steps += [(n, lambda s=s: small(s, place)[0]) for n, s in SMALL.items()]
    for name, made in steps:
        if wanted(name, rows):
            program = made().program
            CudaSession(program.block, program.data, nowhere)
            print(f"{name}: {len(nowhere.kernels)} kernels", flush=True)
    for cls in [] if rows else all_ops():
        for case in cases(cls) if cls.__name__ != "Free" else ():
            for bound in cuda_cases.bound(case, nowhere):
                nowhere.compile(bound.kernels)
    print(f"compiling {len(nowhere.kernels)} kernels for {TARGET}", flush=True)
    CARRY.mkdir(exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        codes = pool.map(lambda k: nvrtc.compiled(k, TARGET), nowhere.kernels.values())
        tracked = rich.progress.track(codes, "NVRTC", total=len(nowhere.kernels))
        found = dict(zip(nowhere.kernels, tracked, strict=True))
    kept, noted = nvrtc.kept(TARGET), CARRY / "launched.txt"
    for digest in sorted(set(noted.read_text().split())) if noted.exists() and kept is not None else ():
        if digest not in found and (code := kept.read(f"{digest}.bin")) is not None:
            found[digest] = code
    count = len(found)
    found = {"version": str(list(nvrtc.library().getVersion())).encode(), **{f"{d}.bin": c for d, c in found.items()}}
    path = CARRY / "machine_code.tar.xz"
    with tarfile.open(path, "w:xz", preset=6) as archive:
        for name, data in found.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    print(f"{path.name}: {count} kernels, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
