"""Parameters and state in bfloat16 (precision "bf16-pure"), and moments in 8 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed_cases import own_arrays

import recompute as rc
from recompute.communication.lockstep import LockStep
from recompute.errors import RecomputeError, UsageError
from recompute.training.state import state_dict

SMALL = {"layers": 2, "hidden": 64, "inner": 128, "heads": 2, "groups": 2, "vocab": 128, "seq": 16}
#: what is stored in fewer bits: precision, and options of AdamW
KINDS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "pure": ("bf16-pure", {}),
    "8-bit": (None, {"moments": "8-bit"}),
    "both": ("bf16-pure", {"moments": "8-bit"}),
}


def network(batch: int = 2) -> rc.Program:
    return rc.load(rc.models.build("llama-tiny", batch=None, **SMALL), batch=batch)


def feed(batch: int = 2, seed: int = 0) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(seed).integers(0, SMALL["vocab"], (batch, SMALL["seq"] + 1))
    return {"input_ids": ids[:, :-1], "label": ids[:, 1:]}


def optimizer(kind: str, rate: float = 3e-3) -> rc.optimizers.AdamW:
    return rc.AdamW(rate, **KINDS[kind][1])


def compiled(kind: str, **options: Any) -> Any:
    program = network()
    loss = rc.losses.cross_entropy(program["logits"])
    return rc.compile_step(program, loss, optimizer(kind), precision=KINDS[kind][0], **options), loss.name


def trained(step: Any, loss: str, steps: int, executor: rc.Executor | None = None) -> tuple[list[float], dict]:
    executor = executor or rc.Executor()
    losses = [float(executor.run(step.program, feed(), [loss])[0]) for _ in range(steps)]
    return losses, {n: np.array(a) for n, a in step.program.data.items()}


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(a[n].tobytes() == b[n].tobytes() for n in a)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_stored_in_which_type(kind: str) -> None:
    step, _ = compiled(kind)
    block = step.program.block
    kept = {v.name: v.type for v in block.persistent()}
    pure = KINDS[kind][0] is not None
    assert {v.dtype for v in block.parameters} == ({"bf16"} if pure else {"f32"})
    moment = kept["layers.0.mlp.up_proj.weight.moment2"]
    eight = "moments" in KINDS[kind][1]
    assert str(moment) == ("u8[32,260]" if eight else "bf16[64,128]")
    assert kept["layers.0.input_layernorm.weight.moment1"].dtype == ("bf16" if pure else "f32")
    for op in block.operators:  # no product reads a weight in float32, and no copy of one is made
        if pure and op.op.name in ("MatMul", "Gather"):
            assert all(v.dtype != "f32" for v in op.reads())


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_and_the_peak_is_as_predicted(kind: str) -> None:
    step, loss = compiled(kind)
    executor = rc.Executor()
    losses, _ = trained(step, loss, 12, executor)
    assert losses[-1] < 0.7 * losses[0]
    assert executor.session(step.program, [loss]).measured_peak_bytes == step.figures.peak_bytes


@pytest.mark.parametrize("kind", KINDS)
def test_a_network_with_many_zero_gradients_learns_as_in_float32(kind: str) -> None:
    """Behind ReLU and max pooling; with second moments that become 0 the loss rose to 50."""
    rng = np.random.default_rng(0)
    x, label = rng.standard_normal((64, 1, 28, 28), dtype=np.float32), rng.integers(0, 10, 64)
    found = []
    for precision, options in ((None, {}), KINDS[kind]):
        program = rc.load(rc.models.build("lenet", batch=8))
        loss = rc.losses.cross_entropy(program["logits"]).name
        step, executor = rc.compile_step(program, loss, rc.AdamW(1e-3, **options), precision=precision), rc.Executor()
        image = next(v.name for v in step.program.inputs if v.name != "label")
        rows = [slice(8 * (i % 8), 8 * (i % 8) + 8) for i in range(24)]
        losses = [executor.run(step.program, {image: x[r], "label": label[r]}, [loss])[0] for r in rows]
        found.append(float(np.mean(losses[-8:])))
    assert found[1] == pytest.approx(found[0], rel=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_recomputation_gives_the_same_bits(kind: str) -> None:
    _recomputes(kind, checkpoints=["layers.*.out"])


@pytest.mark.slow
def test_a_budget_gives_the_same_bits() -> None:
    _recomputes("both", budget="97%", strategy="chen")


def _recomputes(kind: str, **options: Any) -> None:
    plain = trained(*compiled(kind), 3)
    step, loss = compiled(kind, **options)
    assert step.figures.recomputed_operators
    again = trained(step, loss, 3)
    assert again[0] == plain[0] and same(again[1], plain[1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_state_goes_on_with_the_same_bits(kind: str, tmp_path: Path) -> None:
    whole = trained(*compiled(kind), 5)
    step, loss = compiled(kind)
    trained(step, loss, 2)
    rc.save_state(step.program, tmp_path / "state.safetensors")
    other, loss = compiled(kind)
    rc.load_state(other.program, tmp_path / "state.safetensors")
    rest = trained(other, loss, 3)
    assert rest[0] == whole[0][2:] and same(rest[1], whole[1])


def test_evaluation_has_the_trained_weights_at_any_batch() -> None:
    program = network()
    loss = rc.losses.cross_entropy(program["logits"])
    rc.amp.MixedPrecision(optimizer("pure"), "bf16-pure").minimize(loss)
    executor = rc.Executor()
    for _ in range(8):
        executor.run(program, feed(), [loss])
    (own,) = program.evaluate(feed(), ["logits"])
    one = {n: a[:1] for n, a in feed().items()}
    (first,) = program.evaluate(one, ["logits"])
    np.testing.assert_allclose(first, own[:1], rtol=2e-5, atol=2e-5)
    (untrained,) = network(1).evaluate({"input_ids": one["input_ids"]}, ["logits"])
    assert abs(first - untrained).max() > 0.1


def test_evaluation_makes_one_weight_at_a_time_float32() -> None:
    program = network()
    loss = rc.losses.cross_entropy(program["logits"])
    rc.amp.MixedPrecision(optimizer("pure"), "bf16-pure").minimize(loss)
    operators = program.for_test().operators
    for i, op in enumerate(operators):
        if op.op.name == "Cast" and next(op.reads()).dtype == "bf16":
            made = next(op.writes()).name
            first = next(k for k, o in enumerate(operators) if made in {v.name for v in o.reads()})
            assert first - i <= 3


def test_the_gradient_of_a_group_of_micro_batches() -> None:
    program = network(1)
    loss = rc.losses.cross_entropy(program["logits"])
    merged = rc.GradientMergeOptimizer(rc.amp.MixedPrecision(optimizer("both"), "bf16-pure"), k_steps=2)
    merged.minimize(loss)
    executor = rc.Executor()
    losses = [float(executor.run(program, feed(), [loss])[0]) for _ in range(10)]
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("kind", KINDS)
def test_onnx_has_no_such_updates(kind: str) -> None:
    step, _ = compiled(kind)
    with pytest.raises(RecomputeError, match=r"AdamUpdate.*(stochastic|8 bits)"):
        rc.export_step(step.program)


def test_a_trained_model_is_exported_in_its_own_types(tmp_path: Path) -> None:
    step, loss = compiled("pure")
    trained(step, loss, 3)
    model = rc.export_trained(step.program, tmp_path / "model.onnx")
    again = rc.load(tmp_path / "model.onnx", batch=2)
    name = "layers.0.mlp.up_proj.weight"
    assert again.data[name].dtype == np.float32
    assert (again.data[name] == step.program.data[name].astype(np.float32)).all()
    assert model.graph.name


def test_what_is_refused() -> None:
    program = network()
    loss = rc.losses.cross_entropy(program["logits"]).name
    with pytest.raises(UsageError, match="bf16-pure and Lamb are not combined"):
        rc.compile_step(program, loss, rc.optimizers.Lamb(), precision="bf16-pure")
    with pytest.raises(UsageError, match="moments must be None or '8-bit'"):
        rc.Adam(moments="4-bit")
    with pytest.raises(UsageError, match="SGD has no option 'moments'"):
        rc.SGD(0.1, moments="8-bit")


def rank_of(kind: str, mesh: str, rank: int = 0, **how: Any) -> rc.Program:
    program = network(1)
    loss = rc.losses.cross_entropy(program["logits"])
    inner = rc.amp.MixedPrecision(optimizer(kind), KINDS[kind][0] or "fp32")
    rc.DataParallel(inner, mesh=mesh, rank=rank, **how).minimize(loss)
    return program


def states(kind: str, mesh: str, ranks: int) -> list[dict[str, np.ndarray]]:
    """What each rank has after three steps of two micro-batches."""
    programs = [rank_of(kind, mesh, rank, micro_batches=2) for rank in range(ranks)]
    together = LockStep([p.block for p in programs], rc.Mesh.parse(mesh), [own_arrays(p) for p in programs])
    for step in range(3):
        whole = feed(2, step)
        rows = [slice(r, r + 1) if mesh == "dp=2" else slice(None) for r in range(ranks)]
        own = [{v.name for v in p.block.inputs} for p in programs]
        together.run([{n: a[r] for n, a in whole.items() if n in o} for r, o in zip(rows, own, strict=True)], [])
    return [dict(state) for state in together.state]


@pytest.mark.parametrize(("kind", "mesh"), [*((kind, "dp=2") for kind in KINDS), ("8-bit", "pp=2")])
def test_ranks_with_whole_parameters_have_the_same_bits(kind: str, mesh: str) -> None:
    (alone,) = states(kind, "dp=1", 1)
    first = rank_of(kind, "dp=1", micro_batches=2).data
    moved = [n for n, a in alone.items() if a.tobytes() != np.asarray(first[n]).tobytes()]
    assert len(moved) > len(alone) // 2
    for found in states(kind, mesh, 2):
        assert all(found[n].tobytes() == alone[n].tobytes() for n in found)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_parameters_are_refused(kind: str) -> None:
    def made(**how: Any) -> rc.Program:
        return rank_of(kind, **how)

    with pytest.raises(UsageError, match=r"(bf16-pure|8 bits) and zero are not combined"):
        made(mesh="dp=2", zero=1)
    with pytest.raises(UsageError, match=r"(bf16-pure|8 bits) and mesh .*tp=2.* are not combined"):
        made(mesh="dp=1,tp=2")


def test_a_trainer_resumes_with_the_same_bits(tmp_path: Path) -> None:
    data = {n: np.concatenate([a, a[::-1], a[:1]]) for n, a in feed().items()}  # the last batch is short

    def trainer() -> rc.Trainer:
        wrapped = rc.amp.MixedPrecision(optimizer("both"), "bf16-pure")
        return rc.Trainer(network(), wrapped, loss="cross_entropy", quiet=True)

    whole, first, second = trainer(), trainer(), trainer()
    whole.fit(data, epochs=3)
    first.fit(data, epochs=1, save=tmp_path)
    second.fit(data, epochs=3, save=tmp_path, resume=True)
    assert same(state_dict(whole.program), state_dict(second.program))
    untrained = network().data["layers.0.mlp.up_proj.weight"]
    assert (whole.program.data["layers.0.mlp.up_proj.weight"].astype(np.float32) != untrained).any()
