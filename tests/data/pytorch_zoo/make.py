"""Makes zoo.zip: architectures of torchvision and transformers as PyTorch exports them, and what training gives there.

    python tests/data/pytorch_zoo/make.py [--files FILE ...] [--] [NAME ...]

makes all, or those named (of which only the exports FILE, and the values); needs torch, torchvision, transformers.

In zoo.zip, NAME.tar.xz holds train.onnx (as `rc.from_torch` makes it by dynamo), script.onnx (by TorchScript),
eval.onnx (by dynamo, in eval mode), default.onnx (`torch.onnx.export(module, args, file)`, in train mode), as far as
PyTorch can export it, and values.json: inputs, losses of four steps of SGD and of Adam in float64 without dropout, why
an export is missing, and fingerprints of how weights and statistics changed, each with its difference after a relative
change of the weights by rounding (1e-12; 1e-7 where the network has parts in float32): so far is it determined in
PyTorch itself, as Adam amplifies rounding.  Weights are not stored: see drawn.py.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import sys
import tarfile
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parents[2] / "benchmarks" / "pytorch"))
import drawn  # noqa: E402
from zoo import ARCHITECTURES, _double, without_dropout  # noqa: E402

import recompute as rc  # noqa: E402

FILE = FOLDER / "zoo.zip"
RATES, STEPS = {"SGD": 2.0**-7, "Adam": 2.0**-10}, 4
#: of too many parameters for a test; small ones of their kind are there
LARGE = ("alexnet", "vgg11_bn", "vit_b_16", "resnext50_32x4d", "inception_v3", "convnext_tiny", "swin_t", "swin_v2_t")
#: with no export in float64 by either exporter, or (Longformer) gradients that are NaN in PyTorch itself: its masks are
#: the least float64, which is -inf where its softmax takes them, in float32
NO_REFERENCE = ("T5", "Swin", "Longformer")


class WithLoss(torch.nn.Module):
    """A module whose first output is the loss."""

    def __init__(self, module: Any, loss: Any) -> None:
        super().__init__()
        self.model, self.loss = module, loss

    def forward(self, *values: Any, **named: Any) -> Any:
        output = self.model(*values, **named)
        return {"loss": self.loss(output)}


def main() -> None:
    """Makes what is asked, keeping the rest."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--files", nargs="*", default=["train.onnx", "script.onnx", "eval.onnx", "default.onnx"])
    p.add_argument("names", nargs="*")
    asked = p.parse_args()
    for name in asked.names or [n for n in ARCHITECTURES if n.rpartition("/")[2] not in LARGE + NO_REFERENCE]:
        kept = {}
        if FILE.exists():
            with zipfile.ZipFile(FILE) as old:
                kept = {n: old.read(n) for n in old.namelist()}
        data = kept[f"{name}.tar.xz"] = _packed(network(name, asked.files, _unpacked(kept.get(f"{name}.tar.xz"))))
        with zipfile.ZipFile(FILE, "w") as new:
            for n in sorted(kept):
                new.writestr(zipfile.ZipInfo(n), kept[n])
        print(f"{name}: {len(data):,} bytes, {FILE.stat().st_size:,} in all", flush=True)


def network(name: str, wanted: list[str], files: dict[str, bytes]) -> dict[str, bytes]:
    """The files of one architecture: those wanted anew, the others as they are."""
    torch.manual_seed(0)
    module, inputs, loss = ARCHITECTURES[name]()
    module = without_dropout(module.double().train())
    weights = {n: drawn.parameter(n, tuple(p.shape)) for n, p in module.named_parameters()}
    for n, p in module.named_parameters():
        p.data.copy_(torch.tensor(weights[n]))
    named = inputs if isinstance(inputs, dict) else {f"x{i}": x for i, x in enumerate(inputs)}
    named = {n: _input(n, _double(x)) for n, x in named.items()}
    given = named if isinstance(inputs, dict) else tuple(named.values())
    missing = json.loads(files.pop("values.json", b"{}")).get("missing", {})
    values: dict[str, Any] = {"rates": RATES, "losses": {}, "changes": {}, "missing": missing}
    values["inputs"] = [_description(n, x) for n, x in named.items()]
    values.update(_names(module))
    for mode in ("train", "eval"):
        module.train(mode == "train")
        without_dropout(module)
        for file, export in _exports(mode):
            if file not in wanted:
                continue
            files.pop(file, None)
            missing.pop(file, None)
            try:
                with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
                    warnings.simplefilter("ignore")
                    files[file] = _stored(export(copy.deepcopy(module), given, loss), weights)
            except Exception as e:
                missing[file] = f"{type(e).__name__}: {e}".strip().replace("\n", " ")[:200]
        for kind in ("SGD", "Adam"):
            losses, changes = train(copy.deepcopy(module), given, loss, kind)
            _, others = train(_nearby(module, 1e-7 if _single(files) else 1e-12), given, loss, kind)
            values["losses"][f"{mode} {kind}"] = losses
            values["changes"][f"{mode} {kind}"] = {
                n: (*v, abs(v[0] - others.get(n, (0.0,))[0])) for n, v in changes.items()
            }
    return {**files, "values.json": json.dumps(_rounded(values), separators=(",", ":")).encode()}


