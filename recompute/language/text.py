"""The text form: `parse(show(block)) == block`, plans and addresses included.

    program mlp {
      input %x: f32[64,32]
      param %fc_1.w: f32[32,128]
      const %c.2.f32: f32[] = [2.0]
      %fc_1: f32[64,128] = Gemm(%x, %fc_1.w, %fc_1.b) {transB=1} @4096
      free %x
      backward %relu_1_grad: f32[64,128] = ReluGrad(%relu_1, %fc_2_grad)
      output %loss
    }

An operator's line: role (none: forward), outputs, `=`, name, inputs (`_`: absent), attributes that differ from
their defaults, `using` and the provider of its kernel (none: its own numerics), scratch buffers, and after `@` the
addresses of outputs and scratch.  `host` before a type: the value lies in host memory, in an arena of its own.
"""

from __future__ import annotations

import functools
import json
import math
import re
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import UsageError, expect
from .ir import Block, Constant, Free, Operator, Role, Value
from .op import Op, op_class
from .options import option_fields
from .types import TensorType

#: deepest nesting of lists in an attribute
_DEEPEST = 8
#: most characters of a line that an error shows
_SHOWN = 400
_PLAIN = re.compile(r"[A-Za-z0-9_./\-$@#]+\Z")
_DECLARATIONS = (("input", "inputs"), ("param", "parameters"), ("buffer", "buffers"), ("state", "state"))


def show_name(name: str) -> str:
    """`%name`, quoted if it has unusual characters."""
    return f"%{name}" if _PLAIN.match(name) else f"%{json.dumps(name)}"


def show_attribute(value: Any) -> str:
    """An attribute's text: numbers, booleans, strings, None, and tuples of them."""
    if isinstance(value, tuple):
        return f"[{','.join(map(show_attribute, value))}]"
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    return "none" if value is None else repr(value)


def show_operator(op: Operator, addresses: dict[str, int] | Any = None) -> str:
    """One line for one operator, without indentation."""
    if isinstance(op.op, Free):
        return "free " + ", ".join(show_name(v.name) for v in op.reads())
    addresses = addresses or {}
    role = "" if op.role is Role.FORWARD else f"{op.role.value} "
    outs = ", ".join("_" if v is None else f"{show_name(v.name)}: {v.type}" for v in op.outputs)
    ins = ["_" if v is None else show_name(v.name) for v in op.inputs]
    text = f"{role}{outs}{' ' if outs else ''}= {show_applied(op.op, ins)}"
    if op.kernel:
        text += f" using {op.kernel}"
    if op.scratch:
        text += " scratch(" + ", ".join(f"{show_name(v.name)}: {v.type}" for v in op.scratch) + ")"
    at = [addresses.get(v.name) for v in (*op.writes(), *op.scratch)]
    if any(a is not None for a in at):
        text += " @" + ",".join("_" if a is None else str(a) for a in at)
    return text


def show_applied(op: Op, inputs: Sequence[str]) -> str:
    """`Name(inputs) {attributes}`: the part of a line without outputs and addresses."""
    text = f"{op.name}({', '.join(inputs)})"
    attributes = op.attributes()
    if attributes:
        text += " {" + ", ".join(f"{k}={show_attribute(v)}" for k, v in attributes.items()) + "}"
    return text


def parse_applied(text: str) -> tuple[str, Op, tuple[str | None, ...]]:
    """Reads `%name = Name(%a, _) {attributes}`: the result's name, the operator, the inputs' names."""
    line = _Line(text, 1)
    name = line.value_name()
    line.need("=")
    cls = op_class(line.take("word"))
    line.need("(")
    inputs = tuple(None if line.skip("_") else line.value_name() for _ in line.list_until(")"))
    op = _read_attributes(line, cls)
    if line.at != len(line.tokens):
        raise line.error(f"unexpected '{line.peek()}'")
    return name, op, inputs


