"""Fine-tune a small LLaMA with LoRA within a memory budget, and merge what was learnt into the ONNX model."""

import numpy as np
import onnxruntime

import recompute as rc

BATCH, SEQ, VOCAB, STEPS = 16, 32, 100, 100


def batch(generator: np.random.Generator) -> dict[str, np.ndarray]:
    """Sequences in which each token follows from the one before: t ↦ 3·t + 1 (mod VOCAB)."""
    tokens = [generator.integers(0, VOCAB, BATCH)]
    for _ in range(SEQ):
        tokens.append((3 * tokens[-1] + 1) % VOCAB)
    rows = np.stack(tokens, axis=1)
    return {"input_ids": rows[:, :-1].copy(), "label": rows[:, 1:].copy()}


base = rc.load(rc.models.build("llama-tiny", batch=BATCH, seq=SEQ, vocab=VOCAB))
program = rc.lora(base, ["*.self_attn.*.weight", "lm_head.weight"], r=8, alpha=16)
saved = rc.tuning.savings(program)
print(saved)

loss = rc.losses.cross_entropy(program["logits"])
budget = saved.after.peak_bytes * 95 // 100
rc.RecomputeOptimizer(rc.AdamW(learning_rate=1e-2)).set_budget(budget, effort=0.1).minimize(loss)  # a short search

executor, generator = rc.Executor(), np.random.default_rng(0)
losses = [executor.run(program, batch(generator), [loss])[0].item() for _ in range(STEPS)]
peak = executor.session(program, [loss.name]).measured_peak_bytes
print(f"loss: {losses[0]:.3f} before, {losses[-1]:.3f} after {STEPS} steps")
before, after = saved.before.peak_bytes, saved.after.peak_bytes
print(f"peak: {before:,} bytes to train everything, {after:,} with LoRA, {peak:,} planned")

merged = rc.merge_adapters(program)
inputs = {"input_ids": batch(generator)["input_ids"]}
(own,) = program.evaluate(inputs, ["logits"])
(theirs,) = onnxruntime.InferenceSession(merged.SerializeToString()).run(["logits"], inputs)
print(f"merged: ONNX Runtime's scores differ by {abs(own - theirs).max() / abs(own).max():.1e} of the largest")
