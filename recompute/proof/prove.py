"""`prove`: whether two blocks compute the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import VerifyError
from ..language.ir import Block, Free
from . import rules  # noqa: F401  registers them
from .numbers import Numbers
from .views import View


@dataclass(frozen=True)
class Proof:
    """What was proved: the values that are equal, and those for which no rule shows it."""

    proved: tuple[str, ...]
    unproved: tuple[str, ...]
    numbers: Numbers


def final(n: Numbers, block: Block) -> tuple[dict[str, View], dict[str, list]]:
    env: dict[str, View] = {}
    for v in block.inputs:
        env[v.name] = n.declared("input", v)
    for v in (*block.parameters, *block.buffers, *block.state):
        env[v.name] = n.declared("state", v)
    for c in block.constants:
        env[c.value.name] = n.constant(c)
    sent: dict[str, list] = {}
    for o in block.operators:
        if isinstance(o.op, Free):
            continue
        n.run(o, env)
        if o.op.communicates == "begin":
            sent.setdefault(o.op.queue, []).append((o.op, tuple(env[v.name] for v in o.reads())))
    return env, sent


def prove(before: Block, after: Block, values: Sequence[str] = ()) -> Proof:
    n = Numbers()
    (a, sent_a), (b, sent_b) = final(n, before), final(n, after)
    names = [*dict.fromkeys([*after.outputs, *values, *(v.name for v in before.persistent())])]
    yes, no = [], []
    for name in names:
        (yes if a[name] == b.get(name) else no).append(name)
    return Proof(tuple(yes), tuple(no), n)
