"""RoBERTa of the zoo beside Hugging Face's: numbers of parameters at the base size, outputs of a tiny one.

    python benchmarks/pytorch/roberta.py

Exit code 1 where a number of parameters differs, or an output by more than 1e-5.
"""

from __future__ import annotations

import sys
from math import prod
from typing import Any

import numpy as np
import torch
from transformers import RobertaConfig, RobertaForMaskedLM, RobertaForSequenceClassification

import recompute as rc
from recompute import models

HEADS = {"classifier": RobertaForSequenceClassification, "mlm": RobertaForMaskedLM}
#: numbers of parameters that are known for the base size, with two labels
PUBLISHED = {"classifier": 124_647_170, "mlm": 124_697_433}
_TINY = {"layers": 2, "hidden": 32, "heads": 2, "vocab": 60, "positions": 20, "seq": 12}
_LIMIT = 1e-5


def config(**options: Any) -> RobertaConfig:
    """RoBERTa's published configuration with the zoo's options: the defaults of RobertaConfig are BERT's."""
    hidden = options.get("hidden", 768)
    return RobertaConfig(
        vocab_size=options.get("vocab", 50265), max_position_embeddings=options.get("positions", 514),
        type_vocab_size=1, layer_norm_eps=1e-5, num_hidden_layers=options.get("layers", 12), hidden_size=hidden,
        num_attention_heads=options.get("heads", 12), intermediate_size=4 * hidden, num_labels=2,
    )  # fmt: skip


def parameters(head: str) -> tuple[int, int]:
    """Numbers of parameters at the base size: theirs, ours."""
    with torch.device("meta"):
        theirs = HEADS[head](config())
        theirs.tie_weights()
    ours = models.parameters(models.build("roberta-base", weights=False, head=head))
    return sum(p.numel() for p in theirs.parameters()), sum(map(prod, ours.values()))


def difference(head: str) -> float:
    """The largest difference of an output in inference mode, with all parameters drawn; sequences padded at the end."""
    torch.manual_seed(0)
    theirs = HEADS[head](config(**_TINY)).eval()
    with torch.no_grad():
        for p in theirs.parameters():
            p.normal_(std=0.2)
    program = rc.load(models.build("roberta-base", batch=3, head=head, **_TINY), mode="eval")
    known = {n.removeprefix("roberta."): p.detach().numpy() for n, p in theirs.named_parameters()}
    for v in program.block.parameters:
        value = known.pop(v.name)
        program.data[v.name] = np.ascontiguousarray(
            value if value.shape == v.shape and not _turned(v.name) else value.T
        )
    assert not known, f"parameters without a counterpart: {sorted(known)}"
    draw = np.random.default_rng(0)
    ids = draw.integers(2, _TINY["vocab"], (3, _TINY["seq"]))
    mask = (np.arange(_TINY["seq"]) < np.array([[12], [9], [5]])).astype(np.int64)
    ids[mask == 0] = 1
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask)).logits.numpy()
    (found,) = rc.Executor().run(program, {"input_ids": ids, "attention_mask": mask}, ["logits"])
    away = np.abs(found - expected)
    return float((away if head == "classifier" else away[mask == 1]).max())


def _turned(name: str) -> bool:
    """Whether a parameter is read by MatMul, which stores it [in, out]."""
    return (
        name.endswith(".weight")
        and (name.startswith("encoder.") or name == "lm_head.dense.weight")
        and ("LayerNorm" not in name)
    )


def main() -> int:
    """Prints the comparison; the exit code."""
    right = True
    for head, published in PUBLISHED.items():
        theirs, ours = parameters(head)
        away = difference(head)
        right &= theirs == ours == published and away <= _LIMIT
        print(f"{head:10}  parameters {theirs:,} theirs, {ours:,} ours; outputs differ by at most {away:.1e}")
    return not right


if __name__ == "__main__":
    sys.exit(main())
