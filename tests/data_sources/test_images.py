"""Folders of images, and arrays of pixels."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recompute.data import Dataset, ImageFolder, Pixels, dataset, fitted, split, subset
from recompute.errors import MissingExtraError, ModelError, UsageError
from recompute.language.types import TensorType, Value

Image = pytest.importorskip("PIL.Image")
G = np.random.default_rng(0)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def folder(path: Path, sizes: tuple[tuple[int, int], ...] = ((8, 8),) * 3) -> dict[str, np.ndarray]:
    """Images of two classes, and their pixels by file."""
    made = {}
    for of_class in ("cat", "dog"):
        (path / of_class / "deeper").mkdir(parents=True)
        for i, (h, w) in enumerate(sizes):
            pixels = G.integers(0, 256, (h, w, 3), dtype=np.uint8)
            name = f"{of_class}/{'deeper/' * (i == 1)}{i}.png"
            Image.fromarray(pixels).save(path / name)
            made[name] = pixels
    (path / "dog" / "notes.txt").write_text("no image")
    return made


def open_(path: Any, **options: Any) -> Dataset:
    found = dataset(path, **options)
    assert isinstance(found, Dataset)
    return found


def test_images_of_their_size_are_the_pixels(tmp_path: Path) -> None:
    pixels = list(folder(tmp_path).values())
    data = open_(tmp_path, size=8, dtype="uint8")
    assert isinstance(data, ImageFolder) and data.classes == ("cat", "dog") and len(data) == 6
    found = data.take(np.arange(6))
    assert found["label"].tolist() == [0, 0, 0, 1, 1, 1] and found["label"].dtype == np.int64
    in_order = [pixels[i] for i in (0, 2, 1, 3, 5, 4)]  # a folder comes after the files beside it
    np.testing.assert_array_equal(found["image"], np.stack(in_order).transpose(0, 3, 1, 2))


@pytest.mark.parametrize("workers", [1, 3])
def test_images_are_scaled_by_mean_and_std(workers: int, tmp_path: Path) -> None:
    folder(tmp_path)
    raw = open_(tmp_path, size=8, dtype="uint8").take(np.array([4, 1]))["image"]
    m, s = np.array(MEAN)[:, None, None], np.array(STD)[:, None, None]
    data = open_(tmp_path, size=8, mean=MEAN, std=STD, workers=workers)
    assert data.columns["image"] == (np.dtype(np.float32), (3, 8, 8)) and "image" in data.finite
    found = data.take(np.array([4, 1]))["image"]
    np.testing.assert_allclose(found, (raw / 255 - m) / s, rtol=1e-6, atol=1e-6)
    plain = open_(tmp_path, size=8).take(np.array([4]))["image"]
    np.testing.assert_allclose(plain, raw[:1] / 255, rtol=2e-7)


def test_other_sizes_are_cut_from_the_middle(tmp_path: Path) -> None:
    pixels = folder(tmp_path, ((8, 12), (12, 8), (8, 8)))
    found = open_(tmp_path, size=8, dtype="uint8").take(np.array([0, 2]))["image"].transpose(0, 2, 3, 1)
    np.testing.assert_array_equal(found[0], pixels["cat/0.png"][:, 2:10])
    np.testing.assert_array_equal(found[1], pixels["cat/deeper/1.png"][2:10])
    part = open_(tmp_path, size=6, crop=0.75, dtype="uint8").take(np.array([1]))["image"].transpose(0, 2, 3, 1)
    np.testing.assert_array_equal(part[0], pixels["cat/2.png"][1:7, 1:7])
    assert open_(tmp_path, size=(4, 6), mode="L").take(np.arange(6))["image"].shape == (6, 1, 4, 6)


def test_an_open_size_is_the_models(tmp_path: Path) -> None:
    folder(tmp_path)
    inputs = [Value("x", TensorType("f32", (2, 3, 8, 8))), Value("label", TensorType("i64", (2,)))]
    first = split(open_(tmp_path), 0.5)[0]
    for data, whole in (
        (open_(tmp_path), open_(tmp_path, size=8)),
        (first, subset(open_(tmp_path, size=8), first.indices)),
    ):
        found = fitted(data, inputs).take(np.arange(3))["x"]  # type: ignore[union-attr]
        np.testing.assert_array_equal(found, whole.take(np.arange(3))["image"])
    assert open_(tmp_path).columns["image"][1] == (3, 224, 224)
    with pytest.raises(UsageError, match=r"float32\[3,9,9\], but .* needs float32\[3,8,8\]: axis 1"):
        fitted(open_(tmp_path, size=9), inputs)


def test_large_jpegs_are_decoded_small(tmp_path: Path) -> None:
    """As if they were scaled afterwards, up to what a JPEG's own scaling does."""
    (tmp_path / "a").mkdir()
    y, x = np.mgrid[:512, :640]
    smooth = np.stack([x * 255 / 640, y * 255 / 512, (x + y) * 255 / 1152], -1).astype(np.uint8)
    Image.fromarray(smooth).save(tmp_path / "a" / "x.jpg", quality=95)
    found = open_(tmp_path, size=64, dtype="uint8").take(np.array([0]))["image"][0]
    with Image.open(tmp_path / "a" / "x.jpg") as image:
        whole = image.resize((64, 64), Image.Resampling.BILINEAR, (64, 0, 576, 512))
    assert np.abs(found.transpose(1, 2, 0).astype(int) - np.asarray(whole)).max() <= 3


