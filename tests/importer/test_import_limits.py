"""What a file may make the loader do: bombs of memory and time give one clear error, or the right result, soon."""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.helper import make_node as node
from onnx.numpy_helper import from_array

import recompute as rc
from recompute.errors import MissingExtraError
from recompute.importer.limits import Budget, LimitError
from recompute.support.patterns import regular_expression

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)


def info(name: str, shape: list | None = None, kind: int = 1) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def ints(name: str, *values: int) -> onnx.TensorProto:
    return from_array(np.array(values, np.int64), name)


def number(name: str, value: int) -> onnx.TensorProto:
    return from_array(np.array(value, np.int64), name)


def texts(name: str, *values: str) -> onnx.TensorProto:
    t = onnx.TensorProto(name=name, data_type=onnx.TensorProto.STRING, dims=[len(values)])
    t.string_data.extend(v.encode() for v in values)
    return t


def model(
    nodes: list, weights: tuple = (), opset: int = 20, inputs: tuple = (), functions: tuple = ()
) -> onnx.ModelProto:
    """h = x + x, then `nodes`, which write y."""
    graph = helper.make_graph(
        [node("Add", ["x", "x"], ["h"]), *nodes], "g", [info("x", [4, 8]), *inputs], [info("y")], list(weights)
    )
    opsets = [helper.make_opsetid(d, v) for d, v in (("", opset), ("my", 1), ("ai.onnx.ml", 3))]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8, functions=list(functions))


def graph(nodes: list, inputs: list, outputs: list) -> onnx.GraphProto:
    return helper.make_graph(nodes, "b", inputs, outputs)


def loop(inner: list, source: str, out: str, trips: str = "n", state: str = "v") -> onnx.NodeProto:
    """A Loop whose body takes `state` and gives `state`1; its condition stays as it is."""
    c = info(f"c_{state}", [], 9)
    return node(
        "Loop",
        [trips, "", source],
        [out],
        name=f"loop_{state}",
        body=graph(inner, [info(f"i_{state}", [], 7), c, info(state)], [c, info(f"{state}1")]),
    )


def added(name: str, kind: int = 7) -> list:
    """y = h + the sum of a value."""
    return [
        node("Cast", [name], ["f"], to=1),
        node("ReduceSum", ["f"], ["s"], keepdims=0),
        node("Add", ["h", "s"], ["y"]),
    ]


def fill(name: str, *shape: int, kind: int = 7) -> list:
    sizes = from_array(np.array(shape, np.int64))
    return [
        node("Constant", [], [f"{name}.shape"], value=sizes),
        node("ConstantOfShape", [f"{name}.shape"], [name], value=helper.make_tensor("v", kind, [1], [1])),
    ]


def doubling(inner: list, depth: int) -> tuple:
    """my.F0 is `inner` (a → b); each function after it calls the one before twice."""
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("my", 1)]
    bodies = [inner]
    for i in range(1, depth):
        calls = (["a"], ["m"]), (["m"], ["b"])
        bodies.append([node(f"F{i - 1}", a, b, domain="my") for a, b in calls])
    return tuple(helper.make_function("my", f"F{i}", ["a"], ["b"], b, opsets) for i, b in enumerate(bodies))


def nested(depth: int) -> onnx.NodeProto:
    made = node("Relu", ["v0"], ["v01"])
    for d in range(depth):
        made = loop([made], f"v{d + 1}", f"v{d + 1}1", state=f"v{d}")
    made.input[2], made.output[0] = "h", "y"
    return made


RANGE = [node("Range", ["zero", "big", "one"], ["r"])]
RANGED = (number("zero", 0), number("big", 4_000_000), number("one", 1))
TREE = {
    "nodes_treeids": [0, 0],
    "nodes_nodeids": [0, 1],
    "nodes_featureids": [0, 0],
    "nodes_values": [0.0, 0.0],
    "nodes_modes": ["BRANCH_LEQ", "LEAF"],
    "nodes_truenodeids": [0, 0],
    "nodes_falsenodeids": [0, 0],
    "n_targets": 1,
    "target_treeids": [0],
    "target_nodeids": [1],
    "target_ids": [0],
    "target_weights": [1.0],
}
SCAN = node(
    "Scan", ["r0"], ["y"], num_scan_inputs=1, body=graph([node("Relu", ["a"], ["b"])], [info("a")], [info("b")])
)
SCANS = node("Scan", ["z"], ["y"], num_scan_inputs=1, body=graph([SCAN], [info("r0")], [info("y")]))
WHILE = node(
    "Loop",
    ["", "t", "zero"],
    ["z"],
    name="while",
    body=graph(
        [node("Add", ["v", "one"], ["w"]), node("Less", ["w", "lots"], ["d"])],
        [info("i", [], 7), info("c", [], 9), info("v", [], 7)],
        [info("d", [], 9), info("w", [], 7)],
    ),
)

