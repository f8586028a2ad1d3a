"""The torch.compile backend beside eager PyTorch, bit by bit: results, gradients, buffers, inputs and random numbers.

Each case is a forward pass `f(module, *inputs)` with a difficulty of its own: changes in place, aliases, random
numbers, hooks, modes.  Where `aot_eager` itself differs from eager PyTorch, it is the reference (`like`).
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("ortools", reason="the planners' cuts need the extra `plan`")
from torch.utils.checkpoint import checkpoint  # noqa: E402

pytestmark = pytest.mark.slow
nn, F = torch.nn, torch.nn.functional


def mlp(n: int = 3) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(n)))


def convolutions(norm: nn.Module) -> nn.Module:
    parts = (nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), copy.deepcopy(norm), nn.ReLU(True)) for _ in range(4))
    return nn.Sequential(*parts)


def x(*shape: int) -> Any:
    return torch.randn(*(shape or (128, 64)))


def ids(n: int = 128) -> Any:
    return torch.randint(0, 9, (n,))


class Net(nn.Module):
    """A forward pass and what it may take: parts `n` and `m`, a norm, a buffer, a parameter, and a part `l`."""

    def __init__(self, f: Callable, part: nn.Module | None) -> None:
        super().__init__()
        self.f, self.n, self.m, self.b, self.l = f, mlp(), mlp(), nn.BatchNorm1d(64), part
        self.p = nn.Parameter(torch.ones(64))
        self.register_buffer("c", torch.ones(64))

    def forward(self, *inputs: Any) -> Any:
        return self.f(self, *inputs)


def tensors(tree: Any) -> list:
    return [t for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def total(out: Any) -> Any:
    """A loss of all results, each element with a weight of its own."""
    given = [t for t in tensors(out) if t.requires_grad]
    return sum((t.float() * torch.arange(t.numel()).reshape(t.shape).cos()).sum() for t in given)


def square(out: Any) -> Any:
    return out.float().square().sum()


def twice(call: Callable, module: nn.Module, inputs: Any, loss: Callable) -> list:
    """Two steps, the gradients of both added."""
    seen = []
    for seed in (5, 6):
        torch.manual_seed(seed)
        out = call(*inputs)
        loss(out).backward()
        seen += [t.detach().clone() for t in tensors(out)] + [torch.rand(3)]
    return seen


def trained(call: Callable, module: nn.Module, inputs: Any, loss: Callable) -> list:
    optimizer = torch.optim.AdamW(module.parameters())
    for step in range(6):
        torch.manual_seed(step)
        loss(call(*inputs)).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return []


def switched(call: Callable, module: nn.Module, inputs: Any, loss: Callable) -> list:
    """Training, evaluation, and without gradients."""
    seen = [*twice(call, module.train(), inputs, loss), *twice(call, module.eval(), inputs, loss)]
    with torch.no_grad():
        seen.append(call(*inputs))
    with torch.inference_mode():
        seen.append(call(*inputs).clone())
    return [*seen, *twice(call, module.train(), inputs, loss)]


def retained(call: Callable, module: nn.Module, inputs: Any, loss: Callable) -> list:
    """Two forward passes before two backward passes."""
    torch.manual_seed(1)
    out = call(*inputs) * call(*inputs)
    loss(out).backward(retain_graph=True)
    out.sum().backward()
    return [out.detach()]


def autocast(call: Callable, module: nn.Module, inputs: Any, loss: Callable) -> list:
    with torch.autocast("cpu", torch.bfloat16):
        out = call(*inputs)
    loss(out).backward()
    return [out.detach()]


def changed(call: Callable, module: nn.Module, inputs: Any, loss: Callable) -> list:
    """The caller changes a result that is a view of another."""
    whole, view = call(*inputs)
    view.mul_(2)
    loss(whole).backward()
    return [whole.detach()]


@dataclass
class Case:
    """`part` is the module's part `l`; `prepare` changes the module before it is compiled."""

    f: Callable = lambda s, x: s.n(x)
    inputs: Callable = lambda: x()
    part: Callable = lambda: None
    drive: Callable = twice
    loss: Callable = total
    prepare: Callable = lambda module: None
    budget: Any = 0.9
    like: str = ""


def run(case: Case, backend: str, **options: Any) -> list:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module, inputs = Net(case.f, case.part()), case.inputs()
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    case.prepare(module)
    call = torch.compile(module, backend=backend, dynamic=False, **options) if backend else module
    seen = case.drive(call, module, inputs, case.loss)
    held = [*module.parameters(), *module.buffers(), *tensors(inputs)]
    return [*seen, *(t.grad for t in held), *(t.detach() for t in held)]


