"""The base class of passes, pipelines, and the function that runs them."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import gc
import re
import tempfile
import typing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ..boundary import as_block, as_path
from ..errors import UsageError, VerifyError, expect, nearest
from ..language.ir import Block
from ..language.options import Options, option_fields
from ..language.program import Program
from ..language.text import show
from ..language.verify import verify
from ..support.files import make_folder, replacing, together

#: name in a pipeline (`dead-code`) → class
PASSES: dict[str, type[Pass]] = {}


class Pass(Options):
    """A function from block to block whose fields are its options.  A subclass is registered, unless `abstract`."""

    #: whether all that it gives was verified already, as it runs other passes
    verifies: ClassVar[bool] = False
    #: facts that the passes before must have given: "gradients", "updates", "frees", "addresses"
    needs: ClassVar[tuple[str, ...]] = ()
    #: facts that must not hold yet: nothing is added behind the frees
    refuses: ClassVar[tuple[str, ...]] = ("frees",)
    #: facts that hold afterwards, and those that do not any more
    gives: ClassVar[tuple[str, ...]] = ()
    takes: ClassVar[tuple[str, ...]] = ()
    #: the name in pipelines and on the command line, from the class's name: DeadCode → dead-code
    name: ClassVar[str] = ""

    def __init_subclass__(cls, abstract: bool = False, **kw: Any) -> None:
        super().__init_subclass__(**kw)
        cls.name = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", cls.__name__).lower()
        if not abstract:
            PASSES[cls.name] = cls

    def run(self, block: Block) -> Block:
        """The rewritten block; the one given is never changed."""
        raise NotImplementedError

    def rewrite(self, program: Program) -> Block:
        """The rewritten block of a program.

        A pass that needs more than the block overrides this: it may read and set the contents of arrays, declare
        state, and change the (parameter, gradient) pairs.  `apply_passes` gives the program its new block.
        """
        return self.run(program.block)

    def __str__(self) -> str:
        options = [
            f"{f.name}={_show_option(getattr(self, f.name))}"
            for f in option_fields(type(self))
            if f.repr and getattr(self, f.name) != f.default
        ]
        return self.name + (f"{{{','.join(options)}}}" if options else "")


class ForwardPass(Pass, abstract=True):
    """A pass over the forward pass, before differentiation, which leaves outputs as they are.

    What it changes is changed again where the program is made at another batch.

    `kept`: values that stay beside the outputs, because the loss or the user needs them.
    """

    refuses = ("gradients",)
    kept: tuple[str, ...] = ()

    def rewrite(self, program: Program) -> Block:
        block = program.block
        values = block.values()
        kept = dict.fromkeys([*block.outputs, *(n for n in self.kept if n in values)])
        marked = block.with_operators(block.operators, outputs=tuple(kept))
        changed = self.changed(marked, program)
        if changed is marked:
            return block
        program.edited(program.again, str(self), lambda made: apply_passes(made, [self]))
        return changed.with_operators(changed.operators, outputs=block.outputs)

    def changed(self, block: Block, program: Program) -> Block:
        """The rewritten block, whose outputs all stay; `program`: whose block it is."""
        return self.run(block)


def _show_option(value: Any) -> str:
    if isinstance(value, Pass):
        return str(value)
    if isinstance(value, tuple):
        return f"[{','.join(map(_show_option, value))}]"
    if callable(value) or (dataclasses.is_dataclass(value) and type(value).__str__ is object.__str__):
        return "..."
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass
class _Dump:
    """A folder for program texts, and the number of texts written."""

    folder: Path
    count: int = 0


_DUMP: contextvars.ContextVar[_Dump | None] = contextvars.ContextVar("dump", default=None)


@contextlib.contextmanager
def dumping(folder: Path | str | None) -> Iterator[None]:
    """Inside, the program's text is written to a folder after each pass, numbered in order (None: not written)."""
    dump = None if folder is None else _Dump(as_path(folder, "dump"))
    with together() if dump is not None else contextlib.nullcontext():
        if dump is not None:
            make_folder(dump.folder)
        token = _DUMP.set(dump)
        try:
            yield
        finally:
            _DUMP.reset(token)


def is_dumping() -> bool:
    """Whether texts are written now."""
    return _DUMP.get() is not None


def dump_block(name: str, block: Block) -> None:
    """Writes a program's text to the folder of `dumping`, if there is one."""
    dump = _DUMP.get()
    if dump is None:
        return
    with replacing(dump.folder / f"{dump.count:02d}-{name}.rir") as temporary:
        temporary.write_text(show(block), encoding="utf-8")
    dump.count += 1


