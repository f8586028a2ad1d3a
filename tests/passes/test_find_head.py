"""The head of a language model as one operator: where it is found, that it computes the same, and where logits are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import recompute as rc
from recompute import models, parse, verify
from recompute.compiling.compiler import compile_step
from recompute.language.program import Program
from recompute.passes.gradient.autodiff import differentiate
from recompute.passes.loss import find_head as module
from recompute.passes.loss.find_head import find_head
from recompute.testing import evaluate

RNG = np.random.default_rng(0)


def block(body: str, declared: str = "", *, rows: str = "8", output: str = "%loss") -> Any:
    """x [2,4,6], a matrix of 10 words (`w`, and `v` transposed), a bias, labels of `rows`."""
    names = ("param %x: f32[2,4,6]", "param %w: f32[10,6]", "param %v: f32[6,10]", "param %b: f32[10]")
    head = "".join(f"  {n}\n" for n in (*names, f"input %y: i64[{rows}]"))
    return verify(parse(f"program p {{\n{head}{declared}{body}  output {output}\n}}"))


PRODUCT = "  %t: f32[2,4,10] = MatMul(%x, %v)\n"
ROWS = "  %r: f32[8,10] = Reshape(%t) {shape=[8,10]}\n"
LOSS = '  loss %loss: f32[], %lp: f32[8,10] = SoftmaxCrossEntropyLoss(%r, %y) {reduction="mean"}\n'
END = ROWS + LOSS
FORMS: dict[str, tuple[str, str, str, dict]] = {
    "product": (PRODUCT + END, "", "8", {"transB": 0}),
    "matrix by words": (PRODUCT.replace("%v)", "%w) {transB=1}") + END, "", "8", {}),
    "transposed matrix": ("  %u: f32[6,10] = Transpose(%w) {perm=[1,0]}\n" + PRODUCT.replace("%v", "%u") + END,
                          "", "8", {}),
    "bias": (PRODUCT + "  %a: f32[2,4,10] = Add(%b, %t)\n" + ROWS.replace("%t", "%a") + LOSS, "", "8", {"transB": 0}),
    "gemm": ("  %x2: f32[8,6] = Reshape(%x) {shape=[8,6]}\n  %r: f32[8,10] = Gemm(%x2, %w, %b) {transB=1}\n" + LOSS,
             "", "8", {}),
    "soft cap": (PRODUCT + "  %d: f32[2,4,10] = Div(%t, %cap)\n  %h: f32[2,4,10] = Tanh(%d)\n"
                 "  %a: f32[2,4,10] = Mul(%cap, %h)\n" + ROWS.replace("%t", "%a") + LOSS,
                 "  const %cap: f32[] = [2.0]\n", "8", {"transB": 0, "cap": 2.0}),
    "scale": (PRODUCT + "  %a: f32[2,4,10] = Mul(%t, %k)\n" + ROWS.replace("%t", "%a") + LOSS,
              "  const %k: f32[] = [0.25]\n", "8", {"transB": 0, "scale": 0.25}),
    "next words": (PRODUCT + "  %s: f32[2,3,10] = Slice(%t) {starts=[0],ends=[-1],axes=[-2]}\n"
                   "  %r: f32[6,10] = Reshape(%s) {shape=[6,10]}\n"
                   + LOSS.replace("[8,", "[6,"), "", "6", {"transB": 0}),
    "classes second": (PRODUCT + "  %r: f32[2,10,4] = Transpose(%t) {perm=[0,2,1]}\n"
                       + LOSS.replace("[8,10]", "[2,10,4]"),
                       "", "2,4", {"transB": 0}),
    "positions first": (PRODUCT + "  %r: f32[4,10,2] = Transpose(%t) {perm=[1,2,0]}\n"
                        + LOSS.replace("[8,10]", "[4,10,2]"), "", "4,2", {"transB": 0}),
    "log-probabilities": (PRODUCT + "  %l: f32[2,4,10] = LogSoftmax(%t)\n" + ROWS.replace("%t", "%l") +
                          '  loss %loss: f32[] = NegativeLogLikelihoodLoss(%r, %y) {reduction="sum",ignore_index=1}\n',
                          "", "8", {"transB": 0, "reduction": "sum", "ignore_index": 1}),
    "casts": (PRODUCT + '  %c: f64[2,4,10] = Cast(%t) {to="f64"}\n  %r: f64[8,10] = Reshape(%c) {shape=[8,10]}\n'
              + LOSS.replace(": f32", ": f64"), "", "8", {"transB": 0}),
}  # fmt: skip


def feed(b: Any) -> dict[str, np.ndarray]:
    found = {v.name: RNG.standard_normal(v.shape).astype(np.float32) for v in b.parameters}
    return found | {v.name: RNG.integers(0, 10, v.shape) for v in b.inputs}


def same_results(before: Any, after: Any) -> None:
    """The loss and all gradients."""
    made = [differentiate(b, "loss") for b in (before, after)]
    given, found = feed(before), []
    for b, pairs in made:
        names = ["loss", *(g.name for _, g in pairs)]
        b = verify(b.with_operators(b.operators, outputs=tuple(names)))
        found.append(dict(zip(["loss", *(p.name for p, _ in pairs)], evaluate(b, given, names), strict=True)))
    assert set(found[0]) == set(found[1])
    for name, want in found[0].items():
        np.testing.assert_allclose(found[1][name], want, rtol=2e-5, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_heads_are_found(form: str) -> None:
    """And compute the same, with their gradients."""
    body, declared, rows, options = FORMS[form]
    before = block(body, declared, rows=rows)
    after, notes = find_head(before, "loss")
    assert notes == ["'loss' and its product are a head of 10 words"]
    heads = [o.op for o in after.operators if o.op.name == "LinearCrossEntropy"]
    assert [op.attributes() for op in heads] == [options]
    assert not any(o.op.name in ("MatMul", "Gemm") for o in after.operators)
    same_results(before, verify(after))


REFUSED = {
    "two readers": (PRODUCT + END + "  loss %z: f32[] = ReduceSum(%t) {keepdims=0}\n"
                    "  loss %more: f32[] = Add(%loss, %z)\n", "", "'t' has 2 readers"),
    "weights": (PRODUCT + ROWS + LOSS.replace("%y)", "%y, %b)"), "", "it has class weights"),
    "no constant": (PRODUCT + "  %a: f32[2,4,10] = Mul(%t, %k)\n" + ROWS.replace("%t", "%a") + LOSS,
                    "  param %k: f32[]\n", "scaled by a value that is not constant"),
    "relu": (PRODUCT + "  %a: f32[2,4,10] = Relu(%t)\n" + ROWS.replace("%t", "%a") + LOSS,
             "", "a Relu makes its scores"),
    "no product": (ROWS.replace("%t", "%i") + LOSS, "  param %i: f32[2,4,10]\n", "no product makes its scores"),
    "a matrix of biases": (PRODUCT + "  %a: f32[2,4,10] = Add(%t, %k)\n" + ROWS.replace("%t", "%a") + LOSS,
                           "  param %k: f32[4,10]\n", "is not a bias"),
    "bias behind the cap": (PRODUCT + "  %h: f32[2,4,10] = Tanh(%t)\n  %a: f32[2,4,10] = Add(%h, %b)\n"
                            + ROWS.replace("%t", "%a") + LOSS, "", "no soft cap"),
    "scores of no logarithm": (PRODUCT + ROWS + '  loss %loss: f32[] = NegativeLogLikelihoodLoss(%r, %y)\n', "",
                               "no LogSoftmax"),
    "rows among the words": (PRODUCT + "  %r: f32[8,10] = Reshape(%q) {shape=[8,10]}\n".replace("%q", "%m")
                             .replace("  %r", "  %m: f32[2,10,4] = Transpose(%t) {perm=[0,2,1]}\n  %r") + LOSS, "",
                             "a Reshape makes its scores"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_only_looks_like_it_stays(name: str) -> None:
    """With the reason."""
    body, declared, why = REFUSED[name]
    before = block(body, declared, output="%more" if "%more" in body else "%loss")
    after, notes = find_head(before, "more" if "%more" in body else "loss")
    assert after is before and len(notes) == 1 and why in notes[0], notes


def test_logits_that_are_fetched_or_small() -> None:
    before = block(PRODUCT + END, output="%t, %loss")
    assert "'t' is fetched" in find_head(before, "loss", ("t",))[1][0]
    assert "small" in find_head(before, "loss", large=True)[1][0]
    read = block(PRODUCT + END + "  %best: i64[2,4] = ArgMax(%t) {axis=2,keepdims=0}\n", output="%best, %loss")
    assert "2 readers" in find_head(read, "loss", ("best",))[1][0]
    after, _ = find_head(read, "loss")
    assert after.outputs == ("loss",) and "best" in verify(after).values()  # to be fetched


@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"ignore_index": None}, {"reduction": "none"}], ids=str)
def test_smoothed_labels(options: dict) -> None:
    """As `losses.cross_entropy` writes them."""
    program = Program(block(PRODUCT, rows="2,4", output="%t"), {})
    loss = rc.losses.cross_entropy(program["t"], "y", label_smoothing=0.2, **options)
    after, notes = find_head(program.block, "loss")
    assert "head of 10 words" in notes[0]
    (head,) = (o.op for o in after.operators if o.op.name == "LinearCrossEntropy")
    assert abs(head.smoothing - 0.2) < 1e-7
    if loss.shape == ():
        same_results(program.block, verify(after))


def gpt(**options: Any) -> tuple[Program, dict[str, np.ndarray]]:
    """A tied head, and what to feed."""
    program = rc.load(models.build("gpt2-tiny", batch=4, **options), mode="eval")
    rc.losses.cross_entropy(program)
    g = np.random.default_rng(1)
    return program, {v.name: g.integers(0, 90, v.shape) for v in program.inputs}


def train(program: Program, given: dict, executor: Any = None) -> list[float]:
    executor = executor or rc.Executor()
    return [float(executor.run(program, given, ["loss"])[0]) for _ in range(3)]


def test_training_finds_it() -> None:
    """The same losses with a lower peak; logits can still be fetched, and evaluation has them."""
    losses, peaks, logits = [], [], []
    for fused in (False, True):
        program, given = gpt()
        program.fuse_head = fused
        rc.SGD(0.1).minimize(program["loss"])
        assert any(o.op.name == "LinearCrossEntropy" for o in program.operators) is fused
        assert ("logits" in program.block.outputs) is not fused
        executor = rc.Executor()
        losses.append(train(program, given, executor))
        session = executor.session(program, ["loss"])
        assert session.measured_peak_bytes == rc.passes.memory_report(session.block).peak
        peaks.append(session.measured_peak_bytes)
        logits.append((executor.run(program, given, ["logits"])[0], program.evaluate(given, ["logits"])[0]))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    assert peaks[1] < 0.7 * peaks[0]
    for a, b in zip(*logits, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-4)


def test_compiled_steps() -> None:
    """By default; not if it is left out, if logits are fetched, or in a low precision."""

    def fused(**options: Any) -> bool:
        step = compile_step(gpt()[0], "loss", rc.SGD(0.1), **options)
        return any(o.op.name == "LinearCrossEntropy" for o in step.program.logical.operators)

    assert fused()
    assert not fused(fuse_head=False)
    assert not fused(fetch=["logits"])
    assert not fused(precision="bf16")


def test_checkpoints_inside_a_head() -> None:
    """Are noted."""
    step = compile_step(gpt()[0], "loss", rc.SGD(0.1), checkpoints=["logits"])
    assert step.plan is not None and any("inside the head" in n for n in step.plan.notes)


def test_a_small_head_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """`rc.fuse_head` takes any size, and the program at another batch has it too."""
    monkeypatch.setattr(module, "LARGE", 1 << 40)
    results = []
    for fused in (False, True):
        program, given = gpt()
        if fused:
            assert rc.fuse_head(program, "loss") == ["'loss' and its product are a head of 5,000 words"]
        rc.SGD(0.1).minimize(program["loss"])
        assert any(o.op.name == "LinearCrossEntropy" for o in program.operators) is fused
        results.append(train(program, given))
    np.testing.assert_allclose(results[1], results[0], rtol=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_a_low_precision(precision: str) -> None:
    """On request: the logits' products are low, the loss is float32, and loss scaling reaches the gradients."""
    results = []
    for fused in (False, True):
        program, given = gpt(seq=16)
        if fused:
            rc.fuse_head(program, "loss")
        rc.MixedPrecision(rc.SGD(0.1), precision).minimize(program["loss"])
        heads = [o for o in program.operators if o.op.name == "LinearCrossEntropy"]
        assert len(heads) == fused
        assert all(o.inputs[0] is not None and o.inputs[0].dtype == precision.replace("fp", "f") for o in heads)
        results.append(train(program, given))
    np.testing.assert_allclose(results[1], results[0], rtol=2e-2)


