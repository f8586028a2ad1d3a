"""Steps on CUDA devices that communicate: two to four ranks as threads, on the emulated device and a fake NCCL that
refuses what NCCL does (nccl_fake.py)."""

from __future__ import annotations

from typing import Any

import cuda_cases
import numpy as np
import pytest
from distributed_cases import own_arrays
from nccl_fake import COLLECTIVE, Event, Stream, World, engines, together

import recompute as rc
from recompute.communication.lockstep import LockStep
from recompute.communication.mesh import Mesh
from recompute.language.types import TensorType
from recompute.ops.communication.tree_sum import TreeSum
from recompute.runtime.cuda.expanded import Expanded
from recompute.runtime.cuda.nccl import NcclLinks
from recompute.runtime.cuda.providers.cuda import family_of
from recompute.testing import Case
from recompute.training.parallel import DataParallel

pytestmark = cuda_cases.needs_compiler
PLACE = rc.EmulatedCUDAPlace()
Arrays = dict[str, np.ndarray]


# -- sums in the tree -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["f32", "f64", "f16", "bf16", "i8", "u64"])
def test_tree_sums_have_the_processors_bits(kind: str) -> None:
    device = cuda_cases.device()
    for parts, size in ((2, 5), (3, 64), (8, 1000), (33, 33), (4, 0)):
        t = TensorType(kind, (parts * size,))
        x = (np.random.default_rng(parts).standard_normal(t.shape) * 100).astype(t.numpy)
        case = Case(TreeSum(parts), (x,), None)
        assert not isinstance(family_of(cuda_cases.operator(case)), (Expanded, type(None)))
        cuda_cases.check(case, cuda_cases.bound(case, device), units=0)


# -- each communication -----------------------------------------------------------------------------------------------

LIBRARY = ', order="library"'
COLLECTIVES = {
    "AllReduce": "",
    "AllReduce library": LIBRARY,
    "ReduceScatter": "",
    "ReduceScatter library": LIBRARY,
    "AllGather": "",
    "AllToAll": "",
    "Broadcast": ", root=1",
    "Reduce library": f"{LIBRARY}, root=1",
}


def collective(name: str, n: int, kind: str = "f32") -> rc.Block:
    """The program of every rank."""
    op = name.split()[0]
    rows = {"ReduceScatter": 1, "AllGather": n * n}.get(op, n)
    text = COLLECTIVE.format(n=n, name=op, kind=kind, out=f"{kind}[{rows},3]", more=COLLECTIVES[name])
    return rc.parse(text)


def on_devices(blocks: list[rc.Block], mesh: Mesh, feeds: list[list[Arrays]], late: bool = True) -> tuple[Any, World]:
    """Outputs of each run on each rank: `feeds[run][rank]`."""
    world = World(mesh.ranks, late)
    made = engines(world, mesh)

    def rank(r: int) -> list[Arrays]:
        executor, program, names = rc.Executor(PLACE, engine=made[r]), rc.Program(blocks[r]), blocks[r].outputs
        runs = [executor.run(program, feed[r], names) for feed in feeds]
        return [dict(zip(names, found, strict=True)) for found in runs]

    return together(world, [lambda r=r: rank(r) for r in range(mesh.ranks)]), world


def same_as_lockstep(blocks: list[rc.Block], mesh: Mesh, feeds: list[list[Arrays]], late: bool = True) -> World:
    found, world = on_devices(blocks, mesh, feeds, late)
    machine = LockStep(blocks, mesh)
    for i, feed in enumerate(feeds):
        for r, wanted in enumerate(machine.run(feed)):
            for name, array in wanted.items():
                assert found[r][i][name].tobytes() == array.tobytes(), (name, r, i)
    return world


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize(("n", "kind"), [(2, "f32"), (3, "bf16")])
def test_collectives_give_the_bits_of_the_lockstep_interpreter(name: str, n: int, kind: str) -> None:
    """Small whole numbers, so that NCCL's own order of additions does not matter; single launches, capture, replay."""
    t = TensorType(kind, (n, 3)).numpy
    draw = np.random.default_rng(n)
    feeds = [[{"x": draw.integers(-3, 4, (n, 3)).astype(t)} for _ in range(n)] for _ in range(3)]
    for late in (True, False):
        same_as_lockstep([collective(name, n, kind)] * n, Mesh.of(dp=n), feeds, late)


