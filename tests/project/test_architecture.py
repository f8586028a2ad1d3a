"""The shape of the house: imports point one way, without circles; nothing heavy is imported early."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest
from import_graph import ImportGraph

import recompute

ROOT = Path(recompute.__file__).parent
HEAVY = ("onnxruntime", "rich", "cupy", "numba", "matplotlib", "ortools", "safetensors", "onnx.reference")
HEAVY += ("PIL", "pyarrow", "tokenizers", "mpi4py")

#: rooms and single files of the package, the lowest first: each may import from those before it, and within itself
LAYERS = [
    {"errors", "version"},
    {"support", "budgets", "places", "efficiency"},
    {"language"},
    {"boundary", "devices"},
    {"ops"},
    {"communication"},
    {"data", "proof"},
    {"passes"},
    {"runtime", "importer", "models"},
    {"cost"},
    {"profile", "planning", "metrics"},
    {"training", "testing"},
    {"torch", "exporter", "jax"},
    {"compiling", "compat"},
    {"trainer", "tuning"},
    {"report"},
    {"analysis"},
    {"cli", "launch"},
]


#: who may import by a computed name: the package's door, what loads folders of plug-ins, and modules that are not ours
BY_NAME = {
    "recompute",
    "recompute.errors",
    "recompute.runtime.cpu.providers.blas",
    "recompute.support.plug_ins",
}


@functools.cache
def graph() -> ImportGraph:
    """Every import of every file, whenever it takes place."""
    found = ImportGraph({"recompute": ROOT})
    found.imports["recompute.ops"] = {n for n in found.files if n.startswith("recompute.ops.")}  # imports its folder
    return found


def short(name: str) -> str:
    return name.removeprefix("recompute.")


def test_no_circles() -> None:
    found = [sorted(short(name) for name in circle) for circle in graph().circles()]
    assert not found, f"files that import one another: {found}"


def test_folders_have_no_circles() -> None:
    apart = {"", ".passes", ".passes.planners", ".runtime", ".runtime.cpu", ".runtime.cuda", ".ops"}
    found = graph().by_folder({f"recompute{name}" for name in apart}).circles()
    assert not found, f"folders whose files import one another's: {found}"


def test_imports_point_one_way() -> None:
    layer = {name: i for i, names in enumerate(LAYERS) for name in names}
    wrong = []
    for name, imported in graph().imports.items():
        own = short(name).split(".")[0]
        if name == "recompute":
            continue
        assert own in layer, f"module '{own}' has no layer: add it to LAYERS"
        for used in sorted(imported):
            other = short(used).split(".")[0]
            assert used != "recompute", f"{name} imports the package's door, which stands above all"
            if own != other and layer[other] >= layer[own]:
                wrong.append(f"{name} imports {used}")
    assert not wrong


def test_the_page_has_the_layers() -> None:
    page = (Path(__file__).parents[2] / "docs" / "design.md").read_text()
    line = page.partition("Each layer imports only layers before it: ")[2].partition(".")[0]
    shown = [set(names.split(", ")) for names in " ".join(line.split()).split(" → ")]
    layers = iter(LAYERS)
    assert all(any(names <= layer for layer in layers) for names in shown), shown


def test_imports_by_name_are_for_plug_ins() -> None:
    assert graph().calling("import_module") == BY_NAME
    assert not graph().calling("__import__")


@pytest.mark.parametrize(
    "back",
    [
        "from . import a",
        "from .a import x",
        "from p.a import x",
        "import p.a",
        "def f():\n    from .a import x",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .a import X",
        "from .q import x",  # q has it from a
    ],
)
def test_circles_are_seen(back: str, tmp_path: Path) -> None:
    (tmp_path / "q").mkdir()
    files = {
        "__init__": "",
        "a": "from .b import y",
        "b": "from .c import z",
        "c": back,
        "q/__init__": "from ..a import x",
    }
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text + "\n")
    assert ImportGraph({"p": tmp_path}).circles() == [{"p.a", "p.b", "p.c"}]
    (tmp_path / "c.py").write_text("import a\n")  # another package's
    assert ImportGraph({"p": tmp_path}).circles() == []


def test_import_is_light() -> None:
    code = "import sys, recompute; print([m for m in sys.argv[1:] if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code, *HEAVY, "onnx"], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("name", [n for n in recompute.__all__ if not n.startswith("__")])
def test_everything_promised_is_there(name: str) -> None:
    assert getattr(recompute, name) is not None


def undocumented(tree: ast.Module, bases: dict[str, list[str]], documented: set[tuple[str, str]]) -> list[str]:
    """Public classes, functions and methods without docstrings; a method may have its base's."""

    def inherits(cls: str, method: str, seen: frozenset[str] = frozenset()) -> bool:
        others = [b for b in bases.get(cls, ()) if b not in seen]  # classes of one name stand for one another here
        return any((b, method) in documented or inherits(b, method, seen | {cls, b}) for b in others)

    found = []
    for node in tree.body:
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef)) or node.name.startswith("_"):
            continue
        if not ast.get_docstring(node):
            found.append(node.name)
        for part in node.body if isinstance(node, ast.ClassDef) else ():
            setter = isinstance(part, ast.FunctionDef) and any(
                isinstance(d, ast.Attribute) and d.attr == "setter" for d in part.decorator_list
            )
            if not isinstance(part, ast.FunctionDef) or part.name.startswith("_") or setter:
                continue
            if not ast.get_docstring(part) and not inherits(node.name, part.name):
                found.append(f"{node.name}.{part.name}")
    return found


def test_public_names_have_docstrings() -> None:
    trees = graph().trees
    bases: dict[str, list[str]] = {}
    documented: set[tuple[str, str]] = set()
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bases.setdefault(node.name, []).extend(ast.unparse(b).rpartition(".")[2] for b in node.bases)
                methods = [m for m in node.body if isinstance(m, ast.FunctionDef)]
                documented.update((node.name, m.name) for m in methods if ast.get_docstring(m))
    missing = [f"{n}: {what}" for n, tree in trees.items() for what in undocumented(tree, bases, documented)]
    missing += [f"{name}: the module" for name, tree in trees.items() if not ast.get_docstring(tree)]
    assert not missing, missing


def test_docstrings_begin_with_the_thing() -> None:
    """No fragments that refer to something unsaid: "Of an element.", "As the class says"."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.Module)
    wrong = [
        f"{name}: {said.splitlines()[0]}"
        for name, tree in graph().trees.items()
        for node in ast.walk(tree)
        if isinstance(node, kinds) and (said := ast.get_docstring(node)) and said.startswith(("Of ", "As ", "That "))
    ]
    assert not wrong, wrong


def test_files_stay_readable() -> None:
    files = graph().files.values()
    long = [f"{p.name}: {n}" for p in files if (n := len(p.read_text().splitlines())) > 450]
    assert not long, "files over 450 lines: split them"


def test_functions_stay_readable() -> None:
    """At most 50 lines a function, and 10 parameters where it is public."""
    wrong = []
    for name, tree in graph().trees.items():
        for f in ast.walk(tree):
            if isinstance(f, ast.FunctionDef):
                a = f.args
                parameters = [p for p in (*a.posonlyargs, *a.args, *a.kwonlyargs) if p.arg not in ("self", "cls")]
                if len(parameters) > 10 and not f.name.startswith("_"):
                    wrong.append(f"{name}.{f.name}: {len(parameters)} parameters")
                if (lines := (f.end_lineno or 0) - f.lineno + 1) > 50:
                    wrong.append(f"{name}.{f.name}: {lines} lines")
    assert not wrong, wrong
