"""Mutations of compiled steps that proofs must refuse: one change at a time to the operators of a plan.

    python benchmarks/proof_mutations.py [--count N] [--only NETWORK ...] [--seed S] [--json FILE]

Each mutant is compared with the plain step (`rc.prove`), and run beside the original with the operators' own numerics.
A mutant that changes a value and is proved is a fault, of which there may be none.  Proved with the same bits, or with
those of another order of sums: equal by mathematics.  Of the programs of
several ranks, which run in lock step, the first is changed.  `--count`: mutants that change a value, or cannot run.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import starmap
from typing import Any

import numpy as np
from proof_plans import PLANS

import recompute as rc
from recompute.communication.lockstep import LockStep
from recompute.errors import RecomputeError, TypeRuleError
from recompute.language.ir import Block, Constant, Free, Operator, Role, Value
from recompute.language.op import op_class
from recompute.language.types import DTYPES

#: relative to the largest element: what another order of sums may change
ROUNDING = 1e-3


class Numerics:
    """The values of steps by the operators' own numerics; what a mutant has in common with the original is kept."""

    def __init__(self, block: Block, seed: int) -> None:
        draw = np.random.default_rng(seed)
        self.arrays: list[np.ndarray] = []
        self.memo: dict[Any, Any] = {}
        held = {v.name for v in (*block.buffers, *block.state)}
        self.start = {v.name: self.number(_drawn(draw, v, positive=v.name in held)) for v in block.declared()}
        self.wanted = self.run(block)
        assert all(np.isfinite(self.arrays[n].astype(np.float64)).all() for n in self.wanted.values()), "hides changes"
        self.kept = len(self.arrays), set(self.memo)

    def number(self, a: np.ndarray) -> int:
        """That of an array, the same for the same bits."""
        key = (a.dtype, a.shape, hashlib.sha256(a.tobytes()).digest())
        if key not in self.memo:
            self.memo[key] = len(self.arrays)
            self.arrays.append(a)
        return self.memo[key]

    def run(self, block: Block) -> dict[str, int]:
        """All outputs, parameters, buffers and state after a step."""
        env = self.start | {c.value.name: self.number(c.numpy()) for c in block.constants}
        for o in block.operators:
            inputs = tuple(None if v is None else env[v.name] for v in o.inputs)
            key = (o.op, inputs, tuple(v is not None for v in o.outputs))
            if key not in self.memo:
                self.memo[key] = self.applied(o, inputs)
            env.update((v.name, n) for v, n in zip(o.outputs, self.memo[key], strict=True) if v is not None)
        held = (v.name for v in (*block.parameters, *block.buffers, *block.state))
        return {name: env[name] for name in dict.fromkeys((*block.outputs, *held))}

    def applied(self, o: Operator, inputs: Sequence[int | None]) -> list[int | None]:
        """The results of an operator."""
        ins = [None if n is None else self.arrays[n].copy() for n in inputs]
        outs = [None if v is None else np.zeros(v.shape, v.type.numpy) for v in o.outputs]
        for k, at in enumerate(o.op.updates[: len(outs)]):  # written where it lies
            outs[k] = outs[k] if outs[k] is None else ins[at]
        scratch = [np.zeros(t.shape, t.numpy) for t in o.op.scratch(*o.types)]
        with np.errstate(all="ignore"):
            o.op.compute(ins, outs, scratch)
        return [None if a is None else self.number(a) for a in outs]

    def compare(self, other: Block) -> str:
        """The values of a mutant: the "same bits", "other rounding", "other values", or it "cannot run"."""
        try:
            found = self.run(other)
        except (RecomputeError, ValueError, TypeError, IndexError, ZeroDivisionError, AssertionError):
            return "cannot run"
        pairs = [(self.arrays[n], self.arrays[found[name]]) for name, n in self.wanted.items() if n != found[name]]
        said = "same bits" if not pairs else "other rounding" if all(starmap(_close, pairs)) else "other values"
        count, keys = self.kept
        del self.arrays[count:]
        self.memo = {k: v for k, v in self.memo.items() if k in keys}
        return said


