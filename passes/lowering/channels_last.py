"""Channels-last layout of image activations, for kernels that need it and to save transposes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from ...errors import UsageError
from ...language.builder import Names
from ...language.ir import Block, Constant, Free, Operator, Role, Value
from ...language.kernels import accepting
from ...language.layouts import Turned, to_first, to_last
from ...ops.channels_last import ChannelsLast as Form
from ...ops.channels_last import moves
from ...ops.convolution.conv import Convolution
from ...ops.shape.reshape import Identity, Reshape, Transpose
from ..base import Pass
from .layouts import turned, turned_operator, turned_type

#: sweeps over the operators that may go either way
_SWEEPS = 6


class ChannelsLast(Pass):
    """Use channels-last activations [n, spatial..., c] in convolutions, poolings, normalisations and between them.

    Operators with a channels-last form use it if one of `providers` has a kernel for it (none given: always); sums over
    images and positions, and resizing, always do.  The choice depends on the operator and its types only, so that a
    recomputed clone is bit-identical to its original.  Element-wise operators, Concat, Slice and the like, whose
    results do not depend on the layout, follow their neighbours if that transposes fewer bytes.  All others, including
    random ones, stay as they are.

    A value that is needed in both layouts gets one Transpose, right before the first operator that needs it (or a
    Reshape, which is a view, if no element moves).  Weights, inputs and outputs of the block keep their types.
    """

    providers: tuple[str, ...] = ()

    def run(self, block: Block) -> Block:
        """The same values under the same names wherever they keep their layout; NAME.last where they do not."""
        turning = self._turning(block)
        return block if turning is None else turning.run()

    def composed(self, block: Block) -> set[str]:
        """Results of Transposes of which some reader takes the operand, which is in that layout already."""
        transposes = any(isinstance(o.op, Transpose) and len(o.op.perm) > 2 for o in block.operators)
        turning = self._turning(block) if transposes else None
        if turning is None:
            return set()
        turning.run()
        return turning.composed

    def _turning(self, block: Block) -> _Turning | None:
        """The rewriter of the block; None if it stays as it is."""
        if any(isinstance(op.op, Free) for op in block.operators):
            raise UsageError("'channels-last' comes before 'liveness': it adds operators, and frees must follow")
        forms = [_served(o, turned(o), self.providers) for o in block.operators]
        if not any(f is not None and isinstance(f.op, Form) for f in forms) or _convolutions_stay(block, forms):
            return None
        return _Turning(block, _choose(block, forms))


def _convolutions_stay(block: Block, forms: list[Turned | None]) -> bool:
    """Whether there are convolutions, and no kernels for any of them: everything else would only be turned there."""
    kinds = [f for o, f in zip(block.operators, forms, strict=True) if isinstance(o.op, Convolution)]
    return bool(kinds) and all(f is None for f in kinds)


def _served(o: Operator, form: Turned | None, providers: tuple[str, ...]) -> Turned | None:
    """The form, unless an operator is turned for its kernel alone and none of `providers` has that."""
    if form is None or not isinstance(form.op, Form) or not providers:
        return form
    return form if accepting(providers, turned_operator(o, form)) else None


def _weight(v: Value) -> int:
    """Bytes that move when a value changes its layout."""
    return v.nbytes if v.ndim > 2 and moves(v.shape, to_last(v.ndim)) else 0


def _members(o: Operator, form: Turned | None) -> Iterator[tuple[Value, bool]]:
    """Values that an operator touches in the layout of its activations (True), or in any case as they are."""
    for i, v in enumerate(o.inputs):
        if v is not None:
            yield v, form is not None and form.inputs[i] == v.ndim
    for i, v in enumerate(o.outputs):
        if v is not None:
            yield v, form is not None and form.outputs[i]


def _choose(block: Block, forms: list[Turned | None]) -> list[Turned | None]:
    """The forms of those operators that take them.

    Each value knows how many operators want it in which layout; those that are free to choose go, one after the
    other, forwards and backwards, where fewer bytes have to be transposed for them.
    """
    wants: dict[str, list[int]] = {v.name: [1, 0] for v in block.declared()}
    for name in block.outputs:
        wants.setdefault(name, [0, 0])[0] += 1
    free: dict[int, list[Value]] = {}
    for i, (o, form) in enumerate(zip(block.operators, forms, strict=True)):
        mine: dict[str, Value] = {}
        for v, turns in _members(o, form):
            if not _weight(v) or isinstance(o.op, Transpose):
                continue
            if turns and form is not None and not form.always:
                mine[v.name] = v
            else:
                wants.setdefault(v.name, [0, 0])[turns] += 1
        if form is not None and not form.always:
            free[i] = list(mine.values())
    last: dict[int, bool] = {}
    order = list(free)
    for sweep in range(_SWEEPS):
        changed = False
        for i in order if sweep % 2 == 0 else reversed(order):
            before = last.get(i)
            after = _better(free[i], wants, before)
            if after is not None and after != before:
                last[i], changed = after, True
                for v in free[i]:
                    row = wants.setdefault(v.name, [0, 0])
                    row[after] += 1
                    if before is not None:
                        row[before] -= 1
        if not changed and sweep:
            break
    for i in order:  # as many bytes either way: with those that take it always, whose loops it may join
        if i not in last and any(wants.get(v.name, (0, 0))[1] for v in free[i]):
            last[i] = True
            for v in free[i]:
                wants.setdefault(v.name, [0, 0])[1] += 1
    return [f if f is None or f.always or last.get(i) else None for i, f in enumerate(forms)]


def _better(touched: list[Value], wants: dict[str, list[int]], now: bool | None) -> bool | None:
    """The layout by which fewer bytes of an operator's values are needed in both; `now` where that is the same."""
    gain = 0
    for v in touched:
        plain, last = wants.get(v.name, (0, 0))
        if now is not None:
            plain, last = (plain, last - 1) if now else (plain - 1, last)
        if (plain > 0) != (last > 0):
            gain += _weight(v) if last else -_weight(v)
    return gain > 0 if gain else now


