"""Compiled and trained models as files: written whole or not at all, not trusted when read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from test_export import assert_close, batch, metadata, mlp, session, training

import recompute as rc
from recompute.errors import ModelError, UsageError
from recompute.exporter import compiled as onnx_compiled

# -- compiled models as files --------------------------------------------------------------------------------


@pytest.mark.parametrize("external_above", [onnx_compiled.EXTERNAL_ABOVE, 0])
def test_compiled_models_come_back(tmp_path: Path, external_above: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved and loaded: the same block, the same contents, the same training; ONNX Runtime reads the file too."""
    monkeypatch.setattr(onnx_compiled, "SMALL_BYTES", 64)
    program = training()
    path = tmp_path / "step.onnx"
    rc.save_model(rc.export_step(program), path, external_above=external_above)
    assert len(list(tmp_path.iterdir())) == (1 if external_above else 2)
    loaded = rc.load_compiled(path)
    assert loaded.block == program.block and loaded.gradients == program.gradients
    assert all(np.array_equal(loaded.data[n], a) and loaded.data[n].flags.writeable for n, a in program.data.items())
    ours = rc.Executor().run(program, batch(), ["loss"])[0]
    assert rc.Executor().run(loaded, batch(), ["loss"])[0].tobytes() == ours.tobytes()
    assert_close(session(str(path)).run(["loss"], batch())[0], ours, "loss")


