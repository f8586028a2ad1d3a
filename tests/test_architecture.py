"""The shape of the house: imports point one way, nothing heavy is imported early, the version is one."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import recompute

ROOT = Path(recompute.__file__).parent
HEAVY = ("onnxruntime", "rich", "cupy", "numba", "matplotlib", "ortools", "safetensors", "onnx.reference")

#: layer of each module, the lowest first; a module may import from lower layers, and from its own
LAYERS = [
    {"types", "errors", "files", "cache", "room", "budgets", "patterns"},
    {"threads", "contexts", "element"},
    {"op", "kernels"},
    {"ir", "formulas"},
    {"text"},
    {"verify_addresses", "verify_copies"},
    {"verify"},
    {"builder", "ops"},
    {"program"},
    {"passes"},
    {"runtime"},
    {
        "onnx_convert",
        "onnx_graphs",
        "onnx_import_state",
        "onnx_tensors",
        "onnx_unrolled",
        "onnx_costs",
        "onnx_inline",
        "onnx_limits",
        "onnx_model",
        "onnx_node",
        "onnx_ranks",
        "onnx_regex",
        "onnx_schema",
        "onnx_text",
        "onnx_trips",
        "onnx_fold",
        "onnx_function",
        "onnx_body",
        "onnx_control",
        "onnx_loops",
        "onnx_subgraph",
        "onnx_import",
        "onnx_reference",
        "initialize",
        "cost",
        "state",
    },
    {"profile", "planning", "onnx_backend"},
    {"losses", "lr", "clip", "amp", "optimizers", "optimizer_base", "fleet", "models", "testing", "data"},
    {"onnx_export", "onnx_function_builder", "onnx_compiled"},
    {"compiler", "show_table", "timeline"},
    {"steps", "show_memory"},
    {"estimates", "biggest_batch", "compare"},
    {"report", "report_page", "plot", "trace", "snapshot", "pictures", "operator_times"},
    {"cli_ending", "cli_values"},
    {"cli_costs", "cli_outputs"},
    {"check", "cli_memory", "cli_plan"},
    {"cli_arguments"},
    {"cli"},
]


def folder_of(package: str) -> Path:
    """passes, runtime and models stand beside the package's folder in a checkout, inside it when installed."""
    inside = ROOT / package
    return inside if inside.is_dir() else ROOT.parent / package


def modules() -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {p.stem: [p] for p in ROOT.glob("*.py") if p.stem != "__init__"}
    for package in ("ops", "passes", "runtime", "models"):
        found[package] = sorted(folder_of(package).rglob("*.py"))
    return found


def imported_at_load(path: Path, package: bool) -> set[str]:
    """Modules of ours that a file imports when it is loaded (not inside functions, not for type checkers)."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            inside = package and node.level == 1
            if not inside:
                parts = (node.module or "").split(".")
                names.update([parts[0]] if parts[0] else [a.name for a in node.names])
    return names


def test_imports_point_one_way() -> None:
    layer = {name: i for i, names in enumerate(LAYERS) for name in names}
    wrong = []
    for name, paths in modules().items():
        assert name in layer, f"module '{name}' has no layer: add it to LAYERS"
        for path in paths:
            for used in imported_at_load(path, name in ("ops", "passes", "runtime", "models")):
                if used in layer and used != name and layer[used] > layer[name]:
                    wrong.append(f"{name} imports {used} ({path.name})")
    assert not wrong


def test_import_is_light() -> None:
    code = "import sys, recompute; print([m for m in sys.argv[1:] if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code, *HEAVY, "onnx"], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("name", [n for n in recompute.__all__ if not n.startswith("__")])
def test_everything_promised_is_there(name: str) -> None:
    assert getattr(recompute, name) is not None


def test_files_stay_readable() -> None:
    long = [f"{p.name}: {n}" for ps in modules().values() for p in ps if (n := len(p.read_text().splitlines())) > 500]
    assert not long, "files over 500 lines: split them"
