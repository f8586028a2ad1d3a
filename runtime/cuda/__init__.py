"""The CUDA runtime: kernel providers, and devices.

| provider | runs | needs |
|---|---|---|
| `cudnn` | convolutions, attention | nvidia-cudnn-frontend and a GPU, probed when a place is opened |
| `cublas` | matrix products | CuPy's cuBLAS, on a GPU |
| `cuda` | everything else, by kernels of our own | NVRTC |

Only the devices need CuPy and a GPU: programs are lowered, planned and priced for CUDA on any machine.
"""

from ...support.plug_ins import import_all

#: providers, each in the file of its name; the most preferred first
PREFERRED = ("cudnn", "cublas", "cuda")
#: those that may round float32 factors to TF32: put before the others where a program allows it
TF32 = ("cudnn_tf32", "cublas_tf32", "cuda_tf32")


def register_all() -> None:
    """Registers the providers that are there."""
    import_all(f"{__name__}.providers")
