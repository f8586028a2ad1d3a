"""Train a detector on generated scenes, plain and recomputed: the same bits in less memory, and COCO's mAP.

Needs pycocotools (extra `examples`).  detecting/ makes scenes, targets and boxes.

--quick compares the first steps only.
"""

import argparse

import numpy as np

import recompute as rc
from detecting import Decoder, Locations, MeanAveragePrecision, Scenes

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=500, help="steps of the recomputed detector (default: 500)")
parser.add_argument("--quick", action="store_true", help="train the plain one for 20 steps only")
options = parser.parse_args()

BATCH, RATE = 16, 0.01
locations = Locations((64, 64), strides=(8, 16, 32), reach=3)
scenes = Scenes(locations, options.steps * BATCH, seed=0)


def train(checkpoints: list[str] | None, steps: int) -> tuple[rc.Program, list[float], int]:
    """The trained detector, its losses, and the peak of its memory in bytes."""
    program = rc.load(rc.models.build("fcos-tiny"), batch=BATCH)
    rate = rc.lr.LinearWarmup(rc.lr.CosineAnnealingDecay(RATE, options.steps), 20, 0.0, RATE)
    optimizer = rc.Adam(learning_rate=rate)
    if checkpoints:
        optimizer = rc.RecomputeOptimizer(optimizer).set_checkpoints(checkpoints)
    optimizer.minimize(program["loss"])
    executor, inputs = rc.Executor(), [v.name for v in program.inputs]
    losses = []
    for step in range(steps):
        feed = scenes.read(np.arange(BATCH) + step * BATCH, inputs)
        losses.append(executor.run(program, feed, ["loss"])[0].item())
    return program, losses, executor.session(program, ["loss"]).measured_peak_bytes


def judge(program: rc.Program) -> dict[str, float]:
    """mAP on scenes of another seed."""
    others = Scenes(locations, 128, seed=1)
    metric = MeanAveragePrecision(Decoder(locations)).bind(program)
    for first in range(0, len(others), 32):
        batch = others.take(np.arange(first, first + 32))
        outputs = program.evaluate({"x": batch["x"]}, metric.needs)
        metric.update(dict(zip(metric.needs, outputs, strict=True)), batch)
    return metric.result()


stages = list(rc.models.info("fcos-tiny").checkpoints)
program, losses, peak = train(stages, options.steps)
compared = min(20, options.steps) if options.quick else options.steps
plain, plain_losses, plain_peak = train(None, compared)

same = plain_losses == losses[:compared]
if compared == options.steps:
    same &= all(np.array_equal(plain.data[v.name], program.data[v.name]) for v in program.parameters)
for name, used, found in (("plain", plain_peak, plain_losses), ("recomputed", peak, losses)):
    print(f"{name:10} {used / 2**20:6.2f} MiB, loss {found[0]:.3f} to {found[-1]:.3f} in {len(found)} steps")
print("the same bits" if same else "other bits")
print(", ".join(f"{name} {value:.3f}" for name, value in judge(program).items()))
