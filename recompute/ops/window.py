"""Sliding windows: the index arithmetic that convolution and pooling share."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..language.contexts import ImportedNode

#: bytes of the blocks in which the kernels work, so that several passes over a block stay in the cache
BLOCK = 1 << 20


@dataclass(frozen=True)
class Window:
    """Windows of `kernel` elements over `inp`, one for each position of `out`; all tuples have one entry an axis.

    Element k of the window at position o is input element `o · stride + k · dilation - begin`.
    """

    inp: tuple[int, ...]
    out: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begin: tuple[int, ...]

    @functools.cached_property
    def taps(self) -> int:
        """Elements of a window."""
        return math.prod(self.kernel)

    @functools.cached_property
    def positions(self) -> int:
        """Number of windows."""
        return math.prod(self.out)

    def span(self, axis: int, k: int) -> tuple[int, int, int]:
        """Positions [lo, hi) whose element k along `axis` lies inside the input, and that element's index at lo."""
        offset = k * self.dilations[axis] - self.begin[axis]
        stride = self.strides[axis]
        lo = min(max(0, -(offset // stride)), self.out[axis])
        hi = max(lo, min(self.out[axis], (self.inp[axis] - 1 - offset) // stride + 1))
        return lo, hi, lo * stride + offset

    def reach(self) -> list[Tap]:
        """The taps of a window that reach the input somewhere, in row-major order."""
        return list(_reach(self))


@dataclass(frozen=True)
class Tap:
    """One element of all windows: its place in the window, the positions where it is inside, the input elements."""

    index: tuple[int, ...]
    number: int
    out: tuple[slice, ...]
    inp: tuple[slice, ...]


@functools.lru_cache(maxsize=1024)
def _reach(w: Window) -> tuple[Tap, ...]:
    reach = []
    for number, index in enumerate(_indices(w.kernel)):
        spans = [w.span(a, k) for a, k in enumerate(index)]
        if any(lo >= hi for lo, hi, _ in spans):
            continue
        out = tuple(slice(lo, hi) for lo, hi, _ in spans)
        inp = tuple(slice(at, at + (hi - lo - 1) * s + 1, s) for (lo, hi, at), s in zip(spans, w.strides, strict=True))
        reach.append(Tap(index, number, out, inp))
    return tuple(reach)


def _indices(shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    if not shape:
        yield ()
        return
    for rest in _indices(shape[:-1]):
        for i in range(shape[-1]):
            yield (*rest, i)


def full(values: Sequence[int], count: int, default: int) -> tuple[int, ...]:
    """An attribute with one entry an axis; empty: the default everywhere."""
    return tuple(values) if values else (default,) * count


def output_size(size: int, kernel: int, stride: int, dilation: int, pads: int, *, begin: int = 0, ceil: int = 0) -> int:
    """Number of windows along an axis; `ceil` counts a last one that reaches over the end, if it starts inside."""
    room = size + pads - ((kernel - 1) * dilation + 1)
    if not ceil:
        return room // stride + 1
    count = -(-room // stride) + 1
    return count - 1 if (count - 1) * stride >= size + begin else count


def window_attributes(node: ImportedNode, spatial: Sequence[int], kernel: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """`strides`, `pads` and `dilations` of an ONNX node, `auto_pad` resolved; () where all are the default."""
    n = len(kernel)
    strides = full(node.attributes.get("strides", ()), n, 1)
    dilations = full(node.attributes.get("dilations", ()), n, 1)
    pads = full(node.attributes.get("pads", ()), 2 * n, 0)
    auto = node.attributes.get("auto_pad", "NOTSET")
    if auto == "VALID":
        pads = (0,) * (2 * n)
    elif auto in ("SAME_UPPER", "SAME_LOWER"):
        totals = [
            max((-(-d // s) - 1) * s + (k - 1) * e + 1 - d, 0)
            for d, s, k, e in zip(spatial, strides, kernel, dilations, strict=True)
        ]
        less, more = [t // 2 for t in totals], [t - t // 2 for t in totals]
        pads = (*less, *more) if auto == "SAME_UPPER" else (*more, *less)
    elif auto not in ("NOTSET", ""):
        raise node.fail(f"auto_pad '{auto}' is unknown")
    return compact(strides, pads, dilations)


def compact(strides: Sequence[int], pads: Sequence[int], dilations: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Window attributes, those at their default as ()."""
    return {
        "strides": tuple(strides) if any(s != 1 for s in strides) else (),
        "pads": tuple(pads) if any(pads) else (),
        "dilations": tuple(dilations) if any(d != 1 for d in dilations) else (),
    }