REFUSED = {
    "a shape of 2**32 numbers, in the converter": (
        model([node("Expand", ["h", "s"], ["y"])], opset=9, inputs=(info("s", [2**32], 7),)),
        "its shape .* from data",
    ),
    "the same from constants": (
        model([*fill("s", 2**32), node("Expand", ["h", "s"], ["y"])], opset=9),
        "4,294,967,296 numbers",
    ),
    "ranks that double, in the converter": (
        model(
            [
                *(node("Gather", ["z" if i == 0 else f"t{i - 1}"] * 2, [f"t{i}"]) for i in range(40)),
                node("Neg", ["h"], ["y"]),
            ],
            opset=9,
            inputs=(info("z", [2, 2], 7),),
        ),
        "dimensions, 64 are possible",
    ),
    "functions that double": (
        model([node("F29", ["h"], ["y"], domain="my")], functions=doubling([node("Relu", ["a"], ["b"])], 30)),
        r"become 536,870,913 nodes: .* --max-seconds",
    ),
    "a constant that functions double": (
        model(
            [node("F9", ["h"], ["y"], domain="my")],
            functions=doubling(
                [node("Constant", [], ["k"], value=from_array(np.zeros(500_000))), node("Neg", ["a"], ["b"])], 10
            ),
        ),
        "more memory than is allowed: 2,048,.* --max-bytes",
    ),
    "strings that double": (
        model([node("StringConcat", [f"t{i}"] * 2, [f"t{i + 1}"]) for i in range(60)], (texts("t0", "a" * 16),)),
        r"node 't24' \(StringConcat\): .* more memory than is allowed",
    ),
    "parts of one string, in every row": (
        model([node("StringSplit", ["s"], ["p", "n"])], (texts("s", "a " * 1_000_000, *["b"] * 4000),)),
        "32,008,000,000 bytes more",
    ),
    "a pattern of a billion states": (
        model([node("RegexFullMatch", ["s"], ["y"], pattern="((a{1000}){1000}){1000}")], (texts("s", "a"),)),
        "bad repetition|invalid repetition",
    ),
    "50,000 sums of 4,000,000": (
        model(
            [
                *RANGE,
                loop([node("Add", ["r", "v"], ["q"]), node("ReduceSum", ["q"], ["v1"], keepdims=0)], "zero", "z"),
                *added("z"),
            ],
            (*RANGED, number("n", 40_000)),
        ),
        "loop_v.*40,000 iterations, 80,000 nodes|v/.*seconds of work",
    ),
    "the same in a row": (
        model([*RANGE, *(node("ReduceSum", ["r"], [f"q{i}"]) for i in range(600))], RANGED),
        r"\(ReduceSum\): .* seconds of work",
    ),
    "loops in loops, 1000 each": (model([nested(3)], (number("n", 1000),)), "1,000 iterations, 1,000,000,000 nodes"),
    "loops in loops, 2 each": (model([nested(29)], (number("n", 2),)), "2 iterations, 536,870,912 nodes"),
    "scans in scans": (model([SCANS], inputs=(info("z", [1000, 1000, 8]),)), "1,000 steps, 1,000,000 nodes"),
    "a sequence that grows": (
        model(
            [
                node("SequenceConstruct", ["h"], ["e"]),
                loop([node("SequenceInsert", ["v", "h"], ["v1"])], "e", "z"),
                node("ConcatFromSequence", ["z"], ["y"], axis=0),
            ],
            (number("n", 20_000),),
        ),
        "10,001 tensors is too long",
    ),
    "a value of 2**82 bytes": (
        model([node("Pad", ["h", "p"], ["y"])], (ints("p", 0, 0, 2**40, 2**40),)),
        "more than any machine has",
    ),
    "tiles of tiles": (
        model([node("Tile", ["h" if i == 0 else f"t{i - 1}", "r"], [f"t{i}"]) for i in range(40)], (ints("r", 2, 2),)),
        "more than any machine has",
    ),
    "an empty tensor too large to be": (
        model([], (onnx.TensorProto(name="w", data_type=1, dims=[0, 2**62, 2**62], raw_data=b""),)),
        "more than any machine has",
    ),
    "a tree that is a circle": (
        model([node("TreeEnsembleRegressor", ["h"], ["y"], domain="ai.onnx.ml", **TREE)]),
        "its trees are none",
    ),
    "gaps without end": (
        model(
            [
                node(
                    "TfIdfVectorizer",
                    ["n"],
                    ["y"],
                    mode="TF",
                    min_gram_length=1,
                    max_gram_length=1,
                    max_skip_count=2**63 - 1,
                    ngram_counts=[0],
                    ngram_indexes=[0],
                    pool_int64s=[1],
                )
            ],
            (ints("n", 1, 2, 3),),
        ),
        "max_skip_count is 1,000 at the most",
    ),
    "axes without end": (model([*fill("s", 1 << 24), node("ReduceSum", ["h", "s"], ["y"])]), "16,777,216 numbers"),
    "a while loop": (
        model([WHILE], (number("zero", 0), number("one", 1), number("lots", 2**29), from_array(np.array(True), "t"))),
        "(z|while).*--max-seconds",
    ),
}


