"""The CPU runtime: kernel providers, each optional.

| provider | runs | needs |
|---|---|---|
| `onednn` | convolutions, matrix products, where ours are slower (`processors/`) | the extra `onednn` |
| `loops` | element-wise chains with sums over rows, generated | llvmlite (extra `cpu`) |
| `rows` | operators with a formula over rows (softmax, norms and their gradients), generated | llvmlite |
| `numba` | attention, losses, pooling, gathers, transposes, recurrent cells | numba (extra `cpu`) |
| `convolution` | convolutions without oneDNN | llvmlite |
| `blas` | matrix products, by NumPy's own OpenBLAS | llvmlite |
| `products` | matrix products, by kernels of ours, where they are faster (`processors/`) | llvmlite |
| `widened` | what only has float32 kernels, on 16-bit floats between conversions | llvmlite |

Without any of them everything runs on NumPy.
"""

from ...support.plug_ins import import_all

#: providers, each in the file of its name; the most preferred first
PREFERRED = ("onednn", "loops", "rows", "numba", "convolution", "blas", "products", "widened")

_PRODUCTS = ("MatMul", "Gemm", "LinearCrossEntropy", "LinearCrossEntropyGrad")
_CONVOLUTIONS = ("Conv", "ConvGradInput", "ConvGradWeight", "ConvTranspose")
#: kernels → operators whose last bits may depend on the number of threads, in both layouts (docs/threads.md)
BITS_BY_THREADS = {
    "onednn": (*_CONVOLUTIONS, *_PRODUCTS),
    "numba": ("LinearCrossEntropy", "LinearCrossEntropyGrad", "LSTMGrad", "GRUGrad", "MatMulNBits"),
    "blas": ("MatMul", "Gemm"),
    "convolution": ("ConvGradWeight",),
    "widened": (*_CONVOLUTIONS, *_PRODUCTS, "MatMulNBits"),
}


#: how long steps in 16 bits take of float32's where no kernel multiplies them: ResNet-50 and BERT on an AMD EPYC
WIDENED_TIME = "1.05 to 1.2 times"


def slow_precision(precision: str | None) -> str:
    """Why a step in a precision takes longer than in float32 here, and by how much; "" where it does not."""
    from .device import native
    from .primitives import plans

    low = precision in ("bf16", "bf16-pure")
    if precision == "fp16":
        why = "no kernel of the processor multiplies float16"
    elif low and not native.converts_bfloat16():
        why = "this processor has no instructions for bfloat16 (AVX512-BF16)"
    elif low and plans.unavailable():
        why = f"products of bfloat16 need oneDNN: {plans.unavailable()}"
    else:
        return ""
    return f"{why}: a step takes {WIDENED_TIME} as long as in float32; see docs/precision.md"


def register_all() -> None:
    """Registers the providers that can run here."""
    import_all(f"{__name__}.providers")
