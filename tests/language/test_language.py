"""The text form, the verifier and its errors, builders."""

from __future__ import annotations

import copy
import math
import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError, dataclass

import numpy as np
import pytest

from recompute import UsageError, VerifyError, parse, show, verify
from recompute.language.builder import Builder
from recompute.language.ir import Block, Constant, Value
from recompute.language.op import Op, op_class
from recompute.language.types import DTYPES, TensorType

MLP = """\
program mlp {
  input %x: f32[4,8]
  param %w: f32[8,16]
  state %step: i64[]
  const %c: f32[2] = [0.5,-inf]
  %fc_1: f32[4,16] = MatMul(%x, %w) @0
  %relu_1: f32[4,16] = Relu(%fc_1) @256
  free %fc_1
  loss %loss: f32[] = ReduceMean(%relu_1) {keepdims=0} @0
  output %loss
}
"""


def test_text_is_read_and_written_unchanged() -> None:
    assert show(parse(MLP)) == MLP


def test_declarations_and_addresses_are_kept() -> None:
    block = parse(MLP)
    assert [v.name for v in block.inputs] == ["x"]
    assert block.addresses == {"fc_1": 0, "relu_1": 256, "loss": 0}
    assert block.constants[0].data == (0.5, -math.inf)
    assert block.operators[3].role.value == "loss"


def test_values_that_a_caller_changes_stay_as_they_are() -> None:
    block = parse(MLP)
    found = block.values()
    assert list(found) == ["x", "w", "step", "c", "fc_1", "relu_1", "loss"]
    found.clear()
    assert len(block.values()) == 7


@pytest.mark.parametrize("name", ["a b", "onnx::Add_1", '"', "é", "a\\n", "0", "{", "", "%", "a,b"])
def test_any_name_survives_the_text_form(name: str) -> None:
    x = Value(name, TensorType("f32", (2,)))
    b = Builder()
    y = b.emit(op_class("Relu")(), x, name=name + "'")
    block = Block(name="odd name", inputs=(x,), operators=tuple(b.operators), outputs=(y.name,))
    assert parse(show(block)) == block


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_constants_of_every_type_survive(dtype: str) -> None:
    array = np.array([1, 2, 4] if dtype == "f8e8m0" else [0, 1, 1]).astype(DTYPES[dtype])  # which has no zero
    if array.dtype.kind == "f":
        array = np.array([0.1, -0.0, 1e-8], dtype=array.dtype)
    block = Block(constants=(Constant.of("c", array),), outputs=("c",))
    again = parse(show(block))
    assert again == block
    assert again.constants[0].numpy().tobytes() == array.tobytes()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "empty"),
        ("program p {", "does not end"),
        ("nonsense", "begins with 'program"),
        ("program p {\n  %y: f32[2] = Relu(%x)\n}", "%x is used before it is written"),
        ("program p {\n  input %x: f32[2\n}", "expected number"),
        ("program p {\n  input %x: f99[2]\n}", "is not a tensor type"),
        ("program p {\n  input %x: f32[2]\n  %y: f32[2] = Relux(%x)\n}", "unknown operator 'Relux' (did you mean Relu"),
        ("program p {\n  input %x: f32[2]\n  %y: f32[2] = Relu(%x) {alpha=1}\n}", "Relu has no attribute 'alpha'"),
        ("program p {\n  input %x: f32[2] ?\n}", "cannot read '?'"),
    ],
)
def test_unreadable_text_names_the_line(text: str, why: str) -> None:
    with pytest.raises(UsageError) as e:
        parse(text)
    assert why in str(e.value)


#: one dimension more than NumPy has
WIDE = f"f32[2,3,{','.join('1' * 63)}]"