def same(a: Any, b: Any) -> bool:
    if a is None or b is None:  # AOTAutograd has zeros for the gradient of what no used result depends on
        return all(t is None or not t.any() for t in (a, b))
    if a.is_sparse:
        return torch.equal(a.to_dense(), b.to_dense())
    alike = (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
    return alike and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))


def mix(draw: Callable, **options: Any) -> Case:
    """What `draw(y, x)` makes of the first part's result y goes on to the second part."""
    return Case(lambda s, x: s.m(draw(s.n(x), x)), **options)


def layer(part: Callable, f: Callable = lambda s, x: s.n(s.l(x)), inputs: Callable = x, **options: Any) -> Case:
    return Case(f, inputs, part, **options)


def norms(norm: Callable, **options: Any) -> Case:
    return layer(lambda: convolutions(norm()), lambda s, x: s.l(x), lambda: x(4, 8, 16, 16), **options)


def sequence(part: Callable, f: Callable = lambda part, y: part(y)[0]) -> Case:
    return layer(part, lambda s, x: f(s.l, s.n(x).view(16, 8, 64)))


def wrapped(wrap: Callable) -> Case:
    return layer(lambda: nn.Sequential(wrap(nn.Linear(64, 64)), wrap(nn.Linear(64, 64))))


def attention(y: Any, p: float) -> Any:
    return F.scaled_dot_product_attention(*(y.view(4, 8, 4, 64),) * 3, dropout_p=p).reshape(128, 64)


def hooked(module: nn.Module) -> None:
    module.n[1].register_forward_hook(lambda part, i, o: o * 2)
    module.n[0].register_forward_pre_hook(lambda part, i: (i[0] + 1,))


@torch.no_grad()
def quiet(f: Callable) -> Any:
    return f()


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(y := x.exp())
        return y

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return 3 * g * ctx.saved_tensors[0]


def again(f: Callable, x: Any) -> Any:
    return checkpoint(f, x, use_reentrant=False)