def test_what_is_drawn_depends_on_seed_epoch_and_sample_alone(tmp_path: Path) -> None:
    folder(tmp_path, ((24, 32),) * 3)
    options: dict[str, Any] = {"size": 8, "flip": True, "crop": (0.1, 1.0), "dtype": "uint8"}
    data = open_(tmp_path, **options, workers=2)
    again = open_(tmp_path, **options, workers=1)
    for epoch in (0, 3):
        whole = data.at_epoch(epoch).take(np.arange(6))["image"]
        one = again.at_epoch(7).at_epoch(epoch)
        for i in (5, 2):
            np.testing.assert_array_equal(one.take(np.array([i]))["image"][0], whole[i])
    others = [data.at_epoch(1), open_(tmp_path, **options, seed=1)]
    for other in others:
        assert (other.take(np.arange(6))["image"] != data.take(np.arange(6))["image"]).any()
    through = subset(data, [5, 2]).at_epoch(3).take(np.array([0]))["image"]
    np.testing.assert_array_equal(through[0], whole[5])
    plain = open_(tmp_path, size=8)
    assert plain.at_epoch(3) is plain


def test_flips_and_crops_are_of_the_image(tmp_path: Path) -> None:
    """Half of many are mirrored; a random part is as large as it was asked for."""
    (tmp_path / "a").mkdir()
    ramp = np.tile(np.arange(0, 256, 8, dtype=np.uint8), (32, 1))
    for i in range(40):
        Image.fromarray(ramp).save(tmp_path / "a" / f"{i:02}.png")
    found = open_(tmp_path, size=32, mode="L", flip=True, dtype="uint8").take(np.arange(40))["image"][:, 0]
    mirrored = [np.array_equal(f, ramp[:, ::-1]) for f in found]
    assert all(m or np.array_equal(f, ramp) for f, m in zip(found, mirrored, strict=True)) and 10 < sum(mirrored) < 30
    parts = open_(tmp_path, size=8, mode="L", crop=(0.25, 0.25), dtype="uint8").take(np.arange(40))["image"][:, 0]
    widths = (parts[:, 0, -1].astype(int) - parts[:, 0, 0]) / 8 * 8 / 7
    assert widths.min() > 12 and widths.max() < 20 and len({int(p[0, 0]) for p in parts}) > 5


@pytest.mark.parametrize("content, message", [
    (b"", "none of BMP, JPEG"), (b"some text", "none of BMP, JPEG"), (None, "truncated|broken|unrecognized|incomplete"),
])  # fmt: skip
def test_images_that_cannot_be_read(content: bytes | None, message: str, tmp_path: Path) -> None:
    folder(tmp_path, ((64, 64),) * 3)
    bad = tmp_path / "dog" / "0.png"
    bad.write_bytes(bad.read_bytes()[:3000] if content is None else content)
    data = open_(tmp_path, size=8, workers=2)
    data.take(np.array([0, 1]))
    assert data.read(np.arange(6), ["label"])["label"].shape == (6,)
    with pytest.raises(ModelError, match=f"cannot read the image '.*dog/0.png': .*({message})"):
        data.take(np.arange(6))


