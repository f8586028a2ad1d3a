"""The model zoo: structure, published sizes, numbers, ready files, command and errors."""

import subprocess
import sys
from math import prod
from pathlib import Path

import numpy as np
import onnx
import pytest
from zoo_cases import zoo

from recompute import models
from recompute.models.__main__ import main

FOLDER = Path(models.__file__).parent
READY = ["mlp", "mlp4", "lenet", "lstm"]
PUBLISHED = {
    "alexnet": 61_100_840,
    "amoebanet": 3_145_078,
    "darts": 3_349_342,
    "densenet121": 7_978_856,
    "densenet161": 28_681_000,
    "densenet169": 14_149_480,
    "densenet201": 20_013_928,
    "ds_cnn": 23_180,
    "fcn8": 134_489_759,
    "fcos-resnet50": 32_297_370,
    "googlenet": 6_624_904,
    "inception_v3": 23_834_568,
    "mobilenet_v1": 4_231_976,
    "mobilenet_v2": 3_504_872,
    "lenet": 61_706,
    "nasnet": 3_830_950,
    "pspnet": 65_707_475,
    "pspnet50": 46_715_347,
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "segnet": 29_449_355,
    "unet": 31_031_810,
    "vgg11": 132_863_336,
    "vgg13": 133_047_848,
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
    "vgg11_bn": 132_868_840,
    "vgg13_bn": 133_053_736,
    "vgg16_bn": 138_365_992,
    "vgg19_bn": 143_678_248,
    "gpt2-small": 124_439_808,
    "roberta-base": 124_647_170,
    "vit-tiny": 5_717_416,
    "vit-small": 22_050_664,
    "vit-base": 86_567_656,
    "vit-large": 304_326_632,
    "gpt3-22b": 22_074_273_792,
    "gpt3-175b": 174_615_846_912,
    "gpt3-530b": 529_600_819_200,
    "gpt3-1t": 1_008_038_758_400,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama-405b": 405_853_388_800,
    "moe-8x7b": 46_702_792_704,
}
SMALL = {
    "alexnet": {"width": 8, "hidden": 32, "image": 63, "classes": 10},
    "amoebanet": {"width": 4, "cells": 5, "image": 16},
    "darts": {"width": 4, "cells": 5, "image": 16},
    "nasnet": {"width": 4, "cells": 5, "image": 16},
    "densenet121": {"width": 8, "growth": 4, "blocks": (2, 3, 4, 2), "image": 64, "classes": 10},
    "ds_cnn": {"width": 4, "classes": 3},
    "fcn8": {"width": 4, "hidden": 16, "image": 32},
    "googlenet": {"width": 8, "image": 64, "classes": 10},
    "inception_v3": {"width": 8, "image": 107, "classes": 10},
    "mobilenet_v1": {"width": 8, "image": 96, "classes": 10},
    "mobilenet_v2": {"width": 8, "image": 64, "classes": 10},
    "mlp": {},
    "mlp4": {},
    "lenet": {},
    "fcos-tiny": {},
    "lstm": {},
    "resnet18": {"image": 64, "classes": 10},
    "resnet50": {"image": 64, "classes": 10, "width": 16},
    "pspnet": {"width": 4, "blocks": (1, 2, 2, 1), "image": (41, 57)},
    "segnet": {"width": 4, "image": (32, 64)},
    "unet": {"width": 4, "image": (32, 48)},
    "vgg11": {"image": 32, "classes": 10, "hidden": 64},
    "vgg11_bn": {"image": 32, "classes": 10, "hidden": 64},
    "bert-tiny": {"seq": 16},
    "roberta-base": {"layers": 2, "hidden": 128, "heads": 2, "seq": 16, "vocab": 1000},
    "gpt2-tiny": {"seq": 16},
    "vit-tiny": {"layers": 2, "image": 48, "classes": 10},
    "llama-tiny": {"seq": 16},
    "moe-tiny": {"seq": 16, "tokens": 8, "capacity": 5},
}


def count(model: onnx.ModelProto) -> int:
    return sum(prod(shape) for shape in models.parameters(model).values())


def values_of(model: onnx.ModelProto) -> list[str]:
    return [output for node in model.graph.node for output in node.output if output]


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> np.ndarray:
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (result,) = session.run(None, feeds)
    return result


def feeds_of(name: str, batch: int, **options: object) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(7)
    return {spec.name: spec.sample(generator, batch=batch) for spec in models.info(name, **options).inputs}


