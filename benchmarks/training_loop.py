"""What `Trainer.fit` costs beside bare steps of the same program: in one process, taking turns.

    OMP_NUM_THREADS=2 python benchmarks/training_loop.py [lenet resnet18 bert-tiny gpt2-tiny] [--rounds 5]

A round is an epoch in `fit` (data from memory, a shuffled order, log and checkpoints on disk) and as many steps of an
executor on batches that are cut before.  The ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

import recompute as rc

#: network → options, batch, steps of a round
NETWORKS = {
    "lenet": ({}, 64, 60),
    "resnet18": ({"image": 64, "classes": 10}, 8, 20),
    "bert-tiny": ({"seq": 64}, 8, 30),
    "gpt2-tiny": ({"seq": 64}, 8, 20),
}


class Clock(rc.Callback):
    """Seconds from one step's end to the next, of the steps of a round."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last = 0.0

    def on_begin(self, trainer: rc.Trainer) -> None:
        """Starts."""
        self._last = time.perf_counter()

    def on_step(self, trainer: rc.Trainer, step: int, loss: float) -> None:
        """Notes the time of a step."""
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now


def compared(name: str, rounds: int) -> tuple[float, float]:
    """Medians of seconds of a step: bare, and in `fit`."""
    options, batch, steps = NETWORKS[name]
    model = rc.models.build(name, **options)
    made = [rc.load(model, batch=batch) for _ in range(2)]
    samples = rc.data.synthetic_batch(rc.load(model, batch=batch * steps))
    has_loss = rc.models.info(name, **options).label is None
    clock = Clock()
    trainer = rc.Trainer(
        made[0], rc.Adam(1e-3), loss="loss" if has_loss else "cross_entropy", callbacks=[clock], quiet=True
    )
    label = [v for v in made[0].block.inputs if v.name not in samples]
    for v in label:
        samples[v.name] = np.random.default_rng(0).integers(0, 2, (batch * steps, *v.shape[1:]))
    if not has_loss:
        rc.losses.cross_entropy(made[1]["logits"])
    rc.Adam(1e-3).minimize(made[1]["loss"])
    executor = rc.Executor()
    feeds = [{n: a[i * batch : (i + 1) * batch] for n, a in samples.items()} for i in range(steps)]
    bare: list[float] = []
    for turn in range(rounds + 1):
        for feed in feeds:
            begin = time.perf_counter()
            executor.run(made[1], feed, ["loss"])
            if turn:
                bare.append(time.perf_counter() - begin)
        with tempfile.TemporaryDirectory() as folder:
            trainer.fit(samples, epochs=1, save=Path(folder) / "run")
        if not turn:
            clock.seconds.clear()
    return float(np.median(bare)), float(np.median(clock.seconds))


def main() -> None:
    """Prints a line for each network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=list(NETWORKS), help="some of " + ", ".join(NETWORKS))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    for name in args.networks:
        bare, inside = compared(name, args.rounds)
        print(
            f"{name:10} bare {1000 * bare:8.2f} ms  in fit {1000 * inside:8.2f} ms  ratio {inside / bare:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
