"""Train the zoo's small ResNet twice, plain and recomputed: the same losses, bit for bit, in less memory."""

import numpy as np

import recompute as rc

g = np.random.default_rng(0)
feed = {"x": g.standard_normal((16, 3, 64, 64), dtype=np.float32), "label": g.integers(0, 10, 16)}

for checkpoints in (None, ["layer1.1.out", "layer2.1.out", "layer3.1.out"]):
    program = rc.load(rc.models.build("resnet18", batch=16, image=64, classes=10))
    loss = rc.losses.cross_entropy(program["logits"])
    optimizer = rc.Adam(learning_rate=1e-3)
    if checkpoints:
        optimizer = rc.RecomputeOptimizer(optimizer).set_checkpoints(checkpoints)
    optimizer.minimize(loss)

    executor = rc.Executor()
    losses = [executor.run(program, feed, [loss])[0].item() for _ in range(5)]
    peak = executor.session(program, [loss.name]).measured_peak_bytes
    print("recomputed" if checkpoints else "plain     ", f"{peak / 2**20:7.1f} MiB", losses)
