"""Files that PyTorch exported: what they say of parameters is heard, and what optimisation lost is told."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import recompute as rc
from recompute.cli import main
from recompute.importer.origin import origin_of, source_operator
from recompute.importer.schema import attribute_value

FOLDER = Path(__file__).parents[1] / "data" / "pytorch_exports"
VALUES = json.loads((FOLDER / "values.json").read_text())
NAMES = ("mixed", "llama", "bert")


def load(name: str, **options: Any) -> tuple[rc.Program, list[str]]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        program = rc.load(FOLDER / f"{name}.onnx", **options)
    return program, [str(w.message) for w in told if issubclass(w.category, rc.ModelWarning)]


def four_steps(program: rc.Program, name: str) -> list[float]:
    loss = program["loss"] if "loss" in program else program.outputs[0]
    rc.SGD(VALUES["rate"]).minimize(loss)
    inputs = VALUES[name]["inputs"]
    feed = {v.name: np.array(inputs[v.name], v.value.type.numpy) for v in program.inputs}
    executor = rc.Executor()
    return [float(executor.run(program, feed, [loss])[0]) for _ in range(4)]


@pytest.mark.parametrize("name", NAMES)
def test_a_whole_export_trains_as_in_pytorch(name: str) -> None:
    """Scalars, tied and frozen weights, `detach` under no_grad, normalisation in train and in eval mode."""
    trains = VALUES[name]["trains"]
    program, told = load(name, mode="file", trainable=[n for n, wanted in trains.items() if wanted])
    assert not told
    tied = {"emb.weight", "cls.predictions.decoder.bias", "cls.predictions.decoder.weight", "cls.predictions.bias"}
    tied.add("bert.embeddings.word_embeddings.weight")
    parameters = {v.name for v in program.parameters}
    assert parameters <= {n for n, wanted in trains.items() if wanted}
    assert {n for n, wanted in trains.items() if wanted} - parameters <= tied | {
        "bert.embeddings.word_embeddings.weight"
    }
    np.testing.assert_allclose(four_steps(program, name), VALUES[name]["losses"], rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_the_file_says_what_trains(name: str) -> None:
    """Parameters do, scalars among them; buffers do not: rotary frequencies, factors, statistics."""
    program, told = load(name, mode="file")
    assert not told
    parameters = {v.name for v in program.parameters}
    assert parameters <= set(VALUES[name]["trains"])
    assert not parameters & set(VALUES[name]["buffers"])
    assert {t.name for t in program.tensors if t.trains} == parameters
    left = {t.name: t.why for t in program.tensors if not t.trains and t.name in VALUES[name]["buffers"]}
    stored = {t.name for t in program.source.graph.initializer if t.data_type == onnx.TensorProto.FLOAT}
    assert stored <= {t.name for t in program.tensors}
    assert set(left.values()) <= {"the file says: buffer"} and left.keys() == stored & set(VALUES[name]["buffers"])


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        (
            "mixed",
            [
                "batch normalisation is folded",
                "bn.weight",
                "'first.weight' is read by 2 normalisations",
                "'exp' of scale",
            ],
        ),
        ("llama", ["of 19 that have lost their names", "are merged or folded into others"]),
        (
            "bert",
            [
                "equal parameters are merged",
                "is read by 6 normalisations",
                "copies of tied ones train apart",
                "'embedding_2' of bert.embeddings.position_embeddings.weight",
            ],
        ),
    ],
)
def test_what_optimisation_lost_is_told_once_with_a_remedy(name: str, lost: list[str]) -> None:
    program, told = load(f"{name}_default")
    (text,) = told
    assert all(part in text for part in lost) and "optimize=False" in text and "rc.from_torch" in text
    assert len(program.parameters) < len(VALUES[name]["trains"])


def test_a_default_export_trains_no_constants_of_the_exporter() -> None:
    program, _ = load("llama_default")
    assert not any("unsqueeze" in v.name or v.shape == () for v in program.parameters)
    np.testing.assert_allclose(four_steps(program, "llama"), VALUES["llama"]["losses"], rtol=1e-4)


def test_without_metadata_the_frequencies_of_rotary_positions_are_found() -> None:
    model = onnx.load(FOLDER / "llama.onnx")
    del model.graph.metadata_props[:], model.graph.value_info[:]
    program = rc.load(model)
    why = {t.name: t.why for t in program.tensors if not t.trains and t.type.size > 1}
    assert why == {"model.rotary_emb.inv_freq": "read by cos and sin of positions only"}


def test_scalars_train_when_named() -> None:
    model = onnx.load(FOLDER / "mixed.onnx")
    del model.graph.metadata_props[:], model.graph.value_info[:]
    assert "scale" not in {v.name for v in rc.load(model).parameters}
    assert {v.name for v in rc.load(model, trainable=["scale", "conv.*"]).parameters} == {
        "scale", "conv.weight", "conv.bias",
    }  # fmt: skip
    with pytest.raises(rc.UsageError, match=r"no float initializer is called 'scales'.*scale"):
        rc.load(model, trainable=["scales"])


def test_a_detached_value_passes_no_gradient_on() -> None:
    model = onnx.load(FOLDER / "mixed.onnx")
    assert any(source_operator(n) == "aten.detach.default" for n in model.graph.node)
    program = rc.load(model, mode="file")
    assert any(o.op.name == "Detach" for o in program.operators)


def test_damaged_metadata_is_passed_over() -> None:
    model = onnx.load(FOLDER / "mixed.onnx")
    for node in model.graph.node:
        for p in node.metadata_props:
            p.value = "[" * 5000
    for p in model.graph.metadata_props:
        p.value = "p: PARAMETER target='" + "x" * 100000
    assert origin_of(model).missing == ()
    rc.load(model)


def test_from_torch_and_back() -> None:
    """Where PyTorch is installed: one step beside it, and the weights in the module afterwards."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    nn = torch.nn
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)).double()
    x, y = torch.randn(3, 1, 8, 8).double(), torch.tensor([1, 2, 3])
    program = rc.from_torch(module, x, loss=nn.functional.cross_entropy, targets=(y,))
    rc.SGD(0.125).minimize(program["loss"])
    names = [v.name for v in program.inputs]
    feed = dict(zip(names, (x.numpy(), y.numpy()), strict=True))
    (ours,) = rc.Executor().run(program, feed, ["loss"])
    theirs = nn.functional.cross_entropy(module(x), y)
    np.testing.assert_allclose(ours, theirs.item(), rtol=1e-9)
    theirs.backward()
    wanted = [(p - 0.125 * p.grad).detach() for p in module.parameters()]
    variance = module[1].running_var.clone()
    assert rc.write_back(program, module) == 8
    for p, w in zip(module.parameters(), wanted, strict=True):
        np.testing.assert_allclose(p.detach().numpy(), w.numpy(), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(module[1].running_var.numpy(), variance.numpy(), rtol=1e-9)
    with pytest.raises(rc.UsageError, match=r"takes a torch.nn.Module"):
        rc.from_torch(abs, x)


def test_the_exported_file_is_the_module_before_any_step() -> None:
    """TorchScript's exporter runs the module once; the file says which tensors are parameters, by their own names."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    module = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten())
    x, y = torch.randn(3, 1, 8, 8) + 5, torch.tensor([1, 2, 3])
    options = {"loss": torch.nn.functional.cross_entropy, "targets": (y,)}
    program = rc.from_torch(module, x, exporter="torchscript", **options)
    assert not module[1].running_mean.any() and not program.data["1.running_mean"].any()
    source = rc.from_torch(module, x, exporter="dynamo", **options).source
    assert origin_of(source).missing == () and set(origin_of(source).kinds) >= set(dict(module.named_parameters()))


@pytest.mark.parametrize("number", [1 / 6, -1 / 3, 1e-5, 0.1, 0.044715, 3.0, 0.0, float("inf")])
def test_attributes_in_32_bits_are_the_numbers_that_were_meant(number: float) -> None:
    assert attribute_value(onnx.helper.make_attribute("alpha", number), decimal=True) == number


def test_layers_that_are_used_twice_are_not_called_merged() -> None:
    """Their norms are read twice by right; another parameter is tied.  Optimised files have no Constant nodes."""
    model = onnx.load(FOLDER / "bert.onnx")
    first = "bert.embeddings.LayerNorm.weight"
    other = "bert.encoder.layer.0.attention.output.LayerNorm.weight"
    for node in model.graph.node:
        node.input[:] = [first if i == other else i for i in node.input]
    assert not origin_of(model).lost


def test_the_command_line_lists_what_trains(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([str(FOLDER / "mixed.onnx"), "--list-parameters", "--json", str(tmp_path / "r.json")]) == 0
    shown = capsys.readouterr().out
    assert "14 of 21 tensors are trained: 1,045 numbers" in shown
    rows = {r["name"]: r for r in json.loads((tmp_path / "r.json").read_text())["tensors"]}
    assert rows["freq"] == {"name": "freq", "type": "f32[6]", "trains": False, "why": "the file says: buffer"}
    assert rows["scale"]["trains"] and rows["scale"]["type"] == "f32[]"


# -- repairs ----------------------------------------------------------------------------------------------------------


def test_merged_parameters_train_apart_again() -> None:
    """Each reader has its own; a tied matrix, whose elements differ, stays one."""
    program, _ = load("bert_default", mode="file", untie=True)
    names = {v.name for v in program.parameters}
    norm = "bert.embeddings.LayerNorm.weight"
    assert {norm, *(f"{norm}@layer_norm_{i}" for i in range(1, 6))} <= names
    program, _ = load("mixed_default", mode="file", untie=True)
    assert "head.weight" in {v.name for v in program.parameters}
    assert not any(v.name.startswith("head.weight@") for v in program.parameters)


def test_merged_parameters_get_their_names_where_the_file_says_them() -> None:
    """By the module that the reader's metadata name."""
    model = onnx.load(FOLDER / "bert_default.onnx")
    for node in model.graph.node:
        if node.output[0] == "layer_norm_1":
            scopes = ["", "bert", "bert.encoder.layer.0.attention.output.LayerNorm", "layer_norm_1"]
            node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=repr(scopes))
    program = rc.load(model, mode="file", untie=["bert.embeddings.LayerNorm.*"])
    wanted = "bert.encoder.layer.0.attention.output.LayerNorm.weight"
    assert wanted in {v.name for v in program.parameters}
    trained = rc.export_trained(program)
    assert wanted in {t.name for t in trained.graph.initializer}