def _names(module: Any) -> dict[str, Any]:
    """The parameters that train, those that are frozen, and further names of tied ones."""
    every = list(module.named_parameters(remove_duplicate=False))
    first: dict[int, str] = {}
    tied = {n: first[id(p)] for n, p in every if first.setdefault(id(p), n) != n}
    trains = [n for n, p in every if p.requires_grad]
    return {"trains": trains, "frozen": [n for n, p in every if not p.requires_grad], "tied": tied}


def _single(files: dict[str, bytes]) -> bool:
    """Whether the network computes in float32 somewhere, as many of transformers do for softmax."""
    models = [onnx.ModelProto.FromString(files[n]) for n in ("train.onnx", "script.onnx") if n in files]
    casts = [a for m in models for n in m.graph.node if n.op_type == "Cast" for a in n.attribute]
    return any(a.name == "to" and a.i == onnx.TensorProto.FLOAT for a in casts)


def _nearby(module: Any, relative: float) -> Any:
    """The module with weights a little off."""
    other = copy.deepcopy(module)
    for n, p in other.named_parameters():
        p.data.mul_(1 + relative * torch.tensor(drawn.uniform(f"nearby {n}", tuple(p.shape))))
    return other


def _exports(mode: str) -> list[tuple[str, Any]]:
    def by(exporter: str) -> Any:
        return lambda module, given, loss: rc.from_torch(module, given, loss=loss, exporter=exporter).source

    def default(module: Any, given: Any, loss: Any) -> Any:
        whole = module if loss is None else WithLoss(module, loss)
        kwargs = given if isinstance(given, dict) else None
        return torch.onnx.export(whole, () if kwargs else given, kwargs=kwargs, verbose=False).model_proto

    if mode == "eval":
        return [("eval.onnx", by("dynamo"))]
    return [("train.onnx", by("dynamo")), ("script.onnx", by("torchscript")), ("default.onnx", default)]


def train(module: Any, given: Any, loss: Any, kind: str) -> tuple[list[float], dict[str, Any]]:
    """Losses of four steps, and how parameters and floating-point buffers changed."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    before = {n: t.detach().numpy().copy() for n, t in tensors.items() if t.is_floating_point()}
    optimizer = getattr(torch.optim, kind)([p for p in module.parameters() if p.requires_grad], lr=RATES[kind])
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        output = module(**given) if isinstance(given, dict) else module(*given)
        value = loss(output) if loss is not None else output["loss"]
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    found = {n: drawn.fingerprint(n, a, tensors[n].detach().numpy()) for n, a in before.items()}
    return losses, {n: v for n, v in found.items() if v[1]}


# -- what is stored ---------------------------------------------------------------------------------------------------


def _input(name: str, x: Any) -> Any:
    many = x.is_floating_point() and x.numel() > drawn.MANY
    return torch.tensor(drawn.picture(name, tuple(x.shape))) if many else x


def _description(name: str, x: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name, "shape": list(x.shape), "type": str(x.numpy().dtype)}
    if not (x.is_floating_point() and x.numel() > drawn.MANY):
        found["values"] = x.flatten().tolist()
    return found


def _stored(model: onnx.ModelProto, weights: dict[str, np.ndarray]) -> bytes:
    """A model without contents of weights, this machine's paths, and metadata that is long and not read."""
    found = onnx.ModelProto()
    found.CopyFrom(model)
    for node in found.graph.node:
        kept = [p for p in node.metadata_props if p.key.endswith("class_hierarchy")]
        del node.metadata_props[:]
        node.metadata_props.extend(kept)
        node.doc_string = ""
    for f in found.functions:
        for node in f.node:
            del node.metadata_props[:]
            node.doc_string = ""
    drawn.mark(found, weights)
    return found.SerializeToString()


def _rounded(x: Any) -> Any:
    if isinstance(x, float):
        return float(f"{x:.10g}")
    if isinstance(x, dict):
        return {k: _rounded(v) for k, v in x.items()}
    return [_rounded(v) for v in x] if isinstance(x, (list, tuple)) else x


def _unpacked(data: bytes | None) -> dict[str, bytes]:
    if data is None:
        return {}
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return {m.name: tar.extractfile(m).read() for m in tar.getmembers()}  # type: ignore[union-attr]


def _packed(files: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:xz", preset=9) as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return file.getvalue()


if __name__ == "__main__":
    main()
