"""Proofs: equal numbers are equal values, whole steps are proved, and steps that were changed are not."""

from __future__ import annotations

import dataclasses
import importlib
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import recompute as rc
from recompute.language.builder import Builder
from recompute.language.ir import Block, Constant, Operator, Value
from recompute.language.layouts import to_last
from recompute.language.op import REGISTRY, Op
from recompute.language.samples import Draw
from recompute.language.types import TensorType
from recompute.ops.channels_last import Laid
from recompute.passes.slicing.slicing import Slice
from recompute.proof.numbers import Numbers
from recompute.proof.prove import prove
from recompute.proof.rows import vanishes


def values_of(
    operators: list[Operator], feeds: dict[str, np.ndarray], constants: list[Constant]
) -> dict[str, np.ndarray]:
    """The value of everything that operators write, by their own numerics."""
    found = {**feeds, **{c.value.name: c.numpy() for c in constants}}
    for o in operators:
        outs = [None if v is None else np.zeros(v.shape, v.type.numpy) for v in o.outputs]
        scratch = [np.zeros(t.shape, t.numpy) for t in o.workspace()]
        with np.errstate(over="ignore"):
            o.op.compute([None if v is None else found[v.name] for v in o.inputs], outs, scratch)
        found.update((v.name, a) for v, a in zip(o.outputs, outs, strict=True) if v is not None)
    return found


