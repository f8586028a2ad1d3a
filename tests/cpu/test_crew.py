"""Threads of a step that meet on one processor: one of them leaves it, and all may use what they might before."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from test_cpu_native import COUNT

from recompute.runtime.cpu.code import matrix_products
from recompute.runtime.cpu.device import code_cache, crew, native
from recompute.runtime.cpu.device.native import Call, Table

linux = pytest.mark.skipif(
    sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="a thread moves on Linux, to a second processor"
)
#: in place of `here` and `spread`: every thread is on processor 7; counts calls, how many of them saw a thread that
#: works there, and how many saw nobody who does not (whoever waits is one)
SEEN = """
%line = type [16 x i32]
define internal i32 @here() {
  ret i32 7
}
define internal void @spread(ptr %places, i64 %threads) {
entry:
  %seen = inttoptr i64 SEEN to ptr
  %other.at = getelementptr %line, ptr %places, i64 1
  %one = load atomic i32, ptr %places monotonic, align 4
  %other = load atomic i32, ptr %other.at monotonic, align 4
  %a = icmp eq i32 %one, 7
  %b = icmp eq i32 %other, 7
  %some = or i1 %a, %b
  %all = and i1 %a, %b
  %some.n = zext i1 %some to i64
  %all.n = zext i1 %all to i64
  %some.at = getelementptr i64, ptr %seen, i64 1
  %all.at = getelementptr i64, ptr %seen, i64 2
  %x = atomicrmw add ptr %seen, i64 1 monotonic
  %y = atomicrmw add ptr %some.at, i64 %some.n monotonic
  %z = atomicrmw add ptr %all.at, i64 %all.n monotonic
  ret void
}
"""
#: work of two pieces, the first of which takes 200 ms
LATE = """
declare i32 @usleep(i32)
define void @kernel(ptr %args, i64 %begin, i64 %end) {
  %first = icmp eq i64 %begin, 0
  %time = select i1 %first, i32 200000, i32 0
  %slept = call i32 @usleep(i32 %time)
  ret void
}
"""
#: writes which thread does a piece of work; each takes 100 ms, the first one 600 ms
WHOSE = """
declare i32 @usleep(i32)
declare i32 @omp_get_thread_num()
define void @kernel(ptr %args, i64 %begin, i64 %end) {
entry:
  %to = load ptr, ptr %args
  %me = call i32 @omp_get_thread_num()
  %me64 = zext i32 %me to i64
  br label %loop
loop:
  %i = phi i64 [%begin, %entry], [%i1, %loop]
  %at = getelementptr i64, ptr %to, i64 %i
  store i64 %me64, ptr %at
  %first = icmp eq i64 %i, 0
  %time = select i1 %first, i32 600000, i32 100000
  %slept = call i32 @usleep(i32 %time)
  %i1 = add i64 %i, 1
  %more = icmp slt i64 %i1, %end
  br i1 %more, label %loop, label %done
done:
  ret void
}
"""
#: the mask of signals of the thread that does a piece of work, 16 words each, after 20 ms
MASKS = """
declare i32 @usleep(i32)
declare i32 @pthread_sigmask(i32, ptr, ptr)
define void @kernel(ptr %args, i64 %begin, i64 %end) {
  %to = load ptr, ptr %args
  %word = mul i64 %begin, 16
  %at = getelementptr i64, ptr %to, i64 %word
  %slept = call i32 @usleep(i32 20000)
  %read = call i32 @pthread_sigmask(i32 0, ptr null, ptr %at)
  ret void
}
"""
#: what GOMP_parallel calls: nothing
EMPTY = """
define void @kernel(ptr %args) {
  ret void
}
"""
PROBE = """
define i64 @kernel(ptr %places, i64 %threads) {
  call void @spread(ptr %places, i64 %threads)
  %now = call i32 @here()
  %found = sext i32 %now to i64
  ret i64 %found
}
"""


def after_waiting(threads: int, busy: int) -> tuple[int, int]:
    """Where this thread is before and after it leaves: `busy` of so many threads works on its processor."""
    run = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)(native.compile_ir(crew.spread() + PROBE))
    places = np.full((threads, 16), -1, np.int32)
    here = places[busy, 0] = ctypes.CDLL(None).sched_getcpu()
    return here, run(places.ctypes.data, threads)


def in_a_thread(allowed: set[int] | None = None) -> tuple[tuple[int, int], set[int]]:
    """The same in a thread of its own, which may use the given processors; and those it may use afterwards."""
    native.toolchain()  # else the test is skipped
    found: list = []

    def body() -> None:
        if allowed is not None:
            os.sched_setaffinity(0, allowed)
        # the scheduler may move a thread between the two looks, now and then
        moves = [after_waiting(3, 1) for _ in range(20)]
        found.append((next((m for m in moves if m[0] != m[1]), moves[0]), os.sched_getaffinity(0)))

    worker = threading.Thread(target=body)
    worker.start()
    worker.join()
    return found[0]


@pytest.mark.skipif(sys.platform != "linux", reason="signals wait on Linux, where oneDNN is")
@pytest.mark.parametrize("threads", [1, 2])
def test_signals_wait_while_native_code_runs(threads: int) -> None:
    """In all threads, also in those that another library has begun; not what an instruction causes."""
    before, masks = signal.pthread_sigmask(signal.SIG_BLOCK, ()), np.zeros((2, 16), np.int64)
    call = Call(native.compile_ir(MASKS), (masks,), 2)

    def run() -> None:
        if threads > 1:
            empty = ctypes.c_void_p(native.compile_ir(EMPTY))
            native._libgomp().GOMP_parallel(empty, None, threads, 0)
        Table([call], threads).run()
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before

    with ThreadPoolExecutor(1) as other:  # a team of its own
        other.submit(run).result()
    for name, waits in (("SIGINT", 1), ("SIGTERM", 1), ("SIGALRM", 1), ("SIGSEGV", 0), ("SIGFPE", 0)):
        assert (masks[:, 0] >> getattr(signal, name) - 1 & 1 == waits).all(), name


@linux
def test_a_thread_leaves_the_processor_of_another() -> None:
    """And may go back there."""
    before = os.sched_getaffinity(0)
    (here, there), after = in_a_thread()
    assert here != there and {here, there} <= before and after == before


@linux
def test_a_thread_that_is_bound_stays() -> None:
    """Its one processor is all that it may use, then and afterwards."""
    one = {min(os.sched_getaffinity(0))}
    (here, there), after = in_a_thread(one)
    assert {here, there} == one == after


@pytest.mark.skipif(not native.openmp(), reason="several threads need an OpenMP runtime")
def test_who_waits_looks_where_the_others_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver says where a thread works, and no longer where it waits, and a thread that waits long looks there."""
    native._driver()  # this process's own, made before anything is replaced
    seen = np.zeros(3, np.int64)
    monkeypatch.setattr(crew, "spread", lambda: SEEN.replace("SEEN", str(seen.ctypes.data)))
    monkeypatch.setattr(code_cache, "keep", lambda *code: None)  # it has an address of this process
    monkeypatch.setattr(native, "threads", lambda: 2)
    table = Table([Call(native.compile_ir(LATE), (), 2)])
    driver = native.compile_ir(crew.driver(threads=True))
    table._run = ctypes.CFUNCTYPE(*(ctypes.c_int64,) * 5)(driver)
    assert table.run() is None
    calls, some, everyone = seen.tolist()
    assert calls > 10 and some >= calls - 1 and everyone == 0


