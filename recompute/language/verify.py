"""The verifier: checks that a block can be executed; its errors show the lines around the faulty operator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from ..errors import RecomputeError, VerifyError, expect
from .ir import Block, Free, Operator, Role, Value
from .text import show_name, show_operator
from .verify_addresses import check_addresses
from .verify_communication import Communications
from .verify_copies import Copies

#: permitted values of `Block.products`
PRODUCTS = ("", "tf32")
_TRUSTED: ContextVar[bool] = ContextVar("trusted", default=False)


@contextlib.contextmanager
def trusted() -> Iterator[None]:
    """Inside, `verify` checks nothing: for a program that was verified at another batch and is not run."""
    token = _TRUSTED.set(True)
    try:
        yield
    finally:
        _TRUSTED.reset(token)


def verify(block: Block) -> Block:
    """Checks a block and returns it.

    Rules: names are declared once and written once (state only by operators that update it,
    which read it once, and never constants or inputs); every read comes after
    the write and before the free; types agree with the operators' type rules, and have at most 64 dimensions and a
    possible size; a constant has as many elements as its type; a recomputed operator reads no parameter or state after
    its update; outputs exist and are not freed; only copies access values in host memory, and only the wait of a copy
    reads what the copy writes (see ops/memory/offload.py), as with communication between ranks, whose numbers are
    unique on a channel (see ops/communication/base.py); in a planned block every value of a step has an address, and
    every read sees the bytes that were last written to its value.

    Raises VerifyError with the operator and its neighbours.
    """
    if not _TRUSTED.get():
        checker = _Checker(expect("block", block, Block, "a Block, such as program.block"))
        if "verified" not in block.facts:
            checker.run()
            block.facts["verified"] = True  # all fields except the addresses, a dictionary, which may change
        checker.check_addresses()
    return block


class _Checker:
    def __init__(self, block: Block) -> None:
        self.block = block
        self.live: dict[str, Value] = {}
        self.freed: set[str] = set()
        self.changed: set[str] = set()
        self.persistent = {v.name for v in block.persistent()}
        self.constants = {c.value.name for c in block.constants}
        self.copies = Copies({v.name: v for v in block.persistent()})
        self.communications = Communications()
        self.at = -1

    def fail(self, why: str) -> VerifyError:
        return VerifyError(f"program '{self.block.name}': {why}\n{excerpt(self.block, self.at)}")

    def run(self) -> None:
        for v in self.block.declared():
            if v.name in self.live:
                raise self.fail(f"{show_name(v.name)} is declared twice")
            self.check_size(v)
            if v.type.host and (v.name not in self.persistent or v.name in self.constants):
                raise self.fail(f"{show_name(v.name)} is declared in host memory: only an Offload writes values there")
            self.live[v.name] = v
        for c in self.block.constants:
            if len(c.data) != c.value.size:
                raise self.fail(f"constant {show_name(c.value.name)}: {c.value.type} has {len(c.data)} elements")
        for at, op in enumerate(self.block.operators):
            self.at = at
            if isinstance(op.op, Free):
                self.check_free(op)
            else:
                self.check_operator(op)
        for followed in (self.copies, self.communications):
            self.at, why = followed.left()
            if why:
                raise self.fail(why)
        if self.block.products not in PRODUCTS:
            raise self.fail(f"unknown products '{self.block.products}'; known: {', '.join(filter(None, PRODUCTS))}")
        for name in self.block.outputs:
            if name not in self.live:
                raise self.fail(f"output {show_name(name)} {'was freed' if name in self.freed else 'is never written'}")
            if self.copies.unfit(self.live[name]):
                raise self.fail(f"output {show_name(name)} is in host memory, or the unfinished end of a copy")
            if self.communications.unfit(self.live[name]):
                raise self.fail(f"output {show_name(name)} is written by other ranks: name the result of its CommWait")

    def check_addresses(self) -> None:
        if self.block.addresses and self.block.facts.get("addresses") != self.block.addresses:
            fault = check_addresses(self.block)
            if fault is not None:
                self.at, why = fault
                raise self.fail(why)
            self.block.facts["addresses"] = dict(self.block.addresses)

    def check_free(self, op: Operator) -> None:
        for v in op.reads():
            if v.name in self.persistent:
                raise self.fail(f"{show_name(v.name)} is persistent and cannot be freed")
            self.check_read(v)
            del self.live[v.name]
            self.freed.add(v.name)

    def check_read(self, v: Value) -> None:
        source = self.live.get(v.name)
        if source is None:
            state = "after it was freed" if v.name in self.freed else "before it is written"
            raise self.fail(f"{show_name(v.name)} is read {state}")
        if source.type != v.type:
            raise self.fail(f"{show_name(v.name)} is read as {v.type}, but it is {source.type}")

    def check_operator(self, op: Operator) -> None:
        for read in op.inputs:
            if read is None:
                continue
            if self.live.get(read.name) is not read:
                self.check_read(read)
            if read.name in self.changed and read.name not in self.persistent:
                raise self.fail(f"{show_name(read.name)} is read after it was updated in place")
            if op.role is Role.RECOMPUTE and read.name in self.changed:
                raise self.fail(f"a recomputed operator reads {show_name(read.name)} after it was updated")
        if not op.typed:
            self.check_types(op)
        self.check_scratch(op)
        why = self.copies.step(self.at, op)
        if not why and (op.op.communicates or self.communications.targets):
            why = self.communications.step(self.at, op)
        if why:
            raise self.fail(why)
        if not op.typed:
            object.__setattr__(op, "typed", True)  # operators are immutable: later passes need not check again
        if op.op.updates:
            self.check_updates(op)
        else:
            self.check_new(*op.writes())
        for buffer in op.scratch:
            if buffer.name in self.live or buffer.name in self.freed:
                raise self.fail(f"scratch {show_name(buffer.name)} has the name of a value")
            self.freed.add(buffer.name)

    def check_new(self, *values: Value) -> None:
        for v in values:
            if v.name in self.live or v.name in self.freed:
                raise self.fail(f"{show_name(v.name)} is written twice")
            self.live[v.name] = v

    def check_updates(self, op: Operator) -> None:
        """Checks that an update writes what it reads: parameters, buffers and state, each of which it reads once; or
        what was fetched of them from host memory, which then has a new name."""
        names = [None if v is None else v.name for v in op.inputs]
        outs = [None if v is None else v.name for v in op.outputs]
        for i, at in enumerate(op.op.updates):
            name, out = (value[k] if k < len(value) else None for value, k in ((names, at), (outs, i)))
            if name is None and out is None:
                continue
            target = op.outputs[i] if i < len(op.outputs) else None
            if name in self.copies.fetched and target is not None:
                self.copies.update(name, target.name)
                self.check_new(target)
            elif name is None or name != out:
                raise self.fail(
                    f"{op.op.name} updates its input {at} in place: output {i} must be that parameter, buffer or state"
                    f" ({show_name(name) if name else 'absent'}), not {show_name(out) if out else 'absent'}"
                )
            elif name in self.constants or name not in self.persistent:
                kinds = {"a constant": self.constants, "an input": {v.name for v in self.block.inputs}}
                kind = next((k for k, of in kinds.items() if name in of), "a computed value")
                raise self.fail(
                    f"{op.op.name} updates its input {at} in place, but {show_name(name)} is {kind}: declare it as a "
                    "parameter, buffer or state"
                )
            if names.count(name) > 1:
                raise self.fail(
                    f"{op.op.name} updates {show_name(name)} in place and reads it as another input too: declare a "
                    "state for each, or read a copy"
                )
            self.changed.add(name)

    def check_types(self, op: Operator) -> None:
        try:
            types = op.inferred()
        except RecomputeError as e:
            raise self.fail(str(e)) from None
        except Exception:  # the type rule does not expect inputs of this number or kind
            inputs = ", ".join("_" if v is None else str(v.type) for v in op.inputs)
            raise self.fail(f"{op.op.name} does not accept inputs of this number or kind: ({inputs})") from None
        wanted = op.outputs[: op.op.required_outputs]
        if len(op.outputs) > len(types) or None in wanted or len(wanted) < op.op.required_outputs:
            raise self.fail(f"{op.op.name} has {len(types)} outputs, {op.op.required_outputs} of them required")
        for v, t in zip(op.outputs, types, strict=False):
            if t is None:
                raise self.fail(f"{op.op.name}: a required input is absent")
            if v is not None and v.type != t:
                raise self.fail(f"{show_name(v.name)} is declared {v.type}, but {op.op.name} gives {t}")
            if v is not None:
                self.check_size(v)

    def check_scratch(self, op: Operator) -> None:
        """Checks the scratch buffers of operators without kernels in a planned block; the workspace of a kernel is
        checked when the kernel is bound, since it depends on the machine (`kernels.fits`)."""
        if self.block.addresses and not op.kernel:
            wanted = tuple(op.workspace())
            if tuple(v.type for v in op.scratch) != wanted:
                raise self.fail(
                    f"{op.op.name} needs scratch buffers of other types: {', '.join(map(str, wanted)) or 'none'}"
                )
        for v in op.scratch:
            self.check_size(v)

    def check_size(self, v: Value) -> None:
        if why := v.type.impossible():
            raise self.fail(f"{show_name(v.name)} {why}")


def excerpt(block: Block, at: int, around: int = 3) -> str:
    """The lines around operator `at`, marked; nothing for at < 0."""
    if at < 0:
        return ""
    first = max(0, at - around)
    lines = []
    for i, op in enumerate(block.operators[first : at + around + 1], first):
        lines.append(f"  {'>' if i == at else ' '} {i:>5}  {show_operator(op)}")
    return "\n".join(lines)
