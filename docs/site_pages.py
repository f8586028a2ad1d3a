"""Pages of the site that are not files of docs/: the repository's own pages, and the API from the docstrings.

A hook of mkdocs (see mkdocs.yml).  What the API's pages list comes from `__all__` of the installed package, so that a
name that is exported is documented, wherever its definition lies.
"""

from __future__ import annotations

import atexit
import inspect
import logging
import os
import re
import shutil
import tempfile
import types
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File

import recompute

log = logging.getLogger("mkdocs.site_pages")
ROOT = Path(__file__).resolve().parents[1]
#: pages that lie elsewhere in the repository → their names on the site
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "models/README.md": "zoo.md",
}
MODULES = sorted(n for n in recompute.__all__ if isinstance(getattr(recompute, n), types.ModuleType))
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^()\s]+)\)")


@event_priority(100)
def on_config(config: Any) -> Any:
    """A copy of the package as it is installed, without links."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__", "*.onnx")
    shutil.copytree(recompute.__path__[0], folder / "recompute", ignore=ignored)
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [str(folder)]
    for section in config.nav:
        if "API" in section:
            section["API"] += [{f"recompute.{name}": f"api/{name}.md"} for name in MODULES]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages."""
    made = {site: (ROOT / path).read_text(encoding="utf-8") for path, site in PAGES.items()}
    made["api/recompute.md"] = _package_page()
    made |= {f"api/{name}.md": _module_page(name) for name in MODULES}
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links between files of the repository become links between pages; other files are named, as they are no pages."""
    site = page.file.src_uri
    source = next((path for path, name in PAGES.items() if name == site), f"docs/{site}")
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE)  # code stays as it is
    return "".join(part if i % 2 else LINK.sub(lambda m: _link(m, source, site), part) for i, part in enumerate(parts))


def _link(found: re.Match[str], source: str, site: str) -> str:
    picture, text, target = found.groups()
    path, sign, anchor = target.partition("#")
    if ":" in path or not path or site.startswith("api/"):
        return found[0]
    there = os.path.normpath(os.path.join(os.path.dirname(source), path))
    name = PAGES.get(there) or (there.removeprefix("docs/") if there.startswith("docs/") else None)
    if not (ROOT / there).exists():
        log.warning(f"{source}: there is no '{path}'")
    if name is None:
        return text if text.startswith("`") or text == there else f"{text} (`{there}`)"
    return f"{picture}[{text}]({os.path.relpath(name, os.path.dirname(site) or '.')}{sign}{anchor})"


def _path(module: types.ModuleType, name: str) -> str:
    """Where the object is defined, which is where its docstring can be read without running anything."""
    thing = getattr(module, name)
    if inspect.isclass(thing) or inspect.isfunction(thing):
        return f"{thing.__module__}.{thing.__qualname__}"
    return f"{module.__name__}.{name}"


def _exported(module: types.ModuleType) -> list[str]:
    """Names that have a section: no modules, and no constants without a docstring of their own."""
    return [n for n in module.__all__ if inspect.isclass(t := getattr(module, n)) or inspect.isroutine(t)]


def _constants(module: types.ModuleType) -> list[str]:
    """Exported constants, with the comment `#:` above their definition."""
    rows = []
    text = inspect.getsource(module)
    for name in module.__all__:
        if name in _exported(module) or isinstance(getattr(module, name), types.ModuleType):
            continue
        found = re.search(rf"((?:^#:.*\n)+){re.escape(name)}\b", text, re.MULTILINE)
        about = " ".join(line[2:].strip() for line in found[1].splitlines()) if found else ""
        rows.append(f"- `{name}`: {about}" if about else f"- `{name}`")
    return rows


def _module_page(name: str) -> str:
    module = getattr(recompute, name)
    parts = [f"# recompute.{name}", inspect.cleandoc(module.__doc__ or "")]
    if rows := _constants(module):
        parts += ["\n".join(["Constants:", "", *rows])]
    parts += [f"::: {_path(module, n)}" for n in _exported(module)]
    return "\n\n".join(parts) + "\n"


def _package_page() -> str:
    elsewhere: dict[str, str] = {}
    for name in MODULES:
        module = getattr(recompute, name)
        elsewhere |= {_path(module, n): name for n in _exported(module)}
    rows, here = [], []
    for name in sorted(_exported(recompute), key=str.lower):
        path = _path(recompute, name)
        summary = inspect.cleandoc(getattr(recompute, name).__doc__ or "").split("\n\n")[0].replace("\n", " ")
        module = elsewhere.get(path)
        page = f"{module}.md" if module else ""
        rows.append(f"| [`{name}`]({page}#{path}) | {summary.replace('|', '&#124;')} |")
        if not module:
            here.append(f"::: {path}")
    modules = [
        f"| [`recompute.{n}`]({n}.md) | {(getattr(recompute, n).__doc__ or '').splitlines()[0]} |" for n in MODULES
    ]
    top = ["# recompute", inspect.cleandoc(recompute.__doc__ or "")]
    tables = ["| name | |\n|---|---|\n" + "\n".join(rows), "| module | |\n|---|---|\n" + "\n".join(modules)]
    return "\n\n".join([*top, *tables, *here]) + "\n"