def load(source: onnx.ModelProto, **options) -> rc.Program:
    """`rc.load`, soon and in little memory."""
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    try:
        return rc.load(source, **options)
    finally:
        assert time.perf_counter() - began < 12
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20


@pytest.mark.parametrize("what", REFUSED)
def test_a_bomb_is_one_clear_error(what: str) -> None:
    source, why = REFUSED[what]
    if "RegexFullMatch" in {n.op_type for n in source.graph.node}:
        pytest.importorskip("re2")
    # fewer seconds than by default, so that what is counted while it is done is counted soon
    with pytest.raises(rc.ModelError, match=why):
        load(source, max_seconds=2 if "while" in what or "in a row" in what else None)


def test_what_is_too_much_to_compute_early_is_left_in_the_step() -> None:
    """A convolution of constants, a product, an Einsum, n-grams: operators of the program, with the right types."""
    for nodes, kept in (
        (
            [
                *fill("a", 1, 256, 250, 250, kind=2),
                *fill("b", 256, 256, 15, 15, kind=2),
                node("ConvInteger", ["a", "b"], ["q"]),
            ],
            3,
        ),
        ([*fill("a", 4000, 4000), node("MatMul", ["a", "a"], ["q"])], 2),
        ([*fill("a", 200, 200), node("Einsum", ["a"] * 4, ["q"], equation="ab,cd,ef,gh->")], 3),
    ):
        assert len(load(model([*nodes, *added("q")])).operators) > kept


def test_regular_expressions_end_and_are_right() -> None:
    pytest.importorskip("re2")
    source = model(
        [
            node("RegexFullMatch", ["s"], ["e"], pattern=r"(a+)+$"),
            node("Cast", ["e"], ["f"], to=1),
            node("Unsqueeze", ["f", "one"], ["c"]),
            node("Add", ["h", "c"], ["y"]),
        ],
        (texts("s", "a" * 40 + "!", "aaa", "", "b"), ints("one", 1)),
    )
    (y,) = rc.Executor().run(load(source), {"x": X}, ["y"])
    assert np.array_equal(y, 2 * X + np.array([[0], [1], [0], [0]], np.float32))


@pytest.mark.parametrize("pattern", ["(?=a)b", r"(a)\1", "[", "(" * 3000, "((a{1000}){1000}){1000}", "a" * 10**6])
def test_what_is_no_regular_expression_is_refused(pattern: str) -> None:
    pytest.importorskip("re2")
    with pytest.raises(rc.ModelError, match="its pattern is not a regular expression of RE2's syntax"):
        regular_expression(pattern)


def test_a_regular_expression_without_its_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "re2", None)
    with pytest.raises(MissingExtraError, match=r"onnx-recompute\[regex\]"):
        regular_expression("a|b")