# fmt: off
CASES = {
    "plain": Case(),
    "input changed": Case(lambda s, x: s.n(x.mul_(2))),
    "input changed later": Case(lambda s, x: (s.n(x * 1), x.add_(1))[0].tanh()),
    "input view changed": Case(lambda s, x: (x[3:].mul_(2), s.n(x) + x.view(64, 128).view(128, 64))[1]),
    "input written": Case(lambda s, x, o: (y := s.n(x), o.copy_(y.detach()), s.m(y) + o)[2], lambda: (x(), x())),
    "inputs overlap": Case(lambda s, a, b: (a.mul_(2), s.n(a[:64]) * s.m(b[:64]))[1],
                           lambda: (lambda base: (base[:128], base[64:192]))(x(256, 64))),
    "buffer changed": Case(lambda s, x: (s.c.add_(1), s.n(x) * s.c)[1]),
    "buffer changed twice": Case(lambda s, x: (y := s.n(x * s.c.clone()), s.c.mul_(.5).add_(x.detach().mean(0)),
                                               z := s.m(y * s.c.clone()), s.c.add_(1), z * s.c)[4]),
    "buffer view changed": Case(lambda s, x: (s.c[:32].add_(x.detach()[0, :32]), s.n(x) * s.c)[1]),
    "buffer average": Case(lambda s, x: (y := s.n(x), quiet(lambda: s.c.lerp_(y.mean(0), .1)), s.m(y - s.c))[2]),
    "parameter changed": Case(lambda s, x: (y := s.n(x), quiet(lambda: s.p.add_(1)), y * s.p)[2]),
    "value changed": mix(lambda y, x: (y[:, :3].mul_(3), y.view(-1).add_(1), y.relu_())[2]),
    "index put": mix(lambda y, x: (y.index_put_((torch.arange(5),), x[0]), y.masked_fill_(x > 0, 0))[1]),
    "batch norm": norms(lambda: nn.BatchNorm2d(8)),
    "batch norm, both modes": norms(lambda: nn.BatchNorm2d(8), drive=switched),
    "batch norm, cumulative": norms(lambda: nn.BatchNorm2d(8, momentum=None)),
    "batch norm, no statistics": norms(lambda: nn.BatchNorm2d(8, track_running_stats=False)),
    "batch norm, channels last": norms(lambda: nn.BatchNorm2d(8),
                                       prepare=lambda m: m.l.to(memory_format=torch.channels_last)),
    "batch norm, shared": Case(lambda s, x: s.m(s.b(s.n(s.b(x)))), drive=switched),
    "instance norm": norms(lambda: nn.InstanceNorm2d(8, affine=True, track_running_stats=True)),
    "group norm": norms(lambda: nn.GroupNorm(2, 8)),
    "autocast outside": Case(drive=autocast, loss=square),
    "float64": Case(inputs=lambda: x().double(), prepare=lambda m: m.double()),
    "bfloat16": Case(inputs=lambda: x().bfloat16(), prepare=lambda m: m.bfloat16()),
    "results nested": Case(lambda s, x: {"a": (y := s.n(x)), "b": [s.m(y), y.sum()], "c": None, "d": 3}),
    "results, first used": Case(lambda s, x: (y := s.n(x), s.m(y)), loss=lambda o: square(o[0])),
    "results, last used": Case(lambda s, x: (y := s.n(x), s.m(y)), loss=lambda o: square(o[1])),
    "results of inputs": Case(lambda s, x: (s.n(x), x[:3], x.view(-1), x), loss=lambda o: square(o[0])),
    "results with gradient": Case(lambda s, x: (s.n(x), x), lambda: x().requires_grad_()),
    "results are views": Case(lambda s, x: ((y := s.n(x))[:3], y.t(), y)),
    "results are one": Case(lambda s, x: (y := s.n(x), y, y.detach())),
    "results are parameters": Case(lambda s, x: (s.n(x), s.n[0][0].weight, s.n[0][0].weight.t())),
    "result changed outside": Case(lambda s, x: (y := s.n(x), y[:3]), drive=changed),
    "graph break": mix(lambda y, x: (torch._dynamo.graph_break(), y)[1]),
    "graphs retained": mix(lambda y, x: F.dropout(y, .3), drive=retained),
    "trained": mix(lambda y, x: F.dropout(y, .3), drive=trained, loss=square),
    "frozen first": Case(prepare=lambda m: m.n[0].requires_grad_(False)),
    "frozen last": Case(prepare=lambda m: m.n[2].requires_grad_(False)),
    "frozen": Case(inputs=lambda: x().requires_grad_(), prepare=lambda m: m.requires_grad_(False)),
    "frozen by mode": Case(lambda s, x: s.m(quiet(lambda: s.n(x)))),
    "input gradient": Case(inputs=lambda: x().requires_grad_()),
    "part twice": Case(lambda s, x: s.n(s.n(x))),
    "layer shared": Case(prepare=lambda m: m.n.__setitem__(2, m.n[0])),
    "dropout": mix(lambda y, x: F.dropout(y, .3)),
    "dropout of all": mix(lambda y, x: F.dropout(y, 1.0), like="aot_eager"),
    "dropout of none": mix(lambda y, x: F.dropout(y, 0.0)),
    "dropout in place": mix(lambda y, x: F.dropout(y, .3, True, True)),
    "dropout of channels": mix(lambda y, x: F.dropout1d(y.view(4, 32, 64), .4).view(128, 64)),
    "alpha dropout": mix(lambda y, x: F.alpha_dropout(y, .3, True)),
    "attention": mix(lambda y, x: attention(y, 0.0)),
    "attention with dropout": mix(lambda y, x: attention(y, .2)),
    "bernoulli": mix(lambda y, x: y * torch.bernoulli(torch.sigmoid(x)) * torch.empty_like(x).bernoulli_(.4)),
    "normal": mix(lambda y, x: y * (1 + torch.randn_like(x)) + torch.zeros_like(x).normal_(1, 2)),
    "uniform": mix(lambda y, x: y * torch.empty_like(x).uniform_() * torch.empty_like(x).exponential_()),
    "permutation": mix(lambda y, x: y[torch.randperm(128)] * torch.randint(0, 3, (64,))),
    "multinomial": mix(lambda y, x: y[torch.multinomial(torch.ones(128), 64)]),
    "rrelu": mix(lambda y, x: F.rrelu(y, training=True)),
    "gumbel": mix(lambda y, x: F.gumbel_softmax(y) + F.gumbel_softmax(y, hard=True)),
    "seed inside": mix(lambda y, x: (torch.manual_seed(3), F.dropout(y, .3))[1], budget=1.0),
    "transposed": Case(inputs=lambda: x(64, 128).t()),
    "expanded": Case(inputs=lambda: x(1, 64).expand(128, 64)),
    "overlapping": Case(inputs=lambda: x(1000).as_strided((128, 64), (4, 1))),
    "slice": Case(inputs=lambda: x(200, 80)[3:131, 5:69]),
    "empty": Case(inputs=lambda: x(0, 64), budget=1.0),
    "number": layer(lambda: nn.Embedding(9, 64), lambda s, i, k: s.n(s.l(i)) * k, lambda: (ids(), 3)),
    "sparse gradients": layer(lambda: nn.Embedding(90, 64, sparse=True), inputs=ids),
    "embedding bag": layer(lambda: nn.EmbeddingBag(90, 64, mode="max"),
                           lambda s, i: s.n(s.l(i, torch.arange(0, 256, 2))), lambda: ids(256)),
    "hooks of parameters": Case(prepare=lambda m: [p.register_hook(lambda g: g * 2) for p in m.parameters()]),
    "hooks of parts": Case(prepare=hooked),
    "hook of gradients": Case(prepare=lambda m: m.n[1].register_full_backward_hook(lambda p, i, o: (i[0] * 2,))),
    "hook of a value": mix(lambda y, x: (y.register_hook(lambda g: g * 2), y)[1]),
    "checkpoint": Case(lambda s, x: s.m(again(lambda t: F.dropout(s.n(t), .3), x))),
    "checkpoints": Case(lambda s, x: again(s.m, again(s.n, x))),
    "checkpoint of statistics": Case(lambda s, x: s.m(again(lambda t: s.b(s.n(t)), x)), like="aot_eager"),
    "autograd function": mix(lambda y, x: Tripled.apply(y)),
    "weight norm": wrapped(nn.utils.parametrizations.weight_norm),
    "spectral norm": wrapped(nn.utils.parametrizations.spectral_norm),
    "old spectral norm": wrapped(nn.utils.spectral_norm),
    "rows by data": Case(lambda s, x: s.n(x[x[:, 0] > 0]), loss=square),
    "complex": mix(lambda y, x: torch.fft.irfft(torch.fft.rfft(y) * 2, n=64).tanh()),
    "lstm": sequence(lambda: nn.LSTM(64, 32, 2, dropout=.2, batch_first=True)),
    "gru": sequence(lambda: nn.GRU(64, 32, 2, batch_first=True)),
    "heads": sequence(lambda: nn.MultiheadAttention(64, 4, .2, batch_first=True), lambda f, y: f(y, y, y)[0]),
    "encoder": sequence(lambda: nn.TransformerEncoderLayer(64, 4, 128, .2, batch_first=True), lambda f, y: f(y)),
    "sorted": Case(lambda s, x: s.m(torch.sort(s.n(x), 0)[0]) + s.n(x).topk(64, 1)[0]),
    "condition": Case(lambda s, x: torch.cond(x.sum() > 0, s.n, s.m, (x,)), budget=1.0),
    "vmap": Case(lambda s, x: torch.vmap(s.n)(x)),
    "constants": mix(lambda y, x: y @ torch.ones(64, 64) + torch.eye(64)[3] + torch.arange(64)),
    "ctc": Case(lambda s, x: F.ctc_loss(s.n(x).view(32, 4, 64).log_softmax(-1), torch.ones(4, 8, dtype=torch.long),
                                        torch.full((4,), 32), torch.full((4,), 8))),
}
# fmt: on


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_bits_are_those_of_eager_pytorch(case: Case) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = run(case, "recompute", options={"budget": case.budget})
        theirs = run(case, case.like)
    assert [i for i, (a, b) in enumerate(zip(theirs, ours, strict=True)) if not same(a, b)] == []


