"""Attributes and constants are compared by type and bits: -0.0 is not 0.0, True is not 1, NaN is NaN."""

from __future__ import annotations

import copy
import math
import pickle

import numpy as np
import pytest

from recompute import Executor, Program, parse, show, verify
from recompute.language.exact import exact
from recompute.language.ir import Constant
from recompute.language.kernels import _answers
from recompute.language.op import op_class

NAN = float("nan")


def test_numbers_are_told_apart_by_type_and_bits():
    different = [0.0, -0.0, 0, False, 1, 1.0, True, NAN, np.float32(1), "1", "1.0", None, (), (0.0,), (-0.0,), ((1,),)]
    assert len({exact(v) for v in different}) == len(different)
    assert exact(NAN) == exact(math.inf - math.inf) and exact((1, (-0.0, NAN))) == exact((1, (-0.0, -NAN * 1)))


@pytest.mark.parametrize(("a", "b"), [(0.0, -0.0), (1, 1.0), (1, True)])
def test_operators_and_constants_that_differ(a, b):
    leaky = op_class("LeakyRelu")
    assert leaky(alpha=a) != leaky(alpha=b) and len({leaky(alpha=a), leaky(alpha=b), leaky(alpha=a)}) == 2
    value = Constant.of("c", np.zeros(1)).value
    assert Constant(value, (a,)) != Constant(value, (b,))


def test_nan_and_copies_are_equal():
    op = op_class("LeakyRelu")(alpha=NAN)
    assert op == op_class("LeakyRelu")(alpha=math.inf - math.inf) != op_class("Elu")(alpha=NAN)
    assert hash(op) and copy.deepcopy(op) == copy.copy(op) == pickle.loads(pickle.dumps(op)) == op
    assert vars(op) == {"alpha": op.alpha}
    assert len({hash(op_class(name)()) for name in ("Add", "Sub", "Mul")}) == 3


def test_the_text_keeps_a_negative_zero():
    """Also where the default is 0.0: bodies of loops, and files, are text."""
    op = op_class("Pad")(pads=(0, 1), value=-0.0)
    assert math.copysign(1, op.attributes()["value"]) == -1 and "value" not in op_class("Pad")((0, 1)).attributes()
    block = parse("program p {\n  input %x: f32[2]\n  %y: f32[3] = Pad(%x) {pads=[0,1], value=-0.0}\n  output %y\n}")
    assert parse(show(block)) == block and "value=-0.0" in show(block)


@pytest.mark.parametrize("providers", [None, ("numpy",)])
def test_each_zero_has_its_own_kernel(providers):
    """1 / (-1 · 0.0) = -∞ and 1 / (-1 · -0.0) = ∞ (IEEE 754), alone and fused; `plan` and `accepting` are cached."""
    text = """program p {
  input %x: f32[20000]
  %a: f32[20000] = LeakyRelu(%x) {alpha=0.0}
  %b: f32[20000] = LeakyRelu(%x) {alpha=-0.0}
  %c: f32[20000] = Reciprocal(%a)
  %d: f32[20000] = Reciprocal(%b)
  output %a, %b, %c, %d
}"""
    feed = {"x": -np.ones(20000, np.float32)}
    for fetch in (("a", "b"), ("c", "d")):
        found = Executor(providers=providers).run(Program(verify(parse(text)), {}), feed, list(fetch))
        signs = [bool(np.signbit(f).all()) for f in found]
        assert signs == [True, False] and (fetch[0] == "a" or np.isinf(found).all())


def test_nan_does_not_fill_a_cache():
    block = parse("program p {\n  input %x: f32[9]\n  %y: f32[9] = LeakyRelu(%x) {alpha=nan}\n  output %y\n}")
    for _ in range(2):
        Executor().planned(Program(verify(block), {}), ["y"])
    before = len(_answers)
    Executor().planned(Program(verify(parse(show(block))), {}), ["y"])
    assert len(_answers) == before
