"""Bytes that PyTorch's operators allocate while they run, beside their results."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.fx import Node


def scratch(node: Node) -> int:
    """Bytes beside the results; 0 where none are known."""
    return 0
