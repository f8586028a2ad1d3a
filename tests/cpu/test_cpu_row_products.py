"""Rows times a packed matrix, and calls that go together."""

from __future__ import annotations

import numpy as np
import pytest

from recompute.runtime.cpu.device import jit, native
from recompute.runtime.cpu.device.native import Call, Table

if jit.unavailable():
    pytest.skip(jit.unavailable(), allow_module_level=True)
from recompute.runtime.cpu.code.row_products import Packed, pack_rows

G = np.random.default_rng(11)


def draw(*shape: int) -> np.ndarray:
    return G.standard_normal(shape).astype(np.float32)


def product(a: np.ndarray, b: np.ndarray, more: np.ndarray | None, *, turned: bool, inplace: bool) -> np.ndarray:
    """a·b (b transposed where `turned`) + more by the kernels; `inplace`: over `more`'s copy."""
    k, n = b.shape[::-1] if turned else b.shape
    packed = Packed(k, n, a.shape[0], turned=turned)
    panels = np.full(int(np.prod(packed.shape())), np.nan, np.float32)
    c = np.full((a.shape[0], n), np.nan, np.float32)
    if inplace:
        assert more is not None
        c[...] = more
    calls = [packed.pack(b, panels), packed.product(a, panels, c, c if inplace else more)]
    Table(calls).run()
    return c


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("more", ["nothing", "a row", "rows", "itself"])
@pytest.mark.parametrize(("m", "k", "n"), [(1, 3, 5), (5, 257, 70), (37, 600, 33)])
def test_products(m: int, k: int, n: int, more: str, turned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Near those in float64; a row's bits are the same alone, and on one thread or two."""
    a, b = draw(m, k), draw(n, k) if turned else draw(k, n)
    added = {"nothing": None, "a row": draw(n)}.get(more, draw(m, n))
    given = {"turned": turned, "inplace": more == "itself"}
    exact = [x.astype(np.float64) for x in (a, b.T if turned else b)]
    plus = 0.0 if added is None else added
    found = product(a, b, added, **given)
    bound = (min(k, 256) + k // 256 + 2) * 2.0**-24 * (abs(exact[0]) @ abs(exact[1]) + abs(plus))
    assert (abs(found - (exact[0] @ exact[1] + plus)) <= bound).all()
    alone = [product(a[i : i + 1], b, added if added is None or added.ndim == 1 else added[i : i + 1], **given)
             for i in range(m)]  # fmt: skip
    assert np.concatenate(alone).tobytes() == found.tobytes()
    for threads in (1, 2, 3):
        monkeypatch.setattr(native, "threads", lambda threads=threads: threads)
        assert product(a, b, added, **given).tobytes() == found.tobytes()


@jit.kernel
def doubled(x, y, begin, end):
    """A kernel over rows."""
    for i in range(begin, end):
        for j in range(x.shape[1]):
            y[i, j] = 2 * x[i, j]


@pytest.mark.parametrize("work", [1, 2, 7])
def test_calls_go_together(work: int) -> None:
    """One after the other, over whatever part of the work."""
    x, y, z = draw(work, 3), draw(work, 3), draw(work, 3)
    call = native.together([doubled.call(x, y, work=work), doubled.call(y, z, work=work)])
    assert call.work == work
    Table([call]).run()
    np.testing.assert_array_equal(z, 4 * x)


def test_calls_over_different_work_do_not() -> None:
    with pytest.raises(ValueError, match="do not go together"):
        native.together([Call(0, (), 2), Call(0, (), 3)])


def test_panels_end_in_zeros() -> None:
    """Where a matrix has no further columns."""
    panels = np.full((2, 4, 16), np.nan, np.float32)
    b = draw(4, 19)
    Table([pack_rows.call(b, panels, work=4)]).run()
    np.testing.assert_array_equal(panels.transpose(1, 0, 2).reshape(4, 32)[:, :19], b)
    assert not panels[1, :, 3:].any()
