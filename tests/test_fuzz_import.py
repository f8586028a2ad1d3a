"""Damaged and nonsensical models: `load` gives a program that passes the verifier, or says what is wrong."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto

from recompute import RecomputeError, load, verify

HERE = Path(__file__).parent
FILES = [HERE.parent / "models/mlp.onnx", HERE.parent / "models/lenet.onnx"]
FILES += sorted((HERE / "data/pytorch").glob("[acemn]*.onnx"))[::3]
#: sizes, axes and counts that nobody expects
ODD = [0, -1, 1, 2, 3, -2, 7, 100, 2**31, -(2**31), 2**40, 2**63 - 1, -(2**63)]


def change_attribute(r: random.Random, model: ModelProto, node: NodeProto) -> None:
    if not node.attribute:
        return
    a = r.choice(node.attribute)
    if r.random() < 0.2:
        a.CopyFrom(onnx.helper.make_attribute(a.name, r.choice([1, 1.5, "x", [1, 2], [0.5]])))
    elif a.type == AttributeProto.INT:
        a.i = r.choice(ODD)
    elif a.type == AttributeProto.FLOAT:
        a.f = r.choice([-1.0, float("nan"), float("inf"), 1e30])
    elif a.type == AttributeProto.INTS and len(a.ints):
        a.ints[r.randrange(len(a.ints))] = r.choice(ODD)
    elif a.type == AttributeProto.TENSOR:
        change_tensor(r, a.t)
    else:
        node.attribute.remove(a)


def change_tensor(r: random.Random, t: TensorProto) -> None:
    if t.data_type in (TensorProto.INT64, TensorProto.INT32) and r.random() < 0.7:
        array = onnx.numpy_helper.to_array(t).copy()
        if array.size:
            odd = [n for n in ODD if abs(n) < 2 ** (8 * array.itemsize - 1)]
            array.reshape(-1)[r.randrange(array.size)] = r.choice(odd)
        t.CopyFrom(onnx.numpy_helper.from_array(array, t.name))
    elif len(t.dims) and r.random() < 0.7:
        t.dims[r.randrange(len(t.dims))] = r.choice(ODD)
    else:
        t.data_type = r.randrange(30)


def change_weight(r: random.Random, model: ModelProto, node: NodeProto) -> None:
    if model.graph.initializer:
        change_tensor(r, r.choice(model.graph.initializer))


def change_input(r: random.Random, model: ModelProto, node: NodeProto) -> None:
    dims = r.choice(model.graph.input).type.tensor_type.shape.dim
    if len(dims) and r.random() < 0.7:
        dims[r.randrange(len(dims))].dim_value = r.choice(ODD)
    else:
        dims.add().dim_value = 3


def change_wires(r: random.Random, model: ModelProto, node: NodeProto) -> None:
    names = ["", *(n for other in model.graph.node for n in (*other.input, *other.output))]
    side = r.choice([node.input, node.input, node.output])
    how = r.random()
    if len(side) and how < 0.5:
        side[r.randrange(len(side))] = r.choice(names)
    elif len(side) and how < 0.75:
        del side[-1]
    else:
        side.append(r.choice(names))


def change_operator(r: random.Random, model: ModelProto, node: NodeProto) -> None:
    others = "If Loop SequenceAt ConcatFromSequence LSTM Resize Einsum TopK Constant Range Tile Expand Attention"
    others += " RotaryEmbedding BatchNormalization Pad Slice Nothing"
    node.op_type = r.choice(others.split())


def change_order(r: random.Random, model: ModelProto, node: NodeProto) -> None:
    if r.random() < 0.5:
        model.opset_import[0].version = r.choice([-1, 0, 6, 7, 9, 11, 13, 17, 18, 21, 28, 2**40])
    else:
        model.graph.node.remove(node)


CHANGES: list[Callable[[random.Random, ModelProto, NodeProto], None]] = [
    change_attribute, change_attribute, change_attribute, change_weight, change_input, change_wires, change_operator,
    change_order,
]  # fmt: skip


def damaged(r: random.Random, raw: bytes) -> bytes:
    """One to two changes to the model, or to the bytes of its file."""
    if r.random() < 0.15:
        broken = bytearray(raw)
        for _ in range(r.randint(1, 8)):
            broken[r.randrange(len(broken))] = r.randrange(256)
        return bytes(broken[: r.randrange(len(broken))] if r.random() < 0.3 else broken)
    model = ModelProto()
    model.ParseFromString(raw)
    for _ in range(r.randint(1, 2)):
        r.choice(CHANGES)(r, model, r.choice(model.graph.node))
    return model.SerializeToString()


@pytest.mark.parametrize("part", range(6))
def test_damaged_models_are_refused_or_make_sound_programs(part: int, tmp_path: Path) -> None:
    path = tmp_path / "damaged.onnx"
    loaded = 0
    for seed in range(50 * part, 50 * (part + 1)):
        r = random.Random(seed)
        file = r.choice(FILES)
        path.write_bytes(damaged(r, file.read_bytes()))
        began = time.perf_counter()
        try:
            program = load(path, batch=2)
        except RecomputeError as e:
            assert str(e)
        except Exception as e:
            raise AssertionError(f"seed {seed}, {file.name}: {type(e).__name__}: {e}") from e
        else:
            verify(program.block)
            loaded += 1
        assert time.perf_counter() - began < 10, f"seed {seed}, {file.name}"
    assert 0 < loaded < 50
