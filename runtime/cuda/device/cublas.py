"""cuBLAS through its C functions: a handle on one stream, with a separate workspace.

CuPy's binding sets the stream before every call: that gives cuBLAS its own workspace back (`cublasSetStream`), and
CuPy refuses it while a graph is captured.  So CuPy only loads the library.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

from ....errors import JobError, MissingExtraError
from .kernel import Product

#: cudaDataType
_DATA = {"f32": 0, "f64": 1, "f16": 2, "bf16": 14}
#: cublasComputeType_t
_COMPUTE_F32, _COMPUTE_TF32, _COMPUTE_F64 = 68, 77, 70
#: cublasMath_t: parts of one product are added up in the type that is computed in, not in 16-bit floats
_NO_REDUCED_PRECISION_REDUCTION = 16
#: bytes that cuBLAS may work in, what its manual recommends for Hopper
WORKSPACE = 32 << 20
#: products of one call, at most: some of its kernels take the batch as a grid's z
_BATCH = 65535
_P, _I, _L = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
_SIGNATURES: dict[str, Sequence[Any]] = {
    "cublasCreate_v2": [ctypes.POINTER(_P)],
    "cublasSetStream_v2": [_P, _P],
    "cublasSetWorkspace_v2": [_P, _P, ctypes.c_size_t],
    "cublasSetMathMode": [_P, _I],
    "cublasGemmEx_64": [_P, _I, _I, _L, _L, _L, _P, _P, _I, _L, _P, _I, _L, _P, _P, _I, _L, _I, _I],
    "cublasGemmStridedBatchedEx_64": [
        _P, _I, _I, _L, _L, _L, _P, _P, _I, _L, _L, _P, _I, _L, _L, _P, _P, _I, _L, _L, _L, _I, _I],
}  # fmt: skip


@functools.cache
def library() -> dict[str, Any]:
    """Its functions: symbols are looked up in CuPy's extension module, and so in what that depends on.

    MissingExtraError where it cannot be loaded.
    """
    try:
        from cupy_backends.cuda.libs import cublas

        loaded = ctypes.CDLL(str(cublas.__file__))
    except Exception as e:  # whatever a missing library does
        raise MissingExtraError(
            f"cuBLAS cannot be loaded ({e}): pip install 'onnx-recompute[cuda13]' (CUDA 12: '[cuda12]') installs it"
        ) from None
    handles = {}
    for name, types in _SIGNATURES.items():
        try:
            handles[name] = getattr(loaded, name)
        except AttributeError:
            raise JobError(f"cuBLAS has no {name}: it is older than CUDA 12") from None
        handles[name].argtypes, handles[name].restype = types, _I
    return handles


class Cublas:
    """A handle on a stream; `workspace`: the address of `WORKSPACE` bytes that are its alone."""

    def __init__(self, stream: int, workspace: int) -> None:
        self.handle = _P()
        self.call("cublasCreate_v2", ctypes.byref(self.handle))
        self.call("cublasSetStream_v2", self.handle, stream)
        self.call("cublasSetWorkspace_v2", self.handle, workspace, WORKSPACE)  # behind the stream, which resets it
        self.call("cublasSetMathMode", self.handle, _NO_REDUCED_PRECISION_REDUCTION)

    def call(self, name: str, *words: Any) -> None:
        """One of its functions.  JobError where it fails."""
        status = library()[name](*words)
        if status:
            raise JobError(f"{name} failed with status {status}")

    def prepare(self, p: Product) -> Callable[[], None]:
        """A function that runs a product on the handle's stream."""
        parts = [arguments(p, first) for first in range(0, p.batch, _BATCH)] if p.m and p.n else []

        def run() -> None:
            for name, words, _ in parts:
                self.call(name, self.handle, *words)

        return run


def arguments(p: Product, first: int = 0) -> tuple[str, tuple[Any, ...], Any]:
    """A function's name, its arguments behind the handle, and what must live as long as they do.

    The products from number `first` on.  Row-major c = a · b is column-major c' = b' · a'; the factors alpha and beta
    are read on the host, when the call is made or captured.
    """
    wide = ctypes.c_double if p.a.dtype == "f64" else ctypes.c_float
    compute = _COMPUTE_F64 if p.a.dtype == "f64" else _COMPUTE_TF32 if p.tf32 else _COMPUTE_F32
    factors = wide(p.alpha), wide(p.beta)
    alpha, beta = map(ctypes.addressof, factors)
    count = min(p.batch - first, _BATCH)
    operands = []
    for x, lead, stride in zip((p.b, p.a, p.c), (p.ldb, p.lda, p.ldc), (p.strides[i] for i in (1, 0, 2)), strict=True):
        address = x.address + first * stride * x.type.numpy.itemsize
        operands.append((address, _DATA[x.dtype], lead, *((stride,) if p.batch > 1 else ())))
    b, a, c = operands
    head = (int(p.tb), int(p.ta), p.n, p.m, p.k)
    tail = (compute, -1)  # the algorithm is cuBLAS's choice
    if p.batch == 1:
        return "cublasGemmEx_64", (*head, alpha, *b, *a, beta, *c, *tail), factors
    return "cublasGemmStridedBatchedEx_64", (*head, alpha, *b, *a, beta, *c, count, *tail), factors
