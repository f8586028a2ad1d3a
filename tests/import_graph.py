"""What each file of the packages imports: when it is loaded, later inside functions, and for type checkers."""

from __future__ import annotations

import ast
import copy
import os
from collections.abc import Iterable, Mapping
from pathlib import Path


class ImportGraph:
    """Files by module name, and the files that each one imports.

    A name that a package's `__init__` has from elsewhere counts as an import of the file that defines it, so that no
    circle hides behind re-exports.  `folders`: package → its folder; modules of other packages are passed over.
    """

    def __init__(self, folders: Mapping[str, Path]) -> None:
        self.files: dict[str, Path] = {}
        for package, folder in folders.items():
            walk = os.walk(folder, followlinks=True)  # recompute/passes is a link
            for path in sorted(Path(at, name) for at, _, names in walk for name in names if name.endswith(".py")):
                parts = path.relative_to(folder).with_suffix("").parts
                self.files[".".join((package, *(p for p in parts if p != "__init__")))] = path
        self._imports: dict[str, list[ast.Import | ast.ImportFrom]] = {}
        #: names of functions that each file calls
        self.calls: dict[str, set[str]] = {}
        self.trees = {name: ast.parse(path.read_text()) for name, path in self.files.items()}
        for name, tree in self.trees.items():
            nodes = list(ast.walk(tree))
            self._imports[name] = [n for n in nodes if isinstance(n, (ast.Import, ast.ImportFrom))]
            self.calls[name] = {_called(n.func) for n in nodes if isinstance(n, ast.Call)}
        self.imports = {name: self._imported(name) - {name} for name in self.files}

    def _imported(self, name: str) -> set[str]:
        found: set[str] = set()
        for node in self._imports[name]:
            if isinstance(node, ast.ImportFrom):
                found.update(self._home(self._base(name, node), a.name) for a in node.names)
            elif isinstance(node, ast.Import):
                found.update(self._nearest(a.name) for a in node.names)
        return found & self.files.keys()

    def _base(self, name: str, node: ast.ImportFrom) -> str:
        """The module that a `from ... import` reads."""
        if not node.level:
            return node.module or ""
        package = name if self.files[name].name == "__init__.py" else name.rpartition(".")[0]
        parts = package.split(".")[: -node.level + 1 or None]
        return ".".join([*parts, node.module] if node.module else parts)

    def _home(self, base: str, wanted: str) -> str:
        """The module that defines `wanted` of the module `base`."""
        if f"{base}.{wanted}" in self.files:
            return f"{base}.{wanted}"
        if base in self.files and self.files[base].name == "__init__.py":
            for node in self._imports[base]:
                if isinstance(node, ast.ImportFrom) and any((a.asname or a.name) == wanted for a in node.names):
                    name = next(a.name for a in node.names if (a.asname or a.name) == wanted)
                    return self._home(self._base(base, node), name)
        return base

    def _nearest(self, name: str) -> str:
        while name and name not in self.files:
            name = name.rpartition(".")[0]
        return name

    def circles(self) -> list[set[str]]:
        """Files that import one another, perhaps through others: each set is as large as it can be."""
        reached = {name: self._reached(name) for name in self.files}
        found: list[set[str]] = []
        for name in self.files:
            circle = {other for other in reached[name] if name in reached[other]}
            if circle and circle not in found:
                found.append(circle)
        return found

    def _reached(self, start: str) -> set[str]:
        seen: set[str] = set()
        todo: Iterable[str] = self.imports[start]
        while todo:
            seen.update(todo)
            todo = {t for name in todo for t in self.imports[name]} - seen
        return seen

    def by_folder(self, apart: Iterable[str]) -> ImportGraph:
        """The same graph with folders in place of files; files that lie directly in the packages `apart` stay apart.

        What a package's `__init__` imports is left out: it is a door, and may open to anything below it.
        """
        packages = {name for name, path in self.files.items() if path.name == "__init__.py"}

        def folder(name: str) -> str:
            return name if name.rpartition(".")[0] in set(apart) else name.rpartition(".")[0]

        found = copy.copy(self)
        found.imports = {}
        for name, imported in self.imports.items():
            if name not in packages:
                others = {folder(i) for i in imported if i not in packages} - {folder(name)}
                found.imports.setdefault(folder(name), set()).update(others)
        found.files = {name: Path() for name in found.imports}
        return found

    def calling(self, function: str) -> set[str]:
        """Files that call a function of this name."""
        return {name for name, called in self.calls.items() if function in called}


def _called(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