@pytest.mark.parametrize("kind", ["i16", "bool", "f64"])
def test_what_is_moved_may_be_of_any_type(kind: str) -> None:
    text = f"""program p {{
      input %x: {kind}[4]
      communicate %s: {kind}[8] = AllGather(%x) {{axis="dp", ranks=2, number=0}}
      communicate %y: {kind}[8] = CommWait(%s, %x)
      output %y
    }}"""
    feeds = [[{"x": (np.arange(4) % (2 + r)).astype(TensorType(kind, ()).numpy)} for r in range(2)]]
    same_as_lockstep([rc.parse(text)] * 2, Mesh.of(dp=2), feeds)


RING = """program p {{
  input %x: f32[2]
  communicate %r: f32[2] = Recv() {{axis="pp", ranks=3, number=0, channel="to{here}", peer={before}, shape=[2]}}
  communicate %s: u8[1] = Send(%x) {{axis="pp", ranks=3, number=0, channel="to{after}", peer={after}}}
  communicate %y: f32[2] = CommWait(%r)
  communicate %t: u8[1] = CommWait(%s, %x)
  output %y, %t
}}"""


def test_messages_in_a_ring() -> None:
    blocks = [rc.parse(RING.format(here=r, before=(r - 1) % 3, after=(r + 1) % 3)) for r in range(3)]
    feeds = [[{"x": np.full(2, 10 * i + r, np.float32)} for r in range(3)] for i in range(3)]
    world = same_as_lockstep(blocks, Mesh.of(pp=3), feeds)
    assert world.counts["ids"] == 3  # a communicator for each of three channels


def test_groups_of_a_mesh() -> None:
    lines = [
        f'communicate %{a}: f32[2] = AllReduce(%x) {{axis="{a}", ranks=2, number=0}}\n'
        f"communicate %{a}.t: f32[2] = CommWait(%{a}, %x)"
        for a in ("dp", "tp")
    ]
    block = rc.parse("\n".join(["program p {", "input %x: f32[2]", *lines, "output %dp.t, %tp.t", "}"]))
    feeds = [[{"x": np.full(2, 10.0**r, np.float32)} for r in range(4)]]
    world = same_as_lockstep([block] * 4, Mesh.of(dp=2, tp=2), feeds)
    assert sorted(len(members) for members in world.made.values()) == [2] * 4  # two channels, of two groups each


def test_the_calls_of_nccl() -> None:
    """Each channel is connected; then an AllToAll is a group with a part to each rank and from each, as bytes."""
    feeds = [[{"x": np.ones((2, 3), np.float32)} for _ in range(2)]]
    _, world = on_devices([collective("AllToAll", 2)] * 2, Mesh.of(dp=2), feeds)
    for rank in range(2):
        calls = [(name, words) for r, name, words in world.log if r == rank]
        connected = [(name, (1, 1, peer)) for peer in range(2) for name in ("send", "recv")] + [("allGather", (1, 1))]
        assert calls == [*connected, *((name, (12, 1, peer)) for peer in range(2) for name in ("send", "recv"))]


# -- training ---------------------------------------------------------------------------------------------------------


def step(ranks: int, rank: int, zero: int, reduce: str = "tree", exact: bool = False) -> tuple[rc.Program, str]:
    program = rc.load(rc.models.build("mlp"), batch=8)
    out = program["pred.logits"]
    loss = rc.losses.mse(out) if exact else rc.losses.cross_entropy(out)
    optimizer: Any = rc.SGD(2.0**-6) if exact else rc.Adam(1e-2)
    how: dict[str, Any] = {"zero": zero, "micro_batches": 4, "batch": 8, "reduce": reduce}
    DataParallel(optimizer, Mesh.of(dp=ranks), rank, **how).minimize(loss)
    return program, loss.name


