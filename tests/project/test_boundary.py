"""Public functions take what they can be given, and refuse all else with one sentence, a RecomputeError."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from boundary_cases import CALLS, feed, forward, loss, with_loss

import recompute as rc
from recompute.analysis import biggest_batch
from recompute.analysis.cluster import search
from recompute.boundary import as_loss, as_names

WRONG = {"None": None, "3": 3, "object": object(), "nonsense": "nonsense", "[]": []}
#: public names without arguments of these kinds, or which take anything: modules' helpers, values, IR by hand
APART = {
    "__version__", "Block", "Operator", "Program", "Role", "TensorType", "Value", "Variable", "CPUPlace",
    "EmulatedCUDAPlace", "Pass", "History", "Callback", "from_torch", "write_back", "Proof", "build_for",
    "portable_bits", "write_library", "cached_step",
}  # fmt: skip


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where "nonsense" is the name of a file, it is written here."""
    monkeypatch.chdir(tmp_path)


def parameters(function: Callable[..., Any]) -> list[str]:
    """Names of the arguments, those of **options left out."""
    found = inspect.signature(function).parameters.values()
    return [p.name for p in found if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]


def given(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Calls the function; what it only begins, as iterators do, runs."""
    positional = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.POSITIONAL_ONLY]
    first = [arguments[n] for n in positional if n in arguments]
    made = function(*first, **{n: v for n, v in arguments.items() if n not in positional})
    return list(made) if isinstance(made, types.GeneratorType) else made


def test_every_public_function_is_walked() -> None:
    public = {n for n in rc.__all__ if callable(getattr(rc, n)) and not _is_error(getattr(rc, n))}
    walked = {name.partition(".")[0] for name in CALLS} | {name.rpartition(".")[2] for name in CALLS}
    aliases = {"GradientMergeOptimizer", "ExponentialMovingAverage"}  # of GradientMerge and EMA
    assert public - APART - aliases <= walked


def _is_error(thing: object) -> bool:
    return isinstance(thing, type) and issubclass(thing, BaseException | Warning)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore")
def test_wrong_arguments_are_refused_in_a_sentence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each argument is replaced by things of wrong types: the call succeeds, or raises a RecomputeError."""
    # searches are left out: what they are given is checked before
    monkeypatch.setattr(search.Search, "run", lambda self: self.steps.figures(1))
    monkeypatch.setattr(biggest_batch, "max_batch_of", lambda steps, budget, **options: steps.figures(1))
    function, arguments = CALLS[name]()
    given(function, arguments)
    wrong = []
    for parameter in parameters(function):
        for text, value in WRONG.items():
            function, arguments = CALLS[name]()
            try:
                given(function, {**arguments, parameter: value})
            except rc.RecomputeError as e:
                assert str(e)
            except Exception as e:
                wrong.append(f"{name}({parameter}={text}): {type(e).__name__}: {e}")
    assert not wrong, "\n".join(wrong)


# -- what is taken ----------------------------------------------------------------------------------------------------


def test_places_by_name() -> None:
    assert rc.Executor("cpu").place == rc.CPUPlace()
    assert rc.Target("cuda:1").place == rc.Target(place=rc.CUDAPlace(1)).place == rc.CUDAPlace(1)
    assert rc.Target(place="emulated").place == rc.EmulatedCUDAPlace()
    assert rc.Trainer(forward(), rc.Adam(), place="cpu", quiet=True).executor.place == rc.CPUPlace()
    (pred,) = forward().evaluate(feed(), ["pred"], "cpu")
    assert pred.shape == (2, 2)
    for function in (rc.Executor, rc.Target, rc.cost.costs_of):
        with pytest.raises(
            rc.UsageError, match=r"place must be cpu, .* or emulated, not 'gpu' \(did you mean cuda\?\)"
        ):
            function("gpu")
        with pytest.raises(rc.UsageError, match=r"place must be rc.CPUPlace\(\), .* or a name .*, not 3"):
            function(3)


@pytest.mark.parametrize("mesh", [rc.Mesh(dp=2, pp=4), "dp=2,pp=4", {"dp": 2, "pp": 4}, (("dp", 2), ("pp", 4))])
def test_meshes(mesh: Any) -> None:
    assert rc.Mesh(mesh) == rc.Mesh(dp=2, pp=4) == rc.Mesh.of(dp=2, pp=4) == rc.Mesh.parse("dp=2,pp=4")
    with pytest.raises(rc.UsageError, match="give one of them"):
        rc.Mesh(mesh, tp=2)


def test_data_parallel_by_text() -> None:
    programs = []
    for mesh in ("dp=2", rc.Mesh(dp=2)):
        variable = loss()
        rc.DataParallel(rc.Adam(), mesh).minimize(variable)
        programs.append(str(variable.program))
    assert programs[0] == programs[1]


@pytest.mark.parametrize("checkpoints", ["fc_1", ["fc_1"], lambda p: p["fc_1"], lambda p: [p["fc_1"]]])
def test_compile_step_takes_names_and_variables(checkpoints: Any) -> None:
    program = with_loss()
    wanted = checkpoints(program) if callable(checkpoints) else checkpoints
    step = rc.compile_step(program, program["loss"], rc.Adam(), checkpoints=wanted, fetch=program["pred"])
    named = rc.compile_step(program, "loss", rc.Adam(), checkpoints=["fc_1"], fetch=["pred"])
    assert str(step.program) == str(named.program) and "pred" in step.program.block.outputs
    with pytest.raises(rc.UsageError, match="loss: 'loss' belongs to another program"):
        rc.compile_step(program, loss(), rc.Adam())


def test_cost_models_by_name() -> None:
    h200 = rc.cost.device("h200")
    assert rc.Target(cost="h200").cost == h200
    assert rc.estimate("mlp", batch=4, cost="h200").costs == "H200"
    program = with_loss()
    assert rc.compile_step(program, "loss", rc.Adam(), cost="h100-80").cost == rc.cost.device("h100")
    assert rc.RecomputeOptimizer(rc.Adam()).set_budget("60%", cost="h200").spec.cost == h200
    with pytest.raises(rc.UsageError, match="unknown device 'h2000'"):
        rc.Target(cost="h2000")


def test_budgets_by_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search.Search, "run", lambda self: self)
    target = rc.Target(cost="h100")
    options: dict[str, Any] = {"batch": 4, "network": "node=2,nvlink=450GB/s", "target": target}
    assert [rc.find_mesh("mlp", 2, budget=b, **options).budget for b in ("1GiB", 1 << 30)] == [1 << 30] * 2
    with pytest.raises(rc.UsageError, match="'60%' is a share of the plain step's peak, but an amount is needed"):
        rc.find_mesh("mlp", 2, budget="60%", **options)


