"""Damage to a program's text that knows its language: types, addresses, attributes, operators, frees, workspaces."""

from __future__ import annotations

import functools
import json
import random
import re
from collections.abc import Callable

#: sizes, addresses and counts that nobody expects
NUMBERS = [0, 1, 2, 3, 5, 7, 63, 64, 65, 100, -1, -2, -64, 4096, 2**20, 2**31, 2**40, 2**62, 2**63, 2**64, 2**70,
           -(2**31), -(2**63), -(2**70)]  # fmt: skip
DTYPES = ["f16", "bf16", "f32", "f64", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64", "bool", "i4", "f8e5m2"]
PROVIDERS = ["loops", "numba", "convolution", "blas", "onednn", "cuda", "cudnn", "numpy", "nothing", "loops_tf32"]
ROLES = ["", "loss ", "backward ", "recompute ", "optimize ", "communicate ", "forward "]
_TYPE = re.compile(r"(host )?\b([a-z]+\d\w*|bool)\[([\d,]*)\]")
_NAME = re.compile(r'%(?:"(?:[^"\\]|\\.)*"|[A-Za-z0-9_./\-$@#]+)')
_APPLIED = re.compile(r"= (\w+)\(([^()]*)\)")
_ATTRIBUTES = re.compile(r"\{(.*)\}")
_ADDRESSES = re.compile(r"@([-\d_,]+)$")
_DECLARED = re.compile(r"  (input|param|buffer|state|const) ")


def damaged_program(r: random.Random, text: str) -> str:
    """`text` with one to four changes of what it says."""
    lines = text.split("\n")
    for _ in range(r.choice((1, 1, 1, 2, 2, 4))):
        if len(lines) < 3:
            break
        i = r.randrange(1, len(lines) - 1)
        r.choice(CHANGES)(r, lines, i)
    return "\n".join(lines)


def _replaced(r: random.Random, line: str, pattern: re.Pattern[str], make: Callable[[re.Match[str]], str]) -> str:
    """The line with one match of the pattern, any of them, made into something else."""
    found = list(pattern.finditer(line))
    if not found:
        return line
    chosen = r.choice(found)
    return line[: chosen.start()] + make(chosen) + line[chosen.end() :]


def _type(r: random.Random, found: re.Match[str]) -> str:
    host, dtype, shape = found[1] or "", found[2], [d for d in found[3].split(",") if d]
    how = r.random()
    if how < 0.3:
        dtype = r.choice(DTYPES)
    elif how < 0.4:
        host = "" if host else "host "
    elif how < 0.55 or not shape:
        shape.insert(r.randrange(len(shape) + 1), str(r.choice(NUMBERS[:10])))
    elif how < 0.65:
        del shape[r.randrange(len(shape))]
    elif how < 0.75:
        r.shuffle(shape)
    else:
        shape[r.randrange(len(shape))] = str(r.choice(NUMBERS))
    return f"{host}{dtype}[{','.join(shape)}]"


def change_type(r: random.Random, lines: list[str], i: int) -> None:
    """One type of one line."""
    lines[i] = _replaced(r, lines[i], _TYPE, lambda m: _type(r, m))


def change_size_everywhere(r: random.Random, lines: list[str], i: int) -> None:
    """A size in all types and lists at once, so that they still fit each other."""
    sizes = [d for line in lines for m in _TYPE.finditer(line) for d in m[3].split(",") if d]
    if not sizes:
        return
    old, new = r.choice(sizes), "0" if r.random() < 0.35 else str(r.choice([1, 2, 3, 17, 1000, *NUMBERS]))
    pattern = re.compile(rf"(?<=[\[,]){old}(?=[\],])")
    lines[:] = [pattern.sub(new, line) for line in lines]


def change_dtype_everywhere(r: random.Random, lines: list[str], i: int) -> None:
    """An element type in all types and attributes at once."""
    known = sorted({m[2] for line in lines for m in _TYPE.finditer(line)})
    if known:
        pattern, new = re.compile(rf"\b{r.choice(known)}\b"), r.choice(DTYPES)
        lines[:] = [pattern.sub(new, line) for line in lines]


def change_address(r: random.Random, lines: list[str], i: int) -> None:
    """An address: another value's, beside one, negative, unaligned, beyond the end, missing, or one too many."""
    placed = [k for k, line in enumerate(lines) if _ADDRESSES.search(line)]
    known = [a for k in placed for a in _ADDRESSES.search(lines[k])[1].split(",")]  # type: ignore[index]
    if not placed or r.random() < 0.1:
        lines[i] += f" @{r.choice(NUMBERS)}"
        return
    if r.random() < 0.7:
        i = r.choice(placed)

    def make(found: re.Match[str]) -> str:
        every = found[1].split(",")
        k = r.randrange(len(every))
        other = r.choice([*known, str(r.choice(NUMBERS))])
        if r.random() < 0.3 and other.lstrip("-").isdigit():
            other = str(int(other) + r.choice((1, 4, 8, 64, -64, -1)))
        if r.random() < 0.15:
            del every[k]
        else:
            every[k] = "_" if r.random() < 0.1 else other
        return "@" + ",".join(every) if every else ""

    lines[i] = _ADDRESSES.sub(make, lines[i], count=1)


def drop_addresses(r: random.Random, lines: list[str], i: int) -> None:
    """No addresses at all, or none in one line."""
    for k in range(len(lines)) if r.random() < 0.5 else (i,):
        lines[k] = _ADDRESSES.sub("", lines[k]).rstrip()


def _attribute(r: random.Random, value: str) -> str:
    how = r.random()
    if value.startswith('"') and how < 0.6:
        try:
            inside = json.loads(value)
        except ValueError:
            return '""'
        return json.dumps(_inside(r, inside))
    if re.fullmatch(r"[-+]?\d+", value) and how < 0.6:
        return str(r.choice([*NUMBERS, int(value) + 1, int(value) - 1, -int(value)]))
    if value.startswith("[") and how < 0.7:
        items = [x for x in value[1:-1].split(",") if x]
        k = r.randrange(len(items)) if items else 0
        if items and r.random() < 0.6:
            items[k] = _attribute(r, items[k])
        elif items and r.random() < 0.5:
            del items[k]
        else:
            items.insert(k, str(r.choice(NUMBERS)))
        return f"[{','.join(items)}]"
    return r.choice(["true", "false", "none", "nan", "inf", "-inf", "1e308", "-0.5", '""', '"f32"', '"x"', "[]", "[0]",
                     "[[1]]", "[1,2,3]", "[-1]", f"[{','.join('0' * 70)}]", str(r.choice(NUMBERS))])  # fmt: skip


def _inside(r: random.Random, text: str) -> str:
    """A text in an attribute: an element type, a mode, an equation, or operators in a Loop's body."""
    if "=" not in text:
        return r.choice([*DTYPES[:6], "", "x", "reflect", "linear", "ij,jk->ik", text * 2, text[:-1]])
    parts = text.split("; ")
    k = r.randrange(len(parts))
    how = r.randrange(6)
    if how == 0:
        parts[k] = re.sub(r"%\d+", lambda m: f"%{r.randrange(12)}", parts[k], count=r.choice((1, 2)))
    elif how == 1:
        parts[k] = re.sub(r"\w+\(", lambda m: f"{r.choice(operators())}(", parts[k], count=1)
    elif how == 2:
        del parts[k]
    elif how == 3:
        parts.insert(r.randrange(len(parts) + 1), parts[k])
    elif how == 4:
        r.shuffle(parts)
    else:
        parts[k] = _ATTRIBUTES.sub(lambda m: "{" + _attributes(r, m[1]) + "}", parts[k])
    return "; ".join(parts)


def _split(text: str) -> list[str]:
    """Parts between commas that are in no bracket and no string."""
    found, depth, quoted, start = [], 0, False, 0
    for i, c in enumerate(text):
        if c == '"' and (i == 0 or text[i - 1] != "\\"):
            quoted = not quoted
        elif not quoted:
            depth += (c in "[{(") - (c in ")}]")
            if c == "," and depth == 0:
                found.append(text[start:i].strip())
                start = i + 1
    return [*found, text[start:].strip()]


def _attributes(r: random.Random, text: str) -> str:
    items = _split(text)
    k = r.randrange(len(items))
    if r.random() < 0.1:
        del items[k]
    else:
        name, _, value = items[k].partition("=")
        items[k] = f"{name}={_attribute(r, value)}"
    return ", ".join(items)


def change_attribute(r: random.Random, lines: list[str], i: int) -> None:
    """An attribute's value, or an attribute that was left out because it has its default."""
    having = [k for k, line in enumerate(lines) if _ATTRIBUTES.search(line) and _APPLIED.search(line)]
    if having and r.random() < 0.6:
        i = r.choice(having)
        lines[i] = _ATTRIBUTES.sub(lambda m: "{" + _attributes(r, m[1]) + "}", lines[i], count=1)
        return
    applied = _APPLIED.search(lines[i])
    names = attributes().get(applied[1], []) if applied else []
    if applied and names:
        value = _attribute(r, r.choice(["0", "1", "[0]", '"x"', "2"]))
        rest = _ATTRIBUTES.sub("", lines[i][applied.end() :])
        lines[i] = f"{lines[i][: applied.end()]} {{{r.choice(names)}={value}}}{rest}"


@functools.cache
def operators() -> tuple[str, ...]:
    """The names of all operators."""
    from recompute.testing import all_ops

    return tuple(cls.__name__ for cls in all_ops())


@functools.cache
def attributes() -> dict[str, list[str]]:
    """The attributes of each operator."""
    from recompute.language.options import option_fields
    from recompute.testing import all_ops

    return {cls.__name__: [f.name for f in option_fields(cls)] for cls in all_ops()}


def change_operator(r: random.Random, lines: list[str], i: int) -> None:
    """Another operator with the same operands."""
    lines[i] = re.sub(r"= \w+\(", lambda m: f"= {r.choice(operators())}(", lines[i], count=1)


def change_inputs(r: random.Random, lines: list[str], i: int) -> None:
    """Operands: another value, none, one less, one twice."""
    known = [m[0] for line in lines for m in _NAME.finditer(line)]

    def make(found: re.Match[str]) -> str:
        ins = [x.strip() for x in found[2].split(",") if x.strip()]
        how = r.random()
        k = r.randrange(len(ins)) if ins else 0
        if ins and how < 0.5:
            ins[k] = r.choice([*known, "_"])
        elif ins and how < 0.7:
            del ins[k]
        else:
            ins.insert(k, r.choice([*known, "_"]))
        return f"= {found[1]}({', '.join(ins)})"

    lines[i] = _APPLIED.sub(make, lines[i], count=1)


def change_kernel(r: random.Random, lines: list[str], i: int) -> None:
    """Who runs an operator."""
    if " using " in lines[i]:
        new = "" if r.random() < 0.3 else f" using {r.choice(PROVIDERS)}"
        lines[i] = re.sub(r" using \w+", new, lines[i])
    elif "(" in lines[i]:
        at = re.search(r" scratch\(| @[-\d]|$", lines[i])
        assert at is not None
        lines[i] = f"{lines[i][: at.start()]} using {r.choice(PROVIDERS)}{lines[i][at.start() :]}"


def change_scratch(r: random.Random, lines: list[str], i: int) -> None:
    """A workspace: of another size, none, one more, one with the name of a value."""
    found = re.search(r" scratch\((.*?)\)", lines[i])
    if found is None:
        names = [m[0] for line in lines for m in _NAME.finditer(line)]
        at = re.search(r" @[-\d]|$", lines[i])
        assert at is not None
        name = r.choice([*names, "%workspace"]) if names else "%workspace"
        made = f" scratch({name}: {r.choice(DTYPES)}[{r.choice(NUMBERS)}])"
        lines[i] = lines[i][: at.start()] + made + lines[i][at.start() :]
    elif r.random() < 0.5:
        new = _replaced(r, found[0], _TYPE, lambda m: _type(r, m))
        lines[i] = lines[i].replace(found[0], new)
    else:
        new = "" if r.random() < 0.5 else f" scratch({found[1]}, {found[1]})"
        lines[i] = lines[i].replace(found[0], new)


def change_frees(r: random.Random, lines: list[str], i: int) -> None:
    """A free in another place, of another value, or none."""
    frees = [k for k, line in enumerate(lines) if line.startswith("  free ")]
    names = [m[0] for line in lines for m in _NAME.finditer(line)]
    if frees and r.random() < 0.6:
        line = lines.pop(r.choice(frees))
        if r.random() < 0.7:
            lines.insert(r.randrange(1, len(lines)), line)
    elif names:
        lines.insert(i, f"  free {r.choice(names)}")


def change_role(r: random.Random, lines: list[str], i: int) -> None:
    """What an operator is there for."""
    if _APPLIED.search(lines[i]):
        bare = re.sub(r"^  (forward|loss|backward|recompute|optimize|communicate) ", "  ", lines[i])
        lines[i] = f"  {r.choice(ROLES)}{bare.lstrip()}"


def change_order(r: random.Random, lines: list[str], i: int) -> None:
    """Lines that change places, come twice, or not at all."""
    j = r.randrange(1, len(lines) - 1)
    how = r.randrange(3)
    if how == 0:
        lines[i], lines[j] = lines[j], lines[i]
    elif how == 1:
        lines.insert(j, lines[i])
    else:
        del lines[i]


def change_declaration(r: random.Random, lines: list[str], i: int) -> None:
    """An input that becomes a parameter, a buffer that becomes state, a constant with other elements."""
    declared = [k for k, line in enumerate(lines) if _DECLARED.match(line)]
    if not declared:
        return
    k = r.choice(declared)
    if " const " in lines[k] and r.random() < 0.5:
        head, _, _ = lines[k].partition(" = ")
        lines[k] = f"{head} = {_attribute(r, r.choice(['1', '[1,2]', '[0]']))}"
        return
    kind = r.choice(["input", "param", "buffer", "state", "const"])
    rest = _DECLARED.sub("", lines[k]).partition(" = ")[0]
    lines[k] = f"  {kind} {rest}" + (" = [0]" if kind == "const" else "")


def change_name(r: random.Random, lines: list[str], i: int) -> None:
    """A value under another name, in one place or everywhere."""
    names = [m[0] for line in lines for m in _NAME.finditer(line)]
    if not names:
        return
    old = r.choice(names)
    new = r.choice([*names, '%""', '%"a b"', '%"\\u0000"', "%" + "x" * 300, '%"é"'])
    if r.random() < 0.4:
        lines[i] = _replaced(r, lines[i], _NAME, lambda m: new)
    else:
        lines[:] = [_NAME.sub(lambda m: new if m[0] == old else m[0], line) for line in lines]


CHANGES = [
    change_type, change_size_everywhere, change_size_everywhere, change_dtype_everywhere, change_address,
    change_address, drop_addresses, change_attribute, change_attribute, change_attribute, change_operator,
    change_inputs, change_kernel, change_scratch, change_frees, change_role, change_order, change_declaration,
    change_name,
]  # fmt: skip