def test_transposed_copies_are_tied_again() -> None:
    """One parameter, whose gradient is the sum of both uses."""
    decoder = "cls.predictions.decoder.weight"
    apart, _ = load("bert_default", mode="file", untie=True)
    program, _ = load("bert_default", mode="file", untie=True, tie={"val_184": decoder})
    assert len(program.parameters) == len(apart.parameters) - 1 and decoder in {v.name for v in program.parameters}
    found = np.array([four_steps(p, "bert") for p in (apart, program)])
    expected = np.array(VALUES["bert"]["losses"])
    assert np.abs(found[1] - expected).max() < 0.7 * np.abs(found[0] - expected).max()  # positions stay folded


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"untie": ["bert.embedings.*"]}, r"untie: no floating-point initializer is called 'bert\.embedings"),
        ({"tie": {"val_1840": "val_184"}}, "tie: no initializer is called 'val_1840'.*val_184"),
        ({"tie": {"val_37": "val_45"}}, r"'val_37' \[16, 16\] is neither equal to 'val_45'"),
    ],
)
def test_repairs_that_do_not_fit_are_told(options: dict[str, Any], match: str) -> None:
    """What, and what there is."""
    with pytest.raises(rc.UsageError, match=match):
        load("bert_default", **options)


# -- back into a module -----------------------------------------------------------------------------------------------


