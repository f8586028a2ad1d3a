"""Say what a step may take instead of naming checkpoints: a plan is found, and the step keeps to it."""

import recompute as rc
from recompute.data.batches import synthetic_batch

model = rc.models.build("bert-tiny", batch=64, seq=64)
plain = rc.estimate(model)
budget = plain.peak_bytes * 8 // 10
print(f"plain: {plain.peak_bytes:,} bytes; the budget: {budget:,} bytes")

program = rc.load(model)
loss = rc.losses.cross_entropy(program["logits"])
rc.RecomputeOptimizer(rc.Adam(learning_rate=1e-3)).set_budget(budget, effort=0.1).minimize(loss)  # a short search

executor = rc.Executor()
feed = synthetic_batch(program)
losses = [executor.run(program, feed, [loss])[0].item() for _ in range(3)]
peak = executor.session(program, [loss.name]).measured_peak_bytes
print(f"planned: {peak:,} bytes; losses {losses}")