@pytest.mark.skipif(not native.openmp(), reason="several threads need an OpenMP runtime")
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_take_shares_of_their_own(threads: int) -> None:
    """The first piece of a share is its owner's; whoever is late does not get the rest of its share."""
    whose = np.full(2 * threads, -1, np.int64)
    table = Table([Call(native.compile_ir(WHOSE), (whose,), whose.size)], threads)
    assert table.run() is None
    assert whose[::2].tolist() == list(range(threads))
    assert threads == 1 or whose[1] != 0


@pytest.mark.skipif(not native.openmp(), reason="several threads need an OpenMP runtime")
@pytest.mark.parametrize("work", [1, 2, 3, 5, 63, 64, 65, 1000])
@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_every_piece_of_work_is_done_once(threads: int, work: int) -> None:
    """In calls behind each other, whatever does not divide."""
    counts = np.zeros((20, work), np.int64)
    kernel = native.compile_ir(COUNT)
    table = Table([Call(kernel, (c,), work if i % 3 else 1) for i, c in enumerate(counts)], threads)
    for _ in range(50):
        assert table.run() is None
    assert (counts[[i for i in range(20) if i % 3]] == 50).all() and (counts[::3, 0] == 50).all()


@linux
def test_processors_are_as_before_beside_a_neighbour() -> None:
    """Products beside a busy process: no thread's choice of processors changes, and no bit."""
    g = np.random.default_rng(0)
    a, b = (g.standard_normal((256, 256), np.float32) for _ in range(2))
    c, room = np.empty((256, 256), np.float32), np.empty(matrix_products.room(256, 256, 256), np.float32)
    table = Table(matrix_products.calls(a, b, c, room))
    table.run()
    alone = c.copy()

    def allowed() -> dict[str, set[int]]:
        return {thread: os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")}

    before = allowed()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as neighbour:
        try:
            for _ in range(300):
                table.run()
        finally:
            neighbour.kill()
    assert allowed() == before
    np.testing.assert_array_equal(c, alone)
