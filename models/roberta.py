"""RoBERTa (Liu et al. 2019, arXiv 1907.11692): BERT's layers with one token type, other positions and other heads.

Parameters have the names of the usual PyTorch port; a weight used by MatMul is stored [in, out].
"""

from dataclasses import dataclass
from typing import ClassVar

from .bert import NORMAL, Bert
from .common import BATCH, InputSpec, Net, integers
from .registry import Variant, register


@register(Variant("roberta-base", "RoBERTa base: 12 layers of 768, 12 heads", 8, 32))
@dataclass(frozen=True)
class Roberta(Bert):
    """input_ids, attention_mask int64 [N, seq] to logits float32, as `Bert`.

    Positions count from 2, the first row behind that of padding, in every sequence: as in the PyTorch port for
    sequences that are padded at their ends, if at all.
    """

    vocab: int = 50265
    positions: int = 514

    epsilon: ClassVar[float] = 1e-5
    first_position: ClassVar[int] = 2
    mlm_params: ClassVar[tuple[str, str, str]] = ("lm_head.dense", "lm_head.layer_norm", "lm_head.bias")

    def inputs(self) -> tuple[InputSpec, ...]:
        shape = (BATCH, self.seq)
        return (integers("input_ids", shape, high=self.vocab), integers("attention_mask", shape, low=1, high=2))

    def tables(self) -> dict[str, int]:
        """Rows of each table of embeddings: one token type."""
        return {**super().tables(), "token_type": 1}

    def _token_types(self, net: Net, table: str, name: str) -> str:
        """The table itself: its only row is added everywhere."""
        return table

    def _classifier_head(self, net: Net, x: str) -> None:
        """No pooler: first token, dropout, dense, tanh, dropout, projection."""
        params = "classifier"
        x = net.add("Gather", [x, net.constant("first", 0)], f"{params}.first", axis=1)
        x = net.dropout(x, f"{params}.first.dropout", ratio=self.dropout)
        x = net.gemm(x, f"{params}.dense", sizes=(self.hidden, self.hidden), init=NORMAL)
        x = net.add("Tanh", [x], f"{params}.out")
        x = net.dropout(x, f"{params}.dropout", ratio=self.dropout)
        net.gemm(x, "logits", sizes=(self.hidden, self.classes), init=NORMAL, params=f"{params}.out_proj")
        net.output("logits", (BATCH, self.classes))
