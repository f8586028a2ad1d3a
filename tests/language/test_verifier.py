"""The verifier: plans that are right but for one number, the language's rules, and copies to the host and back."""

from __future__ import annotations

import numpy as np
import pytest

from recompute import parse, show, verify
from recompute.errors import VerifyError
from recompute.language.ir import Operator, Role
from recompute.language.verify import trusted
from recompute.testing import evaluate

# -- addresses --------------------------------------------------------------------------------------------------------


def program(body: str) -> str:
    return f"program p {{\n{body}\n}}"


HOST_WAITS = """  communicate %m: host f32[16] = CopyWait(%h, %a) @0
  communicate %n: host f32[16] = CopyWait(%i, %b) @64"""
HOST = f"""  input %x: f32[16] @192
  %a: f32[16] = Tanh(%x) @0
  communicate %h: host f32[16] = Offload(%a) @0
  %b: f32[16] = Exp(%x) @64
  communicate %i: host f32[16] = Offload(%b) @64
{HOST_WAITS}
  communicate %c: f32[16] = Prefetch(%m) @0
  communicate %d: f32[16] = Prefetch(%n) @64
  communicate %e: f32[16] = CopyWait(%c, %m) @0
  communicate %f: f32[16] = CopyWait(%d, %n) @64
  %y: f32[16] = Add(%e, %f) @0
  output %y"""

