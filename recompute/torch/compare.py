"""One forward and backward pass of a module, beside its program."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..language.program import Program
from ..language.types import DTYPES
from .call import INNER, Call, tensors_of
from .causes import functions, hooks
from .check_import import Wanted, beside, run_once, told

if TYPE_CHECKING:
    from torch.nn import Module

#: how far a gradient may be from its module's, if float64 has no difference
_KINK = 0.5
#: the loss of a module that has none: the sum of its outputs, each element times a number of its own
_PROBE = "recompute.probe"


@dataclass
class Result:
    """Sentences: what differs, what may be the cause, and why nothing was compared.

    `rounding`: only gradients differ, and rounding may be why: an activation that comes to lie on the other side of 0.
    """

    different: list[str] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    rounding: bool = False


def compare_with_module(program: Program, module: Module, call: Call, all_trained: bool) -> Result:
    """Compares outputs, gradients and buffers; the module and its random state are as before afterwards.

    Inputs are the example's, floating-point ones times 7/8: constants that an exporter took from the data show.

    `all_trained`: every parameter that requires gradients is trained in the program; else those are compared that are.
    """
    if draws := next((o for o in program.block.operators if o.op.random), None):
        return Result(skipped=[f"the program is not compared with its module, which draws random numbers ({draws.op})"])
    if len(program.inputs) != len(call.tensors()):
        return Result(skipped=["the program is not compared with its module: it reads other inputs than the example's"])
    call = _with_inputs(call, lambda x: x * 0.875)
    before = {n: _array(b) for n, b in module.named_buffers()}
    with _restored(module), _without_dropout():
        try:
            theirs = _module_step(module, call)
        except _Draws:
            return Result(skipped=["the program is not compared with its module, which draws random numbers"])
    probe = program
    if theirs.loss == _PROBE:
        probe = _with_probe(program, theirs)
    there = {v.name for v in program.block.parameters}
    gradients = {n: g for n, g in theirs.gradients.items() if all_trained or program.aliases.get(n, n) in there}
    feed = {v.name: _array(x).astype(DTYPES[v.dtype]) for v, x in zip(program.inputs, call.tensors(), strict=True)}
    outputs = {v.name: a for v, a in zip(program.outputs, theirs.outputs, strict=False)}
    if len(program.outputs) != len(theirs.outputs):
        outputs = {}
    loss = _PROBE if probe is not program else program.outputs[0].name
    kept = {n: b for n, b in theirs.buffers.items() if program.aliases.get(n, n) in program.data}
    kept |= {n: b for n, b in theirs.buffers.items() if not np.array_equal(b, before[n], equal_nan=b.dtype.kind == "f")}
    wanted = Wanted(feed, outputs, gradients, kept)
    outcome = run_once(probe, wanted, loss)
    lines = told(probe, outcome, wanted)
    double = in_float64(module, call) if lines and not hooks(module) else None  # copies have no hooks
    if double is not None:
        wanted = replace(wanted, exact=_exact(*double, outputs))
        lines = told(probe, outcome, wanted)
    causes = _causes(theirs) if lines else []
    near = bool(lines and double) and not told(probe, outcome, replace(wanted, rounding=_KINK))
    return Result(lines, causes, rounding=near)


class _Draws(Exception):
    """The module draws random numbers."""


@dataclass
class _Step:
    """Results of a module's own step."""

    outputs: list[np.ndarray]
    gradients: dict[str, np.ndarray | None]
    buffers: dict[str, np.ndarray]
    loss: str
    functions: list[str]


def _module_step(module: Module, call: Call) -> _Step:
    """One forward and backward pass."""
    import torch
    from torch.utils import _pytree as trees

    state = torch.get_rng_state()
    args, kwargs = trees.tree_map(_copy, (call.args, call.kwargs))
    for p in module.parameters():
        p.grad = None
    with torch.enable_grad():
        leaves = [t for t in trees.tree_leaves(call.module(*args, **kwargs)) if isinstance(t, torch.Tensor)]
        if not torch.equal(state, torch.get_rng_state()):
            raise _Draws
        floats = [t for t in leaves if t.is_floating_point()]
        probe = not floats or floats[0] is not leaves[0] or floats[0].numel() != 1
        loss = sum((t * _weights(t)).sum() for t in floats) if probe else floats[0].sum()
        named = list(functions(floats))
        if getattr(loss, "requires_grad", False):
            loss.backward()
    return _Step(
        [_array(t) for t in leaves],
        {n: None if p.grad is None else _view(p.grad) for n, p in module.named_parameters() if p.requires_grad},
        {n: _array(b) for n, b in module.named_buffers() if not n.endswith("num_batches_tracked")},
        _PROBE if probe else "",
        named,
    )


def _causes(theirs: _Step) -> list[str]:
    """Possible reasons in a module's own step why a program's differs."""
    causes = [f"the gradient that {n} defines by hand" for n in theirs.functions]
    infinite = (n for n, g in theirs.gradients.items() if g is not None and not np.isfinite(g).all())
    return [*causes, *(f"the module's own gradient of '{n}' is not finite" for n in list(infinite)[:1])]


def in_float64(module: Module, call: Call) -> tuple[Any, Call] | None:
    """Copies of a module and its call in float64; None where it has no other type, or cannot be copied."""
    import torch

    if all(t.dtype == torch.float64 for t in tensors_of(module).values() if t.is_floating_point()):
        return None
    try:
        whole = copy.deepcopy(call.module).double()
    except Exception:
        return None
    double = replace(_with_inputs(call, lambda x: x.double()), module=whole)
    return (whole if call.module is module else getattr(whole, INNER)), double


