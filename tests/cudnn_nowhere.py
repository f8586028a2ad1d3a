"""cuDNN itself without a device: it plans for an H100 that it is only told of, and launches nothing.

cuDNN 9.8 and later plan from a description of a device (its documentation, "Deviceless Ahead-of-time Compilation").
Its libraries want the driver's, which is not there: an empty one of the same name is compiled and loaded before them.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

#: what cuDNN asks of a device, and NVIDIA's figures of an H100 SXM (CUDA's device attributes)
H100 = {
    "deviceName": "NVIDIA H100 80GB HBM3", "cudaDeviceId": 0, "deviceVer": 900, "driverVer": 13000,
    "pciDeviceId": 0x2330, "multiProcessorCount": 132, "smCountOrigin": 0, "warpSize": 32,
    "maxGridSize": [2**31 - 1, 65535, 65535],
    "maxBlockSize": [1024, 1024, 64], "maxThreadsPerBlock": 1024, "maxThreadsPerSM": 2048, "maxCtasPerSM": 32,
    "regsPerBlock": 65536, "maxRegistersPerSM": 65536, "maxSharedMemoryPerBlock": 49152,
    "maxSharedMemoryPerBlockOptin": 232448, "oversizedSharedMemoryPerBlock": 0, "reservedSharedMemoryPerBlock": 1024,
    "totalGlobalMem": 85_520_809_984, "l2CacheSize": 52428800, "memoryBusWidth": 5120, "smClockRateKHz": 1980000,
    "memClockRateKHz": 2619000, "isTccDriver": 0, "supportCoopLaunch": 1,
}  # fmt: skip
#: functions of the driver that cuDNN's libraries look for: those that fail, that give a handle, and that do nothing
_FAIL = """cuCtxGetCurrent cuCtxGetLimit cuCtxPopCurrent cuCtxPushCurrent cuDeviceGet cuDeviceGetCount cuGetErrorName
cuGetErrorString cuLaunchCooperativeKernel cuLaunchKernel cuLaunchKernelEx cuLinkAddData cuLinkComplete cuLinkCreate
cuLinkDestroy cuOccupancyMaxPotentialClusterSize cuStreamGetCtx"""
_GIVE = """cuKernelGetFunction cuLibraryGetKernel cuLibraryLoadData cuLibraryLoadFromFile cuModuleGetFunction
cuModuleLoadData"""
_NOTHING = "cuKernelSetAttribute cuLibraryUnload cuModuleUnload cuTensorMapEncodeIm2col cuTensorMapEncodeTiled"
_DRIVER = "".join(
    [
        *(f"int {n}(void) {{ return 100; }}\n" for n in _FAIL.split()),
        *(f"int {n}(void** out) {{ *out = (void*)8; return 0; }}\n" for n in _GIVE.split()),
        *(f"int {n}(void) {{ return 0; }}\n" for n in _NOTHING.split()),
        "int cuDriverGetVersion(int* out) { *out = 13000; return 0; }\n",
        "int cuKernelGetAttribute(int* out) { *out = 0; return 0; }\n",
    ]
)


class Tensor:
    """What stands in for a tensor of a graph where tests compute in cuDNN's place."""

    def __init__(self, dim: Any = None, stride: Any = None) -> None:
        self.dim, self.stride = dim, stride

    def get_uid(self) -> int:
        return id(self)

    def set_output(self, yes: bool) -> Any:
        return self

    def set_dim(self, dim: list[int]) -> Any:
        self.dim = dim
        return self

    def set_stride(self, stride: list[int]) -> Any:
        self.stride = stride
        return self


@functools.cache
def _libraries() -> list[Path | None]:
    import nvidia

    names = ("libcudart.so.*", "libnvrtc-builtins.so.*", "libnvrtc.so.*", "libcublasLt.so.*", "libcudnn.so.9")
    there = [Path(p) for p in nvidia.__path__]
    return [next((lib for f in there for lib in sorted(f.glob(f"*/lib/{name}"))), None) for name in names]


def missing() -> str:
    """What is not installed of cuDNN; "" where all of it is."""
    if importlib.util.find_spec("cudnn") is None:
        return "nvidia-cudnn-frontend is not installed"
    if None in _libraries():
        return "cuDNN's libraries are not there: pip install nvidia-cudnn-cu13 nvidia-cublas nvidia-cuda-runtime"
    return "" if shutil.which("gcc") else "no C compiler"


def _load() -> None:
    with tempfile.TemporaryDirectory() as folder:
        stub = Path(folder, "libcuda.so.1")
        command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-x", "c", "-o", str(stub), "-"]
        subprocess.run(command, input=_DRIVER, text=True, check=True)
        for library in (stub, *_libraries()):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


@functools.cache
def properties() -> Any:
    """cuDNN's description of an H100."""
    import cudnn

    return cudnn.create_device_properties(json.dumps(H100))


def install() -> None:
    """The provider plans for an H100.  For a process of its own: nothing of it is undone."""
    if why := missing():
        raise RuntimeError(why)
    _load()
    from recompute.language.kernels import register
    from recompute.runtime.cuda.device import cudnn as ours
    from recompute.runtime.cuda.providers.cudnn import Cudnn

    graphs = ours._graphs

    def nowhere(package: Any) -> Any:
        def begun(handle: int, **given: Any) -> Any:
            return graphs(package)(device_property=properties(), sm_version=90, sm_count=132, **given)

        return begun

    ours._graphs = nowhere
    ours._handle = lambda device: 0  # type: ignore[assignment]
    ours.current_device = lambda: 0
    register(Cudnn())
    register(Cudnn(tf32=True))
