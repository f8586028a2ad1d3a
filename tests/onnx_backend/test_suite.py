"""ONNX's backend suite: every case passes, but for those in not_passing.txt, which says why.

One line there: the case's name, two spaces, the reason.  `python tests/onnx_backend/suite.py --update` rewrites it, and
docs/operators.md.
"""

from __future__ import annotations

import os
from typing import Any

import onnx
import operator_table
import pytest
from suite import CATEGORIES, counts, load_cases, read_not_passing, reasons, run_case

#: node cases are run in this many tests
PARTS = 8
GROUPS = [("node", i) for i in range(PARTS)] + [(c, 0) for c in CATEGORIES if c != "node"]
#: the onnx whose suite not_passing.txt and docs/operators.md describe
RECORDED = "1.23"

pytestmark = pytest.mark.skipif(
    onnx.__version__.rsplit(".", 1)[0] != RECORDED,
    reason=f"what passes is recorded for onnx {RECORDED}; tests/onnx_backend/suite.py says it for another",
)
outcomes: dict[str, Any] = {}
facts: dict[Any, Any] = {}


@pytest.mark.parametrize(("category", "part"), GROUPS, ids=[f"{c}-{i}" for c, i in GROUPS])
def test_cases(category: str, part: int) -> None:
    cases = [c for c in load_cases() if c.category == category]
    excused = read_not_passing()
    wrong = []
    for case in cases[part :: PARTS if category == "node" else 1]:
        outcomes[case.name] = outcome = run_case(case, facts)
        if (outcome.status == "passed") == (case.name in excused):
            wrong.append(f"{case.name}: {outcome.status}: {outcome.reason}")
    hint = "to see one: suite.py --trace NAME; where one of not_passing.txt passes now: suite.py --update"
    assert not wrong, "\n".join([f"{len(wrong)} cases are not as recorded:", *wrong, hint])


def test_excused_cases_exist() -> None:
    assert set(read_not_passing()) <= {c.name for c in load_cases()}


def test_document() -> None:
    """docs/operators.md is what the suite and the registry say today."""
    missing = [c for c in load_cases() if c.name not in outcomes]
    if missing and "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.skip("the suite was not run whole")
    for case in missing:  # another process ran them
        outcomes[case.name] = run_case(case, facts)
    operator_table.gather_ours(facts)
    page = operator_table.document(facts, counts(outcomes), reasons(outcomes))
    written = operator_table.DOCUMENT.read_text(encoding="utf-8")
    different = [
        f"is     {a}\nshould {b}" for a, b in zip(written.splitlines(), page.splitlines(), strict=False) if a != b
    ]
    assert written == page, "\n".join(["docs/operators.md is old: suite.py --update", *different[:5]])
