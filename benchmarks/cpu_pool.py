"""Processes of cpu.py: as many of them alive as the machine's memory holds, one of them at work at a time."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class Failed(Exception):
    """A worker said why it cannot, or ended, or took too long."""


class Worker:
    """One process, started when it is first asked, and again after it was put away."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], limit: float) -> None:
        self.command, self.limit = list(command), limit
        self.environment = {**os.environ, **environment}
        self.facts: dict[str, Any] = {}
        self._process: subprocess.Popen[str] | None = None
        self._errors: Any = None

    def start(self) -> None:
        """Waits until it is warm.  Failed."""
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 -- `end` closes it
        self._process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=self.environment,
            text=True,
        )
        self.facts = self._answer()

    def times(self, seconds: float, least: int) -> list[float]:
        """Seconds of some steps."""
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps({"seconds": seconds, "least": least}) + "\n")
        self._process.stdin.flush()
        return self._answer()["seconds"]

    def _answer(self) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], self.limit)
        line = self._process.stdout.readline() if ready else ""
        found = json.loads(line) if line else {}
        if "error" in found or not line:
            last = self._last_error()
            self.end()
            raise Failed(found.get("error") or (last if ready else f"no answer in {self.limit:.0f} s"))
        return found

    def _last_error(self) -> str:
        self._errors.seek(0)
        lines = [line for line in self._errors.read().splitlines() if line.strip()]
        return lines[-1][:300] if lines else "it ended without a word"

    @property
    def alive(self) -> bool:
        """Whether the process is there."""
        return self._process is not None

    def resident(self) -> int:
        """Bytes of memory that the process has."""
        with contextlib.suppress(OSError, AttributeError):
            text = Path(f"/proc/{self._process.pid}/status").read_text()
            if found := re.search(r"VmHWM:\s+(\d+) kB", text):
                return int(found[1]) << 10
        return 0

    def end(self) -> None:
        """Ends the process, and what it has started."""
        if self._process is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process.stdout.close()
            self._errors.close()
        self._process = None


class Pool:
    """Workers by name.  Where memory does not hold them all, the one that worked last makes place: in a round that
    keeps the most of them alive."""

    def __init__(self, workers: dict[str, Worker], memory: int, pause: float = 0.3) -> None:
        self.workers, self.memory, self.pause = workers, memory, pause
        self._last: str | None = None
        self._largest = 0

    def times(self, name: str, seconds: float, least: int) -> list[float]:
        """Steps of one worker; it is started where it is not there.  Failed."""
        worker = self.workers[name]
        if not worker.alive:
            self._make_place()
            worker.start()
            self._largest = max(self._largest, worker.resident())
        if self._last != name:
            time.sleep(self.pause)  # threads of the last one spin for a while
        self._last = name
        return worker.times(seconds, least)

    def _make_place(self) -> None:
        alive = [n for n, w in self.workers.items() if w.alive]
        alive.sort(key=lambda n: n != self._last)
        used = sum(self.workers[n].resident() for n in alive)
        while alive and used + self._largest > self.memory:
            used -= self.workers[alive[0]].resident()
            self.workers[alive.pop(0)].end()

    def end(self) -> None:
        """Ends them all."""
        for worker in self.workers.values():
            worker.end()


def processor_seconds(pid: int) -> float:
    """Time that processors have worked for a process and its threads; 0 where the system does not say."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def available_memory() -> int:
    """Bytes that new processes may take; a guess where the system does not say."""
    with contextlib.suppress(OSError):
        if found := re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text()):
            return int(found[1]) << 10
    return 8 << 30
