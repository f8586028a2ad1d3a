"""Images a second that are loaded from a folder of JPEG files, beside PyTorch's DataLoader with as many workers.

    python benchmarks/data_loading.py [--images 512] [--workers 2] [--batch 64] [--size 224] [--stored 224]

The files are made in a temporary directory.  Both loaders decode, cut and scale the same files to float32 batches with
channels first, shuffled.  PyTorch's side needs torch and torchvision; without them only ours is measured.  Both are run
alternately; the fastest pass of each counts.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from recompute.data import ImageFolder
from recompute.data.drawing import permutation

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def write(folder: Path, images: int, size: int) -> None:
    """JPEG files of noise on smooth colours, of about 25 kB where size is 224, in ten classes."""
    g = np.random.default_rng(0)
    for i in range(images):
        coarse = g.integers(0, 256, (12, 12, 3), dtype=np.uint8)
        smooth = Image.fromarray(coarse).resize((size, size), Image.Resampling.BICUBIC)
        pixels = np.asarray(smooth, np.int16) + g.integers(-12, 13, (size, size, 3), np.int16)
        of_class = folder / str(i % 10)
        of_class.mkdir(exist_ok=True)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(of_class / f"{i}.jpg", quality=85)


def ours(folder: Path, args: argparse.Namespace) -> Callable[[], Iterable[np.ndarray]]:
    """A function that gives the batches of an epoch."""
    data = ImageFolder(folder, size=args.size, mean=MEAN, std=STD, workers=args.workers)
    order = permutation(len(data), 0)

    def batches() -> Iterable[np.ndarray]:
        for start in range(0, len(order), args.batch):
            yield data.take(order[start : start + args.batch])["image"]

    return batches


def pytorch(folder: Path, args: argparse.Namespace) -> Callable[[], Iterable[Any]] | None:
    """The same by PyTorch's DataLoader, whose processes persist; None without PyTorch."""
    try:
        import torch
        from torchvision import datasets, transforms
    except ImportError:
        return None
    torch.set_num_threads(1)
    steps = [
        transforms.Resize(args.size), transforms.CenterCrop(args.size), transforms.ToTensor(),
        transforms.Normalize(MEAN, STD),
    ]  # fmt: skip
    data = datasets.ImageFolder(str(folder), transforms.Compose(steps))
    loader = torch.utils.data.DataLoader(
        data, args.batch, shuffle=True, num_workers=args.workers, persistent_workers=args.workers > 0
    )
    return lambda: (images for images, _ in loader)


def measured(batches: Callable[[], Iterable[Any]]) -> tuple[float, int]:
    """Seconds of an epoch, and its images."""
    start = time.perf_counter()
    count = sum(len(b) for b in batches())
    return time.perf_counter() - start, count


def main() -> None:
    """Measures and prints images a second."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"images": 512, "workers": 2, "batch": 64, "size": 224, "stored": 224, "passes": 5}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, args.images, args.stored)
        loaders = {"recompute": ours(folder, args), "PyTorch": pytorch(folder, args)}
        best: dict[str, float] = {}
        for i in range(args.passes + 1):  # the first starts threads and processes
            for kind, batches in loaders.items():
                if batches is not None:
                    seconds, count = measured(batches)
                    best[kind] = max(best.get(kind, 0.0), count / seconds) if i else 0.0
        print(f"{args.images} images of {args.stored} pixels, {args.workers} workers, batches of {args.batch}")
        for kind, rate in best.items():
            print(f"  {kind:10} {rate:8.0f} images/s")


if __name__ == "__main__":
    main()
