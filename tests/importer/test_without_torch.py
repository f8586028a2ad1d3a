"""Without PyTorch, what needs it says so."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest

import recompute as rc
import recompute.torch
from recompute.errors import MissingExtraError


@pytest.mark.parametrize("use", [lambda: rc.from_torch(None, (2,)), lambda: recompute.torch.policy])
def test_the_error_says_what_to_install(use: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="needs PyTorch, which is not installed: pip install torch"):
        use()
