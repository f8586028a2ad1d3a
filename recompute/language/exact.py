"""Keys by which operators' attributes and constants are compared: their types and bits.

`==` is not enough for what code is made from: -0.0 == 0.0 and True == 1 == 1.0, but their code differs, and nan != nan,
so that what was made for it is never found again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from .options import Options


def exact(value: Any) -> Any:
    """A hashable form of a number, text, or (nested) tuple of them, equal for values of the same type and bits only."""
    kind = type(value)
    if kind is str or kind is int or value is None:
        return value
    if kind is tuple:
        return tuple(map(exact, value))
    return kind, repr(value) if isinstance(value, (float, np.floating)) else value


class Exact(Options):
    """Base of frozen dataclasses that are equal where `exact` says so of all fields.

    `dataclass` keeps methods that a class has of its own: each subclass gets these two.
    """

    if TYPE_CHECKING:  # else `dataclass` would list them, and what prints fields would ask for them
        _exact: ClassVar[tuple]
        _hash: ClassVar[int]
        _known: ClassVar[Any]  # what a proof notes of it
    __slots__ = ("_exact", "_hash", "_known")  # outside of `vars`, which are the fields

    def __init_subclass__(cls, **kw: Any) -> None:
        super().__init_subclass__(**kw)
        cls.__eq__ = Exact.__eq__  # type: ignore[method-assign]
        cls.__hash__ = Exact.__hash__  # type: ignore[method-assign]

    def _exactly(self) -> tuple:
        try:
            return self._exact
        except AttributeError:
            fields = (type(self), *map(exact, vars(self).values()))
            object.__setattr__(self, "_exact", fields)
            return fields

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__  # copies and pickles: the fields

    def __eq__(self, other: object) -> bool:
        return self is other or (type(self) is type(other) and self._exactly() == other._exactly())

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            number = hash(self._exactly())
            object.__setattr__(self, "_hash", number)
            return number
