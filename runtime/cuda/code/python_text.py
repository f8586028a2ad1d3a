"""CUDA C of the kernels that are Python functions (runtime/shared/texts.py): an item a thread, a warp or a block.

C++ infers the types, as numba does: variables are `auto`, functions are templates, and device/texts.h has whole
numbers that divide as Python's do, arrays and blocks of elements.  What is not translated is refused; what would be
another type than numba's does not compile.
"""

from __future__ import annotations

import ast
import builtins
import copy
import functools
import inspect
import textwrap
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from ....errors import JobError
from ....language.types import dtype_name
from ...shared import texts
from ...shared.texts import Inline, Intrinsic
from ..device.kernel import C_TYPES, REPORT

_OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^",
              ast.LShift: "<<", ast.RShift: ">>", ast.Div: "/", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
              ast.Eq: "==", ast.NotEq: "!=", ast.And: "&&", ast.Or: "||", ast.USub: "-", ast.Not: "!",
              ast.Invert: "~"}  # fmt: skip
_CALLS = {abs: "abs_of", min: "min_of", max: "max_of", np.floor: "floored", np.ceil: "ceiled", np.rint: "rint",
          float: "as<double>", int: "as<Integer>", np.float32: "as<float>", np.float64: "as<double>",
          np.uint64: "as<unsigned long long>", np.int64: "as<Integer>", np.int32: "whole<int>",
          np.uint32: "whole<unsigned>", np.uint16: "whole<unsigned short>", np.uint8: "whole<unsigned char>",
          }  # fmt: skip
#: what is for all threads of an item, where these loops divide them
_TOGETHER = {"lanes": ("reduced_(", "__sync", "warp_reduce("), "warps": ("reduced_(", "__sync")}
_NUMPY = {np.uint64: "ull", np.uint32: "u", np.int64: "ll"}


def _tree(function: Callable[..., Any]) -> ast.FunctionDef:
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(tree, ast.FunctionDef)
    return tree


@functools.cache
def _stores(part: Any) -> frozenset[int]:
    """Which arguments a function writes elements of."""
    if not isinstance(part, Inline):
        return frozenset()
    tree = _tree(part.function)
    written = {
        n.value.id
        for n in ast.walk(tree)
        if isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Store) and isinstance(n.value, ast.Name)
    }
    return frozenset(i for i, a in enumerate(tree.args.args) if a.arg in written)


class Writer:
    """The C of a kernel's function and of those that it calls, in `parts`; `unrolled`: see `Work`."""

    def __init__(self, *, unrolled: bool = False) -> None:
        self.unrolled = unrolled
        self.parts: dict[tuple[Any, str], str] = {}

    def function(self, function: Callable[..., Any], name: str, divided: str) -> str:
        """A template of this name; `divided`: it is called where "lanes" or "warps" have divided the work."""
        return _Function(self, function, _tree(function), divided).text(name)

    def called(self, part: Inline | Intrinsic, name: str, divided: str) -> str:
        """The name of a function in C, which is written first."""
        if isinstance(part, Intrinsic) or part.c:
            if not part.c:
                raise JobError(f"{name} has no text in C: give it one, @instructions(..., c=...)")
            if part.c.isidentifier():
                return part.c
            if any(w in part.c for w in _TOGETHER.get(divided, ())):
                raise JobError(f"{name} is for all threads of an item, not where {divided} have divided them")
            self.parts[part, ""] = part.c
            return name
        if part is texts.report:
            self.parts[part, ""] = REPORT + _REPORTED
            return name
        if part.double is not None:
            raise JobError(f"{name} is another function for float64, and has no text in C")
        written = f"{name}_{'each' if divided == 'lanes' else 'warp'}" if divided else name
        if (part, divided) not in self.parts:
            text = self.function(part.function, written, divided)
            self.parts[part, divided] = text
        return written


_REPORTED = """
template <class S, class C, class N, class M> DEVICE void report(S&& status, C code, N number, M size)
{
    report(status.p, as<long long>(code), as<long long>(number), as<long long>(size));
}
"""


