"""What trains by a Trainer: detectors with their metric, modules of PyTorch, runs that TensorBoard shows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from trainer_cases import data, trainer

import recompute as rc
from detecting import Decoder, Locations, MeanAveragePrecision, Scenes


def test_a_detector_and_its_metric() -> None:
    """Boxes and classes, which the program has no inputs for, reach the metric."""
    pytest.importorskip("pycocotools")
    locations = Locations((64, 64), strides=(8, 16, 32), reach=3)
    program = rc.load(rc.models.build("fcos-tiny"), batch=4)
    metric = MeanAveragePrecision(Decoder(locations))
    made = rc.Trainer(program, rc.Adam(1e-2), metrics=[metric], quiet=True)
    history = made.fit(Scenes(locations, 10, seed=0), epochs=1, eval_data=Scenes(locations, 6, seed=1))
    found = history.epochs[-1]["eval"]
    assert set(found["mAP"]) >= {"mAP", "mAP50"}
    assert np.isfinite(found["loss"])


def test_modules_of_pytorch_go_straight_into_fit(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    example = torch.zeros(16, 8), torch.zeros(16, dtype=torch.int64)
    program = rc.from_torch(module, example[:1], loss=torch.nn.functional.cross_entropy, targets=example[1:])
    inputs = [v.name for v in program.block.inputs]
    samples = dict(zip(inputs, data(50).values(), strict=True))
    made = rc.Trainer(program, rc.SGD(0.1), loss="loss", quiet=True)
    history = made.fit(samples, epochs=2, shuffle=False, save=tmp_path)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    x, label = (torch.tensor(a) for a in samples.values())
    for _ in range(2):
        for begin in range(0, 50, 16):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(module(x[begin : begin + 16]), label[begin : begin + 16]).backward()
            optimizer.step()
    assert history.steps == 8
    for name, wanted in module.named_parameters():
        np.testing.assert_allclose(program.data[name], wanted.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_tensorboard_reads_the_scalars(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    history = trainer().fit(data(), epochs=2, save=rc.Saving(tmp_path, tensorboard=True))
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [e.step for e in board.Scalars("loss")] == list(range(1, 9))
    assert [e.value for e in board.Scalars("train/loss")] == pytest.approx([e["train"]["loss"] for e in history.epochs])
