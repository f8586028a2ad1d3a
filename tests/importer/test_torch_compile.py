"""Plans inside of torch.compile, where PyTorch is installed: said and measured peaks, and bits of gradients."""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from recompute.errors import BudgetError, ModelWarning, UsageError

torch = pytest.importorskip("torch")
pytest.importorskip("ortools", reason="the planners' cuts need the extra `plan`")
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from torch_memory import held_bytes, peak_bytes  # noqa: E402

from recompute.torch import Solver, explain  # noqa: E402
from recompute.torch.plan.backend import eager  # noqa: E402
from recompute.torch.plan.generated import read_code  # noqa: E402
from recompute.torch.plan.inductor import FusedPartitioner, inductor  # noqa: E402
from recompute.torch.plan.judge import of_pytorch  # noqa: E402
from recompute.torch.plan.partition import Partitioner, budget_of  # noqa: E402

pytestmark = pytest.mark.slow
nn, F = torch.nn, torch.nn.functional


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropped = 0.3

    def forward(self, x: Any) -> Any:
        b, t, d = x.shape
        q, k, v = self.mix(self.norm(x)).view(b, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.dropout(F.scaled_dot_product_attention(q, k, v, is_causal=True), self.dropped)
        x = x + mixed.transpose(1, 2).reshape(b, t, d)
        return x + F.dropout(self.narrow(F.gelu(self.wide(self.norm(x)))), self.dropped)


class Text(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.table, self.layers = nn.Embedding(100, 64), nn.ModuleList(Layer(64) for _ in range(layers))
        self.register_buffer("unread", torch.ones(1000))  # held by the module, no input of its graph

    def dropout(self, share: float) -> None:
        for layer in self.layers:
            layer.dropped = share

    def forward(self, ids: Any, labels: Any) -> Any:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy((x @ self.table.weight.T).flatten(0, 1), labels.flatten())


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = [3, 16, 16, 16, 16]
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True))
            for a, b in itertools.pairwise(sizes)
        )

    def forward(self, x: Any, labels: Any) -> Any:
        for i, part in enumerate(self.parts):
            x = part(x) if i in (0, 2) else F.max_pool2d(part(x), 2)
        return F.cross_entropy(F.dropout2d(x).mean((2, 3)), labels)


class Drawn(nn.Module):
    """Random numbers other than dropout's, noise in float, and a mask of bernoulli."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            y = torch.tanh(layer(x)) * (1 + torch.rand_like(x))
            x = F.rrelu(y, training=True) * torch.bernoulli(torch.full_like(y, 0.7)) + F.alpha_dropout(y, 0.2, True)
        return x.square().mean()


class Called(nn.Module):
    """Operators that Inductor leaves to PyTorch: several results, views, other types than the source's, an effect."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(64))

    def forward(self, x: Any) -> Any:
        y = torch.sort(x @ self.weight, 0)[0].cumprod(1).tanh().cumsum(0)
        z = torch.linalg.solve(torch.eye(64) * 9 + self.weight, y.T)
        return (torch.view_as_real(torch.polar(z.T, x)) * 2).abs().mean()


def text() -> tuple[nn.Module, tuple]:
    torch.manual_seed(0)
    ids = torch.randint(0, 100, (4, 32))
    return Text(), (ids, ids.clone())


def images() -> tuple[nn.Module, tuple]:
    torch.manual_seed(0)
    return Images(), (torch.randn(4, 3, 32, 32), torch.randint(0, 16, (4,)))


def drawn() -> tuple[nn.Module, tuple]:
    torch.manual_seed(0)
    return Drawn(), (torch.randn(256, 64),)


def compiled(module: nn.Module, budget: Any, dynamic: bool | None = None) -> tuple[Callable, Partitioner]:
    torch._dynamo.reset()
    partition = Partitioner(budget_of(budget))
    return torch.compile(module, backend=lambda m, i: eager(m, i, partition), dynamic=dynamic), partition


