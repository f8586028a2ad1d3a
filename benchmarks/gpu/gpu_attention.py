#!/usr/bin/env python3
"""Attention by our kernels beside PyTorch's `scaled_dot_product_attention`, forward and gradient, on a CUDA device.

    benchmarks/gpu/gpu_attention.py [--rows "gpt2 s1024",...] [--precisions f32,tf32,f16,bf16] [--out FILE.json]
                                    [--emulated] [--no-pytorch]

Each line: milliseconds and TFLOP/s of the products of the mathematics (two forward, five for the gradient; those of
scores that a causal mask hides do not count), ours and PyTorch's, and their ratio.  Numbers are compared too: ours with
PyTorch's in float64, for the first keys and the queries that share them.  Exit code 1 where they differ, 2 where there
is no device.  `--emulated`: tiny shapes on the emulated device, without PyTorch, to see that this script works.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

from gpu_rows import this_checkout, wanted  # noqa: E402

#: calls before the clock starts, and how many are timed
WARM, TIMES = 3, 20
#: where PyTorch computes
PLACE = "cuda"
#: relative error of results by precision
AGREE = {"f32": 2e-5, "tf32": 4e-3, "f16": 1e-2, "bf16": 6e-2}


@dataclass(frozen=True)
class Row:
    """A shape: batch, heads of queries and of keys, sequence, size of a head."""

    name: str
    batch: int
    heads: int
    shared: int
    sequence: int
    size: int
    causal: bool = True

    def flops(self, products: int) -> float:
        """Of so many products of all scores with a head's size."""
        part = 0.5 * (1 + 1 / self.sequence) if self.causal else 1.0
        return 2.0 * products * self.batch * self.heads * self.sequence**2 * self.size * part


ROWS = (
    Row("gpt2 s1024", 8, 12, 12, 1024, 64),
    Row("bert-large s512", 16, 16, 16, 512, 64, causal=False),
    Row("llama-7b s4096", 1, 32, 32, 4096, 128),
    Row("llama-70b heads s4096", 1, 64, 8, 4096, 128),
    Row("gemma s4096", 1, 8, 4, 4096, 256),
)
TINY = (Row("tiny", 1, 2, 1, 70, 8), Row("tiny open", 1, 1, 1, 40, 8, causal=False))


