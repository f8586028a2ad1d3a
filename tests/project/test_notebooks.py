"""The notebooks run from top to bottom, and are kept as they were run."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
NOTEBOOKS = sorted(p.name for p in FOLDER.glob("*.ipynb"))


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_what_a_notebook_shows_is_kept(name: str) -> None:
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(FOLDER / name, as_version=4)
    nbformat.validate(notebook)
    cells = [c for c in notebook.cells if c.cell_type == "code"]
    assert [c.execution_count for c in cells] == [*range(1, len(cells) + 1)]
    outputs = [o for c in cells for o in c.outputs]
    assert not any(o.output_type == "error" for o in outputs)
    assert any("<svg" in o.data.get("text/html", "") for o in outputs if o.output_type == "execute_result")


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs(name: str, tmp_path: Path) -> None:
    client, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    if name == "pytorch.ipynb" and importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch")
    shutil.copytree(FOLDER.parent, tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    notebook = nbformat.read(FOLDER / name, as_version=4)
    where = {"metadata": {"path": str(tmp_path / "examples" / "notebooks")}}
    client.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=where).execute()