#: each is right as it stands, and wrong with the change: (text, old, new, what the error says)
PLANS = {
    "two outputs": (
        """  input %x: f32[2,32] @256
  %p: f32[2,16], %q: f32[2,16] = Split(%x) {sizes=[16,16], axis=1} @0,128
  output %p, %q""",
        "@0,128", "@0,64", "overlaps %p",
    ),
    "an output and scratch": (
        """  input %x: f32[2,32] @320
  %m: f32[2,32] = Softmax(%x) scratch(%m#0: f32[2,1]) @0,256
  output %m""",
        "@0,256", "@0,192", "overlaps",
    ),
    "scratch and scratch": (
        """  input %x: f32[32] @0
  state %s: i64[]
  %a: f32[32] = Dropout(%x, %s) scratch(%a#0: f32[32], %a#1: bool[32]) @256,384,512
  output %a""",
        "@256,384,512", "@256,384,448", "overlaps %a#0",
    ),
    "scratch and an input": (
        """  input %x: f32[2,32] @0
  %m: f32[2,32] = Softmax(%x) scratch(%m#0: f32[2,1]) @320,256
  output %m""",
        "@320,256", "@320,192", "overlaps input %x",
    ),
    "scratch and the beginning of an input": (
        """  input %x: f32[2,32] @64
  %m: f32[2,32] = Softmax(%x) scratch(%m#0: f32[2,1]) @320,0
  output %m""",
        "@320,0", "@320,64", "overlaps input %x",
    ),
    "an output that is overwritten before the end": (
        """  input %x: f32[16] @0
  %a: f32[16] = Tanh(%x) @64
  %b: f32[16] = Exp(%x) @128
  output %a, %b""",
        "@128", "@64", "%a is read, but its bytes at 64..128 were overwritten by %b",
    ),
    "the last bytes of a value": (
        """  input %x: f32[32] @0
  %a: f32[32] = Tanh(%x) @128
  %b: f32[32] = Exp(%x) @256
  %c: f32[32] = Mul(%a, %b) @0
  output %c""",
        "Exp(%x) @256", "Exp(%x) @192", "%a is read",
    ),
    "the first bytes of a value": (
        """  input %x: f32[32] @0
  %a: f32[32] = Tanh(%x) @256
  %b: f32[32] = Exp(%x) @128
  %c: f32[32] = Mul(%a, %b) @0
  output %c""",
        "Exp(%x) @128", "Exp(%x) @192", "%a is read",
    ),
    "a value inside of another": (
        """  input %x: f32[64] @0
  input %k: f32[16] @256
  %a: f32[64] = Tanh(%x) @320
  %b: f32[16] = Exp(%k) @576
  %c: f32[64] = Exp(%a) @0
  output %b, %c""",
        "@576", "@384", "%a is read",
    ),
    "an input": (
        """  input %x: f32[16] @0
  input %k: f32[16] @64
  %a: f32[16] = Add(%x, %k) @128
  output %a""",
        "%k: f32[16] @64", "%k: f32[16] @0", "%x is read",
    ),
    "an output beside the input that it takes": (
        """  input %x: f32[32] @0
  %a: f32[32] = Tanh(%x) @0
  output %a""",
        "= Tanh(%x) @0", "= Tanh(%x) @64", "overlaps its input %x",
    ),
    "an output over an input that is read at other places": (
        """  input %x: f32[4,4] @0
  %a: f32[4,4] = MatMul(%x, %x) @64
  output %a""",
        "@64", "@0", "overlaps its input %x",
    ),
    "an output over an input of another type": (
        """  input %x: f32[1,16] @0
  input %k: f32[16,16] @64
  %a: f32[16,16] = Add(%x, %k) @64
  output %a""",
        "Add(%x, %k) @64", "Add(%x, %k) @0", "overlaps its input",
    ),
    "an output over an input of another shape": (
        """  input %x: f32[16] @0
  input %k: f32[1,16] @64
  %a: f32[1,16] = Add(%x, %k) @64
  output %a""",
        "Add(%x, %k) @64", "Add(%x, %k) @0", "overlaps its input %x",
    ),
    "a part of a view": (
        """  input %x: f32[32] @0
  %p: f32[16], %q: f32[16] = Split(%x) {sizes=[16,16]} @0,64
  %a: f32[16] = Tanh(%p) @0
  %b: f32[16] = Mul(%q, %a) @64
  output %b""",
        "Tanh(%p) @0", "Tanh(%p) @128\n  %z: f32[16] = Exp(%p) @64", "%q is read",
    ),
    "a view whose input was overwritten": (
        """  input %x: f32[4,4] @0
  %r: f32[16] = Reshape(%x) {shape=[16]} @0
  %a: f32[4,4] = Tanh(%x) @64
  %b: f32[16] = Exp(%r) @128
  output %a, %b""",
        "Tanh(%x) @64", "Tanh(%x) @0", "%r is read",
    ),
    "a joined part that was overwritten": (
        """  input %x: f32[16] @0
  input %k: f32[16] @64
  %a: f32[16] = Tanh(%x) @128
  %b: f32[16] = Tanh(%k) @192
  %z: f32[16] = Exp(%k) @256
  %y: f32[32] = Concat(%a, %b) {axis=0} @128
  output %y""",
        "@256", "@128", "%a is read",
    ),
    "a joined value that was overwritten": (
        """  input %x: f32[16] @0
  input %k: f32[16] @64
  %a: f32[16] = Tanh(%x) @128
  %b: f32[16] = Tanh(%k) @192
  %y: f32[32] = Concat(%a, %b) {axis=0} @128
  %z: f32[16] = Exp(%k) @256
  %s: f32[32] = Exp(%y) @320
  output %s, %z""",
        "@256", "@192", "%y is read",
    ),
    "a joined value whose first part was overwritten": (
        """  input %x: f32[16] @0
  input %k: f32[16] @64
  %a: f32[16] = Tanh(%x) @128
  %b: f32[16] = Tanh(%k) @192
  %y: f32[32] = Concat(%a, %b) {axis=0} @128
  %z: f32[16] = Exp(%k) @256
  %s: f32[32] = Exp(%y) @320
  output %s, %z""",
        "@256", "@128", "%y is read",
    ),
    "a value that was overwritten before its neighbour": (
        """  input %x: f32[16] @0
  %a: f32[16] = Tanh(%x) @64
  %b: f32[16] = Exp(%x) @128
  %c: f32[16] = Neg(%x) @0
  %d: f32[16] = Mul(%a, %c) @192
  output %b, %d""",
        "@128", "@64", "%a is read, but its bytes at 64..128 were overwritten by %b",
    ),
    "parts that are not in their places": (
        """  input %x: f32[16] @0
  input %k: f32[16] @64
  %a: f32[16] = Tanh(%x) @128
  %b: f32[16] = Tanh(%k) @192
  %y: f32[32] = Concat(%a, %b) {axis=0} @128
  output %y""",
        "Tanh(%k) @192", "Tanh(%k) @64", "overlaps its input %a",
    ),
    "the first part is not in its place": (
        """  input %x: f32[16] @0
  input %k: f32[16] @64
  %a: f32[16] = Tanh(%x) @128
  %b: f32[16] = Tanh(%k) @192
  %y: f32[32] = Concat(%a, %b) {axis=0} @128
  output %y""",
        "Tanh(%x) @128", "Tanh(%x) @256", "overlaps its input",
    ),
    "two values in host memory": (
        HOST,
        "Offload(%b) @64\n" + HOST_WAITS, "Offload(%b) @0\n" + HOST_WAITS.replace("@64", "@0"), "%h is read",
    ),
    "a copy that is awaited elsewhere": (
        HOST,
        "CopyWait(%h, %a) @0", "CopyWait(%h, %a) @128", "must lie where its input does",
    ),
    "what a copy reads": (
        HOST,
        "Exp(%x) @64", "Exp(%x) @64\n  %z: f32[16] = Neg(%x) @64", "%b is read",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "old", "new", "why"), PLANS.values(), ids=PLANS)
