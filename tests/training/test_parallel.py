"""Data parallelism: every number of ranks, and every way to divide state among them, gives the same bits."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping
from functools import cache

import numpy as np
import onnx
import pytest
from distributed_cases import own_arrays
from onnx import TensorProto, helper, numpy_helper

import recompute as rc
from recompute.communication.lockstep import LockStep
from recompute.communication.mesh import Mesh
from recompute.communication.verify_ranks import verify_ranks
from recompute.errors import UsageError
from recompute.language.program import Program
from recompute.ops.communication.base import Communication
from recompute.passes.slicing.slicing import parse_slicing
from recompute.training.parallel import DataParallel
from recompute.training.parts import parts_of

BATCH = 8
NETWORKS: dict[str, dict] = {
    "resnet18": {"width": 4, "blocks": (1, 1, 1, 1), "image": 16, "classes": 3},
    "bert-tiny": {"layers": 1, "hidden": 8, "heads": 2, "vocab": 20, "seq": 4},
    "gpt2-tiny": {"layers": 1, "hidden": 8, "heads": 2, "vocab": 20, "seq": 4},
    "bert-words": {"layers": 1, "hidden": 8, "heads": 2, "vocab": 206, "seq": 4},
    "gpt2-long": {"layers": 2, "hidden": 8, "heads": 2, "vocab": 20, "seq": 32, "context": 32},
}


def convolved() -> onnx.ModelProto:
    """x f32[N, 2, 4, 4] → logits f32[N, 3]: a convolution and batch statistics."""
    g = np.random.default_rng(1)
    weights = {"w": g.standard_normal((4, 2, 3, 3)), "scale": np.ones(4), "bias": np.zeros(4), "mean": np.zeros(4),
               "var": np.ones(4), "fc": g.standard_normal((4, 3)), "offset": np.zeros(3)}  # fmt: skip
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["c", "scale", "bias", "mean", "var"], ["n"]),
        helper.make_node("Relu", ["n"], ["r"]),
        helper.make_node("GlobalAveragePool", ["r"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("Gemm", ["f", "fc", "offset"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes, "convolved", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 2, 4, 4])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 3])],
        [numpy_helper.from_array(a.astype(np.float32), n) for n, a in weights.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


@cache
def model(name: str) -> onnx.ModelProto:
    if name == "convolved":
        return convolved()
    return rc.models.build(f"{name.partition('-')[0]}-tiny" if "-" in name else name, **NETWORKS[name])


def forward(name: str, batch: int = BATCH) -> tuple[Program, rc.Variable]:
    program = rc.load(model(name), batch=batch)
    return program, rc.losses.cross_entropy(program["logits"])


def optimizer(options: str) -> object:
    clip = rc.clip.ClipGradByGlobalNorm(0.5) if "clip" in options else None
    found: object = rc.Adam(1e-2, grad_clip=clip)
    for precision in ("bf16", "fp16"):
        if precision in options:
            found = rc.MixedPrecision(found, precision)  # type: ignore[arg-type]
    if "merge" in options:
        found = rc.GradientMerge(found, k_steps=2)  # type: ignore[arg-type]
    return found


def trained(
    name: str, options: str, ranks: int, rank: int, zero: int, pieces: int, batch: int = BATCH
) -> tuple[Program, str]:
    program, loss = forward(name, batch)
    found = optimizer(options)
    if "checkpoints" in options:
        made = [v.name for o in program.operators for v in o.writes() if v.name != loss.name]
        found = rc.RecomputeOptimizer(found).set_checkpoints(made[4:-2:5])
    wrapped = DataParallel(found, Mesh.of(dp=ranks), rank, zero=zero, micro_batches=pieces, batch=batch)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rc.RecomputeWarning)
        wrapped.minimize(loss)
    return program, loss.name


def whole_batch(name: str, batch: int = BATCH) -> dict[str, np.ndarray]:
    g = np.random.default_rng(3)
    program, _ = forward(name, batch)
    return {
        v.name: (g.standard_normal(v.shape) if v.type.is_float else g.integers(0, 2, v.shape)).astype(v.type.numpy)
        for v in program.block.inputs
    }


def rows(batch: Mapping[str, np.ndarray], ranks: int, rank: int) -> dict[str, np.ndarray]:
    return {n: a[rank * len(a) // ranks : (rank + 1) * len(a) // ranks] for n, a in batch.items()}


def whole_state(programs: list[Program], states: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """What all ranks have together; what each has for itself is the same."""
    parts, found = parts_of(programs[0]), {}
    for name, first in states[0].items():
        found[name] = first
        if name in parts:
            found[name] = parts[name].joined([s[name] for s in states])
        else:
            assert all(np.array_equal(first, s[name]) for s in states), name
    return found


@cache
def run(name: str, options: str, ranks: int, zero: int, pieces: int = 8, batch: int = BATCH) -> tuple[tuple, str]:
    """Losses, and a hash of parameters and state, after two steps of all ranks together."""
    made = [trained(name, options, ranks, r, zero, pieces, batch) for r in range(ranks)]
    return outcome([p for p, _ in made], made[0][1], name, batch)


def outcome(programs: list[Program], loss: str, name: str, batch: int) -> tuple[tuple, str]:
    """What two steps of these programs give."""
    ranks = len(programs)
    data = [own_arrays(p) for p in programs]
    machine = LockStep([p.block for p in programs], Mesh.of(dp=ranks), data)
    full, losses = whole_batch(name, batch), []
    for _ in range(2):
        found = machine.run([rows(full, ranks, r) for r in range(ranks)], [loss])
        assert len({f[loss].tobytes() for f in found}) == 1
        losses.append(float(found[0][loss]))
    digest = hashlib.sha256()
    for n, array in sorted(whole_state(programs, machine.state).items()):
        digest.update(n.encode() + array.tobytes())
    return tuple(losses), digest.hexdigest()


@pytest.mark.parametrize(("ranks", "zero"), [(2, 0), (8, 0), (2, 1), (4, 2), (8, 3)])
@pytest.mark.parametrize(
    ("name", "options"),
    [(name, words) for name in list(NETWORKS)[:3] for words in ("", "clip fp16 checkpoints", "bf16 merge")],
)
def test_the_same_bits_on_any_number_of_ranks(name: str, options: str, ranks: int, zero: int) -> None:
    if "merge" in options and ranks == 8:
        pytest.skip("8 micro-batches cannot be two for each of 8 ranks")
    assert run(name, options, ranks, zero) == run(name, options, 1, 0)


@pytest.mark.parametrize(("ranks", "zero"), [(2, 0), (4, 1), (2, 3)])
@pytest.mark.parametrize("options", ["", "fp16 clip checkpoints"])
def test_gradients_of_tables_are_sent_as_rows(
    options: str, ranks: int, zero: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows that all ranks took, where they are fewer than the table's: the same bits, also of parts that begin
    inside of a row; a gradient that is whole on no rank."""
    name = "bert-words"
    expected = run(name, options, 1, 0, ranks)
    monkeypatch.setattr("recompute.passes.slicing.ranks.TABLE", 1 << 12)
    assert run(name, options, ranks, zero, ranks) == expected
    blocks = [trained(name, options, ranks, r, zero, ranks)[0].block for r in range(ranks)]
    assert verify_ranks(blocks, Mesh.of(dp=ranks)) == 1
    (sums,) = [o for o in blocks[1].operators if o.op.name == "RowSums"]
    (out,) = sums.writes()
    assert out.size == (206 * 8 // ranks if zero else 206 * 8)
    assert not [o for o in blocks[1].operators if o.op.name == "GatherGrad" and 206 in next(o.writes()).shape]
    several = trained(name, options, ranks, 0, zero, 2 * ranks)[0].block
    assert "RowSums" not in {o.op.name for o in several.operators}  # sums of micro-batches are tables


@pytest.mark.parametrize(("name", "zero"), [("convolved", 1), ("bert-tiny", 0), ("bert-tiny", 2), ("gpt2-tiny", 3)])
def test_the_same_bits_on_64_ranks(name: str, zero: int) -> None:
    assert run(name, "clip", 64, zero, 64, 64) == run(name, "clip", 1, 0, 64, 64)


def test_networks_draw_random_numbers_and_have_batch_statistics() -> None:
    """Else the bits would be no test of dropout and of running statistics."""
    for name in ("bert-tiny", "gpt2-tiny"):
        program, _ = forward(name)
        assert any(o.op.random for o in program.operators)
    program, _ = forward("resnet18")
    assert any(o.op.updates for o in program.operators)


def test_gradients_of_a_ragged_mean_are_those_of_the_global_batch() -> None:
    """Labels that are ignored are not evenly spread: the mean divides by how many count in all, not in each rank."""
    full = whole_batch("gpt2-tiny")
    label = full["label"].copy()
    label[: BATCH // 2, 1:] = -100  # the first ranks have few labels
    found = []
    for ranks in (1, 4):
        programs = []
        for rank in range(ranks):
            program = rc.load(rc.models.build("gpt2-tiny", **{**NETWORKS["gpt2-tiny"], "dropout": 0.0}), batch=BATCH)
            loss = rc.losses.cross_entropy(program["logits"], ignore_index=-100)
            wrapped = DataParallel(rc.SGD(0.5), Mesh.of(dp=ranks), rank, micro_batches=4, batch=BATCH)
            if ranks > 1:
                wrapped.minimize(loss)
            else:
                rc.SGD(0.5).minimize(loss)  # one batch, undivided
            programs.append(program)
        machine = LockStep([p.block for p in programs], Mesh.of(dp=ranks), own_arrays(programs[0]))
        batch = {**full, "label": label}
        found.append([float(machine.run([rows(batch, ranks, r) for r in range(ranks)], [loss.name])[0][loss.name])
                      for _ in range(3)])  # fmt: skip
    np.testing.assert_allclose(found[1], found[0], rtol=2e-6)
    assert found[0][2] < found[0][0]


def test_the_library_may_add() -> None:
    loss = forward("gpt2-tiny")[1]
    wrapped = DataParallel(rc.Adam(), Mesh.of(dp=4), 1, zero=1, batch=BATCH, reduce="library")
    wrapped.minimize(loss)
    sums = [o.op for o in loss.program.operators if isinstance(o.op, Communication) and o.op.sums]
    assert sums and all(op.order == "library" for op in sums)
    assert str(parse_slicing(wrapped.spec.whole[0])) == wrapped.spec.whole[0] == "micro:0:4@dp=1/4/library"


def test_bytes_of_zero() -> None:
    """Parameters and state of Adam take 12 bytes an element, divided by the ranks; zeros fill what cannot be."""
    plain, _ = trained("gpt2-tiny", "", 1, 0, 0, 4)
    kept = {v.name for v in plain.block.parameters}
    sizes = {v.name: v.size for v in plain.block.parameters}
    for zero in (1, 2, 3):
        program, _ = trained("gpt2-tiny", "", 4, 3, zero, 4)
        own = sum(
            v.nbytes
            for v in (*program.block.parameters, *program.block.state)
            if v.ndim and v.name.split(".moment")[0] in kept
        )
        assert own == sum(12 * -(-n // 4) for n in sizes.values())


SETTINGS = {
    "checkpoints in host memory": lambda o: o.set_checkpoints(["h.0.out", "h.0.attn.out"]).set_offload(),
    "a region in slices": lambda o: o.set_slices(["h.0.mlp.c_fc.matmul..h.0.mlp.c_proj.matmul:1:2"]),
    "a budget": lambda o: o.set_budget("80%", effort=0.1, slicing=False),
}


@pytest.mark.parametrize("setting", list(SETTINGS))
@pytest.mark.parametrize("zero", [0, 3])
def test_with_other_ways_to_save_memory(setting: str, zero: int) -> None:
    """Recomputation, host memory and slices of regions are part of each rank's program, and change no bit."""
    pytest.importorskip("ortools")
    if setting == "a budget" and zero:
        pytest.skip("one plan is enough")
    found = []
    for ranks in (1, 2) if "slices" in setting else (2,):  # slices of a region add up in another order
        programs = []
        for rank in range(ranks):
            program, loss = forward("gpt2-long")
            inner = SETTINGS[setting](rc.RecomputeOptimizer(rc.Adam(1e-2)))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", rc.RecomputeWarning)
                DataParallel(inner, Mesh.of(dp=ranks), rank, zero=zero, micro_batches=2, batch=BATCH).minimize(loss)
            programs.append(program)
        found.append(outcome(programs, loss.name, "gpt2-long", BATCH))
    assert programs[0].block != trained("gpt2-long", "", 2, 0, zero, 2)[0].block
    assert found[-1] == (found[0] if len(found) > 1 else run("gpt2-long", "", 1, 0, 2))


def test_host_memory_needs_one_micro_batch_a_rank() -> None:
    inner = rc.RecomputeOptimizer(rc.Adam()).set_checkpoints(["h.0.out"]).set_offload()
    with pytest.raises(UsageError, match="as many micro_batches as there are ranks"):
        DataParallel(inner, Mesh.of(dp=2), 0, micro_batches=4, batch=BATCH).minimize(forward("gpt2-tiny")[1])


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_the_ranks_programs_fit_each_other(zero: int) -> None:
    blocks = [trained("resnet18", "clip fp16", 4, r, zero, 4)[0].block for r in range(4)]
    assert verify_ranks(blocks, Mesh.of(dp=4)) == 1
    assert any(isinstance(o.op, Communication) for o in blocks[0].operators)


def test_what_does_not_fit() -> None:
    loss = forward("resnet18")[1]
    mesh = Mesh.of(dp=2)
    with pytest.raises(UsageError, match="cannot be shared equally among 2 ranks"):
        DataParallel(rc.Adam(), mesh, 0, micro_batches=3)
    with pytest.raises(UsageError, match="no rank 2"):
        DataParallel(rc.Adam(), mesh, 2)
    with pytest.raises(UsageError, match="zero must be"):
        DataParallel(rc.Adam(), mesh, 0, zero=4)
    with pytest.raises(UsageError, match="reduce must be one of tree, library"):
        DataParallel(rc.Adam(), mesh, 0, reduce="ring")
    with pytest.raises(UsageError, match="zero=1 and Lamb are not combined"):
        DataParallel(rc.Lamb(), mesh, 0, zero=1, batch=BATCH).minimize(loss)
    loss = forward("resnet18")[1]
    with pytest.raises(UsageError, match="8 samples cannot be cut into 6 equal"):
        DataParallel(rc.Adam(), mesh, 0, micro_batches=6, batch=BATCH).minimize(loss)


# -- ranks side by side ---------------------------------------------------------------------------------------------


def contrastive() -> onnx.ModelProto:
    """x f32[N, 6] → scores of all pairs of samples f32[N, N]."""
    g = np.random.default_rng(1)
    weights = {"w": g.standard_normal((6, 4)).astype(np.float32), "b": np.zeros(4, np.float32)}
    nodes = [
        helper.make_node("Gemm", ["x", "w", "b"], ["h"]),
        helper.make_node("Tanh", ["h"], ["t"]),
        helper.make_node("Transpose", ["t"], ["tt"], perm=[1, 0]),
        helper.make_node("MatMul", ["t", "tt"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes, "pairs", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [BATCH, 6])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [BATCH, BATCH])],
        [numpy_helper.from_array(a, n) for n, a in weights.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def side_by_side(source: onnx.ModelProto, ranks: int, zero: int, **options: bool) -> tuple[list[float], dict]:
    """Losses of three steps, and what rank 0 keeps; ranks 0: one process without a mesh."""
    programs = []
    for rank in range(max(ranks, 1)):
        program = rc.load(source, batch=BATCH)
        loss = rc.losses.cross_entropy(program["logits"])
        plain = rc.SGD(0.1, grad_clip=rc.clip.ClipGradByGlobalNorm(5.0))
        wrapped = DataParallel(plain, Mesh.of(dp=ranks), rank, zero=zero, batch=BATCH, **options) if ranks else plain
        wrapped.minimize(loss)
        programs.append(program)
    if ranks:
        assert verify_ranks([p.block for p in programs], Mesh.of(dp=ranks)) == 1
        assert programs[0].block.inputs[0].shape[0] == BATCH // ranks
    data = [own_arrays(p) for p in programs]
    machine = LockStep([p.block for p in programs], Mesh.of(dp=max(ranks, 1)), data)
    g = np.random.default_rng(0)
    shapes = {v.name: (BATCH, *v.shape[1:]) for v in programs[0].block.inputs}
    batch = {
        n: g.integers(0, 3, s) if n == "label" else g.standard_normal(s).astype(np.float32) for n, s in shapes.items()
    }
    feeds = [rows(batch, max(ranks, 1), r) for r in range(max(ranks, 1))]
    losses = [float(machine.run(feeds, [loss.name])[0][loss.name]) for _ in range(3)]
    return losses, {n: a for n, a in machine.state[0].items() if "running" in n}


@pytest.mark.parametrize(("ranks", "zero"), [(2, 0), (4, 1), (4, 3)])
def test_statistics_of_all_ranks(ranks: int, zero: int) -> None:
    """The step of the whole batch, running statistics included, but for rounding."""
    wanted, running = side_by_side(model("resnet18"), 0, 0)
    found, also = side_by_side(model("resnet18"), ranks, zero, sync_batch_norm=True)
    np.testing.assert_allclose(found, wanted, rtol=3e-6)
    assert running.keys() == also.keys() != set()
    for name, array in running.items():
        np.testing.assert_allclose(also[name], array, rtol=1e-4, atol=2e-6)
    own, _ = side_by_side(model("resnet18"), ranks, zero)
    assert abs(own[0] - wanted[0]) > 1e-3, "statistics of each rank are others"


@pytest.mark.parametrize(("ranks", "zero"), [(2, 0), (4, 3)])
def test_a_loss_that_compares_samples_of_all_ranks(ranks: int, zero: int) -> None:
    wanted, _ = side_by_side(contrastive(), 0, 0)
    found, _ = side_by_side(contrastive(), ranks, zero)
    np.testing.assert_allclose(found, wanted, rtol=3e-6)
    assert wanted[2] < wanted[0]


def test_side_by_side_takes_one_micro_batch_a_rank() -> None:
    with pytest.raises(UsageError, match="sync_batch_norm and 4 micro-batches on 2 ranks are not combined"):
        DataParallel(rc.Adam(), Mesh.of(dp=2), 0, micro_batches=4, batch=BATCH, sync_batch_norm=True).minimize(
            forward("resnet18")[1]
        )
    program = rc.load(contrastive(), batch=BATCH)
    with pytest.raises(UsageError, match="With one micro-batch a rank"):
        DataParallel(rc.Adam(), Mesh.of(dp=2), 0, micro_batches=4, batch=BATCH).minimize(
            rc.losses.cross_entropy(program["logits"])
        )
