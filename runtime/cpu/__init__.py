"""Kernels for the processor: providers, each optional.

| provider | runs | needs |
|---|---|---|
| `onednn` | convolutions, matrix products | the extra `onednn` |
| `loops` | element-wise chains with sums over rows, generated | llvmlite (extra `cpu`) |
| `numba` | softmax, norms, losses, pooling, gathers, transposes | numba (extra `cpu`) |
| `convolution` | convolutions without oneDNN | llvmlite |
| `blas` | matrix products, by NumPy's own OpenBLAS | llvmlite |

Without any of them everything runs on NumPy.
"""

import importlib
import importlib.util

#: provider → the module that registers it where it can run; the most preferred first
MODULES = {
    "onednn": "onednn",
    "loops": "loops",
    "numba": "families",
    "convolution": "convolution",
    "blas": "blas",
}


#: kernels → operators whose last bits may depend on the number of threads, in both layouts (docs/threads.md)
BITS_BY_THREADS = {
    "onednn": ("Conv", "ConvGradInput", "ConvGradWeight", "ConvTranspose", "MatMul", "Gemm"),
    "blas": ("MatMul", "Gemm"),
}


def register_all() -> None:
    """Registers the providers that can run here."""
    for module in MODULES.values():
        if importlib.util.find_spec(f"{__name__}.{module}") is not None:
            importlib.import_module(f"{__name__}.{module}")
