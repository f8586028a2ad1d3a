"""How the command ends: exit codes, signals, closed streams, files that are all there or none, printable text."""

from __future__ import annotations

import argparse
import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from test_cli import MLP, small_model

import recompute as rc
from recompute.cli import command as cli
from recompute.cli import ending as cli_ending
from recompute.cli import main
from recompute.errors import JobError, ModelError, UsageError, one_line, printable
from recompute.support import files

COMMAND = [sys.executable, "-m", "recompute.cli"]
#: the command, held up after its files are written and before they get their names
HELD = """
import sys, time
from recompute.cli import command as cli
def wait(job):
    print("ready", flush=True)
    time.sleep(60)
cli._Job.write_json = wait
sys.exit(cli.main(sys.argv[1:]))
"""


def run(*arguments: str, **options: object) -> subprocess.CompletedProcess:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=100, **options)  # type: ignore[call-overload]


# -- files ------------------------------------------------------------------------------------------------------------

OUTPUTS = ["-o", "--json", "--report", "--trace", "--snapshot", "--dump-ir", "--save-plan"]


def arguments_for(option: str, path: Path) -> list[str]:
    more = ["--strategy", "chen"] if option == "--save-plan" else []
    return [MLP, *more, option, str(path)]


@pytest.mark.parametrize("option", [*OUTPUTS, "--save-problem", "--pareto", "--plot", "--profile"])
def test_what_cannot_be_written_is_said_before_any_work(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if option == "--plot":
        pytest.importorskip("matplotlib")
    monkeypatch.setattr(cli._Job, "run", lambda self: pytest.fail("work was begun"))
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path and allowed(path, mode))
    ending = {"--plot": ".svg", "--pareto": ".svg"}.get(option, ".x")
    for path in (tmp_path / f"a{ending}", Path(MLP) / f"a{ending}", Path(f"/proc/no/a{ending}")):
        assert main(arguments_for(option, path)) == 2
        error = capsys.readouterr().err
        assert f"{option.replace('-o', '--output') if option == '-o' else option}: cannot write '{path}': " in error
        assert ".tmp" not in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_two_files_under_one_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([MLP, "--json", str(tmp_path / "a"), "--report", f"{tmp_path}/./a"]) == 2
    assert "--json and --report would both write" in capsys.readouterr().err


