"""What the command line says of 16-bit types that a processor has no kernels for."""

from __future__ import annotations

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