def stepped(call: Callable, module: nn.Module, inputs: tuple) -> Any:
    module.zero_grad()
    torch.manual_seed(3)
    loss = call(*inputs)
    loss.backward()
    return loss


def state(module: nn.Module) -> list:
    return [p.grad.clone() for p in module.parameters()] + [b.clone() for b in module.buffers()]


@pytest.mark.parametrize(("network", "share"), [(text, 0.7), (images, 0.9), (drawn, 0.7)])
def test_said_peak_is_measured_and_bits_are_those_of_the_plain_step(network: Callable, share: float) -> None:
    """The peak is within the budget, to the byte of the plain step; the bits of eager PyTorch's, statistics too."""
    module, inputs = network()
    before = [b.clone() for b in module.buffers()]
    stepped(module, module, inputs)
    eager_state, peaks = state(module), []
    for budget in (1.0, share):
        call, partition = compiled(module, budget)
        for b, old in zip(module.buffers(), before, strict=True):
            b.data.copy_(old)
        stepped(call, module, inputs)
        assert all(torch.equal(a, b) for a, b in zip(eager_state, state(module), strict=True)), budget
        module.zero_grad()
        (said,) = partition.figures
        measured = held_bytes(module, inputs) + peak_bytes(lambda call=call: stepped(call, module, inputs))
        assert 0.97 * said.peak <= measured <= said.peak <= said.budget
        assert budget < 1 or measured == said.peak
        peaks.append(measured)
    assert peaks[1] <= share * peaks[0]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums have one order: with more threads it follows from how kernels are fused."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_inductors_kernels_keep_the_said_peak_and_the_gradients(
    monkeypatch: pytest.MonkeyPatch, dropout: float
) -> None:
    """The peak said is measured, to the byte; gradients have the bits of Inductor alone; eager's, to float32."""
    monkeypatch.setenv("TORCHINDUCTOR_DEBUG_COMPILE", "1")  # g++ -O0: the same buffers, compiled sooner
    module, inputs = text()
    module.dropout(dropout)
    stepped(module, module, inputs)
    of_eager, gradients, peaks = state(module), [], []
    if not dropout:  # Inductor alone draws other numbers
        torch._dynamo.reset()
        stepped(torch.compile(module), module, inputs)
        gradients.append(state(module))
    for budget in (1.0, 0.7):
        torch._dynamo.reset()
        partition = FusedPartitioner(budget_of(budget))
        call = torch.compile(module, backend=lambda m, i, p=partition: inductor(m, i, p))
        stepped(call, module, inputs)
        gradients.append(state(module))
        module.zero_grad()
        measured = held_bytes(module, inputs) + peak_bytes(lambda call=call: stepped(call, module, inputs))
        (said,) = partition.figures
        assert measured == said.peak <= said.budget
        peaks.append(measured)
    assert peaks[1] <= 0.7 * peaks[0]
    assert all(torch.equal(*of) for other in gradients[1:] for of in zip(gradients[0], other, strict=True))
    flat = [torch.cat([g.flatten() for g in of]).double() for of in (of_eager, gradients[1])]
    assert dropout or float((flat[1] - flat[0]).norm()) <= 1e-5 * float(flat[0].norm())


