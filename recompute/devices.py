"""Devices as cost models: the roofline (Williams, Waterman & Patterson 2009) by published peaks, or measured rates.

An operator takes the longer of its arithmetic at the device's peak rate and its traffic at the device's bandwidth, plus
the time to start it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from .efficiency import Reached
from .errors import UsageError, expect
from .language.ir import Free, Operator
from .language.kernels import bits_are_portable
from .language.op import Cost, Op
from .language.types import Types
from .support.cache import is_own, make_private
from .support.files import apart, cache_folder, cores, machine, replacing


class CostModel(Protocol):
    """A cost model: returns the same cost for the same operator during the whole process."""

    @property
    def name(self) -> str:
        """The name in messages."""

    def seconds(self, operator: Operator) -> float:
        """Time of one operator."""


@dataclass(frozen=True)
class Device:
    """The roofline of a device: operations and bytes per second, seconds to start an operator, bytes of memory.

    `flops`: rate of float32 and integers; `f16`, `bf16`, `f64`: rates of other element types (0: same as `flops`),
    matrix units included; `tf32`: rate of float32 whose products may be rounded to TF32 (0: not supported).  `memory`
    is 0 if unknown.  `link`: bytes per second between device and host memory, each way (0: half the bandwidth, as if
    both were the same memory).  `reached`: the parts of the rates that are counted
    with, by the size of products (None: all of them).
    """

    name: str
    flops: float
    bandwidth: float
    launch: float
    memory: int = 0
    f16: float = 0.0
    bf16: float = 0.0
    f64: float = 0.0
    tf32: float = 0.0
    link: float = 0.0
    reached: Reached | None = None

    def with_tf32(self) -> Device:
        """The device with float32 products at the TF32 rate; itself if it has no TF32."""
        if not self.tf32:
            return self
        return dataclasses.replace(self, name=f"{self.name} with TF32", flops=self.tf32, tf32=0.0)

    def rate(self, precision: str | None) -> float:
        """Operations per second at the peak, in a precision of products (None: float32)."""
        return {"fp16": self.f16, "bf16": self.bf16, "bf16-pure": self.bf16, "tf32": self.tf32}.get(
            precision or "", 0.0
        ) or self.flops

    def seconds(self, operator: Operator) -> float:
        """Time of one operator; frees, views, asynchronous copies and communication take none."""
        model, seconds = operator.facts.get("seconds", (None, 0.0))
        if model is not self:
            seconds = self._seconds(operator)
            operator.facts["seconds"] = self, seconds
        return seconds

    def _seconds(self, operator: Operator) -> float:
        op = operator.op
        if isinstance(op, Free) or op.copies or op.communicates or is_view(operator):
            return 0.0
        cost = operator_cost(operator)
        dtype = next((v.dtype for v in (*operator.reads(), *operator.writes()) if v.type.is_float), "f32")
        how = self.reached
        if how is None:
            return self.roofline(cost.flops, cost.bytes, dtype) + self.launch
        flops = cost.flops / _part(how, operator)
        return self.roofline(flops, cost.bytes / how.memory, dtype) + self.launch

    def roofline(self, flops: float, nbytes: float, dtype: str) -> float:
        """Seconds of operations on an element type ("f32", "bf16", ...), or of the bytes that they move, if longer.

        Williams, Waterman & Patterson 2009.
        """
        rate = {"f16": self.f16, "bf16": self.bf16, "f64": self.f64}.get(dtype, 0.0) or self.flops
        return max(flops / rate, nbytes / self.bandwidth)


def _part(how: Reached, operator: Operator) -> float:
    """The part of a device's peak that an operator reaches: a product by the tiles of its result."""
    if operator.op.name.startswith("TiledAttention"):
        return how.attention
    if operator.op.name not in ("MatMul", "Gemm"):
        return how.products
    *many, rows, columns = (1, 1, *next(operator.writes()).shape)
    reads = list(operator.reads())
    if len(reads) > 1 and len(reads[1].shape) == 2:  # one factor for all
        many, rows = [], math.prod(many) * rows
    return how.products * how.filled(rows, columns, math.prod(many))