def test_a_failed_job_leaves_no_file_of_any_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last of all files fails: those written before are not there either, and old ones are as they were."""
    real = os.fsync
    (tmp_path / "1.json").write_text("old")
    arguments = [MLP, "--checkpoints", "fc_1"]
    for i, option in enumerate(OUTPUTS[:-1]):
        arguments += [option, str(tmp_path / f"{i}.json")]

    def fail(file: int) -> None:
        real(file)
        if b'"recompute"' in Path(f"/proc/self/fd/{file}").read_bytes() and b'"loss_reason"' in os.pread(file, 9999, 0):
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(os, "fsync", fail)
        assert main(arguments) == 1
    said = capsys.readouterr()
    assert f"'{tmp_path}/1.json': No space left on device" in said.err and "wrote" not in said.out
    assert [p.name for p in tmp_path.iterdir()] == ["1.json"] and (tmp_path / "1.json").read_text() == "old"
    assert main(arguments) == 0
    written = {"0.state.safetensors", *(f"{i}.json" for i in range(6))}
    assert {p.name for p in tmp_path.iterdir()} == written
    assert capsys.readouterr().out.count("wrote ") == 5


def test_texts_of_stages_are_all_there_or_none(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    folder = tmp_path / "ir"

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))

    # Python would replace its files of compiled modules by what the limit leaves of them
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    found = run(MLP, "--dump-ir", str(folder), preexec_fn=limit, env=env)
    assert found.returncode == 1 and "File too large" in found.stderr and ".tmp" not in found.stderr
    assert not folder.exists()


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_signals_end_the_job_and_leave_nothing(name: str, tmp_path: Path) -> None:
    number = getattr(signal, name)
    command = [sys.executable, "-c", HELD, MLP, "-q", "-o", str(tmp_path / "s.onnx"), "--dump-ir", str(tmp_path / "ir")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        assert list(tmp_path.glob(".s.onnx.*.tmp"))
        process.send_signal(number)
        assert process.wait(60) == 128 + number
        error = process.stderr.read()
    assert error == f"recompute-compile: {'interrupted' if name == 'SIGINT' else f'ended by {name}'}\n"
    assert not list(tmp_path.iterdir())


def test_handlers_are_set_while_the_command_runs_and_ignored_signals_stay_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[object] = []
    signals = [signal.SIGTERM, signal.SIGHUP]
    monkeypatch.setattr(cli, "_run", lambda args: seen.append([signal.getsignal(s) for s in signals]) or 0)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
    try:
        assert main([MLP]) == 0
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    (during,) = seen
    assert isinstance(during, list) and callable(during[0]) and during[1] is signal.SIG_IGN


# -- exit codes and streams -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (UsageError("no such thing"), 2, "error: no such thing"),
        (JobError("broken"), 1, "error: broken"),
        (MemoryError(), 1, "out of memory on this machine"),
        (RuntimeError("can't start new thread"), 1, "out of memory on this machine"),
        (ImportError("libx.so: failed to map segment from shared object"), 1, "out of memory on this machine"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 1, "out of memory on this machine"),
        (OSError(errno.ENOSPC, "No space left on device", "a.html"), 1, "error: 'a.html': No space left on device"),
        (KeyError("x"), 1, "this is a bug in the compiler (KeyError: 'x')"),
        (RecursionError("too deep"), 1, "this is a bug in the compiler (RecursionError: too deep)"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 1, ""),
    ],
)
def test_every_way_out_has_its_code_and_one_message(
    error: BaseException, code: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(cli, "_run", fail)
    assert main([MLP]) == code
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == bool(words) and "Traceback" not in said
    if isinstance(error, Exception) and words:
        assert main([MLP, "-v"]) == code
        assert "Traceback" in capsys.readouterr().err


def closed(*numbers: int) -> Callable[[], None]:
    def close() -> None:
        for n in numbers:
            os.close(n)

    return close


def test_closed_and_broken_streams(tmp_path: Path) -> None:
    """Closed, nobody at the other end, no room, or of another encoding: no traceback, and files hold their contents."""
    path = tmp_path / "a.json"
    found = run("--list-models", preexec_fn=closed(2))
    assert (found.returncode, found.stderr) == (0, "") and "resnet50 " in found.stdout
    found = run(MLP, "--json", "-", preexec_fn=closed(1))
    assert found.returncode == 2 and found.stderr == "recompute-compile: error: --json -: standard output is closed\n"
    found = run(MLP, "-q", "--json", str(path), preexec_fn=closed(0, 1, 2))
    assert found.returncode == 0 and json.loads(path.read_text())["plain"]
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe:
        found = subprocess.run([*COMMAND, "--list-models"], stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=100)
        assert (found.returncode, found.stderr) == (1, "")
        found = subprocess.run([*COMMAND, MLP, "--batch", "0"], stderr=pipe, timeout=100)
        assert found.returncode == 2
    found = run(MLP, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert found.returncode == 0 and "\\u2500" in found.stdout


# -- text -------------------------------------------------------------------------------------------------------------

NASTY = "a\x1b[31m\x07\0\u202e\u2066\n[/red]:smile:"


def test_text_is_printable_and_short() -> None:
    assert printable(NASTY) == "a\\x1b[31m\\x07\\x00\\u202e\\u2066\n[/red]:smile:"
    assert one_line("a\n\tb\U000e0001\udcff") == "a\\n\\tb\\U000e0001\\udcff"
    assert printable("Größe → 3 µs\n\tx") == "Größe → 3 µs\n\tx"
    cut = printable(f"node '{'a b' * 40_000}' (Relu): the model's types do not fit 'c'")
    assert cut.startswith("node 'a ba b") and "(120,002 characters)" in cut and len(cut) < 320
    assert cut.endswith("' (Relu): the model's types do not fit 'c'")
    names = ",".join(f"layer{i}.out" for i in range(500))  # to be pasted
    assert printable(f"--checkpoints {names}") == f"--checkpoints {names}"
    for error in (JobError("x y\n" * 10**5), ModelError("x" * 10**6), UsageError(f"no '{'x ' * 10**5}'")):
        assert len(str(error)) <= 8000 and str(type(error)(str(error))) == str(error)


def nasty_model(name: str) -> onnx.ModelProto:
    model = small_model()
    for node in model.graph.node:
        node.name = f"{name}{node.name}"
        node.output[0] = f"{name}{node.output[0]}"
    model.graph.node[1].input[0] = model.graph.node[0].output[0]
    model.graph.output[0].name = model.graph.node[1].output[0]
    return model


@pytest.mark.parametrize("name", [NASTY.replace("\0", ""), "n" * 100_000, "n " * 50_000], ids=["signs", "long", "wide"])
def test_names_of_a_file_reach_the_terminal_printable_and_short(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.onnx"
    model = nasty_model(name)
    path.write_bytes(model.SerializeToString())
    common = [str(path), "--loss", "mse"]
    for arguments in (["--list-checkpoints"], ["--estimate"], ["--checkpoints", model.graph.node[0].output[0]],
                      ["--run", "1", "--profile"], ["--checkpoints", "nope"], ["--loss", f"{name}nope"]):  # fmt: skip
        code = main([*common, *arguments])
        said = "".join(capsys.readouterr())
        assert code == (2 if arguments[-1].endswith("nope") else 0), said
        assert all(c.isprintable() or c in "\n\t" for c in said) and len(said) < 20_000, arguments
    model.graph.node[1].op_type = "NoSuchOp"
    path.write_bytes(model.SerializeToString())
    assert main(common) == 1
    said = capsys.readouterr().err
    assert all(c.isprintable() or c == "\n" for c in said) and len(said) < 3000 and "NoSuchOp" in said
    assert main([MLP, f"--{name}"]) == 2
    assert all(c.isprintable() or c in "\n" for c in capsys.readouterr().err)


def test_json_and_program_text_have_exact_names(tmp_path: Path) -> None:
    name = NASTY.replace("\0", "")
    path, out = tmp_path / "m.onnx", tmp_path / "m.json"
    path.write_bytes(nasty_model(name).SerializeToString())
    assert main([str(path), "--loss", "mse", "-q", "--checkpoints", f"{name}h".replace("[", "[[]"), "--json", str(out),
                 "--dump-ir", str(tmp_path / "ir")]) == 0  # fmt: skip
    assert json.loads(out.read_text())["checkpoints"] == [f"{name}h"]
    block = rc.parse(next((tmp_path / "ir").glob("*-step.rir")).read_text())
    assert any(v.name == f"{name}h" for op in block.operators for v in op.writes())


def test_warnings_are_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import warnings

    monkeypatch.setattr(cli, "_run", lambda args: warnings.warn("a folder\x1b is not used", stacklevel=1) or 0)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert main([MLP]) == 0 and main([MLP, "-q"]) == 0
    assert capsys.readouterr().err == "warning: a folder\\x1b is not used\n"
    assert not files._unfinished and cli_ending.Signalled(15).number == 15


CRAMPED = """
import resource
import numpy as np
from onnx import TensorProto
from recompute.exporter.function_builder import fill_tensor
x = np.zeros(1 << 26, np.float32)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (300 << 20), -1))
try:
    fill_tensor(TensorProto(), "x", x)
except MemoryError:
    print("said")
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_where_there_is_no_room_for_a_tensor_an_error_says_so() -> None:
    """Protobuf would end the process."""
    found = subprocess.run([sys.executable, "-c", CRAMPED], capture_output=True, text=True, timeout=100)
    assert (found.returncode, found.stdout) == (0, "said\n"), found.stderr


def test_networks_of_the_zoo_ask_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr("recompute.models.common.need_room", asked.append)
    model = rc.models.build("mlp4", batch=1)
    assert asked[-1] >= 2 * sum(len(t.raw_data) for t in model.graph.initializer) and len(asked) > 4
