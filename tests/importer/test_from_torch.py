"""`from_torch` beside PyTorch, where it is installed: what is right, and planted differences that are found."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import recompute as rc

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")
sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "small_cases"))
from beside import Net  # noqa: E402

nn, F = torch.nn, torch.nn.functional


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return -g


class Sign(torch.autograd.Function):
    """With `setup_context`, and the gradient within [-1, 1] only."""

    @staticmethod
    def forward(x: Any) -> Any:
        return x.sign()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        (x,) = ctx.saved_tensors
        return torch.where(x.abs() <= 1, g, 0.0)


class Both(torch.autograd.Function):
    """Two inputs, two outputs, an argument, and gradients that are not the function's."""

    @staticmethod
    def forward(ctx: Any, x: Any, y: Any, factor: float) -> Any:
        ctx.save_for_backward(x, y)
        ctx.factor = factor
        return x * y, x + y

    @staticmethod
    def backward(ctx: Any, p: Any, s: Any) -> Any:
        x, y = ctx.saved_tensors
        return ctx.factor * p * y + s, p * x - s, None


class InPlace(torch.autograd.Function):
    """Changes its input."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return 3 * g


def _moving(m: Any, x: Any) -> Any:
    h = m.a(x)
    with torch.no_grad():
        m.m.mul_(0.9).add_(0.1 * h.mean(0))
        m.seen.add_(1)
    return (h - m.m).pow(2).mean()


def _written(m: Any, x: Any) -> Any:
    h = m.a(x)
    m.m.copy_(h.detach().max(0).values)
    return h.pow(2).mean()


def _two(m: Any, x: Any) -> Any:
    p, s = Both.apply(m.a(x), m.b(x), 3.0)
    return (p * s).pow(2).mean()


Y = torch.tensor([0, 1, 2, 0, 1])
IDS = torch.tensor([[0, 0, 3, 2], [5, 0, 0, 1]])
SOFT = torch.softmax(torch.arange(15.0).reshape(5, 3) / 7, 1)
CLASSES = torch.tensor([0.5, 1.0, 2.0])
LABELS, LENGTHS = torch.tensor([[1, 2], [2, 2]]), ((6, 5), (2, 1))


def _a() -> Any:
    return nn.Linear(4, 3)


def _x() -> tuple[Any, ...]:
    return (torch.randn(5, 4),)


def _mean(m: Any, x: Any) -> Any:
    return m.b(m.a(x)).pow(2).mean()


#: name: (module, inputs); each trains as in PyTorch
RIGHT: dict[str, tuple[Callable[[], Any], Callable[[], tuple[Any, ...]]]] = {
    "label smoothing": (lambda: Net(lambda m, x: F.cross_entropy(m.a(x), Y, label_smoothing=0.2), a=_a()), _x),
    "label smoothing, weights, ignored": (
        lambda: Net(
            lambda m, x: F.cross_entropy(m.a(x), Y, CLASSES.double(), label_smoothing=0.1, ignore_index=0), a=_a()
        ),
        _x,
    ),
    "soft labels": (lambda: Net(lambda m, x: F.cross_entropy(m.a(x), SOFT.double()), a=_a()), _x),
    "padding_idx": (
        lambda: Net(lambda m, x: m.a(m.e(x).mean(1)).pow(2).mean(), e=nn.Embedding(7, 4, padding_idx=0), a=_a()),
        lambda: (IDS,),
    ),
    "projected LSTM": (
        lambda: Net(lambda m, x: m.a(x)[0].pow(2).mean(), a=nn.LSTM(4, 5, proj_size=3, batch_first=True)),
        lambda: (torch.randn(3, 4, 4),),
    ),
    "divisor_override": (
        lambda: Net(lambda m, x: F.avg_pool2d(m.c(x), 2, divisor_override=3).pow(2).mean(), c=nn.Conv2d(1, 2, 3)),
        lambda: (torch.randn(2, 1, 6, 6),),
    ),
    "ctc, labels one after the other": (
        lambda: Net(lambda m, x: F.ctc_loss(F.log_softmax(m.a(x), -1), torch.tensor([1, 2, 2]), *LENGTHS), a=_a()),
        lambda: (torch.randn(6, 2, 4),),
    ),
    "ctc of what is not normalised": (
        lambda: Net(
            lambda m, x: F.ctc_loss(m.a(x) - 2, LABELS, *map(torch.tensor, LENGTHS), 0, "sum", zero_infinity=True),
            a=_a(),
        ),
        lambda: (torch.randn(6, 2, 4),),
    ),
    "cdist": (
        lambda: Net(
            lambda m, x: torch.cdist(m.a(x), m.c).min(1).values.mean(), a=_a(), c=nn.Parameter(torch.randn(4, 3))
        ),
        _x,
    ),
    "gradient reversal": (
        lambda: Net(lambda m, x: m.b(Reversed.apply(m.a(x))).pow(2).mean(), a=_a(), b=nn.Linear(3, 1)),
        _x,
    ),
    "straight-through": (
        lambda: Net(lambda m, x: m.b(Sign.apply(m.a(x))).pow(2).mean(), a=_a(), b=nn.Linear(3, 1)),
        _x,
    ),
    "two outputs": (lambda: Net(_two, a=_a(), b=_a()), _x),
    "moving average": (lambda: Net(_moving, a=_a(), m=torch.zeros(3), seen=torch.tensor(0)), _x),
    "written buffer": (lambda: Net(_written, a=_a(), m=torch.zeros(3)), _x),
    "padded attention": (
        lambda: Net(
            lambda m, x: m.a(x, x, x, key_padding_mask=IDS[:, :2] == 5)[0].pow(2).mean(),
            a=nn.MultiheadAttention(4, 2, batch_first=True),
        ),
        lambda: (torch.randn(2, 2, 4),),
    ),
    "spectral norm": (lambda: Net(_mean, a=nn.utils.spectral_norm(_a()), b=nn.Linear(3, 1)), _x),
    "siamese batch normalisation": (
        lambda: Net(lambda m, x: (m.n(m.a(x)) - m.n(m.a(2 * x) + 1)).pow(2).mean(), a=_a(), n=nn.BatchNorm1d(3)),
        _x,
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_trains_as_in_pytorch(name: str) -> None:
    """Three steps of SGD in float64: losses, parameters and buffers."""
    torch.manual_seed(0)
    module = RIGHT[name][0]().double().train()
    inputs = tuple(x.double() if x.is_floating_point() else x for x in RIGHT[name][1]())
    theirs = copy.deepcopy(module)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.125)
    program = rc.from_torch(module, inputs)
    rc.SGD(0.125).minimize(program.outputs[0])
    feed = {v.name: x.numpy() for v, x in zip(program.inputs, inputs, strict=True)}
    executor = rc.Executor()
    for _ in range(3):
        optimizer.zero_grad()
        loss = theirs(*inputs)
        loss.backward()
        optimizer.step()
        np.testing.assert_allclose(executor.run(program, feed, [program.outputs[0]])[0], loss.item(), rtol=1e-6)
    rc.write_back(program, module)
    for (n, ours), other in zip(module.state_dict().items(), theirs.state_dict().values(), strict=True):
        np.testing.assert_allclose(ours.numpy(), other.numpy(), rtol=1e-6, atol=1e-9, err_msg=n)


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_strides_are_those_of_memory(exporter: str) -> None:
    """Exporters take the tensor for one without gaps: overlapping windows of a transposed one."""
    module = Net(lambda m, x: m.a(x).t().as_strided((2, 2, 3), (6, 1, 3), 1).pow(2).mean(), a=_a())
    rc.from_torch(module, _x(), exporter=exporter)


def test_slices_leave_the_batch_open() -> None:
    """PyTorch computes their shapes by as_strided."""

    def forward(m: Any, x: Any) -> Any:
        h = m.a(x)
        return torch.cat([h[:, 1:].flatten(), h.unbind(1)[0], h.split(2, 1)[0].exp().flatten(), h[h > 0]]).pow(2).sum()

    with warnings.catch_warnings():
        warnings.simplefilter("error", rc.ModelWarning)
        program = rc.from_torch(Net(forward, a=_a()), _x())
    assert program.source.graph.input[0].type.tensor_type.shape.dim[0].dim_param


def test_strides_outside_of_their_tensor_are_refused() -> None:
    module = Net(lambda m, x: m.a(x)[1:].as_strided((2, 3), (3, 1), 0).pow(2).mean(), a=_a())
    with pytest.raises(rc.ModelError, match="as_strided reads memory that its tensor does not have"):
        rc.from_torch(module, _x(), exporter="torchscript")


@pytest.mark.parametrize(
    ("factor", "types", "kind", "right"),
    [
        (1.1, "f4", "gradient of", True),
        (2.0, "f4", "gradient of", False),
        (1.1, "f4f8", "gradient of", False),
        (1.1, "f4", "output", False),
    ],
)
def test_what_differs_in_float32_only_is_rounding(
    factor: float, types: str, kind: str, right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients, up to half of their magnitude; a ReLU at 0 does that."""
    from recompute.torch import compare

    def run_once(*given: Any) -> Any:
        found = compare_run_once(*given)
        return {k: a * factor if k[0] == kind and a.dtype.str[1:] in types else a for k, a in found.items()}

    compare_run_once = compare.run_once
    monkeypatch.setattr(compare, "run_once", run_once)
    module = Net(_mean, a=_a(), b=nn.Linear(3, 1))
    if right:
        rc.from_torch(module, _x())
        return
    with pytest.raises(rc.ModelError, match=f"{kind} '.*' differs"):
        rc.from_torch(module, _x())


