"""Expressions of operators, from `Op.element` for given element types, or from an expansion."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .element import HALVES, TYPES, Expr, argument, cast, constant, nodes, substitute
from .op import Op, op_class


class NotElementwise(Exception):
    """The operator has no element expression."""


class Elements:
    """A builder for expressions: `expand` called with it returns an expression."""

    def __getattr__(self, name: str) -> Any:
        if not name[:1].isupper():
            raise AttributeError(name)

        def apply(*inputs: Expr | None, **attributes: Any) -> Any:
            expr = op_class(name)(**attributes).element(*inputs)
            if expr is None:
                raise NotElementwise(name)
            return expr

        return apply

    def constant(self, value: Any, like: Any) -> Expr:
        """A number of `like`'s element type."""
        if np.ndim(value):
            raise NotElementwise("constant")
        return constant(value, like if isinstance(like, str) else like.dtype)

    def fill(self, value: float, like: Any) -> Expr:
        """A number of `like`'s element type."""
        return constant(value, like.dtype)

    def sum_to(self, x: Expr, shape: Any) -> Expr:
        """None: a sum has no element."""
        raise NotElementwise("sum_to")


def through_expansion(op: Op, inputs: Sequence[Expr | None]) -> Any:
    """The expression of an operator's expansion; None if it has none, or if one of its operators has no expression."""
    try:
        return op.expand(Elements(), *inputs)  # type: ignore[arg-type]
    except NotElementwise:
        return None


@functools.lru_cache(maxsize=1 << 14)
def formula(op: Op, dtypes: tuple[str | None, ...]) -> tuple[Expr | None, ...] | None:
    """The expressions of all outputs for inputs of these element types (None: an absent one).

    16-bit inputs are converted to f32, and results rounded back: an operator rounds once.  None if the operator is not
    element-wise, or has no expression for these types.
    """
    if any(t is not None and t not in (*TYPES, *HALVES) for t in dtypes):
        return None
    elements = element_of(op, dtypes)
    if elements is None or not any(x.dtype in HALVES and x.fn not in ("input", "cast") for x in _all(elements)):
        return elements
    wide = element_of(op, tuple("f32" if t in HALVES else t for t in dtypes))
    assert wide is not None, f"{op.name} has an element for 16-bit floats only"
    inputs = [None if t is None else cast(argument(i, t), "f32" if t in HALVES else t) for i, t in enumerate(dtypes)]
    exprs = iter(substitute([x for x in wide if x is not None], inputs))
    return tuple(None if x is None else cast(next(exprs), x.dtype) for x in elements)


def element_of(op: Op, dtypes: tuple[str | None, ...]) -> tuple[Expr | None, ...] | None:
    """The expressions of all outputs in these element types themselves, also in halves; None as for `formula`."""
    exprs = op.element(*(None if t is None else argument(i, t) for i, t in enumerate(dtypes)))
    if exprs is None:
        return None
    outs = exprs if isinstance(exprs, tuple) else (exprs,)
    return outs if all(x.dtype in TYPES or x.dtype in HALVES for x in _all(outs)) else None


def _all(outs: Sequence[Expr | None]) -> Iterator[Expr]:
    return nodes([x for x in outs if x is not None])