def test_external_files_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model saved again has one file of tensors; one that fails leaves the old model whole."""
    monkeypatch.setattr(onnx_compiled, "SMALL_BYTES", 64)
    program, path = training(), tmp_path / "step.onnx"
    for _ in range(2):
        program.data["w1"] += 1
        rc.save_model(rc.export_step(program), path, external_above=0)
        assert len(list(tmp_path.iterdir())) == 2
    before = sorted(p.name for p in tmp_path.iterdir())

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for failing in ("os.fsync", "os.replace"):
        with monkeypatch.context() as m:
            m.setattr(failing, fail)
            with pytest.raises(ModelError, match=r"cannot write .*No space left on device"):
                rc.save_model(rc.export_step(mlp(1)), path, external_above=0)
        assert sorted(p.name for p in tmp_path.iterdir()) == before
    np.testing.assert_array_equal(rc.load_compiled(path).data["w1"], program.data["w1"])


def test_saving_where_there_is_no_folder(tmp_path: Path) -> None:
    """The error names the file."""
    with pytest.raises(ModelError, match=r"cannot write '.*no/step\.onnx': No such file"):
        rc.save_model(rc.export_step(mlp()), tmp_path / "no" / "step.onnx")


def changed(**entries: str) -> onnx.ModelProto:
    """A compiled model with other metadata."""
    model = rc.export_step(training())
    for p in model.metadata_props:
        p.value = entries.get(p.key.removeprefix("recompute."), p.value)
    return model


TEXT = metadata(rc.export_step(training()))["recompute.program"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "the program text is empty"),
        ("program", "not valid"),
        (TEXT.replace("Tanh(", "Tahn("), r"unknown operator 'Tahn' \(did you mean .*Tanh"),
        (TEXT.replace("param %w1: f32[4,8]", "param %w1: f32[4,9]"), "inner dimensions|does not broadcast|declared"),
        (TEXT.replace("{keepdims=0}", '{keepdims=0, axes="x"}'), "not valid"),
        (TEXT.replace("{keepdims=0}", "{keepdims=0, axes=" + "[" * 5000 + "}"), "not valid"),
        (TEXT.replace("state %rate: f32[]", "state %rate: f32[] @" + "9" * 5000), "not valid"),
        (TEXT.replace("state %rate: f32[]", "state %rate: f32[]\n  const %k: i8[2] = [1]"), "has 1 elements"),
        (TEXT.replace("state %rate: f32[]", "state %rate: f32[]\n  const %k: i8[1] = [999]"), "not valid"),
        (TEXT.replace("state %rate: f32[]", "state %rate: f32[]\n  state %m: f32[]"), "'m' .f32... has no initializer"),
        (TEXT.replace("input %x: f32[5,4]", "input %x: f32[5,4]\n  input %z: f32[1]"), "input 'z' is missing"),
    ],
)
def test_programs_in_files_are_not_trusted(text: str, why: str) -> None:
    """Whatever the text says: a ModelError."""
    assert text != TEXT
    with pytest.raises(ModelError, match=why):
        rc.load_compiled(changed(program=text))


def test_contents_in_files_are_not_trusted() -> None:
    """Initializers of other types, damaged metadata, foreign models."""
    model = rc.export_step(training())
    model.graph.initializer[-1].CopyFrom(numpy_helper.from_array(np.zeros((2, 2)), "rate"))
    with pytest.raises(ModelError, match=r"does not match.*\n.*'rate' is f32\[\], its initializer f64\[2,2\]"):
        rc.load_compiled(model)
    model.graph.initializer[-1].data_type = 67
    with pytest.raises(ModelError, match=r"its initializer number 67\[2,2\]"):
        rc.load_compiled(model)
    pairs = "not a list of pairs"
    for gradients, why in (("[1, 2]", pairs), ("null", pairs), ('[["w1", []]]', "of names"),
                           ('["ab"]', pairs), ("{", "Expecting property name")):  # fmt: skip
        with pytest.raises(ModelError, match=f"damaged metadata: .*{why}"):
            rc.load_compiled(changed(gradients=gradients))
    for aliases in ("[]", '{"a": 1}', "null"):
        model = changed()
        model.metadata_props.add(key="recompute.aliases", value=aliases)
        with pytest.raises(ModelError, match=r"damaged metadata: recompute\.aliases"):
            rc.load_compiled(model)
    with pytest.raises(ModelError, match=r"no compiled program.*use load\(\)"):
        rc.load_compiled(plain_model())


def test_metadata_that_are_no_text(tmp_path: Path) -> None:
    """A byte that is not UTF-8: protobuf gives such a text as bytes."""
    raw = rc.export_step(training()).SerializeToString()
    for name in (b"recompute.program", b"recompute.gradients"):
        at = raw.index(name) + len(name) + 6
        (tmp_path / "step.onnx").write_bytes(raw[:at] + b"\xff" + raw[at + 1 :])
        with pytest.raises(ModelError, match=f"{name.decode()} is not UTF-8 text"):
            rc.load_compiled(tmp_path / "step.onnx")


def test_truncated_files(tmp_path: Path) -> None:
    """Cut at any place: a ModelError."""
    path, cut = tmp_path / "step.onnx", tmp_path / "cut.onnx"
    rc.save_model(rc.export_step(training()), path)
    raw = path.read_bytes()
    for n in np.linspace(0, len(raw) - 1, 40).astype(int):
        cut.write_bytes(raw[:n])
        with pytest.raises(ModelError):
            rc.load_compiled(cut)
    with pytest.raises(ModelError, match="cannot read"):
        rc.load_compiled(tmp_path / "none.onnx")


# -- trained models ------------------------------------------------------------------------------------------


def plain_model(ir_version: int = 10) -> onnx.ModelProto:
    """x·w + c + k: w an initializer, c from a Constant node, k from ConstantOfShape."""
    g = np.random.default_rng(5)
    w, c = g.normal(size=(4, 3)).astype(np.float32), g.normal(size=(3,)).astype(np.float32)
    nodes = [
        helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(c)),
        helper.make_node("ConstantOfShape", ["three"], ["k"], value=helper.make_tensor("", 1, [1], [0.5])),
        helper.make_node("Gemm", ["x", "w", "c"], ["a"]),
        helper.make_node("Gemm", ["a", "v", "k"], ["y"]),
    ]
    tensors = [
        numpy_helper.from_array(w, "w"),
        numpy_helper.from_array(np.eye(3, dtype=np.float32), "v"),
        numpy_helper.from_array(np.array([3]), "three"),
    ]
    graph = helper.make_graph(
        nodes,
        "plain",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 3])],
        tensors,
        doc_string="kept",
    )
    if ir_version < 4:
        graph.input.extend(helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=ir_version)
    model.metadata_props.add(key="author", value="kept")
    onnx.checker.check_model(model, full_check=True)
    return model


def shifted(program: rc.Program) -> None:
    """Another value for every parameter."""
    for v in program.block.parameters:
        program.data[v.name] = program.data[v.name] + np.float32(0.25)


@pytest.mark.parametrize("ir_version", [3, 10])
def test_trained_weights_go_back(tmp_path: Path, ir_version: int) -> None:
    """Initializers and constants hold what was trained; the rest is as it was."""
    source = plain_model(ir_version)
    program = rc.load(source, batch=2)
    assert {p.name for p in program.parameters} == {"w", "c", "v", "k"}
    shifted(program)
    path = tmp_path / "trained.onnx"
    model = rc.export_trained(program, path)
    onnx.checker.check_model(model, full_check=True)
    assert [n.op_type for n in model.graph.node] == ["Gemm", "Gemm"]
    assert model.graph.doc_string == "kept" and metadata(model) == {"author": "kept"}
    x = np.random.default_rng(1).normal(size=(7, 4)).astype(np.float32)
    d = {n: a.astype(np.float64) for n, a in program.data.items()}
    want = ((x @ d["w"] + d["c"]) @ d["v"] + d["k"]).astype(np.float32)
    assert_close(session(str(path)).run(None, {"x": x})[0], want, "y")
    assert len(source.graph.node) == 4, "the original was changed"


def test_trained_weights_of_external_files(tmp_path: Path) -> None:
    """Weights in a file beside the model: read, not written; saving over the model keeps what is read from."""
    path = tmp_path / "model.onnx"
    onnx.save(plain_model(), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    before = (tmp_path / "weights.bin").read_bytes()
    program = rc.load(path, batch=2)
    y = session(rc.export_trained(program)).run(None, {"x": np.ones((2, 4), np.float32)})[0]
    shifted(program)
    rc.export_trained(program, path)
    assert (tmp_path / "weights.bin").read_bytes() == before
    assert not np.array_equal(session(str(path)).run(None, {"x": np.ones((2, 4), np.float32)})[0], y)


def test_trained_weights_inside_functions() -> None:
    """A weight that a model-local function holds: the function is inlined."""
    weight = helper.make_node("Constant", [], ["w"], value=numpy_helper.from_array(np.eye(3, dtype=np.float32)))
    body = [weight, helper.make_node("MatMul", ["a", "w"], ["b"])]
    function = helper.make_function("mine", "Layer", ["a"], ["b"], body, [helper.make_opsetid("", 18)])
    nodes = [helper.make_node("Layer", ["x"], ["h"], domain="mine"), helper.make_node("Relu", ["h"], ["y"])]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, 3]) for n in "xy")
    graph = helper.make_graph(nodes, "f", [x], [y])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("mine", 1)]
    program = rc.load(helper.make_model(graph, functions=[function], opset_imports=opsets, ir_version=10))
    assert len(program.parameters) == 1
    shifted(program)
    model = rc.export_trained(program)
    feed = np.arange(6, dtype=np.float32).reshape(2, 3)
    got = session(model).run(None, {"x": feed})[0]
    assert_close(got, feed @ program.data[program.parameters[0].name], "y")


def test_trained_weights_without_place() -> None:
    """A program without a model, and a parameter that the model lacks."""
    with pytest.raises(UsageError, match="this one has no source"):
        rc.export_trained(mlp())
    program = rc.load(plain_model(), batch=2)
    program.declare("parameters", "head", np.zeros(3, np.float32))
    with pytest.raises(ModelError, match="no place for these trained values:\n  head"):
        rc.export_trained(program)
