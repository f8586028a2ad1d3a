"""Cases of training files and data: options, checkpoints, resuming, data files, exports, exit codes."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from checks import GITHUB, Verdict, classifier, command, model, node, refused, wave

import recompute as rc

CASES: dict[str, tuple[str, str, Callable[[], Verdict]]] = {}
X = wave(21, 4)
LABELS = np.arange(21) % 3


def case(name: str, source: str, said: str) -> Callable[[Callable[[Path], Verdict]], Callable[[Path], Verdict]]:
    """Enters a function of an empty folder as a case."""

    def enter(run: Callable[[Path], Verdict]) -> Callable[[Path], Verdict]:
        def alone() -> Verdict:
            with tempfile.TemporaryDirectory() as folder:
                verdict, note = run(Path(folder))
            return verdict, note.replace(f"{folder}/", "")

        CASES[name] = (GITHUB + source, said, alone)
        return run

    return enter


def train(folder: Path, *more: str, x: Any = X, label: Any = LABELS) -> tuple[int, str, str]:
    """`recompute-train` of one layer on 21 samples, unless the folder has other files."""
    path = folder / "model.onnx"
    if not path.exists():
        classifier(folder)
    if not (folder / "d.npz").exists():
        np.savez(folder / "d.npz", x=x, label=label)
    data = () if "--data" in more else ("--data", str(folder / "d.npz"))
    return command("train", str(path), *data, "--batch", "8", "--lr", "0.1", *more)


def weights(path: Path) -> dict[str, np.ndarray]:
    """The initializers of a file."""
    return {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}


def losses(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / name).read_text())


@case("labels that start at 1", "PaddlePaddle/Paddle/issues/27095", "label 5 of 5 classes: expected < 5")
def _from_one(folder: Path) -> Verdict:
    return refused(train(folder, label=LABELS + 1), 2, r"label.*3.*(0 to 2|below 3|classes)")


@case("a label of -1", "EricFillion/happy-transformer/issues/248", "target -1 is out of bounds")
def _minus_one(folder: Path) -> Verdict:
    return refused(train(folder, label=np.where(LABELS == 1, -1, LABELS)), 2, r"label.*-1")


@case("labels as text in csv", "EricFillion/happy-transformer/issues/248", "values of a csv file")
def _text_labels(folder: Path) -> Verdict:
    rows = [f'{a},{b},{c},{d},"{("cat", "a dog", "a, b")[t]}"' for (a, b, c, d), t in zip(X, LABELS, strict=True)]
    (folder / "d.csv").write_text("\n".join(["p,q,r,s,label", *rows]) + "\n")
    code, out, err = train(folder, "--data", str(folder / "d.csv"), "--epochs", "1")
    return ("right", out.splitlines()[-1][:120]) if code == 0 else refused((code, out, err), 2, "label")


@case("a class is missing", "RobRomijnders/CNN_tsc/issues/2", "the number of classes is counted from the data")
def _missing(folder: Path) -> Verdict:
    code, _, err = train(folder, "--metrics", "accuracy,f1", "--eval", str(folder / "d.npz"), label=LABELS % 2 * 2)
    return ("right", "trains with labels 0 and 2 of 3 classes") if code == 0 else ("wrong", err[:250])


@case("grey values as labels", "milesial/Pytorch-UNet/issues/291", "target 192 is out of bounds")
def _grey(folder: Path) -> Verdict:
    return refused(train(folder, label=np.where(LABELS == 1, 192, 0).astype(np.uint8)), 2, r"label.*192")


@case("labels as floats", "pytorch/pytorch/issues/15666", "types of labels")
def _float_labels(folder: Path) -> Verdict:
    code, out, err = train(folder, label=LABELS.astype(np.float64))
    return ("right", "whole floats are taken") if code == 0 else refused((code, out, err), 2, "label.*(float|whole)")


@case("NaN in the data", "microsoft/onnxruntime/issues/16351", "NaN spreads in silence")
def _nan(folder: Path) -> Verdict:
    x = X.copy()
    x[5, 2] = np.nan
    return refused(train(folder, x=x), 2, r"NaN|nan|finite")


@case("too few columns", "onnx/sklearn-onnx/issues/1150", "input shapes differ")
def _columns(folder: Path) -> Verdict:
    return refused(train(folder, x=X[:, :3]), 2, r"x.*(3|shape)")


@case("objects in npz", "onnx/onnx/issues/3157", "data that cannot be read back")
def _objects(folder: Path) -> Verdict:
    np.savez(folder / "d.npz", x=np.array([[1.0], None], dtype=object), label=np.arange(2), allow_pickle=True)
    classifier(folder)
    return refused(train(folder), 2, r"object")


@case("no data file", "microsoft/onnxruntime/issues/13148", "a path that is not there: invalid argument")
def _no_file(folder: Path) -> Verdict:
    return refused(train(folder, "--data", str(folder / "none.npz")), 1, r"none\.npz")


@case("a model that is text", "microsoft/onnxruntime/issues/13148", "failed to load model")
def _no_model(folder: Path) -> Verdict:
    (folder / "model.onnx").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    return refused(train(folder), 1, r"model\.onnx.*(no ONNX model|LFS)")


@case("the last batch is smaller", "huggingface/accelerate/issues/2823", "samples at the end are lost")
def _uneven(folder: Path) -> Verdict:
    code, _, err = train(folder, "--json", str(folder / "r.json"), "--no-shuffle", "--lr", "0")
    assert code == 0, err
    held = weights(folder / "model.onnx")
    z = X @ held["w"] + held["b"]
    z = z - z.max(1, keepdims=True)
    mean = -(z - np.log(np.exp(z).sum(1, keepdims=True)))[np.arange(21), LABELS].mean()
    found = losses(folder, "r.json")["epochs"][0]["train"]["loss"]
    return (
        ("right", f"mean of 21 samples, {found:.6f}") if abs(found - mean) < 1e-5 else ("wrong", f"{found}, not {mean}")
    )


@case("one sample less than a batch", "huggingface/accelerate/issues/2823", "nothing is trained")
def _few(folder: Path) -> Verdict:
    code, out, err = train(folder, x=X[:5], label=LABELS[:5])
    return ("right", out.splitlines()[-1][:100]) if code == 0 else refused((code, out, err), 1, "5")


@case("resume with a schedule", "lightly-ai/lightly-train/pull/301", "the learning rate begins again")
def _resume(folder: Path) -> Verdict:
    options = ("--schedule", "cosine", "--warmup", "3", "--optimizer", "adam", "-q")
    a, c = folder / "a", folder / "c"
    code, _, err = train(folder, *options, "--epochs", "4", "--save", str(a), "--json", f"{a}.json")
    assert code == 0, err
    trainer = folder / "a" / "checkpoints"
    newest = sorted(trainer.iterdir())
    assert len(newest) >= 2, newest
    shutil.copytree(a, c)
    shutil.rmtree(c / "checkpoints" / newest[-1].name)
    code, _, err = train(folder, *options, "--epochs", "4", "--save", str(c), "--resume", "--json", f"{c}.json")
    assert code == 0, err
    same = losses(folder, "a.json")["weights_sha256"] == losses(folder, "c.json")["weights_sha256"]
    return ("right", "the same bits as without the interruption") if same else ("wrong", "other weights after resuming")


@case("resume with other options", "zurutech/ashpy/issues/54", "a jump in the loss after a restart")
def _resume_other(folder: Path) -> Verdict:
    code, _, err = train(folder, "--save", str(folder / "s"), "--epochs", "1", "-q")
    assert code == 0, err
    return refused(
        train(folder, "--save", str(folder / "s"), "--epochs", "2", "--resume", "--optimizer", "sgd"),
        2,
        "optimizer|sgd",
    )


@case("resume from nothing", "atomistic-machine-learning/schnetpack/issues/102", "a restart that cannot start")
def _resume_nothing(folder: Path) -> Verdict:
    code, out, err = train(folder, "--save", str(folder / "s"), "--resume", "--epochs", "1")
    return ("right", "begins anew") if code == 0 else refused((code, out, err), 1, "checkpoint")


@case("everything frozen", "microsoft/onnxruntime/issues/16597", "artifacts with all parameters frozen")
def _frozen(folder: Path) -> Verdict:
    return refused(train(folder, "--freeze", "*"), 2, r"freeze|train")


@case("freeze by a name that is not there", "microsoft/onnxruntime/issues/19186", "names of parameters")
def _freeze_name(folder: Path) -> Verdict:
    return refused(train(folder, "--freeze", "weight"), 2, r"weight")


@case("frozen weights stay", "microsoft/onnxruntime/issues/17879", "parameters that must not be trained")
def _freeze(folder: Path) -> Verdict:
    code, _, err = train(
        folder, "--freeze", "w", "--save", str(folder / "s"), "--optimizer", "adamw", "--epochs", "2", "-q"
    )
    assert code == 0, err
    before, after = (
        {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(p).graph.initializer}
        for p in (folder / "model.onnx", folder / "s" / "model.onnx")
    )
    assert np.array_equal(before["w"], after["w"]) and not np.array_equal(before["b"], after["b"])
    return "right", "w has the same bits, b has not"


@case("momentum of a batch norm", "pytorch/pytorch/issues/31296", "0.2 becomes 0.8 or 1 on export")
def _momentum(folder: Path) -> Verdict:
    x = wave(8, 3)
    held = {"s": wave(3), "b": wave(3), "m": wave(3), "v": np.ones(3, np.float32)}
    made = model([node("BatchNormalization", "x s b m v", momentum=0.8)], {"x": x}, held)
    program = rc.load(made)
    rc.SGD(0.0).minimize(rc.losses.mse(program["y"]))
    label = next(v.name for v in program.inputs if v.name != "x")
    rc.Executor().run(program, {"x": x, label: x}, [])
    np.testing.assert_allclose(program.data["m"], held["m"] * 0.8 + x.mean(0) * 0.2, 1e-5, 1e-6)
    exported = rc.export_trained(program)
    kept = next(a.f for n in exported.graph.node for a in n.attribute if a.name == "momentum")
    return ("right", "statistics and exported momentum") if abs(kept - 0.8) < 1e-6 else ("wrong", f"momentum {kept}")


@case(
    "an export after training runs elsewhere", "microsoft/onnxruntime/issues/16597", "the trained model does not load"
)
def _export(folder: Path) -> Verdict:
    import onnxruntime

    code, _, err = train(
        folder, "--save", str(folder / "s"), "-q", "--eval", str(folder / "d.npz"), "--json", str(folder / "r.json")
    )
    assert code == 0, err
    path = folder / "s" / "model.onnx"
    onnx.checker.check_model(onnx.load(path), full_check=True)
    (z,) = onnxruntime.InferenceSession(path).run(None, {"x": X})
    accuracy = losses(folder, "r.json")["epochs"][-1]["eval"]["accuracy"]
    return (
        ("right", f"accuracy {accuracy:.4f}")
        if (z.argmax(1) == LABELS).mean() == accuracy
        else ("wrong", "other scores")
    )


@case("json alone on standard output", "microsoft/onnxruntime/issues/13148", "machine-readable results")
def _json(folder: Path) -> Verdict:
    code, out, err = train(folder, "--json", "-", "--epochs", "2")
    assert code == 0, err
    return "right", f"{len(json.loads(out)['epochs'])} epochs"


@case("a loss that is not a number, in json", "microsoft/onnxruntime/issues/16350", "NaN is no JSON")
def _json_nan(folder: Path) -> Verdict:
    code, out, err = train(
        folder,
        "--json",
        "-",
        "--epochs",
        "2",
        "--optimizer",
        "sgd",
        "--lr",
        "1e38",
        "--loss",
        "mse",
        label=wave(21, 3) * 1e10,
    )
    if code:
        return refused((code, out, err), 1, r"NaN|finite|infinite")
    json.loads(out, parse_constant=lambda c: (_ for _ in ()).throw(AssertionError(f"{c} in JSON")))
    return "right", "null where the loss is not finite"


@case("a budget without a unit", "NVIDIA/TensorRT/issues/4457", "sizes in text")
def _budget(folder: Path) -> Verdict:
    return refused(train(folder, "--memory-budget", "60"), 2, r"60.*(GiB|GB|MB|MiB)")


@case("a budget that nothing fits", "microsoft/onnxruntime/issues/22465", "out of memory")
def _small_budget(folder: Path) -> Verdict:
    return refused(train(folder, "--memory-budget", "100B"), 2, r"bytes|budget|KiB")


@case("an option that is not there", "microsoft/onnxruntime/issues/16597", "misspelt options")
def _option(folder: Path) -> Verdict:
    return refused(train(folder, "--epoch", "2"), 2, r"--epochs")


@case("a negative clip", "sonos/tract/issues/2751", "limits that make no sense")
def _clip(folder: Path) -> Verdict:
    return refused(train(folder, "--clip-norm", "-1"), 2, r"clip")


@case("accumulated batches of unequal size", "huggingface/accelerate/pull/4071", "the rest counts too much")
def _merge(folder: Path) -> Verdict:
    code, _, err = train(
        folder,
        "--gradient-merge",
        "2",
        "--epochs",
        "1",
        "--no-shuffle",
        "--optimizer",
        "sgd",
        "--save",
        str(folder / "s"),
        "-q",
    )
    assert code == 0, err
    held = {
        t.name: onnx.numpy_helper.to_array(t).astype(np.float64)
        for t in onnx.load(folder / "model.onnx").graph.initializer
    }
    for start, stop in ((0, 16), (16, 21)):
        x, t = X[start:stop].astype(np.float64), LABELS[start:stop]
        z = np.exp(x @ held["w"] + held["b"])
        d = (z / z.sum(1, keepdims=True) - np.eye(3)[t]) / len(t)
        held["w"], held["b"] = held["w"] - 0.1 * x.T @ d, held["b"] - 0.1 * d.sum(0)
    found = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(folder / "s" / "model.onnx").graph.initializer}
    gap = max(float(np.abs(found[n] - held[n]).max()) for n in held)
    return (
        ("right", f"two steps, of 16 and of 5 samples; {gap:.1e}")
        if gap < 1e-5
        else ("wrong", f"weights differ by {gap:.2e}")
    )


@case("images with alpha and in grey", "microsoft/onnxruntime/issues/25417", "modes of images")
def _images(folder: Path) -> Verdict:
    from PIL import Image

    for i, mode in enumerate(("RGB", "RGBA", "L", "P", "CMYK", "I;16", "1", "LA")):
        place = folder / "photos" / ("cat", "dog")[i % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.new("RGB" if mode == "I;16" else mode, (9, 7)).save(
            place / f"{i}.{'tiff' if mode in ('CMYK', 'I;16') else 'png'}"
        )
    data = rc.data.dataset(folder / "photos", size=8)
    found = data.take(np.arange(8))["image"]
    return (
        ("right", f"{found.dtype}{list(found.shape)}") if found.shape == (8, 3, 8, 8) else ("wrong", str(found.shape))
    )
