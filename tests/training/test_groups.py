"""Parameter groups: against PyTorch (tests/data/make_settings.py), schedules, wrappers, state, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.training.test_optimizers import linear_program

import recompute as rc
from recompute import UsageError
from recompute.training.clip import ClipGradByGlobalNorm
from recompute.training.optimizers import NAMES

DATA = np.load(Path(__file__).parents[1] / "data" / "settings.npz")

#: class, options, what differs in the second group: of the calls in make_settings.py
PYTORCH: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "sgd": (rc.SGD, {"learning_rate": 0.0625}, {"lr": 0.25, "weight_decay": 0.1}),
    "momentum": (rc.Momentum, {"learning_rate": 0.0625}, {"momentum": 0.5, "nesterov": True}),
    "adam": (rc.Adam, {"learning_rate": 0.0625, "weight_decay": 0.1}, {"betas": (0.8, 0.95), "eps": 1e-3}),
    "amsgrad": (rc.Adam, {"learning_rate": 0.0625}, {"amsgrad": True, "lr": 0.125}),
    "adamw": (rc.AdamW, {"learning_rate": 0.0625, "weight_decay": 0.3}, {"learning_rate": 0.125, "weight_decay": 0}),
    "rmsprop": (rc.RMSProp, {"learning_rate": 0.0625}, {"alpha": 0.5, "centered": True, "momentum": 0.5}),
}


def linear(dtype: type = np.float64, names: tuple[str, ...] = ("body.w", "head.w")) -> rc.Program:
    """loss = Σ parameter · x: the gradient of every parameter is the feed x."""
    return linear_program(DATA["w"].astype(dtype), names=names)


def train(program: rc.Program, feeds: Any) -> np.ndarray:
    executor, path = rc.Executor(), []
    for x in feeds:
        executor.run(program, {"x": x.astype(program["x"].value.type.numpy)})
        path.append([program.data[v.name].copy() for v in program.block.parameters])
    return np.array(path)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("key", PYTORCH)
def test_same_as_pytorch(key: str, clip: bool) -> None:
    cls, options, own = PYTORCH[key]
    program = linear()
    if clip:
        options = {**options, "grad_clip": ClipGradByGlobalNorm(1.0)}
    cls(**options, groups=[{"match": "head.*", **own}]).minimize(program["loss"])
    # PyTorch divides by the norm plus 1e-6 where it clips
    tolerance = {"rtol": 1e-5} if clip else {"rtol": 1e-13, "atol": 1e-14}
    np.testing.assert_allclose(train(program, DATA["g"]), DATA[f"groups.{key}{'.clip' * clip}"], **tolerance)


def test_the_same_hyper_parameters_have_the_same_bits() -> None:
    paths = []
    for groups in ([], [{"match": "*", "lr": 0.0625, "weight_decay": 0.01}], [{"match": ["head.w"]}]):
        program = linear(np.float32)
        rc.AdamW(0.0625, groups=groups).minimize(program["loss"])
        paths.append(train(program, DATA["g"]))
    np.testing.assert_array_equal(paths[0], paths[1])
    np.testing.assert_array_equal(paths[0], paths[2])


def test_the_text_shows_each_group_and_parses_back() -> None:
    program = linear(np.float32)
    rc.AdamW(groups=[{"match": "head.*", "lr": 0.5, "weight_decay": 0}]).minimize(program["loss"])
    text = str(program)
    (head,) = [line for line in text.splitlines() if "AdamUpdate(%head.w" in line]
    (body,) = [line for line in text.splitlines() if "AdamUpdate(%body.w" in line]
    assert "weight_decay=0.01" in body and "%learning_rate," in body
    assert "weight_decay" not in head and "%learning_rate_0," in head
    assert rc.parse(text) == program.block


def test_schedules_and_rates_that_are_set() -> None:
    program = linear()
    rising = rc.lr.PiecewiseDecay([1, 2], [0.0, 0.5, 1.0])
    optimizer = rc.SGD(0.25, groups=[{"match": "head.*", "lr": rising}])
    optimizer.minimize(program["loss"])
    path = train(program, DATA["g"][:2])
    w, g = DATA["w"], DATA["g"]
    np.testing.assert_allclose(path[1][0], w - 0.25 * g[0] - 0.25 * g[1])
    np.testing.assert_allclose(path[1][1], w - 0.5 * g[1])
    assert optimizer.get_lr() == 0.25 and optimizer.get_lr(group=0) == 1.0
    with pytest.raises(UsageError, match="follows the schedule"):
        optimizer.set_lr(0.5, group=0)
    optimizer.set_lr(0.0)
    np.testing.assert_array_equal(train(program, g[2:3])[0][0], path[1][0])


def test_rates_of_groups_are_set_through_wrappers_too() -> None:
    program = linear()
    optimizer = rc.MixedPrecision(rc.SGD(0.25, groups=[{"match": "head.*", "lr": 0.5}, {"match": "body.*"}]), "bf16")
    assert optimizer.get_lr(group=0) == 0.5
    optimizer.minimize(program["loss"])
    optimizer.set_lr(0.0, group=0)
    assert optimizer.get_lr(group=0) == 0.0 and optimizer.get_lr() == optimizer.get_lr(group=1) == 0.25
    for group, message in ((1, "no learning rate of its own"), (2, r"there is no groups\[2\]: .* has 2 groups")):
        with pytest.raises(UsageError, match=message):
            optimizer.set_lr(0.5, group=group)


def test_state_is_saved_and_set(tmp_path: Path) -> None:
    def made() -> tuple[rc.Program, Any]:
        program = linear()
        optimizer = rc.Adam(0.0625, groups=[{"match": "head.*", "lr": 0.25, "amsgrad": True}])
        optimizer.minimize(program["loss"])
        return program, optimizer

    first, optimizer = made()
    train(first, DATA["g"][:2])
    optimizer.set_lr(0.5, group=0)
    assert {"learning_rate", "learning_rate_0", "head.w.moment2_max"} <= set(optimizer.state_dict())
    assert "body.w.moment2_max" not in optimizer.state_dict()
    rc.save_state(first, tmp_path / "s.safetensors")
    second, again = made()
    rc.load_state(second, tmp_path / "s.safetensors")
    assert again.get_lr(group=0) == 0.5
    np.testing.assert_array_equal(train(second, DATA["g"][2:]), train(first, DATA["g"][2:]))
    _, other = made()
    other.set_state_dict(optimizer.state_dict())
    assert other.get_lr(group=0) == 0.5


@pytest.mark.parametrize("how", ["recompute", "bf16", "fp16", "fleet", "budget"])
def test_wrapped_and_compiled(how: str) -> None:
    """The head's learning rate is 0, so that it alone stays as it is."""
    program = rc.load(rc.models.build("mlp", batch=4))
    loss = rc.losses.cross_entropy(program).name
    names = [v.name for v in program.block.parameters]
    last = names[-1]
    optimizer: Any = rc.Momentum(0.5, groups=[{"match": last, "lr": 0}])
    if how == "fleet":
        strategy = rc.fleet.DistributedStrategy()
        strategy.recompute, strategy.recompute_configs = True, {"checkpoints": ["fc_1"]}
        optimizer = rc.fleet.distributed_optimizer(optimizer, strategy)
        optimizer.minimize(program[loss])
        step = program
    elif how == "recompute":
        step = rc.compile_step(program, loss, rc.RecomputeOptimizer(optimizer).set_checkpoints(["fc_1"])).program
    elif how == "budget":
        step = rc.compile_step(program, loss, optimizer, budget="100%").program
    else:
        step = rc.compile_step(program, loss, optimizer, precision=how).program
    before = {n: np.array(step.data[n]) for n in names}
    rc.Executor().run(step, batch(step))
    assert [n for n in names if np.array_equal(step.data[n], before[n])] == [last]


