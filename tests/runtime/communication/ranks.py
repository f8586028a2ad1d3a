"""What the tests start on several ranks: `python ranks.py TASK ARGUMENTS...`; what is printed goes to the test."""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np

import recompute as rc
from recompute.communication.lockstep import LockStep
from recompute.communication.mesh import Mesh
from recompute.language.builder import Builder
from recompute.language.op import op_class
from recompute.language.types import TensorType
from recompute.runtime.communication.memory import ResidentGrowth
from recompute.runtime.communication.mpi import MpiEngine

TEXT = """program p {{
  input %x: {x}
  communicate %s: {y} = {name}(%x) {{axis="{axis}", ranks={n}, number=0{more}}}
  %a: {x} = Identity(%x)
  communicate %z: {y} = CommWait(%s, %x)
  output %a, %z
}}"""
RING = """program ring {{
  input %x: {x}
  communicate %r: {x} = Recv() {{axis="dp", ranks={n}, number=0, channel="to{here}", peer={before}, {t}}}
  communicate %s: u8[1] = Send(%x) {{axis="dp", ranks={n}, number=0, channel="to{after}", peer={after}}}
  communicate %y: {x} = CommWait(%r)
  communicate %t: u8[1] = CommWait(%s, %x)
  output %y, %t
}}"""


