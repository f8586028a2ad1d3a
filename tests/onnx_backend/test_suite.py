"""ONNX's backend suite: every case passes, but for those in not_passing.txt, which says why.

One line there: the case's name, two spaces, the reason.  `python tests/onnx_backend/suite.py --update` rewrites it, and
docs/operators.md.
"""

from __future__ import annotations

from typing import Any

import onnx
import operator_table
import pytest
from suite import CATEGORIES, counts, load_cases, read_not_passing, reasons, run_case

#: the onnx whose suite not_passing.txt and docs/operators.md describe
RECORDED = "1.23"

pytestmark = pytest.mark.skipif(
    onnx.__version__.rsplit(".", 1)[0] != RECORDED,
    reason=f"what passes is recorded for onnx {RECORDED}; tests/onnx_backend/suite.py says it for another",
)
HINT = "to see one: suite.py --trace NAME; where one of not_passing.txt passes now: suite.py --update"


def wrong(outcomes: dict[str, Any]) -> list[str]:
    """Cases that pass, or do not, where the other is recorded."""
    excused = read_not_passing()
    return [f"{n}: {o.status}: {o.reason}" for n, o in outcomes.items() if (o.status == "passed") == (n in excused)]


def test_whole_suite_and_document() -> None:
    """Every case is as recorded, and docs/operators.md is what the suite and the registry say today."""
    pytest.importorskip("re2")
    facts: dict[Any, Any] = {}
    outcomes = {c.name: run_case(c, facts) for c in load_cases()}
    assert {c.category for c in load_cases()} == set(CATEGORIES)
    assert set(read_not_passing()) <= set(outcomes), "not_passing.txt names cases that are not there"
    found = wrong(outcomes)
    assert not found, "\n".join([f"{len(found)} cases are not as recorded:", *found, HINT])
    operator_table.gather_ours(facts)
    page = operator_table.document(facts, counts(outcomes), reasons(outcomes))
    written = operator_table.DOCUMENT.read_text(encoding="utf-8")
    different = [
        f"is     {a}\nshould {b}" for a, b in zip(written.splitlines(), page.splitlines(), strict=False) if a != b
    ]
    assert written == page, "\n".join(["docs/operators.md is old: suite.py --update", *different[:5]])
