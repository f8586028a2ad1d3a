"""Our side of run_all: one job from the command line, one line of JSON as the answer."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from gpu_rows import RATE, SEED, Batch, Row

import recompute as rc
from recompute import models
from recompute.compiling.compiler import CompiledStep, compile_step
from recompute.cost import total_cost
from recompute.runtime import CUDAPlace, EmulatedCUDAPlace
from recompute.training import losses

#: steps before the clock starts (compiling, eager run, capture), and how long it runs
WARM, SECONDS, LEAST = 3, 1.5, 5


def place_of(job: dict[str, Any]) -> Any:
    """The device, or the emulated one."""
    return EmulatedCUDAPlace() if job["emulated"] else CUDAPlace(0)


def device(job: dict[str, Any]) -> dict[str, Any]:
    """Its name and the versions."""
    if job["emulated"]:
        return {"device": "emulated", "numpy": np.__version__}
    from recompute.runtime.cuda.device.device import unavailable

    if why := unavailable():
        return {"error": why}
    import cupy
    from cupy_backends.cuda.api import runtime

    properties = runtime.getDeviceProperties(0)
    found = {"device": properties["name"].decode(), "memory": properties["totalGlobalMem"],
             "cuda": runtime.runtimeGetVersion(), "driver": runtime.driverGetVersion(),
             "cupy": cupy.__version__, "numpy": np.__version__}  # fmt: skip
    try:
        import torch

        found["torch"] = torch.__version__
    except ImportError:
        pass
    return found


def optimizer(row: Row) -> Any:
    """As PyTorch's."""
    if row.optimizer == "momentum":
        return rc.Momentum(learning_rate=RATE, momentum=0.9)
    return rc.Adam(learning_rate=RATE)


