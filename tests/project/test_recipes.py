"""CITATION.cff, and the recipes for conda and Spack, say what setup.cfg says: version, dependencies, commands.

Neither conda-build nor Spack runs here: the files are read as these read them, as far as YAML, templates and Python go.
"""

from __future__ import annotations

import ast
import configparser
import re
from pathlib import Path
from typing import Any

import pytest

import recompute as rc

ROOT = Path(__file__).parents[2]
#: the extras that the recipes name
EXTRAS = ("cpu", "plan", "plot")
#: the names of distributions on conda-forge, where they differ
ON_CONDA = {"ortools": "ortools-python", "matplotlib": "matplotlib-base"}

pytestmark = pytest.mark.skipif(not (ROOT / "packaging").is_dir(), reason="a source distribution has no recipes")


def setup() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def lines(text: str) -> list[str]:
    """The lines of an option."""
    return [line.strip() for line in text.splitlines() if line.strip()]


def conda() -> dict[str, Any]:
    """The recipe, rendered as conda-build does."""
    yaml, jinja2 = pytest.importorskip("yaml"), pytest.importorskip("jinja2")
    text = (ROOT / "packaging" / "conda" / "meta.yaml").read_text()
    return yaml.safe_load(jinja2.Template(text).render(PYTHON="python"))


def test_the_conda_recipe_says_what_the_metadata_says() -> None:
    recipe, metadata = conda(), setup()
    assert recipe["package"] == {"name": metadata["metadata"]["name"], "version": rc.__version__}
    python = f"python {metadata['options']['python_requires']}"
    needs = {n.replace(">=", " >=", 1) for n in lines(metadata["options"]["install_requires"])}
    assert set(recipe["requirements"]["run"]) == {python, *needs}
    assert python in recipe["requirements"]["host"]
    extras = [r for e in EXTRAS for r in lines(metadata["options.extras_require"][e])]
    names = {ON_CONDA.get(name, name) + f" >={least}" for name, least in (r.split(">=") for r in extras)}
    assert set(recipe["requirements"]["run_constrained"]) == names
    assert recipe["build"]["entry_points"] == lines(metadata["options.entry_points"]["console_scripts"])
    assert recipe["about"]["license"] == metadata["metadata"]["license"]
    assert recipe["about"]["summary"] == metadata["metadata"]["description"]


def test_the_spack_recipe_says_what_the_metadata_says() -> None:
    tree = ast.parse((ROOT / "packaging" / "spack" / "package.py").read_text())
    (recipe,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
    assert recipe.name == "PyOnnxRecompute" and ast.get_docstring(recipe) == f"{setup()['metadata']['description']}."
    calls: dict[str, list[str]] = {}
    for node in recipe.body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name):
            calls.setdefault(node.value.func.id, []).append(ast.literal_eval(node.value.args[0]))
    assert calls["version"] == [rc.__version__] and calls["license"] == [setup()["metadata"]["license"]]
    needs = [re.fullmatch(r"([\w-]+)>=([\d.]+)", r) for r in lines(setup()["options"]["install_requires"])]
    wanted = {f"py-{m[1].replace('_', '-')}@{m[2]}:" for m in needs if m is not None}
    assert len(wanted) == len(needs) and wanted < set(calls["depends_on"])
    rest = set(calls["depends_on"]) - wanted
    assert rest == {"python@3.10:", "py-setuptools@68:", "py-numba@0.60:", "py-matplotlib@3.8:"}


def test_the_citation_says_what_the_metadata_says() -> None:
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0" and citation["message"] and citation["authors"]
    assert citation["version"] == rc.__version__ and citation["license"] == setup()["metadata"]["license"]
    assert citation["title"].startswith(f"{setup()['metadata']['name']}: ")
    for reference in citation["references"]:
        assert {"type", "title", "authors", "year"} <= reference.keys()
        assert all({"family-names", "given-names"} == set(author) for author in reference["authors"])
