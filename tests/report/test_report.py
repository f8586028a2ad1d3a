"""The pictures: their numbers are the compiler's own, to the byte; the page stands alone and works in a browser."""

from __future__ import annotations

import base64
import functools
import html
import itertools
import json
import pickle
import pickletools
import re
import shutil
import subprocess
import zlib
from pathlib import Path
from typing import Any

import pytest

import recompute as rc
from recompute.cli import main
from recompute.compiling.compiler import CompiledStep, compile_step, resolve_checkpoints
from recompute.cost import Device, kept_values
from recompute.language.ir import Role
from recompute.language.text import show, show_operator
from recompute.passes import ALIGNMENT, live_profile
from recompute.report.data import checkpoint_worth, curve_points, report_data
from recompute.report.page import page
from recompute.report.snapshot import BASE, snapshot
from recompute.report.timeline import ROLES, timeline
from recompute.report.trace import trace

DEVICE = Device("a test's device", 1e11, 1e10, 1e-6)
ZOO = [
    ("mlp4", 16, {}, "relu_*"),
    ("resnet50", 8, {}, "layer?.?.out"),
    ("bert-tiny", 2, {}, "*residual"),
    ("lstm", 2, {}, "*"),
]


def data_of(text: str) -> dict[str, Any]:
    """The data inside a page."""
    start = text.index('<script id="data"')
    begin, end = text.index(">", start) + 1, text.index("</script>", start)
    content = text[begin:end]
    if 'data-encoding="deflate"' in text[start:begin]:
        content = zlib.decompress(base64.b64decode(content)).decode()
    return json.loads(content)


@functools.cache
def compiled(name: str, batch: int, patterns: str, **options: Any) -> tuple[rc.Program, CompiledStep, CompiledStep]:
    """The program with its loss, and both steps."""
    program = rc.load(rc.models.build(name, batch=batch, weights=False, **options))
    kind, _ = rc.losses.natural_loss(program)
    loss = kind if kind in program else getattr(rc.losses, kind)(program).name
    names = resolve_checkpoints(program, [patterns])
    make = functools.partial(compile_step, program, loss)
    return program, make(rc.Adam(learning_rate=1e-3)), make(rc.Adam(learning_rate=1e-3), checkpoints=names)


@pytest.fixture(params=ZOO, ids=lambda case: case[0])
def case(request: pytest.FixtureRequest) -> tuple[rc.Program, CompiledStep, CompiledStep]:
    name, batch, options, patterns = request.param
    return compiled(name, batch, patterns, **options)


def levels(data: dict[str, Any], program: dict[str, Any]) -> list[list[int]]:
    """Bytes by role and operator, as the page adds them up."""
    n = len(program["operators"]["kind"])
    rows = [[program["persistent"].get(r["key"], 0)] * n for r in data["roles"]]
    a = program["allocations"]
    listed = zip(a["role"], a["start"], a["end"], a["size"], strict=True)
    for role, start, end, size in itertools.chain(listed, program["rest"]):
        for i in range(start, end + 1):
            rows[role][i] += size * data["unit"]
    return rows


def test_roles_add_up_to_the_live_bytes(case: tuple[rc.Program, CompiledStep, CompiledStep]) -> None:
    for step in case[1:]:
        block = step.program.block
        line = timeline(block, DEVICE)
        totals = line.totals()
        assert list(totals) == list(ROLES)
        wanted = [b for _, b in live_profile(block, ALIGNMENT)]
        persistent = step.figures.persistent_bytes
        assert [sum(row[i] for row in totals.values()) - persistent for i in range(len(wanted))] == wanted
        peak = max(range(len(wanted)), key=wanted.__getitem__)
        assert sum(a.size for a in line.live(peak)) == wanted[peak] <= step.figures.arena_bytes
        assert any(totals["recomputed"]) == (step.figures.recomputed_operators > 0)


def test_allocations_stand_apart_in_the_arena(case: tuple[rc.Program, CompiledStep, CompiledStep]) -> None:
    step = case[2]
    line = timeline(step.program.block, DEVICE)
    held = {v.name for a in line.allocations for v in a.values}
    written = {v.name for op in line.operators for v in (*op.writes(), *op.scratch) if v.nbytes}
    persistent = {v.name for v in step.program.block.persistent()}
    assert written - persistent <= held
    for i in range(0, len(line.operators), 7):
        live = sorted((a for a in line.live(i) if a.size), key=lambda a: a.address)
        assert all(a.address + a.size <= b.address for a, b in itertools.pairwise(live))
        assert not live or live[-1].address + live[-1].size <= step.figures.arena_bytes


