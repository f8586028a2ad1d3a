"""Samples of some operators once, for compute-sanitizer and ncu.

samples_once.py OPERATOR...
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("RECOMPUTE_TEST_PLACE", "cuda")

import common  # noqa: F401  (finds the tests)
import cuda_cases

from recompute.testing import all_ops, cases

MOST = 6
operators = {c.__name__: c for c in all_ops()}
device = cuda_cases.device()
for name in sys.argv[1:]:
    for case in cases(operators[name])[:MOST]:
        for bound in cuda_cases.bound(case, device)[:1]:
            bound.run(0xFF)
    print(name, flush=True)
