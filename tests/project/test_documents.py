"""What documents show as ours is what we have: definitions, lists of passes, folders, links."""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import pkgutil
import re
from pathlib import Path

import pytest

import recompute
import recompute.passes
import recompute.training
from recompute.passes import step_passes
from recompute.passes.base import PASSES
from recompute.planning.step import target_of

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
DECISIONS = sorted((DOCS / "decisions").glob("[0-9]*.md"))
DESIGN = (DOCS / "design.md").read_text()
SHOWN = re.compile(r"<!-- source: (\S+) (\w+) -->\n```python\n(.*?)```", re.DOTALL)
BLOCK = re.compile(r"```(python|text)\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\]\(([^()\s#:]+)(?:#[^()\s]*)?\)")
SOURCE = re.compile(r"`((?:recompute|passes|runtime|models|tests|benchmarks)/[\w/]+(?:\.py|/))`")


@pytest.mark.parametrize(
    ("page", "path", "name", "text"),
    [(p.name, *found) for p in PAGES for found in SHOWN.findall(p.read_text())],
    ids=lambda v: v if isinstance(v, str) and "\n" not in v else "",
)
def test_a_shown_definition_is_the_one_in_its_file(page: str, path: str, name: str, text: str) -> None:
    source = (DOCS.parent / path).read_text()
    node = next(n for n in ast.parse(source).body if getattr(n, "name", None) == name)
    assert isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.end_lineno is not None
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    assert "\n".join(source.splitlines()[first - 1 : node.end_lineno]) + "\n" == text, (
        f"{page} shows {name} differently"
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_and_source_files_are_there(page: Path) -> None:
    if not (ROOT / "passes").is_dir():
        pytest.skip("a source distribution has no links to its packages, and no benchmarks")
    text = re.sub(r"^```.*?^```$|<!--.*?-->", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    missing = [target for target in LINK.findall(text) if not (page.parent / target).exists()]
    missing += [path for path in SOURCE.findall(text) if not (ROOT / path).exists()]
    assert not missing


def test_the_index_has_every_decision_with_its_title() -> None:
    index = re.findall(r"^- \[(\d+)\]\((\S+)\) (.*)$", (DOCS / "decisions" / "README.md").read_text(), re.MULTILINE)
    pages = [(p.name[:3], p.name, p.read_text().partition("\n")[0].removeprefix("# ")) for p in DECISIONS]
    assert sorted(index) == pages
    assert [int(number) for number, *_ in pages] == list(range(1, len(pages) + 1))


@pytest.mark.parametrize("page", DECISIONS, ids=lambda p: p.stem)
def test_a_decision_has_a_context_and_consequences(page: Path) -> None:
    headings = re.findall(r"^#+ .*", page.read_text(), re.MULTILINE)
    assert headings[1:] == ["## Context", "## Decision", "## Consequences"]


def test_the_architecture_shows_the_passes_that_are_listed() -> None:
    (_, example), (_, made), (_, compiled) = BLOCK.findall(DESIGN)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(example, "design.md", "exec"), {})
    assert made == printed.getvalue()
    if target_of(None).kernels:
        assert compiled.split() == [p.name for p in step_passes(target_of(None))]


def test_the_architecture_names_every_pass() -> None:
    for package in (recompute.passes, recompute.training):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    ours = {name for name, cls in PASSES.items() if cls.__module__.startswith("recompute.")}
    table, rest = DESIGN.partition("| phase | passes | when |")[2].split("\n\n", 1)
    column = " ".join(row.split("|")[2] for row in table.splitlines()[2:])
    column += rest.split("\n\n", 1)[0]
    assert set(re.findall(r"`([\w-]+)`", column)) == ours


def test_the_architecture_names_every_folder() -> None:
    table = DESIGN.partition("| folder | contents |")[2].split("\n\n", 1)[0]
    rows = [[re.findall(r"`([^`]+)`", cell) for cell in row.split("|")[1:4:2]] for row in table.splitlines()[2:]]
    folders = {p.name for p in (ROOT / "recompute").iterdir() if (p / "__init__.py").exists()}
    named = {name.removeprefix("recompute/").split("/")[0] for folder, _ in rows for name in folder}
    assert named == folders | {"tests"}
    for (first, *_), files in rows:
        if "{" not in first:
            assert all((ROOT / first / file).exists() for file in files), (first, files)
