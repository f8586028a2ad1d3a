"""The native function that walks a table of calls, with the threads of a step.

Calls in a row that leave the threads to us are one parallel region.  Each call's work is cut into chunks.  A thread
takes those of a share of its own, the same in every call, so that it finds in its cache what it has written; then what
is left of the others' shares.  Whoever finds none goes on to the next call as soon as the last chunk is done: a thread
that is not scheduled, because the machine has other work, costs at most the chunk that it has taken.  Which thread does
what changes no bits (see runtime/shared/families.py).  A thread that waits for another sleeps after a moment, so that
an idle processor can take over the other one; if that was its own processor, it goes to another when it wakes up:
Linux would leave both there for long, beside a processor that a neighbour has for itself.

Signals wait in all of these threads (Python runs its handlers behind native code in any case): see `_SIGNALS_LINUX`.

A call that brings threads of its own (oneDNN's primitives) runs between such regions.  A row of the table is seven
words: function, operands, work, chunks, the end of the region that begins with it (0: the call brings threads of its
own), whether that region has work for several threads, and the address of its counters: the chunks of each thread's
share that were taken, and all that are done.  Counters of consecutive calls lie together, to be cleared at once.
"""

from __future__ import annotations

import platform
import signal
import sys

#: words of a row, and chunks that a call's work is cut into for each thread
WORDS, CHUNKS = 7, 16

