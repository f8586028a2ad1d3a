"""Attention and its gradient by cuDNN, in 16-bit floats: without dropout and soft cap, with all keys or those up to it.

A bias is added where it has no gradient, as masks have none.  Of a query whose bias is -inf for all keys cuDNN's result
is not known to be 0, as ours is: a launch behind it writes zeros where the log-sum-exp is NaN or -inf, and the
gradient is given 0 for such a log-sum-exp, so that all weights are 0.

cuDNN (its documentation, "Attention") computes the scores' log-sum-exp as ours do, and its gradient without atomic
additions where it is asked to: the same bits at every run.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ....errors import JobError
from ....language.element import Expr, where
from ....language.text import show_operator
from ....language.types import TensorType, need
from ....ops.attention.heads_last import plain_operator
from ..device import cudnn
from ..device.kernel import C_TYPES, Buffer, Call, Kernel, Library
from ..families import Buffers
from .loops import computed

if TYPE_CHECKING:
    from ....language.ir import Operator

#: bytes that a plan may work in: the gradient has sums of dq in float32 for several parts of the keys
WORKSPACE = 512 << 20
#: attributes that count here; the others must be as in attention without them (numbers of dropout, where there is none)
_KNOWN = ("scale", "first", "last", "seed", "rows", "at")
_FORWARD, _GRADIENT = (
    ("TiledAttention", "HeadsLastTiledAttention"),
    ("TiledAttentionGrad", "HeadsLastTiledAttentionGrad"),
)


@dataclass(frozen=True)
class Heads:
    """The shape: `heads` of queries for each of `shared` heads of keys and values, `t` queries, `s` keys.

    `last`: the tensors that are [batch, queries or keys, heads, size].
    """

    batch: int
    heads: int
    shared: int
    t: int
    s: int
    d: int
    e: int
    causal: bool
    scale: float
    dtype: str
    bias: tuple[int, ...] = ()
    of_bias: str = ""
    last: tuple[str, ...] = ()


def heads_of(op: Operator) -> Heads | None:
    """The operator in cuDNN's words; None where it does something else."""
    op, beside = plain_operator(op)
    rule: Any = op.op
    q, k, v, bias = (None if x is None else x.type for x in (*op.inputs, None)[:4])
    assert q is not None and k is not None and v is not None
    others = {n: x for n, x in rule.attributes().items() if n not in _KNOWN}
    if any(others.values()) or q.dtype not in ("f16", "bf16") or rule.first is not None:
        return None
    if rule.last not in (None, 0) or 0 in (q.size, k.size, v.size) or q.shape[-1] % 8 or v.shape[-1] % 8:
        return None
    lead, shared = q.shape[:-2], k.shape[:-2]
    same = next((i for i, (m, n) in enumerate(zip(lead, shared, strict=True)) if m != n), len(lead))
    if any(n != 1 for n in shared[same:]):  # the heads that share keys must follow each other
        return None
    batch = lead[0] if same and len(lead) > 1 else 1
    sizes = math.prod(lead) // batch, math.prod(shared) // batch
    added: tuple[tuple[int, ...], str] = ((), "")
    if bias is not None:
        shape = (1,) * (len(q.shape) - len(bias.shape)) + bias.shape
        if len(shape) != 4 or batch != lead[0] or shape[3] != k.shape[-2] or bias.dtype not in cudnn.FLOATS:
            return None
        added = (shape, bias.dtype)
    words = (q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1])
    if beside and (len(lead) != 2 or batch != lead[0]):
        return None
    return Heads(batch, *sizes, *words, rule.last == 0, rule.scale, q.dtype, *added, tuple(beside))


@functools.lru_cache(maxsize=1024)
def plan(h: Heads, device: int, *, gradient: bool) -> Any:
    """cuDNN's plan, or why there is none (str).

    Tensors of the forward pass: q, k, v, y and the log-sum-exp; of the gradient: q, k, v, y, dy, the log-sum-exp, dq,
    dk, dv.  The bias stands behind v.
    """
    try:
        graph = cudnn.begun("attention", h.dtype, device)
        tensors = (_backward if gradient else _forward)(graph, h)
        return cudnn.planned(graph, tensors, device, (), WORKSPACE)
    except Exception as e:  # cuDNN says in many ways that it cannot
        return f"{type(e).__name__}: {e}"


