"""The registry-wide suite: every operator's samples through type rule, numerics, expansion and gradients."""

from __future__ import annotations

import pytest

from recompute.language.op import Op
from recompute.testing import all_ops, cases, check_case


@pytest.mark.parametrize("cls", list(all_ops()), ids=lambda cls: cls.__name__)
def test_samples(cls: type[Op]) -> None:
    for case in cases(cls):
        check_case(case)


def test_every_operator_has_samples() -> None:
    pairs = {
        cls.__name__ for cls in all_ops() if cls.copies or cls.communicates
    }  # a begin and a wait are two operators
    without = [cls.__name__ for cls in all_ops() if not cases(cls) and cls.__name__ not in {"Free", *pairs}]
    assert not without, f"operators without samples: {without}"