_DRIVER = r"""
%call = type { ptr, ptr, i64, i64, i64, i64, ptr }
; calls, begin, end, status, the call that failed; for each thread, the processor that it works on, or -1; threads
%region = type { ptr, i64, i64, ptr, i64, ptr, i64 }
declare void @GOMP_parallel(ptr, ptr, i32, i32)
declare i32 @omp_get_thread_num()
declare i32 @usleep(i32)
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)
FLUSH
SPREAD
SIGNALS

; the calls of a region: every thread goes through all of them
define internal void @crew(ptr %region) {
entry:
  %mode = call i32 @flush()
  %me = THREAD
  %master = icmp eq i32 %me, 0
  br i1 %master, label %begin, label %worker
worker:
  call void @block(ptr null)
  br label %begin
begin:
  %calls = load ptr, ptr %region
  %begin.at = getelementptr %region, ptr %region, i32 0, i32 1
  %from = load i64, ptr %begin.at
  %end.at = getelementptr %region, ptr %region, i32 0, i32 2
  %end = load i64, ptr %end.at
  %status.at = getelementptr %region, ptr %region, i32 0, i32 3
  %status = load ptr, ptr %status.at
  %failed.at = getelementptr %region, ptr %region, i32 0, i32 4
  %places.at = getelementptr %region, ptr %region, i32 0, i32 5
  %places = load ptr, ptr %places.at
  %threads.at = getelementptr %region, ptr %region, i32 0, i32 6
  %threads = load i64, ptr %threads.at
  %me64 = zext i32 %me to i64
  %place = getelementptr %line, ptr %places, i32 %me
  br label %loop
loop:
  %i = phi i64 [%from, %begin], [%i1, %next]
  %more = icmp slt i64 %i, %end
  br i1 %more, label %call, label %out
call:
  %row = getelementptr %call, ptr %calls, i64 %i
  %function = load ptr, ptr %row
  %args.at = getelementptr %call, ptr %row, i32 0, i32 1
  %args = load ptr, ptr %args.at
  %work.at = getelementptr %call, ptr %row, i32 0, i32 2
  %work = load i64, ptr %work.at
  %chunks.at = getelementptr %call, ptr %row, i32 0, i32 3
  %chunks = load i64, ptr %chunks.at
  %counters.at = getelementptr %call, ptr %row, i32 0, i32 6
  %counters = load ptr, ptr %counters.at
  %done.at = getelementptr i64, ptr %counters, i64 %threads
  %few = icmp slt i64 %chunks, %threads
  %shares = select i1 %few, i64 %chunks, i64 %threads
  br label %share
share:
  %k = phi i64 [0, %call], [%k1, %empty]
  %shares.left = icmp slt i64 %k, %shares
  br i1 %shares.left, label %enter, label %wait
enter:
  %turned = add i64 %me64, %k
  %share.of = srem i64 %turned, %shares
  %low.n = mul i64 %chunks, %share.of
  %low = sdiv i64 %low.n, %shares
  %high.n = add i64 %low.n, %chunks
  %high = sdiv i64 %high.n, %shares
  %taken.at = getelementptr i64, ptr %counters, i64 %share.of
  br label %take
take:
  ; a plain read first: a write takes the counter out of the other threads' caches
  %seen = load atomic i64, ptr %taken.at monotonic, align 8
  %next.chunk = add i64 %low, %seen
  %left = icmp slt i64 %next.chunk, %high
  br i1 %left, label %try, label %empty
try:
  %n = atomicrmw add ptr %taken.at, i64 1 acq_rel
  %chunk = add i64 %low, %n
  %some = icmp slt i64 %chunk, %high
  br i1 %some, label %go, label %empty
empty:
  %k1 = add i64 %k, 1
  br label %share
go:
  %here = call i32 @here()
  store atomic i32 %here, ptr %place monotonic, align 4
  %first.n = mul i64 %work, %chunk
  %first = sdiv i64 %first.n, %chunks
  %chunk1 = add i64 %chunk, 1
  %last.n = mul i64 %work, %chunk1
  %last = sdiv i64 %last.n, %chunks
  call void %function(ptr %args, i64 %first, i64 %last)
  %failure = load volatile i64, ptr %status
  %bad = icmp ne i64 %failure, 0
  br i1 %bad, label %fail, label %count
fail:
  store atomic i64 %i, ptr %failed.at release, align 8
  br label %count
count:
  %was = atomicrmw add ptr %done.at, i64 1 acq_rel
  br label %take
wait:
  store atomic i32 -1, ptr %place monotonic, align 4
  br label %look
look:
  %turns = phi i64 [0, %wait], [%turns1, %again]
  %done = load atomic i64, ptr %done.at acquire, align 8
  %ready = icmp sge i64 %done, %chunks
  br i1 %ready, label %next, label %still
still:
  %turns1 = add i64 %turns, 1
  %long = icmp sgt i64 %turns, SPINS
  br i1 %long, label %sleep, label %spin
sleep:
  ; an idle processor takes over the thread that is waited for
  %slept = call i32 @usleep(i32 20)
  call void @spread(ptr %places, i64 %threads)
  br label %again
spin:
  PAUSE
  br label %again
again:
  br label %look
next:
  %i1 = add i64 %i, 1
  ; a thread that fails in a later call may be ahead: whoever stays makes the rest of that call
  %failed = load atomic i64, ptr %failed.at acquire, align 8
  %stop = icmp sge i64 %failed, 0
  br i1 %stop, label %out, label %loop
out:
  call void @restore(i32 %mode)
  ret void
}

define i64 @kernel(ptr %calls, i64 %count, i64 %threads, ptr %status) {
entry:
  %region = alloca %region
  %mask = alloca [16 x i64]
  call void @block(ptr %mask)
  %mode = call i32 @flush()
  store volatile i64 0, ptr %status
  %t32 = trunc i64 %threads to i32
  %several = icmp sgt i64 %threads, 1
  %threaded = and i1 %several, PARALLEL
  store ptr %calls, ptr %region
  %begin.at = getelementptr %region, ptr %region, i32 0, i32 1
  %end.at = getelementptr %region, ptr %region, i32 0, i32 2
  %status.at = getelementptr %region, ptr %region, i32 0, i32 3
  store ptr %status, ptr %status.at
  %failed.at = getelementptr %region, ptr %region, i32 0, i32 4
  store volatile i64 -1, ptr %failed.at
  %places = alloca %line, i64 %threads, align 64
  %places.at = getelementptr %region, ptr %region, i32 0, i32 5
  store ptr %places, ptr %places.at
  %places.bytes = mul i64 %threads, 64
  call void @llvm.memset.p0.i64(ptr %places, i8 -1, i64 %places.bytes, i1 false)
  %threads.at = getelementptr %region, ptr %region, i32 0, i32 6
  store i64 %threads, ptr %threads.at
  br label %loop
loop:
  %i = phi i64 [0, %entry], [%i1, %alone.done], [%end, %region.done]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %step, label %end.all
step:
  %row = getelementptr %call, ptr %calls, i64 %i
  %end.of = getelementptr %call, ptr %row, i32 0, i32 4
  %end = load i64, ptr %end.of
  %own = icmp eq i64 %end, 0
  br i1 %own, label %alone, label %prepare
alone:
  %function = load ptr, ptr %row
  %args.at = getelementptr %call, ptr %row, i32 0, i32 1
  %args = load ptr, ptr %args.at
  %work.at = getelementptr %call, ptr %row, i32 0, i32 2
  %work = load i64, ptr %work.at
  call void %function(ptr %args, i64 0, i64 %work)
  %i1 = add i64 %i, 1
  %failure = load volatile i64, ptr %status
  %bad = icmp ne i64 %failure, 0
  br i1 %bad, label %alone.failed, label %alone.done
alone.failed:
  store volatile i64 %i, ptr %failed.at
  br label %end.all
alone.done:
  br label %loop
prepare:
  %counters.at = getelementptr %call, ptr %row, i32 0, i32 6
  %counters = load ptr, ptr %counters.at
  %length = sub i64 %end, %i
  %each = add i64 %threads, 1
  %words = mul i64 %length, %each
  %bytes = mul i64 %words, 8
  call void @llvm.memset.p0.i64(ptr %counters, i8 0, i64 %bytes, i1 false)
  store i64 %i, ptr %begin.at
  store i64 %end, ptr %end.at
  %wide.at = getelementptr %call, ptr %row, i32 0, i32 5
  %wide = load i64, ptr %wide.at
  %wanted = icmp ne i64 %wide, 0
  %split = and i1 %wanted, %threaded
  br i1 %split, label %many, label %one
many:
  call void @GOMP_parallel(ptr @crew, ptr %region, i32 %t32, i32 0)
  br label %region.over
one:
  call void @crew(ptr %region)
  br label %region.over
region.over:
  %stopped = load volatile i64, ptr %failed.at
  %broken = icmp sge i64 %stopped, 0
  br i1 %broken, label %end.all, label %region.done
region.done:
  br label %loop
end.all:
  %at = load volatile i64, ptr %failed.at
  call void @restore(i32 %mode)
  call void @unblock(ptr %mask)
  ret i64 %at
}
"""