def grow(b: Builder, values: list[Value], rng: random.Random) -> None:
    """One random operator on values, or a few that come to the same."""
    x = rng.choice(values)
    axis = rng.randrange(max(x.ndim, 1))
    kind = rng.randrange(14)
    if kind == 0 and x.ndim:
        perm = list(range(x.ndim))
        rng.shuffle(perm)
        values.append(b.Transpose(x, perm=tuple(perm)))
    elif kind == 1:
        values.append(b.Reshape(x, shape=rng.choice([(x.type.size,), (*x.shape, 1), (1, *x.shape), x.shape[::-1]])))
    elif kind == 2 and x.ndim and x.shape[axis] > 1:
        start = rng.randrange(x.shape[axis])
        values.append(b.Slice(x, starts=(start,), ends=(x.shape[axis] + rng.randrange(2),), axes=(axis,)))
    elif kind == 3 and x.ndim and x.shape[axis] % 2 == 0:
        parts = b.Split(x, sizes=(x.shape[axis] // 2,) * 2, axis=axis)
        values += [*parts, b.Concat(*parts, axis=axis), b.Concat(*parts[::-1], axis=axis)]
    elif kind == 4:
        values.append(rng.choice([b.Relu, b.Neg, b.Exp])(b.Mul(x, b.constant(0.1, x))))
    elif kind == 5:
        others = [y for y in values if y.shape == x.shape or not y.ndim]
        y = rng.choice(others) if others else x
        values.append(rng.choice([b.Add, b.Mul, b.Sub])(x, y))
    elif kind == 6 and x.ndim:
        values.append(rng.choice([b.ReduceSum, b.ReduceMax, b.ReduceMean])(x, axes=(axis,), keepdims=rng.randrange(2)))
    elif kind == 7 and x.ndim == 2:
        others = [y for y in values if y.ndim == 2 and y.shape[0] == x.shape[1]]
        if others:
            y = rng.choice(others)
            flat = b.Transpose(b.MatMul(y, x, transA=1, transB=1), perm=(1, 0))
            values += [b.MatMul(x, y), flat]
    elif kind == 8 and x.ndim and x.shape[axis] % 2 == 0:  # an operator on slices, and the whole
        half = x.shape[axis] // 2
        parts = [b.Slice(x, starts=(at,), ends=(at + half,), axes=(axis,)) for at in (0, half)]
        sums = [b.ReduceSum(p, axes=(axis,)) for p in parts]
        values += [b.Concat(*(b.Tanh(p) for p in parts), axis=axis), b.Tanh(x), b.Add(*sums)]
        values += [b.ReduceSum(x, axes=(axis,)), *sums]
    elif kind == 9 and x.ndim and x.shape[axis] % 2 == 0:  # reductions of reductions of slices
        first, second = (rng.choice(["Sum", "Max", "Min", "Prod", "LogSumExp", "SumSquare", "L1"]) for _ in range(2))
        parts = b.Split(x, sizes=(x.shape[axis] // 2,) * 2, axis=axis)
        parts = [getattr(b, f"Reduce{first}")(p, axes=(axis,)) for p in parts]
        values += [getattr(b, f"Reduce{second}")(v, axes=(axis,)) for v in (b.Concat(*parts, axis=axis), x)]
        values += [b.Max(*parts), b.Min(*parts), b.Mul(*parts)]
    elif kind == 10:
        by = b.Exp(b.ReduceMax(rng.choice(values), keepdims=0))
        values += [b.Neg(b.Div(x, by)), b.Div(b.Neg(x), by), b.Div(b.Div(x, by), b.Exp(by)), b.Div(by, by)]
    elif kind == 11 and x.ndim:
        values.append(rng.choice([b.Softmax, b.LogSoftmax, b.CumSum])(x, axis=axis))
    elif kind == 12:
        mask = b.Less(rng.choice([x, b.Neg(x)]), b.constant(0, x))
        values.append(rng.choice([b.Where(mask, x, b.constant(0, x)), b.Where(mask, b.constant(0, x), x)]))
    elif kind == 13 and x.ndim > 1 and x.shape[0] % 2 == 0:
        values += runs(b, x, rng)


def runs(b: Builder, x: Value, rng: random.Random) -> list[Value]:
    """Runs of elements, and of sums of parts, of a value that may be turned, with zeros behind, as ranks have them."""
    halves = b.Split(x, sizes=(x.shape[0] // 2,) * 2, axis=0)
    sums = [b.Transpose(b.ReduceSum(v, axes=(0,), keepdims=1), perm=tuple(range(x.ndim))[::-1]) for v in (x, *halves)]
    whole, *parts = (b.Reshape(v, shape=(v.type.size,)) for v in rng.choice([sums, [x, x, x]]))
    size = whole.type.size
    at, zeros = rng.randrange(1, size) if size > 1 else 1, b.fill(0, whole.type.with_shape((rng.randrange(1, 4),)))
    cuts = [(0, at), (at, size)] if size > 1 else [(0, 1)]
    each = [b.Slice(whole, starts=(i,), ends=(j,), axes=(0,)) for i, j in cuts]
    added = [b.Add(*(b.Slice(p, starts=(i,), ends=(j,), axes=(0,)) for p in parts)) for i, j in cuts]
    padded = b.Concat(*each[:-1], b.Concat(each[-1], zeros, axis=0), axis=0)
    more = b.Mul(padded, b.Exp(padded))
    again = [b.Slice(v, starts=(0,), ends=(size,), axes=(0,)) for v in (padded, more)]
    behind = b.Slice(more, starts=(size,), ends=(size + zeros.type.size,), axes=(0,))
    return [*each, *added, *again, *(b.Mul(v, b.Exp(v)) for v in (whole, *each)), behind, b.Div(behind, b.Exp(x))
            if x.shape[-1] == behind.type.size else behind]  # fmt: skip


def check_numbers(seed: int, operators: int) -> int:
    """How many of a random program's values have the number of another; these must have the same elements."""
    rng = random.Random(seed)
    b = Builder()
    inputs = [
        Value(b.names.take(n), TensorType("f64", s)) for n, s in zip("xyz", ((4, 6), (6, 4), (2, 3, 4)), strict=True)
    ]
    values = list(inputs)
    for _ in range(operators):
        grow(b, values, rng)
        values = [v for v in values if 0 < v.type.size <= 512 and v.ndim <= 5]
    draw = np.random.default_rng(seed)
    arrays = values_of(b.operators, {v.name: draw.normal(size=v.shape) for v in inputs}, b.constants)
    numbers = Numbers()
    env = {v.name: numbers.declared("input", v) for v in inputs}
    env |= {c.value.name: numbers.constant(c) for c in b.constants}
    for o in b.operators:
        numbers.run(o, env)
    alike = defaultdict(list)
    for name, view in env.items():
        assert not vanishes(numbers, view.base) or not arrays[name].any()
        alike[view.bare()].append(name)
    for names in alike.values():
        for other in names[1:]:
            np.testing.assert_allclose(arrays[other], arrays[names[0]], rtol=1e-9, atol=1e-9)
    return sum(len(names) - 1 for names in alike.values())


@pytest.mark.parametrize("seed", range(8))
def test_equal_numbers_are_equal_values(seed: int) -> None:
    assert check_numbers(seed, 40) > 5


@pytest.mark.slow
def test_many_random_programs() -> None:
    assert sum(check_numbers(seed, 80) for seed in range(100, 400)) > 5000


@pytest.mark.parametrize("name", ["ReduceSum", "ReduceMax", "ReduceMean", "ReduceProd", "ReduceL1", "ReduceL2",
                                  "ReduceSumSquare", "ReduceLogSumExp"])  # fmt: skip
def test_only_sums_are_the_sums_of_their_parts(name: str) -> None:
    x = Value("x", TensorType("f64", (4, 6)))
    b = Builder()
    parts = [b.Slice(x, starts=(at,), ends=(at + 2,), axes=(0,)) for at in (0, 2)]
    whole, *both = (getattr(b, name)(v, axes=(0,)) for v in (x, *parts))
    added = b.Add(*both)
    arrays = values_of(b.operators, {"x": np.random.default_rng(0).random(x.shape)}, b.constants)
    numbers = Numbers()
    env = {"x": numbers.declared("input", x)}
    for o in b.operators:
        numbers.run(o, env)
    assert (env[added.name] == env[whole.name]) is np.allclose(arrays[added.name], arrays[whole.name])


def test_a_slice_that_lies_between_others() -> None:
    """The gradient of a convolution in groups, of a slice of each group's channels: a slice of each group's result."""
    b, w, dy, none = Builder(), *(Value(n, TensorType("f64", s)) for n, s in (
        ("w", (4, 2, 2, 3)), ("dy", (2, 4, 2, 3)), ("none", (0, 4))))  # fmt: skip
    whole, part = (b.ConvGradInput(v, dy, shape=(3, 3), pads=(0, 1, 0, 1), group=2)
                   for v in (w, b.Slice(w, starts=(1,), ends=(2,), axes=(1,))))  # fmt: skip
    taken = b.Slice(b.Reshape(whole, shape=(2, 2, 2, 3, 3)), starts=(1,), ends=(2,), axes=(2,))
    same = b.Reshape(taken, shape=part.shape)
    b.Gather(b.Slice(none, starts=(0,), ends=(2,), axes=(1,)), Value("at", TensorType("i64", (3,))), axis=1)
    numbers = Numbers()
    env = {v.name: numbers.declared("input", v) for v in (w, dy, none, Value("at", TensorType("i64", (3,))))}
    for o in b.operators:
        numbers.run(o, env)
    assert env[part.name] == env[same.name]


def step(name: str, batch: int = 4, wrap: Any = lambda optimizer: optimizer, *, optimizer: Any = rc.Adam) -> rc.Program:
    """A training step of a network of the zoo."""
    program = rc.load(rc.models.build(name), batch=batch)
    outputs = program.block.outputs
    loss = program["loss"] if "loss" in outputs else rc.losses.cross_entropy(program[outputs[0]])
    wrap(optimizer()).minimize(loss)
    return program


def test_a_step_is_proved_with_checkpoints_slices_and_lowering() -> None:
    plain = step("lenet")
    kept = step("lenet", wrap=lambda o: rc.RecomputeOptimizer(o).set_checkpoints(["pool1", "fc1"]))
    assert any(o.role.value == "recompute" for o in kept.block.operators)
    for block in (
        kept.block,
        rc.Executor().planned(kept),
        *(Slice((f"all:0:{n}",)).run(plain.block) for n in (2, 3, 4)),
    ):
        proof = prove(plain, block)
        assert not proof.unproved and len(proof.proved) >= 33
    sliced = Slice(("conv1..pool1:0:2",)).run(plain.block)
    assert "33 of 33" in str(prove(plain, dataclasses.replace(sliced, outputs=("loss",))))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2-tiny", "bert-mini", "resnet18", "unet", "vit-tiny", "moe-tiny", "llama-tiny",
                                  "fcos-tiny", "mobilenet_v2", "lstm", "pspnet", "densenet121"])  # fmt: skip
def test_the_zoo_as_it_runs_is_proved(name: str) -> None:
    program = step(name)
    prove(program, rc.Executor().planned(program))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "budget"),
    [("unet", "50%"), ("bert-mini", "82%"), ("mobilenet_v2", "60% of activations")],
)
def test_plans_for_budgets_are_proved(name: str, budget: str) -> None:
    program = rc.load(rc.models.build(name), batch=8)
    loss = rc.losses.cross_entropy(program[program.block.outputs[0]])
    compiled = rc.compile_step(program, loss, rc.SGD(), budget=budget, prove=True)
    assert compiled.proof is not None and not compiled.proof.unproved


def test_a_compiled_step_in_a_file_is_proved_to_be_the_models() -> None:
    """By a plan that was saved; and not if an attribute in the file is another."""
    plain, program = step("mlp"), rc.load(rc.models.build("mlp"), batch=4)
    loss = rc.losses.cross_entropy(program[program.block.outputs[0]])
    plan = rc.compile_step(program, loss, rc.Adam(), budget="100%").saved
    compiled = rc.compile_step(program, loss, rc.Adam(), plan=plan, prove=True)
    assert compiled.proof is not None and not compiled.proof.unproved
    model = rc.export_step(compiled.program)
    rc.load_compiled(model, proves=plain)
    (text,) = (p for p in model.metadata_props if p.key == "recompute.program")
    text.value = text.value.replace("%pred.bias) {transB=1}", "%pred.bias) {alpha=0.5, transB=1}")
    with pytest.raises(rc.VerifyError, match="it is not proved that 'loss'"):
        rc.load_compiled(model, proves=plain)


def test_an_alias_in_a_file_stands_for_what_it_stands_for_in_the_model() -> None:
    """Also where the file's is the name of a value, and that of neither stands for nothing that is compared."""
    plain, program = step("mlp"), step("mlp")
    program.block = dataclasses.replace(program.block, outputs=(*program.block.outputs, "pred.bias_grad"))
    plain.aliases = program.aliases = {"answer": "loss", "more": "pred.bias"}
    model = rc.export_step(program)
    rc.load_compiled(model, proves=plain)
    (text,) = (p for p in model.metadata_props if p.key == "recompute.aliases")
    for wrong, name in (
        ('{"answer": "pred.bias_grad"}', "answer"),
        ('{"loss": "pred.bias_grad"}', "loss"),
        ('{"more": "loss", "else": "loss"}', "more"),
    ):
        text.value = wrong
        with pytest.raises(rc.VerifyError, match=f"it is not proved that 'alias {name}'"):
            rc.load_compiled(model, proves=plain)
    text.value = '{"else": "loss"}'
    rc.load_compiled(model, proves=plain)


WINDOWS = """
program p {{
  input %x: f64[4,3]
  input %z: f64[4,3]
  input %e: f64[1,3]
  input %f: f64[1,3]
  {u}
  %a: f64[2,3], %b: f64[2,3] = Split(%x) {{sizes=[2,2], axis=0}}
  %c: f64[1,3] = ReduceSum(%a) {{axes=[0]}}
  %d: f64[1,3] = ReduceSum(%b) {{axes=[0]}}
  %u: f64[1,3] = Sub(%{g}, %{h})
  {v}
  {w}
  %v: f64[1,3] = Exp(%q)
  %w: f64[1,3] = Exp(%r)
  output %u, %v, %w
}}"""


def test_a_window_proves_no_other_window_by_what_its_values_are() -> None:
    """Both windows are a sum and a sum of rows, of values that are parts of these rows in the first alone."""
    total = "%{}: f64[1,3] = ReduceSum(%{}) {{axes=[{}]}}".format
    before = WINDOWS.format(u="", v=total("q", "x", 0), w=total("r", "z", 0), g="c", h="d")
    last = "%i: f64[2,3], %j: f64[2,3] = Split(%x) {sizes=[2,2], axis=-2}\n"
    after = WINDOWS.format(u="\n".join([last, total("g", "i", 0), total("h", "j", 0)]), g="g", h="h",
                           v="%q: f64[1,3] = Add(%c, %d)", w="%r: f64[1,3] = Add(%e, %f)")  # fmt: skip
    proof = prove(rc.parse(before), rc.parse(after), partly=True)
    assert proof.proved == ("u", "v") and [*proof.unproved] == ["w"]


def mutated(block: Block, rng: random.Random) -> Block | None:
    """The block with one operator changed; None where the change drawn does not apply."""
    operators = list(block.operators)
    at = rng.randrange(len(operators))
    o = operators[at]
    kind = rng.randrange(5)
    if kind == 0 and len(o.inputs) > 1:
        i, j = rng.sample(range(len(o.inputs)), 2)
        inputs = list(o.inputs)
        inputs[i], inputs[j] = inputs[j], inputs[i]
        operators[at] = dataclasses.replace(o, inputs=tuple(inputs))
    elif kind == 1 and dataclasses.fields(o.op):
        field = rng.choice(dataclasses.fields(o.op)).name
        old = getattr(o.op, field)
        if not isinstance(old, (int, float)):
            return None
        operators[at] = dataclasses.replace(o, op=dataclasses.replace(o.op, **{field: old + rng.choice([1, -1, 2])}))
    elif kind == 2 and o.inputs:
        i = rng.randrange(len(o.inputs))
        before = [*block.declared(), *(v for p in operators[:at] for v in p.writes())]
        others = [v for v in before if o.inputs[i] is not None and v.type == o.inputs[i].type]
        if not others:
            return None
        inputs = [rng.choice(others) if k == i else v for k, v in enumerate(o.inputs)]
        operators[at] = dataclasses.replace(o, inputs=tuple(inputs))
    elif kind == 3 and o.op.updates:
        del operators[at]
    elif kind == 4 and o.op.updates:
        operators.insert(rng.randrange(len(operators)), operators.pop(at))
    return block.with_operators(operators)


def results(program: rc.Program, block: Block, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    """All that persists after a step of another block, and the loss."""
    own = rc.Program(block, {name: np.array(a) for name, a in program.data.items()})
    loss = rc.Executor().run(own, feed, ["loss"])
    return [*loss, *(np.array(own.data[name]) for name in sorted(own.data))]


def check_mutations(count: int, seed: int, block: Block, program: rc.Program) -> tuple[int, int]:
    """Changes of a block: how many were tried, and refused.  Those that are proved must give the same bits."""
    rng, draw = random.Random(seed), np.random.default_rng(seed)
    for name in program.data:  # no gradient, moment or bias is 0, which would hide a change
        a = np.array(program.data[name])
        if a.dtype.kind == "f" and a.size > 1:
            program.data[name] = a + np.abs(draw.normal(size=a.shape).astype(a.dtype)) / 100
    feed = {
        v.name: draw.integers(0, 2, v.shape).astype(v.type.numpy) if v.dtype[0] == "i" else draw.normal(size=v.shape)
        .astype(v.type.numpy) for v in block.inputs
    }  # fmt: skip
    wanted, tried, refused = results(program, block, feed), 0, 0
    while tried < count:
        other = mutated(block, rng)
        if other is None or other.operators == block.operators:
            continue
        try:
            rc.verify(other)
        except rc.VerifyError:
            continue
        tried += 1
        if prove(block, other, partly=True).unproved:
            refused += 1
            continue
        for a, b in zip(wanted, results(program, other, feed), strict=True):
            np.testing.assert_array_equal(a, b)
    return tried, refused


def test_changed_steps_are_refused() -> None:
    program = step("mlp")
    tried, refused = check_mutations(10, 1, program.block, program)
    assert refused > tried / 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "lenet", "gpt2-tiny"])
def test_many_changed_steps_are_refused(name: str) -> None:
    program = step(name)
    for block in (program.block, Slice(("all:0:2",)).run(program.block)):
        tried, refused = check_mutations(40, 2, block, program)
        assert refused > tried * 0.7


@pytest.mark.parametrize("plan", ["plain", pytest.param("zero1", marks=pytest.mark.slow)])
def test_mutants_of_the_benchmark_are_refused(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    proof_mutations = importlib.import_module("proof_mutations")
    counts = proof_mutations.check("mlp", plan, 4, 1)
    assert sum(n for how, n in counts.items() if how.startswith("refused")) >= 4
    assert not any(how.startswith("proved") and "same bits" not in how for how in counts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "plan"),
    [("transformers/Bert", "budget"), ("transformers/Llama", "budget"), ("masked/fcos", "budget"),
     ("torchvision/mobilenet_v2", "plain"), ("torchvision/resnet18", "checkpoints")],
)  # fmt: skip
def test_exports_of_pytorch_are_proved(name: str, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    before, after = importlib.import_module("proof_plans").PLANS[plan].blocks(name)
    assert len(prove(before, after).proved) > 30


@pytest.mark.parametrize(("mesh", "options"), [
    ("dp=2", {}), ("dp=2", {"zero": 3}), ("pp=2", {"micro_batches": 2}),
    pytest.param("dp=2,tp=2", {}, marks=pytest.mark.slow),
    ("dp=2", {"zero": 2, "micro_batches": 4, "accumulate": "running"}), ("dp=3", {"zero": 1}),
    ("dp=4", {"zero": 2, "micro_batches": 12, "accumulate": "running"}),
])  # fmt: skip
def test_compiled_ranks_are_proved_together(mesh: str, options: dict[str, Any]) -> None:
    """Also where parameters cannot be divided equally, and zeros follow them."""
    whole = step("mlp", 12)
    ranks = []
    for rank in range(rc.Mesh(mesh).ranks):
        program = rc.load(rc.models.build("mlp"), batch=12)
        loss = rc.losses.cross_entropy(program[program.block.outputs[0]])
        optimizer = rc.DataParallel(rc.Adam(), mesh, rank, batch=12, **options)
        ranks.append(rc.compile_step(program, loss, optimizer).program)
    proof = rc.prove_ranks(whole, ranks, mesh)
    assert len(proof.proved) >= 16 and not proof.unproved
    operators = ranks[-1].block.operators
    at = next(i for i, o in enumerate(operators) if o.op.name == "AdamUpdate")
    wrong = dataclasses.replace(operators[at], op=dataclasses.replace(operators[at].op, beta1=0.8))
    ranks[-1].block = ranks[-1].block.with_operators([*operators[:at], wrong, *operators[at + 1 :]])
    with pytest.raises(rc.VerifyError, match=f"not proved: .*@{len(ranks) - 1}"):
        rc.prove_ranks(whole, ranks, mesh)


def test_each_rank_needs_a_program() -> None:
    with pytest.raises(rc.UsageError, match="the mesh dp=2 has 2 ranks, not 1"):
        rc.prove_ranks(step("mlp"), [step("mlp")], "dp=2")


def test_channels_last_forms_are_the_operators_on_turned_values() -> None:
    """What `Alike.turned` takes an operator's word for, on samples."""
    draw, make = Draw("turned"), rc.language.op.op_class
    cases = [draw.case(make("Relu")(), draw("f64[2,3,4,5]")), draw.case(make("Identity")(), draw("f64[2,3,4,5]")),
             draw.case(make("Add")(), draw("f64[2,3,4,5]"), draw("f64[1,3,1,1]"))]  # fmt: skip
    for cls in list(REGISTRY.values()):
        if cls.channels_last is not Op.channels_last and not issubclass(cls, Laid):
            cases += cls.samples(Draw(cls.__name__))
    checked = set()
    for case in cases:
        ins = [None if a is None else Value("x", TensorType.of(np.asarray(a))) for a in case.inputs]
        outs = [Value("y", t) for t in case.op.infer(*(v and v.type for v in ins))]
        rank = max(v.ndim for v in (*ins, *outs) if v is not None)
        form = case.op.channels_last(ins, outs, rank) if rank > 2 else None
        if form is None or any(r and v is not None and v.ndim != rank for v, r in zip(ins, form.inputs, strict=False)):
            continue
        turned = [np.ascontiguousarray(np.transpose(a, to_last(rank))) if r and a is not None else a
                  for a, r in zip(case.inputs, form.inputs, strict=False)]  # fmt: skip
        wanted, results = applied(case.op, case.inputs), applied(form.op, turned)
        for a, b, turns in zip(wanted, results, form.outputs, strict=False):
            a = np.transpose(a, to_last(a.ndim)) if turns else a
            np.testing.assert_allclose(
                a.astype(np.float64), b.astype(np.float64), rtol=1e-2 if a.itemsize == 2 else 1e-5
            )
        checked.add(case.op.name)
    assert len(checked) > 20


def applied(op: Any, inputs: Any) -> list[np.ndarray]:
    """All results of an operator on arrays."""
    types = [None if a is None else TensorType.of(np.asarray(a)) for a in inputs]
    outs = [np.zeros(t.shape, t.numpy) for t in op.infer(*types)]
    scratch = [np.zeros(t.shape, t.numpy) for t in op.scratch(types, [TensorType.of(a) for a in outs])]
    op.compute(list(inputs), outs, scratch)
    return outs


def test_an_error_names_the_expressions() -> None:
    program = step("lenet")
    at, o = next((i, o) for i, o in enumerate(program.block.operators) if o.op.name == "Relu")
    wrong = Operator(rc.language.op.op_class("Tanh")(), o.inputs, o.outputs, o.role)
    operators = [*program.block.operators[:at], wrong, *program.block.operators[at + 1 :]]
    with pytest.raises(rc.VerifyError, match=r"not proved that '.*' is what .* computes: it computes Tanh\("):
        rc.prove(program, program.block.with_operators(operators))


def test_a_name_that_neither_has_is_not_proved() -> None:
    program = step("mlp")
    with pytest.raises(rc.VerifyError, match=r"'nowhere' .* one of the two lacks it"):
        rc.prove(program, program, values=["nowhere"])


def test_a_block_that_cannot_be_is_refused() -> None:
    block = step("mlp").block
    with pytest.raises(rc.VerifyError, match="read"):
        rc.prove(block, dataclasses.replace(block, inputs=()))
