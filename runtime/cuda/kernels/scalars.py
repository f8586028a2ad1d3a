"""Scalar state that changes in each step (step counter, loss scale): one thread, generated from the expansions."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ....language.element import argument
from ....language.formulas import through_expansion
from ....language.ir import Operator
from ....language.op import Op
from ...shared.trouble import NOT_FINITE
from ..code.expressions import code
from ..device.kernel import C_TYPES, COMPUTE, REPORT, STATUS, Buffer, Call, Kernel
from ..families import Buffers, Family, family


@functools.cache
def kernel(op: Op, ins: tuple[str | None, ...], outs: tuple[str, ...]) -> Kernel:
    """Reads all inputs, then writes the outputs, which may be the same memory."""
    arguments = [None if t is None else argument(i, t) for i, t in enumerate(ins)]
    outputs = through_expansion(op, arguments)
    present = [(i, t) for i, t in enumerate(ins) if t is not None]
    lines, roots = code(outputs, [f"a{i}" for i in range(len(ins))])
    loads = [f"const {COMPUTE[t]} a{i} = widen(*x{i});" for i, t in present]
    stores = [f"*y{i} = narrow<{C_TYPES[t]}>({r});" for i, (t, r) in enumerate(zip(outs, roots, strict=True))]
    parameters = [f"const {C_TYPES[t]}* x{i}" for i, t in present] + [f"{C_TYPES[t]}* y{i}" for i, t in enumerate(outs)]
    return Kernel(op.name, ", ".join(parameters), "    " + "\n    ".join([*loads, *lines, *stores]), threads=32)


@family("CheckFinite")
class Checked(Family):
    """One launch of one thread, which reports a number that is not finite: 0 for NaN, else its sign."""

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        x, y = ins[0], outs[0]
        assert x is not None and y is not None
        return [checked(x.type.dtype).blocks(1, args=[x, y, STATUS], block=(1,))]


@functools.cache
def checked(dtype: str) -> Kernel:
    """Copies a number; the difference of a number and itself is 0 if it is finite, else NaN."""
    lines = f"""    const {COMPUTE[dtype]} v = widen(*x), zero = v - v;
    if (zero != zero) report(status, {NOT_FINITE}, v != v ? 0 : v > 0 ? 1 : -1, 0);
    *y = *x;"""
    kind = C_TYPES[dtype]
    return Kernel("check_finite", f"const {kind}* x, {kind}* y, long long* status", lines, threads=32, before=REPORT)


@family("Increment", "LossScaleUpdate")
class Scalars(Family):
    """One launch of one thread."""

    def accepts(self, op: Operator) -> bool:
        """Scalars of types that are computed with."""
        return all(v.shape == () and v.dtype in C_TYPES for v in (*op.reads(), *op.writes()))

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        k = kernel(op.op, tuple(v and v.dtype for v in op.inputs), tuple(v.dtype for v in op.writes()))
        args = [b for b in (*ins, *outs) if b is not None]
        return [k.blocks(1, args=args, block=(1,))]
