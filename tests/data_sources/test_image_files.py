"""Image files: formats by contents, modes of pixels; and Pillow's plug-ins that start programs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

import recompute as rc
from detecting import CocoBoxes, Locations
from recompute.data import dataset
from recompute.errors import JobError, ModelError, RecomputeError
from recompute.ops.reference.evaluator import reference

Image = pytest.importorskip("PIL.Image")
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n(any PostScript) =\n"
WIDE = np.linspace(0, 65535, 64).reshape(8, 8).astype(np.uint16)


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that exists once a program called `gs` was started."""
    found, folder = tmp_path / "executed", tmp_path / "bin"
    folder.mkdir()
    (folder / "gs").write_text(f"#!/bin/sh\ntouch {found}\n")
    (folder / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return found


def pixels(path: Path, save, mode: str = "RGB", name: str = "x.png") -> np.ndarray:
    (path / "i" / "a").mkdir(parents=True, exist_ok=True)
    save(path / "i" / "a" / name)
    return dataset(path / "i", size=8, dtype="uint8", mode=mode).take(np.arange(1))["image"][0]


def test_a_png_that_is_postscript_starts_no_program(started: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="it is none of BMP, JPEG, PNG, PPM, TIFF, WEBP, or damaged"):
        pixels(tmp_path, lambda p: p.write_bytes(EPS))
    told = {
        "images": [{"id": 1, "file_name": "x.png", "width": 10, "height": 10}],
        "annotations": [],
        "categories": [{"id": 1, "name": "c"}],
    }
    (tmp_path / "coco.json").write_text(json.dumps(told))
    boxes = CocoBoxes(tmp_path / "coco.json", tmp_path / "i" / "a", Locations((64, 64), (8,)))
    with pytest.raises(JobError, match="cannot be read: it is none of BMP"):
        boxes.take(np.arange(1))
    assert not started.exists()


def test_image_decoder_starts_no_program(started: Path) -> None:
    """Neither while a model is loaded nor in a step."""
    data, h = np.frombuffer(EPS, np.uint8), onnx.helper
    y = h.make_tensor_value_info("y", onnx.TensorProto.UINT8, [10, 10, 3])
    graph = h.make_graph(
        [h.make_node("ImageDecoder", ["x"], ["y"])], "g", [], [y], [onnx.numpy_helper.from_array(data, "x")]
    )
    why = "its image is damaged, or of none of the formats"
    with pytest.raises(RecomputeError, match=why):
        rc.load(h.make_model(graph, opset_imports=[h.make_opsetid("", 20)], ir_version=9))
    op = reference(h.make_node("ImageDecoder", ["x0"], ["y0"]), 20, ("u8[10,10,3]",))
    with pytest.raises(ModelError, match=why):
        op.compute([data], [np.empty((10, 10, 3), np.uint8)], [])
    assert not started.exists()


@pytest.mark.parametrize("name", ["x.png", "x.tif", "x.pgm"])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_16_bits_are_scaled(name: str, mode: str, tmp_path: Path) -> None:
    """65535 is 255: v · 255 / 65535 = v / 257, rounded."""
    found = pixels(tmp_path, lambda p: Image.fromarray(WIDE).save(p), mode, name)
    np.testing.assert_array_equal(found, np.broadcast_to(np.rint(WIDE / 257.0), found.shape))


@pytest.mark.parametrize(("kind", "dtype"), [("whole numbers of 32 bits", np.int32), ("floats", np.float32)])
def test_numbers_without_a_scale_are_refused(kind: str, dtype: type, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"x.tif': its pixels are {kind}"):
        pixels(tmp_path, lambda p: Image.fromarray(WIDE.astype(dtype)).save(p), name="x.tif")


def test_palettes_grey_alpha_and_cmyk(tmp_path: Path) -> None:
    """As docs/data.md says: colours of palettes, no alpha, and CMYK as 255 less the ink."""
    grey = (WIDE >> 8).astype(np.uint8)
    three = np.broadcast_to(grey, (3, 8, 8))
    image = Image.fromarray(grey)
    np.testing.assert_array_equal(pixels(tmp_path, image.save), three)
    np.testing.assert_array_equal(pixels(tmp_path, image.convert("P").save), three)
    image.putalpha(7)
    np.testing.assert_array_equal(pixels(tmp_path, image.save), three)
    np.testing.assert_array_equal(pixels(tmp_path, image.convert("RGBA").save), three)
    ink = Image.merge("CMYK", [Image.fromarray(255 - grey)] * 3 + [Image.new("L", (8, 8), 0)])
    np.testing.assert_array_equal(pixels(tmp_path, ink.save, name="x.tif"), three)


def test_a_name_may_say_another_format(tmp_path: Path) -> None:
    grey = (WIDE >> 8).astype(np.uint8)
    found = pixels(tmp_path, lambda p: Image.fromarray(grey).save(p, format="BMP"))
    np.testing.assert_array_equal(found[0], grey)