def test_verifying_plans(text: str, old: str, new: str, why: str) -> None:
    good = parse(program(text))
    assert verify(good) is good and parse(show(good)) == good
    assert text.count(old) == 1
    with pytest.raises(VerifyError) as e:
        verify(parse(program(text.replace(old, new))))
    assert why in str(e.value)


def test_verifying_names_the_operator_at_fault() -> None:
    text, old, new, _ = PLANS["a part of a view"]
    with pytest.raises(VerifyError) as e:
        verify(parse(program(text.replace(old, new))))
    (marked,) = [line for line in str(e.value).splitlines() if line.startswith("  >")]
    assert "%b: f32[16] = Mul(%q, %a)" in marked
    text, old, new, _ = PLANS["an output that is overwritten before the end"]
    with pytest.raises(VerifyError) as e:
        verify(parse(program(text.replace(old, new))))
    assert ">" not in str(e.value)


def test_verifying_a_plan_with_empty_values_and_what_has_no_address() -> None:
    text = program("""  input %x: f32[16] @0
  param %w: f32[16]
  %e: f32[0] = Fill() {dtype="f32", shape=[0]} @0
  %a: f32[16] = Add(%x, %w) @0
  %y: f32[16] = Concat(%a, %e) {axis=0} @0
  %r: f32[16] = Reshape(%w) {shape=[16]} @64
  %s: f32[16] = Add(%r, %y) @64
  output %s""")
    block = parse(text)
    assert verify(block) is block
    feed = {"x": np.arange(16, dtype=np.float32), "w": np.ones(16, np.float32)}
    np.testing.assert_array_equal(evaluate(block, feed)[0], feed["x"] + 2)


