"""cuBLAS, and NCCL with one rank, of the fake CUDA (cuda_fake.py)."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from recompute.language.types import TensorType
from recompute.runtime.cuda.device import cublas, emulator
from recompute.runtime.cuda.device.kernel import Buffer, Product

#: cudaMemcpyDeviceToDevice
_ON_DEVICE = 3

# -- cuBLAS -----------------------------------------------------------------------------------------------------------

_TYPES = {number: name for name, number in cublas._DATA.items()}
#: types of the factors and of the product by how cuBLAS computes
_COMPUTE = {cublas._COMPUTE_F32: [(x, c) for x in ("f32", "f16", "bf16") for c in {x, "f32"}],
            cublas._COMPUTE_TF32: [("f32", "f32")], cublas._COMPUTE_F64: [("f64", "f64")]}  # fmt: skip
_INVALID = 7


class Blas:
    """cuBLAS's functions by name; a product is the emulator's, so that its bits are.  `cuda`: `cuda_fake.Cuda`."""

    def __init__(self, cuda: Any) -> None:
        self.cuda = cuda
        self.stream: Any = None
        self.workspace = False

    def functions(self) -> dict[str, Callable[..., int]]:
        found = {"cublasCreate_v2": self.create, "cublasSetStream_v2": self.set_stream,
                 "cublasSetWorkspace_v2": self.set_workspace, "cublasSetMathMode": lambda handle, mode: 0,
                 "cublasGemmEx_64": self.product, "cublasGemmStridedBatchedEx_64": self.products}  # fmt: skip
        return {name: self._typed(name, function) for name, function in found.items()}

    def _typed(self, name: str, function: Callable[..., int]) -> Callable[..., int]:
        """As the library's function is called: ctypes takes the arguments, or refuses them."""

        def call(*words: Any) -> int:
            for kind, word in zip(cublas._SIGNATURES[name], words, strict=True):
                kind.from_param(word)
            return function(*words)

        return call

    def create(self, handle: Any) -> int:
        handle._obj.value = 0xB1A5
        return 0

    def set_stream(self, handle: Any, stream: int) -> int:
        self.stream, self.workspace = self.cuda.streams[stream], False
        return 0

    def set_workspace(self, handle: Any, address: int, nbytes: int) -> int:
        self.workspace = self.cuda.inside(address, nbytes, pinned=False) and address % 256 == 0
        return 0

    def product(self, handle: Any, *w: Any) -> int:
        a, b, c = w[6:9], w[9:12], w[13:16]
        return self.products(handle, *w[:6], *a, 0, *b, 0, w[12], *c, 0, 1, *w[16:])

    def products(self, handle: Any, ta: int, tb: int, m: int, n: int, k: int, alpha: int, *words: Any) -> int:
        """c = alpha · op(a) · op(b) + beta · c, column-major: row-major, the operands change places."""
        a, b, beta, c, count, compute, algorithm = words[:4], words[4:8], words[8], words[9:13], *words[13:]
        assert self.stream is not None and self.workspace, "cuBLAS would allocate its workspace"
        leads = (k if ta else m, n if tb else k, m)
        if min(m, n, k, count) < 0 or any(x[2] < max(rows, 1) for x, rows in zip((a, b, c), leads, strict=True)):
            return _INVALID
        if a[1] != b[1] or (_TYPES[a[1]], _TYPES[c[1]]) not in _COMPUTE[compute] or algorithm != -1:
            return _INVALID
        factor = ctypes.c_double if compute == cublas._COMPUTE_F64 else ctypes.c_float
        columns = (m if ta else k, k if tb else n, n)
        made = []
        for (address, number, lead, stride), rows, wide in zip((a, b, c), leads, columns, strict=True):
            span = (count - 1) * stride + (wide - 1) * lead + rows if rows and wide else 0
            t = TensorType(_TYPES[number], (span,))
            assert self.cuda.inside(address, t.nbytes, pinned=False), "a product beyond an allocation"
            made.append(Buffer(address, t))
        p = Product(made[1], made[0], made[2], n, m, k, b[2], a[2], c[2], bool(tb), bool(ta),
                    factor.from_address(alpha).value, factor.from_address(beta).value, count,
                    (b[3], a[3], c[3]), tf32=compute == cublas._COMPUTE_TF32)  # fmt: skip

        def run() -> None:
            self.cuda.counts["products"] += 1
            emulator._product(p)

        self.stream.add(run)
        return 0


# -- NCCL with one rank -----------------------------------------------------------------------------------------------


class OneRank:
    """A communicator of one rank: what it sends comes back, in order."""

    def __init__(self, cuda: Any, ranks: int, ident: Any, rank: int) -> None:
        assert (ranks, rank) == (1, 0)
        self.cuda, self.sent = cuda, deque()

    def allGather(self, x: int, y: int, count: int, kind: int, stream: int) -> None:
        if x != y:
            self.cuda.copy(y, x, count * np.dtype(_NCCL[kind]).itemsize, _ON_DEVICE, stream)

    def allReduce(self, x: int, y: int, count: int, kind: int, op: int, stream: int) -> None:
        self.allGather(x, y, count, kind, stream)

    def send(self, x: int, count: int, kind: int, peer: int, stream: int) -> None:
        self.sent.append((x, count))

    def recv(self, y: int, count: int, kind: int, peer: int, stream: int) -> None:
        x, sent = self.sent.popleft()
        assert sent == count
        self.allGather(x, y, count, kind, stream)


_NCCL = {1: "u1", 7: "f4"}
