"""Networks of billions of parameters: compiled without weights; and the mixture of experts by its definition."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest

import recompute as rc
from recompute import models
from recompute.compiling.sources import weightless

#: heads, hidden, layers, billions of parameters (Korthikanti et al. 2022, arXiv 2205.05198, table 3)
MEGATRON = {
    "gpt3-22b": (64, 6144, 48, 22),
    "gpt3-175b": (96, 12288, 96, 175),
    "gpt3-530b": (128, 20480, 105, 530),
    "gpt3-1t": (160, 25600, 128, 1008),
}


@pytest.mark.parametrize("name", MEGATRON)
def test_megatron_s_formula_counts_the_parameters(name: str) -> None:
    """12Lh²(1 + 13/12h + (V+s)/12Lh) (Narayanan et al. 2021, arXiv 2104.04473, eq. 2), and the last norm's 2h."""
    heads, h, layers, billions = MEGATRON[name]
    options = models.info(name).options
    assert (options["heads"], options["hidden"], options["layers"]) == (heads, h, layers)
    found = sum(prod(shape) for shape in models.parameters(models.build(name, weights=False)).values())
    assert found == 12 * layers * h * h + 13 * layers * h + (51200 + 2048) * h + 2 * h
    assert round(found / 1e9) == billions


@pytest.mark.parametrize("name", ["gpt3-1t", "llama-405b", "moe-8x7b"])
def test_a_step_is_compiled_without_weights(name: str) -> None:
    """Two layers of the whole width: arrays of a step would take gigabytes, compiling takes megabytes."""
    resource = pytest.importorskip("resource", reason="the operating system does not count it")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = weightless(name, 1, {"layers": 2})
    sizes = models.parameters(models.build(name, weights=False, layers=2))
    program = rc.load(model, trainable=list(sizes))
    step = rc.compile_step(program, rc.losses.cross_entropy(program["logits"]).name, rc.Adam(1e-4))
    weights = 4 * sum(prod(shape) for shape in sizes.values())
    assert step.figures.persistent_bytes >= 3 * weights > 20e9
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB


def reference(x: np.ndarray, w: dict[str, np.ndarray], *, tokens: int, capacity: int) -> np.ndarray:
    """The mixture by its definition, token by token: x [groups · tokens, hidden]."""

    def expert(e: int, row: np.ndarray) -> np.ndarray:
        gate = row @ w["gate_proj"][e]
        return (gate / (1 + np.exp(-gate)) * (row @ w["up_proj"][e])) @ w["down_proj"][e]

    y = np.zeros_like(x)
    for start in range(0, len(x), tokens):
        scores = x[start : start + tokens] @ w["gate"]
        probs = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
        choices = np.argsort(-probs, axis=-1, kind="stable")[:, :2]
        taken = np.zeros(scores.shape[-1], int)
        for turn in range(2):
            for i, chosen in enumerate(choices):
                e = chosen[turn]
                taken[e] += 1
                if taken[e] <= capacity:
                    share = probs[i, e] / probs[i, chosen].sum()
                    y[start + i] += share * expert(e, x[start + i])
    return y


@pytest.mark.parametrize("capacity", [2, 4, 8])
def test_experts_take_tokens_by_the_definition(capacity: int) -> None:
    """Few slots: many tokens go past the experts."""
    options = {"seq": 16, "tokens": 8, "capacity": capacity, "layers": 1}
    program = rc.load(models.build("moe-tiny", batch=2, seed=5, **options))
    for name in [n for n in program.data if ".moe." in n]:
        program.data[name] = program.data[name] * np.float32(20)  # choices that differ, and outputs that count
    ids = np.random.default_rng(1).integers(0, 1000, (2, 16))
    named = ["layers.0.moe.tokens", "layers.0.moe.sequence"]
    x, y = (np.asarray(a, np.float64) for a in rc.Executor().run(program, {"input_ids": ids}, named))
    weights = {
        name.split(".")[3]: np.asarray(array, np.float64) for name, array in program.data.items() if ".moe." in name
    }
    expected = reference(x.reshape(-1, x.shape[-1]), weights, tokens=8, capacity=capacity)
    np.testing.assert_allclose(y.reshape(expected.shape), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("options", "message"),
    [({"experts": 1}, "'experts' must be at least 2"), ({"tokens": 48}, "must be a multiple of 'tokens'")],
)
def test_shapes_that_do_not_fit_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        models.build("moe-tiny", **options)