def test_strings_are_split_and_joined_as_onnx_does() -> None:
    from backend import Backend
    from onnx.reference import ReferenceEvaluator

    x = np.array(["a,b,c", "é", "", ",x y"], object)
    rows, counts = info("y", [4, None], 8), info("n", [4], 7)
    for made, outputs in (
        (node("StringSplit", ["x"], ["y", "n"], delimiter=","), [rows, counts]),
        (node("StringSplit", ["x"], ["y", "n"], maxsplit=0), [rows, counts]),
        (node("StringConcat", ["x", "x"], ["y"]), [info("y", [4], 8)]),
    ):
        source = helper.make_graph([made], "g", [info("x", [4], 8)], outputs)
        source = helper.make_model(source, opset_imports=[helper.make_opsetid("", 20)], ir_version=8)
        ours, theirs = Backend.prepare(source).run([x]), ReferenceEvaluator(source).run(None, {"x": x})
        assert len(ours) == len(theirs) == len(outputs)
        for a, b in zip(ours, theirs, strict=True):
            assert np.array_equal(a, b)


def test_the_limits_can_be_raised() -> None:
    source = model([nested(2)], (number("n", 60),))
    with pytest.raises(LimitError, match=r"60 iterations, 3,600 nodes .* more than 0.1 seconds"):
        rc.load(source, max_seconds=0.1)
    assert len(rc.load(source, max_seconds=float("inf")).operators) == 3602
    wide = model([*RANGE, *added("r")], RANGED)
    with pytest.raises(LimitError, match=r"node 'r' \(Range\): .*32,000,000 bytes more, after 0 of 1,000,000"):
        rc.load(wide, max_bytes=1_000_000)
    for options in ({"max_seconds": 0}, {"max_seconds": "1"}, {"max_bytes": 0}, {"max_seconds": float("nan")}):
        with pytest.raises(rc.UsageError, match="must be"):
            rc.load(wide, **options)


def test_what_a_file_holds_itself_is_free() -> None:
    """20 times the nodes that a loop may write: they stand in the file."""
    nodes = [node("Identity", ["h" if i == 0 else f"a{i - 1}"], [f"a{i}"]) for i in range(2000)]
    assert load(model([*nodes, node("Neg", ["a1999"], ["y"])]), max_seconds=0.01).outputs[0].shape == (4, 8)


def test_external_data_that_is_a_link_to_itself(tmp_path: Path) -> None:
    source = model([node("Add", ["h", "w"], ["y"])])
    w = source.graph.initializer.add(name="w", data_type=1, dims=[8], data_location=1)
    w.external_data.add(key="location", value="loop.bin")
    (tmp_path / "loop.bin").symlink_to("loop.bin")
    (tmp_path / "m.onnx").write_bytes(source.SerializeToString())
    with pytest.raises(rc.ModelError, match=r"'loop\.bin' cannot be read"):
        rc.load(tmp_path / "m.onnx")


def test_subgraphs_may_not_be_nested_without_end() -> None:
    source = model([node("Neg", ["h"], ["y"])])
    at = source.graph
    for _ in range(100):
        branch = at.node.add(op_type="If", input=["t"], output=["o"]).attribute.add(name="then_branch", type=5)
        at = branch.g
        at.name = "g"
    with pytest.raises(rc.ModelError, match=r"nested more than 64 deep"):
        rc.load(source)


def test_large_constants_do_not_travel_through_the_converter() -> None:
    k = np.arange(40_000, dtype=np.float32).reshape(40_000, 1)
    nodes = [
        node("Constant", [], ["k"], value=from_array(k)),
        node("ReduceSum", ["k"], ["s"], keepdims=0),
        node("Add", ["h", "s"], ["y"]),
    ]
    (y,) = rc.Executor().run(rc.load(model(nodes, opset=9)), {"x": X}, ["y"])
    np.testing.assert_allclose(y, 2 * X + k.sum(), rtol=1e-5)


def test_work_is_counted_not_timed() -> None:
    budget = Budget(max_seconds=1)
    budget.spend(400_000_000, "one thing")
    with pytest.raises(LimitError, match=r"another: .* 1 seconds of work"):
        budget.spend(200_000_000, "another")
    budget.spend(100_000_000, "the last")


def test_the_command_line_has_the_limits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from recompute.cli import command as cli

    path = tmp_path / "m.onnx"
    path.write_bytes(model([nested(2)], (number("n", 60),)).SerializeToString())
    assert cli.main([str(path), "--max-seconds", "0.1"]) == 1
    assert "--max-seconds allows more" in capsys.readouterr().err
    assert cli.main([str(path), "--max-bytes", "1%"]) == 2
