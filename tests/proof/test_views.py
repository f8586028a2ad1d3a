"""Views of parts, slices and other orders of values have the elements that NumPy's have."""

from __future__ import annotations

import random

import numpy as np

from recompute.proof.views import View, joined


def elements(v: View) -> np.ndarray:
    """Where each element of a view is in its base, in row-major order."""
    places = np.array([v.offset])
    for size, stride in v.digits:
        places = (places[:, None] + np.arange(size) * stride).reshape(-1)
    return places


def drawn(rng: random.Random, strides: list[int], most: int) -> View:
    """A view of a few digits."""
    digits = joined((rng.randrange(1, 6), rng.choice(strides)) for _ in range(rng.randrange(most + 1)))
    return View(0, rng.randrange(5), digits, (int(np.prod([n for n, _ in digits])),))


def test_parts_of_views() -> None:
    """Also of those that go on in the next row at another distance, of which there is no view."""
    rng, checked, none = random.Random(0), 0, 0
    while checked < 1000:
        v, inner = drawn(rng, [0, 1, 2, 6, 7, 20, 50], 3), drawn(rng, [0, 1, 2, 3, 4, 5, 6, 8, 12], 2)
        places = elements(inner)
        if places.max() < v.shape[0]:
            part = v.part(inner)
            none += part is None
            if part is not None:
                np.testing.assert_array_equal(elements(part), elements(v)[places], err_msg=f"{v}: {inner}")
                checked += 1
    assert 0 < none < checked


def test_slices_transposes_and_broadcasts_of_views() -> None:
    rng, checked = random.Random(0), 0
    while checked < 1000:
        shape = tuple(rng.randrange(1, 5) for _ in range(rng.randrange(1, 4)))
        v = View.whole(0, shape)
        for _ in range(3):
            a, axis = elements(v).reshape(v.shape), rng.randrange(len(v.shape))
            start = rng.randrange(v.shape[axis])
            size, perm = rng.randrange(1, v.shape[axis] - start + 1), rng.sample(range(a.ndim), a.ndim)
            kept = [slice(None)] * axis + [slice(start, start + size)]
            wide = (2, *(rng.choice([d, 3]) if d == 1 else d for d in v.shape))
            flat = (a.shape[0] * a.shape[-1], *a.shape[1:-1]) if a.ndim > 1 else (1, *a.shape)
            view, wanted = rng.choice([
                (v.sliced(axis, start, size), a[tuple(kept)]), (v.transposed(perm), a.transpose(perm)),
                (v.expanded(wide), np.broadcast_to(a, wide)), (v.reshaped(flat), a.reshape(flat)),
            ])  # fmt: skip
            if view is None or len(view.shape) > 4:
                break
            np.testing.assert_array_equal(elements(view).reshape(view.shape), wanted)
            v = view
            checked += 1
