"""The same training on any number of ranks, to the bit: `python examples/fleet.py`, or on two processes
`python -m recompute.launch --nproc 2 examples/fleet.py`."""

import hashlib
import tempfile
from pathlib import Path

import numpy as np

import recompute as rc
from recompute import fleet

MICRO_BATCHES, SAMPLES = 4, 8  # of all ranks together, and of each

fleet.init(is_collective=True)
ranks, rank = fleet.worker_num(), fleet.worker_index()
strategy = fleet.DistributedStrategy()
strategy.gradient_merge = True
strategy.gradient_merge_configs = {"k_steps": MICRO_BATCHES // ranks}
strategy.sharding = True
strategy.sharding_configs = {"stage": 2}

program = rc.load(rc.models.build("mlp"), batch=SAMPLES)
loss = rc.losses.cross_entropy(program["pred.logits"])
fleet.distributed_optimizer(rc.Adam(1e-2), strategy).minimize(loss)

executor, losses = rc.Executor(), []
for step in range(20):
    g = np.random.default_rng(step)
    x = g.standard_normal((MICRO_BATCHES * SAMPLES, 32), dtype=np.float32)
    own = np.array_split(x, ranks)[rank]  # each rank feeds its own rows
    losses += executor.run(program, {"x": own, "label": (own[:, 0] > 0).astype(np.int64)}, [loss])

with tempfile.TemporaryDirectory() as folder:
    fleet.save_persistables(executor, folder, program)
    if fleet.is_first_worker():
        digest = hashlib.sha256((Path(folder) / "persistables.safetensors").read_bytes()).hexdigest()
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, weights and state {digest[:12]}, ranks {ranks}")
