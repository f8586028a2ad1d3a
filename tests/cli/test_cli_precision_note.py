"""What the command line says of 16-bit types that a processor has no kernels for."""

from __future__ import annotations

import json

import pytest

from recompute.cli.command import main
from recompute.runtime import cpu
from recompute.runtime.cpu.device import native

SMALL = ["mlp", "--batch", "4", "--checkpoints", "fc_1,pred"]


def test_float16_is_slower(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--precision", "fp16"]) == 0
    assert f"no kernel of the processor multiplies float16: a step takes {cpu.WIDENED_TIME}" in capsys.readouterr().err


@pytest.mark.parametrize("there", [True, False])
def test_bfloat16_where_there_are_no_instructions(
    there: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(native, "converts_bfloat16", lambda: there)
    monkeypatch.setattr("recompute.runtime.cpu.primitives.plans.unavailable", lambda: "")
    assert main([*SMALL, "--precision", "bf16"]) == 0
    assert ("no instructions for bfloat16" in capsys.readouterr().err) is not there


def test_nothing_is_said_of_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--precision", "fp16", "--device", "h100-80"]) == 0
    assert "a step takes" not in capsys.readouterr().err


def test_parameters_and_moments_in_fewer_bits(capsys: pytest.CaptureFixture[str]) -> None:
    found = {}
    for options in ((), ("--precision", "bf16-pure"), ("--precision", "bf16-pure", "--moments", "8-bit")):
        assert main(["lenet", "--batch", "1", "--optimizer", "adamw", "--place", "cuda", "--json", "-", *options]) == 0
        found[options] = json.loads(capsys.readouterr().out)["plain"]["persistent_bytes"]
    whole, pure, both = found.values()
    assert 1.9 * pure < whole and 1.3 * both < pure


def test_only_adam_has_moments_in_8_bits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--optimizer", "sgd", "--moments", "8-bit"]) == 2
    assert "SGD has no option 'moments'" in capsys.readouterr().err