class Together:
    """The same for the programs of all ranks of a mesh, of which the first is changed."""

    def __init__(self, blocks: Sequence[Block], mesh: str, seed: int) -> None:
        draw = np.random.default_rng(seed)
        self.blocks, self.mesh = [logical(b) for b in blocks], rc.Mesh(mesh)
        self.feeds = [{v.name: _drawn(draw, v, positive=False) for v in b.inputs} for b in blocks]
        self.data = [
            {v.name: _drawn(draw, v, positive=True) for v in (*b.parameters, *b.buffers, *b.state)} for b in blocks
        ]
        self.wanted = self.run(self.blocks[0])

    def run(self, first: Block) -> list[np.ndarray]:
        """All that is fetched, and all that persists after a step."""
        ranks = LockStep([first, *self.blocks[1:]], self.mesh, self.data)
        fetched = ranks.run(self.feeds)
        return [a for some in (*fetched, *ranks.state) for _, a in sorted(some.items())]

    def compare(self, other: Block) -> str:
        """The values of a mutant."""
        try:
            found = self.run(other)
        except (RecomputeError, ValueError, TypeError, IndexError, ZeroDivisionError, AssertionError):
            return "cannot run"
        pairs = [(a, b) for a, b in zip(self.wanted, found, strict=True) if a.tobytes() != b.tobytes()]
        return "same bits" if not pairs else "other rounding" if all(starmap(_close, pairs)) else "other values"


def _drawn(draw: np.random.Generator, v: Value, *, positive: bool) -> np.ndarray:
    """Elements that hide nothing: none is 0, variances are positive."""
    if v.dtype == "bool":
        return draw.integers(0, 2, v.shape).astype(bool)
    if not v.type.is_float:
        return draw.integers(0, 2, v.shape).astype(v.type.numpy)
    if v.size == 1:
        return np.full(v.shape, 0.5, v.type.numpy)
    spread = draw.normal(size=v.shape) / max(1.0, np.sqrt(v.size / v.shape[0]))
    return (np.abs(spread) + 0.1 if positive or v.ndim < 2 else spread).astype(v.type.numpy)


# -- mutations --------------------------------------------------------------------------------------------------------

Mutation = Callable[[Block, random.Random], "Block | None"]


def _with(block: Block, at: int, *operators: Operator) -> Block:
    """The block with other operators in place of one."""
    return block.with_operators([*block.operators[:at], *operators, *block.operators[at + 1 :]])


def _one(block: Block, rng: random.Random, fits: Callable[[Operator], Any]) -> int | None:
    """The position of one of the operators that fit."""
    found = [i for i, o in enumerate(block.operators) if fits(o)]
    return rng.choice(found) if found else None


def swapped(block: Block, rng: random.Random) -> Block | None:
    """Two operands of an operator change places."""
    at = _one(block, rng, lambda o: len(set(o.reads())) > 1)
    if at is None:
        return None
    inputs = list(block.operators[at].inputs)
    i, j = rng.sample(range(len(inputs)), 2)
    inputs[i], inputs[j] = inputs[j], inputs[i]
    return _with(block, at, dataclasses.replace(block.operators[at], inputs=tuple(inputs)))


