"""The registry-wide suite: every operator's samples through type rule, numerics, expansion and gradients."""

from __future__ import annotations

import pytest

from recompute.testing import Case, all_ops, cases, check_case

ALL = [(cls.__name__, i, case) for cls in all_ops() for i, case in enumerate(cases(cls))]


@pytest.mark.parametrize(("name", "i", "case"), ALL, ids=[f"{n}-{i}" for n, i, _ in ALL])
def test_sample(name: str, i: int, case: Case) -> None:
    check_case(case)


def test_every_operator_has_samples() -> None:
    pairs = {
        cls.__name__ for cls in all_ops() if cls.copies or cls.communicates
    }  # a begin and a wait are two operators
    without = [cls.__name__ for cls in all_ops() if not cases(cls) and cls.__name__ not in {"Free", *pairs}]
    assert not without, f"operators without samples: {without}"
