"""The C text of a library: its header, its tables and interface, an example."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import one_line
from ...language.ir import Value
from ...passes import ALIGNMENT
from .calls import Entry, Memory, Tables

#: a value with its place in memory
Placed = tuple[Value, int]
_WIDE = 4
#: calls and values of one block: its calls, inputs and outputs
Block = tuple[Sequence[Entry], Sequence[Placed], Sequence[Placed]]


@dataclass(frozen=True)
class Library:
    """All that is written.

    `copies`: where the contents of constants are in the library; `kernels`: the functions' names by address; `step`,
    `evaluation`: see `Block`; `header`: the beginning of the file of weights; `types`: their element types as it names
    them, in its order; `about`: what it was made of; `mark`: where memory says that it has weights of this library;
    `features`: what the processor is asked for; `portable`: whether it has the bits of all of them.
    """

    name: str
    loss: str
    memory: Memory
    tables: Tables
    copies: Mapping[str, int]
    kernels: Mapping[int, str]
    step: Block
    evaluation: Block
    header: bytes
    types: Mapping[str, str]
    model: str
    about: str
    mark: int
    features: Sequence[str] = ()
    portable: bool = False

    @property
    def placed(self) -> dict[str, Sequence[Placed]]:
        """Inputs and outputs of the step and of the evaluation, by the names of their tables."""
        (_, *step), (_, *evaluation) = self.step, self.evaluation
        names = ("inputs", "outputs", "evaluation_inputs", "evaluation_outputs")
        return dict(zip(names, (*step, *evaluation), strict=True))


def template(file: str, name: str) -> str:
    """A file of this folder, its names with the library's."""
    text = (Path(__file__).parent / file).read_text(encoding="utf-8")
    text = re.sub(r"\bstep_", f"{name}_", re.sub(r"\bSTEP_", f"{name.upper()}_", text))
    return re.sub(r"\bNAME\b", name, text).replace("libstep", f"lib{name}").replace("-o step", f"-o {name}")


def header(lib: Library) -> str:
    """NAME.h."""
    lines = {
        f"THE_{name.upper()}": "".join(f" *   {_shown(v)}\n" for v, _ in values) for name, values in lib.placed.items()
    }
    named = ", ".join(f"{{{quoted(v.name)}, {v.nbytes}}}" for v, _ in lib.step[1])
    given = {"BYTES": f"{lib.memory.size:,}", "COUNT": str(len(lib.step[1])), "LOSS": quoted(lib.loss), "NAMED": named}
    text = _filled(template("step.h", lib.name), {**given, "ABOUT": _comment(lib.about)})
    for key, found in lines.items():
        text = text.replace(f" * {key}\n", found)
    return text


def _filled(text: str, given: Mapping[str, str]) -> str:
    """A template's @KEYS@ with what is given for them, in which others mean nothing."""
    return re.sub(r"@([A-Z_]+)@", lambda found: given[found[1]], text)


def _comment(text: str) -> str:
    """A text from a file in a line of a comment, which does not end there, and in which none begins."""
    return one_line(text).replace("*/", "* /").replace("/*", "/ *")


def types(lib: Library) -> dict[str, dict[str, tuple[str, list[int]]]]:
    """Element types and shapes of inputs, outputs and values, by table and name."""
    tables = {**lib.placed, "values": [(v, 0) for v in lib.memory.weights.values()]}
    return {k: {v.name: (v.type.numpy.name, list(v.shape)) for v, _ in some} for k, some in tables.items()}


def loader(lib: Library) -> str:
    """NAME.js."""
    given = {**{k.upper(): found for k, found in types(lib).items()}, "LOSS": lib.loss, "MODEL": lib.model}
    return _filled(template("step.js", lib.name), {k: json.dumps(v) for k, v in given.items()})


def _shown(v: Value) -> str:
    return f"{_comment(v.name)}: {v.type.numpy.name} {list(v.shape)}, {v.nbytes:,} bytes"


