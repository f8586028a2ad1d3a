"""LLVM IR as text, loop by loop: what kernels with fixed register tiles are written with.

Variables live in allocas, which LLVM turns into registers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class Code:
    """A function under construction.  Values are strings: names or constants; `i64` unless said otherwise."""

    def __init__(self, name: str, arguments: str, *, internal: bool = False) -> None:
        """`arguments`: as in IR ("ptr %a, i64 %n")."""
        self.head = f"define {'internal ' if internal else ''}void @{name}({arguments})"
        self.tail = " noinline" if internal else ""
        self._entry: list[str] = []
        self._lines: list[str] = []
        self._count = 0

    def text(self) -> str:
        """The whole function."""
        body = "\n  ".join([*self._entry, "br label %start"])
        rest = "\n  ".join(["start:", *self._lines, "ret void"])
        return f"{self.head}{self.tail} {{\nentry:\n  {body}\n{rest}\n}}\n"

    def fresh(self, hint: str = "v") -> str:
        """A name nothing has."""
        self._count += 1
        return f"{hint}.{self._count}"

    def line(self, text: str) -> None:
        """An instruction without a result."""
        self._lines.append(text)

    def let(self, text: str) -> str:
        """An instruction with a result; its name."""
        name = f"%{self.fresh()}"
        self._lines.append(f"{name} = {text}")
        return name

    def word(self, pointer: str, index: int | str, kind: str = "i64") -> str:
        """`pointer[index]`."""
        return self.let(f"load {kind}, ptr {self.at(pointer, index, kind)}")

    def at(self, pointer: str, index: int | str, kind: str = "float") -> str:
        """`pointer + index`."""
        return self.let(f"getelementptr {kind}, ptr {pointer}, i64 {index}")

    def add(self, *values: int | str) -> str:
        """Their sum."""
        return self._fold("add", values)

    def mul(self, *values: int | str) -> str:
        """Their product."""
        return self._fold("mul", values)

    def _fold(self, what: str, values: tuple[int | str, ...]) -> str:
        found = str(values[0])
        for v in values[1:]:
            found = self.let(f"{what} i64 {found}, {v}")
        return found

    def variable(self, kind: str, value: str) -> str:
        """A place that holds `value`; for `get` and `set`."""
        name = f"%{self.fresh('x')}"
        self._entry.append(f"{name} = alloca {kind}")
        self.set(name, kind, value)
        return name

    def get(self, variable: str, kind: str = "i64") -> str:
        """What a variable holds."""
        return self.let(f"load {kind}, ptr {variable}")

    def set(self, variable: str, kind: str, value: str) -> None:
        """Gives a variable another value."""
        self.line(f"store {kind} {value}, ptr {variable}")

    @contextlib.contextmanager
    def loop(self, begin: int | str, end: int | str, step: int = 1) -> Iterator[str]:
        """The counter, from `begin` while it is less than `end`."""
        i = self.variable("i64", str(begin))
        name = self.fresh("loop")
        self.line(f"br label %{name}.test")
        self.line(f"{name}.test:")
        now = self.get(i)
        more = self.let(f"icmp slt i64 {now}, {end}")
        self.line(f"br i1 {more}, label %{name}.body, label %{name}.end")
        self.line(f"{name}.body:")
        yield now
        self.set(i, "i64", self.add(now, step))
        self.line(f"br label %{name}.test")
        self.line(f"{name}.end:")

    @contextlib.contextmanager
    def when(self, condition: str) -> Iterator[None]:
        """Only where an i1 is true."""
        name = self.fresh("when")
        self.line(f"br i1 {condition}, label %{name}.then, label %{name}.end")
        self.line(f"{name}.then:")
        yield
        self.line(f"br label %{name}.end")
        self.line(f"{name}.end:")


def vector(width: int) -> str:
    """The type of `width` floats."""
    return f"<{width} x float>"


def mask(width: int, count: int) -> str:
    """A constant that is true in the first `count` of `width` lanes."""
    return "<" + ", ".join(f"i1 {'true' if i < count else 'false'}" for i in range(width)) + ">"