def rows(feed: Arrays, ranks: int, rank: int) -> Arrays:
    return {n: a[rank * len(a) // ranks : (rank + 1) * len(a) // ranks] for n, a in feed.items()}


def batches() -> list[Arrays]:
    draw = np.random.default_rng(1)
    return [{"x": draw.standard_normal((8, 32)).astype("f4"), "label": draw.integers(0, 2, 8)} for _ in range(4)]


def trained(
    ranks: int, zero: int, late: bool = True, reduce: str = "tree"
) -> tuple[list[float], dict[str, bytes], Any]:
    """Losses of four steps, what all ranks have together after them, and rank 0's session."""
    world = World(ranks, late)
    made = engines(world, Mesh.of(dp=ranks))

    def rank(r: int) -> Any:
        program, loss = step(ranks, r, zero, reduce)
        executor = rc.Executor(PLACE, engine=made[r])
        losses = [float(executor.run(program, rows(b, ranks, r), [loss])[0]) for b in batches()]
        return losses, program, executor.session(program, [loss])

    found = together(world, [lambda r=r: rank(r) for r in range(ranks)])
    return found[0][0], joined([program for _, program, _ in found]), found[0][2]


def joined(programs: list[rc.Program]) -> dict[str, bytes]:
    """Parameters and state, in one piece where each rank has a part of them."""
    first, states = programs[0], [own_arrays(p) for p in programs]
    found = {}
    for name in states[0]:
        whole = first.sharded.get(name.removesuffix(".moment1").removesuffix(".moment2"))
        if whole is None:
            assert len({s[name].tobytes() for s in states}) == 1, name
            found[name] = states[0][name].tobytes()
        else:
            found[name] = np.concatenate([s[name] for s in states])[: whole.size].tobytes()
    return found


@pytest.mark.parametrize(("ranks", "zero", "late"), [(2, 0, True), (2, 0, False), (4, 1, True), (2, 3, True)])
def test_training_gives_the_same_bits_on_any_number_of_ranks(ranks: int, zero: int, late: bool) -> None:
    losses, found, session = trained(ranks, zero, late)
    alone, wanted, _ = trained(1, 0)
    assert losses == alone
    assert found == wanted
    assert session.device.captured == 2 and not session.on_host  # what may be refused, and the rest
    assert session.library_bytes == {"nccl": session.links.engine.buffer_bytes} != {"nccl": 0}
    assert session.measured_peak_bytes == session.report.peak
    assert not session.links.flying


def test_nccl_adds_where_it_is_asked_to() -> None:
    """Of two numbers there is one sum, in whatever order."""
    losses, found, session = trained(2, 2, reduce="library")
    assert (losses, found) == trained(1, 0)[:2]
    assert {"ReduceScatter", "AllReduce"} <= {s.op.op.name for s in session.steps}


def test_a_training_step_gives_the_bits_of_the_lockstep_interpreter() -> None:
    """Numbers of few bits, so that kernels and NumPy round nothing; every run starts from the same parameters."""
    draw = np.random.default_rng(2)
    made = [step(2, r, 0, exact=True) for r in range(2)]
    starts = {n: (draw.integers(-2, 3, a.shape) / 4).astype(a.dtype) for n, a in own_arrays(made[0][0]).items()
              if a.ndim and n.startswith(("fc_1", "pred"))}  # fmt: skip
    for program, _ in made:
        program.data.update({n: a.copy() for n, a in starts.items()})
    label = next(v for v in made[0][0].block.inputs if v.name != "x")
    feeds = [{"x": draw.integers(-1, 2, (8, 32)).astype("f4"), label.name: draw.integers(-2, 3, (8, 2)).astype("f4")}
             for _ in range(3)]  # fmt: skip
    machine = LockStep([p.block for p, _ in made], Mesh.of(dp=2), [own_arrays(p) for p, _ in made])
    world = World(2)
    on = engines(world, Mesh.of(dp=2))

    def rank(r: int) -> list[Arrays]:
        executor, (program, loss), found = rc.Executor(PLACE, engine=on[r]), made[r], []
        for feed in feeds:
            for n, a in starts.items():
                program.data[n][...] = a
            executor.run(program, rows(feed, 2, r), [loss])
            found.append({n: program.data[n].copy() for n in starts})
        return found

    found = together(world, [lambda r=r: rank(r) for r in range(2)])
    for i, feed in enumerate(feeds):
        for s in machine.state:
            s.update({n: a.copy() for n, a in starts.items()})
        machine.run([rows(feed, 2, r) for r in range(2)])
        for r in range(2):
            for n, start in starts.items():
                assert found[r][i][n].tobytes() == machine.state[r][n].tobytes(), (n, i, r)
                assert (start != found[r][i][n]).any()


# -- graphs -----------------------------------------------------------------------------------------------------------


def test_a_graph_joins_what_another_one_awaits() -> None:
    """A step that may refuse its data has two graphs; a communication goes from the first to the second one."""
    block = rc.parse("""program p {
      input %x: f32[2,3]
      input %i: i64[2]
      param %w: f32[2,3]
      const %lr: f32[] = [0.5]
      communicate %s: f32[4,3] = AllGather(%x) {axis="dp", ranks=2, number=0}
      %g: f32[2,3] = Gather(%x, %i)
      optimize %w: f32[2,3] = SGDUpdate(%w, %g, %lr)
      %z: f32[2,3] = Mul(%w, %w)
      communicate %t: f32[4,3] = CommWait(%s, %x)
      output %z, %t
    }""")  # fmt: skip
    world = World(2)
    made = engines(world, Mesh.of(dp=2))
    feeds = [{"x": np.full((2, 3), i, np.float32), "i": np.array([1, 0])} for i in range(4)]

    def rank(r: int) -> Any:
        executor = rc.Executor(PLACE, engine=made[r], schedule=False)
        program = rc.Program(block, {"w": np.zeros((2, 3), np.float32)})
        kinds = [s.op.op.name for s in executor.session(program, ["t"]).steps]
        found = [executor.run(program, {**f, "x": f["x"] + r}, ["t"])[0] for f in feeds]
        return kinds, found, made[r].device.captured, np.array(program.data["w"])

    for kinds, found, captured, w in together(world, [lambda r=r: rank(r) for r in range(2)]):
        assert captured == 2 and kinds.index("AllGather") < kinds.index("SGDUpdate") < kinds.index("CommWait")
        for i, t in enumerate(found):
            assert t.tolist() == [[i] * 3] * 2 + [[i + 1] * 3] * 2
        assert set(w.ravel().tolist()) <= {-0.5 * sum(range(4)), -0.5 * sum(range(1, 5))}


def test_a_graph_begins_behind_what_is_open() -> None:
    """What was begun one by one, since the host or a copy cuts the step there, cannot be awaited inside a graph."""
    world = World(1)
    (engine,) = engines(world, Mesh.of(dp=1))
    device, links = engine.device, NcclLinks(engine)
    begun, seen = Event(), []
    begun.record(other := Stream(world))
    other.add(lambda: seen.append("sent"))
    begun.record(other)
    block = rc.parse("program p {\n input %x: f32[2]\n %y: f32[2] = Add(%x, %x)\n output %y\n}")
    session = rc.Executor(PLACE, engine=engine).session(rc.Program(block), ["y"])
    session.links, session._far = links, frozenset("s")
    graph = session._graph(session.steps)
    device.stream.wait_event = lambda event: seen.append("joined")  # type: ignore[method-assign]
    links.flying["s"] = begun
    graph()
    assert seen == ["sent", "joined"] and not links.flying


def test_operators_are_timed_one_by_one() -> None:
    world = World(2)
    made = engines(world, Mesh.of(dp=2))
    block = collective("AllToAll", 2)

    def rank(r: int) -> list[str]:
        executor, program = rc.Executor(PLACE, engine=made[r]), rc.Program(block)
        session = executor.session(program, block.outputs)
        session.feed("x", np.ones((2, 3), np.float32))
        return [o.op.name for o, _ in session.run_timed()]

    for names in together(world, [lambda r=r: rank(r) for r in range(2)]):
        assert {"AllToAll", "CommWait"} <= set(names)
