"""Patterns: what they match and what not, what graphs know, and what rules make of a block."""

from __future__ import annotations

import time
from typing import Any

import pytest

from recompute import parse, show, verify
from recompute.language.ir import Block, Operator, Value
from recompute.language.op import op_class
from recompute.language.types import TensorType
from recompute.passes.attention.find_attention import find_attention
from recompute.passes.loss.find_head import find_head
from recompute.passes.matching.graph import Graph, NoMatchError, result
from recompute.passes.matching.pattern import any_of, match, number, op, through
from recompute.passes.matching.rewrite import Rule, rewritten
from recompute.passes.patterns.find_gates import find_gates
from recompute.passes.patterns.find_norms import find_norms
from recompute.passes.patterns.find_stable import find_stable

HEAD = "  input %x: f32[4]\n  input %z: f32[4]\n  const %one: f32[] = [1.0]\n  const %two: f32[] = [2.0]\n"


def block(*lines: str, output: str = "y") -> Block:
    body = "".join(f"  {line}\n" for line in lines)
    return verify(parse(f"program p {{\n{HEAD}{body}  output {', '.join(f'%{n}' for n in output.split())}\n}}"))


def names(pattern: Any, given: Block, value: str = "y", **known: Any) -> dict[str, Any] | None:
    """What a pattern's names stand for: values by name."""
    found = match(pattern, Graph(given), given.values()[value], **known)
    return None if found is None else {k: getattr(v, "name", v) for k, v in found.items()}


E, S = "%e: f32[4] = Exp(%x)", "%s: f32[4] = Add(%one, %e)"
REDUCED = "%y: f32[1] = ReduceSum(%e) {axes=[0]}"


@pytest.mark.parametrize(
    ("lines", "pattern", "want"),
    [
        ((E, "%y: f32[4] = Neg(%e)"), op.Neg(op.Exp("a")), {"a": "x"}),
        ((E, "%y: f32[4] = Neg(%e)"), op.Neg("a").named("all"), {"a": "e", "all": "y"}),
        ((E, "%y: f32[4] = Neg(%e)"), op.Exp("a"), None),
        ((E, "%y: f32[4] = Neg(%e)"), op["Abs", "Neg"](...), {}),
        ((E, "%y: f32[4] = Mul(%x, %e)"), op.Mul(op.Exp("a"), "a"), {"a": "x"}),  # the other way round
        ((E, "%y: f32[4] = Mul(%z, %e)"), op.Mul(op.Exp("a"), "a"), None),  # not the same value
        ((E, "%y: f32[4] = Sub(%x, %e)"), op.Sub(op.Exp("a"), "a"), None),  # does not commute
        ((E, S, "%y: f32[4] = Log(%s)"), op.Log(op.Add(op.Exp("a"), 1.0)), {"a": "x"}),
        ((E, S, "%y: f32[4] = Log(%s)"), op.Log(op.Add(op.Exp("a"), 2.0)), None),
        ((S.replace("%e", "%x"), "%y: f32[4] = Log(%s)"), op.Log(op.Add("a", number("c"))), {"a": "x", "c": 1.0}),
        ((S.replace("%e", "%x"), "%y: f32[4] = Log(%s)"), op.Log(op.Add("a", number("c", lambda c: c > 1))), None),
        ((E, REDUCED), op.ReduceSum("a", axes=(0,), keepdims="kept"), {"a": "e", "kept": 1}),
        ((E, REDUCED), op.ReduceSum("a", axes=(1,)), None),
        (("%y: f32[4] = Clip(%x, _, %two)",), op.Clip("a", None, 2.0), {"a": "x"}),
        (("%y: f32[4] = Clip(%x, _, %two)",), op.Clip("a", "low", ...), None),  # a name is of what is there
        (("%y: f32[4] = Clip(%x, %one)",), op.Clip("a", 1.0, None), {"a": "x"}),
        (("%y: f32[4] = Clip(%x, %one, %two)",), op.Clip("a", 1.0), None),
        ((E, "%y: f32[4] = Neg(%e)"), op.Neg(any_of(op.Abs("a"), op.Exp("b"), "c")), {"b": "x"}),
        # an option that fits is left again where the rest does not
        ((E, "%y: f32[4] = Sub(%e, %x)"), op.Sub(any_of("a", op.Exp("b")), "a"), {"a": "x", "b": "x"}),
        ((E, "%m: f32[4] = Mul(%e, %two)", "%r: f32[2,2] = Reshape(%m) {shape=[2,2]}", "%y: f32[2,2] = Neg(%r)"),
         op.Neg(through(("Mul", "Reshape"), op.Exp("a"))), {"a": "x"}),
        ((E, "%m: f32[4] = Mul(%e, %z)", "%y: f32[4] = Neg(%m)"), op.Neg(through(("Mul",), op.Exp("a"))), None),
    ],
)  # fmt: skip
def test_patterns(lines: tuple[str, ...], pattern: Any, want: dict[str, Any] | None) -> None:
    assert names(pattern, block(*lines)) == want