class _Turning:
    """Rewrites the block, with each value in the layouts in which it is read."""

    def __init__(self, block: Block, chosen: list[Turned | None]) -> None:
        self.block, self.chosen = block, chosen
        self.names = Names(block.values())
        self.constants = {c.value.name: c for c in block.constants}
        self.added: list[Constant] = []
        self.persistent = {v.name for v in block.persistent()}
        self.kept = set(block.outputs)
        #: name → rank of the activations that it goes with (0: as it is) → value
        self.forms: dict[str, dict[int, Value]] = {v.name: {0: v} for v in block.declared()}
        self.result: list[Operator] = []
        self.composed: set[str] = set()
        self.needs = self._needs()
        self.closing = self._closing()

    def run(self) -> Block:
        for i, (o, form) in enumerate(zip(self.block.operators, self.chosen, strict=True)):
            if isinstance(o.op, Transpose) and self.transpose(o, o.op):
                pass
            elif form is None:
                inputs = tuple(None if v is None else self.get(v, 0, o.role) for v in o.inputs)
                self.result.append(dataclasses.replace(o, inputs=inputs))
                self.wrote(o)
            else:
                self.turn(o, form)
            for v in self.closing.get(i, ()):
                self.get(v, 0, o.role)
        return self.block.with_operators(self.result, constants=(*self.block.constants, *self.added), addresses={})

    def _needs(self) -> dict[str, set[int]]:
        """The forms in which each value is read; outputs of the block are needed as they are."""
        needs: dict[str, set[int]] = {name: {0} for name in self.block.outputs}
        for o, form in zip(self.block.operators, self.chosen, strict=True):
            for i, v in enumerate(o.inputs):
                if v is not None:
                    needs.setdefault(v.name, set()).add(form.inputs[i] if form else 0)
        return needs

    def _closing(self) -> dict[int, list[Value]]:
        """Position → outputs of the block that nothing reads channels-last after it: they may change there."""
        last: dict[str, tuple[int, Value]] = {}
        wanted = set(self.block.outputs)
        for i, (o, form) in enumerate(zip(self.block.operators, self.chosen, strict=True)):
            for v in (*o.inputs, *o.outputs):
                if v is not None and v.name in wanted and form is not None:
                    last[v.name] = (i, v)
        values: dict[int, list[Value]] = {}
        for i, v in last.values():
            values.setdefault(i, []).append(v)
        return values

    def wrote(self, o: Operator) -> None:
        """Notes an operator's results: they exist in the original layout only."""
        for v in o.writes():
            self.forms[v.name] = {0: v}

    def turn(self, o: Operator, form: Turned) -> None:
        """Writes an operator in its channels-last form."""
        inputs = tuple(
            None if v is None else self.get(v, r, o.role) for v, r in zip(o.inputs, form.inputs, strict=True)
        )
        outputs: list[Value | None] = []
        for v, last in zip(o.outputs, form.outputs, strict=True):
            if v is None:
                outputs.append(None)
                continue
            t = turned_type(v.type, v.ndim) if last else v.type
            if t == v.type and not (last and _weight(v)):
                outputs.append(v)
                self.forms[v.name] = {0: v, v.ndim: v}
            else:
                outputs.append(Value(self.names.take(f"{v.name}.last"), t))
                self.forms[v.name] = {v.ndim: outputs[-1]}  # type: ignore[dict-item]
        self.result.append(Operator(form.op, inputs, tuple(outputs), o.role))

    def get(self, v: Value, rank: int, role: Role) -> Value:
        """A value in one form; an operator that turns it is written first where it is not there yet."""
        forms = self.forms[v.name]
        if rank in forms:
            return forms[rank]
        if rank == 0:
            forms[0] = self.emit(forms[v.ndim], to_first(v.ndim), v, role)
        elif rank == v.ndim and not (turned_type(v.type, rank) == v.type and not _weight(v)):
            target = Value(f"{v.name}.last", turned_type(v.type, rank))
            forms[rank] = self.constant(v, target, rank) or self.emit(
                self.get(v, 0, role), to_last(rank), target.renamed(self.names.take(target.name)), role
            )
        elif rank == v.ndim:
            forms[rank] = self.get(v, 0, role)
        else:
            forms[rank] = self.operand(v, rank, role)
        return forms[rank]

    def emit(self, source: Value, perm: tuple[int, ...], target: Value, role: Role) -> Value:
        """Writes `target`: `source` with its axes in another order; a view where no element moves."""
        if perm == tuple(range(source.ndim)):
            op: Identity | Transpose | Reshape = Identity()
        else:
            op = Transpose(perm) if moves(source.shape, perm) else Reshape(target.shape)
        self.result.append(Operator(op, (source,), (target,), role))
        return target

    def operand(self, v: Value, rank: int, role: Role) -> Value:
        """An operand that broadcasts against channels-last activations of more dimensions."""
        t = turned_type(v.type, rank)
        if t == v.type:
            return self.get(v, 0, role)
        target = Value(f"{v.name}.last", t)
        constant = self.constant(v, target, rank)
        if constant is not None:
            return constant
        source = self.get(v, 0, role)
        whole = v.type.with_shape([1] * (rank - v.ndim) + list(v.shape))
        if moves(whole.shape, to_last(rank)):
            kept = [p - (rank - v.ndim) for p in to_last(rank) if p >= rank - v.ndim]
            turned_value = Value(self.names.take(target.name), v.type.with_shape([v.shape[p] for p in kept]))
            source = self.emit(source, tuple(kept), turned_value, role)
            if source.type == t:
                return source
        target = target.renamed(self.names.take(target.name))
        self.result.append(Operator(Reshape(t.shape), (source,), (target,), role))
        return target

    def constant(self, v: Value, target: Value, rank: int) -> Value | None:
        """Another constant instead of an operator."""
        c = self.constants.get(v.name)
        if c is None:
            return None
        array = c.numpy().reshape([1] * (rank - v.ndim) + list(v.shape)).transpose(to_last(rank))
        copy = Constant.of(self.names.take(target.name), np.ascontiguousarray(array).reshape(target.shape))
        self.added.append(copy)
        return copy.value

    def transpose(self, o: Operator, op: Transpose) -> bool:
        """Composes a Transpose with the layouts around it; False where there is nothing to compose with."""
        x, y = o.inputs[0], o.outputs[0]
        assert x is not None and y is not None
        forms = self.forms[x.name]
        needs = self.needs.get(y.name, {0})
        if (0 in forms and not needs & {y.ndim}) or y.ndim < 3:
            return False
        if 0 in forms:
            source, perm = forms[0], op.perm
        else:
            source, perm = forms[x.ndim], tuple(to_first(x.ndim)[p] for p in op.perm)
        self.forms[y.name] = {}
        for rank in sorted(needs & {0, y.ndim}) or [0]:
            order = tuple(perm[p] for p in to_last(y.ndim)) if rank else perm
            same = order == tuple(range(len(order)))
            if same:
                self.composed.add(y.name)
            keeps_name = rank == 0 and y.name in self.kept
            if same and not keeps_name and source.name not in self.persistent:
                self.forms[y.name][rank] = source
                continue
            target = y if rank == 0 else Value(self.names.take(f"{y.name}.last"), turned_type(y.type, y.ndim))
            self.forms[y.name][rank] = self.emit(source, order, target, o.role)
        return True
