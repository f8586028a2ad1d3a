"""docs/jax.md: its example runs as it stands, and keeps what it promises."""

from pathlib import Path

import pytest

jax = pytest.importorskip("jax", reason="needs JAX (extra 'jax')")
pytest.importorskip("ortools", reason="needs OR-Tools (extra 'plan')")

pytestmark = pytest.mark.slow
PAGE = Path(__file__).parents[2] / "docs" / "jax.md"


def test_the_example_runs(capsys):
    code = PAGE.read_text(encoding="utf-8").split("```py\n")[1].split("```")[0]
    names = {}
    exec(compile(code, str(PAGE), "exec"), names)
    plan, args = names["plan"], names["args"]
    assert plan.recomputes
    assert plan.peak <= plan.budget < plan.plain_peak
    assert "dot_general" in capsys.readouterr().out
    value, gradients = jax.jit(jax.value_and_grad(names["loss"]))(*args)
    assert abs(names["value"] - value) < 1e-5 * abs(value)
    for a, b in zip(gradients, names["gradients"], strict=True):
        assert float(abs(a - b).max() / abs(a).max()) < 1e-5
