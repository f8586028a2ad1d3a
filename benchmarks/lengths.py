"""Training on texts of many lengths: losses, memory and times of buckets, beside padding to the longest.

python benchmarks/lengths.py losses     # of each step, beside the same samples padded to the largest bucket
python benchmarks/lengths.py memory     # resident memory of 20 lengths, one after the other, and what each costs
python benchmarks/lengths.py steps      # resident memory over many steps (--steps 20000)
python benchmarks/lengths.py speed      # samples a second: buckets, padded to the longest, PyTorch eager
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import recompute as rc
from recompute.support.memory import give_back
from recompute.trainer.buckets import BucketFeeding

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "trainer"))
from text_cases import text_model, texts, trainer

BUCKETS = (32, 64, 128, 256, 512)


class Steps(rc.Callback):
    """Losses of all steps; resident MiB at every `every`-th; ends the run after `most`."""

    def __init__(self, every: int = 0, most: int = 0) -> None:
        self.losses: list[float] = []
        self.resident: list[tuple[int, float]] = []
        self.made: list[tuple[int, int]] = []
        self.every, self.most = every, most

    def on_step(self, trainer: Any, step: int, loss: float) -> None:
        """See `recompute.Callback`."""
        self.losses.append(loss)
        if self.every and step % self.every == 0:
            self.resident.append((step, resident()))
        if step == self.most:
            trainer.stop("enough")

    def on_epoch(self, trainer: Any, results: dict[str, Any]) -> None:
        """See `recompute.Callback`."""
        self.made.append((len(trainer.programs._training), len(trainer.executor._sessions)))


def resident() -> float:
    """MiB of this process that are in memory."""
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("VmRSS")).split()[1]) / 1024


def losses(kind: str, options: dict[str, Any]) -> None:
    """The largest difference between a step's loss and that of its samples padded to the largest bucket."""
    data = texts(64, shortest=16, longest=512, vocab=options["vocab"])
    said = Steps()
    bucketed = trainer(
        kind, batch=8, length=512, buckets=BUCKETS, model=options, callbacks=[said], optimizer=rc.Adam(1e-3)
    )
    history = bucketed.fit(data, epochs=2)
    feeding = BucketFeeding(data, bucketed.buckets, bucketed.programs.inputs(training=True), 3, True)
    program = rc.load(text_model(kind, **options), batch=8, dims={"sequence": 512})
    rc.Adam(1e-3).minimize(rc.losses.cross_entropy(program["logits"]))
    executor, expected = rc.Executor(), []
    for epoch in (1, 2):
        for feed, _ in feeding.read(feeding.cut(8, rest=True), epoch, 0):
            rest = ((0, 0), (0, 512 - feed["label"].shape[1]))
            whole = {n: np.pad(a, rest, constant_values=-100 if n == "label" else 0) for n, a in feed.items()}
            expected.append(executor.run(program, whole, ["loss"])[0].item())
    first = abs(said.losses[0] - expected[0]) / expected[0]
    every = max(abs(a - b) / b for a, b in zip(said.losses, expected, strict=True))
    peak = history.peak_bytes
    only = trainer(kind, batch=8, length=512, buckets=(512,), model=options)
    alone = only.programs.plan([only.programs.own], []).total
    print(f"{kind}: {len(expected)} steps, relative difference of losses {first:.1e} in step 1, at most {every:.1e}")
    print(f"  peak predicted {peak['predicted']:,}, measured {peak['measured']:,}; of length 512 alone {alone:,}")
    print(f"  programs and sessions after epochs 1 and 2: {said.made}")


def memory(kind: str, options: dict[str, Any]) -> None:
    """What each of 20 lengths costs: seconds of processor time, resident MiB."""
    lengths = tuple(int(n) for n in np.linspace(16, 512, 20))
    executor, g = rc.Executor(), np.random.default_rng(0)
    program = rc.load(text_model(kind, **options), batch=8, dims={"sequence": 512})
    rc.Adam(1e-3).minimize(rc.losses.cross_entropy(program["logits"]))

    def run(length: int) -> None:
        x = g.integers(0, options["vocab"], (8, length))
        feed = {"input_ids": x, "label": x, "attention_mask": np.ones_like(x)}
        executor.run(program, {v.name: feed[v.name] for v in program.block.inputs}, ["loss"])

    run(512)
    give_back()
    begin, rows = resident(), []
    print(f"{kind}: {len(program.block.operators)} operators, {begin:.1f} MiB resident at length 512")
    for length in reversed(lengths[:-1]):
        before, start = resident(), time.process_time()
        run(length)
        first, start = time.process_time() - start, time.process_time()
        run(length)
        rows.append((first - (time.process_time() - start), resident() - before))
        print(f"  length {length}: {rows[-1][0]:.3f} s of processor time to make it, {rows[-1][1]:+.2f} MiB")
    give_back()
    print(
        f"  {len(rows)} lengths: {resident() - begin:+.1f} MiB in all, median {np.median([r[0] for r in rows]):.3f} s"
    )


