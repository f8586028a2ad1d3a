"""Our side of what is measured on a device: one job from the command line, one line of JSON as the answer."""

from __future__ import annotations

import collections
import json
import statistics
import sys
import time
from typing import Any

import numpy as np
from gpu_rows import RATE, SEED, Batch, Row, Small, alone, install_fake, rehearsed, sampled

import recompute as rc
from recompute import models
from recompute.compiling.compiler import CompiledStep, compile_step
from recompute.compiling.steps import attach_loss
from recompute.cost import total_cost
from recompute.runtime import CUDAPlace, EmulatedCUDAPlace
from recompute.runtime.cuda.device import cublas
from recompute.runtime.cuda.device.device import open_device

#: steps before the clock starts (compiling, eager run, capture), and how long it runs
WARM, SECONDS, LEAST, MOST = 3, 1.0, 5, 400
#: calls in a graph that is timed
TIMES = 20
#: kernels and operators that an answer names
NAMED = 40
Feed = dict[str, np.ndarray]


def place_of(job: dict[str, Any]) -> Any:
    """The device, or the emulated one."""
    return EmulatedCUDAPlace() if job.get("emulated") else CUDAPlace(0)


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


def loaded(
    network: str, batch: int, *, weights: bool = True, **options: Any
) -> tuple[rc.Program, str, tuple[str, ...]]:
    """A network of the zoo with its loss, the loss's name, and the checkpoints that the zoo proposes."""
    program = rc.load(models.build(network, batch=batch, seed=SEED, weights=weights, **options))
    loss, _ = attach_loss(program, None)
    return program, loss, tuple(c for c in models.info(network, **options).checkpoints if c in program)


