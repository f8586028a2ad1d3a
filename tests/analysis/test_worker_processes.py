"""Processes that compile stages end with the one that started them, and do not keep it waiting."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from recompute.analysis import compiled_stages
from recompute.support.children import as_worker

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent ends")


def forked(function: Callable[[], object]) -> int:
    child = os.fork()
    if not child:
        try:
            function()
        finally:
            os._exit(0)
    return child


@linux
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_worker_ends_with_its_parent(number: int) -> None:
    """The worker holds the other end of a pipe, which closes when it ends; handlers of its parent do not hold it up."""
    read, write = os.pipe()

    def worker(parent: int) -> None:
        as_worker(parent)
        os.write(write, b".")
        time.sleep(60)

    def between() -> None:
        os.close(read)
        signal.signal(signal.SIGTERM, lambda *_: None)
        parent = os.getpid()
        forked(lambda: worker(parent))
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.write(write, b"|")
        os.close(write)
        time.sleep(60)

    parent = forked(between)
    os.close(write)
    assert {os.read(read, 1), os.read(read, 1)} == {b".", b"|"}
    os.kill(parent, number)
    os.waitpid(parent, 0)
    started = time.monotonic()
    assert os.read(read, 1) == b""  # its last writer has ended
    os.close(read)
    assert time.monotonic() - started < 10


class _Sleeps:
    """Work that takes a minute, and says that it has begun."""

    def __init__(self) -> None:
        self.begun, self.begin = os.pipe()

    def stage(self, place: int) -> Any:
        os.write(self.begin, b".")
        time.sleep(60)


@linux
def test_an_error_ends_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    started = time.monotonic()
    work: Any = _Sleeps()
    with pytest.raises(InterruptedError), compiled_stages._made(work, [0, 1]):
        assert os.read(work.begun, 1) == b"."
        raise InterruptedError
    os.close(work.begin)
    while os.read(work.begun, 1):  # until the last worker has ended: the exit of this process would wait for it
        pass
    os.close(work.begun)
    assert time.monotonic() - started < 30