def broken(body: str, outputs: str = "%y") -> str:
    return f"program p {{\n  input %x: f32[2,3]\n  param %w: f32[3,4]\n{body}\n  output {outputs}\n}}"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (broken("  %y: f32[2,3] = Relu(%x)\n  %y: f32[2,3] = Relu(%x)"), "%y is written twice"),
        (broken("  %y: f32[2,3] = Relu(%x)", "%z"), "output %z is never written"),
        (broken("  %y: f32[2,3] = Relu(%x)\n  free %y"), "output %y was freed"),
        (broken("  free %x\n  %y: f32[2,3] = Relu(%x)"), "%x is read after it was freed"),
        (broken("  free %w\n  %y: f32[2,3] = Relu(%x)"), "%w is persistent and cannot be freed"),
        (broken("  %y: f32[3,2] = Relu(%x)"), "%y is declared f32[3,2], but Relu gives f32[2,3]"),
        (broken("  %y: f32[2,2] = MatMul(%x, %x)"), "MatMul(f32[2,3], f32[2,3]): inner dimensions differ"),
        (broken("  %y: f32[2,3] = Relu()"), "Relu"),
        (broken("  %y: i64[2,1] = ArgMax(_) {axis=1}"), "ArgMax does not accept inputs of this number or kind: (_)"),
        (broken(f"  %y: {WIDE} = Reshape(%x) {{shape={WIDE[3:]}}}"), "%y has 65 dimensions, 64 are possible"),
        (f"program p {{\n  input %x: {WIDE}\n}}", "%x has 65 dimensions, 64 are possible"),
        (broken("  %y: f32[3,4] = SGDUpdate(%w, %w, %x)"), "SGDUpdate"),
    ],
)
def test_the_verifier_says_what_is_wrong(text: str, why: str) -> None:
    with pytest.raises(VerifyError) as e:
        verify(parse(text))
    assert why in str(e.value)


def test_the_verifier_shows_the_lines_around() -> None:
    lines = "\n".join(f"  %a{i}: f32[2,3] = Relu(%{'x' if i == 0 else f'a{i - 1}'})" for i in range(9))
    bad = lines.replace("%a4: f32[2,3] = Relu(%a3)", "%a4: f32[3,2] = Relu(%a3)").replace(
        "%a5: f32[2,3] = Relu(%a4)", "%a5: f32[2,3] = Relu(%a3)"
    )
    with pytest.raises(VerifyError) as e:
        verify(parse(broken(bad, "%a8")))
    text = str(e.value)
    assert ">     4  %a4: f32[3,2] = Relu(%a3)" in text
    assert "%a1" in text and "%a7" in text and "%a8" not in text and "%a0:" not in text


def test_a_recomputed_operator_may_not_read_updated_state() -> None:
    text = """\
program p {
  input %x: f32[2,3]
  param %w: f32[3,4]
  const %lr: f32[] = [0.1]
  const %g: f32[3,4] = [0,0,0,0,0,0,0,0,0,0,0,0]
  optimize %w: f32[3,4] = SGDUpdate(%w, %g, %lr)
  recompute %y: f32[2,4] = MatMul(%x, %w)
  output %y
}"""
    with pytest.raises(VerifyError, match="reads %w after it was updated"):
        verify(parse(text))


def test_constants_are_shared_by_their_bits() -> None:
    b = Builder()
    t = TensorType("f32")
    assert b.constant(1.0, t) == b.constant(1.0, t)
    assert b.constant(0.0, t) != b.constant(-0.0, t)
    assert b.constant(1, "i64") != b.constant(1.0, t)


def test_fields_need_no_decorator_and_one_changes_nothing() -> None:
    class Scaled(Op, abstract=True):
        factor: float = 2.0

    @dataclass(frozen=True)
    class Moved(Scaled, abstract=True):
        bias: float = 0.0

    class Plain(Moved, abstract=True):
        """Has the fields of its bases."""

    assert Plain(3.0, 1.0).attributes() == {"factor": 3.0, "bias": 1.0} == Moved(3.0, 1.0).options()
    assert Plain(3.0) == Plain(factor=3.0) != Moved(3.0) and Scaled(1.0) != Scaled(True)
    assert repr(Plain(1.5)).endswith("Plain(factor=1.5, bias=0.0)")
    assert vars(copy.copy(Plain(3.0))) == {"factor": 3.0, "bias": 0.0}
    with pytest.raises(FrozenInstanceError):
        Plain().factor = 1.0  # type: ignore[misc]
    with pytest.raises(TypeError, match="factr"):
        Plain(factr=1.0)  # type: ignore[call-arg]


def test_a_class_is_complete_before_it_is_unpickled() -> None:
    code = "import pickle, sys; op = pickle.loads(sys.stdin.buffer.read()); print(op.attributes(), len(vars(type(op))))"
    sent = pickle.dumps(op_class("LeakyRelu")(alpha=0.5))
    run = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, check=True)
    assert run.stdout.startswith(b"{'alpha': 0.5}")


def test_numerics_with_xp_are_refused() -> None:
    with pytest.raises(UsageError, match=r"^Old.compute: 'xp' has gone: write compute\(self, ins, outs, scratch\)$"):

        class Old(Op, abstract=True):
            def compute(self, xp, ins, outs, scratch):  # type: ignore[override]
                """As operators were written before."""
