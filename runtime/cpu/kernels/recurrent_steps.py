"""The calls of a recurrent operator: products over all steps, and the single steps."""

from __future__ import annotations

from typing import Any

from ....language.types import Array
from ..code.row_products import Packed
from ..device import native
from ..device.native import Call
from ..providers import products


class Products:
    """A list of calls, products of matrices among them.

    `room`: their workspace (see `products.room`); `onednn`: whether oneDNN multiplies where it is the fastest.
    """

    def __init__(self, room: Array | None = None, *, onednn: bool = False) -> None:
        self.room, self.onednn = room, onednn
        self.calls: list[Call] = []

    def add(self, *calls: Call) -> None:
        """More calls."""
        self.calls += calls

    def product(self, a: Array, b: Array, c: Array, more: Array | None = None) -> None:
        """c = a b (+ `more`: a row for all rows, or as many as c has; c itself, say), for matrices of which one side
        lies together."""
        self.calls += products.calls(a, b, c, self.room, more, onednn=self.onednn)


def times(todo: Products, a: Any, b: Any, c: Any, panels: Any, *, turned: bool = False, more: Any = None) -> None:
    """c = a B' (+ more) for many rows: by `panels` where there are some, else by BLAS."""
    if panels.size:
        k, n = b.shape[::-1] if turned else b.shape
        packed = Packed(k, n, a.shape[0], turned=turned)
        todo.add(packed.pack(b, panels), packed.product(a, panels, c, more))
    else:
        todo.product(a, b.T if turned else b, c, more)


class Steps:
    """The calls of a direction's steps, whose products are with one matrix B [k, n], or its transpose (`turned`)."""

    def __init__(self, todo: Products, b: Any, packed: Any, rows: int, *, turned: bool) -> None:
        """`packed`: the workspace that `room` asks for; where there is none, BLAS multiplies, call by call."""
        self.todo, self.b, self.panels, self.turned = todo, b, packed, turned
        self.packed: Packed | None = None
        self.calls: list[Call] = []
        if packed.size:
            k, n = b.shape[::-1] if turned else b.shape
            self.packed = Packed(k, n, rows, turned=turned)
            todo.add(self.packed.pack(b, packed))

    def add(self, call: Call) -> None:
        """Adds a call of one step that treats each row by itself."""
        if self.packed is None:
            self.todo.add(call)
        else:
            self.calls.append(call)

    def product(self, a: Any, c: Any, *, more: bool = False) -> None:
        """c = a B', or c += a B' where there is `more`."""
        if self.packed is None:
            self.todo.product(a, self.b.T if self.turned else self.b, c, c if more else None)
        else:
            self.calls.append(self.packed.product(a, self.panels, c, c if more else None))

    def finish(self) -> None:
        """After the last step."""
        if self.calls:
            self.todo.add(native.together(self.calls))
