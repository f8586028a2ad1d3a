"""Contents of a program's parameters, buffers and state, in host memory or held by a device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np


class Holder(Protocol):
    """The owner of the newest contents of a program's arrays, such as a session on a device."""

    def claim(self, name: str) -> None:
        """Brings the host's array up to date; it may be written until the next step begins."""


class Arrays(dict[str, np.ndarray]):
    """Arrays by name, in host memory.

    While a device trains, its memory has the newest contents: accessing an array copies them from the device, and
    changes of an accessed array are copied back before the next step.  Access an array again after a step.
    """

    _holder: Holder | None = None
    #: arrays that exported models refer to, by name (support/memory.py)
    referred: Mapping[str, Any] = MappingProxyType({})

    def held_by(self, holder: Holder | None) -> bool:
        """Makes `holder` (None: the host) the owner of the newest contents; returns whether it was not before."""
        if holder is self._holder:
            return False
        if self._holder is not None:
            for name in dict.keys(self):
                self._holder.claim(name)
        self._holder = holder
        return True

    def let_go(self, holder: Holder) -> None:
        """Ends the ownership of `holder`, if it is the owner."""
        if self._holder is holder:
            self._holder = None

    def __getitem__(self, name: str) -> np.ndarray:
        if self._holder is not None:
            self._holder.claim(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """The array, or `default`."""
        if name not in self:
            return default
        return self[name]  # not super().get: see __getitem__

    def __iter__(self) -> Iterator[str]:  # also keeps dict(arrays) from reading past __getitem__
        return super().__iter__()

    def values(self) -> Any:
        """All arrays."""
        return [self[name] for name in self]

    def items(self) -> Any:
        """All names with their arrays."""
        return [(name, self[name]) for name in self]

    def copy(self) -> Arrays:
        """A mapping with the same arrays, without an owner."""
        return Arrays(self.items())
