"""Operators divided among ranks: the results of one rank, and Megatron's communication."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed_cases import own_arrays
from sharded_cases import adam, communications, feed_of, ranks_of, same_as_one_rank

import recompute as rc
from recompute.communication.lockstep import LockStep
from recompute.communication.mesh import Mesh
from recompute.errors import JobError, UsageError
from recompute.language.program import Program
from recompute.passes.sharding.divide import divide
from recompute.passes.sharding.reshard import Division
from recompute.testing import evaluate
from recompute.training.parallel import DataParallel
from recompute.training.parts import parts_of

GPT = {"layers": 2, "hidden": 16, "heads": 4, "vocab": 24, "seq": 8, "context": 8}
BERT = {"layers": 2, "hidden": 16, "heads": 4, "vocab": 24, "seq": 8}


def gpt(*, sequence: bool = False, dropout: float = 0.0, batch: int = 4) -> tuple[Program, Any]:
    """Columns of the first matrix of each pair are cut; rows of the second ones follow."""
    program = rc.load(rc.models.build("gpt2-tiny", **{**GPT, "dropout": dropout}), batch=batch)
    rc.shard(program, "h.*.c_attn.weight", dim=1, blocks=3)
    rc.shard(program, "h.*.c_fc.weight", dim=-1)
    if sequence:
        rc.shard(program["embeddings.out"], dim=1)
    return program, rc.losses.cross_entropy(program["logits"])


def bert(batch: int = 4) -> tuple[Program, Any]:
    """With dropout in attention and behind both matrices; queries, keys and values have a matrix each."""
    program = rc.load(rc.models.build("bert-tiny", **BERT), batch=batch)
    for v in program.block.parameters:
        if any(f".{kind}.weight" in v.name for kind in ("query", "key", "value", "intermediate.dense", "intermediate")):
            rc.shard(program[v.name], dim=1)
    return program, rc.losses.cross_entropy(program["logits"])


@pytest.mark.parametrize("mesh", ["tp=2", "tp=4"])
def test_columns_and_rows(mesh: str) -> None:
    """Four sums a layer, two in each direction: no value but the first matrices' columns was annotated."""
    programs = same_as_one_rank(gpt, mesh)
    block = programs[0].block
    assert communications(block) == {("forward", "AllReduce"): 4, ("backward", "AllReduce"): 4}
    sums = [o for o in block.operators if o.op.communicates == "begin"]
    assert {o.outputs[0].shape for o in sums} == {(1, 4, 8, 16)}  # type: ignore[union-attr]
    cut = {n: str(d.whole) for n, d in programs[0].divided.items() if n.startswith("h.0.")}
    assert cut == {
        "h.0.attn.c_attn.weight": "f32[16,48]", "h.0.attn.c_attn.bias": "f32[48]",
        "h.0.attn.c_proj.weight": "f32[16,16]", "h.0.mlp.c_fc.weight": "f32[16,64]",
        "h.0.mlp.c_fc.bias": "f32[64]", "h.0.mlp.c_proj.weight": "f32[64,16]",
    }  # fmt: skip


@pytest.mark.parametrize("mesh", ["tp=2", "tp=4"])
def test_sequence_parallelism(mesh: str) -> None:
    """Between the pairs the stream is cut along the sequence: it is gathered before each pair, and again in the
    backward pass, where its gradient is gathered, too; sums become shards of sums."""
    programs = same_as_one_rank(lambda: gpt(sequence=True), mesh)
    large = 4 * 8 * 16 * 4 // int(mesh[-1])
    found = communications(programs[0].block, large)
    assert found[("forward", "ReduceScatter")] == 4
    assert found[("forward", "AllGather")] == 4
    assert found[("backward", "ReduceScatter")] == 4
    assert found[("backward", "AllGather")] == 8
    assert found[("forward", "AllReduce")] == 0  # the head has this rank's part of the sequence, too


@pytest.mark.parametrize("mesh", ["tp=2", "tp=4"])
def test_dropout_draws_the_numbers_of_one_rank(mesh: str) -> None:
    same_as_one_rank(bert, mesh)
    same_as_one_rank(lambda: gpt(sequence=True, dropout=0.3), mesh)


FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2-tiny": GPT,
    "bert-tiny": BERT,
    "llama-tiny": {"layers": 2, "hidden": 16, "heads": 4, "vocab": 24, "seq": 8},
}


def plain(name: str) -> tuple[Program, Any]:
    """A network without annotations."""
    program = rc.load(rc.models.build(name, **FAMILIES[name]), batch=4)
    return program, rc.losses.cross_entropy(program["logits"])


@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,tp=2", "cp=2"])
@pytest.mark.parametrize("name", list(FAMILIES))
def test_what_is_divided_is_found(name: str, mesh: str) -> None:
    """Without annotations: both matrices of each pair, with their biases, the sequence between them, and the words of
    embeddings and heads."""
    programs = same_as_one_rank(lambda: plain(name), mesh)
    matrices = [n for n, d in programs[0].divided.items() if d.whole.ndim == 2]
    layers, words = {"gpt2-tiny": (4, 1), "bert-tiny": (6, 2), "llama-tiny": (7, 2)}[name]
    if "tp" in mesh:
        assert len([n for n in matrices if "wpe" not in n and "position" not in n]) == 2 * layers + words
        assert communications(programs[0].block)[("forward", "ReduceScatter")] == 4 + 1


@pytest.mark.parametrize(("name", "mesh"), [("gpt2-tiny", "tp=2"), ("gpt2-tiny", "tp=4"), ("llama-tiny", "tp=2")])
def test_four_sums_a_layer(name: str, mesh: str) -> None:
    """And one more for the embedding, one for the head; the loss is put together of one number a label."""
    programs = same_as_one_rank(lambda: plain(name), mesh, sequence=False)
    assert communications(programs[0].block) == {
        ("forward", "AllReduce"): 4 + 1, ("backward", "AllReduce"): 4 + 1,
        ("loss", "AllGather"): 1, ("loss", "AllReduce"): 1,
    }  # fmt: skip


def test_weights_in_low_precision_stay_where_they_are() -> None:
    """However large the batch is: what a weight is cast to is not gathered in place of activations."""
    program = rc.load(rc.models.build("gpt2-tiny", **FAMILIES["gpt2-tiny"]), batch=256)
    optimizer = rc.MixedPrecision(rc.Adam(1e-3), "bf16")
    DataParallel(optimizer, Mesh.of(tp=2), batch=256, micro_batches=4).minimize(
        rc.losses.cross_entropy(program["logits"])
    )
    sent = [v for o in program.operators if o.op.communicates == "begin" for v in o.reads() if v.dtype == "bf16"]
    assert sent
    assert all("#" in v.name for v in sent)  # activations of micro-batches
    whole = {tuple(d.whole.shape) for d in program.divided.values() if d.whole.ndim == 2}
    gradients = [v for o in program.operators if o.op.communicates == "begin" for v in o.reads() if v.dtype == "f32"]
    assert not [v for v in gradients if v.size in {a * b for a, b in whole}]


def test_heads_that_cannot_be_shared_stay_whole() -> None:
    """The two heads of keys and values are too few for four ranks; the other pair is divided."""
    programs = same_as_one_rank(lambda: plain("llama-tiny"), "tp=4", sequence=False)
    assert communications(programs[0].block) == {
        ("forward", "AllReduce"): 2 + 1, ("backward", "AllReduce"): 2 + 1,
        ("loss", "AllGather"): 1, ("loss", "AllReduce"): 1,
    }  # fmt: skip


@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny"])
def test_vocabularies_are_divided(name: str, sequence: bool) -> None:
    """A rank has some rows of the embedding, some words of the head, and their scores alone; labels that are ignored
    count for nothing on any rank."""

    def made() -> tuple[Program, Any]:
        program = rc.load(rc.models.build(name, **{**FAMILIES[name], "vocab": 96}), batch=4)
        return program, rc.losses.cross_entropy(program["logits"], ignore_index=3)

    programs = same_as_one_rank(made, "tp=4", sequence=sequence)
    assert not [v.name for o in programs[0].block.operators for v in o.writes() if 96 in v.shape and v.type.is_float]
    assert {d.whole.shape for d in programs[0].divided.values() if 96 in d.whole.shape} >= {(96, 16)}


