"""Results of a staged run: lines of JSON, written at once.

STAGED_FOLDER: where they are; STAGED_WORK: where locks are.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ.get("STAGED_FOLDER", "staged"))
WORK = Path(os.environ.get("STAGED_WORK", FOLDER))


def emit(stage: str, name: str, **found: Any) -> None:
    """One line of the results; also printed."""
    line = json.dumps({"stage": stage, "name": name, **found}, default=str)
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "results.jsonl").open("a") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        f.write(line + "\n")
    print(line[:600], flush=True)


@contextlib.contextmanager
def case(stage: str, name: str) -> Iterator[dict[str, Any]]:
    """A part of a stage: what it puts into the dictionary is emitted; an error is, too, and does not end the stage."""
    found: dict[str, Any] = {}
    begin = time.perf_counter()
    try:
        yield found
        found.setdefault("ok", True)
    except Exception as e:
        found |= {"ok": False, "error": f"{type(e).__name__}: {e}"[:1500], "trace": traceback.format_exc()[-3000:]}
    finally:
        emit(stage, name, seconds=round(time.perf_counter() - begin, 2), **found)
