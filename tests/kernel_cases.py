"""What the tests of kernels share: one operator applied to arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from recompute.language.ir import Operator, Value
from recompute.language.kernels import provider
from recompute.language.op import Op
from recompute.language.types import TensorType


def applied(op: Op, *arrays: np.ndarray | None, want: int | None = None, absent: Sequence[int] = ()) -> Operator:
    """`op` over values of the arrays' types (None: an absent input).

    `want`: how many outputs it has (default: all); `absent`: those in between that are left out.
    """
    ins = tuple(None if a is None else Value(f"x{i}", TensorType.of(a)) for i, a in enumerate(arrays))
    types = op.infer(*(None if v is None else v.type for v in ins))[:want]
    return Operator(op, ins, tuple(None if i in absent else Value(f"y{i}", t) for i, t in enumerate(types)))


def native_provider(op: Operator) -> Any:
    """The provider of generated rows or of hand-written kernels that runs an operator; None where neither does."""
    return next((p for name in ("rows", "numba") if (p := provider(name)).accepts(op)), None)
