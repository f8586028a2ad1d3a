"""CIFAR-10: two epochs of a residual network and of a DARTS network, plain and recomputed, as Feng & Huang's notebook.

    python examples/cifar.py --data cifar-10-batches-bin  # the binary version of www.cs.toronto.edu/~kriz/cifar.html
    python examples/cifar.py                              # generated files of the same format, small networks

The last weights and the accuracy are the same to the bit; memory and time are printed beside each other.  The archive's
published MD5 is c32a1d4ab5d03f1284b67883e8d87530; give the SHA-256 of your files by --sha256 to have them compared.
"""

import argparse
import hashlib
import json
import tempfile
import time
from pathlib import Path

import numpy as np

import recompute as rc

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
#: network → options of the small one, options of the full one, batch of the full one
NETWORKS = {
    "resnet18": ({"width": 16, "blocks": (1, 1, 1, 1), "image": 32, "classes": 10}, {"image": 32, "classes": 10}, 128),
    "darts": ({"cells": 3, "width": 8}, {}, 96),
}


def generated(folder: Path) -> Path:
    """Files of CIFAR-10's binary format with ten kinds of generated images: 640 to train on, 160 to test."""
    g = np.random.default_rng(0)
    patterns = g.integers(40, 216, (10, 3, 4, 4)).repeat(8, 2).repeat(8, 3)
    for name, count in (("data_batch_1.bin", 320), ("data_batch_2.bin", 320), ("test_batch.bin", 160)):
        label = g.integers(0, 10, count)
        images = np.clip(patterns[label] + g.normal(0, 40, (count, 3, 32, 32)), 0, 255).astype(np.uint8)
        records = np.concatenate([label.astype(np.uint8)[:, None], images.reshape(count, -1)], axis=1)
        (folder / name).write_bytes(records.tobytes())
    return folder


def images(folder: Path, sha256: dict[str, str] | None, *, train: bool) -> rc.data.Dataset:
    """Columns x float32[3,32,32], normalised, and label; in training mirrored and moved by up to 4 pixels at random."""
    contents = {p.name: p.read_bytes() for p in sorted(folder.glob("data_batch_*.bin" if train else "test_batch.bin"))}
    for name, content in contents.items():
        if sha256 is not None and hashlib.sha256(content).hexdigest() != sha256[name]:
            raise SystemExit(f"{name} is damaged or another version: its SHA-256 differs")
    records = np.frombuffer(b"".join(contents.values()), np.uint8).reshape(-1, 1 + 3 * 32 * 32)
    found = rc.data.dataset({"image": records[:, 1:].reshape(-1, 3, 32, 32), "label": records[:, 0].astype(np.int64)})
    change = {"flip": True, "pad": 4} if train else {}
    return rc.data.select(rc.data.Pixels(found, "image", MEAN, STD, **change), {"x": "image", "label": "label"})


def compared(name: str, options: dict, batch: int, train: rc.data.Dataset, test: rc.data.Dataset) -> None:
    """Trains a network plain and recomputed, and prints both."""
    results = []
    for kind in ("plain", "recomputed"):
        program = rc.load(rc.models.build(name, **options), batch=batch)
        optimizer = rc.Momentum(0.05, momentum=0.9)
        if kind == "recomputed":
            kept = rc.models.info(name, **options).checkpoints
            optimizer = rc.RecomputeOptimizer(optimizer).set_checkpoints(list(kept))
        trainer = rc.Trainer(program, optimizer, loss="cross_entropy", metrics=[rc.metrics.Accuracy()])
        begun = time.perf_counter()
        history = trainer.fit(train, epochs=2, eval_data=test)
        if history.stopped:
            raise SystemExit(history.stopped)
        seconds = time.perf_counter() - begun
        accuracy = history.epochs[-1]["eval"]["accuracy"]
        results.append((accuracy, history.weights_sha256))
        print(f"{name:9} {kind:10}  accuracy {accuracy:.4f}  peak {history.peak_bytes['measured'] / 2**20:8.1f} MiB  "
              f"{seconds:7.1f} s  weights {history.weights_sha256[:12]}", flush=True)  # fmt: skip
    print(f"{name:9} {'the same bits' if results[0] == results[1] else 'DIFFERENT'}")


def main() -> None:
    """Trains both networks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder of data_batch_1.bin to 5 and test_batch.bin")
    parser.add_argument("--sha256", type=Path, metavar="FILE.json", help="file name → SHA-256 of its contents")
    args = parser.parse_args()
    digests = None if args.sha256 is None else json.loads(args.sha256.read_text())
    with tempfile.TemporaryDirectory() as folder:
        source = args.data or generated(Path(folder))
        train, test = (images(source, digests, train=kind) for kind in (True, False))
        for name, (small, full, batch) in NETWORKS.items():
            compared(name, full if args.data else small, batch if args.data else 32, train, test)


if __name__ == "__main__":
    main()