def source(lib: Library) -> str:
    """NAME.c: tables, then the interface."""
    calls = [*lib.step[0], *lib.evaluation[0]]
    weights = [(lib.memory.weights[n], lib.memory.places[n]) for n in lib.types]
    size = len(lib.header) + sum(v.nbytes for v, _ in weights)
    numbers = {
        "ALIGNMENT": ALIGNMENT,
        "MEMORY": lib.memory.size,
        "MARK": lib.mark,
        "MARK_VALUE": f"0x{hashlib.sha256(lib.header + lib.about.encode()).hexdigest()[:16]}",
        "MOST_WORDS": max((e.words for e in calls), default=1),
        "MOST_AXES": max([2, *(len(v.shape) for v, _ in weights)]),
        "LONGEST_NAME": max([len("__metadata__"), *(len(n.encode()) for n in lib.types)]),
        "WEIGHTS": len(weights),
        "CONSTANTS": len(lib.memory.constants),
        "HEADER_BYTES": len(lib.header),
        "FILE_BYTES": size,
        "STEP_CALLS": len(lib.step[0]),
        "EVALUATION_CALLS": len(lib.evaluation[0]),
        **{name.upper(): len(values) for name, values in lib.placed.items()},
        "PORTABLE": int(lib.portable),
        "FEATURES": " ".join(f'NEEDS("{f}")' for f in lib.features),
    }
    texts, wide = _Texts(), dict[int, int]()
    rows = [_word(k, w, wide) for k, w in zip(lib.tables.kinds, lib.tables.words, strict=True)]
    functions = _rows(lib.kernels.values())
    parts = [
        template("tables.h", lib.name),
        "\n".join(f"#define {_renamed(k, lib)} {v}" for k, v in numbers.items()),
        f"extern kernel\n{functions.rstrip(',')};\nstatic kernel *const kernels[] = {{\n{functions}\n}};",
        f"extern const unsigned char {lib.name}_data[];",
        _array("uint32_t all_words[]", (w for _, w in rows)),
        _array("unsigned char all_kinds[]", (k for k, _ in rows)),
        _array("int64_t wide_words[]", map(_number, wide)),
        _array(f"struct call {lib.name}_calls[]", _calls(lib.step[0], lib, texts)),
        _array("struct call evaluation_calls[]", _calls(lib.evaluation[0], lib, texts)),
        *_values(lib, weights, texts),
        _array("unsigned char file_header[]", map(str, lib.header)),
        f"static const char texts[] = {{\n{texts.bytes()}\n}};",
        template("step.c", lib.name),
        template("weights.c", lib.name),
    ]
    return "\n\n".join(parts)


class _Texts:
    """Texts one behind the other, each once."""

    def __init__(self) -> None:
        self._at: dict[str, int] = {}
        self._size = 0

    def at(self, text: str) -> int:
        """Where a text begins."""
        if text not in self._at:
            self._at[text] = self._size
            self._size += len(text.encode()) + 1
        return self._at[text]

    def bytes(self) -> str:
        """All texts as bytes, each with a 0 behind it: numbers of C."""
        return _rows(str(b - 256 if b > 127 else b) for t in self._at or [""] for b in (*t.encode(), 0))


def _word(kind: int, word: int, wide: dict[int, int]) -> tuple[str, str]:
    """A word's kind and number: as it is, or in the table of those that need more than 32 bits."""
    if 0 <= word < 1 << 32:
        return str(kind), str(word)
    return str(kind | _WIDE), str(wide.setdefault(word, len(wide)))


def _renamed(name: str, lib: Library) -> str:
    return re.sub(r"^STEP_", f"{lib.name.upper()}_", name)


def _values(lib: Library, weights: Sequence[Placed], texts: _Texts) -> list[str]:
    """The tables of values, the weights' with their types and shapes, and of constants."""
    shapes = [str(n) for v, _ in weights for n in v.shape]
    rows, at = [], 0
    for v, place in weights:
        kind = texts.at(lib.types[v.name])
        rows.append(f"{{{place}, {v.nbytes}, {texts.at(v.name)}, {kind}, {at}, {v.ndim}}}")
        at += v.ndim
    copies = [f"{{{lib.memory.places[n]}, {at}, {lib.memory.constants[n].nbytes}}}" for n, at in lib.copies.items()]
    found = [_array("uint64_t shapes[]", shapes), _array("struct value weights[]", rows)]
    found.append(_array("struct copy constants[]", copies, "{0, 0, 0}"))
    for name, values in lib.placed.items():
        rows = [f"{{{at}, {v.nbytes}, {texts.at(v.name)}, 0, 0, 0}}" for v, at in values]
        found.append(_array(f"struct value {name}[]", rows, "{0, 0, 0, 0, 0, 0}"))
    return found


def _calls(found: Sequence[Entry], lib: Library, texts: _Texts) -> list[str]:
    number = {at: i for i, at in enumerate(lib.kernels)}
    return [f"{{{e.work}, {e.first}, {texts.at(e.where)}, {number[e.kernel]}, {e.words}}}" for e in found]


def _number(n: int) -> str:
    return str(n) if n > -(1 << 63) else "INT64_MIN"


def _array(declared: str, rows: Iterable[str], nothing: str = "0") -> str:
    return f"static const {declared} = {{\n{_rows(list(rows) or [nothing])}\n}};"


def _rows(found: Iterable[str]) -> str:
    """Rows of a table, a comma behind each, in lines."""
    lines, line = [], ""
    for row in found:
        if len(line) + len(row) > 110:
            lines.append(line)
            line = ""
        line += f"{' ' if line else ''}{row},"
    return "\n".join([*lines, line])


def quoted(text: str) -> str:
    """A C string; what is not ASCII is escaped."""
    plain = {ord('"'): '\\"', ord("\\"): "\\\\", ord("?"): "\\?"}
    return '"' + "".join(plain.get(b) or (chr(b) if 32 <= b < 127 else f"\\{b:03o}") for b in text.encode()) + '"'
