"""Messages from one rank to another.

They have no gradient: a step is differentiated before it is cut into stages, and what was a value of the forward pass
that another stage reads has then a gradient that is a value like any other.
"""

from __future__ import annotations

from typing import ClassVar

from ...errors import UsageError
from ...language.types import DTYPES, TensorType
from .base import Communication, Traffic


class Message(Communication, abstract=True):
    """Between this rank and the one of the same group whose coordinate is `peer`.

    A rank sends nothing to itself, so that a group has two members or more.
    """

    #: the class that the other rank has
    other: ClassVar[type[Message]]

    peer: int = 0

    def check(self, *inputs: TensorType | None) -> None:
        """TypeRuleError for attributes that cannot be."""
        super().check(*inputs)
        if self.ranks < 2:
            raise self.fail("a message needs two ranks or more", *inputs)
        if not 0 <= self.peer < self.ranks:
            raise self.fail(f"peer must be a coordinate from 0 to {self.ranks - 1}, not {self.peer}", *inputs)

    def export(self, g, ins, outs):
        raise UsageError(f"{self.name} cannot be exported: ONNX has no communication")


class Send(Message):
    """Begins to send x to the rank `peer`, whose `Recv` has the same channel and number.

    The result is one byte that says nothing; its wait says that x is sent and may be freed.
    """

    def infer(self, x):
        self.need(x, count=1)
        self.check(x)
        return (TensorType("u8", (1,)),)

    def together(self, ins, outs):
        """Inputs and outputs of the sender, then of the receiver."""
        outs[0][...] = 0
        outs[1][...] = ins[0]

    def traffic(self, x: TensorType | None, y: TensorType) -> Traffic:
        return Traffic(0 if x is None else x.nbytes, 1)


class Recv(Message):
    """Begins to receive a value of type `dtype` and `shape` from the rank `peer`, whose `Send` has the same channel and
    number."""

    shape: tuple[int, ...] = ()
    dtype: str = "f32"

    def infer(self, *inputs):
        """The type that was asked for."""
        if inputs:
            raise self.fail("takes no inputs", *inputs)
        self.check()
        if self.dtype not in DTYPES or not all(isinstance(d, int) and not isinstance(d, bool) for d in self.shape):
            raise self.fail(f"'{self.dtype}' with the shape {self.shape} is no type")
        return (TensorType(self.dtype, tuple(self.shape)),)

    def traffic(self, x: TensorType | None, y: TensorType) -> Traffic:
        return Traffic(0, 1)


Send.other, Recv.other = Recv, Send
