"""Multi-tensor apply: one element-wise update of many arrays in one launch.

The kernel takes a table of the arrays' addresses and sizes; each array has its own blocks.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..device.kernel import C_TYPES, Buffer, Kernel, Launch
from .elements import THREADS, Elements

#: CUDA's limit for the parameters of a kernel in bytes, on any device, and how many are reserved beside the table
_PARAMETERS, _BESIDE = 4096, 128


@functools.cache
def table(pointers: int) -> type[ctypes.Structure]:
    """The structure `Table`: for each array its addresses, its size and its first block."""
    capacity = (_PARAMETERS - _BESIDE) // (8 * pointers + 8)

    class Table(ctypes.Structure):
        _fields_ = (
            ("at", ctypes.c_void_p * capacity * pointers),
            ("n", ctypes.c_int * capacity),
            ("first", ctypes.c_int * capacity),
            ("count", ctypes.c_int),
        )

    return Table


def many(elements: Elements, aliases: Sequence[int]) -> Kernel:
    """The kernel for one update of several arrays, each flattened to one dimension.

    Output j is written to the buffer of operand `aliases[j]`.  Parameters: the table, with the addresses of operands
    that vary along all dimensions (`Operand.full`), then the addresses of scalars.
    """
    full = [j for j, o in enumerate(elements.operands) if o.full]
    capacity = len(table(len(full))().n)
    head = [
        "int s = 0;  // this block's array",
        f"for (int h = {1 << (capacity - 1).bit_length() - 1}; h; h >>= 1)",
        "    if (s + h < t.count && t.first[s + h] <= blockIdx.x) s += h;",
        "const long long n = t.n[s];",
    ]
    for row, j in enumerate(full):
        c = C_TYPES[elements.operands[j].dtype]
        head.append(f"{c}* x{j} = ({c}*)t.at[{row}][s];")
    head += [f"{C_TYPES[x.dtype]}* y{i} = x{aliases[i]};" for i, x in enumerate(elements.outputs)]
    before = f"""
struct Table {{ void* at[{len(full)}][{capacity}]; int n[{capacity}], first[{capacity}], count; }};
"""
    scalars = [f"const {C_TYPES[o.dtype]}* x{j}" for j, o in enumerate(elements.operands) if o.scalar]
    return elements.kernel("many", ["Table t", *scalars], head, "(blockIdx.x - t.first[s])", before)


@dataclass(frozen=True)
class Part:
    """One array's update as a part of a joint launch; parts with equal `key` can share one."""

    kernel: Kernel
    scalars: tuple[Buffer, ...]
    arrays: tuple[Buffer, ...]
    elements_per_block: int

    @property
    def key(self) -> Any:
        """The kernel, and the addresses of its scalars."""
        return self.kernel.digest, tuple(b.address for b in self.scalars)

    @property
    def capacity(self) -> int:
        """The most parts of one launch."""
        return len(table(len(self.arrays))().n)


def together(parts: Sequence[Part]) -> Launch:
    """One launch for all parts: at most `capacity`, with equal `key`, none of which reads what another writes."""
    one = parts[0]
    t: Any = table(len(one.arrays))()
    blocks = 0
    for s, part in enumerate(parts):
        for row, buffer in enumerate(part.arrays):
            t.at[row][s] = buffer.address
        t.n[s], t.first[s] = part.arrays[0].size, blocks
        blocks += -(-part.arrays[0].size // one.elements_per_block)
    t.count = len(parts)
    return one.kernel.blocks(blocks, args=(t, *one.scalars), block=(THREADS,))