def test_words_outside_of_a_divided_vocabulary_are_reported() -> None:
    """A row that no rank has is an error on every rank, not a row of zeros; so is a label."""
    programs = [p for p, _ in ranks_of(lambda: plain("llama-tiny"), "tp=2")]
    for name in ("input_ids", "label"):
        feed = feed_of(plain("llama-tiny")[0])
        feed = {v.name: np.array(feed[v.name]) for v in programs[0].block.inputs}
        feed[name].flat[5] = 24
        with pytest.raises(JobError, match="index 24 is out of range"):
            LockStep([p.block for p in programs], Mesh.of(tp=2), [own_arrays(p) for p in programs]).run([feed, feed])


def test_large_heads_are_divided_instead_of_fused() -> None:
    """Where the words cannot be shared equally, the head stays one operator, for the rank's part of the sequence."""
    for vocab, name in ((3000, "ReduceLogSumExp"), (3001, "LinearCrossEntropy")):
        options = {"layers": 1, "hidden": 8, "heads": 2, "vocab": vocab, "seq": 128, "context": 128}
        program = rc.load(rc.models.build("gpt2-tiny", **options), batch=8)
        DataParallel(adam(), Mesh.of(tp=2), batch=8, micro_batches=1).minimize(
            rc.losses.cross_entropy(program["logits"])
        )
        assert name in {o.op.name for o in program.operators}


@pytest.mark.parametrize("rank", [0, 1])
def test_inputs_that_are_needed_whole_are_not_sent(rank: int) -> None:
    """A rank has all of an input. What is made of a whole one stays whole, though its reader takes a part of it."""
    block = rc.parse("""program p {
      input %x: f32[3,4]
      param %c: f32[3,4]
      %h: f32[3,4] = Softmax(%x)
      %y: f32[3,4] = Add(%h, %c)
      %z: f32[3,4] = Exp(%x)
      output %y, %z
    }""")
    how = Division("tp", 2, rank)
    cut = how.cut(block.inputs[0].type, 1)
    assert cut is not None
    found = divide(block, how, {"x": cut, "c": cut}, whole=())
    assert set(found.cuts) == {"x", "c", "y", "z"} and found.sent == 0
    g = np.random.default_rng(0)
    x, c = (g.standard_normal((3, 4)).astype(np.float32) for _ in range(2))
    own = slice(2 * rank, 2 * rank + 2)
    y, z = evaluate(found.block, {"x": x, "c": c[:, own]})
    softmax = np.exp(x) / np.exp(x).sum(1, keepdims=True)
    np.testing.assert_allclose(y, (softmax + c)[:, own], rtol=1e-5)
    np.testing.assert_allclose(z, np.exp(x)[:, own], rtol=1e-6)


def test_unequal_parts_are_refused() -> None:
    with pytest.raises(UsageError, match=r"axis 1 of 'h.0.attn.c_attn.weight'.* 5 ranks in 3 blocks"):
        ranks_of(gpt, "tp=5")


def test_annotations_name_axes_that_exist() -> None:
    program, _ = gpt()
    with pytest.raises(UsageError, match=r"no value 'h\.0\.c_fc'"):
        rc.shard(program, "h.0.c_fc")
    with pytest.raises(UsageError, match="has no axis 2"):
        rc.shard(program["h.0.mlp.c_fc.weight"], dim=2)
    with pytest.raises(UsageError, match="axis must be"):
        rc.shard(program["h.0.mlp.c_fc.weight"], axis="dp")


def test_arrays_are_parts() -> None:
    """The parts of all ranks are the whole matrix, whose three blocks are cut each."""
    whole = np.array(gpt()[0].data["h.0.attn.c_attn.weight"]).reshape(16, 3, 2, 8)
    for rank, (program, _) in enumerate(ranks_of(gpt, "tp=2")):
        np.testing.assert_array_equal(program.data["h.0.attn.c_attn.weight"], whole[:, :, rank].reshape(16, 24))


