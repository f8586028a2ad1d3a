"""What a mutant is: every small change of a kind listed here, at every place of a file's syntax tree.

Left alone: docstrings, type annotations, decorators, assertions (`strict=` too), texts of errors, samples of operators
(they are tests' data), what an operator costs, and which calls wake other threads (`parallel=`).
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARE: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,), ast.NotIn: (ast.In,),
}  # fmt: skip
_BINARY: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mod,
    ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitOr,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.Pow: ast.Mult,
}  # fmt: skip
#: functions and methods that take each other's place
_NAMES = [
    ("min", "max"), ("floor", "ceil"), ("any", "all"), ("bisect_left", "bisect_right"), ("add", "subtract"),
    ("multiply", "divide"), ("maximum", "minimum"), ("less", "less_equal"), ("greater_equal", "greater"),
    ("Add", "Sub"), ("Mul", "Div"), ("expm1", "exp"), ("update", "difference_update"), ("add_", "discard"),
]  # fmt: skip
_SWAPS = {a: b for one, other in _NAMES for a, b in ((one, other), (other, one))}
#: the order of the arguments does not matter to these
_COMMUTE = {
    "min",
    "max",
    "minimum",
    "maximum",
    "add",
    "multiply",
    "Add",
    "Mul",
    "Min",
    "Max",
    "Equal",
    "equal",
    "larger",
}
#: named arguments that assert something, or are about speed alone
_QUIET = {"strict", "parallel"}
_UNTOUCHED = {"samples", "cost"}
_TERMINATORS = (ast.Continue, ast.Break)


@dataclass(frozen=True)
class Mutant:
    """`text` in place of the bytes [start, end) of a file; `before` and `after`: the lines it changes."""

    group: str
    file: str
    function: str
    line: int
    kind: str
    before: str
    after: str
    start: int
    end: int
    text: str

    @property
    def key(self) -> tuple[str, ...]:
        """What stays the same where lines move."""
        return self.file, self.function, self.before, self.after

    def applied(self, source: bytes) -> bytes:
        """The mutated file."""
        return source[: self.start] + self.text.encode() + source[self.end :]

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}: {self.before}  →  {self.after}"


def mutants_of(file: str, source: bytes, group: str) -> list[Mutant]:
    """All mutants of a file, in order of their place; those that do not parse are left out."""
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    found: dict[bytes, Mutant] = {}
    for node, function, kind, new in _Walk(ast.parse(source)).found:
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[operator]
        text = new if isinstance(node, ast.stmt) else f"({new})"
        changed = source[:start] + text.encode() + source[end:]
        first, last = starts[node.lineno - 1], starts[node.end_lineno]  # type: ignore[index]
        before, after = source[first:last], changed[first : last + len(changed) - len(source)]
        try:
            ast.parse(changed)
        except SyntaxError:
            continue
        shown = (" ".join(t.decode().split()) for t in (before, after))
        found.setdefault(changed, Mutant(group, file, function, node.lineno, kind, *shown, start, end, text))
    return sorted(found.values(), key=lambda m: (m.start, m.end, m.text))


class _Walk:
    """Finds (node, function, kind, source of what takes its place)."""

    def __init__(self, tree: ast.Module) -> None:
        self.found: list[tuple[ast.expr | ast.stmt, str, str, str]] = []
        self.names: list[str] = []
        for s in tree.body:
            self.statement(s)

    def note(self, node: ast.expr | ast.stmt, kind: str, new: ast.AST | str) -> None:
        text = new if isinstance(new, str) else ast.unparse(ast.fix_missing_locations(new))
        self.found.append((node, ".".join(self.names), kind, text))

    def statement(self, s: ast.stmt) -> None:
        match s:
            case ast.FunctionDef() | ast.ClassDef():
                if s.name not in _UNTOUCHED and not s.name.endswith("_samples"):
                    self.names.append(s.name)
                    self.definition(s)
                    self.names.pop()
            case ast.Import() | ast.ImportFrom() | ast.Assert() | ast.Raise():
                if isinstance(s, ast.Raise):
                    self.note(s, "statement dropped", "pass")
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                pass
            case ast.Expr(value=ast.Constant()):
                pass  # a docstring
            case _:
                self.other(s)

    def definition(self, s: ast.FunctionDef | ast.ClassDef) -> None:
        if isinstance(s, ast.FunctionDef):
            for default in (*s.args.defaults, *(d for d in s.args.kw_defaults if d is not None)):
                self.expression(default)
        for inner in s.body:
            self.statement(inner)

    def other(self, s: ast.stmt) -> None:
        for kind, new in _statement_changes(s):
            self.note(s, kind, new)
        if isinstance(s, (ast.If, ast.While)):
            for value in ("True", "False") if isinstance(s, ast.If) else ("False",):
                self.note(s.test, "condition fixed", value)
        for name, value in ast.iter_fields(s):
            if name in ("annotation", "decorator_list", "type_comment"):
                continue
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, ast.stmt):
                    self.statement(part)
                elif isinstance(part, ast.expr):
                    self.expression(part)
                elif isinstance(part, ast.withitem):
                    self.expression(part.context_expr)

    def expression(self, e: ast.expr) -> None:
        if isinstance(e, (ast.JoinedStr, ast.Lambda)):
            if isinstance(e, ast.Lambda):
                self.expression(e.body)
            return
        for kind, new in _expression_changes(e):
            self.note(e, kind, new)
        if isinstance(e, ast.Call) and isinstance(e.func, ast.Attribute) and e.func.attr == "reshape":
            return  # NumPy takes any negative size as the unknown one
        for child in ast.iter_child_nodes(e):
            if not (isinstance(child, ast.keyword) and child.arg in _QUIET):
                self.inside(child)

    def inside(self, child: ast.AST) -> None:
        if isinstance(child, ast.expr):
            self.expression(child)
        elif isinstance(child, (ast.comprehension, ast.keyword, ast.Slice)):
            for grandchild in ast.iter_child_nodes(child):
                self.inside(grandchild)


def _with(node: ast.AST, **changes: object) -> ast.AST:
    """A copy with other fields."""
    new = copy.copy(node)
    for name, value in changes.items():
        setattr(new, name, value)
    return new


def _statement_changes(s: ast.stmt) -> Iterator[tuple[str, ast.AST | str]]:
    plain = isinstance(s, ast.Assign) and isinstance(s.targets[0], (ast.Subscript, ast.Attribute))
    call = isinstance(s, ast.Expr) and isinstance(s.value, ast.Call)
    if plain or call or isinstance(s, (ast.AugAssign, ast.Delete, *_TERMINATORS)):
        yield "statement dropped", "pass"
    if isinstance(s, ast.AugAssign):
        if type(s.op) in _BINARY:
            yield "operator", _with(s, op=_BINARY[type(s.op)]())
        yield "operator", ast.Assign(targets=[s.target], value=s.value, lineno=s.lineno)
    if isinstance(s, ast.Continue):
        yield "statement", "break"
    if isinstance(s, ast.Break):
        yield "statement", "continue"
    if isinstance(s, ast.Return) and isinstance(s.value, (ast.Compare, ast.BoolOp)):
        yield "returned value", f"return not ({ast.unparse(s.value)})"
    if isinstance(s, ast.Return) and isinstance(s.value, ast.Constant) and isinstance(s.value.value, bool):
        yield "returned value", f"return {not s.value.value}"


def _expression_changes(e: ast.expr) -> Iterator[tuple[str, ast.AST | str]]:
    match e:
        case ast.Compare():
            for i, op in enumerate(e.ops):
                for other in _COMPARE[type(op)]:
                    yield "comparison", _with(e, ops=[*e.ops[:i], other(), *e.ops[i + 1 :]])
        case ast.BinOp() if type(e.op) in _BINARY and not _text(e.left):
            yield "operator", _with(e, op=_BINARY[type(e.op)]())
        case ast.BoolOp():
            yield "condition", _with(e, op=ast.And() if isinstance(e.op, ast.Or) else ast.Or())
            for i in range(len(e.values)):
                rest = [*e.values[:i], *e.values[i + 1 :]]
                yield "condition", rest[0] if len(rest) == 1 else _with(e, values=rest)
        case ast.UnaryOp(op=ast.Not() | ast.USub()) if not isinstance(e.operand, ast.Constant):
            yield "sign", e.operand
        case ast.IfExp():
            yield "condition", _with(e, body=e.orelse, orelse=e.body)
            yield "condition", e.body
            yield "condition", e.orelse
        case ast.Constant():
            yield from _constants(e.value)
        case ast.Call():
            yield from _calls(e)
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
            for i, g in enumerate(e.generators):
                if g.ifs:
                    yield (
                        "condition",
                        _with(e, generators=[*e.generators[:i], _with(g, ifs=[]), *e.generators[i + 1 :]]),
                    )


def _text(e: ast.expr) -> bool:
    return isinstance(e, ast.JoinedStr) or (isinstance(e, ast.Constant) and isinstance(e.value, str))


def _constants(value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, bool):
        yield "constant", str(not value)
    elif isinstance(value, int):
        yield "constant", str(value + 1)
        yield "constant", str(value - 1)
    elif isinstance(value, float):
        yield "constant", repr(value + 1.0)
        yield "constant", repr(value * 0.5 if value else -1.0)


def _calls(e: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    name = e.func.id if isinstance(e.func, ast.Name) else e.func.attr if isinstance(e.func, ast.Attribute) else ""
    if name in _SWAPS:
        changed = {"id": _SWAPS[name]} if isinstance(e.func, ast.Name) else {"attr": _SWAPS[name]}
        yield "function", _with(e, func=_with(e.func, **changed))
    if name in ("sorted", "reversed") and isinstance(e.func, ast.Name):
        yield "function", ast.Call(func=ast.Name(id="list", ctx=ast.Load()), args=e.args, keywords=[])
    plain = not any(isinstance(a, ast.Starred) for a in e.args)
    if (
        plain
        and len(e.args) >= 2
        and ast.dump(e.args[0]) != ast.dump(e.args[1])
        and name not in _COMMUTE | {"isinstance", "fail"}
    ):
        yield "arguments", _with(e, args=[e.args[1], e.args[0], *e.args[2:]])
    for i, k in enumerate(e.keywords):
        if k.arg is not None and k.arg not in _QUIET:
            yield "arguments", _with(e, keywords=[*e.keywords[:i], *e.keywords[i + 1 :]])
