"""The layer of a pre-norm transformer: x + attention(norm(x)), and the same with two dense layers and GELU."""

import math
from dataclasses import dataclass
from typing import ClassVar

from ..errors import UsageError
from .common import Init, Net
from .registry import Family

#: of the weights of all layers but those that add to the stream
STD = 0.02


@dataclass(frozen=True)
class Parts:
    """What a network calls the parts of a layer; "attn." and "mlp." stand before those inside."""

    norm_1: str
    query_key_value: str
    project: str
    norm_2: str
    up: str
    down: str


class PreNorm(Family):
    """A network of such layers: x [N, positions, hidden]."""

    parts: ClassVar[Parts]
    epsilon: ClassVar[float]
    #: GELU's form: "tanh" or "none"
    gelu: ClassVar[str]

    layers: int
    hidden: int
    heads: int
    dropout: float

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise UsageError(f"option 'hidden' ({self.hidden}) must be a multiple of 'heads' ({self.heads})")

    def layer(self, net: Net, x: str, mask: str | None, block: str) -> str:
        """A layer whose values and parameters begin with `block`: its results are `<block>.attn.out`, `<block>.out`."""
        return self._feed_forward(net, self._attention(net, x, mask, block), block)

    def norm(self, net: Net, x: str, name: str) -> str:
        """Layer normalisation over the last axis."""
        return net.layer_norm(x, name, size=self.hidden, epsilon=self.epsilon)

    def _attention(self, net: Net, x: str, mask: str | None, block: str) -> str:
        name, size = f"{block}.attn", self.hidden // self.heads
        y = self.norm(net, x, f"{block}.{self.parts.norm_1}")
        both = (self.hidden, 3 * self.hidden)
        y = net.dense(y, f"{name}.{self.parts.query_key_value}", sizes=both, init=Init("normal", STD))
        parts = [f"{name}.{kind}" for kind in ("query", "key", "value")]
        net.add_many("Split", [y], parts, name=f"{name}.split", axis=-1, num_outputs=3)
        parts = [self._split_heads(net, part) for part in parts]
        y = net.attention(parts, mask, name, size=size, hidden=self.hidden, dropout=self.dropout)
        return self._project(net, y, x, (name, self.parts.project), size=self.hidden, out=f"{name}.out")

    def _split_heads(self, net: Net, x: str) -> str:
        """[N, seq, hidden] to [N, heads, seq, size], or [N, heads, size, seq] for the key."""
        split = net.constant("heads.shape", [0, 0, self.heads, self.hidden // self.heads])
        perm = [0, 2, 3, 1] if x.endswith(".key") else [0, 2, 1, 3]
        y = net.add("Reshape", [x, split], f"{x}.split")
        return net.add("Transpose", [y], f"{x}.heads", perm=perm)

    def _feed_forward(self, net: Net, x: str, block: str) -> str:
        name, inner = f"{block}.mlp", 4 * self.hidden
        y = self.norm(net, x, f"{block}.{self.parts.norm_2}")
        y = net.dense(y, f"{name}.{self.parts.up}", sizes=(self.hidden, inner), init=Init("normal", STD))
        y = net.add("Gelu", [y], f"{name}.gelu", approximate=self.gelu)
        return self._project(net, y, x, (name, self.parts.down), size=inner, out=f"{block}.out")

    def _project(self, net: Net, y: str, x: str, name: tuple[str, str], *, size: int, out: str) -> str:
        # Each layer adds two of these to the stream; GPT-2 starts them smaller by the root of their number.
        init = Init("normal", STD / math.sqrt(2 * self.layers))
        y = net.dense(y, ".".join(name), sizes=(size, self.hidden), init=init)
        y = net.dropout(y, f"{name[0]}.dropout", ratio=self.dropout)
        return net.add("Add", [y, x], out)