# -- the rules of the language ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("  input %x: f32[2]\n  param %x: f32[2]", "%x is declared twice"),
        ("  input %x: host f32[2]", "%x is declared in host memory"),
        ("  input %x: f32[2]\n  %y: f32[2] = Relu(%x)\n  free %y\n  %y: f32[2] = Exp(%x)\n  output %y",
         "%y is written twice"),
        ("  input %x: f32[2]\n  %x: f32[2] = Relu(%x)\n  output %x", "%x is written twice"),
        ("  input %x: f32[2]\n  free %x\n  free %x", "%x is read after it was freed"),
        ("  input %x: f32[2,8]\n  %m: f32[2,8] = Softmax(%x) scratch(%x: f32[2,1])\n  output %m", "has the name of a"),
        ("  input %x: f32[2,8]\n  %m: f32[2,8] = Softmax(%x) scratch(%m: f32[2,1])\n  output %m", "has the name of a"),
        ("  input %x: f32[2,8]\n  %a: f32[2,8] = Softmax(%x) scratch(%s: f32[2,1])\n"
         "  %b: f32[2,8] = Softmax(%a) scratch(%s: f32[2,1])\n  output %b", "has the name of a value"),
        ("  input %x: f32[2,8]\n  %a: f32[2,8] = Softmax(%x) scratch(%s: f32[2,1])\n  %s: f32[2,8] = Exp(%a)\n"
         "  output %s", "%s is written twice"),
        ("  input %w: f32[2]\n  input %g: f32[2]\n  const %lr: f32[] = [1]\n  %w: f32[2] = SGDUpdate(%w, %g, %lr)",
         "SGDUpdate updates its input 0 in place"),
        ("  param %w: f32[2]\n  param %v: f32[2]\n  const %lr: f32[] = [1]\n  %v: f32[2] = SGDUpdate(%w, %w, %lr)",
         "SGDUpdate updates its input 0 in place"),
        ("  input %x: f32[2]\n  %a: f32[2], %b: f32[2] = Relu(%x)\n  output %a", "Relu has 1 outputs, 1 of them"),
        ("  input %x: f32[2]\n  output %x, %z", "output %z is never written"),
    ],
)  # fmt: skip
def test_verifying_the_rules(body: str, why: str) -> None:
    with pytest.raises(VerifyError) as e:
        verify(parse(program(body)))
    assert why in str(e.value)


def test_verifying_nothing_where_it_is_trusted() -> None:
    """Inside, and only there, one within another too."""
    bad = parse(program("  input %x: f32[2]\n  output %z"))
    with trusted():
        with trusted():
            assert verify(bad) is bad
        assert verify(bad) is bad
    with pytest.raises(VerifyError, match="%z is never written"):
        verify(bad)


def test_verifying_products() -> None:
    block = parse(program("  input %x: f32[2]\n  output %x"))
    assert verify(block.with_operators((), products="tf32")).products == "tf32"
    with pytest.raises(VerifyError, match="unknown products 'fp8'; known: tf32"):
        verify(block.with_operators((), products="fp8"))


def test_verifying_reads_of_another_type() -> None:
    """A value is what it was made as, whatever an operator says that it reads."""
    block = parse(program("  input %x: f32[2]\n  %y: f32[2] = Relu(%x)\n  output %y"))
    (op,) = block.operators
    x = op.inputs[0]
    assert x is not None
    other = Operator(op.op, (type(x)("x", x.type.with_shape((1, 2))),), op.outputs, Role.FORWARD)
    with pytest.raises(VerifyError, match=r"%x is read as f32\[1,2\], but it is f32\[2\]"):
        verify(block.with_operators([other]))


def test_verifying_shows_the_error_of_every_kind_once() -> None:
    """The excerpt: three lines before and after, the first ones too, and none where no operator is at fault."""
    lines = [f"  %a{i}: f32[2] = Relu(%{'x' if not i else f'a{i - 1}'})" for i in range(8)]
    lines[1] = lines[1].replace("Relu(%a0)", "Relu(%zz)")
    text = program("  input %x: f32[2]\n" + "\n".join(lines) + "\n  output %a7")
    block = parse(text.replace("%zz", "%a0"))
    one = block.operators[1]
    assert one.inputs[0] is not None
    broken = [*block.operators]
    broken[1] = Operator(one.op, (one.inputs[0].renamed("zz"),), one.outputs, one.role)
    with pytest.raises(VerifyError) as e:
        verify(block.with_operators(broken))
    shown = str(e.value).splitlines()[1:]
    assert [line.split()[0 if ">" not in line else 1] for line in shown] == ["0", "1", "2", "3", "4"]