def run_passes(block: Block, passes: Sequence[Pass], *, dump: Path | str | None = None) -> Block:
    """Runs passes in order, with the verifier after each.

    `dump`: a folder for the text before the first and after each pass.  If a pass breaks the program, the VerifyError
    names the pass and a file that reproduces the error.
    """
    block = as_block(block)
    wanted = "a list of passes, such as rc.pipeline gives"
    passes = [expect("passes", p, Pass, wanted) for p in expect("passes", passes, Iterable, wanted)]
    with dumping(dump) if dump is not None else contextlib.nullcontext():
        if dump is not None:
            dump_block("input", block)
        for p in passes:
            block = _checked(p, block, p.run(block))
            dump_block(p.name, block)
    return block


def check_order(passes: Sequence[Pass]) -> None:
    """UsageError where a pass of a list comes before one that it needs, or behind one that it refuses."""
    facts: dict[str, str] = {}
    for p in passes:
        for fact in p.needs:
            if fact not in facts:
                first = [q.name for q in passes if fact in q.gives]
                raise UsageError(
                    f"pass '{p.name}' needs {fact}: put it behind {first[0] if first else 'what makes them'}"
                )
        for fact in p.refuses:
            if fact in facts:
                raise UsageError(f"pass '{p.name}' comes too late: put it before '{facts[fact]}', which makes {fact}")
        facts |= dict.fromkeys(p.gives, p.name)
        for fact in p.takes:
            facts.pop(fact, None)


def apply_passes(program: Program, passes: Sequence[Pass]) -> None:
    """Rewrites a program by passes, in order, with the verifier after each that changes it; see `run_passes`."""
    for p in passes:
        before = program.block
        program.block = _checked(p, before, p.rewrite(program))
        dump_block(p.name, program.block)


def _checked(p: Pass, before: Block, after: Block) -> Block:
    """The block after a pass.  VerifyError with a reproducer if it is broken."""
    try:
        return after if p.verifies or after is before else verify(after)
    except VerifyError as e:
        raise VerifyError(f"pass '{p}' broke the program; {_reproducer(p, before)}\n{e}") from None


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """Pauses Python's cycle collector: compiling makes many objects without cycles, which it would only traverse."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _reproducer(p: Pass, block: Block) -> str:
    with tempfile.NamedTemporaryFile("w", suffix=".rir", prefix="recompute-", delete=False) as f:
        f.write(f"; pipeline: {p}\n{show(block)}")
    return f"the program before it is in {f.name}"


def pipeline(text: str) -> list[Pass]:
    """Parses `autodiff{loss=loss},recompute{checkpoints=[a,b]},liveness`.

    UsageError for an unknown pass or option, with the nearest names.
    """
    passes = []
    for part in _split(expect("a pipeline", text, str, "a text such as 'dead-code,liveness'")):
        match = re.match(r"^([\w-]+)(?:\{(.*)\})?$", part, re.DOTALL)
        if not match:
            raise UsageError(f"cannot read '{part}' in the pipeline (expected name or name{{option=value}})")
        cls = PASSES.get(match[1])
        if cls is None:
            raise UsageError(
                f"unknown pass '{match[1]}'{nearest(match[1], PASSES)}; known: {', '.join(sorted(PASSES))}"
            )
        passes.append(cls(**_options(cls, match[2] or "")))
    return passes


def _options(cls: type[Pass], text: str) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    fields = {f.name for f in option_fields(cls)}
    options: dict[str, Any] = {}
    for item in _split(text):
        key, sign, value = item.partition("=")
        if not sign or key not in fields:
            raise UsageError(f"pass '{cls.name}' has no option '{key}'{nearest(key, fields)}")
        try:
            options[key] = _option(value, hints[key])
        except ValueError as e:
            raise UsageError(f"pass '{cls.name}': option '{key}' must be {e}, not '{value}'") from None
    return options


def _option(text: str, hint: Any) -> Any:
    """The value of an option from its text; ValueError, which says what it must be, for a text that is none."""
    if text.startswith("["):
        return tuple(_split(text[1:-1]))
    kinds = typing.get_args(hint) or (hint,)
    if bool in kinds and text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError:
                continue
    if text == "none" and type(None) in kinds:
        return None
    if not {bool, int, float}.isdisjoint(kinds) and str not in kinds:
        raise ValueError(" or ".join(_KINDS[kind] for kind in kinds if kind in _KINDS))
    return text


#: type of an option → what it is called
_KINDS = {bool: "true or false", int: "a whole number", float: "a number", type(None): "none"}


def _split(text: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for i, ch in enumerate(text):
        depth += (ch in "[{") - (ch in "]}")
        if ch == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    parts.append(text[start:].strip())
    return [p for p in parts if p]