@pytest.mark.parametrize(
    ("name", "batch"),
    [(name, batch) for name in models.names() for batch in ((None, 3, "B") if name in zoo() else ("B",))],
)
def test_every_network_is_valid_and_fully_typed(name: str, batch: int | str | None) -> None:
    model = models.build(name, batch=batch, weights=False)
    onnx.checker.check_model(model, full_check=True)
    inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True).graph
    typed = {value.name for value in [*inferred.value_info, *inferred.output]}
    assert set(values_of(model)) <= typed
    assert (model.ir_version, model.opset_import[0].version) == (9, 20)
    assert model.producer_name == "onnx-recompute"
    first = model.graph.input[0].type.tensor_type.shape.dim[0]
    assert (first.dim_value or first.dim_param) == (batch or "N")


@pytest.mark.parametrize("name", models.names())
def test_the_entry_describes_the_graph(name: str) -> None:
    entry, model = models.info(name), models.build(name, weights=False)
    assert [value.name for value in model.graph.output] == [entry.output]
    assert [value.name for value in model.graph.input] == [spec.name for spec in entry.inputs]
    made = values_of(model)
    assert set(entry.checkpoints) <= set(made)
    assert sorted(entry.checkpoints, key=made.index) == list(entry.checkpoints)
    assert (entry.label is None) == (entry.output == "loss")
    assert entry.default_batch >= 1 and entry.table_batch >= 1


@pytest.mark.parametrize("name", models.names())
def test_nodes_are_named_after_what_they_make(name: str) -> None:
    model = models.build(name, weights=False)
    node_names = [node.name for node in model.graph.node]
    assert len(set(node_names)) == len(node_names)
    for node in model.graph.node:
        single = len(node.output) == 1 and node.op_type != "LSTM"
        assert node.name == node.output[0] if single else node.name


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    assert count(models.build(name, weights=False)) == PUBLISHED[name]


def test_unet_in_the_paper_s_form() -> None:
    """One grey channel, 572x572 to 388x388 without padding; 31,030,658 parameters in its 23 convolutions."""
    model = models.build("unet", weights=False, channels=1, image=572, valid=True)
    assert count(model) == 31_030_658
    assert sum(node.op_type in ("Conv", "ConvTranspose") for node in model.graph.node) == 23
    inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    assert [d.dim_value for d in inferred.graph.output[0].type.tensor_type.shape.dim[1:]] == [2, 388, 388]
    label = models.info("unet", image=572, valid=True).label
    assert label is not None and label.shape == ("N", 388, 388)
    options = {"width": 2, "image": (188, 204), "valid": True}
    assert run(models.build("unet", **options), feeds_of("unet", 1, **options)).shape == (1, 2, 4, 20)


def test_bert_base_encoder_and_pooler_have_the_published_size() -> None:
    shapes = models.parameters(models.build("bert-base", weights=False))
    assert sum(prod(shape) for key, shape in shapes.items() if not key.startswith("classifier.")) == 109_482_240


def test_bert_masked_language_head_is_tied_to_the_embedding() -> None:
    classifier = models.parameters(models.build("bert-base", weights=False))
    tied = models.parameters(models.build("bert-base", weights=False, head="mlm"))
    head = {key: shape for key, shape in tied.items() if key not in classifier}
    assert sum(prod(shape) for shape in head.values()) == 768 * 768 + 3 * 768 + 30522
    entry = models.info("bert-base", head="mlm", vocab=100)
    assert entry.task == "language-model"
    assert entry.label is not None and entry.label.shape == ("N", 128) and entry.label.high == 100


def test_roberta_is_bert_with_other_tables_and_heads() -> None:
    """Numbers of the PyTorch port, which `benchmarks/pytorch/roberta.py` compares with, outputs too."""
    found = models.parameters(models.build("roberta-base", weights=False, head="mlm"))
    assert sum(map(prod, found.values())) == 124_697_433
    model = models.build("roberta-base", weights=False)
    theirs, ours = models.parameters(models.build("bert-base", weights=False)), models.parameters(model)
    assert {k for k in ours if k.startswith("encoder.")} == {k for k in theirs if k.startswith("encoder.")}
    assert ours["embeddings.token_type_embeddings.weight"] == (1, 768)
    (positions,) = (t for t in model.graph.initializer if t.name == "position_ids")
    assert onnx.numpy_helper.to_array(positions).tolist() == list(range(2, 130))
    epsilons = {a.f for n in model.graph.node if n.op_type == "LayerNormalization" for a in n.attribute if a.type == 1}
    assert epsilons == {np.float32(1e-5)}


@pytest.mark.parametrize("name", SMALL)
def test_with_and_without_weights_is_the_same_network(name: str) -> None:
    heavy = models.build(name, **SMALL[name])
    light = models.build(name, weights=False, **SMALL[name])
    onnx.checker.check_model(heavy, full_check=True)
    assert models.parameters(heavy) == models.parameters(light)
    kept = [node for node in light.graph.node if node.op_type != "ConstantOfShape"]
    assert kept == list(heavy.graph.node)