HALVES = """program p {
  param %x: f32[512,16]
  param %w: f32[1024,16]
  input %y: i64[512]
  %r: f32[512,1024] = Gemm(%x, %w) {transB=1}
  loss %loss: f32[] = SoftmaxCrossEntropyLoss(%r, %y) {reduction="mean"}
  output %loss
}"""


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_halves_on_a_device(precision: str) -> None:
    """A large head is one operator there, with a product of halves and a loss in float32; not where its logits are to
    stay in float32, and not on a CPU."""

    def step(place: Any, **options: Any) -> Program:
        data = {n: RNG.normal(size=s).astype("f") for n, s in (("x", (512, 16)), ("w", (1024, 16)))}
        program = Program(verify(parse(HALVES)), data)
        optimizer = rc.MixedPrecision(rc.SGD(0.1), precision, **options)
        return compile_step(program, "loss", optimizer, place=place).program

    device = rc.EmulatedCUDAPlace()
    made = step(device)
    (head,) = [o for o in made.block.operators if o.op.name == "LinearCrossEntropy"]
    assert {v.dtype for v in head.reads()} == {{"bf16": "bf16", "fp16": "f16"}[precision], "i64"}
    assert head.outputs[0] is not None and head.outputs[0].dtype == "f32"
    names = [o.op.name for o in step(device, full=["r"]).block.operators]
    assert "LinearCrossEntropy" not in names and "Gemm" in names
    assert "LinearCrossEntropy" not in [o.op.name for o in step(None).block.operators]
    weights = {n: np.array(a) for n, a in made.data.items()}
    labels = RNG.integers(0, 1024, 512)
    (loss,) = rc.Executor(device).run(made, {"y": labels}, ["loss"])
    logits = weights["x"] @ weights["w"].T
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    np.testing.assert_allclose(loss, -np.log(p[np.arange(512), labels]).mean(), rtol=1e-2)
    dw = (p - np.eye(1024, dtype="f")[labels]).T @ weights["x"] / 512
    np.testing.assert_allclose(made.data["w"], weights["w"] - 0.1 * dw, atol=2e-4)
