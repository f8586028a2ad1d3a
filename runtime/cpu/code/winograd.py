"""Code of convolutions with 3x3 windows by 16 multiplications for each tile of 2x2 results, instead of 36.

Along an axis, four elements of the source, d, and a window's three, g, give two results, y, by four products:

    m = (d0 - d2, d1 + d2, d2 - d1, d3 - d1) · (g0, (g0 + g1 + g2) / 2, (g0 - g1 + g2) / 2, g2)
    y = (m0 + m1 + m2, m1 - m2 + m3)

With two elements of y's gradient in the window's place, the same patches of the source give three sums, those of the
window's gradient.  Over two axes each transformation is applied to columns, then to rows: S. Winograd, "Arithmetic
Complexity of Computations", 1980; A. Lavin and S. Gray, "Fast Algorithms for Convolutional Neural Networks", 2016.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .emit import Code
from .tiles import first_lanes, load, machine, store

#: results of a tile, elements of a window, and of a patch, along an axis
TILE, WINDOW, PATCH = 2, 3, 4
#: products of a tile
PRODUCTS = PATCH * PATCH

#: rows of a square, or of a rectangle, of vectors
Square = list[list[str]]


# -- transformations ---------------------------------------------------------------------------------------------------


def of_patch(f: Code, d: Square) -> Square:
    """Factors [4, 4] from a patch of the source [4, 4]."""
    return _both_axes(f, _patch, d)


def of_window(f: Code, g: Square) -> Square:
    """Factors [4, 4] from a window [3, 3]."""
    return _both_axes(f, _window, g)


def of_tile(f: Code, y: Square) -> Square:
    """Factors [4, 4] from a tile of the results' gradient [2, 2]."""
    return _both_axes(f, _tile, y)


def to_tile(f: Code, m: Square) -> Square:
    """A tile of results [2, 2] from products [4, 4]."""
    return _both_axes(f, _results, m)


def to_window(f: Code, m: Square) -> Square:
    """A window's gradient [3, 3] from products [4, 4]."""
    return _both_axes(f, _taps, m)


def _both_axes(f: Code, along: Callable[[Code, list[str]], list[str]], square: Square) -> Square:
    columns = [along(f, list(column)) for column in zip(*square, strict=True)]
    return [along(f, list(row)) for row in zip(*columns, strict=True)]


def _patch(f: Code, d: list[str]) -> list[str]:
    return [_minus(f, d[0], d[2]), plus(f, d[1], d[2]), _minus(f, d[2], d[1]), _minus(f, d[3], d[1])]


def _window(f: Code, g: list[str]) -> list[str]:
    ends = plus(f, g[0], g[2])
    return [g[0], _half(f, plus(f, ends, g[1])), _half(f, _minus(f, ends, g[1])), g[2]]


def _tile(f: Code, y: list[str]) -> list[str]:
    return [y[0], _half(f, plus(f, *y)), _half(f, _minus(f, *y)), y[1]]


def _results(f: Code, m: list[str]) -> list[str]:
    return [plus(f, m[0], plus(f, m[1], m[2])), plus(f, _minus(f, m[1], m[2]), m[3])]


def _taps(f: Code, m: list[str]) -> list[str]:
    middle = plus(f, m[1], m[2])
    return [plus(f, m[0], middle), _minus(f, m[1], m[2]), plus(f, middle, m[3])]


def plus(f: Code, a: str, b: str) -> str:
    """The sum of two vectors."""
    return f.let(f"fadd {machine().vector} {a}, {b}")


def _minus(f: Code, a: str, b: str) -> str:
    return f.let(f"fsub {machine().vector} {a}, {b}")


def _half(f: Code, a: str) -> str:
    return f.let(f"fmul {machine().vector} {a}, {f.spread('0.5', 'float', machine().width)}")


# -- factors and products in memory ------------------------------------------------------------------------------------