def test_ranks_read_their_parts_of_a_whole_file(tmp_path: Path) -> None:
    """A file of one rank's state, loaded by each rank; together they have all of it."""
    program, loss = gpt()
    adam().minimize(loss)
    for name, array in program.data.items():
        program.data[name] = np.asarray(np.random.default_rng(len(name)).standard_normal(array.shape), array.dtype)
    rc.save_state(program, tmp_path / "state.safetensors")
    ranks = [p for p, _ in ranks_of(gpt, "tp=2")]
    for rank in ranks:
        rc.load_state(rank, tmp_path / "state.safetensors")
    for name, part in parts_of(ranks[0]).items():
        np.testing.assert_array_equal(part.joined([r.data[name] for r in ranks]), program.data[name])
    assert "h.0.mlp.c_fc.weight.moment1" in parts_of(ranks[0]) or len(parts_of(ranks[0])) > len(ranks[0].divided)
    with pytest.raises(UsageError, match="is divided among ranks"):
        rc.save_state(ranks[0], tmp_path / "part.safetensors")


@pytest.mark.parametrize("zero", [1, 3])
def test_zero_divides_parts_once_more(zero: int, tmp_path: Path) -> None:
    """With ZeRO a rank has a share of its part of a matrix, and of its state; clipping, files and evaluation know."""

    def clipped() -> Any:
        return adam(grad_clip=rc.clip.ClipGradByGlobalNorm(0.05))

    mesh = "dp=2,tp=2"
    programs = same_as_one_rank(lambda: plain("llama-tiny"), mesh, clipped, zero=zero)
    plain_ones = [p for p, _ in ranks_of(lambda: plain("llama-tiny"), mesh)]
    sizes = [sum(v.size for v in (*p.block.parameters, *p.block.state)) for p in (programs[0], plain_ones[0])]
    assert sizes[0] < 0.55 * sizes[1]
    program, loss = plain("llama-tiny")
    adam().minimize(loss)
    for name, array in program.data.items():
        program.data[name] = np.asarray(np.random.default_rng(len(name)).standard_normal(array.shape), array.dtype)
    rc.save_state(program, tmp_path / "state.safetensors")
    for rank in programs:
        rc.load_state(rank, tmp_path / "state.safetensors")
    for name, part in parts_of(programs[0]).items():
        np.testing.assert_array_equal(part.joined([r.data[name] for r in programs]), program.data[name])
    feed = feed_of(program)
    whole = program.for_test(outputs=["logits"])
    want = LockStep(whole.block, Mesh(), own_arrays(whole)).run({v.name: feed[v.name] for v in whole.block.inputs})
    tests = [p.for_test(outputs=["logits"]) for p in programs]
    given = [{v.name: feed[v.name] for v in t.block.inputs} for t in tests]
    for one in LockStep([t.block for t in tests], Mesh.parse(mesh), [own_arrays(t) for t in tests]).run(given):
        np.testing.assert_allclose(one["logits"], want[0]["logits"], rtol=1e-4, atol=1e-4)


def test_evaluation_is_divided() -> None:
    """The forward pass in inference mode, on each rank's parameters: the logits of one rank, whole."""
    program, _ = plain("bert-tiny")
    feed = feed_of(program)
    whole = program.for_test(outputs=["logits"])
    want = LockStep(whole.block, Mesh(), own_arrays(whole)).run({v.name: feed[v.name] for v in whole.block.inputs})
    tests = [p.for_test(outputs=["logits"]) for p, _ in ranks_of(lambda: plain("bert-tiny"), "tp=2")]
    given = [{v.name: feed[v.name] for v in t.block.inputs} for t in tests]
    found = LockStep([t.block for t in tests], Mesh.of(tp=2), [own_arrays(t) for t in tests]).run(given)
    for one in found:
        np.testing.assert_allclose(one["logits"], want[0]["logits"], rtol=1e-4, atol=1e-6)
