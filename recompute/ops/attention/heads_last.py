"""Attention in tiles whose heads lie beside each other: [..., t, heads, d] where TiledAttention has [..., heads, t, d].

That is how products with weights write and read them: a kernel that goes from one query to the next by a step of its
own needs no Transposes around it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from ...language.layouts import permuted
from ...language.op import Op
from ...language.types import need
from ..channels_last import Laid, copied_fields
from .tiled import TiledAttention
from .tiled_grad import TiledAttentionGrad

if TYPE_CHECKING:
    from ...language.ir import Operator

#: operator class → what those of its inputs and outputs are called that are matrices of queries or keys, "" for others
NAMES: dict[type[Op], tuple[tuple[str, ...], tuple[str, ...]]] = {
    TiledAttention: (("q", "k", "v", "", ""), ("y", "")),
    TiledAttentionGrad: (("q", "k", "v", "", "y", "", "dy", ""), ("dq", "dk", "dv", "")),
}
#: the numbers of these inputs and outputs
MATRICES = {c: tuple(tuple(i for i, n in enumerate(x) if n) for x in both) for c, both in NAMES.items()}


def swapped(ndim: int) -> tuple[int, ...]:
    """The permutation of axes that swaps the heads' and the queries'."""
    return (*range(ndim - 3), ndim - 2, ndim - 3, ndim - 1)


class HeadsLast(Laid, abstract=True):
    """The operator `plain_class` with some inputs (`activations`) and outputs (`results`) [..., t, heads, d]."""

    laid, unlaid = staticmethod(swapped), staticmethod(swapped)

    @property
    def random(self) -> bool:
        """Whether weights are left out at random."""
        return self.plain.random

    def infer(self, *inputs):
        """The plain operator's, turned.  TypeRuleError for operands that are no matrices, or named twice."""
        for places, which in zip((self.activations, self.results), MATRICES[self.plain_class], strict=True):
            if list(places) != [i for i in which if i in places]:
                raise self.fail(f"activations and results are some of {MATRICES[self.plain_class]}, in order", *inputs)
        return super().infer(*inputs)

    @classmethod
    def samples(cls, draw):
        """The plain operator's with all inputs and outputs turned, and with the first ones only."""
        for case in cls.plain_class.samples(draw):
            if need(case.inputs[0]).ndim < 3:
                continue
            ins, outs = MATRICES[cls.plain_class]
            for some in (ins, outs), (ins[:1], ()), ((), outs[-1:]):
                yield cls.laid_sample(case, heads_last_form(case.op, *some))


def _form(cls: type[Op]) -> type[HeadsLast]:
    fields = copied_fields(cls)
    fields += [(n, "tuple[int, ...]", dataclasses.field(default=())) for n in ("activations", "results")]
    namespace = {"required_outputs": cls.required_outputs, "plain_class": cls, "__module__": __name__}
    namespace["__doc__"] = f"{cls.__name__} with the matrices of some operands [..., t, heads, d]."
    return dataclasses.make_dataclass(
        f"HeadsLast{cls.__name__}", fields, bases=(HeadsLast,), namespace=namespace, frozen=True
    )


HeadsLastTiledAttention, HeadsLastTiledAttentionGrad = map(_form, NAMES)
#: operator class → its form
FORMS = {form.plain_class: form for form in (HeadsLastTiledAttention, HeadsLastTiledAttentionGrad)}


def heads_last_form(op: Op, activations: tuple[int, ...], results: tuple[int, ...]) -> HeadsLast:
    """The form of an operator of which these inputs and outputs are turned."""
    form: Any = FORMS[type(op)]
    return form(**op.options(), activations=activations, results=results)


def plain_operator(op: Operator) -> tuple[Operator, dict[str, int]]:
    """The operator whose matrices follow each other, for kernels; how many lie beside each other by operands' names."""
    form = op.op
    if not isinstance(form, HeadsLast):
        return op, {}
    beside, values = {}, [list(op.inputs), list(op.outputs)]
    for places, which, names in zip(values, (form.activations, form.results), NAMES[form.plain_class], strict=True):
        for i in which:
            if i < len(places) and (v := places[i]) is not None:
                beside[names[i]] = v.shape[-2]
                places[i] = dataclasses.replace(v, type=permuted(v.type, swapped(v.ndim)))
    return dataclasses.replace(op, op=form.plain, inputs=tuple(values[0]), outputs=tuple(values[1])), beside