def compiled(row: Row, variant: str, place: Any) -> tuple[CompiledStep, str]:
    """The step of a variant, and its loss.  Strategies are given what lies in the middle of a plain step's peak and
    that with the zoo's checkpoints."""
    program = rc.load(models.build(row.network, batch=row.batch, seed=SEED, **row.options))
    kind, _ = losses.natural_loss(program)
    loss = kind if kind in program else getattr(losses, kind)(program).name
    options: dict[str, Any] = {"place": place}
    if row.precision != "fp32":
        options["precision"] = row.precision
    if variant in ("ours-recomputed", "checkpoints"):
        options["checkpoints"] = [c for c in models.info(row.network, **row.options).checkpoints if c in program]
    elif variant not in ("ours", "plain"):
        peaks = [compiled(row, v, place)[0].figures.peak_bytes for v in ("plain", "checkpoints")]
        options |= {"budget": sum(peaks) // 2, "strategy": {"sqrt": "chen-sweep"}.get(variant, variant)}
    return compile_step(program, loss, optimizer(row), **options), loss


def timed(session: Any) -> float:
    """Seconds of a step: launched one after the other, waited for at the end."""
    begin, steps = time.perf_counter(), 0
    session.device.synchronize()
    begin = time.perf_counter()
    while steps < LEAST or time.perf_counter() - begin < SECONDS:
        session.run()
        steps += 1
        if steps % LEAST == 0:
            session.device.synchronize()
    session.device.synchronize()
    return (time.perf_counter() - begin) / steps


def step(job: dict[str, Any]) -> dict[str, Any]:
    """Loss of the first step, time, memory, rates, and the operators that take longest."""
    row, place = Row(**job["row"]), place_of(job)
    begin = time.perf_counter()
    made, loss = compiled(row, job["variant"], place)
    planned = time.perf_counter() - begin
    arrays = np.load(job["data"])
    feed = {str(n): arrays[f"feed/{n}"] for n in arrays["order"]}
    executor = rc.Executor(place)
    before = used(place)
    first = float(executor.run(made.program, feed, [loss])[0])
    built = time.perf_counter() - begin - planned
    for _ in range(WARM - 1):
        last = float(executor.run(made.program, feed, [loss])[0])
    session = executor.session(made.program, [loss])
    seconds = timed(session)
    cost = total_cost(op for op in made.program.block.operators)
    by_operator: dict[str, float] = {}
    for op, s in session.run_timed():
        by_operator[op.op.name] = by_operator.get(op.op.name, 0.0) + s
    top = sorted(by_operator.items(), key=lambda x: -x[1])[:8]
    return {
        "ms": seconds * 1e3, "loss": first, "last_loss": last, "peak": session.measured_peak_bytes,
        "predicted_peak": made.figures.peak_bytes, "measured_peak": session.measured_peak_bytes,
        "device_bytes": used(place) - before, "tflops": cost.flops / seconds / 1e12, "gbs": cost.bytes / seconds / 1e9,
        "launches": sum(len(s.calls) for s in session.steps), "on_host": [op.op.name for op in session.on_host],
        "compile_seconds": planned, "first_step_seconds": built, "top_ms": {n: s * 1e3 for n, s in top},
    }  # fmt: skip


def used(place: Any) -> int:
    """Bytes of the device's memory that are taken."""
    if isinstance(place, EmulatedCUDAPlace):
        return 0
    from cupy_backends.cuda.api import runtime

    free, total = runtime.memGetInfo()
    return total - free


def batch(job: dict[str, Any]) -> dict[str, Any]:
    """The biggest batch that is predicted to fit a budget, and a step of it."""
    wanted, place = Batch(**job["row"]), place_of(job)
    found = rc.max_batch(wanted.network, job["budget"], optimizer=rc.Momentum(learning_rate=RATE, momentum=0.9),
                         options=wanted.options, place=place)  # fmt: skip
    best = found.best
    row = Row(wanted.network, best.batch, optimizer="momentum", options=wanted.options)
    program = rc.load(models.build(row.network, batch=row.batch, weights=False, **row.options))
    kind, _ = losses.natural_loss(program)
    loss = kind if kind in program else getattr(losses, kind)(program).name
    kept = {} if best.checkpoints is None else {"checkpoints": list(best.checkpoints)}
    if best.strategy not in ("plain",) and best.checkpoints is None:
        kept = {"budget": job["budget"], "strategy": "auto"}
    made = compile_step(program, loss, optimizer(row), place=place, **kept)
    entry = models.info(row.network, **row.options)
    draw = np.random.default_rng(SEED)
    feed = {s.name: s.sample(draw, batch=row.batch) for s in (*entry.inputs, entry.label) if s}
    executor = rc.Executor(place)
    executor.run(made.program, feed, [loss])
    session = executor.session(made.program, [loss])
    return {"batch": best.batch, "strategy": best.strategy, "predicted_peak": made.figures.peak_bytes,
            "measured_peak": session.measured_peak_bytes, "next_peak": best.next_peak_bytes,
            "ms": timed(session) * 1e3}  # fmt: skip


def ceilings(job: dict[str, Any]) -> dict[str, Any]:
    """TFLOP/s of a large product by precision, and GB/s of a copy, read and written."""
    from recompute.language.types import TensorType
    from recompute.runtime.cuda.device.device import open_device
    from recompute.runtime.cuda.device.kernel import Buffer, Copy, Product

    if job["emulated"]:
        return {}
    d, n = open_device(0), 8192
    found: dict[str, Any] = {}
    for name, dtype in (("fp32", "f32"), ("tf32", "f32"), ("bf16", "bf16")):
        t = TensorType(dtype, (n, n))
        start, memory = d.allocate(3 * t.nbytes)
        a, b, c = (Buffer(start + i * t.nbytes, t) for i in range(3))
        for x in (a, b):
            d.upload(x, np.random.default_rng(0).standard_normal((n, n), np.float32).astype(t.numpy))
        run = d.prepare(Product(a, b, c, n, n, n, n, n, n, tf32=name == "tf32"))
        found[f"{name}_tflops"] = round(2 * n**3 / _repeated(d, run) / 1e12, 1)
        del memory
    t = TensorType("u8", (1 << 30,))
    start, memory = d.allocate(2 << 30)
    run = d.prepare(Copy(Buffer(start, t), Buffer(start + t.nbytes, t)))
    found["copy_gbs"] = round(2 * t.nbytes / _repeated(d, run) / 1e9)
    del memory
    return found


def _repeated(d: Any, run: Any, times: int = 20) -> float:
    with d.stream:
        for _ in range(3):
            run()
        begin = d.event()
        for _ in range(times):
            run()
        return d.seconds_between(begin, d.event()) / times


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    job = json.loads(sys.argv[1])
    print(json.dumps({"device": device, "step": step, "batch": batch, "ceilings": ceilings}[job["do"]](job)))
