"""Program rewrites as text: tests/golden/NAME.rir holds a pipeline, the program before, and the exact text after.

The runner also executes both programs on the same random data and compares every output that both have, bit for bit
(loops on NumPy, where nothing compiles them, add column sums in another order; mixed precision rounds).
`pytest --update-golden` rewrites the expected texts.
"""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest

from recompute import parse, show, verify
from recompute.communication.lockstep import LockStep
from recompute.communication.mesh import Mesh
from recompute.language.ir import Block
from recompute.ops.fused.loop import Loop
from recompute.passes import Precision, pipeline, run_passes
from recompute.passes.attention.find_attention import FindAttention
from recompute.passes.cleanup.for_test import ForTest
from recompute.passes.loss.find_head import FindHead
from recompute.passes.lowering.scatter_gradients import ScatterGradients
from recompute.passes.patterns.find_gates import FindGates
from recompute.passes.patterns.find_norms import FindNorms
from recompute.passes.patterns.find_stable import FindStable
from recompute.passes.quantisation.quantize_aware import QuantizeAware
from recompute.passes.slicing.open_batch_norms import OpenBatchNorms
from recompute.passes.slicing.slicing import Slice
from recompute.runtime.cpu.device import native
from recompute.testing import evaluate

FILES = sorted((Path(__file__).parents[1] / "golden").glob("*.rir"))


def read(path: Path) -> tuple[str, str, str]:
    head, _, rest = path.read_text().partition("\n")
    assert head.startswith("; pipeline: "), f"{path.name} begins with '; pipeline: ...'"
    before, _, after = rest.partition("\n---\n")
    return head.removeprefix("; pipeline: "), before, after


@pytest.mark.parametrize("path", FILES, ids=[f.stem for f in FILES])
def test_rewrite(path: Path, request: pytest.FixtureRequest) -> None:
    line, text, expected = read(path)
    before = verify(parse(text))
    after = run_passes(before, pipeline(line))
    assert parse(show(after)) == after
    if request.config.getoption("--update-golden"):
        path.write_text(f"; pipeline: {line}\n{text.rstrip()}\n\n---\n{show(after)}")
    else:
        assert show(after) == expected
    if any(isinstance(p, (ForTest, QuantizeAware)) for p in pipeline(line)):
        return  # computes something else: tests/training/test_modes.py, tests/passes/test_quantize_aware.py
    tolerances = {Precision: 2.0**-5, Slice: 2.0**-20, ScatterGradients: 2.0**-20}
    tolerances |= dict.fromkeys((FindAttention, FindHead, FindNorms, FindGates, FindStable, OpenBatchNorms), 2.0**-18)
    compare_values(before, after, tolerance=max(tolerances.get(type(p), 0.0) for p in pipeline(line)))


def compare_values(before: Block, after: Block, *, tolerance: float = 0.0) -> None:
    g = np.random.default_rng(0)
    feed = {}
    for v in (*before.inputs, *before.parameters, *before.buffers, *before.state):
        drawn = g.standard_normal(v.shape) if v.type.is_float else g.integers(0, 2, v.shape)
        feed[v.name] = np.asarray(drawn).astype(v.type.numpy)
    common = [n for n in before.outputs if n in after.outputs]
    assert common, "both programs should have an output in common"
    # a program with addresses keeps its operators' own numerics: so does the one before
    alone = functools.partial(evaluate, providers=("numpy",) if after.addresses else None)
    run = on_two_ranks if any(o.op.communicates for o in before.operators) else alone
    types = {v.name: v.type.numpy for v in after.declared()}
    rounded = {n: a.astype(types.get(n, a.dtype)) for n, a in feed.items()}  # of parameters in another precision
    for a, b in zip(run(before, feed, common), run(after, rounded, common), strict=True):
        if tolerance:
            np.testing.assert_allclose(b.astype("f8"), a, rtol=tolerance, atol=tolerance * np.abs(a).max())
        elif native.unavailable() and any(isinstance(op.op, Loop) for op in after.operators):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6 * np.abs(b).max())
        else:
            assert a.tobytes() == b.tobytes()


def on_two_ranks(block: Block, feed: dict[str, np.ndarray], names: list[str]) -> list[np.ndarray]:
    """The values of rank 1; rank 0 has other data."""
    others = {n: (a + a if a.dtype.kind == "f" else a) for n, a in feed.items()}
    given = [others, feed]
    data = [{v.name: g[v.name] for v in (*block.parameters, *block.buffers, *block.state)} for g in given]
    feeds = [{v.name: g[v.name] for v in block.inputs} for g in given]
    found = LockStep(block, Mesh.of(dp=2), data).run(feeds, names)[1]
    return [found[n] for n in names]


def test_every_pass_has_a_golden_file() -> None:
    import recompute.training.pipeline  # noqa: F401 - defines the passes that make a step
    from recompute.passes import PASSES

    used = {p.name for f in FILES for p in pipeline(read(f)[0])}
    lists = [f.read_text().splitlines() for f in (FILES[0].parent / "steps").glob("*.rir")]  # of whole steps
    used |= {line[2:].partition("{")[0] for lines in lists for line in lines if line.startswith("; ")}
    own = {name for name, c in PASSES.items() if c.__module__.startswith("recompute.")}  # not those of other tests
    assert own == used