def test_precisions_of_targets_are_checked() -> None:
    with pytest.raises(rc.UsageError, match=r"unknown precision 'bfloat16' \(did you mean bf16"):
        rc.Target(precision="bfloat16")


def test_options_by_other_names() -> None:
    with pytest.raises(rc.UsageError, match="Adam has no option 'lr': it is called learning_rate here"):
        rc.Adam(lr=1e-3)
    with pytest.raises(rc.UsageError, match="Adam has no option 'betas': it is called beta1 and beta2 here"):
        rc.Adam(betas=(0.9, 0.99))
    with pytest.raises(rc.UsageError, match=r"SGD has no option 'weight_decy' \(did you mean weight_decay"):
        rc.SGD(weight_decy=0.1)


def test_a_name_is_no_loss_for_minimize() -> None:
    with pytest.raises(rc.UsageError, match=r"loss must be a Variable, .* or program\['loss'\], not 'loss'"):
        rc.Adam().minimize("loss")  # type: ignore[arg-type]


def test_an_optimizers_class_is_none() -> None:
    with pytest.raises(rc.UsageError, match=r"optimizer must be an optimizer, such as rc.Adam\(\), not <class"):
        rc.Trainer(forward(), rc.Adam, quiet=True)  # type: ignore[arg-type]


def test_names() -> None:
    variable = loss()
    assert as_names("a", "names") == ["a"] and as_names(variable, "names") == [variable]
    assert as_names(("a", variable), "names") == ["a", variable] and as_names((), "names") == []
    assert as_loss(variable.program, "loss") == as_loss(variable.program, variable) == variable
