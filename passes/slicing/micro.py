"""Micro-batches: slices of the batch that take batch statistics of their own, as steps on them one by one would."""

from __future__ import annotations

from ...language.axes import Cut, Followed, Partial
from ...language.factors import OWN, Factor, Place
from ...language.ir import Operator

_OWN = Partial(OWN)


def with_own_statistics(state: Followed, i: int, o: Operator) -> bool:
    """Whether an operator runs for each micro-batch because of statistics: it takes them, or reads nothing else that
    micro-batches have.  Takes note of its results in `state`.

    An update of running statistics is such an operator: it runs once for each, in order.
    """
    states = [None if v is None else state.states.get(v.name) for v in o.inputs]
    ins, outs = o.types
    absent = (None,) * (len(o.op.infer(*ins)) - len(outs))
    f = o.op.own_slice(ins, (*outs, *absent))
    if f is not None and any(isinstance(s, Cut) for s in states):
        wanted = [Cut(p, f.size) if isinstance(p, Place) else _OWN for p in f.inputs]
        if all(s is None or s == w for s, w in zip(states, wanted, strict=True)):
            _noted(state, i, o, f)
            return True
    present = [s for s in states if s is not None]
    if present and all(s == _OWN for s in present):
        _noted(state, i, o, Factor(1, (None,) * len(ins), tuple(None if t is None else OWN for t in outs)))
        return True
    for k, s in enumerate(states):  # each micro-batch reads its own
        if s == _OWN:
            state.needs.pop((i, k), None)
    return False


def _noted(state: Followed, i: int, o: Operator, f: Factor) -> None:
    """Sets the factor of an operator, and the states of what it writes."""
    state.factors[i] = f
    for k, p in enumerate(f.inputs):
        state.needs.pop((i, k), None)
        state.cuts.pop((i, k), None)
        v = o.inputs[k]
        if v is not None and isinstance(p, Place) and v.name not in state.states:  # a whole value, read in slices
            state.cuts[i, k] = Cut(p, f.size)
    for v, at in zip(o.outputs, f.outputs, strict=False):
        if v is not None and at is not None and not o.op.updates:
            state.states[v.name] = Cut(at, f.size) if isinstance(at, Place) else Partial(at)
