"""Small cases of what public reports say goes wrong with ONNX files and around them, for `run.py`.

Each builds a tiny model (or data file), and compares with ONNX Runtime, NumPy's or the documented rule's values, and
gradients with central differences in float64.  Needs onnxruntime and pillow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import element_files
import operator_files
import structure_files
import training_files
from checks import Verdict, judged


@dataclass(frozen=True)
class Case:
    """What a public report says, and what tries it here."""

    name: str
    source: str
    said: str
    check: Callable[[], Verdict]


_TABLES = (operator_files, element_files, structure_files, training_files)
CASES = [Case(name, *case) for table in _TABLES for name, case in table.CASES.items()]


def run(case: Case) -> Verdict:
    """The verdict, and why."""
    return judged(case.check)
