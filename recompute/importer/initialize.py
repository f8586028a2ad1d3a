"""Seeded initialisation of weights."""

from __future__ import annotations

import math
import zlib

import numpy as np

from ..errors import ModelError, UsageError
from ..language.draws import normal, uniform
from ..language.program import Program


def initialise(program: Program, scheme: str, seed: int = 0, *, max_bytes: int | None = None) -> None:
    """Initialises every parameter randomly.

    Matrices and convolution kernels: `"he"` is normal with variance 2 / fan_in (He et al. 2015), `"glorot"` uniform
    with variance 2 / (fan_in + fan_out) (Glorot & Bengio 2010).  Vectors: scales are 1, others 0.
    The numbers of a parameter depend only on the seed and its name.  UsageError for another scheme, ModelError if the
    parameters take more than `max_bytes`.
    """
    if scheme not in ("he", "glorot"):
        raise UsageError(f"init must be 'he' or 'glorot', not '{scheme}'")
    total = sum(v.nbytes for v in program.block.parameters)
    if max_bytes is not None and total > max_bytes:
        raise ModelError(f"the parameters take {total:,} bytes, the limit is {max_bytes:,} (max_bytes= or --max-bytes)")
    scales = _scales(program)
    for v in program.block.parameters:
        if v.ndim >= 2:
            array = _draw(v.shape, scheme, np.random.Generator(np.random.Philox([seed, zlib.crc32(v.name.encode())])))
        else:
            array = np.full(v.shape, 1.0 if v.name in scales else 0.0)
        program.data[v.name] = array.astype(v.type.numpy)
    for v in program.block.buffers:
        if v.type.is_float and v.name in _variances(program):
            program.data[v.name] = np.ones(v.shape, v.type.numpy)


def _draw(shape: tuple[int, ...], scheme: str, g: np.random.Generator) -> np.ndarray:
    receptive = math.prod(shape[2:])
    # convolution kernels are [out, in, ...]
    fan_in, fan_out = max(shape[1] * receptive, 1), max(shape[0] * receptive, 1)
    if scheme == "he":
        return math.sqrt(2.0 / fan_in) * normal(g, shape)
    return uniform(g, math.sqrt(6.0 / (fan_in + fan_out)), shape)


def _scales(program: Program) -> set[str]:
    """Parameters that are scales: of a normalisation, or a factor of a product (perhaps reshaped)."""
    scales: set[str] = set()
    source: dict[str, str] = {}
    for op in program.block.operators:
        inputs = [source.get(v.name, v.name) for v in op.reads()]
        if op.op.name in ("Reshape", "Expand"):
            source.update((v.name, inputs[0]) for v in op.writes())
        elif op.op.name == "Mul":
            scales.update(inputs)
        elif "Norm" in op.op.name and len(inputs) > 1:
            scales.add(inputs[1])
    return scales


def _variances(program: Program) -> set[str]:
    """Buffers with a running or given variance, which must not be 0, as normalisations divide by it."""
    variances = set()
    for op in program.block.operators:
        if op.op.name == "BatchNormalization" and len(op.inputs) > 4 and op.inputs[4] is not None:
            variances.add(op.inputs[4].name)
    return variances
