"""Pages, docstrings and comments are in British English; names in code, and terms that are names, are as they are.

`optimizer`, `initializer`, `tokenizer` and `minimize` are the names of things in ONNX, Paddle and other libraries.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
_STEMS = (
    "normal|quanti|material|random|serial|synchron|vector|parallel|recogn|summar|general|special|factor|discreti"
    "|regular|stabil|organ|categor|visual|equal|custom|emphas"
)
AMERICAN = re.compile(
    rf"(?<![\w.`/-])((?:de|re|un|pre)?(?:{_STEMS})(?:iz|z|yz)(?:e[sd]?|ing|ation|ations)|optimi(?:zed|zes|zing|zations?)"
    r"|initiali(?:zes?|zed|zing|zations?)|minimi(?:zes|zing)|colors?|behaviors?|neighbors?|neighboring|centers?|favors?"
    r"|gray|labeled|modeled|canceled)(?![\w`=(/-])",
    re.IGNORECASE,
)
#: code in pages; addresses of links
CODE = re.compile(r"```.*?```|``[^`]*``|`[^`]*`|\]\([^)]*\)|<!--.*?-->|^    .*?$", re.DOTALL | re.MULTILINE)
#: code and quoted texts in docstrings and comments
QUOTED = re.compile(r"``[^`]*``|`[^`]*`|'[^'\n]*'|\"[^\"\n]*\"")


def american(text: str, code: re.Pattern[str]) -> list[str]:
    """The American spellings of a text, without code and names such as BatchNormalization."""
    return [word for word in AMERICAN.findall(code.sub("", text)) if word[1:].islower()]


def written(source: str) -> Iterator[str]:
    """Docstrings and comments of a file; nothing where it has no such word at all, which takes less time to see."""
    if not AMERICAN.search(source):
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node, clean=False) or ""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    yield from (token.string for token in tokens if token.type == tokenize.COMMENT)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_page_is_in_british_english(page: Path) -> None:
    assert not american(page.read_text(), CODE)


@pytest.mark.parametrize("folder", ["recompute", "passes", "runtime", "models"])
def test_docstrings_and_comments_are_in_british_english(folder: str) -> None:
    files = [p for p in (ROOT / folder).rglob("*.py") if not any(q.is_symlink() for q in p.parents)]
    words = {str(p): [w for text in written(p.read_text()) for w in american(text, QUOTED)] for p in files}
    assert not {path: american_words for path, american_words in words.items() if american_words}


def test_american_words_are_seen() -> None:
    assert american("It normalizes colors; `optimized` is code.", CODE) == ["normalizes", "colors"]
    assert not american("An optimizer trains LayerNormalization; `normalize=True` is an option.", CODE)
