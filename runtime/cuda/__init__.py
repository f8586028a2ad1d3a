"""Kernels for CUDA devices: providers, and the devices that run them.

| provider | runs | needs |
|---|---|---|
| `cudnn` | convolutions, attention | nvidia-cudnn-frontend and a GPU, probed when a place is opened |
| `cublas` | matrix products | CuPy's cuBLAS, on a GPU |
| `cuda` | everything else, by kernels of our own | NVRTC |

Only the devices need CuPy and a GPU: programs are lowered, planned and priced for CUDA on any machine.
"""

import importlib
import importlib.util

#: provider → the module that registers it; the most preferred first
MODULES = {"cudnn": "cudnn", "cublas": "products", "cuda": "own_kernels"}
#: the same for those that may round float32 factors to TF32: put before the others where a program allows it
TF32 = {"cudnn_tf32": "cudnn", "cublas_tf32": "products", "cuda_tf32": "rounded"}


def register_all() -> None:
    """Registers the providers that are there."""
    for module in (*MODULES.values(), *TF32.values()):
        if importlib.util.find_spec(f"{__name__}.{module}") is not None:
            importlib.import_module(f"{__name__}.{module}")
