"""What the package says about itself: one version, names that are exported, files that are found by being there."""

from __future__ import annotations

import configparser
import inspect
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

import recompute as rc

ROOT = Path(__file__).parents[2]
PUBLIC = (
    "amp",
    "clip",
    "cost",
    "data",
    "fleet",
    "losses",
    "lr",
    "metrics",
    "optimizers",
    "profile",
    "state",
    "testing",
)


def setup() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def test_the_version_is_written_once() -> None:
    assert setup()["metadata"]["version"] == "attr: recompute.version.__version__"
    assert re.fullmatch(r"\d+\.\d+\.\d+", rc.__version__)
    written = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "setup.cfg", ROOT / "pyproject.toml", *(ROOT / "recompute").rglob("*.py"))
        if re.search(rf"\bversion\w*\s*=\s*[\"']?{re.escape(rc.__version__)}\b", path.read_text(), re.IGNORECASE)
        or f'"{rc.__version__}"' in path.read_text()
    ]
    assert written == ["recompute/version.py"]


def test_the_changelog_has_the_version() -> None:
    assert re.search(rf"^## \[{re.escape(rc.__version__)}\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_the_license_is_what_the_metadata_says() -> None:
    assert setup()["metadata"]["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text


def folder_of_package() -> dict[str, Path]:
    """Every folder of the package with Python files in it, by its dotted name."""
    walk = os.walk(ROOT / "recompute", followlinks=True)
    found = {Path(at) for at, _, names in walk if any(n.endswith(".py") for n in names)}
    return {".".join(path.relative_to(ROOT).parts): path for path in found}


def test_every_package_of_the_tree_is_installed() -> None:
    assert setup()["options"]["packages"] == "find:"
    assert all((path / "__init__.py").exists() for path in folder_of_package().values())
    assert {"recompute.passes.cleanup", "recompute.runtime.cpu", "recompute.models"} <= set(folder_of_package())


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The packages' folders of this checkout in another one."""
    for name in ("recompute", "passes", "runtime", "models"):
        if (ROOT / name).is_dir():  # a source distribution has them in recompute/ alone
            skip = shutil.ignore_patterns("__pycache__", "*.onnx")
            shutil.copytree(ROOT / name, tmp_path / "clone" / name, symlinks=True, ignore=skip)
    return tmp_path / "clone"


def imported(folder: Path) -> subprocess.CompletedProcess[str]:
    """Where `import recompute` finds the packages, in a process that is started in a folder."""
    names = ", ".join(f"recompute{name}" for name in ("", ".passes", ".passes.cleanup", ".runtime", ".models"))
    code = f"import {names}\nprint(*(m.__file__ for m in ({names})), sep='\\n')"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, env=environment)


def test_a_clone_imports_itself_beside_an_installed_checkout(clone: Path) -> None:
    for top, folder in ((ROOT, clone.parent), (clone, clone)):
        done = imported(folder)
        assert done.returncode == 0, done.stderr
        paths = [Path(line) for line in done.stdout.splitlines()]
        assert len(paths) == 5 and all(path.is_relative_to(top / "recompute") for path in paths), paths


def test_a_checkout_without_links_is_named(clone: Path) -> None:
    link = clone / "recompute" / "passes"
    if not link.is_symlink():
        pytest.skip("not a checkout of Git: recompute/passes is a folder")
    link.unlink()
    link.write_text("../passes")  # as Git does on Windows
    done = imported(clone)
    assert done.returncode == 1 and "core.symlinks=true" in done.stderr.splitlines()[-1], done.stderr


def test_data_files_of_packages_are_listed() -> None:
    data = {k: [g.strip() for g in v.split(",")] for k, v in setup()["options.package_data"].items()}
    for package, path in folder_of_package().items():
        found = {p.name for p in path.iterdir() if p.is_file() and p.suffix not in (".py", ".md", ".pyc")}
        listed = {p.name for pattern in data.get(package, ()) for p in path.glob(pattern)}
        assert found == listed, f"package_data of {package} in setup.cfg"


def test_star_import_gives_what_all_promises() -> None:
    code = "from recompute import *\nimport recompute\nprint(*sorted(set(recompute.__all__) - set(globals())))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("name", PUBLIC)
def test_public_modules_say_what_they_export(name: str) -> None:
    module = getattr(rc, name)
    assert len(set(module.__all__)) == len(module.__all__)
    for exported in module.__all__:
        thing = getattr(module, exported)
        assert not exported.startswith("_")
        if isinstance(thing, type) or callable(thing):
            assert thing.__doc__ and thing.__doc__.strip(), f"{name}.{exported} has no docstring"
    own = {
        k
        for k, v in vars(module).items()
        if not k.startswith("_") and callable(v) and getattr(v, "__module__", None) == module.__name__
    }
    assert own <= set(module.__all__), f"recompute.{name}: neither exported nor private: {own - set(module.__all__)}"


def undocumented(exported: object) -> list[str]:
    """The object and what is public in it, as far as it has no docstring; a method may have that of its base."""
    name = getattr(exported, "__name__", "")
    inside = vars(exported).items() if inspect.isclass(exported) else ()
    found = []
    for part, thing in [("", exported), *(pair for pair in inside if not pair[0].startswith("_"))]:
        thing = thing.fget if isinstance(thing, property) else getattr(thing, "__func__", thing)
        if inspect.isroutine(thing) or inspect.isclass(thing):
            inherited = (
                inspect.getdoc(getattr(exported, part)) if part and not inspect.isclass(thing) else thing.__doc__
            )
            text = vars(thing).get("__doc__") if inspect.isclass(thing) else inherited
            if not (text or "").strip() or text.startswith(f"{name}("):  # which a dataclass writes where there is none
                found.append(f"{name}.{part}".rstrip("."))
    return found


def test_every_public_name_has_a_docstring() -> None:
    modules = [rc, *(m for n in rc.__all__ if isinstance(m := getattr(rc, n), types.ModuleType))]
    assert not {name for m in modules for n in m.__all__ for name in undocumented(getattr(m, n))}


def test_a_missing_docstring_is_found() -> None:
    class Some:
        """Some."""

        def told(self) -> None:
            """Told."""

        def untold(self) -> None:
            pass

    assert undocumented(Some) == ["Some.untold"] and undocumented(lambda: None) == ["<lambda>"]


@pytest.mark.parametrize(
    "page",
    ["README.md", "CONTRIBUTING.md", *(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))],
)
def test_names_of_the_api_in_documents_are_there(page: str) -> None:
    for path in sorted(set(re.findall(r"\brc((?:\.[A-Za-z_]\w*)+)", (ROOT / page).read_text()))):
        thing: object = rc
        for part in path.split(".")[1:]:
            thing = getattr(thing, part)


def test_one_version_of_pytorch_is_declared_refused_and_documented() -> None:
    (least,) = re.findall(r"torch>=([\d.]+)", setup()["options.extras_require"]["torch"])
    for path in ("README.md", "docs/pytorch.md", "docs/torch_compile.md", "recompute/torch/plan/policy.py"):
        assert re.search(rf"{re.escape(least)} or\s+later", (ROOT / path).read_text()), path
