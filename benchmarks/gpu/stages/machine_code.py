"""Machine code that was compiled before goes into this machine's cache of kernels, if NVRTC's version is the same."""

from __future__ import annotations

import tarfile

import cupy  # noqa: F401  (finds the libraries)
from common import CARRY, case

from recompute.runtime.cuda.device import nvrtc

with case("machine-code", "compiled before") as found:
    found["nvrtc"] = version = str(list(nvrtc.library().getVersion()))
    kept, count = nvrtc.kept("sm_90"), 0
    assert kept is not None, "there is no folder for a cache"
    with tarfile.open(CARRY / "machine_code.tar.xz") as archive:
        for member in archive:
            data = archive.extractfile(member).read()  # type: ignore[union-attr]
            if member.name == "version":
                found["made_by"] = data.decode()
                if data.decode() != version:
                    break
                continue
            kept.write(member.name, data)
            count += kept.read(member.name) == data
    found |= {"kernels": count, "ok": count > 0}
