"""What is on the machine: versions, tools, clocks."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys

from common import FAKE, case, emit

PACKAGES = ("cupy-cuda13x", "cupy-cuda12x", "numpy", "onnx", "onnxruntime", "numba", "ml-dtypes", "safetensors", "rich",
            "torch", "triton", "nvidia-cudnn-cu13", "nvidia-cudnn-frontend", "nvidia-cublas", "nvidia-cuda-nvrtc",
            "nvidia-nccl-cu13", "pytest", "pytest-xdist", "pytest-timeout", "hypothesis")  # fmt: skip
TOOLS = ("nvcc", "ncu", "compute-sanitizer", "g++", "cuobjdump", "mpiexec", "nvidia-smi")
FIELDS = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,memory.total,ecc.mode.current"


def version(name: str) -> str | None:
    """Of a package; None where it is not there."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


emit("facts", "versions", python=platform.python_version(), executable=sys.executable, cores=os.cpu_count(),
     packages={n: version(n) for n in PACKAGES})  # fmt: skip
emit("facts", "tools", **{n: shutil.which(n) or "" for n in TOOLS})
if not FAKE:
    with case("facts", "device") as found:
        query = ["nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader"]
        found["out"] = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
