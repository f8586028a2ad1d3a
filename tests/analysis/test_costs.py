"""Cost models: rooflines of devices, and operators measured once by signature."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import recompute as rc
from recompute import Operator, TensorType, UsageError, Value, devices, profile, testing
from recompute.cli import main
from recompute.cost import DATASHEETS, Device, device, operator_cost, this_cpu
from recompute.language.ir import Free
from recompute.language.op import op_class
from recompute.profile import Profile, measured_seconds, signature


def make(name: str, *types: str, **attributes: object) -> Operator:
    """An operator on new values, with its required outputs."""
    op = op_class(name)(**attributes)
    ins = tuple(Value(f"x{i}", TensorType.parse(t)) for i, t in enumerate(types))
    outs = op.infer(*(v.type for v in ins))[: op.required_outputs]
    return Operator(op, ins, tuple(Value(f"y{i}", t) for i, t in enumerate(outs)))


CONV = make("Conv", "f32[4,64,28,28]", "f32[64,64,3,3]", pads=(1, 1, 1, 1))
RELU = make("Relu", "f32[4,64,28,28]")
GATHER = make("Gather", "f32[50,8]", "i64[6]")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or writes the user's cache."""
    this_cpu()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "onnx-recompute"


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Signatures of the operators measured, in order; each takes as many seconds as were measured before it, plus 1."""
    found: list[str] = []

    def measured(operator: Operator, limit: int) -> float:
        found.append(signature(operator))
        return float(len(found))

    monkeypatch.setattr(profile, "measured_seconds", measured)
    yield found


# -- rooflines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DATASHEETS)
def test_the_table_is_sane(name: str) -> None:
    sheet, found = DATASHEETS[name], device(name)
    assert 5 < sheet.f32 < 200 and sheet.f64 <= sheet.f32 <= sheet.f16
    assert sheet.tf32 == 0 or sheet.f32 <= sheet.tf32 <= sheet.f16
    assert 200 < sheet.bandwidth < 10_000 and 8 < sheet.memory < 200
    # arithmetic intensity at which a device turns from its memory to its units: tens of operations a byte
    assert 5 < found.flops / found.bandwidth < 120
    assert found.memory == sheet.memory * 2**30 and found.f16 >= found.flops


def test_devices_by_name() -> None:
    assert device("h200") == device("H200") == device(" h-200 ")
    assert device("RTX 3090") == device("rtx-3090") == device("3090")
    assert device("cpu") is this_cpu()
    assert device("h200:tf32").flops > device("h200").flops and "TF32" in device("h200:tf32").name
    with pytest.raises(UsageError, match=r"unknown device 'v100' \(did you mean v100-16, v100-32\?\); known: cpu,"):
        device("v100")
    for wrong in ("t4:tf32", "cpu:tf32", "h200:fp8"):
        with pytest.raises(UsageError, match="the only suffix is ':tf32'"):
            device(wrong)
    for wrong in ("", "tpu", "rtx"):
        with pytest.raises(UsageError, match="unknown device"):
            device(wrong)


@pytest.mark.parametrize("name", ["cpu", *DATASHEETS])
def test_what_is_cheap_and_what_is_dear_follows_from_the_roofline(name: str) -> None:
    model = device(name)
    norm = make("BatchNormApply", "f32[4,64,28,28]", *["f32[64]"] * 4)
    dropout = make("Dropout", "f32[4,64,28,28]", "i64[]")
    cheap = [model.seconds(op) for op in (RELU, norm, dropout)]
    assert max(cheap) < model.seconds(CONV)
    assert model.seconds(make("Reshape", "f32[4,6]", shape=(24,))) == 0  # its result is already there
    assert model.seconds(Operator(Free(), RELU.outputs, ())) == 0


def test_the_roofline_is_the_longer_of_both() -> None:
    model = Device("d", 1e9, 1e9, 1.0, f16=4e9)
    product = make("MatMul", "f32[100,100]", "f32[100,100]")
    assert model.seconds(product) == pytest.approx(2e6 / 1e9 + 1)
    assert model.seconds(make("MatMul", "f16[100,100]", "f16[100,100]")) == pytest.approx(2e6 / 4e9 + 1)
    assert model.seconds(RELU) == pytest.approx(operator_cost(RELU).bytes / 1e9 + 1)


def test_rates_of_this_cpu_are_measured_once(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = devices._measured_cpu.__wrapped__()
    assert first.flops > 1e8 and first.bandwidth > 1e7 and len(list(own_cache.iterdir())) == 1

    def again() -> tuple[float, float]:
        raise AssertionError("measured again")

    with monkeypatch.context() as m:
        m.setattr(devices, "_measured_rates", again)
        assert devices._measured_cpu.__wrapped__() == first
    file, flops = next(own_cache.iterdir()), devices._expected_flops() / 4
    for broken in ("", "{", "[]", '{"flops": 1}', '{"flops": -1, "bandwidth": NaN}'):
        file.write_text(broken)
        monkeypatch.setattr(devices, "_measured_rates", lambda: (flops, 2e9))
        assert devices._measured_cpu.__wrapped__().flops == flops
        assert json.loads(file.read_text())["bandwidth"] == 2e9


def test_rates_that_no_processor_has_are_refused(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are measured again, also where an earlier process has kept them; what is taken instead is not kept."""
    good = devices._expected_flops() / 3, 8e9
    answers = [(1e7, 8e9), (good[0], 1e3), good]
    monkeypatch.setattr(devices, "_measured_rates", lambda: answers.pop(0))
    found = devices._measured_cpu.__wrapped__()
    assert (found.flops, found.bandwidth) == good and not answers
    file = next(own_cache.iterdir())
    file.write_text(json.dumps({"flops": 1e7, "bandwidth": 8e9}))
    answers[:] = [good]
    assert devices._measured_cpu.__wrapped__() == found and json.loads(file.read_text())["flops"] == good[0]
    file.unlink()
    monkeypatch.setattr(devices, "_measured_rates", lambda: (1e7, 8e9))
    with pytest.warns(UserWarning, match="1e\\+07 operations and 8e\\+09 bytes a second, are not plausible"):
        assert devices._measured_cpu.__wrapped__().flops == devices._expected_flops() / 2
    assert not list(own_cache.iterdir())


