"""Weights that are drawn from their names and shapes, so that they need not be stored; used by make.py and the test."""

from __future__ import annotations

import math
import zlib

import numpy as np
import onnx

#: inputs of more elements than this are drawn too
MANY = 1000
_MARK, _FILL = "drawn:", "fill:"


def uniform(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers in [-1, 1) by SplitMix64: the same with every version of NumPy."""
    z = np.arange(math.prod(shape), dtype=np.uint64) + np.uint64(zlib.crc32(name.encode()) << 20)
    z = (z + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return ((z >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0).reshape(shape)


def parameter(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A parameter as in a fresh network: vectors called bias are 0, those called weight 1; others have a standard
    deviation of 1 / sqrt(fan-in)."""
    last = name.rpartition(".")[2]
    if len(shape) < 2 and "bias" in last:
        return np.zeros(shape)
    if len(shape) == 1 and "weight" in last:
        return np.ones(shape)
    fan_in = math.prod(shape[1:]) if len(shape) > 1 else 12
    return uniform(name, shape) * math.sqrt(3.0 / max(fan_in, 1))


def picture(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """An input: pictures, sounds."""
    return uniform(f"input {name}", shape) * math.sqrt(3.0)


def fingerprint(name: str, before: np.ndarray, after: np.ndarray) -> tuple[float, float]:
    """What identifies a change: its product with a drawn vector, and its norm."""
    change = np.asarray(after, np.float64) - before
    return float((change * uniform(f"fingerprint {name}", change.shape)).sum()), float(np.sqrt((change**2).sum()))


def mark(model: onnx.ModelProto, drawn: dict[str, np.ndarray]) -> None:
    """Replaces the contents of initializers by how they come from drawn parameters: itself, its transpose, a multiple;
    or by the one number they are filled with."""
    from_contents = {(a.shape, a.tobytes()): n for n, a in drawn.items()}
    from_contents.update({(a.T.shape, a.T.tobytes()): f"{n}:T" for n, a in drawn.items() if a.ndim == 2})
    for t in model.graph.initializer:
        if t.data_type != onnx.TensorProto.DOUBLE or math.prod(t.dims) < 8:
            continue
        a = onnx.numpy_helper.to_array(t)
        source = from_contents.get((a.shape, a.tobytes()))
        if (a == a.flat[0]).all():
            text = f"{_FILL}{float(a.flat[0])!r}"
        elif source is not None:
            text = f"{_MARK}{source}"
        else:
            text = next((f"{_MARK}{n}:{f!r}" for n, b in drawn.items() if (f := _multiple(a, b)) is not None), "")
        if text:
            t.ClearField("raw_data")
            t.ClearField("double_data")
            t.doc_string = text


def _multiple(a: np.ndarray, b: np.ndarray) -> float | None:
    """The factor between two tensors: batch normalisation of fresh statistics, folded into a convolution."""
    if a.shape != b.shape or not b.flat[0]:
        return None
    factor = float(a.flat[0] / b.flat[0])
    return factor if np.allclose(a, b * factor, rtol=1e-13, atol=0) else None


def fill(model: onnx.ModelProto) -> None:
    """Gives marked initializers their contents."""
    for t in model.graph.initializer:
        if t.doc_string.startswith(_FILL):
            a = np.full(tuple(t.dims), float(t.doc_string.removeprefix(_FILL)))
        elif t.doc_string.startswith(_MARK):
            name, _, how = t.doc_string.removeprefix(_MARK).partition(":")
            a = parameter(name, tuple(t.dims[::-1] if how == "T" else t.dims))
            a = a.T if how == "T" else a * float(how or 1)
        else:
            continue
        t.raw_data = a.tobytes()
        t.doc_string = ""