@pytest.mark.parametrize("name", SMALL)
def test_small_networks_run_with_outputs_of_a_sensible_size(name: str) -> None:
    model = models.build(name, **SMALL[name])
    result = run(model, feeds_of(name, 2, **SMALL[name]))
    assert result.dtype == np.float32 and np.isfinite(result).all()
    assert 1e-3 < np.abs(result).max() < 30
    if result.ndim:
        assert result.shape[0] == 2 and result.std() > 1e-4


def test_outputs_of_the_perceptrons_follow_their_formulas() -> None:
    model = models.build("mlp")
    weights = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    feeds = feeds_of("mlp", 5)
    hidden = feeds["x"] @ weights["fc_1.weight"].T + weights["fc_1.bias"]
    scores = np.exp(hidden @ weights["pred.weight"].T + weights["pred.bias"])
    expected = scores / scores.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(run(model, feeds), expected, rtol=1e-5)

    model = models.build("mlp4")
    feeds = feeds_of("mlp4", 5)
    assert set(np.unique(feeds["label"])) <= {0.0, 1.0}
    loss = run(model, feeds)
    model.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("pred", onnx.TensorProto.FLOAT, ["N", 1]))
    pred, label = run(model, feeds), feeds["label"]
    each = -label * np.log(pred + 1e-4) - (1 - label) * np.log(1 - pred + 1e-4)
    np.testing.assert_allclose(loss, each.mean(), rtol=1e-5)


@pytest.mark.parametrize(("name", "options"), [("bert-tiny", {}), ("roberta-base", SMALL["roberta-base"])])
def test_bert_does_not_see_masked_positions(name: str, options: dict[str, object]) -> None:
    options = {**options, "seq": 8}
    model = models.build(name, **options)
    feeds = feeds_of(name, 2, **options)
    feeds["attention_mask"][:, 5:] = 0
    before = run(model, feeds)
    feeds["input_ids"][:, 5:] = 17
    np.testing.assert_array_equal(run(model, feeds), before)
    feeds["input_ids"][:, 4] = 18
    assert np.abs(run(model, feeds) - before).max() > 1e-5


@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny"])
def test_language_models_do_not_see_what_comes_after(name: str) -> None:
    model = models.build(name, seq=8)
    feeds = feeds_of(name, 2, seq=8)
    before = run(model, feeds)
    feeds["input_ids"][:, 5] = 17
    after = run(model, feeds)
    np.testing.assert_allclose(after[:, :5], before[:, :5], rtol=1e-5, atol=1e-6)
    assert np.abs(after - before)[:, 5:].max(axis=(0, 2)).min() > 1e-4