def test_names_known_before() -> None:
    given = block(E, "%y: f32[4] = Mul(%z, %e)")
    values = given.values()
    assert names(op.Mul("z", op.Exp("x")), given, x=values["x"]) == {"x": "x", "z": "z"}
    assert names(op.Mul("z", op.Exp("x")), given, x=values["z"]) is None


def test_graphs() -> None:
    given = block(
        E,
        "%a: f32[4] = Neg(%e)",
        "%b: f32[4] = Mul(%a, %a)",
        "%f: f32[2,4] = Fill() {dtype=\"f32\", shape=[2,4], value=3.0}",
        "%w: f32[3,2,4] = Expand(%f) {shape=[3,2,4]}",
        "%d: f32[4] = Div(%b, %two)",
        "%y: f32[4] = Neg(%d)",
        output="y d w",
    )  # fmt: skip
    graph, values = Graph(given), given.values()
    assert graph.producer(values["a"], "Neg") is given.operators[1] and graph.producer(values["a"], "Exp") is None
    assert graph.only_reader(values["e"]) is given.operators[1] and graph.producer(None) is None
    for name, why in {"a": "has 2 readers", "d": "is an output", "w": "is an output"}.items():
        with pytest.raises(NoMatchError, match=f"'{name}' {why}"):
            graph.only_reader(values[name])
    assert [result(o).name for o in graph.below(given.operators[0], 9)] == ["e", "a"]
    assert [result(o).name for o in graph.below(given.operators[0], 0)] == ["e"]
    assert graph.above(values["a"], "Neg", "Exp").name == "x"
    assert graph.number(values["w"]) == 3.0 and graph.number(values["two"]) == 2.0 and graph.number(values["x"]) is None
    assert graph.scaled(given.operators[5]) == (values["b"], 0.5) and graph.scaled(given.operators[2]) is None
    wanted = Graph(given, outputs=["b"])
    assert wanted.readers(values["b"]) == [] and len(wanted.readers(values["a"])) == 2


def test_rules_see_what_others_made() -> None:
    """And names, types and what is read elsewhere stay."""
    rules = [Rule(op.Log(op.Exp("x")), lambda m: m.b.Abs(m.x)), Rule(op.Neg(op.Abs("x")), lambda m: m.b.Relu(m.x))]
    given = block(E, "%l: f32[4] = Log(%e)", "%y: f32[4] = Neg(%l)")
    after = verify(rewritten(given, rules))
    assert [o.op.name for o in after.operators] == ["Exp", "Abs", "Relu"] and after.outputs == ("y",)
    assert rewritten(after, rules) is after


def test_a_rule_may_decline() -> None:
    """By None, or by another type than the value has; the next one is asked."""
    given = block(E, "%y: f32[4] = Log(%e)")
    declining = [
        Rule(op.Log("x"), lambda m: None),
        Rule(op.Log("x"), lambda m: m.b.ReduceSum(m.x)),
        Rule(op.Log("x"), lambda m: m.b.Mul(m.x, m.b.constant(7.0, m.x))),
    ]
    assert rewritten(given, declining[:2]) is given
    after = verify(rewritten(given, declining))
    assert [o.op.name for o in after.operators] == ["Exp", "Mul"] and after.constants[-1].data == (7.0,)


def test_the_gradient_of_a_deviation_behind_a_reshape() -> None:
    """As without one: 0 where the deviation is 0."""
    given = block(
        "%m: f32[1] = ReduceMean(%x) {axes=[0]}", "%d: f32[4] = Sub(%x, %m)", "%s: f32[4] = Mul(%d, %d)",
        "%v: f32[1] = ReduceMean(%s) {axes=[0]}", "%r: f32[] = Reshape(%v) {shape=[]}", "%y: f32[] = Sqrt(%r)",
    )  # fmt: skip
    assert "Where" in show(find_stable(given))


def chain(n: int) -> Block:
    """A chain of operators at all of which something is tried."""
    kinds = [op_class(kind)() for kind in ("Exp", "Log", "Neg", "Sigmoid", "Sqrt", "Reciprocal", "Tanh", "Softmax")]
    values = [Value(f"v{i}", TensorType("f32", (2, 4))) for i in range(n + 1)]
    operators = [Operator(kinds[i % 8], (values[i],), (values[i + 1],)) for i in range(n)]
    return Block("chain", inputs=(values[0],), operators=tuple(operators), outputs=(values[n].name,))


@pytest.mark.parametrize("find", [find_stable, find_gates, find_norms, find_attention, find_head])
def test_time_is_linear(find: Any) -> None:
    """In a chain of 20,000 operators."""
    spent = []
    for n in (4_000, 20_000):
        given = chain(n)
        start = time.process_time()
        find(given)
        spent.append(time.process_time() - start)
    print(spent)
    assert spent[1] < 10 * spent[0] + 0.5, spent
