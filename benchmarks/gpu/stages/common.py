"""What the stages of a staged run share: the modules of the checkout, of the benchmarks and of the tests.

RECOMPUTE_TEST_PLACE=fake: the tests' fake device in the device's place.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent.parent)]

from gpu_rows import ROOT, install_fake, rehearsed  # noqa: E402
from results import FOLDER, WORK, case, emit  # noqa: E402

__all__ = ["CARRY", "FAKE", "FOLDER", "ROOT", "WORK", "case", "emit"]

sys.path += [str(ROOT / "tests" / name) for name in ("", "models", "ops", "cuda")]
install_fake()

#: what was prepared without a device: machine code, losses of the CPU, wheels
CARRY = HERE.parent / "carry"
FAKE = rehearsed()