def test_the_page_has_the_same_numbers(case: tuple[rc.Program, CompiledStep, CompiledStep]) -> None:
    program, plain, step = case
    data = report_data(program, plain, step, title={"model": "</script><b>"})
    text = page(data)
    assert data_of(text) == json.loads(json.dumps(data))
    assert len(text) < 1_000_000
    for shown, made in zip(data["programs"], (plain, step), strict=True):
        wanted = [b + made.figures.persistent_bytes for _, b in live_profile(made.program.block, ALIGNMENT)]
        assert [sum(column) for column in zip(*levels(data, shown), strict=True)] == wanted


def test_nothing_is_loaded_from_anywhere() -> None:
    text = page(report_data(*compiled("mlp4", 16, "relu_*"), title={"model": "</script><b>"}))
    assert not re.search(r"https?:|//[a-z]|@import|url\(|fetch\(|XMLHttp|import\(", text)
    assert "default-src 'none'" in text and text.count("</script>") == 2 and "<b>" not in text
    assert not re.findall(r"<(?:link|img|script)[^>]*(?:src|href)=\"(?!data:,)", text)


def test_large_programs_stay_below_a_megabyte(monkeypatch: pytest.MonkeyPatch) -> None:
    program, plain, step = compiled("resnet152", 8, "layer?.*.out")
    data = report_data(program, plain, step)
    text = page(data)
    assert len(text) < 1_000_000 and 'data-encoding="deflate"' in text and data_of(text) == json.loads(json.dumps(data))
    monkeypatch.setattr("recompute.report.data._MOST", 300)
    cut = report_data(program, plain, step)
    for a, b in zip(data["programs"], cut["programs"], strict=True):
        assert len(b["allocations"]["size"]) == 300 and b["rest"]
        assert levels(data, a) == levels(cut, b)


def test_worth_of_checkpoints(case: tuple[rc.Program, CompiledStep, CompiledStep]) -> None:
    program, plain, step = case
    forward = plain.program.forward or program.block
    rows = checkpoint_worth(forward, plain, step)
    assert [r["name"] for r in rows] == [n for n in step.plan.checkpoints if n in forward.producers()]
    assert sum(r["flops"] for r in rows) == step.figures.repeated_flops
    assert sum(r["operators"] for r in rows) == step.figures.recomputed_operators
    for made in (plain, step):
        assert sum(kept_values(made.program.logical).values()) == made.figures.kept_bytes
    assert sum(r["net"] for r in rows) == plain.figures.kept_bytes - step.figures.kept_bytes
    assert all(r["dropped"] >= 0 <= r["beside"] for r in rows)


def test_the_curve() -> None:
    program, plain, step = compiled("resnet18", 2, "layer?.?.out", image=32)
    loss = program.block.operators[-1].outputs[0].name
    tried: list[list[str]] = []

    def again(names: list[str]) -> CompiledStep:
        tried.append(names)
        return compile_step(program, loss, rc.Adam(learning_rate=1e-3), checkpoints=names)

    points = curve_points(program, plain, step, again)
    assert [p["kind"] for p in points] == ["plain", "plan"] + ["spaced"] * len(tried) and 4 <= len(tried) <= 7
    assert points[0]["peak_bytes"] == plain.figures.peak_bytes and points[1]["peak_bytes"] == step.figures.peak_bytes
    assert all(len(set(names)) == len(names) for names in tried)
    assert curve_points(program, plain, None, again, most=3)[1]["kind"] == "spaced"


# -- trace, snapshot, plot ---------------------------------------------------------------------------------------


def test_trace(case: tuple[rc.Program, CompiledStep, CompiledStep]) -> None:
    _, plain, step = case
    lines = {"plain": timeline(plain.program.block, DEVICE), "recompute": timeline(step.program.block, DEVICE)}
    measured = [1e-3] * len(lines["recompute"].operators)
    events = json.loads(json.dumps(trace(lines, {"recompute": measured})))["traceEvents"]
    for pid, (line, made) in enumerate(zip(lines.values(), (plain, step), strict=True), 1):
        complete = [e for e in events if e["ph"] == "X" and e["pid"] == pid]
        assert [e["name"] for e in complete] == [op.op.name for op in line.operators]
        assert all(b["ts"] >= a["ts"] + a["dur"] - 0.002 for a, b in itertools.pairwise(complete))
        assert {e["tid"] for e in complete} == {list(Role).index(op.role) + 1 for op in line.operators}
        counters = [e["args"] for e in events if e["ph"] == "C" and e["pid"] == pid and e["name"] == "memory by role"]
        wanted = [b + made.figures.persistent_bytes for _, b in live_profile(made.program.block, ALIGNMENT)]
        assert [sum(c.values()) for c in counters] == wanted
        times = measured if pid == 2 else line.seconds
        assert sum(e["dur"] for e in complete) == pytest.approx(sum(times) * 1e6, abs=0.001 * len(times))


