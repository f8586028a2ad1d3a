"""Automatic choice of tensor-parallel shardings: pairs of products, the stream between them, experts.

A candidate is a weight whose columns (output channels) are cut, at some granularity; it is divided for trial together
with the operators after it (divide.py), where everything that belongs to it follows: biases, the other weights of the
same heads, the rows of the second weight of the pair.  A candidate is good if at least two products are divided, and
their parts meet in sums alone: nothing has to be gathered.  So heads that cannot be shared equally are no candidates.
Among those of a weight the one that sends least for each product is taken.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...language.axes import Cut
from ...language.ir import Block, Operator, Role, Value
from ...ops.convolution.conv import Conv
from ...ops.linear.products import Gemm, MatMul
from ...ops.shape.reshape import Cast
from .divide import Divided, divide
from .reshard import Division
from .vocabulary import vocabularies

#: operators after a weight's product among which its pair must end
WINDOW = 96
#: equal blocks that a weight's columns may consist of, such as queries, keys and values
BLOCKS = (1, 3, 2)


def choose(block: Block, how: Division, sequence: bool = True) -> dict[str, Cut]:
    """Parameters and activations of a forward pass to be cut along the axis of a mesh."""
    if how.axis == "cp":
        return of_inputs(block, how)
    if how.axis == "ep":
        return experts(block, how)
    forward = [o for o in block.operators if o.role in (Role.FORWARD, Role.LOSS)]
    cuts = pairs(block, forward, how)
    if cuts:
        cuts = {**vocabularies(block, how), **cuts}
    return {**cuts, **stream(block, forward, how, cuts)} if sequence and cuts else cuts


def of_inputs(block: Block, how: Division) -> dict[str, Cut]:
    """The second axis of all inputs: the sequence (context parallelism)."""
    sizes = [v.shape[1] for v in block.inputs if v.ndim > 1]
    cuts = {v.name: how.cut(v.type, 1) for v in block.inputs if v.ndim > 1 and v.shape[1] == sizes[0]}
    return {n: c for n, c in cuts.items() if c is not None}


def experts(block: Block, how: Division) -> dict[str, Cut]:
    """The first axis of weights that are batches of matrices."""
    weights = {v.name: v for v in block.parameters if v.ndim == 3}
    casts = {next(o.writes()).name: next(o.reads()).name for o in block.operators if isinstance(o.op, Cast)}
    read = {casts.get(v.name, v.name) for o in block.operators if isinstance(o.op, MatMul) for v in o.reads()}
    cuts = {n: how.cut(weights[n].type, 0) for n in weights if n in read}
    return {n: c for n, c in cuts.items() if c is not None}


# -- pairs ------------------------------------------------------------------------------------------------------------


def pairs(block: Block, forward: Sequence[Operator], how: Division) -> dict[str, Cut]:
    """Weights whose columns are cut, each with all that follows from it."""
    parameters = {v.name: v for v in block.parameters}
    made_of = {
        next(o.writes()).name: o for o in forward if isinstance(o.op, Cast) and next(o.reads()).name in parameters
    }
    casts = {name: next(o.reads()).name for name, o in made_of.items()}
    cuts: dict[str, Cut] = {}
    trials: dict[object, tuple[int, list[tuple[str, int, Cut]]] | None] = {}
    for i, o in enumerate(forward):
        name = _weight(o, parameters, casts)
        if name is None or name in cuts:
            continue
        window = tuple(forward[i : i + WINDOW])
        names = _numbered(window, casts)
        key = tuple(
            (p.op, tuple(None if v is None else (names[v.name], v.type) for v in p.inputs)) for p in window[:24]
        )
        read = {v.name for p in window for v in p.reads()}
        window = (*(c for n, c in made_of.items() if n in read and c not in window), *window)
        if key not in trials:
            best_pair = _best(block, window, how, parameters[name], o)
            trials[key] = None if best_pair is None else (0, [(n, names.get(n, -1), c) for n, c in best_pair.items()])
        same = trials[key]
        if same is not None:
            by_number = {k: n for n, k in names.items()}
            for original, number, cut in same[1]:
                target = by_number.get(number, original)
                if target in parameters and parameters[target].type == _whole(cut, parameters[target]):
                    cuts[target] = cut
    return cuts


def _whole(cut: Cut, v: Value) -> object:
    """The type of a parameter if a cut fits it."""
    p = cut.place
    return v.type if p.axis < v.ndim and v.shape[p.axis] == p.extent(cut.size) else None


def _numbered(window: Sequence[Operator], casts: dict[str, str]) -> dict[str, int]:
    """Numbers of values in the order in which operators use them: the same ones in layers of the same structure.

    A parameter that is cast has the number behind that of what it is cast to.
    """
    numbers: dict[str, int] = {}
    for o in window:
        for v in (*o.reads(), *o.writes()):
            for name in (v.name, casts.get(v.name, v.name)):
                numbers.setdefault(name, len(numbers))
    return numbers


def _weight(o: Operator, parameters: dict[str, Value], casts: dict[str, str]) -> str | None:
    """The parameter that is the weight of a product."""
    if not isinstance(o.op, (MatMul, Gemm, Conv)) or len(o.inputs) < 2 or o.inputs[1] is None:
        return None
    name = casts.get(o.inputs[1].name, o.inputs[1].name)
    return name if name in parameters and parameters[name].ndim >= 2 else None


def _best(block: Block, window: tuple[Operator, ...], how: Division, w: Value, o: Operator) -> dict[str, Cut] | None:
    """The cuts of parameters that follow from the best one of a weight's columns; None without a good one."""
    axis = 0 if isinstance(o.op, Conv) or (isinstance(o.op, (MatMul, Gemm)) and o.op.transB) else w.ndim - 1
    trial = Block("trial", inputs=_free(block, window), parameters=block.parameters, buffers=block.buffers,
                  state=block.state, constants=block.constants, operators=window)  # fmt: skip
    best: tuple[float, dict[str, Cut]] | None = None
    for blocks in BLOCKS:
        cut = how.cut(w.type, axis, blocks)
        if cut is None:
            continue
        divided = divide(trial, how, {w.name: cut}, whole=())
        products = _products(trial, divided)
        if products < 2 or divided.gathered:
            continue
        declared = {v.name for v in (*block.parameters, *block.buffers)}
        price = divided.sent / products
        if best is None or price < best[0]:
            best = price, {n: c for n, c in divided.cuts.items() if n in declared}
    return None if best is None else best[1]


