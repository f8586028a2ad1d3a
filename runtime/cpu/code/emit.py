"""A builder of LLVM IR text with loops, for kernels.

Variables live in allocas, which LLVM turns into registers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ..device import native

#: the arguments of every kernel (see native.py)
_ARGUMENTS = "ptr %args, i64 %begin, i64 %end"


class Code:
    """A function under construction.  Values are strings: names or constants; `i64` unless said otherwise."""

    def __init__(self, name: str = "kernel", arguments: str = _ARGUMENTS, *, internal: bool = False) -> None:
        """`arguments`: as in IR ("ptr %a, i64 %n")."""
        self.head = f"define {'internal ' if internal else ''}void @{name}({arguments})"
        self.tail = " noinline" if internal else ""
        #: the functions called, by name: declarations, or definitions
        self.declared: dict[str, str] = {}
        self._entry: list[str] = []
        self._lines: list[str] = []
        self._count = 0

    def text(self) -> str:
        """The whole function."""
        body = "\n  ".join([*self._entry, "br label %start"])
        rest = "\n  ".join(["start:", *self._lines, "ret void"])
        return f"{self.head}{self.tail} {{\nentry:\n  {body}\n{rest}\n}}\n"

    # -- instructions ---------------------------------------------------------------------------------------------

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

    def label(self, name: str) -> None:
        """Begins a block."""
        self._lines.append(f"{name}:")

    def word(self, pointer: str, index: int | str, kind: str = "i64") -> str:
        """`pointer[index]`.  Addresses lie in words of 64 bits, also where they are shorter."""
        return self.let(f"load {kind}, ptr {self.at(pointer, index, 'i64' if kind == 'ptr' else kind)}")

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
        total = str(values[0])
        for v in values[1:]:
            total = self.let(f"{what} i64 {total}, {v}")
        return total

    def sub(self, a: int | str, b: int | str) -> str:
        """a - b."""
        return self.let(f"sub i64 {a}, {b}")

    def div(self, a: int | str, b: int | str) -> str:
        """The whole part of a / b."""
        return self.let(f"sdiv i64 {a}, {b}")

    def rem(self, a: int | str, b: int | str) -> str:
        """The remainder of `div`."""
        return self.let(f"srem i64 {a}, {b}")

    def smaller(self, a: int | str, b: int | str) -> str:
        """The smaller number."""
        return self.intrinsic("smin.i64", "i64", ("i64", a), ("i64", b))

    def spread(self, value: str, kind: str, width: int) -> str:
        """A vector that holds `value` in all lanes."""
        v = f"<{width} x {kind}>"
        first = self.let(f"insertelement {v} poison, {kind} {value}, i64 0")
        return self.let(f"shufflevector {v} {first}, {v} poison, <{width} x i32> zeroinitializer")

    # -- functions ------------------------------------------------------------------------------------------------

    def intrinsic(self, name: str, result: str, *given: tuple[str, int | str]) -> str:
        """A call of LLVM's function of that full name on (type, value); its result's name, "" where it has none."""
        function, types = f"@llvm.{name}", ", ".join(t for t, _ in given)
        self.declared[function] = f"declare {result} {function}({types})"
        call = f"call {result} {function}({', '.join(f'{t} {v}' for t, v in given)})"
        if result != "void":
            return self.let(call)
        self.line(call)
        return ""

    def zero(self, to: str, nbytes: int | str) -> None:
        """Zeros from an address on."""
        self.intrinsic("memset.p0.i64", "void", ("ptr", to), ("i8", 0), ("i64", nbytes), ("i1", "false"))

    def copy(self, to: str, source: str, nbytes: int | str) -> None:
        """Bytes from one address to another."""
        arguments = (("ptr", to), ("ptr", source), ("i64", nbytes), ("i1", "false"))
        self.intrinsic("memcpy.p0.p0.i64", "void", *arguments)

    # -- variables and blocks -------------------------------------------------------------------------------------

    def room(self, kind: str, align: int = 0) -> str:
        """A place on the stack; nothing is there yet."""
        name = f"%{self.fresh('x')}"
        self._entry.append(f"{name} = alloca {kind}" + (f", align {align}" if align else ""))
        return name

    def variable(self, kind: str, value: str) -> str:
        """A place that holds `value`; for `get` and `set`."""
        name = self.room(kind)
        self.set(name, kind, value)
        return name

    def get(self, variable: str, kind: str = "i64") -> str:
        """The value of a variable."""
        return self.let(f"load {kind}, ptr {variable}")

    def set(self, variable: str, kind: str, value: str) -> None:
        """Gives a variable another value."""
        self.line(f"store {kind} {value}, ptr {variable}")

    @contextlib.contextmanager
    def loop(self, begin: int | str, end: int | str, step: int | str = 1) -> Iterator[str]:
        """The counter, from `begin` while it is less than `end`."""
        i = self.variable("i64", str(begin))
        name = self.fresh("loop")
        self.line(f"br label %{name}.test")
        self.label(f"{name}.test")
        now = self.get(i)
        more = self.let(f"icmp slt i64 {now}, {end}")
        self.line(f"br i1 {more}, label %{name}.body, label %{name}.end")
        self.label(f"{name}.body")
        yield now
        self.set(i, "i64", self.add(now, step))
        self.line(f"br label %{name}.test")
        self.label(f"{name}.end")

    @contextlib.contextmanager
    def when(self, condition: str) -> Iterator[None]:
        """Only where an i1 is true."""
        name = self.fresh("when")
        self.line(f"br i1 {condition}, label %{name}.then, label %{name}.end")
        self.label(f"{name}.then")
        yield
        self.line(f"br label %{name}.end")
        self.label(f"{name}.end")

    @contextlib.contextmanager
    def unless(self, condition: str) -> Iterator[None]:
        """Only where an i1 is false."""
        with self.when(self.let(f"xor i1 {condition}, true")):
            yield


def thread(f: Code) -> str:
    """The number of the thread that runs the code."""
    if not native.openmp():
        return "0"
    f.declared["@omp_get_thread_num"] = "declare i32 @omp_get_thread_num()"
    return f.let(f"sext i32 {f.let('call i32 @omp_get_thread_num()')} to i64")


def module(*functions: Code) -> str:
    """Functions, and what they call."""
    declared = {name: text for f in functions for name, text in f.declared.items()}
    return "\n".join([*declared.values(), *(f.text() for f in functions)])