def _strides(dim: Sequence[int], *, last: bool = False) -> list[int]:
    """Strides in the order of a tensor's axes; `last`: its second and third axes are swapped in memory."""
    steps = [math.prod(dim[i + 1 :]) for i in range(len(dim))]
    return [steps[0], dim[3], dim[1] * dim[3], 1] if last else steps


class _Tensors:
    """A graph's tensors."""

    def __init__(self, graph: Any, h: Heads) -> None:
        self.graph, self.h = graph, h
        of_q, of_k = (h.batch, h.heads, h.t), (h.batch, h.shared, h.s)
        self.sizes = {"q": (*of_q, h.d), "k": (*of_k, h.d), "v": (*of_k, h.e), "y": (*of_q, h.e), "lse": (*of_q, 1)}
        self.sizes |= {f"d{n}": self.sizes[n] for n in "qkvy"}

    def _layout(self, name: str) -> tuple[list[int], list[int], str]:
        dim = self.sizes[name]
        dtype = "f32" if name == "lse" else self.h.dtype
        return list(dim), _strides(dim, last=name in self.h.last), dtype

    def given(self, name: str) -> Any:
        """One that the graph reads."""
        dim, stride, dtype = self._layout(name)
        return _aligned(self.graph.tensor(name=name, dim=dim, stride=stride, data_type=cudnn.kind(dtype)), dtype)

    def made(self, name: str, tensor: Any) -> Any:
        """A result with its layout."""
        dim, stride, dtype = self._layout(name)
        tensor.set_output(True).set_dim(dim).set_stride(stride)
        tensor.set_data_type(cudnn.kind(dtype))
        return _aligned(tensor, dtype)

    def bias(self) -> dict[str, Any]:
        """The bias as an option; a part of one may begin at any element."""
        h = self.h
        if not h.bias:
            return {}
        kind = cudnn.kind(h.of_bias)
        tensor = self.graph.tensor(name="bias", dim=list(h.bias), stride=_strides(h.bias), data_type=kind)
        tensor.set_alignment(4 if h.of_bias == "f32" else 2)
        return {"bias": tensor}


def _aligned(tensor: Any, dtype: str) -> Any:
    """With what is known of its address: a part of a value begins at whole heads, of the log-sum-exp at any query."""
    tensor.set_alignment(4 if dtype == "f32" else 16)
    return tensor


def _forward(graph: Any, h: Heads) -> list[Any]:
    tensors = _Tensors(graph, h)
    q, k, v = map(tensors.given, "qkv")
    bias = tensors.bias()
    options = {"attn_scale": h.scale, "use_causal_mask": h.causal, "name": "attention", **bias}
    try:
        y, lse = graph.sdpa(q=q, k=k, v=v, generate_stats=True, **options)
    except TypeError:  # frontends before 1.13
        y, lse = graph.sdpa(q=q, k=k, v=v, is_inference=False, **options)
    return [q, k, v, *bias.values(), tensors.made("y", y), tensors.made("lse", lse)]


def _backward(graph: Any, h: Heads) -> list[Any]:
    tensors = _Tensors(graph, h)
    q, k, v, y, dy, lse = map(tensors.given, ("q", "k", "v", "y", "dy", "lse"))
    bias = tensors.bias()
    options = {"attn_scale": h.scale, "use_causal_mask": h.causal, "use_deterministic_algorithm": True, **bias}
    outputs = graph.sdpa_backward(q=q, k=k, v=v, o=y, dO=dy, stats=lse, name="attention", **options)
    results = [tensors.made(n, t) for n, t in zip(("dq", "dk", "dv"), outputs, strict=True)]
    return [q, k, v, *bias.values(), y, dy, lse, *results]


