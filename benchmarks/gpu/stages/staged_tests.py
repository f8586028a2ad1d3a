"""A plugin of pytest: each failure is a line of the results at once, so that a stage whose time is up has lost none."""

from __future__ import annotations

import os
from typing import Any

from results import emit

#: tests between two lines that say how many there were
EVERY = 100
counts = {"passed": 0, "failed": 0, "skipped": 0}
here: dict[str, bool] = {}


def pytest_configure(config: Any) -> None:
    """Workers of xdist tell the process that started them, which writes."""
    here["writes"] = not hasattr(config, "workerinput") and "STAGED_STAGE" in os.environ


def pytest_runtest_logreport(report: Any) -> None:
    """A phase of a test has ended."""
    if not here["writes"] or (report.when != "call" and report.outcome == "passed"):
        return
    counts[report.outcome] += 1
    if report.failed:
        emit(os.environ["STAGED_STAGE"], report.nodeid, ok=False, error=str(report.longrepr)[-1500:])
    elif sum(counts.values()) % EVERY == 0:
        emit(os.environ["STAGED_STAGE"], "so far", **counts)


def pytest_sessionfinish() -> None:
    """All tests have ended."""
    if here["writes"]:
        emit(os.environ["STAGED_STAGE"], "tests", **counts)