def test_the_model_is_chosen_where_seconds_are_shown() -> None:
    fast, slow = (rc.estimate("lenet", batch=4, checkpoints=["relu*"], cost=device(n)) for n in ("h200", "t4"))
    assert fast.costs == "H200" and fast.step_seconds < slow.step_seconds
    assert sum(c.rebuild_seconds for c in fast.checkpoints) < sum(c.rebuild_seconds for c in slow.checkpoints)
    assert fast.peak_bytes == slow.peak_bytes and fast == rc.estimate(
        "lenet", batch=4, checkpoints=["relu*"], cost=device("h200")
    )
    found = rc.max_batch("lenet", "20MiB", cost=device("h200"))
    assert found.costs == "H200" and found["plain"].step_seconds < rc.max_batch("lenet", "20MiB")["plain"].step_seconds


# -- measured ---------------------------------------------------------------------------------------------------------


def test_each_signature_is_measured_once(tmp_path: Path, runs: list[str]) -> None:
    other = make("Relu", "f32[4,64,28,29]")
    with Profile(tmp_path / "p.json") as p:
        assert [p.seconds(op) for op in (CONV, RELU, CONV, RELU, other)] == [1, 2, 1, 2, 3]
        renamed = RELU.renamed({"x0": "a", "y0": "b"})
        p.measure([renamed, other, CONV])
        assert p.measured == len(runs) == len(set(runs)) == 3
        assert p.seconds(make("Reshape", "f32[4,6]", shape=(24,))) == 0 and len(runs) == 3
    again = Profile(tmp_path / "p.json")
    assert [again.seconds(op) for op in (other, CONV)] == [3, 1] and len(runs) == 3 and again.measured == 0


def test_signatures() -> None:
    assert signature(GATHER) == "Gather(f32[50,8], i64[6]) -> f32[6,8]"
    assert signature(make("Gather", "f32[50,8]", "i64[6]", axis=1)) != signature(GATHER)
    drops = [make("Dropout", "f32[8]", "i64[]", seed=s, ratio=r) for s, r in ((1, 0.5), (2, 0.5), (1, 0.1))]
    assert signature(drops[0]) == signature(drops[1]) != signature(drops[2])


def test_the_default_file_is_in_the_users_cache(own_cache: Path, runs: list[str]) -> None:
    with Profile() as p:
        p.seconds(RELU)
    assert p.path is not None and p.path.parent == own_cache and p.path.exists()
    assert Profile().seconds(RELU) == 1 and len(runs) == 1