def is_view(operator: Operator) -> bool:
    """Whether all results share the buffer of the operator's first input, so that the executor has nothing to do."""
    offsets = operator.views()
    return bool(offsets) and all(
        v is None or (i < len(offsets) and offsets[i] is not None) for i, v in enumerate(operator.outputs)
    )


def device(name: str) -> Device:
    """A device by name (`h200`, `a100-80`, `cpu`; upper or lower case), with the suffix `:tf32` for TF32 matrix units.

    The name may have the GiB of memory behind it, where there is one size (`h100-80`).  UsageError with the known names
    for others.
    """
    plain, _, variant = expect("device", name, str, "a name such as 'h200'").strip().lower().partition(":")
    key = "".join(c for c in plain if c.isalnum())
    sheets = {"cpu": None, **DATASHEETS}
    keys = [k for k, sheet in sheets.items() if key in _spellings(k, sheet)]
    if not keys:
        inside = [k for k in sheets if key and key in k.replace("-", "")]
        hint = f" (did you mean {', '.join(inside)}?)" if inside else ""
        raise UsageError(f"unknown device '{name}'{hint}; known: {', '.join(sheets)}")
    sheet = sheets[keys[0]]
    if variant not in ("", "tf32") or (variant and (sheet is None or not sheet.tf32)):
        with_tf32 = ", ".join(k for k, d in DATASHEETS.items() if d.tf32)
        raise UsageError(f"device '{name}': the only suffix is ':tf32', for {with_tf32}")
    if sheet is None:
        return this_cpu()
    tera = 1e12
    half = {"f16": sheet.f16 * tera, "bf16": (sheet.f16 if sheet.bf16 else sheet.f32) * tera}
    shown = keys[0].upper().replace("RTX-", "RTX ").replace("TI", " Ti")
    rates: dict[str, Any] = {"f64": sheet.f64 * tera, "tf32": sheet.tf32 * tera, "link": sheet.link * 1e9, **half}
    found_device = Device(shown, sheet.f32 * tera, sheet.bandwidth * 1e9, LAUNCH, sheet.memory << 30, **rates)
    return found_device.with_tf32() if variant else found_device


def as_cost(cost: CostModel | str) -> CostModel:
    """A cost model, or the device of this name.  UsageError for all else."""
    if isinstance(cost, str):
        return device(cost)
    if not callable(getattr(cost, "seconds", None)):
        raise UsageError(f"cost must be a cost model or the name of a device, such as 'h200', not {cost!r}")
    return cost


def _spellings(name: str, sheet: Datasheet | None) -> set[str]:
    """Letters and digits of the names of a device."""
    plain = {name.replace("-", ""), name.removeprefix("rtx-").replace("-", "")}
    return plain if sheet is None else plain | {f"{n}{sheet.memory}" for n in plain}


@dataclass(frozen=True)
class Datasheet:
    """Published peaks: TFLOP/s by element type without sparsity, GB/s, GiB, GB/s to the host's memory (each way).

    `f16` is that of the matrix units with float32 accumulation; `bf16`: whether bfloat16 is as fast; `tf32` 0: none.
    """

    f32: float
    tf32: float
    f16: float
    bf16: bool
    f64: float
    bandwidth: float
    memory: int
    link: float


