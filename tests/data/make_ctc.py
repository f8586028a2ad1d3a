"""Writes ctc.npz: PyTorch's CTC losses, and the gradients of the scores, in float64.

python tests/data/make_ctc.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

STEPS, SAMPLES, CLASSES, SIZE = 9, 5, 6, 4


def main() -> None:
    """For each reduction, blank and choice of lengths: loss and gradient; labels are ended by -100."""
    r = np.random.default_rng(7)
    found: dict[str, np.ndarray] = {"x": r.standard_normal((STEPS, SAMPLES, CLASSES))}
    lengths = np.array([4, 3, 0, 1, 4])
    found["label_lengths"], found["input_lengths"] = lengths, np.array([9, 7, 4, 0, 5])
    for blank in (0, 5):
        label = (blank + r.integers(1, CLASSES, (SAMPLES, SIZE))) % CLASSES
        label[0] = label[0, 0]  # one class four times: seven steps at least
        label[4, 1] = label[4, 0]
        label[np.arange(SIZE) >= lengths[:, None]] = -100
        found[f"label.{blank}"] = label
        for some in (False, True):
            steps = found["input_lengths"] if some else np.full(SAMPLES, STEPS)
            for reduction in ("mean", "sum", "none"):
                x = torch.tensor(found["x"], requires_grad=True)
                loss = torch.nn.functional.ctc_loss(
                    torch.log_softmax(x, 2), torch.tensor(np.maximum(label, 0)), torch.tensor(steps),
                    torch.tensor(lengths), blank=blank, reduction=reduction, zero_infinity=True,
                )  # fmt: skip
                loss.sum().backward()
                key = f"{blank}.{'some' if some else 'all'}.{reduction}"
                found[key], found[f"{key}.dx"] = loss.detach().numpy(), x.grad.numpy()
    np.savez_compressed(Path(__file__).with_suffix(".npz").with_name("ctc.npz"), **found)


if __name__ == "__main__":
    main()