def batch(program: rc.Program) -> dict[str, np.ndarray]:
    from recompute.data.batches import synthetic_batch

    return synthetic_batch(program)


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_takes_groups(name: str) -> None:
    program = linear(np.float32)
    getattr(rc, name)(groups=[{"match": "head.w", "lr": 0.5, "weight_decay": 0.125}]).minimize(program["loss"])
    ops = {o.inputs[0].name: o.op for o in program.operators if o.op.updates and o.inputs[0].name.endswith(".w")}
    assert ops["head.w"].weight_decay == 0.125 != ops["body.w"].weight_decay


def test_names_of_the_exported_model_and_variables_match() -> None:
    program = linear()
    program.aliases["classifier.weight"] = "head.w"
    options = [{"match": "classifier.*", "lr": 0.5}, {"match": program["body.w"], "lr": 0.25}]
    rc.SGD(0.125, groups=options).minimize(program["loss"])
    rates = {o.inputs[0].name: o.inputs[2].name for o in program.operators if o.op.name == "SGDUpdate"}
    assert rates == {"head.w": "learning_rate_0", "body.w": "learning_rate_1"}


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"match": "head.*"}, "groups must be a list of dicts"),
        (["head.*"], r"groups\[0\] must be a dict with 'match'"),
        ([{"params": "head.*"}], "'params' is called match here"),
        ([{"match": []}], r"groups\[0\]: match takes names"),
        ([{"match": 3}], r"groups\[0\]: match takes names"),
        ([{"match": "head.*", "weight_decy": 0}], r"no hyper-parameter 'weight_decy' \(did you mean weight_decay"),
        ([{"match": "head.*", "grad_clip": 0}], "no hyper-parameter 'grad_clip'"),
        ([{"match": "head.*", "lr": -1}], r"groups\[0\]: learning_rate must be finite and not negative"),
        ([{"match": "head.*", "beta1": 1.0}], r"groups\[0\]: beta1 must be at least 0 and below 1"),
        ([{"match": "head.*", "betas": 0.9}], "betas must be two numbers"),
    ],
)
def test_what_is_refused_when_it_is_made(groups: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        rc.Adam(groups=groups)


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["haed.w"], r"groups: 'haed.w' matches no parameter \(did you mean head.w"),
        ([".*head.*"], r"globs, not regular expressions \(did you mean '\*head\*'\?\)"),
        (["^body\\.w$"], r"globs, not regular expressions \(did you mean 'body.w'\?\)"),
        (["scale"], "'scale' matches no parameter that is trained, only others"),
        (["head.*", "*.w"], r"'head.w' is in two groups: groups\[0\] \('head.\*'\) and groups\[1\] \('\*.w'\)"),
    ],
)
def test_patterns_that_do_not_fit_leave_the_program_as_it_was(patterns: list[str], message: str) -> None:
    program = linear()
    program.declare("buffers", "scale", np.ones(3))
    before = program.block
    with pytest.raises(UsageError, match=message):
        rc.Adam(groups=[{"match": p} for p in patterns]).minimize(program["loss"])
    assert program.block == before


def test_a_group_may_not_contradict_its_optimizer() -> None:
    program = linear()
    optimizer = rc.Momentum(dampening=0.5, groups=[{"match": "head.*", "use_nesterov": True}])
    with pytest.raises(UsageError, match=r"groups\[0\]: Nesterov momentum takes no dampening"):
        optimizer.minimize(program["loss"])
