"""Attention in tiles and its gradient, in float32 (see runtime/cpu/attention for the code).

A thread takes a panel of queries through all keys that it sees.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ....language.element import Expr
from ....language.types import Operands, TensorType, need
from ....ops.attention.heads_last import plain_operator
from ....ops.attention.shared import Tiled
from ....ops.attention.tiled_grad import TiledAttentionGrad
from ..attention import backward, forward
from ..attention.code import vectors
from ..attention.forward import COLUMNS
from ..attention.items import Items, offsets
from ..attention.scores import Form
from ..code.tiles import machine
from ..device import native
from ..device.native import Call
from ..families import PARTS, Family, enough, family
from ..providers.loops import computed
from .copy import filling

if TYPE_CHECKING:
    from ....language.ir import Operator

#: attributes of the operators that the kernels know; others must have their defaults
_KNOWN = ("scale", "first", "last", "cap", "ratio", "seed", "rows", "at")
#: soft caps that leave float32 room for what is over the cap, and for what is a logarithm's base less
_CAPS = (1e-9, 1e30)
#: a window without a bound
_FAR = 1 << 40


def panels(queries: int) -> np.ndarray:
    """[panels, 3]: first query, queries, variant; nearly equal numbers of vectors, the larger ones first."""
    width = machine().width
    total = -(-queries // width)
    count = -(-total // vectors())
    sizes = [total // count + (i < total % count) for i in range(count)]
    kinds = sorted(set(sizes), reverse=True)
    rows, row = [], 0
    for n in sizes:
        there = min(n * width, queries - row)
        rows.append((row, there, kinds.index(n)))
        row += there
    return np.array(rows, np.int64)


def variants(queries: int) -> tuple[int, ...]:
    """Vectors of the panels, by variant."""
    width = machine().width
    total = -(-queries // width)
    count = -(-total // vectors())
    return tuple(sorted({-(-total // count), total // count}, reverse=True))


def _threshold(ratio: float) -> int:
    """Numbers of the random stream that are less, of 2²⁴, are dropped."""
    return math.ceil(float(np.float32(ratio)) * 2**24)


class Attention(Family):
    """The base of both passes."""

    def accepts(self, op: Operator) -> bool:
        """float32, and enough to do."""
        op, _ = plain_operator(op)
        rule = op.of(Tiled)
        step = op.inputs[-1] if rule.ratio else None
        values = [v for v in (*op.reads(), *op.writes()) if v is not step]
        plain = all(getattr(rule, f.name) == f.default for f in dataclasses.fields(rule) if f.name not in _KNOWN)
        if not plain or any(v.dtype != "f32" or not v.size for v in values):
            return False
        if (rule.cap and not _CAPS[0] <= rule.cap <= _CAPS[1]) or _threshold(rule.ratio) >> 24:
            return False
        q, k = (x.type for x in op.inputs[:2] if x is not None)
        return math.prod(q.shape) * k.shape[-2] >= enough()

    def form(self, op: Operator) -> Form:
        """The parameters of the code."""
        op, beside = plain_operator(op)
        rule = op.of(Tiled)
        q, k, v, bias = (None if x is None else x.type for x in (*op.inputs, None)[:4])
        assert q is not None and k is not None and v is not None
        window = rule.first is not None or rule.last is not None
        kind = ""
        if bias is not None:
            rows, columns = (1, 1, *bias.shape)[-2:]
            kind = "keys" if rows == 1 else "queries" if columns == 1 else "both"
        sizes = (q.shape[-1], v.shape[-1], kind, window, variants(q.shape[-2]))
        return Form(*sizes, rule.cap > 0, rule.ratio > 0, tuple(beside.items()))

    def words(self, op: Operator, ins: Operands) -> list[Any]:
        """The arguments of `scores.WORDS`."""
        form, (op, _) = self.form(op), plain_operator(op)
        rule = op.of(Tiled)
        q, k, v, bias = ins[:4]
        row = column = 0
        if bias is not None:
            rows, columns = (1, 1, *bias.shape)[-2:]
            row, column = (columns if rows > 1 else 0), int(columns > 1)
        first = -_FAR if rule.first is None else rule.first
        last = _FAR if rule.last is None else rule.last
        scale, cap = rule.scale / (rule.cap or form.unit), rule.cap / form.unit
        numbers = [
            q,
            k,
            v,
            0 if bias is None else bias,
            row,
            column,
            scale,
            first,
            last,
            need(op.inputs[1]).shape[-2],
            cap,
        ]
        if not rule.ratio:
            return [*numbers, 0, 0, 0, 1.0]
        step = ins[len(op.inputs) - 1].reshape(1)
        return [*numbers, np.uint64(rule.seed), step, _threshold(rule.ratio) << 8, 1 / (1 - rule.ratio)]

    def heads(self, op: Operator) -> np.ndarray:
        """[heads, columns]: element offsets of each head's operands; the number of its first query among those of all
        weights (`forward.COLUMNS`)."""
        op, beside = plain_operator(op)
        q, k, v, bias = (None if x is None else x.type.shape for x in (*op.inputs, None)[:4])
        assert q is not None and k is not None and v is not None
        lead, (t, d), (s, e) = q[:-2], q[-2:], v[-2:]
        biases = np.zeros(math.prod(lead), np.int64)
        if bias is not None:
            full = (1,) * (2 - len(bias)) + bias
            biases = offsets(full[:-2], lead, full[-2] * full[-1])
        offsets_of = {"bias": biases, "dbias": biases, "lse": offsets(lead, lead, t), "number": self.numbers(op)}
        sizes = {"q": (lead, t, d), "k": (k[:-2], s, d), "v": (v[:-2], s, e), "y": (lead, t, e)}
        for name, (dims, rows, n) in {**sizes, **{f"d{name}": x for name, x in sizes.items()}}.items():
            offsets_of[name] = offsets(dims, lead, n, rows, beside.get(name, 1))
        return np.stack([offsets_of[name] for name in COLUMNS], 1)

    def numbers(self, op: Operator) -> np.ndarray:
        """[heads]: the number of each head's first query among those of all weights, of which these may be a part."""
        rule = op.of(Tiled)
        q = need(op.inputs[0])
        lead = q.shape[:-1]
        whole, start = rule.rows or lead, rule.at or (0,) * len(lead)
        indices = np.zeros(lead[:-1], np.int64)
        for axis, (size, first) in enumerate(zip(whole[:-1], start[:-1], strict=True)):
            place = np.arange(lead[axis]).reshape(-1, *[1] * (len(lead) - 2 - axis))
            indices = indices * size + first + place
        return (indices * whole[-1] + start[-1]).reshape(-1)


