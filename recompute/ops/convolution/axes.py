"""The indices of convolutions: images, groups, and the channels of a group on either side."""

from __future__ import annotations

from ...language.factors import SUM, Factor, Place, factor


def convolution(n: int, group: int, features: int, channels: int, *, bias: bool, forward: bool) -> list[Factor]:
    """Factors of (x [n, group · channels, ...], w [group · features, channels, ...], bias?) → y [n, group · features,
    ...], or where not `forward` of (y, w, bias? [group · channels]) → x.

    Partial sums over channels are only made without a bias, which would be added in each slice.
    """
    at_x, at_w = Place(1, inner=channels), Place(0, inner=features)
    at_y = Place(1, inner=features)
    images = factor(n, [0], [0])
    if forward:
        groups = factor(group, [at_x, at_w, at_w], [at_y], counts="group")
        axes = factor(features, [None, Place(0, outer=group), Place(0, outer=group)], [Place(1, outer=group)])
        summed = factor(channels, [Place(1, outer=group), 1], [SUM])
    else:
        groups = factor(group, [at_y, at_w, Place(0, inner=channels)], [at_x], counts="group")
        axes = factor(channels, [None, 1, Place(0, outer=group)], [Place(1, outer=group)])
        summed = factor(features, [Place(1, outer=group), Place(0, outer=group)], [SUM])
    return [images, groups, axes] if bias else [images, groups, axes, summed]


def weight_gradient(n: int, group: int, features: int, channels: int) -> list[Factor]:
    """Factors of (x, dy) → dw, shapes as above: the gradient of a batch is the sum of those of its images."""
    return [
        factor(n, [0, 0], [SUM]),
        factor(group, [Place(1, inner=channels), Place(1, inner=features)], [Place(0, inner=features)], counts="group"),
        factor(channels, [Place(1, outer=group)], [1]),
        factor(features, [None, Place(1, outer=group)], [Place(0, outer=group)]),
    ]
