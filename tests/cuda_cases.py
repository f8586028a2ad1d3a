"""One operator on a CUDA device (or the emulated one) as its family binds it, beside NumPy's own numerics.

No planner stands between: every buffer has guard bytes around it, and outputs and workspace hold rubbish before.
"""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from recompute.language.ir import Block, Operator, Value
from recompute.language.kernels import accepting, provider
from recompute.language.types import FLOATS, TensorType
from recompute.runtime import EmulatedCUDAPlace
from recompute.runtime.cuda.device import emulator
from recompute.runtime.cuda.device.device import open_device
from recompute.runtime.cuda.device.kernel import STATUS, Buffer, Kernel, Launch
from recompute.runtime.cuda.loops.many import together
from recompute.runtime.cuda.session import CudaSession
from recompute.runtime.lowering import providers
from recompute.testing import Case, case_block

#: operators whose numbers are of less precision than their element type says
_COARSE = {"RandomNormal": "f32", "RandomUniform": "f32"}
#: bytes before and behind each buffer, and what is in them
_GUARD, _GUARDED = 64, 0xA5


#: where kernels run in tests: on the processor, on the device ("cuda", with -m gpu), or as on the device but on the
#: fake of cuda_fake.py ("fake", with -m gpu)
PLACE = os.environ.get("RECOMPUTE_TEST_PLACE", "emulated")
needs_compiler = pytest.mark.skipif(
    not emulator.compiler(), reason="the emulated device needs a C++ compiler (or $CXX)"
)
needs_device = needs_compiler if PLACE == "emulated" else pytest.mark.gpu


@functools.cache
def level() -> str:
    """How the emulator compiles: kernels that run once need no optimisation, and UBSan, where it is there, says on
    standard error what a GPU would not forgive (addresses that are not aligned, shifts, bounds, casts)."""
    checks = "-fsanitize=alignment,shift,bounds,float-cast-overflow"
    with tempfile.TemporaryDirectory() as folder:
        command = [emulator.compiler(), checks, "-x", "c++", "-fPIC", "-shared", "-o", f"{folder}/empty.so", "-"]
        failed = subprocess.run(command, input="int x;", text=True, capture_output=True, check=False).returncode
    return "-O0" if failed else f"-O0 {checks}"


def device() -> Any:
    """The device that tests of kernels use."""
    return emulator.EmulatedDevice(level=level()) if PLACE == "emulated" else open_device(0)


def compile_together(kernels: Iterable[Kernel], device: Any) -> None:
    """Compiles them, some at once.  Every second worker begins at the end, and finds what the others have made."""
    every = sorted(kernels, key=lambda k: (k.name, k.digest))
    size = emulator._TOGETHER
    parts = [every[i : i + size] for i in range(0, len(every), size)]
    for part in reversed(parts) if os.environ.get("PYTEST_XDIST_WORKER", "gw0")[-1] in "13579" else parts:
        device.compile(part)


def opened(place: Any) -> Any:
    """The device of a place."""
    return emulator.EmulatedDevice() if isinstance(place, EmulatedCUDAPlace) else open_device(place.device)


def operator(case: Case) -> Operator:
    """The case's operator with the provider that runs it on a device ("": the host)."""
    op = case_block(case)[0].operators[0]
    return Operator(op.op, op.inputs, op.outputs, op.role, kernel=kernels_of(op))


def kernels_of(op: Operator) -> str:
    """The provider that runs an operator on a device."""
    return accepting(providers(EmulatedCUDAPlace()), op)