def show(block: Block) -> str:
    """The whole block as text."""
    lines = [f"program {_show_word(expect('block', block, Block, 'a Block').name)} {{"]
    if block.products:
        lines.append(f"  products {block.products}")
    for word, field in _DECLARATIONS:
        for v in getattr(block, field):
            at = f" @{block.addresses[v.name]}" if v.name in block.addresses else ""
            lines.append(f"  {word} {show_name(v.name)}: {v.type}{at}")
    for c in block.constants:
        lines.append(f"  const {show_name(c.value.name)}: {c.value.type} = {show_attribute(c.data)}")
    lines += ["  " + show_operator(op, block.addresses) for op in block.operators]
    if block.outputs:
        lines.append("  output " + ", ".join(map(show_name, block.outputs)))
    return "\n".join([*lines, "}"]) + "\n"


def _show_word(word: str) -> str:
    return word if re.fullmatch(r"[A-Za-z0-9_.\-]+", word) else json.dumps(word)


_TOKEN = re.compile(
    r"""\s*(?:(?P<name>%(?:"(?:[^"\\]|\\.)*"|[A-Za-z0-9_./\-$@\#]+))
      |(?P<string>"(?:[^"\\]|\\.)*")
      |(?P<number>[-+]?(?:inf|nan|\d+\.?\d*(?:[eE][-+]?\d+)?)(?![A-Za-z_]))
      |(?P<word>[A-Za-z_][A-Za-z0-9_.]*)
      |(?P<sign>[(){}\[\],=:@]))""",
    re.VERBOSE,
)


_FIELDS = dict(_DECLARATIONS)
_ROLES = frozenset(r.value for r in Role)


@functools.lru_cache(maxsize=4096)
def _type_of(text: str) -> TensorType:
    """Parses a type; cached, as programs have few types, written often."""
    return TensorType.parse(text)


class _Line:
    """The tokens of one line, read from left to right."""

    def __init__(self, text: str, number: int) -> None:
        self.text, self.number, self.at = text, number, 0
        self.tokens: list[tuple[str, str]] = []
        end = 0
        stripped = text.rstrip()
        for token in iter(_TOKEN.scanner(stripped).match, None):  # type: ignore[attr-defined]
            kind = token.lastgroup
            self.tokens.append((kind, token[kind]))
            end = token.end()
        if end < len(stripped):
            raise self.error(f"cannot read '{stripped[end:].strip()[:20]}'")

    def error(self, why: str) -> UsageError:
        line = self.text.strip()
        shown = line if len(line) <= _SHOWN else f"{line[:_SHOWN]}..."
        return UsageError(f"line {self.number}: {why}\n    {shown}")

    def peek(self) -> str:
        return self.tokens[self.at][1] if self.at < len(self.tokens) else ""

    def take(self, *kinds: str) -> str:
        if self.at >= len(self.tokens) or self.tokens[self.at][0] not in kinds:
            raise self.error(f"expected {' or '.join(kinds)} before '{self.peek() or 'the end'}'")
        self.at += 1
        return self.tokens[self.at - 1][1]

    def skip(self, sign: str) -> bool:
        if self.peek() == sign:
            self.at += 1
            return True
        return False

    def need(self, sign: str) -> None:
        if not self.skip(sign):
            raise self.error(f"expected '{sign}' before '{self.peek() or 'the end'}'")

    def value_name(self) -> str:
        token = self.take("name")[1:]
        return self.unquoted(token) if token.startswith('"') else token

    def type(self) -> TensorType:
        dtype = self.take("word")
        if dtype == "host":
            dtype += " " + self.take("word")
        self.need("[")
        shape = []
        while not self.skip("]"):
            shape.append(self.take("number"))
            self.skip(",")
        try:
            return _type_of(f"{dtype}[{','.join(shape)}]")
        except ValueError as e:
            raise self.error(str(e)) from None

    def typed(self) -> Value:
        name = self.value_name()
        self.need(":")
        return Value(name, self.type())

    def list_until(self, sign: str) -> Iterator[None]:
        while not self.skip(sign):
            yield
            if not self.skip(",") and self.peek() != sign:
                raise self.error(f"expected ',' or '{sign}' before '{self.peek() or 'the end'}'")

    def attribute(self, depth: int = 0) -> Any:
        if self.skip("["):
            items: list[Any] = []
            if depth == _DEEPEST:
                raise self.error(f"lists are nested more than {_DEEPEST} deep")
            for _ in self.list_until("]"):
                items.append(self.attribute(depth + 1))
            return tuple(items)
        token = self.take("string", "number", "word")
        if token.startswith('"'):
            return self.unquoted(token)
        words = {"true": True, "false": False, "none": None, "inf": math.inf, "nan": math.nan}
        if token in words:
            return words[token]
        if re.match(r"^[-+]?\d+$", token):
            return self.integer(token)
        try:
            return float(token)
        except ValueError:
            raise self.error(f"'{token}' is no attribute value") from None

    def integer(self, token: str) -> int:
        if not re.match(r"^[-+]?\d{1,20}$", token) or not -(1 << 63) <= int(token) < 1 << 64:
            raise self.error(f"'{token[:40]}' is no whole number of 64 bits")
        return int(token)

    def unquoted(self, token: str) -> str:
        try:
            return json.loads(token)
        except ValueError as e:
            raise self.error(f"cannot read {token[:40]}: {e}") from None