class Tensor:
    """What `write_back` needs of PyTorch's, on NumPy."""

    def __init__(self, array: Any) -> None:
        self.array = np.array(array)
        self.shape = self.array.shape
        self.data = self

    def copy_(self, other: Any) -> None:
        self.array[...] = other

    def add_(self, number: int) -> None:
        self.array += number

    def new_tensor(self, array: np.ndarray, device: str) -> np.ndarray:
        return array


class Module:
    """Parameters and buffers by name."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def named_parameters(self, remove_duplicate: bool) -> Any:
        return self.tensors.items()

    def named_buffers(self, remove_duplicate: bool) -> Any:
        return []


def normalized() -> rc.Program:
    """A trained batch normalisation `on`, and a frozen one `off`, before a loss."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 20]>
        net (float[4,2] x) => (float loss) {
            h, m1, v1 = BatchNormalization <training_mode=1> (x, s0, b0, m0, v0)
            y, m3, v3 = BatchNormalization <training_mode=1> (h, s2, b2, m2, v2)
            loss = ReduceMean <keepdims=0> (y)
        }"""
    )
    names = {f"{k}{i}": f"{layer}.{what}" for i, layer in ((0, "off"), (2, "on")) for k, what in zip(
        "sbmv", ("weight", "bias", "running_mean", "running_var"), strict=True)}  # fmt: skip
    for node in model.graph.node:
        node.input[:] = [names.get(i, i) for i in node.input]
    for name in names.values():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(2, np.float32), name))
    return rc.load(model).freeze("off.*", eval=True)


def test_batches_are_counted_where_they_are_followed() -> None:
    """Not in frozen normalisations, and each step once however often it is written back."""
    program = normalized()
    rc.SGD(0.1).minimize(program["loss"])
    executor = rc.Executor()
    module = Module({n: Tensor(a) for n, a in program.data.items() if "." in n})
    module.tensors |= {f"{n}.num_batches_tracked": Tensor(np.array(5)) for n in ("on", "off")}
    for _ in range(2):
        executor.run(program, {"x": np.random.default_rng(0).standard_normal((4, 2)).astype(np.float32)})
        for _ in range(2):
            assert rc.write_back(program, module) == 8
    counts = {n: int(t.array) for n, t in module.tensors.items() if n.endswith("tracked")}
    assert counts == {"on.num_batches_tracked": 7, "off.num_batches_tracked": 5}
    np.testing.assert_array_equal(module.tensors["on.weight"].array, program.data["on.weight"])


def test_nothing_is_written_into_another_module() -> None:
    """One tensor that does not fit, or none that does."""
    program = normalized()
    module = Module({"off.weight": Tensor(np.zeros(2)), "on.weight": Tensor(np.zeros(3))})
    with pytest.raises(rc.UsageError, match=r"'on\.weight' has shape \[3\] in the module.*nothing was written"):
        rc.write_back(program, module)
    assert not module.tensors["off.weight"].array.any()
    with pytest.raises(rc.UsageError, match="no parameter or buffer of the module"):
        rc.write_back(program, Module({"other": Tensor(np.zeros(2))}))


def test_made_up_names_alone_are_no_loss() -> None:
    """A transposed weight is another form of its parameter; one that is there twice is a copy."""
    w, v = (np.random.default_rng(i).standard_normal((4, 4)).astype(np.float32) for i in range(2))
    text = '<ir_version: 8, opset_import: ["": 17]> g (float[2,4] x) => (float[2,4] y) { a = MatMul (x, val_1) %s }'
    for body, held in (
        ("y = MatMul (a, val_2)", {"val_1": w, "val_2": v}),
        ("y = Gemm (a, w)", {"val_1": w.T, "w": w}),
    ):
        model = onnx.parser.parse_model(text % body)
        model.producer_name = "pytorch"
        model.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in held.items())
        found = origin_of(model).lost
        assert found == (("copies of tied ones train apart ('val_1' of 'w')",) if "w" in held else ())


@pytest.mark.parametrize(
    ("folded", "told"),
    [
        ({"val_1": ["w"]}, ""),  # transposed, it trains in its place
        ({"val_1": ["w", "val_0"]}, ""),  # in another shape
        ({"val_1": ["w", "div"], "div": ["w"]}, "'val_1' of w"),  # normalised
        ({"val_1": ["w"], "val_2": ["w"]}, "'val_1' of w, 'val_2' of w"),
        ({"val_1": ["w", "s"]}, "'val_1' of w, s"),
        ({"val_1": ["there"]}, "'val_1' of there"),  # it is read elsewhere
        ({"val_1": ["frequencies", "val_0"]}, ""),
    ],
)
def test_constants_that_were_computed_from_parameters_are_told(folded: dict[str, list[str]], told: str) -> None:
    """Optimisation computes what depends on parameters alone: gradients through it are lost, whatever else is there."""
    text = '<ir_version: 8, opset_import: ["": 17]> g (float[2,4] x) => (y) { y = MatMul (x, there) }'
    model = onnx.parser.parse_model(text)
    kinds = {"w": "PARAMETER", "s": "PARAMETER", "there": "PARAMETER", "frequencies": "BUFFER"}
    said = "\n".join(f"{n}: {kind} target='{n}'" for n, kind in kinds.items())
    model.graph.metadata_props.add(key="pkg.torch.export.ExportedProgram.graph_signature", value=said)
    for i, name in enumerate(["there", *(n for n in folded if n != "div")]):
        array = np.random.default_rng(i).standard_normal((4, 4)).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    for name, names in folded.items():
        info = model.graph.value_info.add(name=name)
        info.metadata_props.add(key="pkg.onnxscript.optimizer.folded_from", value=repr(names))
    found = [t for t in origin_of(model).lost if t.startswith("constants")]
    assert found == [f"constants that were computed from parameters pass no gradient on to them ({told})"] * bool(told)


_DETACH = "%mean : [num_users=1] = call_function[target=torch.ops.aten.mean.dim](args = (%detach, [1]), kwargs = {})"
_REGION = 'File "<eval_with_key>.3", line 5, in forward\n    mul = torch.ops.aten.mul.Tensor(tanh, 2);  tanh = None'


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"b": ("fx_node", _DETACH)}, ("b",)),
        ({"detach": ("fx_node", "%detach : [num_users=1]"), "b": ("fx_node", _DETACH)}, ()),
        ({"same": ("fx_node", _DETACH)}, ()),  # no parameter is behind it
        ({"a": ("stack_trace", _REGION)}, ("a",)),
        ({"a": ("stack_trace", _REGION), "detach": ("stack_trace", _REGION)}, ("detach", "a")),
        ({"a": ("stack_trace", _REGION), "b": ("stack_trace", _REGION.replace("(tanh", "(arg0_1"))}, ()),  # autocast
        ({"a": ("stack_trace", _REGION.replace("torch.ops.aten.", "torch."))}, ()),  # a module that was traced
        ({"i": ("stack_trace", _REGION)}, ()),  # numbers of entries
    ],
)
def test_values_that_are_no_longer_detached_are_told(said: dict[str, tuple[str, str]], told: tuple[str, ...]) -> None:
    """Optimisation takes `detach` out; `torch.no_grad()` is never written, and its regions leave their lines."""
    text = """<ir_version: 8, opset_import: ["": 17]> g (float[2,4] x) => (float[2,4] y) <float[4,4] w, int64[2] i> {
        same = Identity (x) a = MatMul (x, w) detach = Identity (a) b = Tanh (detach)
        i = ArgMax <axis = 1, keepdims = 0> (b) c = Gather (same, i) d = Add (a, b) y = Add (c, d)
    }"""
    model = onnx.parser.parse_model(text)
    line = "w: PARAMETER target='w'"
    model.graph.metadata_props.add(key="pkg.torch.export.ExportedProgram.graph_signature", value=line)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(4, dtype=np.float32), "w"))
    for node in model.graph.node:
        if node.output[0] in said:
            key, value = said[node.output[0]]
            node.metadata_props.add(key=f"pkg.torch.onnx.{key}", value=value)
    if not any("detach" in name for name in said):
        node = model.graph.node[2]
        model.graph.node[3].input[0] = node.input[0]
        model.graph.node.remove(node)
    found = origin_of(model)
    assert found.attached == told
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        found.warn(1)
    assert [("detach() in place of torch.no_grad()" in str(w.message)) for w in heard] == [True] * bool(told)


def test_torchscript_s_computed_constants_train_with_a_warning() -> None:
    """exp(-s) or a part of a table; a transposed weight, and a constant where what trains is named, are none."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]> g (float[2,4] x) => (float[2,4] y) {
        a = MatMul (x, "onnx::MatMul_7") y = Mul (a, "onnx::Mul_9")
    }""")
    model.producer_name = "pytorch"
    for i, (name, shape) in enumerate({"onnx::MatMul_7": (4, 4), "onnx::Mul_9": (4,)}.items()):
        array = np.random.default_rng(i).standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    with pytest.warns(rc.ModelWarning, match=r"computed 'onnx::Mul_9', of parameters .*do_constant_folding=False"):
        assert len(rc.load(model).parameters) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rc.load(model, trainable=["onnx::MatMul_7"])


def test_convolutions_with_torchscript_s_made_up_names_have_taken_in_normalisations() -> None:
    text = '<ir_version: 8, opset_import: ["": 17]> g (float[2,3,4,4] x) => (y) { y = Conv (x, "onnx::Conv_7") }'
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((2, 3, 1, 1), np.float32), "onnx::Conv_7"))
    assert origin_of(model).lost == ("batch normalisation is folded into weights and does not train (onnx::Conv_7)",)