def collective(name: str, x: str, n: int, axis: str = "dp", more: str = "") -> rc.Block:
    t = TensorType.parse(x)
    rows = {"ReduceScatter": t.shape[0] // n if t.shape else 0, "AllGather": t.shape[0] * n if t.shape else 0}
    y = t.with_shape((rows[name], *t.shape[1:])) if name in rows else t
    return rc.verify(rc.parse(TEXT.format(x=x, y=y, name=name, n=n, axis=axis, more=more)))


def drawn(block: rc.Block, rank: int) -> dict[str, np.ndarray]:
    g = np.random.default_rng(rank)
    return {v.name: (g.normal(size=v.shape) * 100).astype(v.type.numpy) for v in block.inputs}


def same(executor: rc.Executor, blocks: rc.Block | list[rc.Block], mesh: Mesh) -> None:
    """What this rank gets is what the lock-step interpreter gives it, to the bit; the peak is the one predicted."""
    each = [blocks] * mesh.ranks if isinstance(blocks, rc.Block) else blocks
    rank = executor.engine.rank
    feeds = [drawn(b, r) for r, b in enumerate(each)]
    wanted = LockStep(blocks, mesh).run(feeds)[rank]
    program = rc.Program(each[rank])
    names = list(each[rank].outputs)
    for got, name in zip(executor.run(program, feeds[rank], names), names, strict=True):
        assert got.tobytes() == wanted[name].tobytes(), (rank, name, rc.show(each[rank]), got, wanted[name])
    report = rc.passes.memory_report(executor.planned(program, names))
    assert executor.session(program, names).measured_peak_bytes == report.peak


def every_collective(executor: rc.Executor, mesh: Mesh) -> None:
    """Small and large, divisible and not, of every size of elements."""
    n = mesh.size("dp")
    for name in ("AllReduce", "ReduceScatter", "AllGather", "AllToAll", "Broadcast", "Reduce"):
        for x in ("f32[12,5]", "f16[12,4001]", "i64[12000]", "bf16[24]", "bool[24]"):
            if x.startswith("bool") and "Reduce" in name:
                continue
            root = f", root={n - 1}" if name in ("Broadcast", "Reduce") else ""
            same(executor, collective(name, x, n, more=root), mesh)
    for x in ("f32[]", "f32[7001]", "f32[0,3]", "f64[70001]"):
        same(executor, collective("AllReduce", x, n), mesh)
        same(executor, collective("Reduce", x, n), mesh)
    library = collective("AllReduce", "f64[3000]", n, more=', order="library"')
    feeds = [drawn(library, r) for r in range(n)]
    (got,) = executor.run(rc.Program(library), feeds[mesh.coordinate(executor.engine.rank, "dp")], ["z"])
    np.testing.assert_allclose(got, sum(f["x"] for f in feeds), rtol=1e-12, atol=1e-9)
    try:
        executor.run(rc.Program(collective("AllReduce", "f16[8]", n, more=', order="library"')), feeds[0], ["z"])
    except rc.UsageError as e:
        assert 'MPI does not add f16: use order="tree"' in str(e)
    else:
        raise AssertionError("MPI adds f16")


def messages(executor: rc.Executor, mesh: Mesh) -> None:
    """A ring: every rank sends to the next one, a little and a lot."""
    n = mesh.ranks
    for x in ("f32[3]", "f16[300000]"):
        t = TensorType.parse(x)
        typed = f'shape=[{t.shape[0]}], dtype="{t.dtype}"'
        blocks = [
            rc.verify(rc.parse(RING.format(x=x, n=n, here=r, before=(r - 1) % n, after=(r + 1) % n, t=typed)))
            for r in range(n)
        ]
        same(executor, blocks, mesh)


def regression(ranks: int, micro: int) -> rc.Block:
    """A step of regression whose gradients are added in the tree over all micro-batches of all ranks."""
    declared = "\n".join(f"input %x{i}: f32[2,300]\ninput %y{i}: f32[2,40]" for i in range(micro))
    block = rc.parse(f"program p {{\n{declared}\nparam %w: f32[300,40]\nconst %lr: f32[] = [0.001]\n}}")
    b = Builder.on(block)
    w, lr = block.parameters[0], block.constants[0].value
    grads = [
        b.Gemm(x, b.Sub(b.Gemm(x, w), y), transA=1) for x, y in zip(block.inputs[::2], block.inputs[1::2], strict=True)
    ]
    while len(grads) > 1:
        grads = [b.Add(grads[i], grads[i + 1]) for i in range(0, len(grads), 2)]
    total = b.CommWait(b.emit(op_class("AllReduce")(axis="dp", ranks=ranks, number=0), grads[0]), grads[0])
    b.SGDUpdate(w, total, lr)
    return rc.verify(block.with_operators(b.operators))


def training(executor: rc.Executor, mesh: Mesh, micro: int = 4) -> None:
    """Three steps on all ranks, and on one in the interpreter: the same parameters."""
    n, rank = mesh.ranks, executor.engine.rank
    k = micro // n
    g = np.random.default_rng(7)
    w = g.normal(size=(300, 40)).astype(np.float32)
    xs, ys = (g.normal(size=(3, micro, 2, c)).astype(np.float32) for c in (300, 40))
    alone = LockStep(regression(1, micro), Mesh.of(dp=1), {"w": w})
    numpy = rc.Executor(engine=executor.engine, providers=("numpy",))
    program = rc.Program(regression(n, k), {"w": w.copy()})
    for x, y in zip(xs, ys, strict=True):
        alone.run({f"{name}{i}": a[i] for i in range(micro) for name, a in (("x", x), ("y", y))})
        feed = {f"{name}{i}": a[rank * k + i] for i in range(k) for name, a in (("x", x), ("y", y))}
        numpy.run(program, feed)
    assert program.data["w"].tobytes() == alone.state[0]["w"].tobytes()


def other_programs(executor: rc.Executor, mesh: Mesh) -> None:
    """A program that does not fit those of the others is an error on every rank, which names them."""
    n, rank = mesh.ranks, executor.engine.rank
    block = collective("AllGather" if rank else "AllToAll", f"f32[{n}]", n)
    try:
        executor.run(rc.Program(block), drawn(block, 0), ["z"])
    except rc.VerifyError as e:
        assert "the programs of the ranks do not fit together (digests: " in str(e), e
        assert "on rank 0; " in str(e) and "they are different operators" in str(e), e
    else:
        raise AssertionError("it ran")


def checks() -> None:
    """Everything that goes well."""
    engine = MpiEngine()
    mesh, n = engine.mesh, engine.mesh.ranks
    executor = rc.Executor(engine=engine)
    every_collective(executor, mesh)
    messages(executor, mesh)
    training(executor, mesh)
    other_programs(executor, mesh)
    try:
        rc.Executor(mesh=f"dp={n + 1}")
    except rc.UsageError as e:
        assert f"has {n + 1} ranks, but {n} started" in str(e)
    else:
        raise AssertionError("it has no such rank")
    op = collective("AllToAll", f"i64[{n << 16}]", n).operators[0].op
    engine.compare(collective("AllToAll", f"i64[{n << 16}]", n))
    x = np.arange(n << 16)
    transfer = engine.begin(op, 0, x, np.empty_like(x))
    assert transfer.done.wait(60)  # while nobody waits for it in MPI: it advances beside the step
    engine.wait(transfer)
    if n == 4:
        two = Mesh.of(dp=2, tp=2)
        grid = rc.Executor(mesh=two)
        for axis in ("dp", "tp"):
            same(grid, collective("AllReduce", "f32[9000]", 2, axis), two)
    large = rc.Program(collective("AllReduce", f"f32[{8 << 20}]", n))
    feed = drawn(large.block, engine.rank)
    executor.run(large, feed, ["z"])
    with ResidentGrowth() as growth:
        executor.session(large, ["z"]).run()
    assert growth.peak < 8 << 20, growth.peak
    engine.close()
    print(f"rank {engine.rank} of {n}: all is well; MPI's own {growth.peak / 2**20:.1f} MiB", flush=True)


CHECKED = """program p {{
  input %i: i64[1]
  input %x: f32[9000]
  communicate %s: f32[9000] = AllReduce(%x) {{axis="dp", ranks={n}, number=0}}
  %y: f32[1] = Gather(%x, %i) {{axis=0}}
  communicate %z: f32[9000] = CommWait(%s, %x)
  output %y, %z
}}"""


def caught(number: str) -> None:
    """A step of one rank fails between a begin and its wait, and the script goes on."""
    engine = MpiEngine()
    executor = rc.Executor(engine=engine, schedule=False, providers=("numpy",))
    program = rc.Program(rc.verify(rc.parse(CHECKED.format(n=engine.mesh.ranks))))
    x = np.ones(9000, np.float32)
    executor.run(program, {"i": np.array([1]), "x": x})
    wrong = engine.rank == int(number)
    if wrong:
        print(f"at {time.time()}", flush=True)
    for again in range(2):
        try:
            executor.run(program, {"i": np.array([9999 if wrong else 1]), "x": x})
        except rc.JobError as e:
            assert ("a step failed while it communicated" in str(e)) == bool(again), e


def fault(what: str, number: str, steps: str = "3") -> None:
    """Steps on all ranks, of which one does something in the middle."""
    engine = MpiEngine()
    executor = rc.Executor(engine=engine)
    block = collective("AllReduce", "f32[9000]", engine.mesh.ranks)
    program, feed = rc.Program(block), drawn(block, engine.rank)
    for i in range(int(steps)):
        executor.run(program, feed)
        if i == 1 and engine.rank == int(number):
            print(f"at {time.time()}", flush=True)
            {
                "raise": lambda: 1 // 0,
                "exit": lambda: sys.exit(0),
                "code": lambda: sys.exit(5),
                "leave": lambda: os._exit(0),
                "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
                "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
            }[what]()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