def compiled(module: nn.Module) -> Any:
    torch._dynamo.reset()
    return torch.compile(module, backend="recompute", options={"budget": 0.9}, dynamic=False)


def test_what_pytorch_refuses_is_refused() -> None:
    given = x().requires_grad_()
    (slope,) = torch.autograd.grad(square(compiled(mlp())(given)), given, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        square(slope).backward()
    loss = square(compiled(mlp())(given))
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("through", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_compiled_modules_are_copied(through: Callable) -> None:
    module, given = mlp(), x()
    call = compiled(module)
    call(given).sum().backward()
    other = through(call)
    other.zero_grad()
    other(given).sum().backward()
    assert all(same(p.grad, q.grad) for p, q in zip(module.parameters(), other.parameters(), strict=True))


def test_data_parallel(tmp_path: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    parallel = nn.parallel.DistributedDataParallel
    module, given, seen = nn.Sequential(mlp(), nn.BatchNorm1d(64), nn.Dropout(0.3), mlp()), (x(),), []
    for call in (parallel, lambda m: parallel(compiled(m)), lambda m: compiled(parallel(m))):
        copied = copy.deepcopy(module)
        held = [*twice(call(copied), copied, given, total), *copied.buffers(), *(p.grad for p in copied.parameters())]
        seen.append(held)
    torch.distributed.destroy_process_group()
    assert all(same(a, b) and same(a, c) for a, b, c in zip(*seen, strict=True))