# -- copies between device and host -----------------------------------------------------------------------------------

COPIES = """  input %x: f32[16]
  param %w: f32[16]
  %a: f32[16] = Tanh(%x)
  communicate %h: host f32[16] = Offload(%a)
  %b: f32[16] = Relu(%a)
  communicate %m: host f32[16] = CopyWait(%h, %a)
  communicate %c: f32[16] = Prefetch(%m)
  %d: f32[16] = Exp(%b)
  communicate %e: f32[16] = CopyWait(%c, %m)
  %f: f32[16] = Mul(%d, %e)
  output %f"""


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("", "", ""),
        ("= Offload(%a)", "= Offload(%w)", "%w is persistent: only values of the step"),
        ("Exp(%b)", "Exp(%c)", "%c is read while a copy writes it"),
        ("CopyWait(%c, %m)\n", "CopyWait(%c, %h)\n", "the copy to %c reads %m, not %h"),
        ("CopyWait(%c, %m)\n", "CopyWait(%b, %m)\n", "%b is not what a copy writes"),
        ("  %f: f32", "  communicate %g: f32[16] = CopyWait(%c, %m)\n  %f: f32", "%c was awaited already"),
        ("Prefetch(%m)", "Prefetch(%h)", "%h is read while a copy writes it"),
        ("  communicate %e: f32[16] = CopyWait(%c, %m)\n  %f: f32[16] = Mul(%d, %e)", "  %f: f32[16] = Mul(%d, %b)",
         "no CopyWait follows the copy to %c"),
        ("output %f", "output %f, %m", "output %m is in host memory, or the unfinished end of a copy"),
        ("output %f", "output %f, %c", "output %c is in host memory, or the unfinished end of a copy"),
        ("  %f: f32[16] = Mul(%d, %e)", "  %f: host f32[16] = Identity(%m)", "%m is in host memory: only"),
    ],
)  # fmt: skip
def test_verifying_copies(old: str, new: str, why: str) -> None:
    text = COPIES.replace(old, new) if old else COPIES
    if not old:
        verify(parse(program(text)))
        return
    with pytest.raises(VerifyError) as e:
        verify(parse(program(text)))
    assert why in str(e.value)


def test_verifying_views_that_are_empty_and_outputs_that_are_absent() -> None:
    """An empty part has no place to lie at; what nobody wants of several outputs has no type to be compared."""
    parts = parse(
        program("""  input %x: f32[16] @0
  %a: f32[16], %e: f32[0] = Split(%x) {sizes=[16,0]} @0,0
  %y: f32[16] = Exp(%a) @0
  output %y, %e""")
    )
    assert verify(parts) is parts
    norm = "%y: f32[2,8], _, %s: f32[2,1] = LayerNormalization(%x, %w) {axis=1}"
    absent = parse(program(f"  input %x: f32[2,8]\n  input %w: f32[8]\n  {norm}\n  output %y, %s"))
    assert verify(absent) is absent


def test_a_required_output_is_there() -> None:
    block = parse(program("  input %x: f32[2]\n  %y: f32[2] = Tanh(%x)\n  output %x"))
    (op,) = block.operators
    without = block.with_operators([Operator(op.op, op.inputs, (None,), op.role)])
    with pytest.raises(VerifyError, match="Tanh has 1 outputs, 1 of them required"):
        verify(without)


def test_addresses_that_changed_are_verified_again() -> None:
    block = verify(parse(program(HOST)))
    block.addresses["b"] = block.addresses["a"]
    with pytest.raises(VerifyError):
        verify(block)
    block.addresses["b"] = 64
    assert verify(block) is block
