"""BERT (Devlin et al. 2018, arXiv 1810.04805) in Google's published sizes.

Parameters have the names of the usual PyTorch port; a weight used by MatMul is stored [in, out].
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from onnx import TensorProto

from ..errors import UsageError
from .common import BATCH, ZEROS, Init, InputSpec, Net, integers
from .registry import Family, Variant, register

NORMAL = Init("normal", 0.02)
# Large enough that exp() of a masked score is zero, and as in the published model.
_MASKED = -10000.0
_HEADS = ("classifier", "mlm")


def _variant(size: str, layers: int, hidden: int, heads: int, *, table_batch: int) -> Variant:
    options = {"layers": layers, "hidden": hidden, "heads": heads}
    description = f"BERT {size}: {layers} layers of {hidden}, {heads} heads"
    return Variant(f"bert-{size}", description, 8, table_batch, options)


@register(
    _variant("tiny", 2, 128, 2, table_batch=64),
    _variant("mini", 4, 256, 4, table_batch=64),
    _variant("small", 4, 512, 8, table_batch=64),
    _variant("medium", 8, 512, 8, table_batch=32),
    _variant("base", 12, 768, 12, table_batch=32),
    _variant("large", 24, 1024, 16, table_batch=16),
)
@dataclass(frozen=True)
class Bert(Family):
    """input_ids, token_type_ids, attention_mask int64 [N, seq] to logits float32.

    With head "classifier" the logits are [N, classes], with head "mlm" [N, seq, vocab].
    """

    layers: int = 12
    hidden: int = 768
    heads: int = 12
    seq: int = 128
    vocab: int = 30522
    positions: int = 512
    classes: int = 2
    dropout: float = 0.1
    head: str = "classifier"

    epsilon: ClassVar[float] = 1e-12
    first_position: ClassVar[int] = 0
    #: parameters of the masked-language head: the dense layer's, the normalisation's, the bias
    mlm_params: ClassVar[tuple[str, str, str]] = (
        "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.bias",
    )  # fmt: skip

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise UsageError(f"option 'hidden' ({self.hidden}) must be a multiple of 'heads' ({self.heads})")
        if self.seq + self.first_position > self.positions:
            less = f" less {self.first_position}" if self.first_position else ""
            raise UsageError(f"option 'seq' ({self.seq}) must not exceed 'positions' ({self.positions}){less}")
        if self.head not in _HEADS:
            raise UsageError(f"option 'head' must be one of {', '.join(_HEADS)}, not {self.head!r}")

    @property
    def task(self) -> str:  # type: ignore[override]
        """The head decides."""
        return "classification" if self.head == "classifier" else "language-model"

    def inputs(self) -> tuple[InputSpec, ...]:
        shape = (BATCH, self.seq)
        return (
            integers("input_ids", shape, high=self.vocab),
            integers("token_type_ids", shape, high=2),
            integers("attention_mask", shape, low=1, high=2),
        )

    def label(self) -> InputSpec:
        if self.head == "mlm":
            return integers("label", (BATCH, self.seq), high=self.vocab)
        return integers("label", (BATCH,), high=self.classes)

    def checkpoints(self) -> tuple[str, ...]:
        return ("embeddings.out", *(f"layer.{index}.out" for index in range(self.layers)))

    def build(self, net: Net) -> None:
        x = self._embeddings(net)
        mask = _additive_mask(net)
        for index in range(self.layers):
            prefix = f"layer.{index}"
            x = self._attention(net, x, mask, f"{prefix}.attention")
            x = self._feed_forward(net, x, prefix)
        if self.head == "mlm":
            self._mlm_head(net, x)
        else:
            self._classifier_head(net, x)

    def _embeddings(self, net: Net) -> str:
        prefix = "embeddings"
        tables = {
            kind: net.parameter(f"{prefix}.{kind}_embeddings.weight", (size, self.hidden), NORMAL)
            for kind, size in self.tables().items()
        }
        position_ids = net.constant("position_ids", np.arange(self.seq) + self.first_position)
        word = net.add("Gather", [tables["word"], "input_ids"], f"{prefix}.word")
        kind = self._token_types(net, tables["token_type"], f"{prefix}.token_type")
        position = net.add("Gather", [tables["position"], position_ids], f"{prefix}.position")
        x = net.add("Add", [word, kind], f"{prefix}.sum1")
        x = net.add("Add", [x, position], f"{prefix}.sum2")
        # Without dropout the norm itself is the checkpoint that people know by this name.
        name = f"{prefix}.norm" if self.dropout else f"{prefix}.out"
        x = self._norm(net, x, name, params=f"{prefix}.LayerNorm")
        return net.dropout(x, f"{prefix}.out", ratio=self.dropout)

    def tables(self) -> dict[str, int]:
        """Rows of each table of embeddings."""
        return {"word": self.vocab, "position": self.positions, "token_type": 2}

    def _token_types(self, net: Net, table: str, name: str) -> str:
        return net.add("Gather", [table, "token_type_ids"], name)

    def _attention(self, net: Net, x: str, mask: str, name: str) -> str:
        """Self-attention, its output projection, and the residual norm: [N, seq, hidden] to the same."""
        parts = [self._split_heads(net, x, name, kind) for kind in ("query", "key", "value")]
        size = self.hidden // self.heads
        y = net.attention(parts, mask, name, size=size, hidden=self.hidden, dropout=self.dropout)
        return self._project(net, y, x, name, size=self.hidden, params=f"encoder.{name}.output")

    def _split_heads(self, net: Net, x: str, name: str, kind: str) -> str:
        """[N, seq, hidden] to [N, heads, seq, size], or [N, heads, size, seq] for the key."""
        params = f"encoder.{name}.self.{kind}"
        sizes = (self.hidden, self.hidden)
        x = net.dense(x, f"{name}.{kind}", sizes=sizes, init=NORMAL, params=params)
        split = net.constant("heads.shape", [0, 0, self.heads, self.hidden // self.heads])
        x = net.add("Reshape", [x, split], f"{name}.{kind}.split")
        perm = [0, 2, 3, 1] if kind == "key" else [0, 2, 1, 3]
        return net.add("Transpose", [x], f"{name}.{kind}.heads", perm=perm)

    def _feed_forward(self, net: Net, x: str, name: str) -> str:
        inner = 4 * self.hidden
        params = f"encoder.{name}.intermediate.dense"
        y = net.dense(x, f"{name}.intermediate", sizes=(self.hidden, inner), init=NORMAL, params=params)
        y = net.add("Gelu", [y], f"{name}.gelu")
        return self._project(net, y, x, name, size=inner, params=f"encoder.{name}.output")

    def _project(self, net: Net, y: str, x: str, name: str, *, size: int, params: str) -> str:
        """norm(x + dropout(dense(y))), called `<name>.out`."""
        y = net.dense(y, f"{name}.dense", sizes=(size, self.hidden), init=NORMAL, params=f"{params}.dense")
        y = net.dropout(y, f"{name}.dropout", ratio=self.dropout)
        y = net.add("Add", [y, x], f"{name}.residual")
        return self._norm(net, y, f"{name}.out", params=f"{params}.LayerNorm")

    def _norm(self, net: Net, x: str, name: str, *, params: str) -> str:
        return net.layer_norm(x, name, size=self.hidden, epsilon=self.epsilon, params=params)

    def _classifier_head(self, net: Net, x: str) -> None:
        sizes = (self.hidden, self.hidden)
        x = net.add("Gather", [x, net.constant("first", 0)], "pooler.first", axis=1)
        x = net.gemm(x, "pooler.dense", sizes=sizes, init=NORMAL)
        x = net.add("Tanh", [x], "pooler.out")
        x = net.dropout(x, "pooler.dropout", ratio=self.dropout)
        net.gemm(x, "logits", sizes=(self.hidden, self.classes), init=NORMAL, params="classifier")
        net.output("logits", (BATCH, self.classes))

    def _mlm_head(self, net: Net, x: str) -> None:
        dense, norm, bias = self.mlm_params
        x = net.dense(x, "mlm.dense", sizes=(self.hidden, self.hidden), init=NORMAL, params=dense)
        x = net.add("Gelu", [x], "mlm.gelu")
        x = self._norm(net, x, "mlm.out", params=norm)
        decoder = net.add("Transpose", ["embeddings.word_embeddings.weight"], "mlm.decoder", perm=[1, 0])
        x = net.add("MatMul", [x, decoder], "logits.matmul")
        net.add("Add", [x, net.parameter(bias, (self.vocab,), ZEROS)], "logits")
        net.output("logits", (BATCH, self.seq, self.vocab))


def _additive_mask(net: Net) -> str:
    """attention_mask int64 [N, seq] of 1 and 0 to float32 [N, 1, 1, seq] of 0 and a large negative number."""
    mask = net.add("Cast", ["attention_mask"], "mask.float", to=TensorProto.FLOAT)
    mask = net.add("Unsqueeze", [mask, net.constant("mask.axes", [1, 2])], "mask.wide")
    mask = net.add("Sub", [net.constant("one", 1.0), mask], "mask.inverted")
    return net.add("Mul", [mask, net.constant("mask.value", _MASKED)], "mask")
