"""Bytes of activations that a GPT layer keeps for the backward pass, beside the formulas of Korthikanti et al. 2022.

With s tokens, a batch of b, h channels and t ranks, in 16-bit precision and without the matrix of attention's scores
(arXiv 2205.05198, table 2): sbh(10 + 24/t) bytes with tensor parallelism, 34sbh/t with sequence
parallelism, too.  Of the 34: inputs of both normalisations 4, inputs of the four products 2 + 2 + 2 + 8, queries, keys
and values 6, the input of Gelu 8, masks of dropout 1 + 1.  Here it is 36: masks are drawn again (-2), and the stream
that normalisations read is float32 (+4).  Statistics come on top: two numbers a row of each normalisation, and one a
row and head of attention.
"""

from __future__ import annotations

import pytest

import recompute as rc
from recompute.communication.mesh import Mesh
from recompute.compiling.steps import Steps
from recompute.cost import device
from recompute.language.ir import Block, Role
from recompute.passes import Target
from recompute.passes.memory.memory_plan import collect_lifetimes
from recompute.training.parallel import DataParallel

S, B, H, HEADS, RANKS = 32, 2, 64, 8, 8


def step(layers: int, sequence: bool) -> Block:
    options = {"layers": layers, "hidden": H, "heads": HEADS, "vocab": 64, "seq": S, "context": S, "dropout": 0.1}
    program = rc.load(rc.models.build("gpt2-tiny", **options), batch=B)
    optimizer = DataParallel(rc.MixedPrecision(rc.SGD(0.1), "bf16"), Mesh.of(tp=RANKS), batch=B, sequence=sequence)
    optimizer.minimize(rc.losses.cross_entropy(program["logits"]))
    return program.block


def kept(block: Block) -> int:
    """Bytes of forward values, weights in low precision left out, that the backward pass reads; views count once."""
    border = max(i for i, o in enumerate(block.operators) if o.role in (Role.FORWARD, Role.LOSS))
    declared = {v.name for v in block.declared()}
    stored, weights, made = {}, set(declared), {}
    for o in block.operators[: border + 1]:
        views = o.views()
        if o.op.name == "Cast" and all(v.name in declared for v in o.reads()):
            weights.update(v.name for v in o.writes())
        for k, v in enumerate(o.writes()):
            source = next(o.reads()).name if k < len(views) and views[k] is not None else v.name
            stored[v.name], made[v.name] = stored.get(source, source), v
    read = {stored[v.name] for o in block.operators[border + 1 :] for v in o.reads() if v.name in stored}
    return sum(made[name].nbytes for name in read - weights)


def compiled(layers: int, rows: int, hidden: int, heads: int) -> int:
    """Bytes of forward values of a compiled step at the end of the forward pass, weights in low precision left out."""
    options = {"layers": layers, "hidden": hidden, "heads": heads, "vocab": 64, "seq": rows, "context": rows}
    steps = Steps(
        "gpt2-tiny", optimizer=DataParallel(rc.SGD(0.1), Mesh.of(tp=RANKS), batch=1), options=options,
        target=Target(cost=device("a100-80"), precision="bf16"),
    )  # fmt: skip
    block = steps.compiled(1).program.block
    made = {v.name for o in block.operators for v in o.writes() if o.role is Role.FORWARD}
    made = {n for n in made if "weight" not in n and "bias" not in n}
    last = max(i for i, o in enumerate(block.operators) if o.op.name == "TiledAttention" and o.role is Role.FORWARD)
    return sum(x.size for x in collect_lifetimes(block) if x.name in made and x.start < last < x.end)


def test_activations_of_a_compiled_layer() -> None:
    """Results of LayerNorm (-4) and Gelu (-8) are made again of their inputs, attention's is kept by heads and by rows
    (+2); benchmarks/activations.py counts the same in GPT-3."""
    rows, hidden, heads = 1024, 256, 16
    statistics = 4 * 2 * 2 * rows // RANKS + 4 * rows * heads // RANKS
    found = [compiled(layers, rows, hidden, heads) for layers in (2, 3)]
    assert found[1] - found[0] == rows * hidden * 26 // RANKS + statistics


@pytest.mark.parametrize(("sequence", "formula", "own"), [(False, 10 + 24 / RANKS, 12 + 24 / RANKS),
                                                          (True, 34 / RANKS, 36 / RANKS)])  # fmt: skip
def test_activations_of_a_layer(sequence: bool, formula: float, own: float) -> None:
    layer = kept(step(2, sequence)) - kept(step(1, sequence))
    rows = S * B
    statistics = 4 * 2 * 2 * rows // (RANKS if sequence else 1) + 4 * rows * HEADS // RANKS
    assert layer == rows * H * own + statistics
    assert own - formula == pytest.approx(2 if not sequence else 2 / RANKS)  # +4 for float32, -2 for masks