#: GB/s of 16 lanes of PCI Express each way: 8, 16, 32 GT/s a lane in packets of 128 of 130 bits (PCI-SIG, base
#: specifications 3.0, 4.0, 5.0); of NVLink-C2C: NVIDIA's GH200 datasheet (2023) says 900 for both directions together
_PCIE3, _PCIE4, _PCIE5, _C2C = 15.75, 31.5, 63.0, 450.0
#: seconds between the starts of two small kernels in one CUDA stream: not in datasheets, a few microseconds on all
LAUNCH = 4e-6
# NVIDIA's datasheets: V100 (SXM2, 2020), A100 (SXM, 2021), H100 and H200 (SXM, 2023/24; dense rates are half of those
# "with sparsity"), L4 (2023), T4 (2019).  GeForce: NVIDIA's architecture whitepapers Turing (2018, appendix of the
# 2080 Ti, reference clocks), Ampere GA102, Ada and RTX Blackwell (2025).  GH200: the one with 96 GB.  Each of them
# names the generation of PCI Express, of 16 lanes.  float64 of L4, T4 and GeForce is 1/64 of
# float32 (Turing: 1/32), as the whitepapers say.
DATASHEETS: dict[str, Datasheet] = {
    "v100-16": Datasheet(15.7, 0, 125, False, 7.8, 900, 16, _PCIE3),
    "v100-32": Datasheet(15.7, 0, 125, False, 7.8, 900, 32, _PCIE3),
    "a100-40": Datasheet(19.5, 156, 312, True, 9.7, 1555, 40, _PCIE4),
    "a100-80": Datasheet(19.5, 156, 312, True, 9.7, 2039, 80, _PCIE4),
    "h100": Datasheet(67, 494.5, 989.5, True, 34, 3350, 80, _PCIE5),
    "h200": Datasheet(67, 494.5, 989.5, True, 34, 4800, 141, _PCIE5),
    "gh200": Datasheet(67, 494.5, 989.5, True, 34, 4000, 96, _C2C),
    "l4": Datasheet(30.3, 60, 121, True, 0.473, 300, 24, _PCIE4),
    "t4": Datasheet(8.1, 0, 65, False, 0.253, 320, 16, _PCIE3),
    "rtx-2080ti": Datasheet(13.4, 0, 53.8, False, 0.42, 616, 11, _PCIE3),
    "rtx-3090": Datasheet(35.6, 35.6, 71, True, 0.556, 936, 24, _PCIE4),
    "rtx-4090": Datasheet(82.6, 82.6, 165.2, True, 1.29, 1008, 24, _PCIE4),
    "rtx-5090": Datasheet(104.8, 104.8, 209.5, True, 1.64, 1792, 32, _PCIE5),
}


def this_cpu() -> Device:
    """The roofline of this CPU, as measured; where bits are those of every machine, so are the rates, on which plans
    depend."""
    return _any_cpu() if bits_are_portable() else _measured_cpu()


@functools.cache
def _any_cpu() -> Device:
    return Device("this CPU", _PORTABLE_RATE, _EXPECTED_BANDWIDTH, 1e-6, _physical_memory(), f64=_PORTABLE_RATE / 2)


@functools.cache
def _measured_cpu() -> Device:
    """The roofline of this CPU: rates of a matrix product and a copy, measured once (about half a second, most of it
    waiting) and kept in the user's cache folder, so that estimates and plans are the same in every run on this machine.

    Rates that this kind of processor cannot have are refused: they are measured again, then taken from its vectors.
    """
    path = None if (folder := cache_folder()) is None else folder / f"rates-{machine()[1]}.json"
    rates = _read_rates(path)
    for _ in range(_ATTEMPTS):
        rates = rates or _measured_rates()
        if _plausible(*rates):
            break
        implausible, rates = rates, None
    if rates is None:
        flops, bandwidth = rates = _expected_flops() / 2, _EXPECTED_BANDWIDTH
        warnings.warn(
            f"this CPU's measured rates, {implausible[0]:.2g} operations and {implausible[1]:.2g} bytes a second, are "
            f"not plausible (is the machine busy?): estimated times are by {flops:.2g} and {bandwidth:.2g}",
            stacklevel=2,
        )
    elif path is not None:
        _write_rates(path, *rates)
    flops, bandwidth = rates
    return Device("this CPU", flops, bandwidth, 1e-6, _physical_memory(), f64=flops / 2)