def test_files_of_several_processes_are_joined(tmp_path: Path, runs: list[str]) -> None:
    a, b = Profile(tmp_path / "p.json"), Profile(tmp_path / "p.json")
    a.measure([CONV])
    b.measure([RELU])
    assert Profile(tmp_path / "p.json").seconds(CONV) == 1 and len(runs) == 2


@pytest.mark.parametrize("damage", ["cut", "empty", "nan", "types", "list"])
def test_a_damaged_file_is_measured_again(tmp_path: Path, runs: list[str], damage: str) -> None:
    file = tmp_path / "p.json"
    Profile(file).measure([RELU, CONV])
    text = file.read_text()
    file.write_text(
        {
            "cut": text[: len(text) // 2],
            "empty": "",
            "nan": text.replace("1.0", "NaN", 1),
            "types": text.replace("1.0", '"1"', 1),
            "list": '{"profile": 1, "machine": 3}',
        }[damage]
    )
    said: list[str] = []
    p = Profile(file, warn=said.append)
    assert "damaged" in said[0] and str(file) in said[0] and "measured again" in said[0]
    p.measure([RELU])
    assert len(runs) == 3
    said.clear()
    assert Profile(file, warn=said.append).seconds(RELU) == 3 and not said


def test_other_files_are_never_replaced(tmp_path: Path, runs: list[str]) -> None:
    file = tmp_path / "model.onnx"
    file.write_bytes(b"\x08\x0a")
    with pytest.raises(UsageError, match="is not a profile"):
        Profile(file)
    assert file.read_bytes() == b"\x08\x0a"
    Profile(tmp_path / "p.json").measure([RELU])
    (tmp_path / "p.json").write_text((tmp_path / "p.json").read_text().replace("NumPy", "OldPy"))
    with pytest.raises(UsageError, match="another machine"):
        Profile(tmp_path / "p.json")


def test_a_file_that_cannot_be_written_is_a_warning(tmp_path: Path, runs: list[str]) -> None:
    (tmp_path / "file").write_text("")
    said: list[str] = []
    Profile(tmp_path / "file" / "p.json", warn=said.append).measure([RELU])
    assert "cannot write" in said[0]


def test_what_is_too_large_is_priced_by_the_roofline() -> None:
    model = Device("d", 1e9, 1e9, 0.0)
    p = Profile(fallback=model, limit=100)
    assert p.seconds(RELU) == model.seconds(RELU)
    assert "more than 100" in p.skipped[signature(RELU)]
    p.save()
    assert not Profile(fallback=model)._known, "guesses are not kept as measurements"


def test_what_cannot_run_alone_is_scaled_by_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Device("d", 1e9, 1e9, 0.0)
    small, large = make("Relu", "f32[10]"), make("Relu", "f32[3000]")
    p = Profile(fallback=model, limit=1000)
    p._known[signature(small)] = 3 * model.seconds(small), model.seconds(small)
    p._known[signature(CONV)] = 50 * model.seconds(CONV), model.seconds(CONV)
    assert p.seconds(large) == pytest.approx(3 * model.seconds(large))

    def fails(*args: object) -> None:
        raise RuntimeError("not here")

    monkeypatch.setattr(type(GATHER.op), "compute", fails)
    p.limit = 10_000
    assert p.seconds(GATHER) > 0
    assert "cannot run in isolation: RuntimeError: not here" in p.skipped[signature(GATHER)]


@pytest.mark.parametrize("cls", list(testing.all_ops()), ids=lambda c: c.name)
def test_every_operator_runs_alone(cls: type) -> None:
    for case in testing.cases(cls)[:3]:
        operator = testing.case_block(case)[0].operators[0]
        assert 0 <= measured_seconds(operator, 1 << 30) < math.inf, signature(operator)


def test_indices_are_within_bounds_and_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[np.ndarray] = []
    compute = type(GATHER.op).compute

    def watch(self: object, ins: list, outs: list, scratch: list) -> None:
        compute(self, ins, outs, scratch)
        seen.append(ins[1].copy())

    monkeypatch.setattr(type(GATHER.op), "compute", watch)
    measured_seconds(make("Gather", "f32[50,8]", "i64[600]"), 1 << 20)
    assert seen[-1].min() >= 0 and seen[-1].max() == 49 and len(np.unique(seen[-1])) > 40


def test_answers_stay_the_same(tmp_path: Path) -> None:
    p = Profile(tmp_path / "p.json")
    first = [p.seconds(op) for op in (CONV, RELU, GATHER)]
    assert first == [p.seconds(op) for op in (CONV, RELU, GATHER)] and not p.skipped and min(first) > 0
    p.save()
    assert first == [Profile(tmp_path / "p.json").seconds(op) for op in (CONV, RELU, GATHER)]


# -- command line -----------------------------------------------------------------------------------------------------


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], runs: list[str]) -> None:
    reports = []
    for _ in range(2):
        args = ["lenet", "--batch", "2", "--profile", str(tmp_path / "p.json"), "--json", str(tmp_path / "r.json")]
        assert main(args) == 0
        reports.append(json.loads((tmp_path / "r.json").read_text()))
    assert reports[0] == reports[1] and reports[0]["costs"] == "measured on this CPU"
    out, err = capsys.readouterr()
    assert "estimated step time (measured on this CPU)" in out
    assert f"measured {len(runs)} operators" in err and len(runs) == len(set(runs))
    assert main(["lenet", "--device", "H200", "--json", str(tmp_path / "r.json")]) == 0
    assert json.loads((tmp_path / "r.json").read_text())["costs"] == "H200"
    assert main(["lenet", "--device", "h200", "--estimate"]) == 0
    assert "(H200)" in capsys.readouterr().out


