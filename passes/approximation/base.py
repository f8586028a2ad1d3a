"""Kinds of approximation, by name: what a user permits, as text, and what a kind puts in a waiting value's place.

A kind is one file of this folder with a subclass of `Approximation`, which registers itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar

from ...errors import UsageError, expect, nearest
from ...language.ir import Value
from ...language.types import TensorType
from ...support.plug_ins import import_all

if TYPE_CHECKING:
    from .edits import Edits
    from .step import Leaf, Step

#: name → kind; filled by `Approximation.__init_subclass__`
KINDS: dict[str, type[Approximation]] = {}


class Approximation:
    """A permitted approximation, with its settings; its text is what a user gives, such as "sketch:0.2:rows".

    A kind replaces operators of the backward pass that read a value (`keeps`, `replace`), so that the value need not
    wait for them, or with `whole` it keeps another form of the value, which all of them read (`form`, `store`).
    """

    name: ClassVar[str] = ""
    #: settings, for messages
    usage: ClassVar[str] = ""
    whole: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        KINDS[cls.name] = cls

    @classmethod
    def parse(cls, settings: Sequence[str]) -> Approximation:
        """From the settings, texts.  UsageError with what is wrong."""
        raise NotImplementedError

    def keeps(self, step: Step, leaf: Leaf) -> TensorType | None:
        """The type of what waits for a reader in the value's place; None if the kind does not know this reader."""
        return None

    def why_nothing(self, step: Step) -> str:
        """Why a step has nothing for this kind, where its settings are the reason; "" else."""
        return ""

    def replace(self, step: Step, leaf: Leaf, edits: Edits) -> None:
        """Replaces a reader for which `keeps` has an answer."""
        raise NotImplementedError

    def form(self, value: Value) -> tuple[TensorType, ...] | None:
        """Types of what waits in place of a whole value; None if the kind cannot take it."""
        return None

    def store(self, step: Step, value: Value, edits: Edits) -> None:
        """Keeps `form(value)`, and makes the value again for its readers."""
        raise NotImplementedError


def parse_permissions(text: str | Sequence[str | Approximation]) -> tuple[Approximation, ...]:
    """Approximations from a text such as "sketch:0.2,bits:4,store:8", or from a list of such or of approximations.

    UsageError for unknown kinds, bad settings, and a kind given twice.
    """
    load_kinds()
    wanted = "a text such as 'sketch:0.2,bits:4', or a list of such"
    parts = [text] if isinstance(text, str) else list(expect("approximations", text, Iterable, wanted))
    for t in parts:
        expect("approximations", t, (str, Approximation), wanted)
    permissions: dict[str, Approximation] = {}
    for part in (p.strip() for t in parts for p in str(t).split(",")):
        permission = parse_approximation(part)
        if permission.name in permissions:
            raise UsageError(f"'{permission.name}' is given twice: {permissions[permission.name]} and {permission}")
        permissions[permission.name] = permission
    return tuple(permissions.values())


def parse_approximation(text: str) -> Approximation:
    """One approximation.  UsageError for an unknown kind or bad settings."""
    load_kinds()
    name, *settings = text.split(":")
    kind = KINDS.get(name)
    if kind is None:
        usages = ", ".join(k.usage for k in KINDS.values())
        raise UsageError(f"there is no approximation '{name}'{nearest(name, KINDS)}; known: {usages}")
    return kind.parse(settings)


def load_kinds() -> None:
    """Loads every file of this folder, so that all kinds have registered."""
    import_all(__package__ or "")


def seed_of(name: str) -> int:
    """A seed for what is drawn in place of a value: a function of its name alone (64 bits)."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8, person=b"approximation").digest(), "little")
