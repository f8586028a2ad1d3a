"""Einsum, taken apart at import into transposes, matrix products, products and sums.

Operands are contracted from left to right, two at a time.  Letters of a pair that appear nowhere else are the inner
dimension of a matrix product; letters that both have and that are needed later are its batch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...language.op import Imported, ImportedNode, OperatorBuilder, imports
from ...language.types import Value
from ..shape.reshape import reshape


@dataclass(frozen=True)
class Term:
    """A value and the letter of each of its axes (the axes of an ellipsis are `.0`, `.1`, ... from the right)."""

    value: Any
    letters: tuple[str, ...]

    def size(self, letter: str) -> int:
        """The dimension of a letter."""
        return self.value.shape[self.letters.index(letter)]


@imports("Einsum")
def einsum(node: ImportedNode) -> Imported:
    """Emits the operators of one Einsum node."""
    equation = node.attributes["equation"].replace(" ", "")
    values = [node.need(i) for i in range(len(node.inputs))]
    left, arrow, right = equation.partition("->")
    texts = left.split(",")
    if len(texts) != len(values):
        raise node.fail(f"equation '{equation}' has {len(texts)} operands, the node has {len(values)} inputs")
    terms = [Term(v, _letters(t, v.ndim, node)) for t, v in zip(texts, values, strict=True)]
    _check_sizes(terms, node)
    out = _output(right, terms, node) if arrow else _implicit(terms)
    b = node.builder
    terms = [_diagonal(b, t) for t in terms]
    done = terms[0]
    for i, term in enumerate(terms[1:], 2):
        later = {x for t in terms[i:] for x in t.letters}
        done = _contract(b, done, term, {*out, *later}, out)
    return _arrange(b, _sum_away(b, done, set(out)), out)


def _check_sizes(terms: Sequence[Term], node: ImportedNode) -> None:
    """ModelError where a letter has two sizes, neither of them 1."""
    sizes: dict[str, int] = {}
    for letter, n in ((x, n) for t in terms for x, n in zip(t.letters, t.value.shape, strict=True) if n != 1):
        if sizes.setdefault(letter, n) != n:
            raise node.fail(
                f"'{letter.strip('.')}' of the equation is {sizes[letter]} in one operand and {n} in another"
            )


def _letters(text: str, ndim: int, node: ImportedNode) -> tuple[str, ...]:
    """The letters of one operand, its ellipsis written out."""
    before, dots, after = text.partition("...")
    extra = ndim - len(before) - len(after)
    if (not f"{before}{after}".isalpha() and before + after) or extra < 0 or (extra and not dots):
        raise node.fail(f"operand '{text}' of the equation does not fit {ndim} dimensions")
    return (*before, *(f".{i}" for i in range(extra - 1, -1, -1)), *after)


def _output(text: str, terms: Sequence[Term], node: ImportedNode) -> tuple[str, ...]:
    before, dots, after = text.partition("...")
    names = {x for t in terms for x in t.letters}
    out = (*before, *(_ellipsis(terms) if dots else ()), *after)
    if len(set(out)) < len(out) or not names.issuperset(out):
        raise node.fail(f"the equation's result '{text}' names a letter twice, or one that no operand has")
    return out


def _implicit(terms: Sequence[Term]) -> tuple[str, ...]:
    """Without an arrow: the ellipsis, then the letters that appear once, in alphabetical order."""
    letters = [x for t in terms for x in t.letters]
    return (*_ellipsis(terms), *sorted(x for x in set(letters) if letters.count(x) == 1 and x[0] != "."))


def _ellipsis(terms: Sequence[Term]) -> list[str]:
    most = max(sum(x[0] == "." for x in t.letters) for t in terms)
    return [f".{i}" for i in range(most - 1, -1, -1)]


def _diagonal(b: OperatorBuilder, term: Term) -> Term:
    """Letters that one operand has twice: its diagonal, as the sum over a product with the identity matrix."""
    for letter in dict.fromkeys(term.letters):
        while term.letters.count(letter) > 1:
            first = term.letters.index(letter)
            second = term.letters.index(letter, first + 1)
            n = term.value.shape[first]
            eye = b.Eye(dtype=term.value.dtype, shape=(n, n))
            shape = [n if i in (first, second) else 1 for i in range(term.value.ndim)]
            x = b.ReduceSum(b.Mul(term.value, reshape(b, eye, shape)), axes=(second,), keepdims=0)
            term = Term(x, term.letters[:second] + term.letters[second + 1 :])
    return term


def _sum_away(b: OperatorBuilder, term: Term, needed: Collection[str]) -> Term:
    """The sum over letters that nobody needs."""
    axes = tuple(i for i, x in enumerate(term.letters) if x not in needed)
    if not axes:
        return term
    return Term(b.ReduceSum(term.value, axes=axes, keepdims=0), tuple(x for x in term.letters if x in needed))


def _arrange(b: OperatorBuilder, term: Term, letters: Sequence[str]) -> Value:
    """The value with its axes in the order of `letters`."""
    perm = tuple(term.letters.index(x) for x in letters)
    return term.value if perm == tuple(range(len(perm))) else b.Transpose(term.value, perm=perm)


def _contract(b: OperatorBuilder, x: Term, y: Term, needed: Collection[str], out: Sequence[str]) -> Term:
    """The product of two operands, summed over what nobody needs."""
    x = _sum_away(b, x, {*needed, *y.letters})
    y = _sum_away(b, y, {*needed, *x.letters})
    batch = [c for c in x.letters if c in y.letters and c in needed]
    inner = [c for c in x.letters if c in y.letters and c not in needed]
    own_letters = [c for c in x.letters if c not in y.letters]
    other = [c for c in y.letters if c not in x.letters]
    if not inner:
        return _product(b, x, y, [*batch, *own_letters, *other])
    if (
        tuple(out) == (*batch, *other, *own_letters) and own_letters
    ):  # the product the other way round needs no transpose
        x, y, own_letters, other = y, x, other, own_letters
    x, y = _expand_to(b, x, y, inner), _expand_to(b, y, x, inner)
    left, flip_left = _operand(b, x, batch, own_letters, inner)
    right, flip_right = _operand(b, y, batch, inner, other)
    z = b.MatMul(left, right, transA=flip_left, transB=flip_right)
    sizes = [*z.shape[: len(batch)], *(x.size(c) for c in own_letters), *(y.size(c) for c in other)]
    return Term(reshape(b, z, sizes), (*batch, *own_letters, *other))


def _product(b: OperatorBuilder, x: Term, y: Term, letters: Sequence[str]) -> Term:
    """Element by element, each operand with ones for the letters it lacks."""
    values = []
    for t in (x, y):
        has = [c for c in letters if c in t.letters]
        values.append(reshape(b, _arrange(b, t, has), [t.size(c) if c in has else 1 for c in letters]))
    return Term(b.Mul(*values), tuple(letters))


def _operand(b: OperatorBuilder, t: Term, batch: list[str], rows: list[str], columns: list[str]) -> tuple[Any, int]:
    """`t` as a batch of matrices, and whether rows and columns are swapped in it, which saves a transpose."""
    flip = int(t.letters == (*batch, *columns, *rows) and t.letters != (*batch, *rows, *columns))
    first, second = (columns, rows) if flip else (rows, columns)
    value = _arrange(b, t, [*batch, *first, *second])
    sizes = [math.prod(t.size(c) for c in part) for part in (first, second)]
    return reshape(b, value, [*(t.size(c) for c in batch), *sizes]), flip


def _expand_to(b: OperatorBuilder, t: Term, like: Term, letters: Sequence[str]) -> Term:
    """`t` with a dimension of 1 among `letters` repeated where the other operand's is larger."""
    shape = list(t.value.shape)
    for c in letters:
        shape[t.letters.index(c)] = int(np.broadcast_shapes((t.size(c),), (like.size(c),))[0])
    return t if tuple(shape) == t.value.shape else Term(b.Expand(t.value, shape=tuple(shape)), t.letters)