def _free(block: Block, window: Sequence[Operator]) -> tuple[Value, ...]:
    """The values that a part of a block reads from operators before it."""
    declared = {v.name for v in block.persistent()}
    written: set[str] = set()
    values: dict[str, Value] = {}
    for o in window:
        values.update((v.name, v) for v in o.reads() if v.name not in written and v.name not in declared)
        written.update(v.name for v in o.writes())
    return tuple(values.values())


def _products(trial: Block, made: Divided) -> int:
    """How many products have a weight that is cut."""
    count = 0
    for o in trial.operators:
        if isinstance(o.op, (MatMul, Gemm, Conv)):
            count += any(v.name in made.cuts for v in list(o.reads())[1:2])
    return count


# -- the stream between pairs -----------------------------------------------------------------------------------------


def stream(block: Block, forward: Sequence[Operator], how: Division, cuts: dict[str, Cut]) -> dict[str, Cut]:
    """The values of three axes that pairs add to, cut along the second one: sequence parallelism.

    These are the sums of pairs, and what the first of them is added to.
    """
    readers: dict[str, list[Operator]] = {}
    for o in forward:
        for v in o.reads():
            readers.setdefault(v.name, []).append(o)
    trial = Block("trial", block.inputs, block.parameters, block.buffers, block.state, block.constants, tuple(forward))
    sums = divide(trial, how, cuts, whole=()).sums
    result: dict[str, Cut] = {}
    for v in sums:
        cut = how.cut(v.type, 1) if v.ndim == 3 else None
        if cut is None:
            continue
        if not result and (other := _added_to(v, readers)) is not None:
            result[other] = cut
        result[v.name] = cut
    return result


def _added_to(v: Value, readers: dict[str, list[Operator]]) -> str | None:
    """The value that a sum is added to, behind a bias and dropout."""
    declared = v.name
    for _ in range(4):
        later = readers.get(declared, [])
        if not later:
            return None
        o = later[0]
        other = next((w for w in o.reads() if w.name != declared and w.type == v.type), None)
        if other is not None:
            return other.name
        declared = next(o.writes()).name
    return None