def steps(kind: str, options: dict[str, Any], count: int) -> None:
    """Resident memory over many steps of all buckets, with an evaluation after each epoch."""
    said = Steps(max(1, count // 10), count)
    data, other = (texts(n, longest=64, vocab=options["vocab"], seed=n) for n in (400, 40))
    buckets = (8, 16, 24, 32, 48, 64)
    t = trainer(kind, batch=4, length=64, buckets=buckets, model=options, callbacks=[said], optimizer=rc.Adam(1e-3))
    t.fit(data, epochs=1 << 20, eval_data=other)
    print(f"{kind}: {len(said.losses):,} steps over {len(buckets)} buckets")
    print("  " + ", ".join(f"{step:,}: {mib:.1f} MiB" for step, mib in said.resident))


def speed(kind: str, options: dict[str, Any]) -> None:
    """Samples a second of processor time, in buckets, padded to the longest, and by PyTorch in the same buckets."""
    data = texts(96, shortest=16, longest=512, vocab=options["vocab"])
    for name, buckets in (("buckets", BUCKETS), ("padded to 512", (512,))):
        t = trainer(kind, batch=8, length=512, buckets=buckets, model=options, optimizer=rc.Adam(1e-3))
        t.fit(data)
        feeding = BucketFeeding(data, t.buckets, t.programs.inputs(training=True), 3, True)
        start = time.process_time()
        for feed, count in feeding.read(feeding.cut(8, rest=True), 2, 0):
            program = t.programs.training(t.programs.fed(count, feed))
            t.executor.run(program, feed, ["loss"])
        print(f"{kind}, {name}: {len(feeding.found) / (time.process_time() - start):.2f} samples a processor second")
    try:
        import torch
    except ImportError:
        print("PyTorch is not installed")
        return
    model = Torch(kind, options)
    optimizer = torch.optim.Adam(model.weights.values(), 1e-3)
    t = trainer(kind, batch=8, length=512, buckets=BUCKETS, model=options, optimizer=rc.Adam(1e-3))
    feeding = BucketFeeding(data, t.buckets, t.programs.inputs(training=True), 3, True)
    for epoch in (1, 2):
        start = time.process_time()
        for feed, _ in feeding.read(feeding.cut(8, rest=True), epoch, 0):
            optimizer.zero_grad()
            loss = model.loss(feed)
            loss.backward()
            optimizer.step()
    seconds = time.process_time() - start
    print(f"{kind}, PyTorch {torch.__version__} eager: {len(feeding.found) / seconds:.2f} samples a processor second")


class Torch:
    """The transformer of `text_model` in PyTorch, with the same weights."""

    def __init__(self, kind: str, options: dict[str, Any]) -> None:
        import onnx
        import torch

        found = {t.name: onnx.numpy_helper.to_array(t) for t in text_model(kind, **options).graph.initializer}
        self.kind, self.heads, self.layers = kind, options["heads"], options["layers"]
        floats = {n: a for n, a in found.items() if a.dtype == np.float32 and a.ndim}
        self.weights = {n: torch.nn.Parameter(torch.tensor(a)) for n, a in floats.items()}

    def loss(self, feed: dict[str, np.ndarray]) -> Any:
        """The mean cross-entropy of the labels that are not -100."""
        import torch
        from torch.nn import functional as f

        w, ids = self.weights, torch.from_numpy(feed["input_ids"])
        count, length = ids.shape
        x = w["wte"][ids] + w["wpe"][:length]
        mask = None if self.kind == "gpt2" else torch.from_numpy(feed["attention_mask"])[:, None, None, :].bool()
        for i in range(self.layers):
            parts = (x @ w[f"{i}.{p}"] for p in "qkv")
            q, k, v = (p.view(count, length, self.heads, -1).transpose(1, 2) for p in parts)
            y = f.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=1.0)
            x = x + y.transpose(1, 2).reshape(x.shape) @ w[f"{i}.o"]
            y = f.layer_norm(x, x.shape[-1:], w[f"{i}.norm"])
            x = x + f.gelu(y @ w[f"{i}.up"]) @ w[f"{i}.down"]
        return f.cross_entropy((x @ w["head"]).flatten(0, 1), torch.from_numpy(feed["label"]).flatten())


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("losses", "memory", "steps", "speed"))
    parser.add_argument("--steps", type=int, default=20000)
    parser.add_argument("--kinds", default="bert,gpt2")
    args = parser.parse_args()
    large = {"layers": 4, "hidden": 128, "heads": 4, "vocab": 1000}
    for kind in args.kinds.split(","):
        if args.what == "steps":
            steps(kind, {"layers": 2, "hidden": 32, "heads": 2, "vocab": 100}, args.steps)
        else:
            {"losses": losses, "memory": memory, "speed": speed}[args.what](kind, large)


if __name__ == "__main__":
    main()
