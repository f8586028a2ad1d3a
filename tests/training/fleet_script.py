"""A script as users of Paddle's Fleet write it; the tests start it on 1, 2 and 4 ranks: K STAGE FOLDER."""

from __future__ import annotations

import hashlib
import sys
import warnings
from pathlib import Path

import numpy as np

import recompute as rc
from recompute import fleet

K, STAGE, FOLDER = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
LOCAL, STEPS = 2, 3
warnings.simplefilter("ignore", rc.RecomputeWarning)

fleet.init(is_collective=True)
strategy = fleet.DistributedStrategy()
strategy.amp = True
strategy.amp_configs = {"init_loss_scaling": 1024.0, "use_pure_fp16": False}
strategy.recompute = True
strategy.recompute_configs = {"checkpoints": ["h.0.out"]}
strategy.gradient_merge = True
strategy.gradient_merge_configs = {"k_steps": K, "avg": True}
if STAGE:
    strategy.sharding = True
    strategy.sharding_configs = {"stage": STAGE, "sharding_degree": fleet.worker_num()}

model = rc.models.build("gpt2-tiny", layers=1, hidden=8, heads=2, vocab=20, seq=4)
program = rc.load(model, batch=LOCAL)
loss = rc.losses.cross_entropy(program["logits"])
optimizer = rc.Adam(1e-2, grad_clip=rc.clip.ClipGradByGlobalNorm(0.5))
optimizer = fleet.distributed_optimizer(optimizer, strategy)
optimizer.minimize(loss)

exe = rc.Executor(rc.CPUPlace())
mine, g = fleet.worker_index(), np.random.default_rng(7)
for _ in range(STEPS):
    rows = LOCAL * K
    shapes = {v.name: (rows * fleet.worker_num(), *v.shape[1:]) for v in program.inputs}
    batch = {name: g.integers(0, 20, shape) for name, shape in shapes.items()}
    feed = {name: a[mine * rows : (mine + 1) * rows] for name, a in batch.items()}
    (value,) = exe.run(program, feed=feed, fetch_list=[loss])
    fleet.barrier_worker()

total = fleet.all_reduce(np.array([mine + 1.0, float(value)]))
assert total[0] == sum(range(1, fleet.worker_num() + 1)) and np.isclose(total[1], fleet.worker_num() * value)
assert fleet.util.all_gather(mine) == list(range(fleet.worker_num()))
assert fleet.local_rank() == mine and fleet.node_num() == 1 and len(fleet.worker_endpoints()) == fleet.worker_num()
fleet.save_persistables(exe, str(FOLDER), program)
if fleet.is_first_worker():
    digest = hashlib.sha256((FOLDER / "persistables.safetensors").read_bytes()).hexdigest()
    print(f"ranks {fleet.worker_num()} loss {float(value)!r} hash {digest}")
fleet.stop_worker()