@pytest.mark.usefixtures("one_thread")
def test_what_inductor_leaves_to_pytorch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of such operators and their temporaries, as they are called; what is no Python is refused."""
    monkeypatch.setenv("TORCHINDUCTOR_DEBUG_COMPILE", "1")
    torch.manual_seed(0)
    module, inputs = Called(), (torch.randn(128, 64),)
    stepped(module, module, inputs)
    (of_eager,) = state(module)
    torch._dynamo.reset()
    partition = FusedPartitioner(budget_of(1.0))
    call = torch.compile(module, backend=lambda m, i: inductor(m, i, partition))
    stepped(call, module, inputs)
    (gradient,) = state(module)
    assert float((gradient - of_eager).norm()) <= 1e-4 * float(of_eager.norm())
    module.zero_grad()
    measured = held_bytes(module, inputs) + peak_bytes(lambda: stepped(call, module, inputs))
    (said,) = partition.figures
    assert measured == said.peak
    with pytest.raises(UsageError, match="has an unknown form"):
        read_code("#include <vector>")


def test_inductor_refuses_what_it_cannot_keep() -> None:
    """A budget that no kernels were found for, and symbolic sizes, are errors."""
    module, inputs = text()
    for options, dynamic, word in (({"budget": "30%"}, False, "BudgetError"), ({"budget": 0.9}, True, "fixed sizes")):
        torch._dynamo.reset()
        call = torch.compile(module, backend="recompute", options={**options, "inner": "inductor"}, dynamic=dynamic)
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=word):
            call(*inputs)


def test_a_budget_that_is_too_small_says_the_least() -> None:
    module, inputs = text()
    call, _ = compiled(module, "5%")
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"BudgetError.*are needed"):
        call(*inputs)


def test_the_backend_by_its_name() -> None:
    """Options are checked, a module in two graphs is warned about, a known plan is used again."""
    module, inputs = text()
    torch._dynamo.reset()
    call = torch.compile(module, backend="recompute", options={"budget": "70%"}, dynamic=False)
    stepped(call, module, inputs)
    stepped(call, module, tuple(torch.cat([i, i[:1]]) for i in inputs))
    for options, word in (
        ({"budget": 0.5, "iner": 1}, "iner"),
        ({}, "budget"),
        ({"budget": 0.5, "inner": "xla"}, "inner must be"),
    ):
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=f"UsageError.*{word}"):
            torch.compile(module, backend="recompute", options=options)(*inputs)

    def broken(x: Any) -> Any:
        y = x.exp().tanh()
        torch._dynamo.graph_break()
        return y.sin().sum()

    torch._dynamo.reset()
    with pytest.warns(ModelWarning, match="several graphs"):
        torch.compile(broken, backend="recompute", options={"budget": 1.0})(torch.randn(9, requires_grad=True))


def test_symbolic_sizes_are_planned_at_the_first_ones() -> None:
    """One cut for all sizes, with eager PyTorch's bits; the peak is that of the planned ones, larger ones are told."""
    module, inputs = text()
    call, partition = compiled(module, "95%", dynamic=True)
    for rows in (4, 3, 7):
        given = tuple(i.repeat(2, 1)[:rows] for i in inputs)
        stepped(module, module, given)
        eager_state = state(module)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", ModelWarning)
            stepped(call, module, given)
        assert any("larger than" in str(w.message) for w in told) == (rows > 4)
        assert all(torch.equal(a, b) for a, b in zip(eager_state, state(module), strict=True)), rows
        module.zero_grad()
        (said,) = partition.figures
        measured = held_bytes(module, given) + peak_bytes(lambda given=given: stepped(call, module, given))
        assert said.joint.symbolic and (measured == said.peak if rows == 4 else (measured > said.peak) == (rows > 4))


def test_explain_says_what_is_kept_and_what_pytorch_takes() -> None:
    module, inputs = text()
    found = explain(module, inputs, budget=0.7)
    assert found.recomputed and any("random" in why for *_, why in found.kept)
    assert "PyTorch, budget 1.0" in str(found) and found.figures.peak <= found.figures.budget
    with pytest.raises(BudgetError):
        explain(module, inputs, budget=1000)
    with pytest.raises(UsageError):
        explain(module, inputs, budget="a lot")


def test_solver_keeps_pytorchs_protocol() -> None:
    """PyTorch takes the solver's choice; what it lets run again takes no more time than that of `dp`."""
    from recompute.torch.plan.explain import Keeping

    module, inputs = text()
    torch._dynamo.reset()
    partition = Keeping(budget_of(1.0))
    torch.compile(module, backend=lambda m, i: eager(m, i, partition))(*inputs)
    theirs, ours = (of_pytorch(*partition.original, 0.5, solver=s) for s in ("dp", Solver()))
    assert ours.cost <= 1.001 * theirs.cost
