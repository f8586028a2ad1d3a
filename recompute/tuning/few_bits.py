"""Weights in few bits (com.microsoft's MatMulNBits, MatMulBnb4, GatherBlockQuantized): contents, and others in their
place."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx

from ..errors import ModelError, TypeRuleError, UsageError
from ..language.types import TensorType, dtype_from_onnx, need
from ..ops.linear.nbits import TABLES, DequantizeNBits
from .graph import Graph

#: operators → the input that is the codes; the others are two and three behind the first and the second
CODES = {"MatMulNBits": 1, "MatMulBnb4": 1, "GatherBlockQuantized": 0}
DOMAIN = "com.microsoft"


@dataclass(frozen=True)
class FewBits:
    """A weight [N, K] in few bits: names of its codes, scales and zero points ("": none), and how it is packed."""

    codes: str
    scales: str
    zeros: str
    shape: tuple[int, int]
    bits: int
    block_size: int
    onnx_type: int
    table: str = ""

    @property
    def rule(self) -> DequantizeNBits:
        """The operator that dequantises it."""
        return DequantizeNBits(K=self.shape[1], bits=self.bits, block_size=self.block_size, table=self.table)


def few_bits(model: Graph) -> dict[str, FewBits]:
    """The weights in few bits of a graph, by the names of their codes.

    Tables that are unpacked when they are loaded are none.  ModelError where options and sizes do not fit.
    """
    weights = {}
    for node in model.nodes:
        if node.domain != DOMAIN or node.op_type not in CODES:
            continue
        attributes = {a.name: a.i for a in node.attribute}
        at = CODES[node.op_type]
        codes, scales, zero = (*node.input, "", "")[at], (*node.input, "", "", "")[2], (*node.input, *[""] * 4)[3]
        if codes not in model.tensors or scales not in model.tensors:
            continue
        t, bits, size = model.tensors[codes], attributes.get("bits", 4), attributes.get("block_size", 32 if at else 128)
        if t.data_type != onnx.TensorProto.UINT8 or not (at or _in_rows(t, attributes, bits, size)):
            continue
        shape = (attributes.get("N", 0), attributes.get("K", 0)) if at else (t.dims[0], t.dims[1] * 8 // bits)
        table = "" if node.op_type != "MatMulBnb4" else "nf4" if attributes.get("quant_type", 0) else "fp4"
        weights[codes] = w = FewBits(codes, scales, zero, shape, bits, size, model.tensors[scales].data_type, table)
        types = [_type(model.tensors[n]) if n in model.tensors else None for n in (codes, scales, zero)]
        try:
            if shape[0] < 1:
                raise w.rule.fail(f"N={shape[0]} is no number of rows", *types)
            w.rule.check(need(types[0]), need(types[1]), types[2], shape[0])
        except TypeRuleError as e:
            raise ModelError(f"the weight '{codes}' of {node.op_type} '{node.name}': {e}") from None
    return weights


def _in_rows(t: onnx.TensorProto, attributes: dict[str, int], bits: int, size: int) -> bool:
    """Whether a table stays packed when it is loaded: whole blocks along rows, which are gathered."""
    if len(t.dims) != 2 or attributes.get("gather_axis", 0) % 2 or attributes.get("quantize_axis", 1) % 2 != 1:
        return False
    return bits in (2, 4, 8) and size >= 16 and t.dims[1] * 8 // bits % size == 0


def _type(t: onnx.TensorProto) -> TensorType:
    """ModelError for elements of another type than tensors have."""
    name = dtype_from_onnx(t.data_type)
    if name is None:
        raise ModelError(f"tensor '{t.name}' has elements of ONNX type {t.data_type}, which is not supported")
    return TensorType(name, tuple(t.dims))


def whole(model: Graph, w: FewBits) -> np.ndarray:
    """The weight's numbers [N, K].  UsageError where its parts are not in the model."""
    parts = _parts(model, w)
    rule, out = w.rule, np.empty(w.shape, np.float32 if parts[1].itemsize < 4 else parts[1].dtype)
    types = tuple(None if a is None else TensorType.of(a) for a in parts)
    room = [np.empty(t.shape, t.numpy) for t in rule.scratch(types, (TensorType.of(out),))]
    rule.compute(parts, [out], room)
    return out


def _parts(model: Graph, w: FewBits) -> list[np.ndarray]:
    """Codes, scales and, where there are some, zero points, as matrices of N rows."""
    parts = []
    for name in (w.codes, w.scales, w.zeros):
        array = model.constant(name) if name else None
        if array is None and name:
            raise UsageError(f"the contents of '{name}' are not in the model")
        if array is not None:
            parts.append(array.reshape(w.shape[0], -1))
    return parts