def compiled(row: Row, variant: str, place: Any) -> tuple[CompiledStep, str]:
    """The step of a variant, and its loss.  Strategies get a budget halfway between the peak of a plain step and that
    with the zoo's checkpoints."""
    program, loss, checkpoints = loaded(row.network, row.batch, **row.options)
    options: dict[str, Any] = {"place": place}
    if row.precision != "fp32":
        options["precision"] = row.precision
    if variant in ("ours-recomputed", "checkpoints"):
        options["checkpoints"] = list(checkpoints)
    elif variant not in ("ours", "plain"):
        peaks = [compiled(row, v, place)[0].figures.peak_bytes for v in ("plain", "checkpoints")]
        options |= {"budget": sum(peaks) // 2, "strategy": {"sqrt": "chen-sweep"}.get(variant, variant)}
    return compile_step(program, loss, optimizer(row), **options), loss


def small(row: Small, place: Any, precision: str = "") -> tuple[CompiledStep, str, Feed]:
    """A small network's step, its loss and a batch.  `precision`: another one than its own."""
    program, loss, checkpoints = loaded(row.network, row.batch, **row.options)
    options: dict[str, Any] = {"place": place, **({"offload": True} if row.offload else {})}
    if row.kept or row.offload:
        options["checkpoints"] = list(checkpoints)
    if (precision or row.precision) != "fp32":
        options["precision"] = precision or row.precision
    made = compile_step(program, loss, rc.Momentum(learning_rate=0.01), **options)
    return made, loss, sampled(row.network, row.batch, **row.options)


def give(session: Any, feed: Feed) -> None:
    """Inputs for one run: they lie in the arena, where a step writes other values over them."""
    for name, array in feed.items():
        session.feed(name, array)


def timed(session: Any, feed: Feed) -> dict[str, Any]:
    """Milliseconds of a step that is launched behind the one before: on the device (the median), and by the clock with
    its feeds."""
    d, each = session.device, []
    d.synchronize()
    begin = time.perf_counter()
    while len(each) < LEAST or (time.perf_counter() - begin < SECONDS and len(each) < MOST):
        give(session, feed)
        if not d.graphs:
            session.run()
            each.append(None)
            continue
        with d.current():
            start = d.event()
        session.run()
        with d.current():
            each.append((start, d.event()))
        if len(each) % LEAST == 0:
            d.synchronize()
    d.synchronize()
    wall = (time.perf_counter() - begin) / len(each) * 1e3
    ms = statistics.median(d.seconds_between(*e) * 1e3 for e in each) if d.graphs else wall
    return {"ms": ms, "wall_ms": wall, "steps": len(each)}


def kernel_table(session: Any, feed: Feed, steps: int = 3) -> list[tuple[str, float, float]]:
    """Each kernel of the step's graphs, as PyTorch's profiler sees them: name, launches and microseconds a step."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.init()  # the profiler asks for a context of PyTorch's
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(steps):
            give(session, feed)
            session.run()
        session.device.synchronize()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = collections.defaultdict(lambda: [0, 0.0])
    for e in seen.events():
        if "CUDA" in str(e.device_type):
            found[e.name][0] += 1
            found[e.name][1] += float(getattr(e, "device_time_total", 0) or 0)
    rows = [(name, count / steps, round(us / steps, 1)) for name, (count, us) in found.items()]
    return sorted(rows, key=lambda r: -r[2])[:NAMED]


def profiler() -> str:
    """Imports PyTorch, which takes seconds; why it cannot, or ""."""
    cublas.library()  # before it, so that both have the same
    try:
        import torch.profiler  # noqa: F401
    except Exception as e:  # whatever a broken library does
        return f"{type(e).__name__}: {e}"[:300]
    return ""


def step(job: dict[str, Any]) -> dict[str, Any]:
    """Losses of the first steps, time, memory, rates, and the operators and kernels that take longest.

    `data`: weights and batch; without it both are drawn.  `lock`: see `gpu_rows.alone`.
    """
    row, place = Row(**job["row"]), place_of(job)
    begin = time.perf_counter()
    made, loss = compiled(row, job["variant"], place)
    planned = time.perf_counter() - begin
    if job.get("data"):
        arrays = np.load(job["data"])
        feed = {str(n): arrays[f"feed/{n}"] for n in arrays["order"]}
    else:
        feed = sampled(row.network, row.batch, **row.options)
    executor, kernels = rc.Executor(place), profiler() if job.get("kernels") and not rehearsed() else None
    with alone(job.get("lock")):
        before, begin = used(place), time.perf_counter()
        first = float(executor.run(made.program, feed, [loss])[0])
        built = time.perf_counter() - begin
        for _ in range(WARM - 1):
            last = float(executor.run(made.program, feed, [loss])[0])
        session = executor.session(made.program, [loss])
        times = timed(session, feed)
        begin = time.perf_counter()
        for _ in range(WARM):
            executor.run(made.program, feed, [loss])
        fetched = (time.perf_counter() - begin) / WARM * 1e3
        by_operator: dict[str, float] = {}
        give(session, feed)
        for op, s in session.run_timed():
            name = f"{op.op.name} {op.kernel}".strip()
            by_operator[name] = by_operator.get(name, 0.0) + s
        taken = used(place) - before
        if kernels == "":
            try:
                kernels = kernel_table(session, feed)
            except Exception as e:  # the times are worth more than the table
                kernels = f"{type(e).__name__}: {e}"[:300]
    cost, seconds = total_cost(op for op in made.program.block.operators), times["ms"] * 1e-3
    top = sorted(by_operator.items(), key=lambda x: -x[1])[:NAMED]
    return {
        **times, "fetched_ms": fetched, "loss": first, "last_loss": last, "peak": session.measured_peak_bytes,
        "predicted_peak": made.figures.peak_bytes, "measured_peak": session.measured_peak_bytes,
        "device_bytes": taken, "library_bytes": session.library_bytes,
        "tflops": cost.flops / seconds / 1e12, "gbs": cost.bytes / seconds / 1e9,
        "launches": sum(len(s.calls) for s in session.steps), "on_host": [op.op.name for op in session.on_host],
        "graphs": [len(s) for s in session._segments or ()], "compile_seconds": planned, "first_step_seconds": built,
        "top_ms": {n: round(s * 1e3, 4) for n, s in top}, "kernels": kernels,
    }  # fmt: skip


def used(place: Any) -> int:
    """Bytes of the device's memory that this process has."""
    return 0 if isinstance(place, EmulatedCUDAPlace) else open_device(place.device).process_bytes()


def batch(job: dict[str, Any]) -> dict[str, Any]:
    """The biggest batch that is predicted to fit a budget, and a step of it."""
    wanted, place = Batch(**job["row"]), place_of(job)
    found = rc.max_batch(wanted.network, job["budget"], optimizer=rc.Momentum(learning_rate=RATE, momentum=0.9),
                         options=wanted.options, place=place)  # fmt: skip
    best = found.best
    row = Row(wanted.network, best.batch, optimizer="momentum", options=wanted.options)
    program, loss, _ = loaded(row.network, row.batch, weights=False, **row.options)
    kept = {} if best.checkpoints is None else {"checkpoints": list(best.checkpoints)}
    if best.strategy not in ("plain",) and best.checkpoints is None:
        kept = {"budget": job["budget"], "strategy": "auto"}
    made = compile_step(program, loss, optimizer(row), place=place, **kept)
    feed, executor = sampled(row.network, row.batch, **row.options), rc.Executor(place)
    executor.run(made.program, feed, [loss])
    session = executor.session(made.program, [loss])
    return {"batch": best.batch, "strategy": best.strategy, "predicted_peak": made.figures.peak_bytes,
            "measured_peak": session.measured_peak_bytes, "next_peak": best.next_peak_bytes,
            "ms": timed(session, feed)["ms"]}  # fmt: skip


def ceilings(job: dict[str, Any]) -> dict[str, Any]:
    """TFLOP/s of a large product by precision, and GB/s of a copy, read and written."""
    from recompute.language.types import TensorType
    from recompute.runtime.cuda.device.kernel import Buffer, Copy, Product

    if job.get("emulated"):
        return {}
    d, n = open_device(0), 64 if rehearsed() else 8192
    found: dict[str, Any] = {}
    for name, dtype in (("fp32", "f32"), ("tf32", "f32"), ("bf16", "bf16")):
        t = TensorType(dtype, (n, n))
        start, memory = d.allocate(3 * t.nbytes)
        a, b, c = (Buffer(start + i * t.nbytes, t) for i in range(3))
        for x in (a, b):
            d.upload(
                x, np.tile(np.random.default_rng(0).standard_normal((n // 8, n), np.float32), (8, 1)).astype(t.numpy)
            )
        run = d.prepare(Product(a, b, c, n, n, n, n, n, n, tf32=name == "tf32"))
        found[f"{name}_tflops"] = round(2 * n**3 / repeated(d, run) / 1e12, 1)
        del memory
    t = TensorType("u8", (n * n * 16,))
    start, memory = d.allocate(2 * t.nbytes)
    run = d.prepare(Copy(Buffer(start, t), Buffer(start + t.nbytes, t)))
    found["copy_gbs"] = round(2 * t.nbytes / repeated(d, run) / 1e9)
    del memory
    return found


def repeated(d: Any, run: Any) -> float:
    """Seconds of a call on the device, within a graph, so that the host does not count."""
    with d.current():
        run()

    def calls() -> None:
        for _ in range(TIMES):
            run()

    replay = d.capture(calls)
    with d.current():
        replay()
        begin = d.event()
        replay()
        return float(d.seconds_between(begin, d.event()) / TIMES)


if __name__ == "__main__":
    install_fake()
    job = json.loads(sys.argv[1])
    print(json.dumps({"device": device, "step": step, "batch": batch, "ceilings": ceilings}[job["do"]](job)))