def _exact(module: Module, double: Call, outputs: Mapping[str, np.ndarray]) -> dict[tuple[str, str], np.ndarray]:
    """Results of a module in float64, by kind and name; {} if it computes in another type only."""
    try:
        with _restored(module), _without_dropout():
            outcome = _module_step(module, double)
    except Exception:
        return {}
    arrays = {("output", n): a for n, a in zip(outputs, outcome.outputs, strict=False)}
    arrays |= {("gradient of", n): g for n, g in outcome.gradients.items() if g is not None}
    return arrays | {("buffer", n): b for n, b in outcome.buffers.items()}


def _with_inputs(call: Call, change: Callable[[Any], Any]) -> Call:
    """The call with its floating-point examples changed."""
    import torch
    from torch.utils import _pytree as trees

    def changed(x: Any) -> Any:
        return change(x.detach()) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    args, kwargs = trees.tree_map(changed, (call.args, call.kwargs))
    return replace(call, args=args, kwargs=kwargs)


@contextlib.contextmanager
def _restored(module: Module) -> Iterator[None]:
    """The module's buffers and gradients, and PyTorch's random state, as before."""
    import torch

    buffers = [(b, b.detach().clone()) for b in module.buffers()]
    changes = _renormalised(module)
    parameters = [(p, p.grad, p.detach().clone() if changes else None) for p in module.parameters()]
    try:
        with torch.random.fork_rng():
            yield
    finally:
        with torch.no_grad():
            for b, before in buffers:
                b.copy_(before)
            for p, grad, kept in parameters:
                p.grad = grad
                if kept is not None:
                    p.copy_(kept)


def _renormalised(module: Module) -> bool:
    """Whether `forward` changes parameters: embeddings with a largest norm."""
    return any(getattr(m, "max_norm", None) is not None for m in module.modules())


def _without_dropout() -> Any:
    """Within: PyTorch's functions drop nothing."""
    import torch
    from torch.overrides import TorchFunctionMode

    class WithoutDropout(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            name = getattr(func, "__name__", "")
            if "dropout" in name and "backward" not in name and args:  # in place or not: x itself
                return args[0]
            if func is torch.Tensor.bernoulli_ or func is torch.bernoulli:  # stochastic depth divides by it
                p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
                return args[0].fill_(p) if func is torch.Tensor.bernoulli_ else args[0]
            if name in _WITH_DROPOUT:
                position, word = _WITH_DROPOUT[name]
                if word == "dropout" and len(args) > 3 and not isinstance(args[3], bool):
                    position += 1  # of packed sequences, whose batch sizes come second
                if len(args) > position:
                    args = (*args[:position], 0.0, *args[position + 1 :])
                else:
                    kwargs[word] = 0.0
            return func(*args, **kwargs)

    return WithoutDropout()


#: functions with an argument for dropout: its position and its name
_WITH_DROPOUT = {
    "scaled_dot_product_attention": (4, "dropout_p"),
    "multi_head_attention_forward": (10, "dropout_p"),
    "lstm": (5, "dropout"),
    "gru": (5, "dropout"),
    "rnn_tanh": (5, "dropout"),
    "rnn_relu": (5, "dropout"),
}


def _copy(x: Any) -> Any:
    import torch

    return x.detach().clone() if isinstance(x, torch.Tensor) else x


def _array(t: Any) -> np.ndarray:
    """A copy of a tensor's elements; what NumPy has no type for, in 32 bits."""
    return _view(t).copy()


def _view(t: Any) -> np.ndarray:
    """A tensor's elements, of one that nothing writes to; what NumPy has no type for, in 32 bits."""
    import torch

    t = t.detach().cpu()
    if t.is_sparse:
        t = t.to_dense()
    return (t.float() if t.dtype == torch.bfloat16 else t).numpy(force=True)  # of sgn PyTorch gives a "ZeroTensor"


def _weights(t: Any) -> Any:
    """Numbers between 0.5 and 1.5, one an element, the same for every batch."""
    import torch

    count = torch.arange(t.numel(), dtype=torch.float64).reshape(t.shape)
    return (1 + 0.5 * torch.cos(1.7 * count + 0.3)).to(t.dtype).to(t.device)


def _with_probe(program: Program, theirs: _Step) -> Program:
    """A copy of the program with the loss that stands for its outputs."""
    probe = beside(program)
    weighted = []
    for i, v in enumerate(v for v in program.outputs if v.dtype in ("f16", "bf16", "f32", "f64")):
        count = np.arange(v.value.type.size, dtype=np.float64).reshape(v.shape)
        weights = (1 + 0.5 * np.cos(1.7 * count + 0.3)).astype(DTYPES[v.dtype])
        weighted.append((v.value, probe.declare("buffers", f"{_PROBE}.{i}", weights)))
    b = probe.builder(prefix=_PROBE)
    parts = [b.ReduceSum(b.Mul(v, w), axes=tuple(range(v.ndim)), keepdims=0) for v, w in weighted]
    total = parts[0]
    for part in parts[1:]:
        total = b.Add(total, part if part.dtype == total.dtype else b.Cast(part, to=total.dtype))
    b.operators[-1] = b.operators[-1].renamed({total.name: _PROBE})
    probe.append(b, outputs=(_PROBE,))
    return probe
