"""Programs and plans that somebody else has written: whatever they say is verified before any memory is touched."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import recompute as rc
from recompute.errors import JobError, ModelError, RecomputeError, TypeRuleError, UsageError, VerifyError
from recompute.language.ir import Value
from recompute.language.op import op_class
from recompute.language.text import parse
from recompute.language.types import FLOATS, TensorType
from recompute.language.verify import verify
from recompute.runtime.cpu.session import Arena, Session
from recompute.testing import all_ops

#: a planned program: a view, a copy to the host's memory, workspace, an output in its input's place, a second output
PLANNED = """program p {
  input %x: f32[64,64] @0
  param %w: f32[64,64]
  state %step: i64[]
  %a: f32[64,64] = Add(%x, %w) @16384
  %r: f32[4096] = Reshape(%a) {shape=[4096]} @16384
  %s: f32[64,64] = Softmax(%a) scratch(%s#0: f32[64,1]) @0,32768
  %t: f32[64,64] = Tanh(%s) @0
  %d: f32[64,64], %m: bool[64,64] = Dropout(%t, %step) scratch(%u: f32[4096], %k: bool[4096]) @36864,53248,57344,73728
  output %d, %m, %r
}
"""


def test_the_planned_program_is_good() -> None:
    data = {"w": np.ones((64, 64), np.float32), "step": np.array(3)}
    session = Session(verify(parse(PLANNED)), data)
    session.feed("x", np.zeros((64, 64), np.float32))
    session.run()
    np.testing.assert_array_equal(session.fetch("r"), np.ones(4096))


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("%x: f32[64,64] @0", "%x: f32[64,64]", "%x has no address"),
        ("@0,32768", "@0,_", "%s#0 has no address"),
        ("@0,32768", "@_,32768", "%s has no address"),
        ("%w: f32[64,64]", "%w: f32[64,64] @81920", "%w is persistent: it is an array of the program"),
        ("%step: i64[]", "%step: i64[] @81920", "%step is persistent"),
        ("%x: f32[64,64] @0", "%x: f32[64,64] @-64", "%x lies at -64: addresses are multiples of 64 from 0 on"),
        ("@0,32768", "@0,-32768", "%s#0 lies at -32768"),
        ("@0,32768", "@0,32770", "%s#0 lies at 32770"),
        ("@0,32768", f"@0,{1 << 62}", f"%s#0 lies at {1 << 62}"),
        ("@0,32768", f"@0,{1 << 56}", f"%s#0 lies at {1 << 56}"),
        ("%a: f32[64,64] = Add(%x, %w) @16384", "%a: f32[64,64] = Add(%x, %w) @64", "%a at 64..16448 overlaps"),
        ("@0,32768", "@0,0", "overlaps %s"),
        ("@0,32768", "@0,16320", "overlaps %s"),
        ("@0,32768", "@0,16384", "scratch %s#0 overlaps input %a"),
        ("@0,32768", "@0,32704", "scratch %s#0 overlaps input %a"),
        ("= Tanh(%s) @0", "= Tanh(%s) @64", "%t at 64..16448 overlaps its input %s"),
        ("@36864,53248,57344,73728", "@36864,36864,57344,73728", "overlaps %"),
        ("@36864,53248,57344,73728", "@36864,53184,57344,73728", "%m at 53184..57280 overlaps %d"),
        ("@36864,53248,57344,73728", "@36864,53248,57280,73728", "%u at 57280..73664 overlaps %m"),
        ("@36864,53248,57344,73728", "@36864,53248,57344,73664", "%k at 73664..77760 overlaps %u"),
        ("@36864,53248,57344,73728", "@36864,53248,57344,0", "scratch %k overlaps input %t"),
        ("@36864,53248,57344,73728", "@16384,53248,57344,73728", "%r is read, but its bytes"),
        ("scratch(%s#0: f32[64,1])", "scratch(%s#0: f32[1,1])", "Softmax needs scratch buffers of other types: f32"),
        ("scratch(%s#0: f32[64,1])", "scratch(%s#0: f64[64,1])", "Softmax needs scratch buffers of other types: f32"),
        (" scratch(%s#0: f32[64,1]) @0,32768", " @0", "Softmax needs scratch buffers of other types: f32"),
        ("= Tanh(%s) @0", "= Tanh(%s) scratch(%t#0: f32[4]) @0,98304", "needs scratch buffers of other types: none"),
    ],
)  # fmt: skip
def test_a_plan_that_is_wrong_is_refused(old: str, new: str, why: str) -> None:
    assert PLANNED.count(old) == 1
    with pytest.raises(VerifyError) as e:
        verify(parse(PLANNED.replace(old, new)))
    assert why in str(e.value)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("@16384\n  %r", "@1.5\n  %r", "line 5: '1.5' is no whole number of 64 bits"),
        ("@16384\n  %r", "@nan\n  %r", "line 5: 'nan' is no whole number"),
        ("@16384\n  %r", f"@{1 << 70}\n  %r", "is no whole number of 64 bits"),
        ("{shape=[4096]}", "{shape=4096}", "line 6: Reshape's shape should be tuple[int, ...], not 4096"),
        ("{shape=[4096]}", "{shape=[64.5]}", "line 6: Reshape's shape should be tuple[int, ...], not [64.5]"),
        ("{shape=[4096]}", f"{{shape={'[' * 5000}{']' * 5000}}}", "line 6: lists are nested more than 8 deep"),
        ("Dropout(%t, %step)", 'Dropout(%t, %step) {ratio="a"}', 'line 9: Dropout\'s ratio should be float, not "a"'),
        ("Dropout(%t, %step)", "Dropout(%t, %step) {ratio=[1]}", "line 9: Dropout's ratio should be float, not [1]"),
        (
            "Dropout(%t, %step)",
            f"Dropout(%t, %step) {{seed={1 << 70}}}",
            "line 9: '1180591620717411303424' is no whole",
        ),
        ("Dropout(%t, %step)", f"Dropout(%t, %step) {{ratio=1{'0' * 400}}}", "is no whole number of 64 bits"),
        ("state %step: i64[]", 'const %step: i64[] = "a"', "line 4: a constant of type i64[] is a list of numbers"),
        ("state %step: i64[]", "const %step: i64[] = nan", "line 4: no constant of type i64[]"),
        ("%x: f32", '%"\\x": f32', "line 2: cannot read"),
    ],
)
def test_a_text_that_is_wrong_is_refused(old: str, new: str, why: str) -> None:
    assert old in PLANNED
    with pytest.raises(UsageError) as e:
        parse(PLANNED.replace(old, new, 1))
    assert why in str(e.value) and len(str(e.value)) < 700


def loop(yields: str) -> str:
    return f'  input %x: f32[4]\n  %y: f32[4] = Loop(%x, %x) {{body="%2 = Add(%0, %1)", yields={yields}}}'


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (loop("[0]"), "it yields [0]: each must be a result"),
        (loop("[2,2]"), "it yields [2, 2]: each must be a result of the body, and none twice"),
        (loop("[]"), "it yields []"),
        ('  input %x: f32[4]\n  %y: f32[4] = Loop(%x, _) {body="%2 = Add(%0, %1)", yields=[2]}', "all of them present"),
        (
            "  input %x: f32[4]\n  state %t: i64[]\n  %y: f32[4] = Dropout(%x, %t) {seed=-5}",
            "the seed must be in [0, 2⁶⁴)",
        ),
        ("  input %x: f32[4]\n  %y: f32[4] = Add(%x)", "takes 2 inputs, all of them present"),
        ("  input %x: f32[4]\n  %y: f32[4] = Add(%x, _)", "takes 2 inputs, all of them present"),
        ("  input %x: f32[4]\n  %y: f32[4] = Slice(%x) {starts=[0], ends=[4], axes=[0], steps=[0]}", "or a step is 0"),
        ("  input %x: f32[0,8]\n  input %i: i64[1]\n  %y: f32[1,8] = Gather(%x, %i)", "there is nothing to take"),
        ("  const %x: f32[3] = [1.0]\n  %y: f32[3] = Neg(%x)", "constant %x: f32[3] has 1 elements"),
        (f"  input %x: f32[{1 << 54}]\n  %y: f32[{1 << 54}] = Neg(%x)", "bytes are more than any machine has"),
        (f"  input %x: f32[0,{1 << 60}]\n  %y: f32[0,{1 << 60}] = Neg(%x)", "bytes are more than any machine has"),
    ],
)
def test_a_program_that_is_wrong_is_refused(lines: str, why: str) -> None:
    with pytest.raises(VerifyError) as e:
        verify(parse(f"program p {{\n{lines}\n  output %y\n}}"))
    assert why in str(e.value)


def inferred(name: str, *types: str, **attributes: Any) -> None:
    op_class(name)(**attributes).infer(*map(TensorType.parse, types))


@pytest.mark.parametrize(
    ("name", "types", "attributes"),
    [
        ("Gather", ("f32[0,4]", "i64[2]"), {}),
        ("Gather", ("f32[3,0]", "i64[2]"), {"axis": 1}),
        ("GatherGrad", ("i64[2]", "f32[2,4]"), {"shape": (0, 4)}),
        ("GatherElements", ("f32[0,4]", "i64[1,4]"), {}),
        ("GatherElementsGrad", ("i64[1,4]", "f32[1,4]"), {"shape": (0, 4)}),
        ("GatherND", ("f32[3,0]", "i64[5,2]"), {}),
        ("GatherND", ("f32[2,0,3]", "i64[2,5,1]"), {"batch_dims": 1}),
        ("GatherNDGrad", ("i64[5,2]", "f32[5]"), {"shape": (3, 0)}),
        ("ScatterElements", ("f32[0,4]", "i64[1,4]", "f32[1,4]"), {}),
        ("ScatterND", ("f32[0,4]", "i64[1,1]", "f32[1,4]"), {}),
    ],
)
def test_nothing_is_taken_from_an_empty_axis(name: str, types: tuple[str, ...], attributes: dict[str, Any]) -> None:
    with pytest.raises(TypeRuleError, match="there is nothing to take: an axis that indices count along is empty"):
        inferred(name, *types, **attributes)
    none = tuple(
        t if t[0] == "f" and "Grad" not in name else t.replace("[1,", "[0,").replace("[2", "[0") for t in types
    )
    if name in ("Gather", "GatherGrad", "GatherElements", "GatherElementsGrad") and attributes.get("axis") is None:
        inferred(name, *none, **attributes)  # no indices: fine


FLOAT_ONLY = ("Elu", "Selu", "Celu", "Mish", "Softplus", "Softsign", "HardSwish", "HardSigmoid", "Gelu", "Erf",
              "Tanh", "Exp", "Log", "Sqrt", "Sin", "Floor", "Ceil", "Round", "Reciprocal", "LeakyRelu",
              "ThresholdedRelu", "Sigmoid")  # fmt: skip


@pytest.mark.parametrize("dtype", ["bool", "i8", "i32", "i64", "u8", "u64"])
def test_functions_of_floats_refuse_integers(dtype: str) -> None:
    for name in FLOAT_ONLY:
        with pytest.raises(TypeRuleError, match="takes floats only"):
            inferred(name, f"{dtype}[4]")
        assert dtype not in FLOATS
        inferred(name, "f32[4]")


@pytest.mark.parametrize("dtype", ["u8", "u16", "u32", "u64", "i8", "i64", "f32"])
def test_sign_of_many_elements(dtype: str) -> None:
    """From 16,384 elements on a generated loop computes it."""
    t = TensorType(dtype, (20_000,))
    x = (np.arange(20_000) % 5).astype(t.numpy) if dtype[0] == "u" else (np.arange(20_000) % 5 - 2).astype(t.numpy)
    block = parse(f"program p {{\n  input %x: {t}\n  %y: {t} = Sign(%x)\n  output %y\n}}")
    (y,) = rc.Executor().run(rc.Program(block, {}), {"x": x}, ["y"])
    np.testing.assert_array_equal(y, np.sign(x))


def test_required_inputs_are_required() -> None:
    """An operator without its first input is one error of ours, whatever operator."""
    for cls in all_ops():
        for op in {c.op for c in cls.samples(rc.testing.Draw())}:
            block = rc.Block(
                "p", operators=(rc.Operator(op, (), (Value("y", TensorType("f32", (2,))),)),), outputs=("y",)
            )
            try:
                verify(block)
            except RecomputeError:
                continue


def compiled(text: str, *inputs: str) -> onnx.ModelProto:
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [64, 64]) for n in inputs]
    model = helper.make_model(helper.make_graph([], "g", values, []))
    model.metadata_props.add(key="recompute.program", value=text)
    return model


def test_what_a_file_says_is_verified_when_it_is_loaded() -> None:
    text = """program p {
  input %x: f32[64,64] @0
  %y: f32[64,64] = Tanh(%x) using numba @PLACE
  output %y
}
"""
    for place, why in (("-64", "lies at -64"), ("_", "has no address"), ("8192", "overlaps its input")):
        with pytest.raises(ModelError, match=why):
            rc.load_compiled(compiled(text.replace("PLACE", place), "x"))
    program = rc.load_compiled(compiled(text.replace("PLACE", "0"), "x"))  # a kernel that does not take it: chosen anew
    (y,) = rc.Executor().run(program, {"x": np.ones((64, 64), np.float32)}, ["y"])
    np.testing.assert_allclose(y, np.tanh(np.ones((64, 64))), rtol=1e-6)


@pytest.mark.parametrize("kernel", ["numba", "onednn", "cuda", "nowhere"])
def test_a_session_runs_no_kernel_that_does_not_fit(kernel: str) -> None:
    text = f"program p {{\n  input %x: f32[4,4] @0\n  %y: f32[4,4] = Cos(%x) using {kernel} @64\n  output %y\n}}"
    with pytest.raises(UsageError, match="cannot run here"):
        Session(verify(parse(text)), {})


def test_a_session_needs_a_plan() -> None:
    with pytest.raises(UsageError, match="'x' has no address: plan the program's memory first"):
        Session(parse("program p {\n  input %x: f32[4]\n  output %x\n}"), {})


@pytest.mark.parametrize("address", [-64, -1, 1, 64, 1 << 62])
def test_the_arena_gives_no_buffer_outside_of_it(address: int) -> None:
    with pytest.raises(JobError, match="does not fit the arena of 64 bytes"):
        Arena(64).at(address, Value("x", TensorType("f32", (16,))))


def mend(change: Callable[[Any], Any]) -> None:
    block = parse("program p {\n  param %w: f32[4]\n  %y: f32[4] = Neg(%w)\n  output %y\n}")
    rc.Executor().run(rc.Program(block, {"w": change(np.ones(4, np.float32))}), {}, ["y"])


def test_contents_that_are_no_array_are_refused() -> None:
    with pytest.raises(UsageError, match="'w' holds a list, no array: the program says f32"):
        mend(list)
    with pytest.raises(UsageError, match=r"'w' holds float64\[4\], the program says f32\[4\]"):
        mend(lambda a: a.astype(np.float64))
    mend(lambda a: a)


def referring(node: onnx.NodeProto | bytes, inputs: str = "%x") -> str:
    raw = node if isinstance(node, bytes) else node.SerializeToString()
    text = base64.b64encode(raw).decode()
    return (
        f'program p {{\n  input %x: f32[4]\n  input %n: i64[1]\n  %y: f32[4] = Reference({inputs}) {{kind="Any", '
        f'node="{text}", opset=18, types=["f32[4]"]}}\n  output %y\n}}'
    )


def test_the_evaluator_runs_only_what_nothing_else_runs() -> None:
    """`Reference` in a text may not hold any node: a Loop runs for ever, Tile takes what memory there is."""
    node = onnx.helper.make_node
    body = onnx.helper.make_graph([], "b", [], [])
    circle = {
        "nodes_treeids": [0, 0],
        "nodes_nodeids": [0, 1],
        "nodes_truenodeids": [1, 0],
        "nodes_falsenodeids": [1, 0],
    }
    circle |= {"nodes_modes": ["BRANCH_LEQ"] * 2}
    for made, why in (
        (node("Loop", ["x0", "x1"], ["y0"], body=body), "'Loop' is no operator"),
        (node("Tile", ["x0", "x1"], ["y0"]), "'Tile' is no operator"),
        (node("Unique", ["x0"], ["y0"], domain="other"), "'Unique' is no operator"),
        (node("Unique", ["x0"], ["y0"], body=body), "'Unique' is no operator"),
        (node("TreeEnsembleRegressor", ["x0"], ["y0"], domain="ai.onnx.ml", **circle), "its trees are none"),
        (b"\xff\xff", "is no ONNX node"),
    ):
        with pytest.raises(rc.VerifyError, match=why):
            rc.verify(rc.parse(referring(made)))
    with pytest.raises(rc.VerifyError, match="no ONNX node in base64"):
        rc.verify(rc.parse(referring(b"").replace('node=""', 'node="?"')))
    block = rc.verify(rc.parse(referring(node("Binarizer", ["x0"], ["y0"], domain="ai.onnx.ml", threshold=1.0))))
    feed = {"x": np.arange(4, dtype=np.float32), "n": np.zeros(1, np.int64)}
    assert rc.Executor().run(rc.Program(block), feed, ["y"])[0].tolist() == [0, 0, 1, 1]


def test_a_step_too_large_for_addresses_is_refused() -> None:
    """Each value could be, all of them together could not."""
    t, n = TensorType("f32", (1 << 53,)), 200
    lines = [f"  %y{i}: {t} = Neg(%{f'y{i - 1}' if i else 'x'})" for i in range(n)]
    text = "\n".join(
        ["program p {", f"  input %x: {t}", *lines, f"  output {', '.join(f'%y{i}' for i in range(n))}", "}"]
    )
    with pytest.raises(UsageError, match="bytes together: no machine has so much"):
        rc.Executor().run(rc.Program(parse(text), {}), {}, ["y0"])
