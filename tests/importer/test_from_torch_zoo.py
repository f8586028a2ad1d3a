"""`from_torch` compares its import on every network of the benchmarks, where PyTorch and the networks are there."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest

import recompute as rc

torch = pytest.importorskip("torch")
for module in ("onnxscript", "torchvision", "transformers"):
    pytest.importorskip(module)
sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "pytorch"))
from masked import ARCHITECTURES  # noqa: E402
from zoo import without_dropout  # noqa: E402


@pytest.mark.hours
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_import_is_its_module(name: str) -> None:
    """In float32, in train mode; one that PyTorch cannot export is refused with PyTorch's reason."""
    torch.manual_seed(0)
    module, inputs, loss = ARCHITECTURES[name]()
    module = without_dropout(module.train())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            program = rc.from_torch(module, inputs, loss=loss)
        except rc.ModelError as e:
            assert "cannot export" in str(e), e
            pytest.skip(str(e)[:200])
    assert program.parameters and not any("not compared" in str(w.message) for w in told)
