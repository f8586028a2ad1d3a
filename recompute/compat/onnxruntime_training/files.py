"""The files of `generate_artifacts`: ONNX models whose metadata describe how they are trained."""

from __future__ import annotations

import json
from collections import Counter
from os import PathLike
from pathlib import Path
from typing import Any

import onnx

from ...errors import ModelError
from ...exporter.function_builder import set_metadata
from ...importer.model import read_model
from ...support.json_values import repr_short, unfit

#: the metadata entry with the description, as JSON
ENTRY = "recompute.artifact"

_DESCRIPTIONS: dict[str, Any] = {
    "model": {
        "loss": (str, None), "loss_inputs": [str], "outputs": [str], "trained": [str], "frozen": [str],
        "checkpoints": ([str], None), "memory_budget": (str, int, None),
    },
    "optimizer": {"name": str},
}  # fmt: skip
#: losses and optimizers that have names in the files
LOSSES = ("MSELoss", "CrossEntropyLoss", "BCEWithLogitsLoss", "L1Loss")
OPTIMIZERS = ("AdamW", "SGD")


def described(model: onnx.ModelProto, description: dict[str, Any]) -> onnx.ModelProto:
    """The model with a description."""
    set_metadata(model, {ENTRY: json.dumps(description)})
    return model


def _unknown(fields: dict[str, Any]) -> str:
    """Why a description is invalid: it names something that does not exist; "" if it is valid."""
    if fields["kind"] == "optimizer":
        return "" if fields["name"] in OPTIMIZERS else f"there is no optimizer {repr_short(fields['name'])}"
    if fields["loss"] not in (None, *LOSSES):
        return f"there is no loss {repr_short(fields['loss'])}"
    weights = [*fields["trained"], *fields["frozen"]]
    double = next((n for n, count in Counter(weights).items() if count > 1), None)
    if double is not None or not fields["trained"]:
        return "it trains nothing" if double is None else f"it names the weight {repr_short(double)} twice"
    return "it has more than two loss_inputs" if len(fields["loss_inputs"]) > 2 else ""


def read_artifact(path: str | PathLike[str], kind: str) -> tuple[onnx.ModelProto, dict[str, Any]]:
    """A model that `generate_artifacts` wrote, and its description.  ModelError for other files."""
    path = Path(path)
    model = read_model(path)
    text = next((p.value for p in model.metadata_props if p.key == ENTRY), None)
    try:
        fields = json.loads(text) if text is not None else None
    except (ValueError, RecursionError, TypeError):
        fields = None
    if not isinstance(fields, dict) or fields.get("kind") not in ("model", "optimizer"):
        raise ModelError(
            f"'{path}' was not written by recompute.compat.onnxruntime_training.artifacts.generate_artifacts: "
            "artifacts of ONNX Runtime hold its own operators; generate them again from the ONNX model"
        )
    if fields["kind"] != kind:
        raise ModelError(f"'{path}' holds the {fields['kind']}, but the {kind} is needed")
    if why := unfit(fields, _DESCRIPTIONS[kind], "its description") or _unknown(fields):
        raise ModelError(f"'{path}' is damaged: {why}")
    return model, fields
