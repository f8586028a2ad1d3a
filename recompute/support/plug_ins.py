"""Plug-in folders: all files are imported, so that the classes in them register themselves."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import pkgutil
import sys

from ..errors import UsageError


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


@functools.cache
def import_file(path: str) -> None:
    """Runs a Python file once, so that the classes in it register themselves.  UsageError where that fails."""
    spec = importlib.util.spec_from_file_location(f"recompute_plug_in_{abs(hash(path))}", path)
    if spec is None or spec.loader is None:
        raise UsageError(f"'{path}' is not a Python file: its name ends with .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up there what annotations are, if these are texts
    try:
        spec.loader.exec_module(module)
    except Exception as e:
        del sys.modules[spec.name]
        raise UsageError(f"'{path}' cannot be run: {type(e).__name__}: {e}") from None
