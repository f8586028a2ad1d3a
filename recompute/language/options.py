"""Frozen dataclasses without a decorator: operators and passes, whose fields are their options."""

from __future__ import annotations

import dataclasses
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: Any) -> Any:
        """Tells type checkers, which read the branch above, what `Options` does."""
        return lambda cls: cls


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
class Options:
    """Base of frozen dataclasses; the first instance makes a class one.

    Most processes use a tenth of all operators and passes, and the code that `dataclass` generates for the others
    would be a fifth of the time that a process takes to start.  A class with a decorator of its own keeps that one.
    """

    __slots__ = ()

    def __init_subclass__(cls, **kw: Any) -> None:
        super().__init_subclass__(**kw)
        for base in cls.__bases__:  # `dataclass`, which a user may call, takes fields of complete bases only
            if issubclass(base, Options):
                option_fields(base)

    def __new__(cls, *_: Any, **__: Any) -> Any:
        option_fields(cls)  # before `__init__` is looked up
        return super().__new__(cls)


_FIELDS: dict[Any, tuple[dataclasses.Field, ...]] = {}
_LOCK = threading.RLock()


def option_fields(cls: Any) -> tuple[dataclasses.Field, ...]:
    """Fields of a subclass of `Options`, in the order of declaration."""
    if cls not in _FIELDS:
        with _LOCK:
            if "__dataclass_fields__" not in vars(cls):
                dataclasses.dataclass(frozen=True, eq="__eq__" not in vars(cls))(cls)
            _FIELDS[cls] = dataclasses.fields(cls)
    return _FIELDS[cls]