def _changed(value: Any, rng: random.Random) -> Any:
    """Another value of an attribute."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + rng.choice([1, -1, 2])
    if isinstance(value, float):
        return rng.choice([value * 10 or 1.0, -value or 0.5, value + 1e-3])
    if isinstance(value, tuple) and value:
        at = rng.randrange(len(value))
        return (*value[:at], _changed(value[at], rng), *value[at + 1 :])
    if value in DTYPES:
        return rng.choice([t for t in ("f16", "bf16", "f32", "f64") if t != value])
    return value


def attribute(block: Block, rng: random.Random) -> Block | None:
    """An attribute changes: an axis, a size, an epsilon, a seed, a rate, the type of a cast."""
    at = _one(block, rng, lambda o: dataclasses.fields(o.op))
    if at is None:
        return None
    op = block.operators[at].op
    name = rng.choice(dataclasses.fields(op)).name
    return _with(
        block, at, _applied(block.operators[at], dataclasses.replace(op, **{name: _changed(getattr(op, name), rng)}))
    )


def _applied(o: Operator, op: Any) -> Operator:
    """Another operator on the same values, which must have the same types."""
    types = op.infer(*o.types[0])
    if any(v is not None and v.type != t for v, t in zip(o.outputs, types, strict=False)):
        raise TypeRuleError("other types")
    return dataclasses.replace(o, op=op)


def constant(block: Block, rng: random.Random) -> Block | None:
    """An element of a constant changes."""
    if not block.constants:
        return None
    at = rng.randrange(len(block.constants))
    c = block.constants[at]
    k = rng.randrange(len(c.data))
    other = Constant(c.value, (*c.data[:k], _changed(c.data[k], rng), *c.data[k + 1 :]))
    return dataclasses.replace(block, constants=(*block.constants[:at], other, *block.constants[at + 1 :]))


def operand(block: Block, rng: random.Random) -> Block | None:
    """An operator reads another value of the same type: another mask, statistic, activation or gradient."""
    at = _one(block, rng, lambda o: any(o.reads()))
    if at is None:
        return None
    o = block.operators[at]
    k = rng.choice([i for i, v in enumerate(o.inputs) if v is not None])
    before = [*block.declared(), *(v for p in block.operators[:at] for v in p.writes())]
    others = [v for v in before if v.type == o.inputs[k].type and v != o.inputs[k]]
    if not others:
        return None
    v = rng.choice(others)
    return _with(block, at, dataclasses.replace(o, inputs=(*o.inputs[:k], v, *o.inputs[k + 1 :])))


def clone(block: Block, rng: random.Random) -> Block | None:
    """An operator is replaced by one that another has, on values of the same types."""
    at = _one(block, rng, lambda o: not o.op.communicates)
    if at is None:
        return None
    o = block.operators[at]
    others = [p.op for p in block.operators if p.types == o.types and p.op != o.op and p.op.updates == o.op.updates]
    unary = [op_class(n)() for n in ("Relu", "Tanh", "Neg", "Exp")] if len(o.inputs) == 1 else []
    binary = [op_class(n)() for n in ("Add", "Sub", "Mul")] if len(o.inputs) == 2 else []
    choice = [p for p in (*others, *unary, *binary) if p != o.op]
    return _with(block, at, _applied(o, rng.choice(choice))) if choice else None


def dropped(block: Block, rng: random.Random) -> Block | None:
    """An update of a parameter, a moment or a statistic is left out, or written twice."""
    at = _one(block, rng, lambda o: o.op.updates)
    if at is None:
        return None
    return _with(block, at, *([block.operators[at]] * rng.choice([0, 2])))


def moved(block: Block, rng: random.Random) -> Block | None:
    """An update runs at another time, or a reader of what is updated."""
    targets = {v.name for o in block.operators if o.op.updates for v in o.writes()}
    at = _one(block, rng, lambda o: o.op.updates or any(v.name in targets for v in o.reads()))
    if at is None:
        return None
    operators = list(block.operators)
    operators.insert(rng.randrange(len(operators)), operators.pop(at))
    return block.with_operators(operators)


def cast(block: Block, rng: random.Random) -> Block | None:
    """An operand is rounded to fewer bits."""
    at = _one(block, rng, lambda o: any(v.type.is_float for v in o.reads()) and not o.op.communicates)
    if at is None:
        return None
    o = block.operators[at]
    k = rng.choice([i for i, v in enumerate(o.inputs) if v is not None and v.type.is_float])
    if k in o.op.updates:
        return None
    v = o.inputs[k]
    low = Value("mutant.low", v.type.with_dtype("f16" if v.dtype != "f16" else "bf16"))
    back = Value("mutant.back", v.type)
    casts = [Operator(op_class("Cast")(b.dtype), (a,), (b,), Role.FORWARD) for a, b in ((v, low), (low, back))]
    return _with(block, at, *casts, dataclasses.replace(o, inputs=(*o.inputs[:k], back, *o.inputs[k + 1 :])))


def channel(block: Block, rng: random.Random) -> Block | None:
    """A message takes another channel, or another number."""
    at = _one(block, rng, lambda o: o.op.communicates == "begin")
    if at is None:
        return None
    op = block.operators[at].op
    change = rng.choice([{"channel": f"{op.queue}.other"}, {"number": op.number + 1}])
    return _with(block, at, dataclasses.replace(block.operators[at], op=dataclasses.replace(op, **change)))


MUTATIONS: tuple[Mutation, ...] = (
    swapped, attribute, attribute, constant, operand, operand, clone, dropped, moved, cast, channel,
)  # fmt: skip


def logical(block: Block) -> Block:
    """The operators of a compiled block, without what says where values lie and what computes them."""
    operators = (dataclasses.replace(o, kernel="", scratch=()) for o in block.operators if not isinstance(o.op, Free))
    return dataclasses.replace(block, operators=tuple(operators), addresses={})


def mutants(block: Block, rng: random.Random) -> Iterator[tuple[str, Block]]:
    """Changed blocks that the verifier accepts, without end."""
    while True:
        mutation = rng.choice(MUTATIONS)
        try:
            other = mutation(block, rng)
            if other is None or (other.operators == block.operators and other.constants == block.constants):
                continue
            rc.verify(dataclasses.replace(other))
        except (RecomputeError, ValueError, TypeError, IndexError, OverflowError, ZeroDivisionError):
            continue
        yield mutation.__name__, other


def _close(a: np.ndarray, b: np.ndarray) -> bool:
    if a.dtype.kind not in "fV":
        return bool((a == b).all())
    x, y = a.astype(np.float64), b.astype(np.float64)
    return bool(np.allclose(x, y, rtol=ROUNDING, atol=ROUNDING * float(np.abs(x).max(initial=0.0)), equal_nan=True))


def check(name: str, plan: str, count: int, seed: int, say: Callable[[str], None] = print) -> Counter[str]:
    """Mutants of one plan: what becomes of how many, until `count` change a value, or may do so.

    AssertionError for a false alarm: the original is not proved.
    """
    (after, *others), proves = PLANS[plan].proof(name)
    block = logical(after)
    assert not proves(block).unproved, f"{name}, {plan}: a false alarm"
    mesh = PLANS[plan].mesh
    numerics = Together([block, *others], mesh, seed) if mesh else Numerics(block, seed)
    found: Counter[str] = Counter()
    rng = random.Random(f"{name} {plan} {seed}")
    for kind, other in mutants(block, rng):
        if sum(n for how, n in found.items() if "same bits" not in how) >= count:
            break
        try:
            proved = not proves(other).unproved
        except rc.VerifyError:  # ranks that do not meet
            proved = False
        how = f"{'proved' if proved else 'refused'}, {numerics.compare(other)}"
        found[how] += 1
        if proved and "same bits" not in how:
            say(f"  {how}: {name}, {plan}, {kind}: {_difference(block, other)}")
    return found


def _difference(block: Block, other: Block) -> str:
    """Where two blocks first differ."""
    for a, b in zip(block.operators, other.operators, strict=False):
        if a != b:
            return "  ->  ".join(f"{o.op}({', '.join(v.name if v else '-' for v in o.inputs)})" for o in (a, b))
    return "constants" if block.constants != other.constants else "fewer operators"


#: plans of networks, and how many in a thousand mutants are of each
CASES = {
    **{(n, p): 24 for n in ("mlp", "lenet") for p in (
        "plain", "checkpoints", "slices", "offload", "fp16", "qat", "dp", "zero1", "zero3", "pp")},
    **{(n, p): 24 for n in ("gpt2-tiny", "llama-tiny") for p in ("plain", "checkpoints", "budget", "pp", "tp")},
    **{(n, p): 24 for n in ("lstm",) for p in ("plain", "slices", "bf16")},
    **{(n, "plain"): 24 for n in ("bert-mini", "vit-tiny", "resnet18", "mobilenet_v2")},
    ("resnet18", "sgd"): 24, ("resnet18", "offload"): 24,
}  # fmt: skip


def main() -> None:
    """Prints what becomes of mutants, plan by plan; exit status 1 if there is a fault."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--count", type=int, default=1000, metavar="N")
    p.add_argument("--only", nargs="+", metavar="NETWORK")
    p.add_argument("--plans", nargs="+", metavar="PLAN")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--json", metavar="FILE")
    args = p.parse_args()
    cases = [c for c in CASES if c[0] in (args.only or [c[0]]) and c[1] in (args.plans or [c[1]])]
    rows: dict[str, dict[str, int]] = {}
    for name, plan in cases:
        started = time.perf_counter()
        found = check(name, plan, -(-args.count * CASES[name, plan] // 1000), args.seed)
        rows[f"{name}, {plan}"] = dict(sorted(found.items()))
        print(f"{name}, {plan}: {rows[f'{name}, {plan}']} ({time.perf_counter() - started:.0f} s)", flush=True)
    total = sum(map(Counter, rows.values()), Counter())
    print("all:", dict(sorted(total.items())))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as f:
            json.dump(rows, f, indent=1)
    sys.exit(any(k.startswith("proved") and k.endswith(("values", "run")) for k in total))


if __name__ == "__main__":
    main()
