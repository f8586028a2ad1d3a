"""What operators do along their axes: in slices along every declared index, joined or combined, they give the whole."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from recompute.language.axes import factors, piece, shared, through_expansion
from recompute.language.factors import Factor, Place
from recompute.language.op import Op
from recompute.language.types import TensorType
from recompute.testing import Case, all_ops, cases

COMBINE = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply,
           "logsumexp": np.logaddexp}  # fmt: skip
#: relative differences of sums that are taken in another order, by element type
CLOSE = {"f64": 1e-12, "f32": 2e-5, "f16": 2e-2, "bf16": 1e-1}

#: operators none of whose samples can run in slices, and why
WHOLE = {
    "CheckFinite": "takes one number",
    "ChannelsLastGlobalMaxPoolGrad": "its indices count through all images",
    "GlobalMaxPoolGrad": "its indices count through all images",
    "GlobalNorm": "the root of a sum over everything",
    "Increment": "takes one number",
    "InverseIfFinite": "asks whether everything is finite",
    "LambUpdate": "needs norms of the whole parameter",
    "LarsUpdate": "needs norms of the whole parameter",
    "LossScaleUpdate": "takes single numbers",
    "Reference": "any operator of ONNX, known by its results only",
    "RowSums": "a part of a table, from rows of anywhere",
    "Shard": "a part of all elements behind one another",
    "SquareSums": "parts of all elements behind one another",
}


def types(arrays: Any) -> tuple[TensorType | None, ...]:
    return tuple(None if a is None else TensorType.of(a) for a in arrays)


def results(case: Case) -> tuple[TensorType | None, ...]:
    """The types of all outputs, None for those that the sample leaves out."""
    made = case.op.infer(*types(case.inputs))
    count = len(made) if case.want is None else case.want
    kept = [
        i < count and (i >= len(case.op.updates) or case.inputs[case.op.updates[i]] is not None)
        for i in range(len(made))
    ]
    return tuple(t if k else None for t, k in zip(made, kept, strict=True))


def variants(case: Case) -> list[tuple[TensorType | None, ...]]:
    """The outputs that a sample is tried with: all, and only those that must be."""
    outs = results(case)
    needed = case.op.required_outputs
    fewer = (*outs[:needed], *[None] * (len(outs) - needed))
    if needed in (0, len(outs)) or "BatchNormStatistics" in case.op.name:  # its two outputs are made together
        return [outs]
    return [outs] if fewer == outs else [outs, fewer]


def run(op: Any, inputs: Any, outs: tuple[TensorType | None, ...]) -> list[np.ndarray | None]:
    ins = [None if a is None else np.array(a) for a in inputs]
    made = [None if t is None else np.zeros(t.shape, t.numpy) for t in outs]
    for i, j in enumerate(op.updates[: len(made)]):
        made[i] = ins[j] if made[i] is not None else None
    room = [np.zeros(t.shape, t.numpy) for t in op.scratch(list(types(ins)), list(outs))]
    with np.errstate(all="ignore"):
        op.compute(ins, made, room)
    return made


def in_slices(case: Case, f: Factor, outs: tuple[TensorType | None, ...]) -> list[Any]:
    """The outputs of two uneven slices, put together."""
    border = max(1, f.size // 3)
    got: list[list[Any]] = []
    for start, stop in ((0, border), (border, f.size)):
        op, given, made = piece(case.op, f, start, stop - start, types(case.inputs), outs)
        inputs = [
            p.cut(a, f.size, start, stop) if a is not None and p is not None else a
            for a, p in zip(case.inputs, f.inputs, strict=True)
        ]
        assert types(inputs) == given
        inferred = op.infer(*given)
        assert all(t is None or t == u for t, u in zip(made, inferred, strict=True)), f"{op} makes {inferred}"
        arrays = run(op, inputs, made)
        for i in f.shares:
            arrays[i] = arrays[i] * np.asarray((stop - start) / f.size, arrays[i].dtype)
        got.append(arrays)
    return [
        None if t is None else joined(p, f.size, *pair)
        for t, p, pair in zip(outs, f.outputs, zip(*got, strict=True), strict=True)
    ]


def joined(how: Place | str | None, size: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if not isinstance(how, Place):
        assert how is not None
        return COMBINE[how](a, b)
    shape = a.shape
    lead, rest = shape[: how.axis], shape[how.axis + 1 :]
    split = [
        v.reshape((*lead, how.outer, v.shape[how.axis] // (how.outer * how.inner), how.inner, *rest)) for v in (a, b)
    ]
    return np.concatenate(split, axis=how.axis + 1).reshape((*lead, how.extent(size), *rest))


@pytest.mark.parametrize("cls", list(all_ops()), ids=lambda cls: cls.__name__)
def test_slices_give_the_whole(cls: type[Op]) -> None:
    for case in cases(cls):
        check_slices(case)


def check_slices(case: Case) -> None:
    for outs in variants(case):
        given = types(case.inputs)
        for f in shared(case.op, given, outs):
            for t, p in zip((*given, *outs), (*f.inputs, *f.outputs), strict=True):
                assert not isinstance(p, Place) or (t is not None and p.extent(f.size) == t.shape[p.axis]), f
        found = {*factors(case.op, given, outs), *through_expansion(case.op, given, outs)}
        whole = run(case.op, case.inputs, outs) if found else []
        for f in found:
            for t, want, got in zip(outs, whole, in_slices(case, f, outs), strict=True):
                if t is None:
                    continue
                products = "Attention" in case.op.name or case.op.name == "Sketch"  # they round by shape
                exact = (case.op.random and not products) or case.op.moves_data
                if exact and all(isinstance(p, Place) for p in f.outputs):
                    assert got.tobytes() == want.tobytes(), f"{f}: other bits"
                assert want is not None and got.dtype == want.dtype and got.shape == want.shape, f
                if t.is_float:
                    want, got = want.astype(np.float64), got.astype(np.float64)
                    scale = max(float(np.max(np.abs(want[np.isfinite(want)]), initial=0)), 1.0)
                    close = CLOSE[t.dtype]
                    np.testing.assert_allclose(got, want, rtol=close, atol=close * scale, err_msg=str(f))
                else:
                    np.testing.assert_array_equal(got, want, err_msg=str(f))


@functools.cache
def sliceable() -> frozenset[str]:
    return frozenset(
        cls.__name__ for cls in all_ops() if any(factors(c.op, types(c.inputs), results(c)) for c in cases(cls))
    )


def test_operators_that_are_needed_whole() -> None:
    without = {cls.__name__ for cls in all_ops() if cases(cls)} - sliceable()
    assert without == set(WHOLE), f"declared by none: {sorted(without - set(WHOLE))}"


def close(got: Any, want: Any, t: TensorType) -> bool:
    if not t.is_float:
        return bool(np.array_equal(got, want))
    got, want = got.astype(np.float64), want.astype(np.float64)
    return bool(np.allclose(got, want, rtol=CLOSE[t.dtype], atol=CLOSE[t.dtype] * max(1, np.abs(want).max(initial=0))))


@pytest.mark.parametrize("cls", [c for c in all_ops() if c.linear], ids=lambda c: c.__name__)
def test_linear_inputs(cls: Any) -> None:
    tried = set()
    for case in cases(cls):
        outs = results(case)
        for group in cls.linear:
            at = [i for i in group if i < len(case.inputs) and case.inputs[i] is not None]
            if not at or any(case.inputs[i].dtype != np.float64 for i in at):
                continue
            tried.add(group)
            inputs: list[list[Any]] = [list(case.inputs) for _ in range(3)]
            for i in at:
                part = case.inputs[i] * 0.37 + 0.1
                inputs[1][i], inputs[2][i] = part, case.inputs[i] - part
            whole, a, b = (run(case.op, given, outs) for given in inputs)
            for t, y, p, q in zip(outs, whole, a, b, strict=True):
                assert t is None or close(p + q, y, t), f"{case.op} is not linear in {at}"
    assert tried == set(cls.linear), f"no sample tries {set(cls.linear) - tried}"