@functools.cache
def _unseen(dtype: str) -> Kernel:
    """y = 0 and lse = -inf for queries whose lse is NaN or -inf; `heads` matrices of y are side by side."""
    body = """    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= rows || lse[i] > -infinity<float>()) return;
    lse[i] = -infinity<float>();
    const long long matrix = i / t, row = (matrix / heads * t + i % t) * heads + matrix % heads;
    for (int k = 0; k < n; k++) y[row * n + k] = {};"""
    parameters = f"{C_TYPES[dtype]}* y, float* lse, long long rows, int t, int n, int heads"
    return Kernel(f"attention_unseen_{dtype}", parameters, body)


def _finite(lse: Expr) -> tuple[Expr, ...]:
    """lse, and 0 where that is NaN or -inf."""
    return (where(lse > -math.inf, lse, 0.0),)


class Attention:
    """TiledAttention, TiledAttentionGrad and their forms with heads last, where cuDNN has a plan."""

    def knows(self, op: Operator) -> bool:
        """Whether it is one of them."""
        return op.op.name in (*_FORWARD, *_GRADIENT)

    def _plan(self, op: Operator) -> Any:
        """The plan, or None."""
        h, gradient = heads_of(op), op.op.name in _GRADIENT
        if h is None or (gradient and any(v is None for v in (*op.inputs[4:7], *op.outputs[:3]))):
            return None
        if any(v is not None for v in op.outputs[3:]):  # the bias's gradient
            return None
        chosen = plan(h, cudnn.current_device(), gradient=gradient)
        return None if isinstance(chosen, str) else chosen

    def accepts(self, op: Operator) -> bool:
        """Whether cuDNN has a plan, for operands that begin at multiples of 16 bytes, as values do."""
        return self._plan(op) is not None

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """The plan's workspace; the log-sum-exp where nobody wants it, as other plans have other bits, or where a bias
        may hide all keys of a query from its gradient."""
        q: Any = op.inputs[0]
        needed = _bias(op) is not None if op.op.name in _GRADIENT else not _wants_lse(op.outputs)
        lse = (TensorType("f32", (q.size // q.shape[-1],)),) if needed else ()
        return (TensorType("u8", (self._plan(op).workspace,)), *lse)

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        """The plan, and launches for queries that see no key.

        JobError for an operand that begins between the multiples of 16 bytes.
        """
        chosen, bias = self._plan(op), ins[3] if len(ins) > 3 else None
        before: list[Call] = []
        behind: list[Call] = []
        if op.op.name in _GRADIENT:
            y, lse, dy = ins[4:7]
            if bias is not None:
                shaped = need(lse).reshape(-1)
                before, lse = computed(_finite, "f32", [shaped], [scratch[1]]), scratch[1]
            wanted = (*ins[:4], y, dy, lse, *outs[:3])
        else:
            y, lse = outs[0], outs[1] if _wants_lse(outs) else scratch[1]
            wanted = (*ins[:4], y, lse)
            if bias is not None and y is not None and lse is not None:
                plain, beside = plain_operator(op)
                sizes = (lse.size, *plain.outputs[0].shape[-2:], beside.get("y", 1))  # type: ignore[union-attr]
                behind = [_unseen(y.dtype)(lse.size, y, lse, *sizes)]
        if any(b.address % 16 for b in wanted if b is not None and b is not bias and b.dtype != "f32"):
            raise JobError(
                "cuDNN's attention needs operands at multiples of 16 bytes: exclude cuDNN (--providers) for\n"
                f"    {show_operator(op)}"
            )
        addresses = tuple(b.address for b in wanted if b is not None)
        run = functools.partial(chosen.run, addresses, scratch[0].address)
        return [*before, Library(f"cudnn {op.op.name}", run, (chosen,)), *behind]


def _bias(op: Operator) -> Any:
    return op.inputs[3] if len(op.inputs) > 3 else None


def _wants_lse(outs: Sequence[Any]) -> bool:
    return len(outs) > 1 and outs[1] is not None