def _hooked(m: Any, x: Any) -> Any:
    h = m.a(x)
    if h.requires_grad:
        h.register_hook(lambda g: g * 10)
    return m.b(h).pow(2).mean()


def _with(change: Callable[[Any], Any]) -> Any:
    m = Net(_mean, a=_a(), b=nn.Linear(3, 1))
    change(m)
    return m


def _tripled(p: Any) -> None:
    p.grad.mul_(3)


def _half_gradient(m: Any) -> None:
    m.a.weight.register_hook(lambda g: g / 2)


def _bag() -> Any:
    bag = nn.EmbeddingBag(7, 4, scale_grad_by_freq=True, mode="sum")
    return Net(lambda m, x: m.a(m.e(x)).pow(2).mean(), e=bag, a=_a())


def _checkpointed_noise(m: Any, x: Any) -> Any:
    return m.b(m.a(x) + m.a(x).detach().numpy().sum().item()).pow(2).mean()


class Patched(torch.autograd.Function):
    """A gradient through NumPy, which nothing can trace."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return torch.from_numpy(np.tanh(x.detach().numpy()))

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return g


#: differences that no export shows: each is an error that names what differs, or why it cannot be exported
PLANTED: dict[str, tuple[Callable[[], Any], Callable[[], tuple[Any, ...]]]] = {
    "hook of a value": (lambda: Net(_hooked, a=_a(), b=nn.Linear(3, 1)), _x),
    "hook of a parameter": (lambda: _with(_half_gradient), _x),
    "hook of a bias": (lambda: _with(lambda m: m.b.bias.register_hook(torch.zeros_like)), _x),
    "hook after accumulation": (lambda: _with(lambda m: m.a.bias.register_post_accumulate_grad_hook(_tripled)), _x),
    "backward hook": (
        lambda: _with(lambda m: m.b.register_full_backward_hook(lambda m, given, made: (2 * given[0],))),
        _x,
    ),
    "backward hook before": (
        lambda: _with(lambda m: m.b.register_full_backward_pre_hook(lambda m, g: (g[0] * 0.5,))),
        _x,
    ),
    "function in place": (
        lambda: Net(lambda m, x: m.b(InPlace.apply(m.a(x) * 1)).pow(2).mean(), a=_a(), b=nn.Linear(3, 1)),
        _x,
    ),
    "function in NumPy": (
        lambda: Net(lambda m, x: m.b(Patched.apply(m.a(x))).pow(2).mean(), a=_a(), b=nn.Linear(3, 1)),
        _x,
    ),
    "constant from data": (lambda: Net(_checkpointed_noise, a=_a(), b=nn.Linear(3, 1)), _x),
    "bag by frequency": (_bag, lambda: (IDS,)),
    "embedding by frequency": (
        lambda: Net(lambda m, x: m.a(m.e(x)).pow(2).mean(), e=nn.Embedding(7, 4, scale_grad_by_freq=True), a=_a()),
        lambda: (IDS,),
    ),
    "max_norm": (
        lambda: Net(lambda m, x: m.a(m.e(x)).pow(2).mean(), e=nn.Embedding(7, 4, max_norm=0.5), a=_a()),
        lambda: (IDS,),
    ),
    "cumulative statistics": (
        lambda: Net(lambda m, x: m.n(m.a(x)).pow(2).mean(), a=_a(), n=nn.BatchNorm1d(3, momentum=None)),
        _x,
    ),
    "gradient penalty": (
        lambda: Net(
            lambda m, x: (
                torch.autograd.grad(torch.tanh(m.a(x.requires_grad_(True))).sum(), x, create_graph=True)[0]
                .norm(dim=1)
                .mean()
            ),
            a=_a(),
        ),
        _x,
    ),
}


#: what TorchScript's exporter loses, of modules that the other one keeps
BY_TORCHSCRIPT = {
    "detach": (
        lambda: Net(lambda m, x: m.b(m.a(x).detach() + m.a(x)).pow(2).mean(), a=_a(), b=nn.Linear(3, 1)),
        _x,
    ),
    **{
        n: RIGHT[n]
        for n in ("padding_idx", "gradient reversal", "straight-through", "moving average", "written buffer")
    },
}


@pytest.mark.parametrize(
    ("name", "exporter"), [*((n, "auto") for n in PLANTED), *((n, "torchscript") for n in BY_TORCHSCRIPT)]
)
def test_planted_differences_are_found(name: str, exporter: str) -> None:
    """Each is one ModelError in a few lines; the module is as before."""
    torch.manual_seed(0)
    make, inputs = (PLANTED if exporter == "auto" else BY_TORCHSCRIPT)[name]
    module, given = make().train(), inputs()
    before = {n: t.clone() for n, t in module.state_dict().items()}
    with warnings.catch_warnings(), pytest.raises(rc.ModelError) as told:
        warnings.simplefilter("ignore")
        rc.from_torch(module, given, exporter=exporter)
    assert 20 < len(str(told.value)) < 2500
    for n, t in module.state_dict().items():
        assert torch.equal(t, before[n]), n
    assert all(p.grad is None for p in module.parameters())


def test_a_difference_may_be_a_warning() -> None:
    make, inputs = BY_TORCHSCRIPT["detach"]
    with pytest.warns(rc.ModelWarning, match=r"gradient of 'a.weight' differs"):
        rc.from_torch(make(), inputs(), exporter="torchscript", check="warn")
    with pytest.warns(rc.ModelWarning, match=r"not compared with its module"):
        rc.from_torch(make(), inputs(), exporter="torchscript", check=False)


def test_dropout_is_off_while_comparing() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3)).train()
    inputs, state = _x(), torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error", rc.ModelWarning)
        program = rc.from_torch(module, inputs)
    assert torch.equal(state, torch.get_rng_state())
    assert any(o.op.name == "Dropout" for o in program.operators)


def test_other_random_numbers_are_not_compared() -> None:
    module = Net(lambda m, x: (m.a(x) + torch.randn(5, 3)).pow(2).mean(), a=_a())
    with pytest.warns(rc.ModelWarning, match="draws random numbers"):
        rc.from_torch(module, _x())


@pytest.mark.parametrize("check", [0.5, "no", None])
def test_what_check_may_be(check: Any) -> None:
    with pytest.raises(rc.UsageError, match="check must be"):
        rc.from_torch(_a(), _x(), check=check)


def test_a_gradient_that_is_not_finite_is_named_as_a_cause() -> None:
    module = Net(lambda m, x: m.a(x).pow(2).sum(), a=_a())
    module.a.weight.register_hook(lambda g: g / 0)
    with pytest.raises(rc.ModelError, match=r"own gradient of 'a\.weight' is not finite"):
        rc.from_torch(module, _x())


def test_a_module_is_walked_as_often_whatever_its_size() -> None:
    """Once for each parameter would be quadratic."""

    class Counted(nn.Sequential):
        walks = 0

        def named_modules(self, *args: Any, **kwargs: Any) -> Any:
            self.walks += 1
            return super().named_modules(*args, **kwargs)

    walks = []
    for layers in (1, 9):
        module = Counted(*(nn.Linear(2, 2) for _ in range(layers)))
        rc.from_torch(module, torch.randn(3, 2))
        walks.append(module.walks)
    assert walks[0] == walks[1]


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_a_module_shares_its_tensors(exporter: str) -> None:
    """Trained in place, large tensors and small ones, buffers too, with the same bits; before that nothing changes."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 256), nn.BatchNorm1d(256), nn.Linear(256, 256), nn.Linear(256, 1)).train()
    kept, start = copy.deepcopy(module), copy.deepcopy(module.state_dict())
    x = torch.randn(4, 3)
    losses = {}
    for share, m in ((False, kept), (True, module)):
        program = rc.from_torch(m, (x,), loss=lambda y: y.square().mean(), exporter=exporter, share=share)
        assert all(torch.equal(a, b) for a, b in zip(m.state_dict().values(), start.values(), strict=True))
        rc.Adam(0.1).minimize(program.outputs[0])
        executor = rc.Executor()
        losses[share] = [executor.run(program, {"input": x.numpy()}, [program.outputs[0]])[0] for _ in range(2)]
    assert np.array_equal(losses[False], losses[True])
    tensors = dict(module.state_dict())
    assert all(program.data[n].ctypes.data == t.data_ptr() for n, t in tensors.items() if n in program.data)
    assert not torch.equal(tensors["2.weight"], start["2.weight"])
    assert not torch.equal(tensors["1.running_mean"], start["1.running_mean"])
    assert torch.equal(kept.state_dict()["2.weight"], start["2.weight"])
    exported = {t.name: onnx.numpy_helper.to_array(t) for t in rc.export_trained(program).graph.initializer}
    assert np.array_equal(exported["2.weight"], tensors["2.weight"].numpy())
    rc.write_back(program, module)
    assert int(module[1].num_batches_tracked) == 2


def test_what_cannot_be_shared_is_named() -> None:
    module = nn.Linear(3, 1)
    module.weight.data = torch.ones(1, 6)[:, ::2]
    with pytest.warns(rc.ModelWarning, match=r"share=True: the program has copies of weight, which write_back"):
        rc.from_torch(module, (torch.ones(4, 3),), loss=lambda y: y.square().mean(), share=True)
