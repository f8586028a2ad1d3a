"""Code that documents show as ours is the code that we have."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
SHOWN = re.compile(r"<!-- source: (\S+) (\w+) -->\n```python\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize(
    ("page", "path", "name", "text"),
    [(p.name, *found) for p in sorted(DOCS.glob("*.md")) for found in SHOWN.findall(p.read_text())],
    ids=lambda v: v if isinstance(v, str) and "\n" not in v else "",
)
def test_a_shown_definition_is_the_one_in_its_file(page: str, path: str, name: str, text: str) -> None:
    source = (DOCS.parent / path).read_text()
    node = next(n for n in ast.parse(source).body if getattr(n, "name", None) == name)
    assert isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.end_lineno is not None
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    assert "\n".join(source.splitlines()[first - 1 : node.end_lineno]) + "\n" == text, (
        f"{page} shows {name} differently"
    )
