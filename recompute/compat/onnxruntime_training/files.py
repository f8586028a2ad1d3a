"""The files of `generate_artifacts`: ONNX models whose metadata describe how they are trained."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Any

import onnx

from ...errors import ModelError
from ...exporter.function_builder import set_metadata
from ...importer.model import read_model

#: the metadata entry with the description, as JSON
ENTRY = "recompute.artifact"


def described(model: onnx.ModelProto, description: dict[str, Any]) -> onnx.ModelProto:
    """The model with a description."""
    set_metadata(model, {ENTRY: json.dumps(description)})
    return model


def read_artifact(path: str | PathLike[str], kind: str) -> tuple[onnx.ModelProto, dict[str, Any]]:
    """A model that `generate_artifacts` wrote, and its description.  ModelError for other files."""
    path = Path(path)
    model = read_model(path)
    text = next((p.value for p in model.metadata_props if p.key == ENTRY), None)
    try:
        found = json.loads(text) if text is not None else None
    except (ValueError, RecursionError, TypeError):
        found = None
    if not isinstance(found, dict) or found.get("kind") not in ("model", "optimizer"):
        raise ModelError(
            f"'{path}' was not written by recompute.compat.onnxruntime_training.artifacts.generate_artifacts: "
            "artifacts of ONNX Runtime hold its own operators; generate them again from the ONNX model"
        )
    if found["kind"] != kind:
        raise ModelError(f"'{path}' holds the {found['kind']}, but the {kind} is needed")
    return model, found