@dataclass
class Bound:
    """A case in a device's memory.  `runs`: a provider or a family.  `shared`: output → input whose buffer it takes."""

    case: Case
    op: Operator
    runs: Any
    device: Any
    shared: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        op, end = self.op, _GUARD
        self.places: list[tuple[int, TensorType]] = []

        def place(v: Value | TensorType | None) -> int | None:
            nonlocal end
            if v is None:
                return None
            t = v.type if isinstance(v, Value) else v
            self.places.append((end, t))
            end += -(-t.nbytes // 64) * 64 + _GUARD
            return len(self.places) - 1

        ins = [place(v) for v in op.inputs]
        self.copies = {j: place(op.inputs[j]) for j in self.shared.values()}
        outs = [ins[op.op.updates[i]] if i < len(op.op.updates) else
                self.copies[self.shared[i]] if i in self.shared else place(v)
                for i, v in enumerate(op.outputs)]  # fmt: skip
        scratch = [place(t) for t in self.runs.scratch(op)]
        start, self.memory = self.device.allocate(end)
        self.whole = Buffer(start, TensorType("u8", (end,)))
        self.ins = [self.copies.get(i, p) if i in self.copies else p for i, p in enumerate(ins)]
        self.outs = outs
        handed = [[self._buffer(p) for p in part] for part in (self.ins, outs, scratch)]
        self.calls = tuple(self.runs.bind(op, *handed))

    def _buffer(self, place: int | None) -> Any:
        return None if place is None else Buffer(self.whole.address + self.places[place][0], self.places[place][1])

    @property
    def kernels(self) -> list[Kernel]:
        """Texts."""
        return [c.kernel for c in self.calls if isinstance(c, Launch)]

    def run(self, poison: int) -> list[np.ndarray]:
        """The outputs.  AssertionError where something is written that is none."""
        raw = np.full(self.whole.nbytes, _GUARDED, np.uint8)
        for at, t in self.places:
            raw[at : at + t.nbytes] = poison & 1 if t.dtype == "bool" else poison
        for p, a in zip(self.ins, self.case.inputs, strict=True):
            if p is not None and a is not None:
                self._in(raw, p)[...] = a
        before = raw.copy()
        self.device.compile(self.kernels)
        self.device.upload(self.whole, raw)
        for c in self.calls:
            self.device.prepare(c)()
        after = np.array(self.device.download(self.whole))
        written = np.zeros(raw.shape, bool)
        used = {p for p in (*self.ins,) if p is not None} - {p for p in self.outs if p is not None}
        for i, (at, t) in enumerate(self.places):
            written[at : at + t.nbytes] = i not in used
        wrong = np.flatnonzero((before != after) & ~written)
        assert not wrong.size, f"{self.op.op.name}: byte {wrong[0]} is written; buffers: {self.places}"
        return [np.array(self._in(after, p)) for p in self.outs if p is not None]

    def _in(self, raw: np.ndarray, place: int) -> np.ndarray:
        at, t = self.places[place]
        return raw[at : at + t.nbytes].view(t.numpy).reshape(t.shape)


def bound(case: Case, device: Any, family: Any = None) -> list[Bound]:
    """The case alone, and once for each output that may take an input's buffer; none where the host runs it.

    `family`: who runs it, instead of what would be chosen.
    """
    op = operator(case)
    if not (op.kernel if family is None else family.accepts(op)):
        return []
    runs = provider(op.kernel) if family is None else family
    found = [Bound(case, op, runs, device)]
    for i, v in enumerate(op.outputs):
        for j in op.op.overwrites(i) if v is not None and not op.op.updates else ():
            x = op.inputs[j] if j < len(op.inputs) else None
            if x is not None and v is not None and x.type == v.type:
                found.append(Bound(case, op, runs, device, {i: j}))
    return found


def reference(case: Case) -> list[np.ndarray]:
    """NumPy's numerics."""
    op = case_block(case)[0].operators[0]
    ins: list[Any] = [None if a is None else np.array(a) for a in case.inputs]
    outs: list[Any] = [None if v is None else np.zeros(v.shape, v.type.numpy) for v in op.outputs]
    for i, j in enumerate(op.op.updates[: len(outs)]):
        outs[i] = ins[j]
    with np.errstate(all="ignore"):
        op.op.compute(ins, outs, [np.zeros(t.shape, t.numpy) for t in op.workspace()])
    return [a for a in outs if a is not None]


def check(case: Case, runs: Sequence[Bound], *, units: float | None = None) -> None:
    """Every binding gives NumPy's numbers, to within `units` in the last place, and the same bits both ways round.

    `units`: 64, or none for operators that move data, where it is None.
    """
    wanted = reference(case)
    first = None
    for b in runs[:1]:
        b.device.compile([k for other in runs for k in other.kernels])
    for b in runs:
        results = []
        for poison, backwards in ((0xFF, False), (0x55, True)):
            if hasattr(b.device, "backwards"):
                b.device.backwards = backwards
            results.append(b.run(poison))
        for i, (one, two) in enumerate(zip(*results, strict=True)):
            where = f"{b.op.op.name}, output {i}" + (f" in place {b.shared}" if b.shared else "")
            assert one.tobytes() == two.tobytes(), f"{where}: not the same bits backwards, or not all written"
        first = first or results[0]
        for i, (got, alone, want) in enumerate(zip(results[0], first, wanted, strict=True)):
            where = f"{b.op.op.name}, output {i}" + (f" in place {b.shared}" if b.shared else "")
            assert got.tobytes() == alone.tobytes(), f"{where}: other bits than in a buffer of its own"
            coarse = _COARSE.get(b.op.op.name, "")
            most = (0 if b.op.op.moves_data else 64) if units is None else units
            compare(got, want, most, where, coarse)


def compare(got: np.ndarray, want: np.ndarray, units: float, where: str, coarse: str = "") -> None:
    """Integers and booleans exactly, floats within `units` of their precision at the scale of the largest.

    `coarse`: the element type whose precision counts, instead of their own.
    """
    name = TensorType.of(want).dtype
    if name not in FLOATS or not units:
        assert got.tobytes() == want.tobytes(), f"{where}: {got!r} instead of {want!r}"
        return
    eps = {"f16": 2.0**-10, "bf16": 2.0**-7, "f32": 2.0**-23, "f64": 2.0**-52}[coarse or name]
    units = min(units, 8) if name in ("f16", "bf16") else units
    g, w = got.astype(np.float64), want.astype(np.float64)
    scale = np.abs(w[np.isfinite(w)]).max(initial=0)
    np.testing.assert_allclose(g, w, rtol=units * eps, atol=units * eps * min(scale, 1e300), err_msg=where)


class Nowhere:
    """A device that is not there: it gives addresses, notes which kernels it is to compile, and runs nothing."""

    graphs, status = True, STATUS

    def __init__(self) -> None:
        self.end, self.kernels = 1 << 34, dict[str, Kernel]()

    def allocate(self, nbytes: int) -> tuple[int, Any]:
        self.end += -(-nbytes // 256) * 256
        return self.end - -(-nbytes // 256) * 256, None

    allocate_host = allocate

    def upload(self, target: Buffer, array: np.ndarray, *, staged: bool = False) -> None: ...

    def compile(self, kernels: Iterable[Kernel], progress: Any = None) -> None:
        self.kernels.update({k.digest: k for k in kernels})

    def prepare(self, call: Any) -> Any:
        return lambda: None


def launches(ops: Iterable[Operator], family: Any = None) -> list[Launch]:
    """A launch of each kernel of some operators, alone and together with its like.  `family`: who runs them."""
    found: dict[str, Launch] = {}
    for op in ops:
        runs = family or (provider(op.kernel) if op.kernel else None)
        if runs is None or not runs.accepts(op):
            continue
        parts = [None if v is None else v.type for v in op.inputs], [None if v is None else v.type for v in op.outputs]
        handed = [[t and Buffer(1 << 20, t) for t in part] for part in (*parts, runs.scratch(op))]
        for call in runs.bind(op, *handed):
            if isinstance(call, Launch):
                for one in (call, *([together([call.part])] if call.part else [])):
                    found.setdefault(one.kernel.digest, one)
    return list(found.values())


def step_launches(block: Block, data: Any) -> list[Launch]:
    """A launch of each kernel of a planned block, as a session makes them."""
    session = CudaSession(block, data, Nowhere())
    calls = (c for s in session.steps for c in s.calls if isinstance(c, Launch))
    return list({c.kernel.digest: c for c in calls}.values())