#: what the page's reader of pickles knows (torch/utils/viz/MemoryViz.js)
OPCODES = {
    "PROTO", "FRAME", "APPEND", "APPENDS", "LIST", "TUPLE", "NEWFALSE", "NEWTRUE", "NONE", "BINGET", "BININT",
    "BININT1", "BININT2", "EMPTY_DICT", "EMPTY_LIST", "LONG1", "LONG_BINGET", "MARK", "MEMOIZE", "SETITEM", "SETITEMS",
    "SHORT_BINUNICODE", "BINUNICODE", "STOP", "BINPUT", "LONG_BINPUT", "EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3",
    "BINFLOAT", "DICT",
}  # fmt: skip


def replayed(data: dict[str, Any]) -> tuple[int, dict[int, int]]:
    """The most bytes alive at once, and what is left, from the events; they must never overlap."""
    alive: dict[int, int] = {}
    most = total = 0
    segments = []
    for e in data["device_traces"][0]:
        at, size = e["addr"], e["size"]
        if e["action"] == "segment_alloc":
            segments.append((at, at + size))
        elif e["action"] == "alloc":
            assert any(low <= at and at + size <= high for low, high in segments)
            assert all(at + size <= low or low + other <= at for low, other in alive.items())
            alive[at] = size
            total += size
        elif e["action"] == "free_completed":
            assert alive.pop(at) == size
            total -= size
        most = max(most, total)
    return most, alive