class Ours:
    """The operator and its gradient, bound to buffers of a device."""

    def __init__(self, row: Row, precision: str, device: Any) -> None:
        from recompute.language.ir import Operator, Value
        from recompute.language.kernels import provider
        from recompute.language.types import TensorType
        from recompute.ops.attention.tiled import TiledAttention
        from recompute.ops.attention.tiled_grad import TiledAttentionGrad
        from recompute.runtime.cuda.device.kernel import Buffer

        self.device, self.memory = device, []
        dtype = "f32" if precision == "tf32" else precision
        found = provider("cuda_tf32" if precision == "tf32" else "cuda")
        options: dict[str, Any] = {"scale": row.size**-0.5, "last": 0 if row.causal else None}
        queries = TensorType(dtype, (row.batch, row.shared, row.heads // row.shared, row.sequence, row.size))
        keys = queries.with_shape((row.batch, row.shared, 1, row.sequence, row.size))

        def buffer(t: Any) -> Any:
            at, memory = device.allocate(t.nbytes)
            self.memory.append(memory)
            return Buffer(at, t)

        def bound(op: Any, ins: list[Any], outs: list[Any]) -> list[Callable[[], None]]:
            values = [[None if b is None else Value(f"{n}{i}", b.type) for i, b in enumerate(bs)]
                      for n, bs in (("i", ins), ("o", outs))]  # fmt: skip
            made = Operator(op, tuple(values[0]), tuple(values[1]))
            assert found.accepts(made)
            scratch = [buffer(t) for t in found.scratch(made)]
            return [device.prepare(c) for c in found.bind(made, ins, outs, scratch)]

        self.q, self.k, self.v = (buffer(t) for t in (queries, keys, keys))
        self.y, self.dy, self.dq = (buffer(queries) for _ in range(3))
        self.dk, self.dv = buffer(keys), buffer(keys)
        lse = buffer(TensorType("f32", queries.shape[:-1]))
        self.forward = bound(TiledAttention(**options), [self.q, self.k, self.v], [self.y, lse])
        ins = [self.q, self.k, self.v, None, self.y, lse, self.dy]
        self.backward = bound(TiledAttentionGrad(**options), ins, [self.dq, self.dk, self.dv])

    def draw(self) -> None:
        """Numbers for the inputs."""
        draw = np.random.default_rng(0)
        for b in (self.q, self.k, self.v, self.dy):
            self.device.upload(b, draw.standard_normal(b.shape, np.float32).astype(b.type.numpy))

    def seconds(self, calls: list[Callable[[], None]]) -> float:
        """Of one run of all calls."""
        with self.device.current():
            for _ in range(WARM):
                run(calls)
            if not self.device.graphs:
                begin = time.perf_counter()
                run(calls)
                return time.perf_counter() - begin
            begin = self.device.event()
            for _ in range(TIMES):
                run(calls)
            return self.device.seconds_between(begin, self.device.event()) / TIMES

    def results(self) -> list[np.ndarray]:
        """y, dq, dk, dv."""
        return [self.device.download(b).astype(np.float64) for b in (self.y, self.dq, self.dk, self.dv)]


def run(calls: list[Callable[[], None]]) -> None:
    """All of them."""
    for call in calls:
        call()


class Theirs:
    """PyTorch's on the same numbers; `exact`: in float64, and of the first keys alone."""

    def __init__(self, row: Row, precision: str, given: Ours, *, exact: bool = False) -> None:
        import torch

        self.torch, self.row = torch, row
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        kinds = {"f16": torch.float16, "bf16": torch.bfloat16}
        kind = torch.float64 if exact else kinds.get(precision, torch.float32)
        arrays = [given.device.download(b).astype(np.float32) for b in (given.q, given.k, given.v, given.dy)]
        if exact:
            arrays = [a[:1, :1] for a in arrays]
        self.q, self.k, self.v, self.dy = (
            torch.tensor(a.reshape(len(a), -1, row.sequence, row.size), device=PLACE, dtype=kind) for a in arrays
        )
        for x in (self.q, self.k, self.v):
            x.requires_grad_(True)

    def forward(self) -> Any:
        """The result."""
        attend = self.torch.nn.functional.scaled_dot_product_attention
        shared = {"enable_gqa": True} if self.row.shared < self.row.heads else {}
        return attend(self.q, self.k, self.v, is_causal=self.row.causal, **shared)

    def gradients(self, y: Any) -> Any:
        """Those of q, k and v."""
        return self.torch.autograd.grad(y, (self.q, self.k, self.v), self.dy, retain_graph=True)

    def seconds(self, what: Callable[[], Any]) -> float:
        """Of one call."""
        for _ in range(WARM):
            what()
        begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(TIMES):
            what()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3 / TIMES


def errors(row: Row, precision: str, ours: Ours) -> list[float]:
    """The largest error of y, dq, dk and dv, relative to their largest number; PyTorch's in float64 is exact."""
    exact = Theirs(row, precision, ours, exact=True)
    y = exact.forward()
    wanted = [x.detach().cpu().numpy() for x in (y, *exact.gradients(y))]
    found = []
    for got, want in zip(ours.results(), wanted, strict=True):
        found.append(float(np.abs(got[:1, :1].reshape(want.shape) - want).max() / np.abs(want).max()))
    return found


def measured(row: Row, precision: str, device: Any, *, compare: bool) -> dict[str, Any]:
    """One line of the table."""
    ours = Ours(row, precision, device)
    ours.draw()
    found: dict[str, Any] = {"row": row.name, "precision": precision}
    found["ours_ms"] = [ours.seconds(c) * 1e3 for c in (ours.forward, ours.backward)]
    found["tflops"] = [row.flops(n) / ms / 1e9 for n, ms in zip((2, 5), found["ours_ms"], strict=True)]
    if compare:
        theirs = Theirs(row, precision, ours)
        y = theirs.forward()
        found["torch_ms"] = [theirs.seconds(theirs.forward) * 1e3, theirs.seconds(lambda: theirs.gradients(y)) * 1e3]
        found["ratio"] = [a / b for a, b in zip(found["ours_ms"], found["torch_ms"], strict=True)]
        found["errors"] = errors(row, precision, ours)
        found["agrees"] = max(found["errors"]) <= AGREE[precision]
    return found


def line(r: dict[str, Any]) -> str:
    """For people."""
    cells = [f"{r['row']:<24} {r['precision']:<5}"]
    for i, name in enumerate(("forward", "gradient")):
        cells.append(f"{name} {r['ours_ms'][i]:8.3f} ms {r['tflops'][i]:7.1f} TFLOP/s")
        if "ratio" in r:
            cells.append(f"PyTorch {r['torch_ms'][i]:8.3f} ms, ratio {r['ratio'][i]:5.2f}")
    if not r.get("agrees", True):
        cells.append(f"DIFFERS: {max(r['errors']):.1e}")
    return "  ".join(cells)


def main() -> int:
    """All rows that were asked for."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rows", help="beginnings of rows' names (all)")
    p.add_argument("--precisions", default="f32,tf32,f16,bf16")
    p.add_argument("--out", type=Path, help="the numbers as JSON")
    p.add_argument("--no-pytorch", action="store_true", help="ours alone")
    p.add_argument("--emulated", action="store_true", help="tiny shapes on the emulated device")
    args = p.parse_args()
    if unknown := [x for x in args.precisions.split(",") if x not in AGREE]:
        p.error(f"--precisions knows {', '.join(AGREE)}, not {', '.join(unknown)}")
    this_checkout()
    from recompute.runtime.cuda.device import device as devices
    from recompute.runtime.cuda.device.emulator import EmulatedDevice

    if not args.emulated and (why := devices.unavailable()):
        print(f"gpu_attention: {why}", file=sys.stderr)
        return 2
    device: Any = EmulatedDevice() if args.emulated else devices.open_device(0)
    print(f"attention on {device.name}")
    found = []
    for row in TINY if args.emulated else ROWS:
        for precision in args.precisions.split(","):
            if wanted(row.name, [x.strip() for x in args.rows.split(",")] if args.rows else []):
                found.append(measured(row, precision, device, compare=not (args.emulated or args.no_pytorch)))
                print(line(found[-1]), flush=True)
    if args.out:
        args.out.write_text(json.dumps({"device": device.name, "rows": found}, indent=1) + "\n")
    return 0 if all(r.get("agrees", True) for r in found) else 1


if __name__ == "__main__":
    sys.exit(main())
