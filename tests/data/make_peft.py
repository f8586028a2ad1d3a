"""Writes tests/data/peft: adapters that PEFT saved, what it computes with them, and how it trains them in float64.

python tests/data/make_peft.py          (needs torch, transformers and peft; last run with peft 0.21.2, torch 2.13)
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

FOLDER = Path(__file__).parent / "peft"
ADAPTERS = {
    "lora": {"r": 4, "lora_alpha": 6, "target_modules": ["q", "score"]},
    "dora": {"r": 4, "lora_alpha": 6, "target_modules": ["q", "score"], "use_dora": True},
    "embedding": {
        "r": 4, "lora_alpha": 6, "target_modules": ["embed", "q"], "use_rslora": True, "alpha_pattern": {"q": 3},
        "rank_pattern": {"q": 2},
    },
    "head": {"r": 2, "lora_alpha": 2, "target_modules": ["q"], "modules_to_save": ["score"]},
}  # fmt: skip
STEPS, RATE = 6, 0.0625  # a float32 number


class Model(nn.Module):
    """A table, and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.q, self.score = nn.Embedding(20, 12), nn.Linear(12, 16), nn.Linear(16, 7, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[batch, positions] to scores [batch, positions, 7]."""
        return self.score(torch.tanh(self.q(self.embed(ids))))


def main() -> None:
    """Writes the files."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    torch.manual_seed(0)
    base = Model()
    ids, labels = torch.randint(0, 20, (3, 5)), torch.randint(0, 7, (3, 5))
    found = {"ids": ids.numpy(), "labels": labels.numpy(), "rate": np.array(RATE)}
    found.update((f"base.{n}", t.detach().numpy().copy()) for n, t in base.named_parameters())
    for name, options in ADAPTERS.items():
        torch.manual_seed(1)
        model = Model()
        model.load_state_dict(base.state_dict())
        model = get_peft_model(model, LoraConfig(init_lora_weights=False, **options))
        for n, p in model.named_parameters():
            if "modules_to_save" in n or "magnitude" in n:
                p.data += 0.1 * torch.randn_like(p)
        model.save_pretrained(FOLDER / name)
        (FOLDER / name / "README.md").unlink()
        with torch.no_grad():
            found[f"{name}.scores"] = model.eval()(ids).numpy()
        model.double().train()
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], RATE)
        losses = []
        for _ in range(STEPS):
            loss = nn.functional.cross_entropy(model(ids).reshape(-1, 7), labels.reshape(-1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        found[f"{name}.losses"] = np.array(losses)
        with torch.no_grad():
            found[f"{name}.trained_scores"] = model.eval()(ids).numpy()
    np.savez_compressed(FOLDER / "reference.npz", **found)


if __name__ == "__main__":
    main()
