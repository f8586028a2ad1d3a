"""What NVRTC's machine code says of its kernels: sizes of parameters, stack, shared memory, registers.

Machine code is an ELF file.  Its sections `.nv.info` have attributes, which NVIDIA's `cuobjdump -elf` prints by these
names: EIATTR_KPARAM_INFO (a parameter's ordinal, offset and size), EIATTR_MIN_STACK_SIZE, EIATTR_REGCOUNT.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

_PARAMETER, _STACK, _REGISTERS = 0x17, 0x12, 0x2F
#: a section that has no bytes in the file, as of memory that a block shares
_NOBITS = 8
_SHARED, _INFO = ".nv.shared.", ".nv.info"


@dataclass
class Entry:
    """A kernel's needs.  `parameters`: bytes of each by number; `stack`: bytes a thread; `shared`: bytes a block."""

    parameters: dict[int, int] = field(default_factory=dict)
    stack: int = 0
    shared: int = 0
    registers: int = 0

    @property
    def sizes(self) -> list[int]:
        """Bytes of each parameter, in order."""
        return [self.parameters[k] for k in sorted(self.parameters)]


def entries(code: bytes) -> dict[str, Entry]:
    """The kernels of a module, by name."""
    start, count, names = (*struct.unpack_from("<Q", code, 40), *struct.unpack_from("<HH", code, 60))
    headers = [struct.unpack_from("<IIQQQQIIQQ", code, start + 64 * i) for i in range(count)]
    sections = {_text(code, headers[names][4] + h[0]): h for h in headers}
    found = {n.removeprefix(_INFO + "."): Entry() for n in sections if n.startswith(_INFO + ".")}
    symbols = _symbols(code, sections)
    for name, header in sections.items():
        if name.startswith(_SHARED) and header[1] == _NOBITS and (one := found.get(name.removeprefix(_SHARED))):
            one.shared = header[5]
        elif name.startswith(_INFO):
            for attribute, value in _attributes(code[header[4] : header[4] + header[5]]):
                if attribute == _PARAMETER:
                    _, ordinal, _, bits = struct.unpack("<IHHI", value)
                    found[name.removeprefix(_INFO + ".")].parameters[ordinal] = bits >> 18
                elif attribute in (_STACK, _REGISTERS):
                    number, amount = struct.unpack("<II", value)
                    if one := found.get(symbols[number]):
                        setattr(one, "stack" if attribute == _STACK else "registers", amount)
    return found


def _text(code: bytes, at: int) -> str:
    return code[at : code.index(b"\0", at)].decode()


def _symbols(code: bytes, sections: dict[str, tuple[int, ...]]) -> list[str]:
    table, names = sections[".symtab"], sections[".strtab"]
    return [_text(code, names[4] + struct.unpack_from("<I", code, at)[0])
            for at in range(table[4], table[4] + table[5], 24)]  # fmt: skip


def _attributes(section: bytes) -> Iterator[tuple[int, bytes]]:
    """Those with a value of a size of its own (format 4); the others have their value in two bytes."""
    at = 0
    while at < len(section):
        form, attribute, size = struct.unpack_from("<BBH", section, at)
        at += 4
        if form == 4:
            yield attribute, section[at : at + size]
            at += size
