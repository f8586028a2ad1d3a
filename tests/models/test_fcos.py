"""FCOS: PyTorch's losses (tests/data/detection/make_fcos.py), torchvision's size, checkpoints, and its options."""

from __future__ import annotations

import functools
from math import prod
from pathlib import Path

import numpy as np
import onnx
import pytest

import recompute as rc
from detecting import Decoder, Locations
from recompute import models

DATA = dict(np.load(Path(__file__).parents[1] / "data" / "detection" / "fcos.npz"))
FEED = {name: a.astype(np.float32) if name == "x" else a for name, a in DATA.items() if not name.startswith("losses")}


@functools.cache
def losses(checkpoints: tuple[str, ...] = ()) -> tuple[list[float], rc.Program, int]:
    """The losses of six steps of SGD, as in make_fcos.py, the trained program, and the measured peak."""
    program = rc.load(models.build("fcos-tiny", batch=3))
    optimizer = rc.SGD(learning_rate=0.02)
    if checkpoints:
        optimizer = rc.RecomputeOptimizer(optimizer).set_checkpoints(list(checkpoints))
    optimizer.minimize(program["loss"])
    executor = rc.Executor()
    found = [executor.run(program, FEED, ["loss"])[0].item() for _ in range(6)]
    return found, program, executor.session(program, ["loss"]).measured_peak_bytes


def test_losses_are_those_of_pytorch() -> None:
    # PyTorch's own float32 differs from its float64 by 1e-7
    np.testing.assert_allclose(losses()[0], DATA["losses64"], rtol=1e-6)
    np.testing.assert_allclose(DATA["losses32"], DATA["losses64"], rtol=1e-6)


def test_recomputed_the_bits_are_the_same() -> None:
    found, program, peak = losses()
    again, other, less = losses(models.info("fcos-tiny").checkpoints)
    assert again == found and less < peak
    assert all(np.array_equal(program.data[v.name], other.data[v.name]) for v in program.parameters)


def test_only_parameters_of_the_detector_train() -> None:
    model = models.build("fcos-tiny", batch=1)
    program = rc.load(model)
    assert {v.name for v in program.parameters} == set(models.parameters(model))


def test_the_size_is_torchvision_s() -> None:
    """fcos_resnet50_fpn has 32,269,600 parameters; its backbone's norms are frozen, and levels have no factor."""
    model = models.build("fcos-resnet50", weights=False, classes=91)
    shapes = models.parameters(model)
    norms = sum(
        prod(shape) for name, shape in shapes.items() if ".bn" in name or "bn1" in name or "downsample.1" in name
    )
    factors = [shape for name, shape in shapes.items() if name.startswith("scales.")]
    assert factors == [(1,)] * 5
    assert sum(map(prod, shapes.values())) == 32_269_600 + norms + 5


@pytest.mark.parametrize("coarse", [True, False])
def test_levels_are_those_of_the_targets(coarse: bool) -> None:
    image = (96, 160)
    entry = models.info("fcos-tiny", image=image, coarse=coarse)
    strides = (8, 16, 32, 64, 128) if coarse else (8, 16, 32)
    columns = Locations(image, strides).columns()
    shapes = {spec.name: spec.shape[1:] for spec in entry.inputs[1:]}
    assert shapes == {name: shape for name, (_, shape) in columns.items()}
    model = models.build("fcos-tiny", image=image, coarse=coarse, weights=False, batch=2)
    onnx.checker.check_model(model, full_check=True)
    inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    found = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in inferred.graph.value_info}
    count = len(Locations(image, strides))
    assert [found[n] for n in Decoder.READS] == [[2, 3, count], [2, 4, count], [2, count]]


def test_a_batch_without_objects() -> None:
    program = rc.load(models.build("fcos-tiny", batch=3))
    rc.SGD(learning_rate=0.1).minimize(program["loss"])
    empty = Locations((64, 64)).targets(np.zeros((3, 2, 4)), np.full((3, 2), -1))
    (loss,) = rc.Executor().run(program, {"x": FEED["x"], **empty}, ["loss"])
    assert 0 < loss < 1
    assert all(np.isfinite(program.data[v.name]).all() for v in program.parameters)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image": (64, 72)}, r"'image' must be multiples of 32 \(five strides halve them\), not 64x72"),
        ({"groups": 5}, "'groups' must divide the 32 channels, not be 5"),
        ({"blocks": (1, 1, 1)}, "'blocks' must be four sizes"),
    ],
)
def test_options_are_checked(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        models.build("fcos-tiny", **options)
