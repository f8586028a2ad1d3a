"""Attention as one operator: where it is found, that it computes the same, and that it keeps no scores."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

import recompute as rc
from recompute import models, parse, verify
from recompute.language.program import Program
from recompute.passes.attention.find_attention import find_attention
from recompute.passes.gradient.autodiff import differentiate
from recompute.testing import evaluate, weighted_loss

RNG = np.random.default_rng(0)


def block(body: str, declared: str = "") -> Any:
    """A block with queries, keys, values [2, 3, 40, 8] and further declarations."""
    inputs = "".join(f"  input %{n}: f32[2,3,40,8]\n" for n in "qkv")
    return verify(parse(f"program p {{\n{inputs}{declared}{body}  output %y\n}}"))


SCORES = "  %s: f32[2,3,40,40] = MatMul(%q, %k) {transB=1}\n"
END = "  %y: f32[2,3,40,8] = MatMul(%w, %v)\n"
FORMS = {
    "plain": (SCORES + "  %w: f32[2,3,40,40] = Softmax(%s)\n" + END, ""),
    "scaled after": (
        SCORES + "  %t: f32[2,3,40,40] = Div(%s, %c)\n  %w: f32[2,3,40,40] = Softmax(%t)\n" + END,
        "  const %c: f32[] = [2.8]\n",
    ),
    "transposed keys": (
        "  %kt: f32[2,3,8,40] = Transpose(%k) {perm=[0,1,3,2]}\n  %s: f32[2,3,40,40] = MatMul(%q, %kt)\n"
        "  %w: f32[2,3,40,40] = Softmax(%s)\n" + END,
        "",
    ),
    "bias and mask": (
        SCORES + "  %a: f32[2,3,40,40] = Add(%b, %s)\n  %m: f32[2,3,40,40] = Where(%hide, %low, %a)\n"
        "  %w: f32[2,3,40,40] = Softmax(%m)\n" + END,
        "  input %b: f32[1,40]\n  input %hide: bool[40,40]\n  const %low: f32[] = [-1e38]\n",
    ),
    "a number added": (
        SCORES + "  %a: f32[2,3,40,40] = Add(%s, %c)\n  %w: f32[2,3,40,40] = Softmax(%a)\n" + END,
        "  const %c: f32[] = [2.5]\n",
    ),
    "casts": (
        SCORES + "  %d: f64[2,3,40,40] = Cast(%s) {to=\"f64\"}\n  %e: f64[2,3,40,40] = Softmax(%d)\n"
        "  %w: f32[2,3,40,40] = Cast(%e) {to=\"f32\"}\n" + END,
        "",
    ),
    "dropout": (
        SCORES + "  %u: f32[2,3,40,40] = Softmax(%s)\n  %w: f32[2,3,40,40] = Dropout(%u, %step) {ratio=0.3,seed=9}\n"
        + END,
        "  state %step: i64[]\n",
    ),
    "soft cap, then a mask": (
        SCORES + "  %a: f32[2,3,40,40] = Div(%s, %c)\n  %t: f32[2,3,40,40] = Tanh(%a)\n"
        "  %e: f32[2,3,40,40] = Mul(%t, %c)\n  %m: f32[2,3,40,40] = Where(%hide, %low, %e)\n"
        "  %w: f32[2,3,40,40] = Softmax(%m)\n" + END,
        "  input %hide: bool[40,40]\n  const %c: f32[] = [1.5]\n  const %low: f32[] = [-1e38]\n",
    ),
    "scaled on both sides, and bias scaled with the scores": (
        "  %qs: f32[2,3,40,8] = Mul(%q, %c)\n  %ks: f32[2,3,40,8] = Mul(%k, %c)\n"
        "  %kt: f32[2,3,8,40] = Transpose(%ks) {perm=[0,1,3,2]}\n  %s: f32[2,3,40,40] = MatMul(%qs, %kt)\n"
        "  %a: f32[2,3,40,40] = Add(%s, %b)\n  %m: f32[2,3,40,40] = Mul(%a, %c)\n"
        "  %w: f32[2,3,40,40] = Softmax(%m)\n" + END,
        "  input %b: f32[3,1,40]\n  const %c: f32[] = [0.5]\n",
    ),
    "no NaN": (
        SCORES + "  %u: f32[2,3,40,40] = Softmax(%s)\n  %n: bool[2,3,40,40] = IsNaN(%u)\n"
        "  %w: f32[2,3,40,40] = Where(%n, %zero, %u)\n" + END,
        "  const %zero: f32[] = [0.0]\n",
    ),
    "limited, cleared": (
        SCORES + "  %a: f32[2,3,40,40] = Where(%hide, %low, %s)\n  %m: f32[2,3,40,40] = Max(%a, %low)\n"
        "  %u: f32[2,3,40,40] = Softmax(%m)\n  %w: f32[2,3,40,40] = Where(%hide, %zero, %u)\n" + END,
        "  input %hide: bool[40,40]\n  const %low: f32[] = [-1e38]\n  const %zero: f32[] = [0.0]\n",
    ),
    "leading axes joined and split": (
        "  %qf: f32[6,40,8] = Reshape(%q) {shape=[6,40,8]}\n  %kf: f32[6,40,8] = Reshape(%k) {shape=[6,40,8]}\n"
        "  %sf: f32[6,40,40] = MatMul(%qf, %kf) {transB=1}\n"
        "  %s: f32[2,3,40,40] = Reshape(%sf) {shape=[2,3,40,40]}\n  %a: f32[2,3,40,40] = Add(%s, %b)\n"
        "  %u: f32[2,3,40,40] = Softmax(%a)\n  %w: f32[6,40,40] = Reshape(%u) {shape=[6,40,40]}\n"
        "  %vf: f32[6,40,8] = Reshape(%v) {shape=[6,40,8]}\n  %yf: f32[6,40,8] = MatMul(%w, %vf)\n"
        "  %y: f32[2,3,40,8] = Reshape(%yf) {shape=[2,3,40,8]}\n",
        "  input %b: f32[2,1,1,40]\n",
    ),
    "one scale for each head and query": (
        SCORES + "  %a: f32[2,3,40,40] = Mul(%s, %h)\n  %w: f32[2,3,40,40] = Softmax(%a)\n" + END,
        "  input %h: f32[3,40,1]\n",
    ),
}  # fmt: skip


def feed(b: Any) -> dict[str, np.ndarray]:
    drawn = {v.name: RNG.standard_normal(v.shape).astype(np.float32) for v in b.inputs}
    hidden = {v.name: np.tri(*v.shape, -1, dtype=bool).T for v in b.inputs if v.dtype == "bool"}
    return drawn | hidden | {v.name: np.array(5) for v in b.state}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_attention_are_found(form: str) -> None:
    """And compute the same, with their gradients."""
    before = block(*FORMS[form])
    after, notes = find_attention(before)
    assert len(notes) == 1 and "' is attention" in notes[0]
    names = [op.op.name for op in after.operators]
    assert "TiledAttention" in names and "Softmax" not in names
    given = feed(before)
    np.testing.assert_allclose(*(evaluate(b, given, ["y"])[0] for b in (before, after)), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("body", "declared", "why"),
    [
        (SCORES + "  %w: f32[2,3,40,40] = Softmax(%s) {axis=2}\n" + END, "", "it is along axis 2"),
        (
            SCORES + "  %w: f32[2,3,40,40] = Softmax(%s)\n  %z: f32[2,3,40,40] = Relu(%w)\n" + END,
            "",
            "'w' has 2 readers",
        ),
        (
            SCORES + "  %t: f32[2,3,40,40] = Mul(%s, %b)\n  %w: f32[2,3,40,40] = Softmax(%t)\n" + END,
            "  input %b: f32[40,40]\n",
            "scaled by a value that is not constant",
        ),
        ("  %w: f32[2,3,40,40] = Softmax(%s)\n" + END, "  input %s: f32[2,3,40,40]\n", "its scores are no product"),
        (
            SCORES + "  %t: f32[2,3,40,40] = Relu(%s)\n  %w: f32[2,3,40,40] = Softmax(%t)\n" + END,
            "",
            "a Relu makes its scores",
        ),
        (
            SCORES + "  %w: f32[2,3,40,40] = Softmax(%s)\n  %y: f32[2,3,8,40] = MatMul(%k, %w) {transA=1}\n",
            "",
            "its weights are the right factor",
        ),
        (
            SCORES + "  %w: f32[2,3,40,40] = Softmax(%s)\n  %y: f32[2,3,40,8] = MatMul(%w, %v) {transA=1}\n",
            "",
            "its weights are transposed",
        ),
        (SCORES + "  %y: f32[2,3,40,40] = Softmax(%s)\n", "", "'y' is an output"),
        (
            SCORES + "  %w: f32[2,3,40,40] = Softmax(%s)\n  %u: f32[2,3,40,40] = Mul(%w, %b)\n"
            "  %y: f32[2,3,40,8] = MatMul(%u, %v)\n",
            "  input %b: f32[40,40]\n",
            "a Mul reads its weights",
        ),
        (
            SCORES + "  %a: f32[2,3,40,40] = Where(%hide, %low, %s)\n  %w: f32[2,3,40,40] = Softmax(%a)\n" + END,
            "  input %hide: bool[40,40]\n  const %low: f32[] = [-3.0]\n",
            "a Where puts -3 for scores, which is not far below 0",
        ),
        (
            SCORES + "  %a: f32[2,3,40,40] = Add(%s, %b)\n  %e: f32[2,3,40,40] = Tanh(%a)\n"
            "  %w: f32[2,3,40,40] = Softmax(%e)\n" + END,
            "  input %b: f32[40,40]\n",
            "a bias or a mask is added before the soft cap",
        ),
        (
            SCORES + "  %a: f32[2,3,40,40] = Add(%s, %b)\n  %e: f32[2,3,40,40] = Mul(%a, %h)\n"
            "  %w: f32[2,3,40,40] = Softmax(%e)\n" + END,
            "  input %b: f32[40,40]\n  input %h: f32[3,1,1]\n",
            "a bias or a mask is scaled by a value that is not constant",
        ),
        (
            SCORES + "  %a: f32[2,3,40,40] = Mul(%s, %zero)\n  %w: f32[2,3,40,40] = Softmax(%a)\n" + END,
            "  const %zero: f32[] = [0.0]\n",
            "its scores are scaled by 0.0",
        ),
        (
            SCORES + "  %a: f32[2,3,40,40] = Add(%s, %c)\n  %w: f32[2,3,40,40] = Softmax(%a)\n" + END,
            "  const %c: f32[] = [inf]\n",
            "inf is added to its scores",
        ),
        (
            SCORES + "  %w: f32[2,3,40,40] = Softmax(%s)\n  %u: f32[2,3,40,40] = Where(%hide, %zero, %w)\n"
            "  %y: f32[2,3,40,8] = MatMul(%u, %v)\n",
            "  input %hide: bool[40,40]\n  const %zero: f32[] = [0.0]\n",
            "its weights are set to 0 where its scores are not hidden",
        ),
        (
            SCORES + "  %w: f32[2,3,40,40] = Softmax(%s)\n"
            "  %u: f32[2,3,40,40], %m: bool[2,3,40,40] = Dropout(%w, %step) {ratio=0.1,seed=1}\n"
            "  %n: f32[2,3,40,40] = Cast(%m) {to=\"f32\"}\n  %y: f32[2,3,40,8] = MatMul(%u, %v)\n  output %n\n",
            "  state %step: i64[]\n",
            "dropout's mask has readers",
        ),
        (
            "  %r: f32[2,3,5,8,8] = Reshape(%q) {shape=[2,3,5,8,8]}\n"
            "  %s5: f32[2,3,5,8,8] = MatMul(%r, %r)\n  %s: f32[2,3,40,8] = Reshape(%s5) {shape=[2,3,40,8]}\n"
            "  %w: f32[2,3,40,8] = Softmax(%s)\n  %vt: f32[2,3,8,40] = Transpose(%v) {perm=[0,1,3,2]}\n"
            "  %y: f32[2,3,40,40] = MatMul(%w, %vt)\n",
            "",
            "a Reshape of more than leading axes",
        ),
    ],
)  # fmt: skip
def test_what_only_looks_like_it_stays(body: str, declared: str, why: str) -> None:
    """With the reason."""
    before = block(body, declared)
    after, notes = find_attention(before)
    assert after is before and len(notes) == 1 and why in notes[0]


def step(fused: bool, mode: str = "eval", **options: Any) -> tuple[Program, dict[str, np.ndarray]]:
    """GPT-2, without dropout by default: forward pass and loss."""
    program = rc.load(models.build("gpt2-tiny", batch=2, context=1024, **options), mode=mode)
    notes = rc.fuse_attention(program, fused)
    assert bool(notes) == fused and all("' is attention" in n for n in notes)
    rc.losses.cross_entropy(program)
    g = np.random.default_rng(1)
    return program, {v.name: g.integers(0, 90, v.shape) for v in program.inputs}


@pytest.mark.parametrize("place", [None, rc.EmulatedCUDAPlace()], ids=["cpu", "device"])
def test_training_is_the_same(place: Any) -> None:
    """Losses of some steps, within rounding; predicted = measured."""
    losses = []
    for fused in (False, True):
        program, given = step(fused, seq=24)
        rc.SGD(0.05).minimize(program["loss"])
        executor = rc.Executor(place)
        losses.append([float(executor.run(program, given, ["loss"])[0]) for _ in range(3)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)


def test_memory_grows_with_the_sequence() -> None:
    """Twice the sequence takes about twice the memory, and recomputing gives the same bits."""
    peaks = []
    for sequence in (512, 1024):
        program, _ = step(True, seq=sequence)
        made = rc.compile_step(program, "loss", rc.SGD(0.1))
        peaks.append(made.figures.peak_bytes - made.figures.persistent_bytes)
    assert peaks[1] < 2.1 * peaks[0]
    program, given = step(True, seq=24)
    found = []
    for optimizer in (rc.SGD(0.1), rc.RecomputeOptimizer(rc.SGD(0.1)).set_checkpoints(["h.1.ln_1"])):
        other = program.clone()
        optimizer.minimize(other["loss"])
        executor = rc.Executor()
        found.append([executor.run(other, given, ["loss"])[0].tobytes() for _ in range(3)])
    assert found[0] == found[1]


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_a_fused_step_is_exported(mode: str) -> None:
    """ONNX Runtime computes the same loss, with dropout too; the trained model keeps its own form of attention."""
    ort = pytest.importorskip("onnxruntime")
    program, given = step(True, mode, seq=12)
    rc.SGD(0.05).minimize(program["loss"])
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    model = rc.export_step(program)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (theirs,) = session.run(["loss"], given)
    (ours,) = rc.Executor().run(program, given, ["loss"])
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    assert "Softmax" in {n.op_type for n in rc.export_trained(program).graph.node}


BANDS = {
    "causal": (lambda i, j: j <= i, (None, 0)),
    "causal, after 4 keys": (lambda i, j: j <= i + 4, (None, 4)),
    "window": (lambda i, j: (j <= i) & (j > i - 5), (-4, 0)),
    "both sides": (lambda i, j: abs(i - j) < 3, (-2, 2)),
    "everything": (lambda i, j: i >= 0, (None, None)),
    "backwards": (lambda i, j: j >= i, (0, None)),
    "blocks": (lambda i, j: i // 4 == j // 4, None),
    "stripes": (lambda i, j: (j <= i) & ((i - j) % 2 == 0), None),
    "a query that sees nothing": (lambda i, j: j < i, None),
    "one key more": (lambda i, j: (j <= i) | ((i == 3) & (j == 7)), None),
    "the last query sees less": (lambda i, j: (j <= i) & ((i < 39) | (j < 39)), None),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["allowed", "hidden", "added", "buffer"])
@pytest.mark.parametrize("name", BANDS)
def test_known_masks_that_are_bands_become_windows(name: str, kind: str) -> None:
    """Whatever form they have; others stay what they are, and results are the same."""
    rule, window = BANDS[name]
    i, j = np.indices((40, 40))
    seen = np.broadcast_to(rule(i, j), (40, 40))
    words = ",".join("true" if x else "false" for x in (~seen if kind == "hidden" else seen).reshape(-1))
    low = "  const %low: f32[] = [-1e38]\n"
    forms = {
        "allowed": (f"  const %m: bool[40,40] = [{words}]\n{low}", "Where(%m, %s, %low)"),
        "hidden": (f"  const %m: bool[40,40] = [{words}]\n{low}", "Where(%m, %low, %s)"),
        "added": (f"  const %m: f32[40,40] = [{','.join('0.0' if x else '-1e38' for x in seen.reshape(-1))}]\n",
                  "Add(%s, %m)"),
        "buffer": ("  buffer %m: f32[2,1,40,40]\n", "Add(%s, %m)"),
    }  # fmt: skip
    declared, masked = forms[kind]
    body = SCORES + f"  %a: f32[2,3,40,40] = {masked}\n  %w: f32[2,3,40,40] = Softmax(%a)\n" + END
    before = block(body, declared)
    data = {"m": np.tile(np.where(seen, 0, -1e38).astype(np.float32), (2, 1, 1, 1))} if kind == "buffer" else {}
    after, _ = find_attention(before, data)
    (made,) = (o for o in after.operators if o.op.name == "TiledAttention")
    assert (len(made.inputs) == 3) == (window is not None)
    assert window is None or (made.op.first, made.op.last) == window  # type: ignore[attr-defined]
    if kind == "buffer" and window is not None:
        assert not after.buffers
    given = feed(before) | data
    got, want = (evaluate(b, given, ["y"])[0] for b in (after, before))
    some = seen.any(axis=1)  # a query that sees nothing gets 0, and not a mean
    np.testing.assert_allclose(got[:, :, some], want[:, :, some], rtol=2e-5, atol=2e-6)


def test_masks_of_long_sequences_are_known_without_being_held() -> None:
    """8,192 by 8,192: from comparisons of positions, and from a triangle of a filled matrix."""
    n = 8_192
    body = (
        f'  %f: f32[{n},{n}] = Fill() {{dtype="f32", shape=[{n},{n}], value=-inf}}\n'
        f"  %t: f32[{n},{n}] = Trilu(%f) {{k=1}}\n"
        f"  %r: i64[{n},1] = Reshape(%p) {{shape=[{n},1]}}\n  %d: i64[{n},{n}] = Sub(%r, %p)\n"
        f"  %near: bool[{n},{n}] = Less(%d, %size)\n"
        f"  %s: f32[2,{n},{n}] = MatMul(%q, %k) {{transB=1}}\n  %a: f32[2,{n},{n}] = Add(%s, %t)\n"
        f"  %m: f32[2,{n},{n}] = Where(%near, %a, %low)\n  %w: f32[2,{n},{n}] = Softmax(%m)\n"
        f"  %y: f32[2,{n},8] = MatMul(%w, %v)\n"
    )
    declared = "".join(f"  input %{x}: f32[2,{n},8]\n" for x in "qkv") + f"  buffer %p: i64[{n}]\n"
    declared += "  const %low: f32[] = [-1e38]\n  const %size: i64[] = [1024]\n"
    long = verify(parse(f"program p {{\n{declared}{body}  output %y\n}}"))
    tracemalloc.start()
    after, notes = find_attention(long, {"p": np.arange(n)})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert notes == ["'y' is attention (keys from -1023 to +0 of each query)"]
    assert [o.op.name for o in after.operators] == ["TiledAttention"]
    assert peak < 64 << 20


def test_dropout_leaves_out_the_same() -> None:
    """In several tiles, of which the last are smaller, at several steps, forward and backward."""
    t, s = 300, 270
    scores = f"  %s: f32[2,{t},{s}] = MatMul(%q, %k) {{transB=1}}\n  %u: f32[2,{t},{s}] = Softmax(%s)\n"
    body = scores + f"  %w: f32[2,{t},{s}] = Dropout(%u, %step) {{ratio=0.4,seed=3}}\n"
    body += f"  %y: f32[2,{t},4] = MatMul(%w, %v)\n"
    declared = f"  input %q: f32[2,{t},4]\n  input %k: f32[2,{s},4]\n  input %v: f32[2,{s},4]\n  state %step: i64[]\n"
    before = verify(parse(f"program p {{\n{declared}{body}  output %y\n}}"))
    after, notes = find_attention(before)
    assert notes == ["'y' is attention (dropout 0.4)"]
    for step in (0, 7):
        given = feed(before) | {"step": np.array(step)}
        results = []
        for b in (before, after):
            scalar, loss = weighted_loss(b, ["y"])
            made, pairs = differentiate(scalar, loss, ["q", "k", "v"])
            results.append(evaluate(verify(made), given, ["y", *(g.name for _, g in pairs)]))
        for got, want in zip(*results, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * float(np.abs(want).max()))


def test_one_operator_loses_masks_and_copies() -> None:
    """Attention that a file has as one operator: a causal mask becomes a window, repeated keys are shared again."""
    declared = "  const %m: f32[4,4] = [" + ",".join(str(x) for x in np.where(np.tri(4), 0, -np.inf).ravel()) + "]\n"
    declared += "  input %q: f32[2,6,4,8]\n  input %k: f32[2,3,4,8]\n"
    body = (
        "  %a: f32[2,3,1,4,8] = Reshape(%k) {shape=[2,3,1,4,8]}\n"
        "  %e: f32[2,3,2,4,8] = Expand(%a) {shape=[2,3,2,4,8]}\n"
        "  %r: f32[2,6,4,8] = Reshape(%e) {shape=[2,6,4,8]}\n"
        "  %y: f32[2,6,4,8] = TiledAttention(%q, %r, %r, %m) {scale=0.5}\n"
    )
    before = verify(parse(f"program p {{\n{declared}{body}  output %y\n}}"))
    after, notes = find_attention(before)
    assert notes == ["'y' is attention (keys from the first to +0 of each query)"]
    (made,) = (o for o in after.operators if o.op.name == "TiledAttention")
    assert [v.shape for v in made.inputs if v is not None] == [(2, 3, 2, 4, 8), (2, 3, 1, 4, 8), (2, 3, 1, 4, 8)]
    assert "Expand" not in {o.op.name for o in after.operators}
    given = feed(before)
    np.testing.assert_allclose(*(evaluate(b, given, ["y"])[0] for b in (before, after)), rtol=2e-5, atol=2e-6)
    assert find_attention(verify(after))[0] == after


def names(program: Program) -> set[str]:
    return {o.op.name for o in program.operators}


def test_minimize_finds_it_by_itself() -> None:
    """Unless the program or the target says no, or an output names its weights; for a checkpoint its result stands."""
    program = rc.load(models.build("gpt2-tiny", batch=2, context=64, seq=24))
    rc.losses.cross_entropy(program)
    weights = next(next(o.writes()).name for o in program.operators if o.op.name == "Softmax")
    found = {}
    for how, optimizer in (("plain", rc.SGD(0.1)), ("mixed", rc.MixedPrecision(rc.SGD(0.1), "bf16")),
                           ("glob", rc.RecomputeOptimizer(rc.SGD(0.1)).set_checkpoints(["h.*"])),
                           ("named", rc.RecomputeOptimizer(rc.SGD(0.1)).set_checkpoints([weights]))):  # fmt: skip
        other = program.clone()
        optimizer.minimize(other["loss"])
        assert "Softmax" not in names(other)
        found[how] = sum(o.op.name == "TiledAttention" and o.role is rc.Role.FORWARD for o in other.operators)
        (tokens,) = (v for v in other.for_test(outputs=["loss"]).inputs if v.name != "label")
        given = {"label": np.ones((2, 24), int), tokens.name: np.ones((2, 24), int)}
        assert np.isfinite(other.evaluate(given, ["loss"])[0])
    assert found == {"plain": 2, "mixed": 2, "glob": 2, "named": 2}
    compiled = [rc.compile_step(program, "loss", rc.SGD(0.1), **options).program for options in (
        {}, {"fuse_attention": False}, {"fetch": [weights]})]  # fmt: skip
    assert ["TiledAttention" in names(Program(p.logical)) for p in compiled] == [True, False, True]
    assert weights in compiled[2] and weights not in compiled[0]
    rc.fuse_attention(program, False)
    rc.SGD(0.1).minimize(program["loss"])
    assert "TiledAttention" not in names(program)
