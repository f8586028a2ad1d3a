"""A process that takes training steps when it is told to: the part that both sides of cpu.py share.

Nothing but Python's library is imported here.  The worker reads lines of JSON on standard input and answers each with
one on standard output; whatever else is printed goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

#: a process is warm after this many steps, and at least so many seconds
WARM_STEPS, WARM_SECONDS = 2, 1.0
#: the first step of a turn is not counted where steps are shorter than this: other processes have had the caches
SHORT = 0.5


def serve(start: Callable[[dict[str, Any]], tuple[dict[str, Any], Callable[[], float], Callable[[], dict]]]) -> None:
    """Starts with the specification in the first argument, warms up, then answers until standard input ends.

    `start` gives facts, a function that takes one step and returns the loss, and one for facts afterwards.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        facts, step, after = start(json.loads(sys.argv[1]))
        begin = time.perf_counter()
        losses = [step()]
        facts["first_step_seconds"] = time.perf_counter() - begin
        while len(losses) < WARM_STEPS or time.perf_counter() - begin < WARM_SECONDS:
            losses.append(step())
        facts |= {"losses": losses[:WARM_STEPS], **after()}
    except Exception as e:  # what a variant cannot do is a row of the table
        text = str(e).strip().splitlines() or [""]
        answers.write(json.dumps({"error": f"{type(e).__name__}: {text[0][:300]}"}) + "\n")
        raise
    answers.write(json.dumps(facts) + "\n")
    for line in sys.stdin:
        ask = json.loads(line)
        answers.write(json.dumps({"seconds": list(turn(step, ask["seconds"], ask["least"]))}) + "\n")


def turn(step: Callable[[], float], seconds: float, least: int) -> Iterator[float]:
    """Times of steps: `least` of them, and until the seconds are over."""
    begin = time.perf_counter()
    step()
    first = time.perf_counter() - begin
    done = 0
    if first >= SHORT:
        done = 1
        yield first
    while done < least or time.perf_counter() - begin < seconds:
        at = time.perf_counter()
        step()
        yield time.perf_counter() - at
        done += 1