class _Function:
    """One function's text."""

    def __init__(self, writer: Writer, function: Callable[..., Any], tree: ast.FunctionDef, divided: str) -> None:
        self.writer, self.globals, self.tree = writer, function.__globals__, tree
        self.divided = divided
        self.parameters = [a.arg for a in tree.args.args]
        self.declared: dict[str, tuple[int, ...]] = dict.fromkeys(self.parameters, ())
        self.types: set[str] = set()
        #: names of a kernel's first item
        self.begins = {"begin"} if self.parameters[-2:] == ["begin", "end"] else set[str]()
        self.path: tuple[int, ...] = ()
        self.blocks = 0
        #: the variables of the loops around; the block of the loop over lanes
        self.running: list[str] = []
        self.lanes: tuple[int, ...] | None = None
        #: variables that it joins, and how
        self.joined: dict[str, str] = {}

    def refuse(self, node: ast.AST, why: str = "is not translated to C") -> JobError:
        """The error about a piece of text."""
        return JobError(f"{self.tree.name}, line {getattr(node, 'lineno', 0)}: '{ast.unparse(node)}' {why}")

    def text(self, name: str) -> str:
        """The template."""
        bound = {n.id for n in ast.walk(self.tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        kinds = ", ".join(f"class T{i}" for i in range(len(self.parameters)))
        declared = (f"T{i}{'' if p in bound else '&&'} {p}" for i, p in enumerate(self.parameters))
        head = f"template <{kinds}> " if kinds else ""
        body = self.block(self.tree.body, 1)
        return f"{head}DEVICE auto {name}({', '.join(declared)})\n{{\n{body}}}\n"

    # -- statements -------------------------------------------------------------------------------------------------

    def block(self, body: Sequence[ast.stmt], depth: int) -> str:
        """Statements with a scope of their own."""
        self.blocks += 1
        outer, self.path = self.path, (*self.path, self.blocks)
        lines = [line for s in body for line in self.statement(s, depth)]
        self.path = outer
        return "".join(f"{'    ' * depth}{line}\n" if not line.startswith("\0") else line[1:] for line in lines)

    def inside(self, name: str) -> bool:
        """Whether a variable is declared here."""
        scope = self.declared.get(name)
        return scope is not None and self.path[: len(scope)] == scope

    def again(self, name: str) -> bool:
        """Whether a variable is assigned more than once."""
        stores = (n for n in ast.walk(self.tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
        changed = any(isinstance(n, ast.AugAssign) and ast.unparse(n.target) == name for n in ast.walk(self.tree))
        return changed or sum(n.id == name for n in stores) > 1

    def may_change(self, target: ast.expr, name: str) -> None:
        """Refuses another value of a loop's variable, or of one that is outside of what lanes divide."""
        self.begins.discard(name)
        if name in self.running:
            raise self.refuse(target, "gets another value in its loop")
        if self.lanes is not None and self.declared[name][: len(self.lanes)] != self.lanes:
            raise self.refuse(target, "would have a value for each lane: it is no result of a loop over lanes")

    def known(self, test: ast.expr) -> bool | None:
        """What a condition is that consists of truths of the module, or is false here; None for others."""
        match test:
            case ast.Name(name) if name not in self.declared and isinstance(self.globals.get(name), bool):
                return bool(self.globals[name])
            case ast.Call(ast.Name(name)) if self.globals.get(name) is texts.on_processor:
                return False
            case ast.UnaryOp(ast.Not(), x) if (known := self.known(x)) is not None:
                return not known
            case ast.BoolOp(ast.And(), values):
                parts = [self.known(v) for v in values]
                return False if False in parts else None if None in parts else True
        return None

    def joins(self, name: str, value: ast.expr) -> bool:
        """Whether a variable becomes the larger of itself and another value: all threads have it behind the loop."""
        match value:
            case ast.Call(ast.Name(f), [ast.Name(x), _]) if x == name and self.lanes is not None:
                if getattr(self.globals.get(f), "c", "") == "larger":
                    self.joined[name] = "Larger()"
                    return True
        return False

    def nested(self, head: str, body: Sequence[ast.stmt], depth: int) -> list[str]:
        """A statement with a block."""
        return [f"{head} {{", "\0" + self.block(body, depth + 1), "}"]

    def statement(self, s: ast.stmt, depth: int) -> list[str]:
        """A statement's lines."""
        match s:
            case ast.Expr(ast.Constant()) | ast.Pass():
                return []
            case ast.Expr(ast.Call() as call):
                return [f"{self.value(call)};"]
            case ast.Assign([target], value):
                return self.assigned(target, value)
            case ast.AugAssign(ast.Name() | ast.Subscript() as target, op, value):
                before: Any = copy.copy(target)
                before.ctx = ast.Load()
                return self.assigned(target, ast.BinOp(before, op, value, lineno=s.lineno))
            case ast.For(ast.Name(name), ast.Call(ast.Name() as called), body, []):
                return self.loop(s, name, called, body, depth)
            case ast.While(test, body, []):
                return self.nested(f"while ({self.value(test)})", body, depth)
            case ast.If(test, body, orelse) if (known := self.known(test)) is not None:
                return [line for other in (body if known else orelse) for line in self.statement(other, depth)]
            case ast.If(test, body, orelse):
                lines = self.nested(f"if ({self.value(test)})", body, depth)
                if orelse:
                    lines += self.nested("else", orelse, depth)
                return lines
            case ast.Return(None):
                return ["return;"]
            case ast.Return(value):
                return [f"return {self.value(value)};"]  # type: ignore[arg-type]
            case ast.Continue():
                return ["continue;"]
            case ast.Break():
                return ["break;"]
        raise self.refuse(s)

    def loop(self, s: ast.For, name: str, called: ast.Name, body: Sequence[ast.stmt], depth: int) -> list[str]:
        """A loop over a range; one over lanes is divided."""
        assert isinstance(s.iter, ast.Call)
        step = s.iter.args[2] if len(s.iter.args) == 3 else ast.Constant(1)
        first = s.iter.args[0] if len(s.iter.args) > 1 else ast.Constant(0)
        end, begin = self.value(s.iter.args[len(s.iter.args) > 1]), self.value(first)
        back = isinstance(step, ast.UnaryOp) and isinstance(step.op, ast.USub)
        lanes = called.id if called.id in _TOGETHER and self.globals.get(called.id) is range else ""
        steps = called.id == "steps" and self.globals.get("steps") is texts.steps
        if called.id != "range" and not lanes and not steps:
            raise self.refuse(s.iter, "is no range")
        if self.inside(name) and name != "_":
            raise self.refuse(s.target, "has a value before its loop")
        lanes = "" if self.divided else lanes
        if lanes and (back or any(isinstance(n, (ast.Break, ast.Return)) for n in ast.walk(s))):
            raise self.refuse(s.iter, "divides steps that depend on each other")
        stop, each = f"stop_{self.blocks}_", f"({self.value(step)}).v"
        by = each + {"": "", "lanes": " * LANES", "warps": " * (LANES / 32)"}[lanes]
        if lanes == "warps":
            begin = f"({begin} + Natural(threadIdx.x % LANES / 32 * {each}))"
        start = f"Integer({begin})" if back else f"from_({begin}, {stop}{f', {each}' * (lanes == 'lanes')})"
        outer = self.divided, self.lanes, self.declared.get(name)
        self.declared[name] = inner = (*self.path, self.blocks + 1)
        self.divided, self.lanes = self.divided or lanes, inner if lanes else self.lanes
        self.running.append(name)
        lines = self.nested(f"for (auto {name} = {start}; {name} {'<>'[back]} {stop}; {name}.v += {by})", body, depth)
        self.running.pop()
        self.divided, self.lanes, before = outer
        if self.lanes is None:
            lines += [f"assign({x}, reduced_({x}, {f}));" for x, f in self.joined.items()]
            self.joined = {}
        if before is None:
            del self.declared[name]
        else:
            self.declared[name] = before
        if begin in self.begins and end == "end":  # a kernel's items: one
            return [f"const auto {name} = begin;", "do {", *lines[1:-1], "} while (false);"]
        unroll = "#pragma unroll" + " 1" * (not steps)
        told = bool(lanes) or back or (steps and self.writer.unrolled)
        return [f"const auto {stop} = {end};", *[unroll] * told, *lines]

    def assigned(self, target: ast.expr, value: ast.expr) -> list[str]:
        """An assignment."""
        match target:
            case ast.Name(name):
                if isinstance(value, ast.Attribute) and value.attr == "type":
                    self.types.add(name)
                    return [f"typedef {self.kind(value)} {name};"]
                text = self.value(value)
                if text in self.begins:  # where a processor has begun with some items
                    self.begins.add(name)
                if self.inside(name):
                    if not self.joins(name, value):
                        self.may_change(target, name)
                    return [f"assign({name}, {text});"]
                self.declared[name] = self.path
                return [f"auto {name} = {f'variable({text})' if self.again(name) else text};"]
            case ast.Subscript(x, index):
                array, places = self.value(x), self.indices(index)
                if self.divided:
                    return [f"put_({array}, {self.value(value)}, {places});"]
                self.blocks += 1  # all threads come to the value
                kept = f"value_{self.blocks}_"
                return [f"const auto {kept} = {self.value(value)};", f"if (ALONE) put_({array}, {kept}, {places});"]
            case ast.Tuple(elts):
                count = self.blocks = self.blocks + 1
                if isinstance(value, ast.Tuple):
                    lines = [f"const auto part_{count}_{i}_ = {self.value(v)};" for i, v in enumerate(value.elts)]
                    parts = [f"part_{count}_{i}_" for i in range(len(elts))]
                else:
                    lines = [f"const auto parts_{count}_ = {self.value(value)};"]
                    parts = [f"part_<{i}>(parts_{count}_)" for i in range(len(elts))]
                for to, part in zip(elts, parts, strict=True):
                    lines += self.assigned(to, ast.Name(f"\0{part}", ast.Load(), lineno=target.lineno))
                return lines
        raise self.refuse(target)

    # -- expressions ------------------------------------------------------------------------------------------------

    def indices(self, index: ast.expr) -> str:
        """Indices as arguments."""
        return ", ".join(map(self.value, index.elts if isinstance(index, ast.Tuple) else [index]))

    def kind(self, x: ast.Attribute) -> str:
        """The type that is X.dtype.type."""
        if isinstance(x.value, ast.Attribute) and x.value.attr == "dtype":
            return f"Element<decltype({self.value(x.value.value)})>"
        raise self.refuse(x)

    def value(self, x: ast.expr, *, stored: bool = False) -> str:
        """An expression's text; `stored`: elements of it are written where it goes."""
        match x:
            case ast.Constant(value):
                return self.constant(value, x)
            case ast.Name(name):
                return self.name(x, name)
            case ast.BinOp(a, ast.FloorDiv(), b):
                return f"floor_of({self.value(a)}, {self.value(b)})"
            case ast.BinOp(a, ast.Mod(), b):
                return f"rest_of({self.value(a)}, {self.value(b)})"
            case ast.BinOp(a, op, b) if type(op) in _OPERATORS:
                return f"({self.value(a)} {_OPERATORS[type(op)]} {self.value(b)})"
            case ast.UnaryOp(op, a) if type(op) in _OPERATORS:
                return f"({_OPERATORS[type(op)]}{self.value(a)})"
            case ast.BoolOp(op, values):
                return "(" + f" {_OPERATORS[type(op)]} ".join(f"(bool)({self.value(v)})" for v in values) + ")"
            case ast.Compare(a, ops, others) if all(type(op) in _OPERATORS for op in ops):
                sides = [self.value(v) for v in (a, *others)]
                pairs = zip(sides, ops, sides[1:], strict=False)
                return "(" + " && ".join(f"{p} {_OPERATORS[type(op)]} {q}" for p, op, q in pairs) + ")"
            case ast.IfExp(test, a, b) if (known := self.known(test)) is not None:
                return self.value(a if known else b)
            case ast.IfExp(test, a, b):
                return f"({self.value(test)} ? variable({self.value(a)}) : variable({self.value(b)}))"
            case ast.Tuple(elts):
                return f"many({', '.join(map(self.value, elts))})"
            case ast.Subscript(a, ast.Slice(ast.expr() as low, ast.expr() as high, None)):
                return f"cut_({self.value(a)}, {self.value(low)}, {self.value(high)})"
            case ast.Subscript(ast.Attribute(a, "shape"), ast.Constant(int(k))):
                return f"{self.value(a)}.shape[{k}]"
            case ast.Subscript(a, ast.Constant(int(k))):
                return f"part_<{k}>({self.value(a)})"
            case ast.Subscript(a, index) if not isinstance(index, ast.Slice):
                return f"at_({self.value(a)}, {self.indices(index)})"
            case ast.Attribute(a, "size"):
                return f"{self.value(a)}.size()"
            case ast.Attribute(ast.Name(module), attribute) if isinstance(self.globals.get(module), ModuleType):
                return self.constant(getattr(self.globals[module], attribute), x)
            case ast.Call(called, values, []):
                if isinstance(called, ast.Name) and self.globals.get(called.id) in (texts.eight, texts.piece):
                    return f"{'given' if stored else 'taken'}_({', '.join(map(self.value, values))})"
                stores = _stores(self.globals.get(called.id)) if isinstance(called, ast.Name) else ()
                operands = [self.value(v, stored=i in stores) for i, v in enumerate(values)]
                return f"{self.called(called)}({', '.join(operands)})"
        raise self.refuse(x)

    def name(self, x: ast.expr, name: str) -> str:
        """A variable, or a number of the module."""
        if name.startswith("\0"):
            return name[1:]
        if name in self.declared or name not in self.globals:
            if not self.inside(name):
                raise self.refuse(x, "has no value in this block: give it one before the blocks that change it")
            return name
        value = self.globals[name]
        if isinstance(value, np.ndarray):
            sizes, kind = ", ".join(f"Size({n})" for n in value.shape), C_TYPES[dtype_name(value.dtype)]
            numbers = ", ".join(repr(v) for v in value.reshape(-1).tolist())
            self.writer.parts[name, ""] = f"static __device__ const {kind} {name}[] = {{{numbers}}};\n"
            return f"(Array<const {kind}, {value.ndim}>{{{name}, {{{sizes}}}}})"
        return self.constant(value, x)

    def constant(self, value: Any, x: ast.expr) -> str:
        """A number."""
        if isinstance(value, (bool, np.bool_)):
            return str(bool(value)).lower()
        if isinstance(value, int) and abs(value) < 1 << 63:
            return f"{value}_n" if value >= 0 else f"Integer({value}ll)"
        if isinstance(value, (float, np.floating)):
            kind, text = ("float", "f") if isinstance(value, np.float32) else ("double", "")
            if not np.isfinite(value):
                return (
                    f"{'-' * bool(value < 0)}infinity<{kind}>()"
                    if value == value
                    else f"({kind})__uint_as_float(0x7fc00000u)"
                )
            number = repr(float(value))
            return f"{number}{text}"
        if type(value) in (np.uint64, np.uint32, np.int64):
            bare = f"{int(value)}{_NUMPY[type(value)]}"
            return (
                bare
                if isinstance(value, np.uint64)
                else f"Whole<{'unsigned' if bare[-1] == 'u' else 'long long'}>({bare})"
            )
        raise self.refuse(x)

    def called(self, x: ast.expr) -> str:
        """A function's name in C."""
        if isinstance(x, ast.Attribute) and x.attr == "type":
            return f"as<{self.kind(x)}>"
        if isinstance(x, ast.Name) and x.id in self.types:
            return f"as<{x.id}>"
        if isinstance(x, ast.Name):
            value = self.globals.get(x.id, getattr(builtins, x.id, None))
            if isinstance(value, (Inline, Intrinsic)):
                return self.writer.called(value, x.id, self.divided)
            if value is len:
                return "length"
        elif isinstance(x, ast.Attribute) and isinstance(x.value, ast.Name):
            value = getattr(self.globals.get(x.value.id), x.attr, None)
            if x.value.id == "math" and x.attr in ("log", "exp", "sqrt", "cos", "sin"):
                return f"{x.attr}_of"
        else:
            value = None
        if value in _CALLS:
            return _CALLS[value]
        raise self.refuse(x, "is no function that kernels call")