def test_folders_without_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"the folder '.*' has no data"):
        dataset(tmp_path)
    folder(tmp_path)
    (tmp_path / "emu").mkdir()
    with pytest.raises(ModelError, match=r"emu' has no images \(\.bmp"):
        dataset(tmp_path)
    with pytest.raises(ModelError, match=r"cannot read the folder '.*none': No such file"):
        ImageFolder(tmp_path / "none")
    for options, message in (
        ({"size": 0}, "size must be one positive"), ({"size": (8, 8, 3)}, "not .8, 8, 3."),
        ({"size": 8, "crop": 1.5}, "crop must be a share"), ({"mode": "CMYK"}, "mode must be 'RGB' or 'L'"),
        ({"mean": (1, 2)}, "mean must be one number, or 3"), ({"std": 0}, "std positive"),
        ({"dtype": "float16"}, "dtype must be"), ({"dtype": "uint8", "mean": 1}, "not to bytes"),
        ({"sise": 8}, r"without an option 'sise' \(did you mean size"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=message):
            dataset(tmp_path, **options)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtraError, match=r"'Pillow'.*onnx-recompute\[images\]"):
        ImageFolder(tmp_path)


PIXELS = G.integers(0, 256, (20, 6, 5, 3), dtype=np.uint8)


@pytest.mark.parametrize("array, last, chosen", [
    (PIXELS, True, PIXELS.transpose(0, 3, 1, 2)),
    (PIXELS.transpose(0, 3, 1, 2), False, PIXELS.transpose(0, 3, 1, 2)),
    (PIXELS[..., 0], False, PIXELS[:, None, :, :, 0]),
])  # fmt: skip
def test_pixels(array: np.ndarray, last: bool, chosen: np.ndarray) -> None:
    data = Pixels(open_({"image": array, "label": np.arange(20)}), mean=0.5, std=0.25, channels_last=last)
    found = data.take(np.array([3, 1]))
    assert found["label"].tolist() == [3, 1] and found["image"].flags.c_contiguous
    np.testing.assert_allclose(found["image"], (chosen[[3, 1]] / 255 - 0.5) / 0.25, rtol=1e-6, atol=1e-6)
    assert data.columns["image"] == (np.dtype(np.float32), found["image"].shape[1:]) and data.at_epoch(3) is data


def test_pixels_are_mirrored_and_moved() -> None:
    images = PIXELS.transpose(0, 3, 1, 2)
    data = Pixels(open_({"image": images}), flip=True, pad=2, seed=4)
    padded = np.pad(images, ((0, 0), (0, 0), (2, 2), (2, 2)))
    all_found = [np.round(data.at_epoch(e).take(np.arange(20))["image"] * 255).astype(np.uint8) for e in range(3)]
    seen = set()
    for found in all_found:
        for i, image in enumerate(found):
            ways = {
                (flip, y, x)
                for flip in (1, -1)
                for y in range(5)
                for x in range(5)
                if np.array_equal(image, (padded[i][:, :, ::flip])[:, y : y + 6, x : x + 5])
            }
            assert len(ways) == 1
            seen |= ways
    assert len(seen) > 20 and (all_found[0] != all_found[1]).any()
    later = data.at_epoch(2).read(np.array([7]), ["image"])["image"]
    np.testing.assert_array_equal(np.round(later * 255)[0], all_found[2][7])


@pytest.mark.parametrize("column, options, message", [
    ("image", {"pad": 5}, "pad must be at least 0 and less than the images' size, 5"),
    ("label", {}, r"samples of int64\[\], not of uint8"),
    ("imag", {}, r"no column 'imag' \(did you mean image"),
    ("image", {"std": (1, 1)}, "std must be one number, or 3"),
])  # fmt: skip
def test_pixels_that_are_none(column: str, options: dict, message: str) -> None:
    data = open_({"image": PIXELS.transpose(0, 3, 1, 2), "label": np.arange(20)})
    with pytest.raises(UsageError, match=message):
        Pixels(data, column, **options)
    with pytest.raises(UsageError, match="a dataset is needed here, not dict"):
        Pixels({})  # type: ignore[arg-type]