def test_snapshot(case: tuple[rc.Program, CompiledStep, CompiledStep]) -> None:
    step = case[2]
    block = step.program.block
    line = timeline(block, DEVICE)
    file = pickle.dumps(snapshot(line), protocol=4)
    assert {op.name for op, _, _ in pickletools.genops(file)} <= OPCODES
    data = pickle.loads(file)
    most, alive = replayed(data)
    persistent = sum(-(-v.nbytes // ALIGNMENT) * ALIGNMENT for v in block.persistent())
    assert most == persistent + max(b for _, b in live_profile(block, ALIGNMENT))
    left = {}
    for s in data["segments"]:
        at = s["address"]
        for b in s["blocks"]:
            assert b["address"] == at and b["requested_size"] <= b["size"]
            if b["state"] == "active_allocated":
                left[at] = b["size"]
            at += b["size"]
        assert at == s["address"] + s["total_size"]
    assert left == alive
    assert "unknown" in {e["category"] for e in data["device_traces"][0]}  # memory_viz fails without
    assert min(s["address"] for s in data["segments"]) == BASE


def test_frames_point_at_lines_of_the_text() -> None:
    step = compiled("mlp4", 16, "relu_*")[2]
    text = show(step.program.block).splitlines()
    for e in snapshot(timeline(step.program.block, DEVICE))["device_traces"][0]:
        for frame in e["frames"][-2:-1]:
            assert text[frame["line"] - 1].strip().startswith(frame["name"])


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_plot(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("matplotlib")
    from recompute.report.plot import write_plot

    _, plain, step = compiled("mlp4", 16, "relu_*")
    lines = {"plain": timeline(plain.program.block, DEVICE), "recompute": timeline(step.program.block, DEVICE)}
    files = [tmp_path / f"{i}.{kind}" for i in range(2)]
    for file in files:
        write_plot(lines, file, "mlp4", kind)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert files[0].read_bytes()[:5] == (b"<?xml" if kind == "svg" else b"\x89PNG\r")


# -- the command line ----------------------------------------------------------------------------------------------


def test_command_line(tmp_path: Path) -> None:
    files = {flag: tmp_path / f"out.{flag}" for flag in ("report", "trace", "snapshot")}
    flags = [x for flag, file in files.items() for x in (f"--{flag}", str(file))]
    facts = tmp_path / "facts.json"
    assert (
        main(["mlp4", "--batch", "16", "--checkpoints", "relu_*", "--run", "2", "-q", "--json", str(facts), *flags])
        == 0
    )
    data = data_of(files["report"].read_text())
    assert data["run"]["measured_peak_bytes"] == data["programs"][1]["figures"]["peak_bytes"]
    measured = data["programs"][1]["operators"]["measured"]
    assert len(measured) == len(data["programs"][1]["operators"]["kind"]) and sum(measured) > 0
    assert any(t is not None for t in data["programs"][0]["operators"]["measured"])
    assert any("(measured times)" in str(e) for e in json.loads(files["trace"].read_text())["traceEvents"])
    assert pickle.loads(files["snapshot"].read_bytes())["device_traces"][0]
    assert json.loads(facts.read_text())["pictures"] == [str(f) for f in files.values()]
    assert len(list(tmp_path.iterdir())) == 4


def test_without_checkpoints(tmp_path: Path) -> None:
    assert main(["lenet", "--batch", "4", "-q", "--report", str(tmp_path / "r.html")]) == 0
    data = data_of((tmp_path / "r.html").read_text())
    assert [p["name"] for p in data["programs"]] == ["plain"] and data["checkpoints"] == []


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--report", "/no/such/folder/r.html"], "the folder '/no/such/folder' does not exist"),
        (["--snapshot", "/"], "it is a folder"),
        (["--plot", "memory.gif"], "must end in .svg, .png, .pdf"),
    ],
)
def test_what_cannot_be_written(capsys: pytest.CaptureFixture[str], flags: list[str], says: str) -> None:
    assert main(["mlp4", *flags]) == 2
    assert says in capsys.readouterr().err


def test_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert main(["mlp4", "--plot", "memory.svg"]) == 1
    assert "pip install 'onnx-recompute[plot]'" in capsys.readouterr().err


# -- the browser ---------------------------------------------------------------------------------------------------

#: moves over every picture, turns every switch, and writes what it sees into the page
PROBE = """
<script>
const seen = {errors: [], lines: {}};
addEventListener("error", e => seen.errors.push(e.message));
addEventListener("unhandledrejection", e => seen.errors.push(String(e.reason)));
addEventListener("securitypolicyviolation", e => seen.errors.push(e.blockedURI));
const wait = setInterval(() => {
  if (!document.documentElement.dataset.ready) return;
  clearInterval(wait);
  for (const round of [0, 1]) {
    for (const canvas of document.querySelectorAll("canvas")) {
      const box = canvas.getBoundingClientRect();
      for (let i = 0; i < 40; i++) {
        const x = box.left + 75 + (box.width - 90) * i / 40, y = box.top + box.height * (0.1 + i / 50);
        canvas.dispatchEvent(new MouseEvent("mousemove", {clientX: x, clientY: y, bubbles: true}));
        seen.lines[state.step.name + " " + state.index] = document.querySelector(".detail .op").textContent;
      }
      canvas.dispatchEvent(new MouseEvent("click", {clientX: box.left + 200, clientY: box.top + 50}));
      canvas.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight"}));
      dispatchEvent(new KeyboardEvent("keydown", {key: "Escape"}));
    }
    for (const b of document.querySelectorAll(".switch button, .legend button")) b.click();
  }
  seen.peaks = pictures.filter(p => p.only).map(p => p.only.total[p.only.peakAt]);
  document.body.replaceChildren(document.createElement("pre"));
  document.querySelector("pre").textContent = JSON.stringify(seen);
}, 20);
</script>
"""


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs the browser 'chromium'")
@pytest.mark.parametrize(("name", "patterns"), [("mlp4", "relu_*"), ("resnet152", "layer?.*.out")])
def test_in_a_browser(tmp_path: Path, name: str, patterns: str) -> None:
    """No error, no blocked load, and what hovering shows is the operator's own line."""
    program, plain, step = compiled(name, 8, patterns)
    points = curve_points(program, plain, step, lambda names: step, most=3)
    text = page(report_data(program, plain, step, title={"model": name}, curve=points))
    file = tmp_path / "report.html"
    file.write_text(text.replace("</body>", PROBE + "</body>"))
    flags = [
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
        "--disable-background-networking", "--disable-component-update", f"--user-data-dir={tmp_path / 'profile'}",
        "--window-size=1200,2400", "--virtual-time-budget=20000", "--dump-dom",
    ]  # fmt: skip
    out = subprocess.run(["chromium", *flags, file.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r"<pre>(.*)</pre>", out.stdout, re.DOTALL)
    assert found, out.stdout[-2000:] + out.stderr[-2000:]
    seen = json.loads(html.unescape(found[1]))
    assert seen["errors"] == []
    assert len(seen["lines"]) > 20
    lines = {"plain": timeline(plain.program.block, DEVICE), "recompute": timeline(step.program.block, DEVICE)}
    for where, line in seen["lines"].items():
        which, index = where.split()
        assert line == show_operator(lines[which].operators[int(index)])
    wanted = [
        max(b for _, b in live_profile(s.program.block, ALIGNMENT)) + s.figures.persistent_bytes for s in (plain, step)
    ]
    assert seen["peaks"] == wanted
