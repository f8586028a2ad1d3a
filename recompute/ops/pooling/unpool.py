"""MaxUnpool: a max pool undone, with what was not the largest as zeros."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...language.builder import Builder
from ...language.op import Imported, ImportedNode, imports
from ...language.types import Value
from ..shape.reshape import reshape
from ..window import full
from .windows import MaxPool, MaxPoolGrad


@imports("MaxUnpool")
def max_unpool(node: ImportedNode) -> Imported:
    """Each element at its index.

    Where the indices are those of a MaxPool over the result's shape, its window numbers say the same in one byte
    instead of eight: MaxPoolGrad puts the elements there.
    """
    x, indices = node.need(0), node.need(1)
    inferred = _inferred_shape(node, x.shape)
    shape = inferred if node.type(2) is None else tuple(int(d) for d in node.need_constant(2, "output_shape"))
    pool = _pool_of(node.builder, indices)
    if pool is not None and pool[1].shape == shape and pool[2].type == x.type:
        return node.emit(MaxPoolGrad(shape=shape[2:], **pool[0].options()), pool[3], x)
    if shape != inferred:
        raise node.fail(
            f"output_shape {list(shape)} is not the inferred {list(inferred)}: whose the indices are is not said"
        )
    if indices.shape != x.shape:
        raise node.fail(f"the indices ({indices.type}) must have the shape of {x.type}")
    b, size = node.builder, math.prod(shape)
    zeros = b.fill(0.0, x.type.with_shape((size,)))
    flat = b.ScatterElements(zeros, reshape(b, indices, (x.size,)), reshape(b, x, (x.size,)), axis=0)
    return reshape(b, flat, shape)


def _pool_of(b: Builder, indices: Value) -> tuple[MaxPool, Value, Value, Value] | None:
    """The MaxPool that makes the indices, if it also gives window numbers and its windows do not overlap.

    With its input, its result and the numbers.
    """
    for o in reversed(b.operators):
        if isinstance(o.op, MaxPool) and len(o.outputs) > 2 and indices in o.outputs[1:2]:
            (x,), (y, _, numbers) = o.inputs, o.outputs
            kernel = o.op.kernel_shape
            dilations, strides = full(o.op.dilations, len(kernel), 1), full(o.op.strides, len(kernel), 1)
            alone = all((k - 1) * d < s for k, d, s in zip(kernel, dilations, strides, strict=True))
            return (o.op, x, y, numbers) if alone and x and y and numbers else None
    return None


def _inferred_shape(node: ImportedNode, shape: Sequence[int]) -> tuple[int, ...]:
    """(size - 1) · stride - pads + kernel along each spatial axis."""
    kernel, n = node.attributes["kernel_shape"], len(shape) - 2
    if n < 1 or len(kernel) != n:
        raise node.fail(f"kernel_shape {list(kernel)} does not fit {len(shape)} dimensions")
    strides = full(node.attributes.get("strides", ()), n, 1)
    pads = full(node.attributes.get("pads", ()), 2 * n, 0)
    sizes = [(shape[2 + i] - 1) * strides[i] - pads[i] - pads[n + i] + kernel[i] for i in range(n)]
    return (*shape[:2], *sizes)
