"""Damage without understanding: bytes of any file, lines and characters of a text."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence

#: integers at the edges of their types
EDGES = [0, 1, -1, 2, 7, 16, 64, 127, 128, 255, 256, 4096, 65535, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1]
#: words that mean something to one reader or another
WORDS = ["0", "-1", "1e999", "nan", "inf", "-0", "true", "null", "none", "[]", "{}", '""', "_", "@", "%", "\\", '"',
         "f32[", "]", "9" * 30, "\x00", "é", "\u2028", "i64[0]", "f32[2,3]", "\t", "\r", "\x85"]  # fmt: skip


def damaged_bytes(r: random.Random, raw: bytes, others: Sequence[bytes]) -> bytes:
    """`raw` with one to six changes to its bytes; `others`: files of the kind, whose parts may be taken."""
    found = bytearray(raw)
    for _ in range(r.choice((1, 1, 1, 2, 3, 6))):
        _change(r, found, others)
    return bytes(found)


def _change(r: random.Random, found: bytearray, others: Sequence[bytes]) -> None:
    at = r.randrange(len(found) + 1)
    if r.random() < 0.3:  # headers are where the beginning or the end is
        at = min(len(found), r.randrange(64)) if r.random() < 0.5 else max(0, len(found) - r.randrange(64))
    size = r.choice((1, 1, 2, 4, 8, 16, 100))
    how = r.randrange(9)
    if how == 0 and at < len(found):
        found[at] ^= 1 << r.randrange(8)
    elif how == 1 and at < len(found):
        found[at] = r.randrange(256)
    elif how == 2:
        del found[at : at + size]
    elif how == 3:
        found[at:at] = bytes(r.randrange(256) for _ in range(size))
    elif how == 4:
        source = r.randrange(len(found) + 1)
        found[at:at] = found[source : source + size]
    elif how == 5:
        code = r.choice(("<B", "<H", "<I", "<Q", ">I", ">Q"))
        number = r.choice(EDGES) % 256 ** struct.calcsize(code)
        found[at : at + struct.calcsize(code)] = struct.pack(code, number)
    elif how == 6:
        del found[at:]
    elif how == 7 and others:
        other = r.choice(others)
        source = r.randrange(len(other) + 1)
        found[at:] = other[source:]
    else:
        found[at : at + size] = bytes([r.choice((0, 255, 127, 128))]) * size


def damaged_text(r: random.Random, text: str, others: Sequence[str]) -> str:
    """`text` with one to six changes to its characters, words and lines."""
    for _ in range(r.choice((1, 1, 1, 2, 3, 6))):
        text = _edit(r, text, others) if r.random() < 0.6 else _edit_lines(r, text, others)
    return text


def _edit(r: random.Random, text: str, others: Sequence[str]) -> str:
    at, size = r.randrange(len(text) + 1), r.choice((1, 1, 2, 5, 20))
    how = r.randrange(6)
    if how == 0:
        return text[:at] + text[at + size :]
    if how == 1:
        return text[:at] + r.choice(WORDS) + text[at:]
    if how == 2:
        return text[:at] + chr(r.choice((r.randrange(32, 127), r.randrange(0x2FF)))) + text[at + 1 :]
    if how == 3:
        source = r.randrange(len(text) + 1)
        return text[:at] + text[source : source + size] + text[at:]
    if how == 4:
        digits = [i for i, c in enumerate(text) if c.isdigit()]
        if digits:
            i = r.choice(digits)
            return text[:i] + str(r.choice(EDGES)) + text[i + 1 :]
        return text
    other = r.choice(others) if others else text
    return text[:at] + other[r.randrange(len(other) + 1) :] if r.random() < 0.3 else text[:at]


def _edit_lines(r: random.Random, text: str, others: Sequence[str]) -> str:
    lines = text.split("\n")
    i, j = r.randrange(len(lines)), r.randrange(len(lines))
    how = r.randrange(5)
    if how == 0:
        del lines[i]
    elif how == 1:
        lines.insert(i, lines[j])
    elif how == 2:
        lines[i], lines[j] = lines[j], lines[i]
    elif how == 3 and others:
        lines[i] = r.choice(r.choice(others).split("\n"))
    else:
        lines[i] = lines[i][: len(lines[i]) // 2] + lines[j][len(lines[j]) // 2 :]
    return "\n".join(lines)
