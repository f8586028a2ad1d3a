"""Operators of the domain com.microsoft: relative positions, mixtures of experts."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from ...language.contexts import Imported, ImportedNode, NodeWriter
from ...language.op import imports
from .basic import MS, activate


@imports("RelativePositionBias", domain=MS)
def relative_position_bias(node: ImportedNode) -> Imported:
    """(table [buckets, N], query length, key length) → [1, N, S, T]: T5's buckets of distances (Raffel et al. 2020)."""
    g, attributes = node.body(), node.attributes
    steps = int(node.need_constant(1, "query length").reshape(()))
    total = int(node.need_constant(2, "key length").reshape(()))
    if not 0 < steps * total <= 1 << 24:
        raise node.fail(f"has lengths {steps} and {total}")
    buckets = node.need_type(0).shape[0]
    apart = np.arange(total)[None] - np.arange(steps)[:, None]
    at = _bucket(apart, buckets, attributes.get("max_distance", 128), bool(attributes.get("is_bidirectional", 0)))
    rows = g.Gather(g.ins[0], g.constant(at))
    return g.results(g.Unsqueeze(g.Transpose(rows, perm=[2, 0, 1]), g.constant([0])))


def _bucket(apart: np.ndarray, buckets: int, most: int, both: bool) -> np.ndarray:
    """The bucket of each distance: one for each small one, logarithmic ones for those up to `most`."""
    bucket = np.zeros_like(apart)
    if both:
        buckets //= 2
        bucket += (apart > 0) * buckets
        distance = np.abs(apart)
    else:
        distance = -np.minimum(apart, 0)
    exact = buckets // 2
    n = buckets - exact
    # bucket exact + k begins with the first d for which (d / exact)ⁿ ≥ (most / exact)ᵏ: in integers, as the last bit
    # of a logarithm would decide where both are equal
    least = [-(-(most**k * exact**n) // exact**k) for k in range(n)]
    firsts = [exact + bisect_left(range(exact, most), power, key=lambda d: d**n) for power in least]
    far = exact - 1 + np.searchsorted(firsts, distance, side="right")
    return bucket + np.where(distance < exact, distance, far)


@imports("GatedRelativePositionBias", domain=MS)
def gated_relative_position_bias(node: ImportedNode) -> Imported:
    """(query [B, S, N·H], its bias, positions [1, N, S, S], weight [H, D], bias [D], a [1, N, 1, 1]): WavLM's gates
    (Chen et al. 2022)."""
    g, count = node.body(), node.attributes["num_heads"]
    if g.ins[6]:
        raise node.fail("has its padding removed (token_offset), which is not supported")
    batch, steps, _ = node.need_type(0).shape
    x = g.Reshape(g.Add(*g.ins[:2]), g.constant((batch, steps, count, -1)))
    x = g.Add(g.MatMul(g.Transpose(x, perm=[0, 2, 1, 3]), g.ins[3]), g.ins[4])
    gates = g.ReduceSum(g.Reshape(x, g.constant((batch, count, steps, 2, -1))), g.constant([-1]), keepdims=0)
    update, reset = g.Split(g.Sigmoid(gates), g.constant([1, 1]), axis=-1, outputs=2)
    dtype = node.need_type(0).numpy
    inner = g.Sub(g.Mul(reset, g.ins[5]), g.constant(1, dtype))
    return g.results(g.Mul(g.Add(g.Mul(update, inner), g.constant(2, dtype)), g.ins[2]))


#: activations of experts; ONNX Runtime takes the formula with tanh for gelu here
_EXPERTS = {"relu": "Relu", "gelu": "FastGelu", "identity": "", "silu": "Silu"}


@imports("MoE", domain=MS)
def mixture_of_experts(node: ImportedNode) -> Imported:
    """(x [..., D], router [rows, E], weights and biases of the experts): the `k` best experts, weighted by softmax.

    Every expert sees every row, and weights of zero leave out those that were not chosen: the same numbers and
    gradients, for E / k times the work.
    """
    g, attributes, t = node.body(), node.attributes, node.need_type(0)
    if attributes.get("use_sparse_mixer", 0) or g.ins[6] or attributes.get("swiglu_fusion", 0):
        raise node.fail("uses a sparse mixer or a third weight (SwiGLU), which is not supported")
    experts, k = node.need_type(1).shape[-1], attributes.get("k", 1)
    if not 0 < k <= experts:
        raise node.fail(f"chooses {k} of {experts} experts")
    rows = t.size // t.shape[-1]
    x = g.Reshape(g.ins[0], g.constant((1, rows, t.shape[-1])))
    kind = {"relu": "Relu", "gelu": "FastGelu", "identity": "", "silu": "Silu"}.get(
        attributes.get("activation_type", "relu")
    )
    if kind is None:
        raise node.fail(f"its activation '{attributes['activation_type']}' is not supported")
    hidden = _product(g, x, g.ins[2], g.ins[3])
    hidden = g.Mul(hidden, g.Sigmoid(hidden)) if kind == "Silu" else activate(node, g, hidden, kind, ())
    product = _product(g, hidden, g.ins[4], g.ins[5])  # [E, rows, D]
    weights = g.Unsqueeze(g.Transpose(_chosen(node, g, k, rows), perm=[1, 0]), g.constant([2]))
    y = g.ReduceSum(g.Mul(product, weights), g.constant([0]), keepdims=0)
    return g.results(g.Reshape(y, g.constant(t.shape)))


def _product(g: NodeWriter, x: str, w: str, bias: str) -> str:
    """x wᵀ + bias for each expert: w [E, out, in], bias [E, out]."""
    y = g.MatMul(x, g.Transpose(w, perm=[0, 2, 1]))
    return g.Add(y, g.Unsqueeze(bias, g.constant([1]))) if bias else y


def _chosen(node: ImportedNode, g: NodeWriter, k: int, rows: int) -> str:
    """[rows, E]: the weights of the experts that each row takes, zeros for the others."""
    router = g.Reshape(g.ins[1], g.constant((rows, -1)))
    weights = g.Softmax(router, axis=-1)
    best, at = g.TopK(weights, g.constant([k]), axis=-1, outputs=2)
    if node.attributes.get("normalize_routing_weights", 0):
        best = g.Div(best, g.ReduceSum(best, g.constant([-1]), keepdims=1))
    zeros = g.Mul(router, g.constant(0, node.need_type(1).numpy))
    return g.ScatterElements(zeros, at, best, axis=-1)
