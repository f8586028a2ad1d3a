"""Plug-in folders: all files are imported, so that the classes in them register themselves."""

from __future__ import annotations

import functools
import importlib
import pkgutil


@functools.cache
def import_all(package: str, *, skip: tuple[str, ...] = ()) -> None:
    """Imports all modules of a package and of the packages inside it, in the order of their names.

    `skip`: modules directly inside the package that are not imported, with their contents.  Modules whose names begin
    with an underscore are not imported either.
    """
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        if module.name in skip or module.name.startswith("_"):
            continue
        name = f"{package}.{module.name}"
        importlib.import_module(name)
        if module.ispkg:
            import_all(name)
