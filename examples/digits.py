"""Train LeNet on scikit-learn's 1,797 handwritten digits, plain and recomputed: the same bits, 98 % of held-out digits.

python examples/digits.py              # trains, and scores the written model with ONNX Runtime
python examples/digits.py --write DIR  # only writes DIR/train.npz and DIR/test.npz, for recompute-train
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

import recompute as rc


def digits() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Columns x float32[1,28,28] and label int64, of 1,437 digits to train on and of 360 others."""
    found = load_digits()
    images = np.kron(found.images / 16, np.ones((3, 3)))  # 8 x 8 to 24 x 24
    images = np.pad(images, ((0, 0), (2, 2), (2, 2)))[:, None].astype(np.float32)
    order = np.random.default_rng(0).permutation(len(images))
    parts = order[:1437], order[1437:]
    train, test = ({"x": images[p], "label": found.target[p].astype(np.int64)} for p in parts)
    return train, test


def trained(train: dict, test: dict, checkpoints: list[str], folder: Path) -> rc.History:
    """Ten epochs; `checkpoints`: the values to keep, [] for all."""
    program = rc.load(rc.models.build("lenet"), batch=32)
    optimizer = rc.Adam(2e-3)
    if checkpoints:
        optimizer = rc.RecomputeOptimizer(optimizer).set_checkpoints(checkpoints)
    trainer = rc.Trainer(program, optimizer, loss="cross_entropy", metrics=[rc.metrics.Accuracy()])
    history = trainer.fit(train, epochs=10, eval_data=test, save=folder)
    if history.stopped:
        raise SystemExit(history.stopped)
    return history


def main() -> None:
    """Trains twice, and scores the second model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="DIR", help="write the data for recompute-train, and stop")
    args = parser.parse_args()
    train, test = digits()
    if args.write is not None:
        args.write.mkdir(parents=True, exist_ok=True)
        np.savez(args.write / "train.npz", **train)
        np.savez(args.write / "test.npz", **test)
        print(f"wrote {args.write / 'train.npz'} and {args.write / 'test.npz'}")
        return
    with tempfile.TemporaryDirectory() as folder:
        for name, checkpoints in (("plain", []), ("recomputed", ["pool1", "pool2"])):
            run = Path(folder, name)
            history = trained(train, test, checkpoints, run)
            accuracy = history.epochs[-1]["eval"]["accuracy"]
            print(f"{name}: accuracy {accuracy:.4f}, peak {history.peak_bytes['measured']:,} bytes, weights "
                  f"{history.weights_sha256[:16]}")  # fmt: skip

        import onnxruntime

        session = onnxruntime.InferenceSession(str(run / "model.onnx"))
        (scores,) = session.run(["logits"], {"x": test["x"]})
        print(f"ONNX Runtime: accuracy {(scores.argmax(1) == test['label']).mean():.4f}")


if __name__ == "__main__":
    main()
