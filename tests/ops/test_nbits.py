"""Weights in few bits (com.microsoft's MatMulNBits, GatherBlockQuantized) stay packed, and pass gradients on."""

from __future__ import annotations

import numpy as np
import pytest
from few_bits_cases import IDS, MS, model, packed, trained, two_layers, whole
from onnx import helper

import recompute as rc
from recompute.errors import TypeRuleError
from recompute.language.types import TensorType
from recompute.ops.linear.nbits import DequantizeNBits, MatMulNBits


@pytest.mark.parametrize("bits", [4, 8, "nf4", "fp4"])
def test_what_is_around_trains_as_beside_the_same_numbers_in_floats(bits: int | str) -> None:
    losses, found, program = trained(two_layers(bits=bits), rc.SGD(0.05))
    theirs, wanted, _ = trained(two_layers(bits=bits, floats=True), rc.SGD(0.05), ["g", "b"])
    assert losses[1] < losses[0] and sorted(found) == ["b", "g"]
    np.testing.assert_allclose(losses, theirs, rtol=1e-5)
    for name, array in found.items():
        np.testing.assert_allclose(array, wanted[name], rtol=1e-5, atol=1e-6)
    listed = {t.name: t for t in program.tensors}
    assert listed["up.codes"].why == "integers of a frozen weight" and not listed["up.scales"].trains
    assert isinstance(bits, str) or listed["up.zeros"].why == "integers of a frozen weight"


def test_codes_stay_packed_and_the_whole_weight_is_never_there() -> None:
    """Packed, the three take an eighth of floats; at a time a part of one is dequantised."""
    k, n = 768, 6144
    source = two_layers(k, n)
    _, _, program = trained(source, rc.SGD(0.05), steps=1)
    block = rc.Executor().planned(program, [program.loss])
    used = {v.name for v in program.block.buffers}
    stored = sum(program.data[name].nbytes for name in used if name.partition(".")[0] in ("table", "up", "down"))
    floats = 4 * (2 * n * k + 20 * k)
    assert stored < 0.18 * floats and all(program.data[f"{w}.codes"].dtype == np.uint8 for w in ("table", "up", "down"))
    assert [o.op.transB for o in block.operators if isinstance(o.op, MatMulNBits)] == [1, 1, 0, 0]
    values = {v.name: v for o in block.operators for v in (*o.writes(), *o.scratch)}
    assert max(v.nbytes for v in values.values()) <= 4 << 20 < floats / 4


def test_recomputation_keeps_the_bits() -> None:
    plain = trained(two_layers(512, 640), rc.Adam(0.01))
    again = trained(two_layers(512, 640), rc.RecomputeOptimizer(rc.Adam(0.01)).set_checkpoints(["s"]))
    assert any(o.role.name == "RECOMPUTE" for o in again[2].block.operators)
    assert plain[0] == again[0]
    for name, array in plain[1].items():
        assert np.array_equal(array, again[1][name])


def test_what_is_not_supported_is_refused_by_name() -> None:
    parts = packed(8, 32)
    for more, given, said in (
        (["order"], {}, "g_idx"),
        ([], {"weight_prepacked": 1}, "weight_prepacked"),
        ([], {"block_size": 24}, "block_size=24"),
        ([], {"K": 64}, "x must be floats with 64 along the last axis"),
    ):
        options = {"N": 8, "K": 32, "block_size": 32, "bits": 4, **given}
        node = helper.make_node("MatMulNBits", ["x", *parts, *more], ["y"], domain=MS, **options)
        source = model([node], {**parts, "order": np.arange(32, dtype=np.int32)}, [3, 32])
        with pytest.raises(rc.ModelError, match=said):
            rc.load(source)
    node = helper.make_node("MatMulNBits", ["x", *parts], ["y"], domain=MS, N=8, K=32, block_size=32)
    with pytest.raises(rc.UsageError, match="scales"):
        rc.load(model([node], parts, [3, 32]), trainable=["scales"])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"quant_type": 2}, "quant_type=2"),
        ({"transB": 0}, "transB=0"),
        ({"K": 48}, "with whole blocks in a row"),
        ({"block_size": 24}, "block_size=24"),
    ],
)
def test_what_is_not_supported_of_floats_of_4_bits_is_refused(given: dict, said: str) -> None:
    parts = packed(8, 32, bits="nf4")
    options = {"N": 8, "K": 32, "block_size": 32, "quant_type": 1, **given}
    node = helper.make_node("MatMulBnb4", ["x", *parts], ["y"], domain=MS, **options)
    with pytest.raises(rc.ModelError, match=said):
        rc.load(model([node], parts, [3, options["K"]]))


def test_a_table_that_is_the_head_in_another_shape_is_not_there_twice() -> None:
    """Embeddings tied to the head: GatherBlockQuantized reads a Reshape of the codes that MatMulNBits reads."""
    parts = packed(40, 64)
    head = [f"head.{part}" for part in parts]
    arrays = {**dict(zip(head, parts.values(), strict=True)), "shape": np.array([40, -1])}
    options = {"bits": 4, "block_size": 32}
    nodes = [
        helper.make_node("Reshape", ["head.codes", "shape"], ["table"]),
        helper.make_node("GatherBlockQuantized", ["table", "x", *head[1:]], ["e"], domain=MS, **options),
        helper.make_node("Mul", ["e", "g"], ["s"]),
        helper.make_node("MatMulNBits", ["s", *head], ["y"], domain=MS, N=40, K=64, **options),
    ]
    arrays["g"] = np.ones(64, "f4")
    source = model(nodes, arrays, ["batch", 6], 7)
    losses, _, program = trained(source, rc.SGD(0.05))
    assert losses[1] < losses[0]
    assert sorted(v.name for v in program.block.buffers) == sorted(head)
    (own,) = rc.load(source, batch=4).evaluate({"x": IDS})
    table = whole(parts, 64)
    np.testing.assert_allclose(own, table[IDS] @ table.T, rtol=1e-4, atol=1e-4)


def test_no_rows_of_another_width_and_blocks_of_nothing_are_refused() -> None:
    op = DequantizeNBits(K=40, bits=4, block_size=16)
    empty = (TensorType("u8", (0, 24)), TensorType("f32", (0, 3)))
    assert op.infer(*empty)[0].shape == (0, 40)
    for at, width in ((0, 25), (1, 0), (1, 4)):
        given = [t if i != at else t.with_shape((0, width)) for i, t in enumerate(empty)]
        with pytest.raises(TypeRuleError, match="a row"):
            op.infer(*given)
    with pytest.raises(TypeRuleError, match="block_size=0"):
        DequantizeNBits(K=40, block_size=0).infer(*empty)
