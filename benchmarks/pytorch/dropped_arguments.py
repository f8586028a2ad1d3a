"""Looks for arguments that functions of onnxscript's torch_lib never read, and compares them with our table.

    python benchmarks/pytorch/dropped_arguments.py

Prints each function that has such arguments, and whether `recompute.torch.causes.UNREAD` has it, or
`recompute.torch.lowering` writes the operator out.  Arguments that change no number (device, layout, memory
format) are left out.  Exit code 1 where one is in neither: run it with a new version of onnxscript.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import onnxscript
import onnxscript.function_libs.torch_lib.ops as library

from recompute.torch.causes import UNREAD
from recompute.torch.lowering import HARMLESS, LOWERED


def main() -> int:
    """The table, and the exit code."""
    new = 0
    for names, arguments in unread():
        for name in names:
            there = UNREAD.get(name, {}).keys() | LOWERED.get(name, set()) | HARMLESS.get(name, set())
            missing = sorted(set(arguments) - there)
            new += bool(missing)
            print(f"{name:44} {', '.join(arguments):40} {'NEW: ' + ', '.join(missing) if missing else 'known'}")
    print(f"onnxscript {onnxscript.__version__}: {new} functions with arguments that are not known")
    return bool(new)


def unread() -> Iterator[tuple[list[str], list[str]]]:
    """Operators of each function, and its arguments that no statement of its body reads."""
    folder = Path(str(library.__file__)).parent
    for file in sorted(folder.glob("*.py")):
        for function in ast.parse(file.read_text()).body:
            if not isinstance(function, ast.FunctionDef):
                continue
            names = [n for d in function.decorator_list for n in _operators(d)]
            if not names:
                continue
            read = {n.id for s in function.body for n in ast.walk(s) if isinstance(n, ast.Name)}
            arguments = [a.arg for a in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
            left = [a for a in arguments if a not in read and a not in HARMLESS[""]]
            if left:
                yield names, left


def _operators(decorator: ast.expr) -> list[str]:
    """Names such as "aten.add" that a decorator `torch_op(...)` registers."""
    if not isinstance(decorator, ast.Call) or getattr(decorator.func, "id", "") != "torch_op" or not decorator.args:
        return []
    try:
        said = ast.literal_eval(decorator.args[0])
    except ValueError:
        return []
    texts = [said] if isinstance(said, str) else list(said)
    return [t.replace("::", ".") for t in texts if t.startswith("aten::")]


if __name__ == "__main__":
    raise SystemExit(main())
