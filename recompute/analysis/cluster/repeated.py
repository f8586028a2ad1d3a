"""What one layer of a network of repeated layers takes, measured of its programs and not of its name."""

from __future__ import annotations

from dataclasses import dataclass

from ...cost import kept_bytes, total_cost
from ...errors import UsageError
from ...language.ir import Block, Role


@dataclass(frozen=True)
class Repeated:
    """One layer at the program's batch: floating-point operations of the forward pass, and bytes that it keeps for the
    backward pass, as a plain step does (float32 where the program is).  `fixed_*`: what does not grow with the layers.
    """

    flops: float
    kept_bytes: float
    fixed_flops: float
    fixed_kept_bytes: float


def repeated(fewer: Block, more: Block, layers: tuple[int, int]) -> Repeated:
    """The difference of the steps of two depths, which all else is equal in.  UsageError unless the depth grows."""
    low, high = layers
    if not 0 < low < high:
        raise UsageError(
            f"a layer is the difference of two depths: give a smaller and a larger one, not {low} and {high}"
        )
    (f, kept), (f_more, kept_more) = _forward(fewer), _forward(more)
    flops, bytes_ = (f_more - f) / (high - low), (kept_more - kept) / (high - low)
    return Repeated(flops, bytes_, f - low * flops, kept - low * bytes_)


def _forward(block: Block) -> tuple[int, int]:
    """Operations of the forward pass, and the bytes that it keeps."""
    return total_cost(o for o in block.operators if o.role == Role.FORWARD).flops, kept_bytes(block)
