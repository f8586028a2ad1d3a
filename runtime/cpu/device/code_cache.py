"""The cache of object code in the user's cache folder, and checks of object files before LLVM loads them.

LLVM believes an object file: one that is cut or empty ends the process.  So its structure is read here first, and the
functions that it calls must be there.
"""

from __future__ import annotations

import platform
import struct
import sys
from collections.abc import Callable

from ....support.cache import KeptFiles
from ....support.files import cache_folder

#: ELF's numbers of processors
_MACHINES = {"x86_64": 62, "AMD64": 62, "aarch64": 183, "arm64": 183, "ppc64le": 21, "s390x": 22, "riscv64": 243}
_SYMBOLS, _STRINGS, _RELOCATIONS, _NO_BYTES = 2, 3, 4, 8  # kinds of sections
_EXECUTABLE = 4
_FIRST_RESERVED = 0xFF00  # section numbers from here on mean something else


def kept(key: str, known: Callable[[str], bool]) -> bytes | None:
    """Object code with the function `k_KEY`; None where there is none that can be trusted and loaded.

    `known`: whether this process has a function of that name.
    """
    code = None if (files := _files()) is None else files.read(f"{key}.o")
    if code is None or (sys.platform == "linux" and not loads(code, f"k_{key}", known)):
        return None
    return code


def keep(key: str, code: bytes) -> None:
    """Keeps object code, if it can."""
    if (files := _files()) is not None:
        files.write(f"{key}.o", code)


def kept_module(key: str) -> bytes | None:
    """Bitcode of a library's kernel; None where there is none that can be trusted."""
    return None if (files := _files()) is None else files.read(f"{key}.bc")


def keep_module(key: str, code: bytes) -> None:
    """Keeps bitcode, if it can."""
    if (files := _files()) is not None:
        files.write(f"{key}.bc", code)


def _files() -> KeptFiles | None:
    folder = cache_folder()
    return None if folder is None else KeptFiles(folder / "kernels")


def loads(code: bytes, function: str, known: Callable[[str], bool]) -> bool:
    """Whether this is a relocatable ELF file for this processor whose parts lie inside of it, with the function, and
    which needs nothing that this process does not have."""
    try:
        return _Object(code).has(function, known)
    except (struct.error, IndexError, ValueError):  # something is outside of the file
        return False


class _Object:
    """The sections and symbols of an ELF file.  struct.error, IndexError or ValueError where it is none."""

    def __init__(self, code: bytes) -> None:
        self.code, self.order = code, "<" if sys.byteorder == "little" else ">"
        expected = bytes((0x7F, *b"ELF", 2, 1 if self.order == "<" else 2, 1))
        kind, machine = self.read("HH", 16)
        if code[:7] != expected or kind != 1 or machine != _MACHINES.get(platform.machine(), machine):
            raise ValueError("no object file of this machine")
        (table,) = self.read("Q", 40)
        size, count, self.names = self.read("HHH", 58)
        if size != 64:
            raise ValueError("sections of another form")
        # name, kind, flags, address, offset, size, link, info, alignment, size of an entry
        self.sections = [self.read("IIQQQQIIQQ", table + size * i) for i in range(count)]
        for s in self.sections:
            if s[1] != _NO_BYTES and s[4] + s[5] > len(code):
                raise ValueError("a section ends outside of the file")

    def read(self, form: str, at: int) -> tuple[int, ...]:
        """Numbers at a place in the file."""
        return struct.unpack_from(self.order + form, self.code, at)

    def entries(self, section: tuple[int, ...], form: str) -> list[tuple[int, ...]]:
        """The rows of a table."""
        size = struct.calcsize(self.order + form)
        if section[9] != size or section[5] % size:
            raise ValueError("a table of another form")
        return list(struct.iter_unpack(self.order + form, self.code[section[4] : section[4] + section[5]]))

    def name(self, strings: tuple[int, ...], at: int) -> str:
        """A name in a section of names."""
        if strings[1] != _STRINGS or at >= strings[5]:
            raise ValueError("a name outside of the names")
        end = self.code.index(b"\0", strings[4] + at, strings[4] + strings[5])
        return self.code[strings[4] + at : end].decode("ascii")

    def has(self, function: str, known: Callable[[str], bool]) -> bool:
        """Whether the function is in it, and all that it calls is known."""
        (table,) = (s for s in self.sections if s[1] == _SYMBOLS)
        strings = self.sections[table[6]]
        for s in self.sections:
            self.name(self.sections[self.names], s[0])
        symbols = self.entries(table, "IBBHQQ")  # name, kind, visibility, section, address, size
        present = False
        for name, kind, _, section, at, size in symbols:
            named = self.name(strings, name)
            if section == 0:
                if named and not known(named):
                    return False
            elif section < _FIRST_RESERVED:
                place = self.sections[section]
                if at + size > place[5]:
                    return False
                present |= named == function and kind == 0x12 and bool(place[2] & _EXECUTABLE) and size > 0
        return present and all(self.relocates(s, len(symbols)) for s in self.sections if s[1] == _RELOCATIONS)

    def relocates(self, section: tuple[int, ...], symbols: int) -> bool:
        """Whether the addresses that are put in lie in their section, and are of symbols that are there."""
        end = self.sections[section[7]][5]
        return all(at < end and info >> 32 < symbols for at, info, _ in self.entries(section, "QQq"))