#: how often rates are measured; spaced samples of each measurement, and seconds between them
_ATTEMPTS, _SAMPLES, _SPACE = 3, 6, 0.06
#: float32 operations a cycle of one core by the vectors of its family, with two units for products and sums; of others
_A_CYCLE = {"avx512f": 64, "avx2": 32, "avx": 16}
_OTHERS = 8
#: cycles a second: what most cores have; the least and the most that a measured rate may stand for
_CYCLES, _SLOWEST, _FASTEST = 2e9, 0.2e9, 8e9
_PORTABLE_RATE = 1e11
#: bytes a second of a copy: of most machines; the least and the most that is plausible
_EXPECTED_BANDWIDTH, _LEAST_BANDWIDTH, _MOST_BANDWIDTH = 1e10, 2e8, 4e12


def _expected_flops(cycles: float = _CYCLES) -> float:
    """Float32 operations a second of all cores at a clock rate."""
    flags: set[str] = set()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        flags = {f for line in lines if line.startswith("flags") for f in line.partition(":")[2].split()}
    return cores() * cycles * next((n for name, n in _A_CYCLE.items() if name in flags), _OTHERS)


def _plausible(flops: float, bandwidth: float) -> bool:
    """Whether this kind of processor can have these rates."""
    possible = _expected_flops(_SLOWEST) / cores() <= flops <= _expected_flops(_FASTEST)  # one core may do it all
    return possible and _LEAST_BANDWIDTH <= bandwidth <= _MOST_BANDWIDTH


def operator_cost(op: Operator) -> Cost:
    """The cost of one operator; frees cost nothing."""
    if isinstance(op.op, Free):
        return Cost(0, 0)
    if type(op.op).cost is Op.cost:
        return op.op.cost(*op.types)
    try:
        return _cost(op.op, *op.types)
    except TypeError:  # a field that cannot be hashed, as of an operator from elsewhere
        return op.op.cost(*op.types)


@functools.lru_cache(maxsize=1 << 12)
def _cost(op: Op, ins: Types, outs: Types) -> Cost:
    """The cost of an operator with a rule for it: equal layers ask for the same."""
    return op.cost(ins, outs)


def _measured_rates() -> tuple[float, float]:
    """Operations and bytes a second: the best of samples with time between them, so that other work may end."""
    n = 640
    a, b, c = (np.ones((n, n), np.float32) for _ in range(3))
    x, y = np.ones(1 << 23, np.float32), np.empty(1 << 23, np.float32)
    product = copy = math.inf
    for i in range(_SAMPLES):
        time.sleep(_SPACE if i else 0)
        product = min(product, _fastest(lambda: np.matmul(a, b, out=c)))
        copy = min(copy, _fastest(lambda: np.copyto(y, x)))
    return float(f"{2 * n**3 / product:.3g}"), float(f"{2 * x.nbytes / copy:.3g}")


def _read_rates(path: Path | None) -> tuple[float, float] | None:
    """Rates measured by an earlier process; None if there are no valid ones."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        rates: Any = json.loads(path.read_text()) if path is not None and is_own(path) else {}
        flops, bandwidth = float(rates["flops"]), float(rates["bandwidth"])
        if _plausible(flops, bandwidth):
            return flops, bandwidth
    return None


def _write_rates(path: Path, flops: float, bandwidth: float) -> None:
    if _read_rates(path) is None and is_own(path):
        with contextlib.suppress(OSError):  # a failure costs the next process only 50 ms
            make_private(path.parent)
            with apart(), replacing(path) as temporary:
                temporary.write_text(json.dumps({"machine": machine()[0], "flops": flops, "bandwidth": bandwidth}))


def _physical_memory() -> int:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 0


def _fastest(run: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(2):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best
