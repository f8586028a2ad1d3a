"""The shape of the house: imports point one way, without circles; nothing heavy is imported early."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import pytest
from import_graph import ImportGraph

import recompute

ROOT = Path(recompute.__file__).parent
HEAVY = ("onnxruntime", "rich", "cupy", "numba", "matplotlib", "ortools", "safetensors", "onnx.reference")

#: rooms and single files of the package, the lowest first: each may import from those before it, and within itself
LAYERS = [
    {"errors", "version", "moved"},
    {"support", "budgets", "places"},
    {"language"},
    {"ops"},
    {"passes"},
    {"runtime", "importer", "models"},
    {"cost"},
    {"profile", "onnx_backend", "planning"},
    {"training", "testing"},
    {"exporter"},
    {"compiling"},
    {"report"},
    {"analysis"},
    {"cli"},
]


#: who may import by a computed name: the package's door, what loads folders of plug-ins, and modules that are not ours
BY_NAME = {
    "recompute",
    "recompute.importer.regex",
    "recompute.moved",
    "recompute.runtime.cpu.providers.blas",
    "recompute.support.plug_ins",
}


def folder_of(package: str) -> Path:
    """passes, runtime and models stand beside the package's folder in a checkout, inside it when installed."""
    inside = ROOT / package
    return inside if inside.is_dir() else ROOT.parent / package


@functools.cache
def graph() -> ImportGraph:
    """Every import of every file, whenever it takes place."""
    beside = {f"recompute.{p}": folder_of(p) for p in ("passes", "runtime", "models")}
    found = ImportGraph({"recompute": ROOT, **beside})
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


def test_files_stay_readable() -> None:
    files = graph().files.values()
    long = [f"{p.name}: {n}" for p in files if (n := len(p.read_text().splitlines())) > 500]
    assert not long, "files over 500 lines: split them"