@family("TiledAttention", "HeadsLastTiledAttention")
class Forward(Attention):
    """(q, k, v, bias?) → y, log-sum-exp?"""

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        return (TensorType("f32", (native.threads(), forward.room(self.form(op)))),)

    def bind(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> list[Call]:
        table, parts = self.heads(op), panels(need(plain_operator(op)[0].inputs[0]).shape[-2])
        items = len(table) * len(parts)
        pieces = min(native.threads(), items)
        words = [*self.words(op, ins), outs[0], 0 if outs[1] is None else outs[1]]
        words += [table, parts, len(parts), items, pieces, scratch[0]]
        return [Call(native.compile_ir(forward.kernel(self.form(op))), tuple(words), pieces)]


def _sum(*parts: Expr) -> tuple[Expr, ...]:
    """In their order."""
    return (functools.reduce(Expr.__add__, parts),)


@family("TiledAttentionGrad", "HeadsLastTiledAttentionGrad")
class Gradient(Attention):
    """(q, k, v, bias?, y, log-sum-exp, dy) → dq, dk, dv, dbias?"""

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """Buffers of each thread; partial sums of the bias's gradient."""
        work = TensorType("f32", (native.threads(), backward.room(self.form(op))))
        bias, parts = self.wanted(op), self.parts(op)
        return (work,) if bias is None or not parts else (work, TensorType("f32", (parts, math.prod(bias))))

    def bind(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> list[Call]:
        """One call for each wave; before them what clears the bias's gradient, behind them what adds its parts up."""
        plain, _ = plain_operator(op)
        rule = plain.of(TiledAttentionGrad)
        bias, parts, items = self.wanted(op), self.parts(op), self.items(op)
        heads, table = self.heads(op), panels(need(plain.inputs[0]).shape[-2])
        target = scratch[1] if parts else outs[3]
        if bias is not None and parts:
            heads[:, COLUMNS.index("dbias")] += items.part(parts) * math.prod(bias)
        words = [*self.words(op, ins), *ins[4:7], *outs[:3], 0 if bias is None else target, rule.scale, heads, table]
        code = native.compile_ir(backward.kernel(self.form(op), bias is not None))
        calls = [] if bias is None else [filling(target, 0)]
        for runs, wave in items.waves(table, parts):
            pieces = min(native.threads(), len(runs))
            calls.append(Call(code, (*words, wave, runs, len(runs), pieces, scratch[0]), pieces))
        if parts:
            calls.append(computed(_sum, "f32", list(target), [outs[3].reshape(-1)]))
        return calls

    def wanted(self, op: Operator) -> tuple[int, ...] | None:
        """The shape of the bias whose gradient is wanted."""
        bias = op.inputs[3]
        return None if bias is None or len(op.outputs) < 4 or op.outputs[3] is None else bias.shape

    def items(self, op: Operator) -> Items:
        """The work."""
        op, _ = plain_operator(op)
        rule = op.of(TiledAttentionGrad)
        q, k = (x.shape for x in op.inputs[:2] if x is not None)
        return Items(q[:-2], k[:-2], self.wanted(op), q[-2], k[-2], rule.columns)

    def parts(self, op: Operator) -> int:
        """Into how many sums the gradient of a bias is cut that heads share, so that there is work for the threads."""
        items, bias = self.items(op), self.wanted(op)
        q = need(op.inputs[0])
        if bias is None or items.shares or items.blocks > 1 or items.chains >= PARTS:
            return 0
        count = min(PARTS, items.length)
        return count if count * math.prod(bias) <= q.size else 0