def parse(text: str) -> Block:
    """Parses a program's text.  UsageError with the line that cannot be parsed."""
    numbered = enumerate(expect("program", text, str, "a text").splitlines(), 1)
    lines = [(i, raw) for i, raw in numbered if raw.strip() and raw.strip()[0] != ";"]
    if not lines:
        raise UsageError("the program text is empty")
    first = _Line(lines[0][1], lines[0][0])
    if first.take("word") != "program":
        raise first.error("a program begins with 'program NAME {'")
    name = first.take("word", "string", "number")
    reader = _Reader(first.unquoted(name) if name.startswith('"') else name)
    for number, raw in lines[1:]:
        if raw.strip() == "}":
            return reader.block()
        reader.read(_Line(raw, number))
    raise UsageError(f"program {name} does not end: '}}' is missing")


class _Reader:
    """Builds a block from its lines."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.declared: dict[str, list[Any]] = {field: [] for _, field in _DECLARATIONS}
        self.constants: list[Constant] = []
        self.operators: list[Operator] = []
        self.outputs: tuple[str, ...] = ()
        self.products = ""
        self.addresses: dict[str, int] = {}
        self.values: dict[str, Value] = {}

    def read(self, line: _Line) -> None:
        word = line.peek()
        if word in _FIELDS:
            line.at += 1
            v = line.typed()
            self.values[v.name] = v
            self.declared[_FIELDS[word]].append(v)
            self._read_addresses(line, [v])
        elif word == "const":
            line.at += 1
            v = line.typed()
            line.need("=")
            self.values[v.name] = v
            self.constants.append(Constant(v, _as_elements(line, v.type)))
        elif word == "products":
            line.at += 1
            self.products = line.take("word")
        elif word == "output":
            line.at += 1
            self.outputs = tuple(self._names(line))
        elif word == "free":
            line.at += 1
            inputs = tuple(self._value(line, n) for n in self._names(line))
            self.operators.append(Operator(Free(), inputs, ()))
        else:
            self._read_operator(line)
        if line.at != len(line.tokens):
            raise line.error(f"unexpected '{line.peek()}'")

    def _names(self, line: _Line) -> list[str]:
        names = [line.value_name()]
        while line.skip(","):
            names.append(line.value_name())
        return names

    def _value(self, line: _Line, name: str) -> Value:
        if name not in self.values:
            raise line.error(f"{show_name(name)} is used before it is written")
        return self.values[name]

    def _read_operator(self, line: _Line) -> None:
        role = Role(line.take("word")) if line.peek() in _ROLES else Role.FORWARD
        outputs: list[Value | None] = []
        for _ in line.list_until("="):
            outputs.append(None if line.skip("_") else line.typed())
        cls = op_class(line.take("word"))
        line.need("(")
        inputs: list[Value | None] = []
        for _ in line.list_until(")"):
            inputs.append(None if line.skip("_") else self._value(line, line.value_name()))
        op = _read_attributes(line, cls)
        kernel = line.take("word") if line.skip("using") else ""
        scratch: list[Value] = []
        if line.skip("scratch"):
            line.need("(")
            for _ in line.list_until(")"):
                scratch.append(line.typed())
        written = [v for v in outputs if v is not None] + scratch
        self.values.update({v.name: v for v in written})
        self._read_addresses(line, written)
        self.operators.append(Operator(op, tuple(inputs), tuple(outputs), role, tuple(scratch), kernel))

    def _read_addresses(self, line: _Line, values: list[Value]) -> None:
        if not line.skip("@"):
            return
        for v in values:
            if not line.skip("_"):
                self.addresses[v.name] = line.integer(line.take("number"))
            line.skip(",")

    def block(self) -> Block:
        return Block(
            name=self.name,
            **{field: tuple(values) for field, values in self.declared.items()},
            constants=tuple(self.constants),
            operators=tuple(self.operators),
            outputs=self.outputs,
            addresses=self.addresses,
            products=self.products,
        )


def _read_attributes(line: _Line, cls: type[Op]) -> Op:
    values: dict[str, Any] = {}
    if line.skip("{"):
        for _ in line.list_until("}"):
            key = line.take("word")
            line.need("=")
            values[key] = line.attribute()
    if not values and (plain := _plain(cls)) is not None:  # type: ignore[arg-type]
        return plain
    names = {f.name for f in option_fields(cls)}
    unknown = sorted(set(values) - names)
    if unknown:
        raise line.error(f"{cls.__name__} has no attribute '{unknown[0]}' (it has: {', '.join(sorted(names))})")
    hints = _hints(cls)
    for key, value in values.items():
        if hints.get(key) is float and type(value) is int:
            values[key] = value = float(value)
        if not _is_a(value, hints.get(key)):
            wanted = str(hints[key]) if typing.get_args(hints[key]) else getattr(hints[key], "__name__", hints[key])
            raise line.error(f"{cls.__name__}'s {key} should be {wanted}, not {show_attribute(value)[:80]}")
    try:
        return cls(**values)
    except TypeError as e:
        raise line.error(str(e)) from None


@functools.cache
def _plain(cls: type[Op]) -> Op | None:
    """The operator without attributes; None where some have no default."""
    try:
        return cls()
    except TypeError:
        return None


def _is_a(value: Any, hint: Any) -> bool:
    """Whether an attribute's value has the declared type; a boolean is accepted for 0 or 1, but not in lists (such as
    axes)."""
    parts = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        one = parts[0] if parts[1:] == (...,) else None
        return isinstance(value, tuple) and (
            all(_is_a(v, one) and not (one is int and isinstance(v, bool)) for v in value)
            if one is not None
            else len(value) == len(parts) and all(map(_is_a, value, parts))
        )
    if parts:  # a union
        return any(_is_a(value, p) for p in parts)
    if hint is float:
        return isinstance(value, (int, float))
    return isinstance(value, hint) if isinstance(hint, type) else True


_HINTS: dict[type, dict[str, Any]] = {}


def _hints(cls: type[Op]) -> dict[str, Any]:
    if cls not in _HINTS:
        _HINTS[cls] = typing.get_type_hints(cls)
    return _HINTS[cls]


def _as_elements(line: _Line, t: TensorType) -> tuple:
    data = line.attribute()
    cast = float if "f" in t.dtype else bool if t.dtype == "bool" else int
    elements = data if isinstance(data, tuple) else (data,)
    if not all(isinstance(x, (int, float)) for x in elements):
        raise line.error(f"a constant of type {t} is a list of numbers")
    try:
        return tuple(cast(x) for x in elements)
    except (ValueError, OverflowError) as e:
        raise line.error(f"no constant of type {t}: {e}") from None


#: installed from here, as `ir` is a lower layer
Block.__str__ = show  # type: ignore[assignment, method-assign]