# subnormal numbers cost up to a hundred times more than others and mean nothing in training: they count as zero
_FLUSH_X86 = r"""
declare void @llvm.x86.sse.stmxcsr(ptr)
declare void @llvm.x86.sse.ldmxcsr(ptr)
define internal i32 @flush() {
  %at = alloca i32
  call void @llvm.x86.sse.stmxcsr(ptr %at)
  %old = load i32, ptr %at
  %new = or i32 %old, 32832
  store i32 %new, ptr %at
  call void @llvm.x86.sse.ldmxcsr(ptr %at)
  ret i32 %old
}
define internal void @restore(i32 %mode) {
  %at = alloca i32
  store i32 %mode, ptr %at
  call void @llvm.x86.sse.ldmxcsr(ptr %at)
  ret void
}
"""
# where a process has been told otherwise (by a library compiled with -ffast-math, say): numbers as IEEE 754 begins
_KEEP_X86 = _FLUSH_X86.replace("or i32 %old, 32832", "and i32 %old, -57409")
_FLUSH_NONE = r"""
define internal i32 @flush() {
  ret i32 0
}
define internal void @restore(i32 %mode) {
  ret void
}
"""
# a thread's own choice of processors stays as it is, a processor of its own (OMP_PROC_BIND) included
_SPREAD_LINUX = r"""
%line = type [16 x i32]
declare i32 @sched_getcpu()
declare i32 @sched_getaffinity(i32, i64, ptr)
declare i32 @sched_setaffinity(i32, i64, ptr)
define internal i32 @here() {
  %cpu = call i32 @sched_getcpu()
  ret i32 %cpu
}

; leaves the processor that another thread of these works on
define internal void @spread(ptr %places, i64 %threads) {
entry:
  %mask = alloca [MASK x i8], align 8
  %here = call i32 @here()
  br label %loop
loop:
  %i = phi i64 [0, %entry], [%i1, %next]
  %more = icmp slt i64 %i, %threads
  br i1 %more, label %look, label %out
look:
  %place = getelementptr %line, ptr %places, i64 %i
  %there = load atomic i32, ptr %place monotonic, align 4
  %same = icmp eq i32 %there, %here
  br i1 %same, label %move, label %next
next:
  %i1 = add i64 %i, 1
  br label %loop
move:
  %got = call i32 @sched_getaffinity(i32 0, i64 MASK, ptr %mask)
  %read = icmp eq i32 %got, 0
  %small = icmp ult i32 %here, BITS
  %known = and i1 %read, %small
  br i1 %known, label %leave, label %out
leave:
  %index = lshr i32 %here, 3
  %byte = getelementptr i8, ptr %mask, i32 %index
  %old = load i8, ptr %byte
  %in.byte = and i32 %here, 7
  %shift = trunc i32 %in.byte to i8
  %bit = shl i8 1, %shift
  %rest = xor i8 %bit, -1
  %new = and i8 %old, %rest
  store i8 %new, ptr %byte
  %left = call i32 @sched_setaffinity(i32 0, i64 MASK, ptr %mask)
  store i8 %old, ptr %byte
  %back = call i32 @sched_setaffinity(i32 0, i64 MASK, ptr %mask)
  br label %out
out:
  ret void
}
"""
_SPREAD_NONE = r"""
%line = type [16 x i32]
define internal i32 @here() {
  ret i32 -1
}
define internal void @spread(ptr %places, i64 %threads) {
  ret void
}
"""
# a signal's handler runs on the stack of the thread that it meets: while oneDNN multiplies (up to its version 3.11) the
# stack's pointer is that of a buffer, and what lies before that would be overwritten
_SIGNALS_LINUX = r"""
declare i32 @pthread_sigmask(i32, ptr, ptr)
@signals = internal constant [16 x i64] [i64 SET, ZEROS]
define internal void @block(ptr %old) {
  %done = call i32 @pthread_sigmask(i32 0, ptr @signals, ptr %old)
  ret void
}
define internal void @unblock(ptr %old) {
  %done = call i32 @pthread_sigmask(i32 2, ptr %old, ptr null)
  ret void
}
"""
_SIGNALS_NONE = r"""
define internal void @block(ptr %old) {
  ret void
}
define internal void @unblock(ptr %old) {
  ret void
}
"""
#: signals that an instruction causes: they do not wait
_AT_ONCE = ("SIGILL", "SIGTRAP", "SIGABRT", "SIGBUS", "SIGFPE", "SIGSEGV", "SIGSYS")
#: looks at a counter, of about 50 ns each on x86, before a waiting thread sleeps
_SPINS = 1000
#: bytes of a set of processors: 8,192 of them
_MASK = 1024