def test_profile_of_steps_that_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], runs: list[str]) -> None:
    """`--run N --profile` accounts for every operator once, and measures none of them alone."""
    args = ["mlp", "--batch", "4", "--checkpoints", "pred", "--run", "2", "--profile"]
    assert main([*args, "--json", str(tmp_path / "r.json"), "--trace", str(tmp_path / "t.json")]) == 0
    report = json.loads((tmp_path / "r.json").read_text())
    found, out = report["profile"], capsys.readouterr().out
    assert not runs and report["costs"] == "this CPU" and found["steps"] == 2
    kinds, operators = found["kinds"], found["operators"]
    assert sum(k["calls"] for k in kinds) == len(operators) and sum(k["again"] for k in kinds) > 0
    assert sum(k["flops"] for k in kinds) == sum(o["flops"] for o in operators) > 0
    for rows in (kinds, operators):
        assert sum(r["seconds"] for r in rows) == pytest.approx(found["seconds"])
        assert sum(r["share"] for r in rows) == pytest.approx(1)
    times = {o["index"]: o["seconds"] for o in operators}
    events = [
        e for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if e["ph"] == "X" and e["pid"] == 2
    ]
    assert {e["args"]["operator"]: e["dur"] for e in events if e["args"]["operator"] in times} == {
        i: pytest.approx(s * 1e6, abs=2e-3) for i, s in times.items()
    }
    texts = ("operators of a step:", "the roofline of this machine:", "(recomputed)", kinds[0]["name"])
    assert all(text in out for text in texts)


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["lenet", "--device", "h20"], "unknown device 'h20' (did you mean h200, gh200?)"),
        (["lenet", "--device", "h200", "--profile"], "--profile measures this machine, --device estimates another"),
        (["--profile", "model.onnx"], "give a model before --profile"),
    ],
)
def test_command_line_errors(args: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "gib", "expected"),
    [
        ("NVIDIA H200", 140.4, "H200"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "A100-80"),
        ("NVIDIA A100-PCIE-40GB", 39.4, "A100-40"),
        ("NVIDIA GH200 480GB", 94.5, "GH200"),
        ("NVIDIA GeForce RTX 2080 Ti", 10.8, "RTX 2080 Ti"),
        ("NVIDIA L40S", 44.4, "this CPU"),
        ("", 0, "this CPU"),
    ],
)
def test_a_device_is_known_by_name_and_memory(
    name: str, gib: float, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from recompute.cost import costs_of
    from recompute.runtime.cuda.device import device

    monkeypatch.setattr(device, "described", lambda number: (name, int(gib * 2**30)))
    assert costs_of(rc.CUDAPlace(0)).name == expected


def test_an_operator_is_priced_anew_by_another_device() -> None:
    relu = make("Relu", "f32[4,64,28,28]")
    first, second = device("h200"), device("a100-80")
    prices = [d.seconds(relu) for d in (first, second, first, second)]
    assert prices[0] == prices[2] != prices[1] == prices[3]
    assert prices[0] == first.seconds(make("Relu", "f32[4,64,28,28]"))


def test_equal_operators_of_other_types_have_other_costs() -> None:
    small, large = make("Conv", "f32[1,8,8,8]", "f32[8,8,3,3]"), make("Conv", "f32[2,8,8,8]", "f32[8,8,3,3]")
    assert 2 * operator_cost(small).flops == operator_cost(large).flops
