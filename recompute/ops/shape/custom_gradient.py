"""Gradients that are given with the model: PyTorch's `autograd.Function`, kept by `from_torch`."""

from __future__ import annotations

import functools
from typing import Any

from ...language.factors import aligned
from ...language.ir import Block, leading_to
from ...language.op import Imported, ImportedNode, Op, imports
from ...language.text import parse, show

#: the domain of these nodes
DOMAIN = "recompute"


class Cotangent(Op):
    """Stands for the gradient of x while a gradient is being read from a model (zeros of x's type)."""

    def infer(self, x):
        return (x,)

    def axis_factors(self, ins, outs):
        return aligned(ins, outs)

    def compute(self, ins, outs, scratch):
        outs[0][...] = 0

    def expand(self, b, x):
        return (b.fill(0.0, x),)

    def gradient(self, b, ins, outs, grads):
        return [None]

    @classmethod
    def samples(cls, draw):
        yield draw.case(cls(), draw("f32[3]"), gradient=False)


class CustomGradient(Op):
    """(y..., further...): the first `count` inputs, whose gradients reach the further ones by `body`.

    `body` is a program in the text form.  Its inputs: the gradients of the outputs, then the further inputs; output i
    is the gradient of further input `of[i]`.
    """

    count: int = 1
    of: tuple[int, ...] = ()
    body: str = ""

    def infer(self, *inputs):
        self.need(*inputs, count=max(len(inputs), self.count))
        return inputs[: self.count]

    def compute(self, ins, outs, scratch):
        for x, y in zip(ins, outs, strict=False):
            y[...] = x

    def views(self, ins, outs):
        """The first output has the bytes of the first input."""
        return (0,)

    def expand(self, b, *inputs):
        return tuple(b.Identity(v) for v in inputs[: self.count])

    def gradient(self, b, ins, outs, grads):
        """The body's operators."""
        block = _parsed(self.body)
        flowing = [b.fill(0.0, y) if g is None else g for g, y in zip(grads, outs, strict=False)]
        values = dict(zip((v.name for v in block.inputs), [*flowing, *ins[self.count :]], strict=True))
        for c in block.constants:
            values[c.value.name] = b.constant(c.numpy(), c.value)
        for o in block.operators:
            results = b.emit(o.op, *(None if v is None else values[v.name] for v in o.inputs), want=len(o.outputs))
            for v, new in zip(o.outputs, results if isinstance(results, tuple) else (results,), strict=True):
                if v is not None:
                    values[v.name] = new
        gradients: list[Any] = [None] * len(ins)
        for i, name in zip(self.of, block.outputs, strict=True):
            gradients[self.count + i] = values[name]
        return gradients

    @classmethod
    def samples(cls, draw):
        """The opposite of a gradient, also times a further input."""
        body = "program g {\n  input %g: f32[3]\n  input %x: f32[3]\n  %n: f32[3] = Neg(%g)\n  output %n\n}"
        yield draw.case(cls(of=(0,), body=body), draw("f32[3]"), draw("f32[3]"), gradient=False)


@functools.lru_cache(maxsize=64)
def _parsed(text: str) -> Block:
    return parse(text)


@imports("Cotangent", domain=DOMAIN)
def cotangent(node: ImportedNode) -> Imported:
    """The placeholder."""
    return node.emit(Cotangent(), node.need(0))


@imports("CustomGradient", domain=DOMAIN)
def custom_gradient(node: ImportedNode) -> Imported:
    """The operators that depend on the placeholders leave the model, and become the body."""
    b, count = node.builder, len(node.outputs)
    ins = [v for v in node.inputs if v is not None]
    values, flowing, pairs = ins[:count], ins[count : 2 * count], ins[2 * count :]
    if None in node.inputs or len(flowing) != count or not pairs or len(pairs) % 2:
        raise node.fail("its inputs are not values, their gradients, and pairs of an input and its gradient")
    targets, grads = pairs[::2], pairs[1::2]
    names = {v.name for v in flowing}
    for o in b.operators:
        if any(v.name in names for v in o.reads()):
            names.update(v.name for v in o.writes())
    operators = [o for o in b.operators if any(v.name in names for v in o.writes()) and not isinstance(o.op, Cotangent)]
    body = leading_to(operators, grads)
    b.operators = [o for o in b.operators if not any(v.name in names for v in o.writes())]
    written = {v.name for o in body for v in o.writes()} | {v.name for v in flowing}
    constants = [c for c in b.constants if any(v.name == c.value.name for o in body for v in o.reads())]
    inner = written | {c.value.name for c in constants}
    read = [v for o in body for v in o.reads() if v.name not in inner] + [g for g in grads if g.name not in written]
    further = list({v.name: v for v in (*targets, *read)}.values())
    places = {v.name: i for i, v in enumerate(further)}
    block = Block(
        name="gradient",
        inputs=(*flowing, *further),
        constants=tuple(constants),
        operators=tuple(body),
        outputs=tuple(g.name for g in grads),
    )
    text = show(block)
    op = CustomGradient(count, tuple(places[t.name] for t in targets), text)
    return node.emit(op, *values, *further, want=count)