def driver(*, threads: bool, flush: bool = True) -> str:
    """LLVM IR of `i64 kernel(rows, count, threads, status)`: makes the calls of a table, in order; the number of the
    call that failed, or -1.  `threads`: there is an OpenMP runtime; `flush`: subnormal numbers count as zero, where
    the processor can do that; otherwise they are kept, and numbers rounded to the nearest, whatever the process is set
    to."""
    x86 = platform.machine() in ("x86_64", "AMD64")
    ir = _DRIVER.replace("PARALLEL", "true" if threads else "false").replace("SPINS", str(_SPINS))
    ir = ir.replace("PAUSE", "call void @llvm.x86.sse2.pause()" if x86 else 'fence syncscope("singlethread") seq_cst')
    ir = ir.replace("THREAD", "call i32 @omp_get_thread_num()" if threads else "add i32 0, 0")
    if x86:
        ir += "declare void @llvm.x86.sse2.pause()\n"
    ir = ir.replace("SIGNALS", _signals())
    return ir.replace("SPREAD", spread()).replace("FLUSH", (_FLUSH_X86 if flush else _KEEP_X86) if x86 else _FLUSH_NONE)


def spread() -> str:
    """LLVM IR of `i32 @here()`, the processor that a thread is on, and of `@spread(places, threads)`: a thread leaves
    the processor that another one works on, if it may use others."""
    if sys.platform != "linux":
        return _SPREAD_NONE
    return _SPREAD_LINUX.replace("MASK", str(_MASK)).replace("BITS", str(8 * _MASK))


def _signals() -> str:
    """LLVM IR of `@block(old)`, from which on signals wait in this thread, and of `@unblock(old)`."""
    if sys.platform != "linux":
        return _SIGNALS_NONE
    waiting = -1 - sum(1 << (getattr(signal, name) - 1) for name in _AT_ONCE)
    return _SIGNALS_LINUX.replace("i64 SET", f"i64 {waiting}").replace("ZEROS", ", ".join(["i64 0"] * 15))
