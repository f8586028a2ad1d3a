"""The discrete Fourier transform and STFT; complex numbers are a last axis of two."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...language.factors import in_step
from ...language.op import Cost, Imported, ImportedNode, Op, imports
from ..common import normal_axis

#: NumPy 2 transforms into a given array
_FFT_WRITES = int(np.__version__.split(".")[0]) >= 2


class DFT(Op):
    """x [..., 1 or 2] → its discrete Fourier transform along `axis`, not the last (ONNX DFT-20).

    `length`: x is cut or filled with zeros to it; 0: as long as x.  `inverse`: with 1 / length.  `onesided`: the
    first half of the transform of a real x; with `inverse`, the real result of that half.
    """

    axis: int = -2
    length: int = 0
    inverse: int = 0
    onesided: int = 0
    on_host = "fast Fourier transforms are NumPy's"

    def infer(self, x):
        """Complex, or real for the inverse of a half."""
        if not x.is_float or x.ndim < 2 or x.shape[-1] not in (1, 2):
            raise self.fail("needs floats with a last axis of 1 or 2", x)
        axis = normal_axis(self.axis, x.ndim, self)
        if axis == x.ndim - 1 or (self.onesided and x.shape[-1] == (1 if self.inverse else 2)):
            raise self.fail("transforms another axis than the last, a real x to a half, a half to a real one", x)
        n = self.size(x)
        if n < 1:
            raise self.fail("needs a positive length", x)
        half = self.onesided and not self.inverse
        last = 1 if self.onesided and self.inverse else 2
        return (x.with_shape((*x.shape[:axis], n // 2 + 1 if half else n, *x.shape[axis + 1 : -1], last)),)

    def size(self, x: Any) -> int:
        """The length of the transform."""
        n = x.shape[self.axis]
        return self.length or (2 * (n - 1) if self.onesided and self.inverse else n)

    def axis_factors(self, ins, outs):
        """All but the transformed one and the parts of numbers."""
        axis = normal_axis(self.axis, ins[0].ndim, self)
        return in_step(ins, outs, [a for a in range(ins[0].ndim - 1) if a != axis])

    def compute(self, ins, outs, scratch):
        """The library's FFT, which allocates its result where NumPy is older than 2, and on a device."""
        x, y = ins[0], outs[0]
        n, axis = self.size(x), normal_axis(self.axis, x.ndim, self)
        kind = np.complex128 if x.dtype == np.float64 else np.complex64
        if x.dtype.itemsize < 4:
            x = x.astype(np.float32)
        signal = x[..., 0] if x.shape[-1] == 1 else np.ascontiguousarray(x).view(kind)[..., 0]
        name = ("irfft" if self.inverse else "rfft") if self.onesided else ("ifft" if self.inverse else "fft")
        transform = getattr(np.fft, name)
        if _FFT_WRITES and y.dtype.itemsize >= 4:
            transform(signal, n, axis=axis, out=y[..., 0] if y.shape[-1] == 1 else y.view(kind)[..., 0])
            return
        spectrum = transform(signal, n, axis=axis)
        if y.shape[-1] == 1:
            y[..., 0] = spectrum
        else:
            y[..., 0], y[..., 1] = spectrum.real, spectrum.imag

    def cost(self, ins, outs):
        """5 n log2 n for each transform."""
        n = self.size(ins[0])
        return Cost(int(5 * outs[0].size * max(np.log2(n), 1)), super().cost(ins, outs).bytes)

    def gradient(self, b, ins, outs, grads):
        """The adjoint: a transform the other way, of the same length, cut or filled to x's shape."""
        x, dy = ins[0], grads[0]
        axis, n = normal_axis(self.axis, x.ndim, self), self.size(x)
        if self.onesided and self.inverse:
            half = n // 2 + 1
            dx = b.DFT(dy, axis=axis, length=n, onesided=1)
            middle = b.Slice(dx, starts=(1,), ends=(half - (n % 2 == 0),), axes=(axis,)) if half > 1 else None
            parts = [b.Slice(dx, starts=(0,), ends=(1,), axes=(axis,))]
            parts[0] = b.Mul(parts[0], b.constant(1.0 / n, x))
            if middle is not None and middle.shape[axis]:
                parts.append(b.Mul(middle, b.constant(2.0 / n, x)))
            if n % 2 == 0 and half > 1:
                last = b.Slice(dx, starts=(half - 1,), ends=(half,), axes=(axis,))
                parts.append(b.Mul(last, b.constant(1.0 / n, x)))
            dx = b.Concat(*parts, axis=axis) if len(parts) > 1 else parts[0]
        else:
            dx = b.DFT(dy, axis=axis, length=n, inverse=1 - self.inverse)
            dx = b.Mul(dx, b.constant(1.0 / n if self.inverse else float(n), x))
        if dx.shape[axis] > x.shape[axis]:
            dx = b.Slice(dx, starts=(0,), ends=(x.shape[axis],), axes=(axis,))
        elif dx.shape[axis] < x.shape[axis]:
            pads = [0] * 2 * x.ndim
            pads[x.ndim + axis] = x.shape[axis] - dx.shape[axis]
            dx = b.Pad(dx, pads=tuple(pads))
        return [b.Slice(dx, starts=(0,), ends=(1,), axes=(x.ndim - 1,)) if x.shape[-1] == 1 else dx]

    def export(self, g, ins, outs):
        length = g.array(np.array(self.length)) if self.length else ""
        inputs = [ins[0], length, g.array(np.array(self.axis))]
        g.node("DFT", inputs, outs, inverse=self.inverse, onesided=self.onesided)
        return True

    @classmethod
    def from_onnx(cls, node):
        """The axis is an attribute up to opset 19."""
        attributes = node.attributes
        length = int(node.need_constant(1, "dft_length").reshape(())) if node.type(1) is not None else 0
        axis = attributes.get("axis", 1) if node.opset < 20 else -2
        if node.type(2) is not None:
            axis = int(node.need_constant(2, "axis").reshape(()))
        x = node.need(0)
        options = {"inverse": attributes.get("inverse", 0), "onesided": attributes.get("onesided", 0)}
        return node.emit(cls(axis % x.ndim, length, **options), x)

    @classmethod
    def samples(cls, draw):
        """Both ways, 16-bit floats, cut and filled; real and complex."""
        for shape, length in (("2,5,1", 0), ("1,4,2", 6), ("3,6,2", 4), ("1,1,1", 0)):
            for inverse in (0, 1):
                yield draw.case(cls(1, length, inverse), draw(f"f64[{shape}]"), export=False)
        for shape, length in (("2,5,1", 0), ("1,4,3,1", 6)):
            yield draw.case(cls(1, length, 0, 1), draw(f"f64[{shape}]"), export=False)
        for shape, length in (("2,4,2", 0), ("1,3,2", 5), ("2,4,2", 3)):
            yield draw.case(cls(1, length, 1, 1), draw(f"f64[{shape}]"), export=False)
        yield draw.case(cls(), draw("f32[2,4,2]"), export=False)


@imports("STFT")
def stft(node: ImportedNode) -> Imported:
    """DFT of the windowed frames: (signal [N, T, 1 or 2], frame_step, window, frame_length) → [N, frames, bins, 2]."""
    b, x = node.builder, node.need(0)
    step = int(node.need_constant(1, "frame_step").reshape(()))
    window = node.input(2)
    if node.type(3) is not None:
        length = int(node.need_constant(3, "frame_length").reshape(()))
    elif window is not None:
        length = window.shape[0]
    else:
        raise node.fail("has neither a window nor a frame_length")
    if x.ndim == 2:
        x = b.Reshape(x, shape=(*x.shape, 1))
    if step < 1 or not 0 < length <= x.shape[1]:
        raise node.fail(f"has frames of {length} every {step} of {x.shape[1]} elements")
    count = (x.shape[1] - length) // step + 1
    at = np.arange(count)[:, None] * step + np.arange(length)
    frames = b.Gather(x, node.named(node.body().constant(at)), axis=1)
    if window is not None:
        frames = b.Mul(frames, b.Reshape(window, shape=(length, 1)))
    half = node.attributes.get("onesided", 1) and x.shape[-1] == 1
    return b.DFT(frames, axis=2, onesided=int(half))
