"""Merged adapters leave the inputs, the opset and the domains of the file."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper

import recompute as rc

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("opset", [13, 17, 21])
def test_merging_gives_back_the_interface(opset: int, dora: bool) -> None:
    """Inputs, opset and domains are the file's again, and so is what it computes before any step."""
    w1, w2 = (RNG.standard_normal(s).astype(np.float32) for s in ((40, 40), (40, 4)))  # w1 is large: above 1 KiB
    nodes = [helper.make_node("MatMul", ["x", "w1"], ["h"]), helper.make_node("MatMul", ["h", "w2"], ["y"])]
    value = helper.make_tensor_value_info
    held = [onnx.numpy_helper.from_array(a, n) for a, n in ((w1, "w1"), (w2, "w2"))]
    graph = helper.make_graph(nodes, "g", [value("x", 1, ["N", 40])], [value("y", 1, ["N", 4])], held)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    merged = rc.merge_adapters(rc.lora(model, "w1", r=2, dora=dora))
    onnx.checker.check_model(rc.lora(model, "w1", r=2, dora=dora))
    assert [i.name for i in merged.graph.input] == ["x"]
    assert [(o.domain, o.version) for o in merged.opset_import] == [("", opset)]
    assert [n.op_type for n in merged.graph.node] == ["MatMul", "MatMul"]
    found = onnx.numpy_helper.to_array(next(t for t in merged.graph.initializer if t.name == "w1"))
    np.testing.assert_allclose(found, w1, rtol=1e-6)


def test_an_old_file_gets_no_inputs_and_no_domains_of_its_editor() -> None:
    """Opset 11 is converted, LayerNormalization, which optimizers write into any opset, stays."""
    weight = onnx.numpy_helper.from_array(RNG.standard_normal((40, 40)).astype(np.float32), "w")
    scale = onnx.numpy_helper.from_array(np.ones(40, np.float32), "scale")
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("LayerNormalization", ["h", "scale"], ["y"], axis=-1),
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(nodes, "g", [value("x", 1, [2, 40])], [value("y", 1, [2, 40])], [weight, scale])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=8)
    merged = rc.merge_adapters(rc.lora(model, "w", r=2))
    assert [i.name for i in merged.graph.input] == ["x"]
    assert [o.domain for o in merged.opset_import] == [""]


@pytest.mark.parametrize(
    ("form", "pattern"), [("MatMulInteger", "codes"), ("MatMulInteger", "*"), ("Cast", "codes"), ("Cast", "co*")]
)
def test_adapters_on_whole_numbers_are_refused_by_name(form: str, pattern: str) -> None:
    value, make = helper.make_tensor_value_info, helper.make_node
    codes = onnx.numpy_helper.from_array(RNG.integers(-5, 5, (4, 3)).astype(np.int8), "codes")
    scale = onnx.numpy_helper.from_array(np.float32(0.1), "scale")
    nodes = {
        "MatMulInteger": [make("MatMulInteger", ["x", "codes"], ["i"]), make("Cast", ["i"], ["f"], to=1)],
        "Cast": [
            make("Cast", ["codes"], ["c"], to=1),
            make("Mul", ["c", "scale"], ["w"]),
            make("MatMul", ["x", "w"], ["f"]),
        ],
    }[form]
    kind = 3 if form == "MatMulInteger" else 1
    graph = helper.make_graph(nodes, "g", [value("x", kind, [2, 4])], [value("f", 1, [2, 3])], [codes, scale])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    with pytest.raises(rc.UsageError, match=rf"'codes' holds whole numbers, which {form} \(node .*quantize_frozen"):
        rc.lora(model, pattern)
