"""Numbers of 1 to 8 bits, packed one after the other, the lowest bits first: eight of them fill whole bytes."""

from __future__ import annotations

import numpy as np

from ...language.contexts import FunctionWriter
from ...language.types import Array
from ..tiles import TILE


def packed_bytes(count: int, bits: int) -> int:
    """Bytes of `count` numbers."""
    return -(-count * bits // 8)


def scratch_bytes(count: int, bits: int) -> int:
    """Bytes of scratch that `pack` and `unpack` need for a tile of a tensor of `count` numbers."""
    groups = -(-min(count, TILE) // 8)
    return groups * (8 + bits + 1)


def regions(scratch: Array, count: int, bits: int) -> tuple[Array, Array, Array]:
    """For `count` numbers, the parts of that scratch: numbers [groups, 8], bytes [groups, bits], temporary [groups]."""
    groups = -(-count // 8)
    ends = (8 * groups, (8 + bits) * groups, (9 + bits) * groups)
    numbers, packed, temp = scratch[: ends[0]], scratch[ends[0] : ends[1]], scratch[ends[1] : ends[2]]
    return numbers.reshape(groups, 8), packed.reshape(groups, bits), temp


def pack(numbers: Array, packed: Array, temp: Array) -> None:
    """[groups, 8] numbers below 2^bits to [groups, bits] bytes."""
    bits = packed.shape[1]
    packed[...] = 0
    for i in range(8):
        byte, shift = divmod(i * bits, 8)
        np.left_shift(numbers[:, i], np.uint8(shift), out=temp)
        np.bitwise_or(packed[:, byte], temp, out=packed[:, byte])
        if shift + bits > 8:
            np.right_shift(numbers[:, i], np.uint8(8 - shift), out=temp)
            np.bitwise_or(packed[:, byte + 1], temp, out=packed[:, byte + 1])


def unpack(packed: Array, numbers: Array, temp: Array) -> None:
    """[groups, bits] bytes to [groups, 8] numbers."""
    bits = packed.shape[1]
    for i in range(8):
        byte, shift = divmod(i * bits, 8)
        np.right_shift(packed[:, byte], np.uint8(shift), out=numbers[:, i])
        if shift + bits > 8:
            np.left_shift(packed[:, byte + 1], np.uint8(8 - shift), out=temp)
            np.bitwise_or(numbers[:, i], temp, out=numbers[:, i])
    np.bitwise_and(numbers, np.uint8(2**bits - 1), out=numbers)


def export_pack(g: FunctionWriter, numbers: str, count: int, bits: int) -> str:
    """ONNX nodes that pack a flat int64 tensor; the name of the bytes."""
    groups = -(-count // 8)
    padded = g.call("Concat", numbers, g.array(np.zeros(groups * 8 - count, np.int64)), axis=0)
    rows = g.call("Reshape", padded, g.ints((groups, 8)))
    places = g.array(np.array([1 << (bits * i) for i in range(8)], np.int64))
    word = g.call("ReduceSum", g.call("Mul", rows, places), g.ints((1,)), keepdims=1)
    parts = g.call("Div", word, g.array(np.array([1 << (8 * i) for i in range(bits)], np.int64)))
    bytes_ = g.call("Cast", g.call("Mod", parts, g.array(np.array(256, np.int64))), to=_U8)
    flat = g.call("Reshape", bytes_, g.ints((groups * bits,)))
    return g.call("Slice", flat, g.ints((0,)), g.ints((packed_bytes(count, bits),)))


def export_unpack(g: FunctionWriter, packed: str, count: int, bits: int) -> str:
    """ONNX nodes that unpack bytes to a flat int64 tensor of `count` numbers; its name."""
    groups = -(-count // 8)
    missing = groups * bits - packed_bytes(count, bits)
    wide = g.call("Cast", packed, to=_I64)
    rows = g.call(
        "Reshape", g.call("Concat", wide, g.array(np.zeros(missing, np.int64)), axis=0), g.ints((groups, bits))
    )
    places = g.array(np.array([1 << (8 * i) for i in range(bits)], np.int64))
    word = g.call("ReduceSum", g.call("Mul", rows, places), g.ints((1,)), keepdims=1)
    parts = g.call("Div", word, g.array(np.array([1 << (bits * i) for i in range(8)], np.int64)))
    numbers = g.call("Mod", parts, g.array(np.array(1 << bits, np.int64)))
    return g.call("Slice", g.call("Reshape", numbers, g.ints((groups * 8,))), g.ints((0,)), g.ints((count,)))


_U8, _I64 = 2, 7
