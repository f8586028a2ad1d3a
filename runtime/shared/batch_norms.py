"""Formulas of batch normalisation for one element; what has one value a channel is worked out before."""

from __future__ import annotations

from ...language.element import Expr, sqrt


def factor(scale: Expr, var: Expr, epsilon: float) -> tuple[Expr, ...]:
    """scale / √(var + epsilon)."""
    return (scale / sqrt(var + epsilon),)


def applied(x: Expr, mean: Expr, factor: Expr, bias: Expr) -> tuple[Expr, ...]:
    """(x - mean) · factor + bias."""
    return ((x - mean) * factor + bias,)


def folded(scale: Expr, bias: Expr, mean: Expr, var: Expr, epsilon: float) -> tuple[Expr, ...]:
    """Inference: a factor and a summand a channel."""
    factor = scale / sqrt(var + epsilon)
    return factor, bias - factor * mean


def affine(x: Expr, factor: Expr, summand: Expr) -> tuple[Expr, ...]:
    """x · factor + summand."""
    return (x * factor + summand,)


def gradient(x: Expr, dy: Expr, mean: Expr, steep: Expr, factor: Expr, offset: Expr) -> tuple[Expr, ...]:
    """dx of BatchNormTrain."""
    return ((x - mean) * steep + dy * factor + offset,)
