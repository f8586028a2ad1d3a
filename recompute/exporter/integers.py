"""The integers of an 8-bit model: weights, biases and what a batch normalisation changes of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

#: the largest integers of biases: products are summed on top of them
_LARGEST = 2**30


@dataclass(frozen=True)
class Scale:
    """One scale and zero point of an activation, and the type of its integers."""

    scale: np.ndarray
    zero: np.ndarray


@dataclass(frozen=True)
class Integers:
    """A weight as int8, with a scale for each index of its axis of output channels; `levels`: the largest integer."""

    values: np.ndarray
    scale: np.ndarray
    axis: int
    levels: int

    @staticmethod
    def of(w: np.ndarray, scale: np.ndarray, axis: int, levels: int) -> Integers:
        """A weight rounded as in training."""
        each = scale.reshape([-1 if i == axis else 1 for i in range(w.ndim)])
        return Integers(np.clip(np.rint(w / each), -levels, levels).astype(np.int8), scale.reshape(-1), axis, levels)

    def floats(self) -> np.ndarray:
        """The dequantised weight: integers times scale."""
        shape = [-1 if i == self.axis else 1 for i in range(self.values.ndim)]
        return self.values * self.scale.reshape(shape)


def folded(weight: Integers, factor: np.ndarray) -> Integers:
    """The weight times a factor for each output channel: the same integers, but for signs, and other scales.

    Symmetric integers lose nothing by it, so that training need not fold normalisations.
    """
    shape = [-1 if i == weight.axis else 1 for i in range(weight.values.ndim)]
    values = weight.values * np.sign(factor).astype(np.int8).reshape(shape)
    scale = (weight.scale * np.abs(factor)).astype(weight.scale.dtype)
    return replace(weight, values=values, scale=np.where(scale > 0, scale, np.float32(1)))


def quantized_bias(weight: Integers, bias: np.ndarray, x: Scale) -> tuple[Integers, np.ndarray, np.ndarray]:
    """The weight, the bias as int32, and the bias's scales, which are those of the products.

    Where a bias is too large for its scale, the weights of its channel are next to nothing: they take a larger one.
    """
    least = np.abs(bias) / (np.float64(x.scale) * _LARGEST)
    few = weight.scale < least
    if few.any():
        scale = np.where(few, least, weight.scale).astype(np.float32)
        weight = Integers.of(weight.floats(), scale, weight.axis, weight.levels)
    scale = (x.scale * weight.scale).astype(np.float32)
    return weight, np.rint(bias / scale.astype(np.float64)).astype(np.int32), scale
