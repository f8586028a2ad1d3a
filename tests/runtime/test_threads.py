"""Several threads: each runs a program of its own, first runs included, and gets its own errors and nobody else's."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from onnx import helper, numpy_helper

import recompute as rc
from recompute.errors import JobError
from recompute.support.threads import once

ROWS, WIDTH, CLASSES = 64, 32, 16


def training(seed: int) -> tuple[rc.Program, rc.Variable]:
    """An embedding, a product, a norm and a loss over labels."""
    g = np.random.default_rng(seed)
    tensors = [
        numpy_helper.from_array(g.standard_normal(s).astype(np.float32), n)
        for n, s in (("table", (40, WIDTH)), ("w", (WIDTH, CLASSES)), ("scale", (CLASSES,)))
    ]
    nodes = [
        helper.make_node("Gather", ["table", "word"], ["row"]),
        helper.make_node("MatMul", ["row", "w"], ["product"]),
        helper.make_node("LayerNormalization", ["product", "scale"], ["scores"]),
    ]
    word = helper.make_tensor_value_info("word", 7, [ROWS])
    scores = helper.make_tensor_value_info("scores", 1, [ROWS, CLASSES])
    graph = helper.make_graph(nodes, f"net{seed}", [word], [scores], tensors)
    program = rc.load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9))
    loss = rc.losses.cross_entropy(program["scores"])
    rc.Adam(0.01).minimize(loss)
    return program, loss


def feeds(seed: int) -> tuple[dict, list[dict]]:
    g = np.random.default_rng(seed)
    good = {"word": g.integers(0, 40, ROWS), "label": g.integers(0, CLASSES, ROWS)}
    bad = []
    for name, value in (("word", 40 + seed), ("label", CLASSES + seed)):
        array = good[name].copy()
        array[seed % ROWS] = value
        bad.append({**good, name: array})
    return good, bad


def run_in_threads(count: int, runs: int) -> tuple[Counter, list[bytes]]:
    """Every second thread fails in two of three runs; returns what happened, and each thread's parameters."""
    found: Counter = Counter()
    results: dict[int, bytes] = {}
    start = threading.Barrier(count)

    def work(i: int) -> None:
        program, loss = training(i)
        good, bad = feeds(i)
        executor = rc.Executor()
        start.wait()
        for k in range(runs):
            wrong = i % 2 == 1 and k % 3 > 0
            try:
                executor.run(program, bad[k % 3 - 1] if wrong else good, [loss])
                found["accepted" if wrong else "good"] += 1
            except JobError as e:
                mine = str((40, CLASSES)[k % 3 - 1] + i) in str(e)
                found["refused" if wrong and mine else f"another's error: {e}"] += 1
        results[i] = b"".join(program.data[n].tobytes() for n in sorted(program.data))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return found, [results[i] for i in sorted(results)]


@pytest.mark.parametrize("count", [2, 4])
def test_errors_stay_in_their_threads(count: int) -> None:
    runs = 30
    found, results = run_in_threads(count, runs)
    bad = (count // 2) * (runs - runs // 3)
    assert found == {"good": count * runs - bad, "refused": bad}
    alone, expected = run_in_threads(1, runs)
    assert alone == {"good": runs} and results[0] == expected[0]


@pytest.mark.parametrize(
    ("guarded", "count"), [("not", 2), ("before", 4), ("behind", 8), ("not", 8)]
)  # each number of threads and each kind of guard
def test_a_thousand_runs_with_a_cold_cache_and_checked_memory(count: int, guarded: str, tmp_path: Path) -> None:
    """In a process of its own: a crash is seen as its exit status, and first runs meet at kernels not yet compiled.

    `guarded`: arenas, parameters and feeds end (or begin) at pages that nobody may touch.
    """
    runs = f"print(sorted(run_in_threads({count}, {1000 // count})[0].items()))"
    code = f"from test_threads import run_in_threads\n{runs}"
    if guarded != "not":
        code = (
            f"from fuzzing.guard import guard\nfrom test_threads import run_in_threads\n"
            f"with guard({guarded == 'behind'}):\n    {runs}"
        )
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONMALLOC": "debug", "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", code], env=environment, capture_output=True, text=True, timeout=600
    )
    runs = 1000 // count
    bad = (count // 2) * (runs - -(-runs // 3))
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == str([("good", count * runs - bad), ("refused", bad)])


def test_set_up_happens_once() -> None:
    calls = []
    start = threading.Barrier(8)

    @once
    def made() -> object:
        calls.append(1)
        return object()

    found: list[object] = []

    def work() -> None:
        start.wait()
        found.append(made())

    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(calls) == 1 and len({id(x) for x in found}) == 1


def test_set_up_that_raises_is_tried_again() -> None:
    answers = iter([ValueError("not yet"), 3])

    @once
    def made() -> int:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with pytest.raises(ValueError, match="not yet"):
        made()
    assert made() == made() == 3
