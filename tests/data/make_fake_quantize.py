"""Makes fake_quantize.npz with PyTorch: values, gradients and observed ranges of its fake quantisation.

    python tests/data/make_fake_quantize.py

Values stay away from where rounding changes: PyTorch multiplies by 1 / scale, ONNX divides by the scale.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch.ao.quantization import MovingAverageMinMaxObserver, MovingAveragePerChannelMinMaxObserver


def main() -> None:
    """Writes the file beside this one."""
    g = np.random.default_rng(0)
    found: dict[str, np.ndarray] = {}
    for name, low, high, zero in (("u8", 0, 255, 100), ("i8", -128, 127, -3), ("i4", -7, 7, 0)):
        scale = np.float32(0.0625)
        x = ((np.rint(g.uniform(-300, 300, (4, 9))) + g.uniform(-0.4, 0.4, (4, 9))) * scale).astype(np.float32)
        given = torch.tensor(x, requires_grad=True)
        dy = g.standard_normal(x.shape).astype(np.float32)
        y = torch.fake_quantize_per_tensor_affine(given, float(scale), zero, low, high)
        y.backward(torch.tensor(dy))
        found |= {f"{name}.x": x, f"{name}.dy": dy, f"{name}.y": y.detach().numpy(), f"{name}.dx": given.grad.numpy()}
        found[f"{name}.options"] = np.array([scale, zero, low, high])
    scales = torch.tensor([1 / 16, 1 / 8, 1 / 32])
    x = (np.rint(g.uniform(-200, 200, (3, 8))) + g.uniform(-0.4, 0.4, (3, 8))).astype(np.float32) * scales.numpy()[
        :, None
    ]
    given = torch.tensor(x, requires_grad=True)
    dy = g.standard_normal(x.shape).astype(np.float32)
    y = torch.fake_quantize_per_channel_affine(given, scales, torch.zeros(3, dtype=torch.int32), 0, -127, 127)
    y.backward(torch.tensor(dy))
    found |= {"rows.x": x, "rows.dy": dy, "rows.y": y.detach().numpy(), "rows.dx": given.grad.numpy()}
    found["rows.scale"] = scales.numpy()
    observer = MovingAverageMinMaxObserver(averaging_constant=0.25, dtype=torch.quint8, eps=1e-15)
    batches = (g.standard_normal((5, 16)) * [[1], [3], [0.5], [2], [1]] + 0.3).astype(np.float32)
    ranges = []
    for batch in batches:
        observer(torch.tensor(batch))
        scale, zero = observer.calculate_qparams()
        ranges.append([observer.min_val.item(), observer.max_val.item(), scale.item(), zero.item()])
    found |= {"batches": batches, "ranges": np.array(ranges, np.float32)}
    weights = MovingAveragePerChannelMinMaxObserver(
        averaging_constant=1.0, dtype=torch.qint8, qscheme=torch.per_channel_symmetric, quant_min=-127, quant_max=127
    )
    w = g.standard_normal((4, 5)).astype(np.float32)
    weights(torch.tensor(w))
    found |= {"weight": w, "weight.scale": weights.calculate_qparams()[0].numpy()}
    np.savez_compressed(Path(__file__).with_name("fake_quantize.npz"), **found)


if __name__ == "__main__":
    main()
