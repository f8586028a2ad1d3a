"""The examples of CONTRIBUTING.md, each put where it says in a copy of the tree, do what the page says they do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
FILES = dict(re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", PAGE, re.DOTALL))
RUN = dict(re.findall(r"<!-- run: (\w+) -->\n```python\n(.*?)```", PAGE, re.DOTALL))

#: runs each example in a namespace of its own; prints what went wrong with each
RUNNER = """
import json, sys, traceback
import recompute
from recompute.runtime.cpu.device import native
from recompute.runtime.cuda.device import emulator
assert recompute.__file__.startswith(sys.argv[1]), f"{recompute.__file__} is not the copy"
found = {}
for name, code in json.load(sys.stdin).items():
    why = native.unavailable() if name in ("family", "rows") else ""
    if name == "cuda" and not emulator.compiler():
        why = "the emulated device needs a C++ compiler"
    if why:
        found[name] = "skip: " + why
        continue
    try:
        exec(compile(code, name, "exec"), {})
        found[name] = ""
    except BaseException:
        found[name] = traceback.format_exc()
print("\\n" + json.dumps(found))
"""

#: what `pytest tests/language/test_golden.py` asks of a file, without its search for files
GOLDEN = """
from pathlib import Path
import recompute as rc
line, _, rest = Path({path!r}).read_text().partition("\\n")
before, _, after = rest.partition("\\n---\\n")
block = rc.run_passes(rc.verify(rc.parse(before)), rc.pipeline(line.removeprefix("; pipeline: ")))
assert rc.show(block) == after, rc.show(block)
"""


def mirrored(folder: Path, copy: Path, new: dict[str, str]) -> None:
    """Links to what is in a folder; folders that get new files, named by their paths in it, are made anew."""
    copy.mkdir()
    for entry in folder.iterdir():
        below = {p.partition("/")[2]: text for p, text in new.items() if p.startswith(entry.name + "/")}
        if below:
            mirrored(entry, copy / entry.name, below)
        else:
            (copy / entry.name).symlink_to(entry)
    for name, text in new.items():
        if "/" not in name:
            assert not (copy / name).exists(), f"{name}: there is such a file already"
            (copy / name).write_text(text)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What went wrong with each example; "" where nothing did."""
    top = tmp_path_factory.mktemp("contributing")
    new = {p.removeprefix("recompute/"): text for p, text in FILES.items() if not p.startswith("tests/")}
    mirrored(ROOT / "recompute", top / "recompute", new)
    examples = dict(RUN)
    for path, text in FILES.items():
        if path.endswith(".rir"):
            (top / Path(path).name).write_text(text)
            examples["golden"] = GOLDEN.format(path=str(top / Path(path).name))
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, str(top)],
        input=json.dumps(examples),
        env=os.environ | {"PYTHONPATH": str(top), "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=top,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", [*RUN, "golden"])
def test_example_works_from_one_file(name: str, outcomes: dict[str, str]) -> None:
    if outcomes[name].startswith("skip: "):
        pytest.skip(outcomes[name])
    assert outcomes[name] == ""


def test_every_kind_has_one_file_and_one_check() -> None:
    assert set(RUN) == {"operator", "rows", "pass", "pattern", "planner", "network", "family", "cuda", "wrapper"}
    folders = sorted(str(Path(path).parent) for path in FILES)
    assert folders == [
        "models",
        "passes/cleanup",
        "passes/patterns",
        "passes/planners/methods",
        "recompute/ops/elementwise",
        "recompute/ops/reduction",
        "recompute/training",
        "runtime/shared/kernels",
        "tests/golden",
    ]


def test_commands_and_files_that_are_named_exist() -> None:
    text = re.sub(r"```.*?```|<!--.*?-->", "", PAGE, flags=re.DOTALL)
    for path in re.findall(r"(?:tests|benchmarks|docs|models|\.ci)/[\w./]*\w", text):
        assert (ROOT / path).exists() or list(ROOT.glob(f"{path}*")) or path in FILES, path
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / target).exists(), target