def test_weights_follow_the_seed_and_nothing_else() -> None:
    first, again, other = (models.build("lenet", seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    wide = models.build("lenet", classes=7)
    tensors = {tensor.name: tensor for tensor in wide.graph.initializer}
    assert all(tensors[t.name] == t for t in first.graph.initializer if not t.name.startswith("fc3"))


@pytest.mark.parametrize("name", READY)
def test_ready_files_are_what_build_makes(name: str) -> None:
    path = FOLDER / f"{name}.onnx"
    assert path.stat().st_size < 1_000_000
    assert onnx.load(path) == models.build(name)


def test_no_other_files_are_ready() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.onnx")) == sorted(READY)


def test_no_dropout_keeps_the_checkpoints() -> None:
    for name in ("bert-tiny", "gpt2-tiny"):
        model = models.build(name, weights=False, dropout=0)
        assert not any(node.op_type == "Dropout" for node in model.graph.node)
        assert set(models.info(name).checkpoints) <= set(values_of(model))


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("resnet5", {}, "unknown network 'resnet5'; did you mean 'resnet50' or"),
        ("zzz", {}, "unknown network 'zzz'; there are alexnet, "),
        ("bert-tiny", {"sequ": 3}, "network 'bert-tiny' has no option 'sequ'; did you mean 'seq'?"),
        ("lenet", {"seq": 3}, "network 'lenet' has no option 'seq'; there are classes"),
        (
            "lenet",
            {"classes": "3"},
            "option 'classes' of network 'lenet' must be of type int like its default 10",
        ),
        ("lenet", {"classes": True}, "must be of type int"),
        ("lenet", {"classes": 0}, "must be at least 1, not 0"),
        ("vgg11", {"dropout": 1.0}, r"must be in [0, 1), not 1.0"),
        ("vgg11", {"image": 100}, "option 'image' must be a multiple of 32"),
        ("vgg11", {"blocks": (1, 1)}, "option 'blocks' must be five sizes"),
        ("resnet18", {"blocks": (1, 1, 1, 0)}, "option 'blocks' must be four sizes"),
        ("alexnet", {"image": 62}, "option 'image' must be at least 63"),
        ("darts", {"cells": 2}, "option 'cells' must be at least 3"),
        ("darts", {"image": 30}, "option 'image' must be a multiple of 4"),
        ("densenet121", {"image": 31}, "option 'image' (31) is too small for 4 blocks"),
        ("densenet121", {"blocks": ()}, "option 'blocks' must be sizes of at least 1"),
        ("fcn8", {"image": (32, 48)}, "option 'image' must be multiples of 32 (five pools halve them), not 32x48"),
        ("pspnet", {"image": (40, 64)}, "option 'image' must be at least 41x41 (the pyramid has 6 bins), not 40x64"),
        ("pspnet", {"blocks": (1, 1)}, "option 'blocks' must be four sizes"),
        ("inception_v3", {"image": 74}, "option 'image' must be at least 75"),
        ("unet", {"image": (32, 40)}, "option 'image' must be multiples of 16 (four pools halve them), not 32x40"),
        ("unet", {"image": (32, 32, 3)}, "must be a size or (height, width), each at least 1, not (32, 32, 3)"),
        ("unet", {"image": (32, -16)}, "must be a size or (height, width), each at least 1"),
        ("unet", {"image": 570, "valid": True}, "570x570 does not halve four times in unpadded convolutions"),
        ("unet", {"image": 140, "valid": True}, "140x140 does not halve four times"),
        ("bert-tiny", {"seq": 513}, "option 'seq' (513) must not exceed 'positions' (512)"),
        ("roberta-base", {"seq": 513}, "option 'seq' (513) must not exceed 'positions' (514) less 2"),
        ("bert-tiny", {"heads": 3}, "option 'hidden' (128) must be a multiple of 'heads' (3)"),
        ("bert-tiny", {"head": "qa"}, "option 'head' must be one of classifier, mlm, not 'qa'"),
        ("gpt2-tiny", {"seq": 257}, "option 'seq' (257) must not exceed 'context' (256)"),
        ("llama-tiny", {"heads": 5}, "option 'hidden' (128) must be a multiple of twice 'heads' (5)"),
        ("llama-tiny", {"groups": 3}, "option 'heads' (4) must be a multiple of 'groups' (3)"),
        ("mlp", {"batch": 0}, "batch must be a size of at least 1"),
        ("mlp", {"batch": ""}, "batch must be a size of at least 1"),
        ("mlp", {"seed": -1}, "seed must be in [0, 2**64), not -1"),
    ],
)
def test_mistakes_are_explained(name: str, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        models.build(name, weights=False, **arguments)
    assert message in str(caught.value)


def test_entries_cannot_be_changed() -> None:
    entry = models.info("bert-tiny", seq=9)
    assert entry.options["seq"] == 9
    with pytest.raises(TypeError):
        entry.options["seq"] = 1  # type: ignore[index]
    with pytest.raises(AttributeError):
        entry.name = "other"  # type: ignore[misc]


def test_the_command_writes_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "net.onnx"
    options = ["--option", "blocks=1,1,1,1", "--option", "bottleneck=true", "--option", "image=32"]
    assert main(["resnet18", "-o", str(path), "--batch", "4", "--no-weights", *options]) == 0
    expected = models.build("resnet18", batch=4, weights=False, blocks=(1, 1, 1, 1), bottleneck=True, image=32)
    assert onnx.load(path) == expected
    assert [item.name for item in tmp_path.iterdir()] == ["net.onnx"]
    assert "parameters" in capsys.readouterr().out


def test_the_command_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "recompute.models", "--list"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in result.stdout.splitlines()] == models.names()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give the name of a network"),
        (["resnet5"], "did you mean 'resnet50'"),
        (["lenet", "--option", "classes"], "--option wants KEY=VALUE, not 'classes'"),
        (["lenet", "--option", "classes=many"], "--option classes=many: expected a value like 10"),
        (["lenet", "--option", "clases=3"], "did you mean 'classes'?"),
        (["vgg11", "--option", "batch_norm=maybe"], "expected a value like False"),
    ],
)
def test_the_command_explains_mistakes(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_the_table_of_the_readme_is_right() -> None:
    path = FOLDER / "README.md"
    if not path.exists():
        pytest.skip("the README is not installed with the package")
    rows = [line.split("|")[1:3] for line in path.read_text().splitlines() if line.startswith("| `")]
    told = {cells[0].strip(" `"): int(cells[1].strip().replace(",", "")) for cells in rows}
    assert told == {name: count(models.build(name, weights=False)) for name in models.names()}