def vectors(f: Code, count: int) -> Iterator[tuple[str, str]]:
    """Code for each vector of `count` elements: where it begins, and its lanes (see `tiles.first_lanes`)."""
    width = machine().width
    if count >= width:
        with f.loop(0, count // width * width, width) as v:
            yield v, ""
    if count % width:
        yield str(count // width * width), first_lanes(count % width)


def store_each(f: Code, square: Square, to: str, apart: str) -> None:
    """Writes the vectors of a square, row after row, `apart` elements from each other."""
    for number, x in enumerate(x for row in square for x in row):
        store(f, x, f.at(to, f.mul(apart, number)))


def load_each(f: Code, source: str, apart: str) -> Square:
    """A square of products [4, 4], `apart` elements from each other."""
    at = [[f.at(source, f.mul(apart, i * PATCH + j)) for j in range(PATCH)] for i in range(PATCH)]
    return [[load(f, x) for x in row] for row in at]


# -- where tiles and patches lie ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tiling:
    """Tiles of the results' pixels: images, the source's and the results' rows and columns, and how many rows and
    columns of zeros the first patch has before the source."""

    images: int
    source: tuple[int, ...]
    results: tuple[int, ...]
    before: tuple[int, ...]

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of tiles of an image."""
        return -(-self.results[0] // TILE), -(-self.results[1] // TILE)

    @property
    def count(self) -> int:
        """Tiles of all images."""
        return self.images * self.grid[0] * self.grid[1]

    @property
    def words(self) -> tuple[int, ...]:
        """Operands of a kernel, for `Places`."""
        return (*self.grid, *self.source, *self.results, *self.before)


class Places:
    """Code that finds tiles and patches in memory, of which a pixel's channels lie together."""

    #: operands of a kernel
    WORDS = 8

    def __init__(self, f: Code, first: int) -> None:
        """`first`: the number of the kernel's operand with which a tiling's `words` begin."""
        self.f = f
        words = [f.word("%args", first + i) for i in range(self.WORDS)]
        self.grid, self.source, self.results, self.before = (words[i : i + 2] for i in range(0, self.WORDS, 2))

    def tile(self, number: str) -> tuple[str, str, str]:
        """A tile's image, and the row and column of its first result."""
        f, (rows, columns) = self.f, self.grid
        line = f.div(number, columns)
        image = f.div(line, rows)
        row, column = f.sub(line, f.mul(image, rows)), f.sub(number, f.mul(line, columns))
        return image, f.mul(row, TILE), f.mul(column, TILE)

    def patch(self, tile: tuple[str, str, str], source: str, channels: str | int, zeros: str) -> Square:
        """Addresses of the pixels of the source that a tile is made from; `zeros` where there are none."""
        f, (image, row, column) = self.f, tile
        first = f.sub(row, self.before[0]), f.sub(column, self.before[1])
        pixels = self._pixels(image, first, self.source, PATCH)
        return [[self._or_zeros(p, source, channels, zeros) for p in line] for line in pixels]

    def gradient(self, tile: tuple[str, str, str], results: str, channels: str | int, zeros: str) -> Square:
        """Addresses of a tile's own pixels; `zeros` where there are none."""
        pixels = self._pixels(tile[0], tile[1:], self.results, TILE)
        return [[self._or_zeros(p, results, channels, zeros) for p in line] for line in pixels]

    def written(
        self, tile: tuple[str, str, str], results: str, channels: str | int
    ) -> Iterator[tuple[int, int, str, str]]:
        """Row and column in the tile, whether there is such a pixel (i1), and its address."""
        for i, line in enumerate(self._pixels(tile[0], tile[1:], self.results, TILE)):
            for j, (inside, number) in enumerate(line):
                yield i, j, inside, self.f.at(results, self.f.mul(number, channels))

    def _pixels(self, image: str, first: tuple[str, str], sizes: list[str], count: int) -> list[list[tuple[str, str]]]:
        """A square of pixels from `first` on: whether each is in the image (i1), and its number."""
        f = self.f
        rows, columns = ([f.add(first[axis], i) for i in range(count)] for axis in (0, 1))
        in_rows, in_columns = (
            [f.let(f"icmp ult i64 {at}, {sizes[axis]}") for at in ats] for axis, ats in ((0, rows), (1, columns))
        )
        lines = [f.mul(f.add(f.mul(image, sizes[0]), row), sizes[1]) for row in rows]
        return [
            [(f.let(f"and i1 {a}, {b}"), f.add(line, column)) for b, column in zip(in_columns, columns, strict=True)]
            for a, line in zip(in_rows, lines, strict=True)
        ]

    def _or_zeros(self, pixel: tuple[str, str], base: str, channels: str | int, zeros: str) -> str:
        inside, number = pixel
        return self.f.let(f"select i1 {inside}, ptr {self.f.at(base, self.f.mul(number, channels))}, ptr {zeros}")
