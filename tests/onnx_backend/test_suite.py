"""ONNX's backend suite: every case passes, but for those in not_passing.txt, which says why.

One line there: the case's name, two spaces, the reason.  `python tests/onnx_backend/suite.py --update` rewrites it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from suite import CATEGORIES, load_cases, read_not_passing, run_case

#: node cases are run in this many tests
PARTS = 8
GROUPS = [("node", i) for i in range(PARTS)] + [(c, 0) for c in CATEGORIES if c != "node"]


@pytest.mark.parametrize(("category", "part"), GROUPS, ids=[f"{c}-{i}" for c, i in GROUPS])
def test_cases(category: str, part: int) -> None:
    cases = [c for c in load_cases() if c.category == category]
    excused = read_not_passing()
    wrong = []
    for case in cases[part :: PARTS if category == "node" else 1]:
        if case.name not in excused:
            outcome = run_case(case)
            if outcome.status != "passed":
                wrong.append(f"{case.name}: {outcome.status}: {outcome.reason}")
    hint = "to see one: python tests/onnx_backend/suite.py --trace NAME"
    assert not wrong, "\n".join([f"{len(wrong)} cases do not pass:", *wrong, hint])


def test_excused_cases_exist() -> None:
    assert set(read_not_passing()) <= {c.name for c in load_cases()}
    assert Path(__file__).with_name("not_passing.txt").exists()