def rounded(model: Graph, w: FewBits, wanted: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Other numbers [N, K] in the form of a weight: its tensors by name, and the numbers that they hold.

    Each block gets the scale and zero point that it had, or those of its new range, whichever is closer.
    """
    parts, (rows, columns) = _parts(model, w), w.shape
    blocks, top = w.rule.blocks, (1 << w.bits) - 1
    filled = np.zeros((rows, blocks * w.block_size))
    filled[:, :columns] = wanted
    x = filled.reshape(rows, blocks, w.block_size)
    scale = parts[1].astype(np.float64)[..., None]
    zero = np.zeros_like(scale) if w.table else _own_zeros(w, parts[2:], blocks)
    tries = [(scale, zero), _of_range(x, w, top, parts[2].dtype if w.zeros else None)]
    held, error = [], []
    for s, z in tries:
        s = s.astype(parts[1].dtype).astype(np.float64)
        steps = x / np.where(s == 0, 1, s)
        codes = _nearest(steps, w.table, _unpacked(parts[0], w)) if w.table else np.rint(steps + z).clip(0, top)
        numbers = TABLES[w.table][codes].astype(np.float64) if w.table else codes - z
        held.append((codes, s, np.broadcast_to(z, s.shape), numbers))
        error.append(((numbers * s - x) ** 2).sum(axis=-1, keepdims=True))
    new = error[1] < error[0]
    codes, scale, zero, numbers = (np.where(new, b, a) for a, b in zip(*held, strict=True))
    arrays = {w.codes: _packed(codes.reshape(rows, -1), w.rule.places), w.scales: scale.astype(parts[1].dtype)}
    if w.zeros:
        kind = parts[2].dtype
        arrays[w.zeros] = _packed(zero[..., 0], w.rule.places) if kind == np.uint8 else zero.astype(kind)
    shaped = {n: a.reshape(tuple(model.tensors[n].dims)) for n, a in arrays.items()}
    return shaped, (numbers * scale).reshape(rows, -1)[:, :columns]


def _own_zeros(w: FewBits, zeros: list[np.ndarray], blocks: int) -> np.ndarray:
    """Zero points [N, blocks, 1]."""
    if not zeros:
        return np.full((w.shape[0], blocks, 1), float(1 << (w.bits - 1)))
    points = zeros[0]
    if points.dtype == np.uint8:
        points = _unpacked(points, w)[:, :blocks]
    return points.astype(np.float64)[..., None]


def _unpacked(packed: np.ndarray, w: FewBits) -> np.ndarray:
    """The elements of each byte of rows, in order."""
    parts = [packed >> place & ((1 << w.bits) - 1) for place in w.rule.places]
    return np.stack(parts, axis=-1).reshape(len(packed), -1)


def _nearest(x: np.ndarray, table: str, nearest: np.ndarray) -> np.ndarray:
    """The codes of the numbers of a table that are nearest; the `nearest` ones where these are 0 and -0."""
    order = np.argsort(TABLES[table], kind="stable")
    numbers = TABLES[table][order].astype(np.float64)
    codes = order[np.searchsorted((numbers[1:] + numbers[:-1]) / 2, x)].astype(np.uint8)
    nearest = nearest.reshape(codes.shape)
    return np.where(TABLES[table][nearest] == TABLES[table][codes], nearest, codes)


def _of_range(x: np.ndarray, w: FewBits, top: int, zeros: np.dtype | None) -> tuple[np.ndarray, np.ndarray]:
    """Scales and zero points by the range of each block, 0 in it; without zero points by its largest element.

    Those of a table: the size of the largest element, and 0.
    """
    if w.table:
        most = np.abs(x).max(axis=-1, keepdims=True)
        return most, np.zeros_like(most)
    if zeros is None:
        most = np.take_along_axis(x, np.abs(x).argmax(axis=-1)[..., None], axis=-1)
        half = float(1 << (w.bits - 1))
        return most / -half, np.full(most.shape, half)
    low, high = x.min(axis=-1, keepdims=True).clip(max=0), x.max(axis=-1, keepdims=True).clip(min=0)
    scale = (high - low) / top
    zero = -low / np.where(scale == 0, 1, scale)
    return scale, np.rint(zero) if zeros == np.uint8 else zero.astype(zeros).astype(np.float64)


def _packed(codes: np.ndarray, places: range) -> np.ndarray:
    """Rows of codes in bytes, by the lowest bit of each in its byte; rows are filled up with 0."""
    per = len(places)
    full = np.pad(codes.astype(np.uint8), ((0, 0), (0, -codes.shape[1] % per))).reshape(len(codes), -1, per)
    packed = np.zeros(full.shape[:2], np.uint8)
    for i, place in enumerate(places):
        packed |= full[..., i] << np.uint8(place)
    return packed
