"""Writes contrib.npz: what ONNX Runtime's CPU provider computes for the cases of tests/contrib_cases.py.

python tests/data/make_contrib.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from contrib_cases import cases  # noqa: E402


def main() -> None:
    """Each output under `CASE/NUMBER`."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    found: dict[str, np.ndarray] = {}
    for name, (model, feed) in cases().items():
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        for i, array in enumerate(session.run(None, feed)):
            if array.size:
                found[f"{name}/{i}"] = array
    np.savez_compressed(HERE / "contrib.npz", **found)
    print(f"{len(found)} outputs, ONNX Runtime {ort.__version__}")


if __name__ == "__main__":
    main()
