"""Selective checkpoints for eager PyTorch, where PyTorch is installed: said and measured peaks, bits of gradients."""

from __future__ import annotations

import copy
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from recompute.errors import BudgetError, ModelWarning, UsageError

torch = pytest.importorskip("torch")
pytest.importorskip("ortools", reason="the planners' cuts need the extra `plan`")
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from torch_memory import held_bytes, peak_bytes  # noqa: E402

from recompute.torch import policy  # noqa: E402

pytestmark = pytest.mark.slow
nn, F = torch.nn, torch.nn.functional


class Layer(nn.Module):
    """Dropout by a mask that is changed in place, and by attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        b, t, d = x.shape
        q, k, v = self.mix(self.norm(x)).view(b, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 * self.training)
        x = x + F.dropout(y.transpose(1, 2).reshape(b, t, d), 0.3, self.training)
        return x + F.dropout(self.narrow(F.gelu(self.wide(self.norm(x)))), 0.3, self.training)


class Text(nn.Module):
    def __init__(self, layers: int = 8) -> None:
        super().__init__()
        self.table, self.layers = nn.Embedding(100, 64), nn.ModuleList(Layer(64) for _ in range(layers))

    def forward(self, ids: Any, labels: Any) -> Any:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy((x @ self.table.weight.T).flatten(0, 1), labels.flatten())


def text() -> tuple[nn.Module, tuple]:
    torch.manual_seed(0)
    ids = torch.randint(0, 100, (4, 32))
    return Text(), (ids, ids.clone())


def stepped(module: nn.Module, inputs: tuple) -> list:
    module.zero_grad()
    torch.manual_seed(3)
    loss = module(*inputs)
    loss.backward()
    return [loss.detach(), torch.rand(2), *(p.grad.clone() for p in module.parameters())]


@pytest.mark.parametrize(("share", "fake"), [(0.8, False), (0.6, True), (0.5, False), (1.0, False)])
def test_said_peak_is_measured_and_gradients_keep_their_bits(share: float, fake: bool) -> None:
    module, inputs = text()
    plain, random = stepped(module, inputs), torch.get_rng_state()
    found = policy(module, inputs, budget=share, fake=fake)
    assert torch.equal(random, torch.get_rng_state()) and module.layers[0].norm.weight.grad is not None
    names = list(module.state_dict())
    found.apply(module)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ModelWarning)
        assert all(torch.equal(a, b) for a, b in zip(plain, stepped(module, inputs), strict=True))
    assert list(module.state_dict()) == names
    assert bool(found.blocks) == (share < 1)
    module.zero_grad()

    def step() -> Any:
        torch.manual_seed(3)
        loss = module(*inputs)
        loss.backward()
        return loss

    measured = held_bytes(module, inputs) + peak_bytes(step)
    assert 0.97 * found.peak <= measured <= found.peak <= found.budget


def test_less_memory_takes_more_time_and_too_little_is_an_error() -> None:
    module, inputs = text()
    times = [policy(module, inputs, budget=b, cost="h200").overhead for b in (0.9, 0.7, 0.5)]
    assert 0 < times[0] <= times[1] <= times[2] < 0.5
    with pytest.raises(BudgetError, match="lowest peak found"):
        policy(module, inputs, budget=0.1)


def test_another_step_than_the_planned_one_is_said_once_and_right() -> None:
    """Evaluation has other operators, a larger batch larger ones: results hold, the peak does not."""
    module, inputs = text()
    found = policy(module, inputs, budget=0.6)
    other = found.apply(copy.deepcopy(module))
    larger = tuple(torch.cat([i, i]) for i in inputs)
    with pytest.warns(ModelWarning, match="as planned"):
        ours = stepped(other, larger)
    assert all(torch.equal(a, b) for a, b in zip(stepped(module, larger), ours, strict=True))
    with pytest.warns(ModelWarning, match="not the one that was planned"):
        ours = stepped(other.eval(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(stepped(module.eval(), inputs), ours, strict=True))


class Norms(nn.Module):
    def __init__(self, twice: bool = False) -> None:
        super().__init__()
        kinds = [nn.Linear(8, 8), nn.Identity() if twice else nn.BatchNorm1d(8), nn.Tanh()]
        self.parts, self.twice = nn.Sequential(*(nn.Sequential(*copy.deepcopy(kinds)) for _ in range(2))), twice

    def forward(self, x: Any) -> Any:
        y = self.parts(x)
        return self.parts(y).sum() if self.twice else y


def test_what_cannot_run_twice_is_refused_by_name() -> None:
    x = torch.randn(64, 8)
    cases: list[tuple[nn.Module, dict, str]] = [
        (Norms(), {"loss": torch.sum}, r"block 'parts.0' changes something"),
        (Norms(twice=True), {}, r"block 'parts.0' runs 2 times"),
        (Norms(), {}, "no scalar loss"),
        (nn.Linear(8, 8), {"loss": torch.sum}, "no repeated blocks"),
        (Norms(), {"loss": torch.sum, "blocks": ["parts.7"]}, "no part 'parts.7'"),
        (Norms(), {"loss": torch.sum, "blocks": ["parts", "parts.0"]}, "part of another"),
    ]
    for module, options, words in cases:
        with pytest.raises(UsageError, match=words):
            policy(module, (x,), budget=0.9, **options)
    statistics = Norms()
    before = copy.deepcopy(statistics.state_dict())
    with pytest.raises(UsageError):
        policy(statistics, (x,), budget=0.9, loss=torch.sum)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), statistics.state_dict().values(), strict=True))


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = text()[0]

    def forward(self, *inputs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.network(*inputs)


def test_autocast_belongs_into_the_module() -> None:
    module, inputs = Mixed(), text()[1]
    plain = stepped(module, inputs)
    other = policy(module, inputs, budget=0.7).apply(copy.deepcopy(module))
    assert all(torch.equal(a, b) for a, b in zip(plain, stepped(other, inputs), strict=True))
    with pytest.raises(UsageError, match=r"within torch\.autocast"), torch.autocast("cpu", torch.bfloat16):
        policy(module, inputs, budget=0.7)


def test_as_context_fn_of_transformers() -> None:
    """Transformers checkpoints every layer; one block that is left as it is is refused there."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=99, n_positions=64, n_embd=64, n_layer=3, n_head=4, use_cache=False)
    module = transformers.GPT2LMHeadModel(config).train()
    ids = torch.randint(0, 99, (2, 64))
    example = {"input_ids": ids, "labels": ids}

    def grads() -> list:
        module.zero_grad()
        torch.manual_seed(1)
        module(**example).loss.backward()
        return [p.grad.clone() for p in module.parameters()]

    plain = grads()
    found = policy(module, example, budget=0.6, every_block=True)
    module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"context_fn": found, "use_reentrant": False})
    with warnings.catch_warnings():
        warnings.simplefilter("error", ModelWarning)
        assert all(torch.equal(a, b) for a, b in zip(plain, grads(), strict=True))
    module.zero_grad()

    def step() -> Any:
        loss = module(**example).loss
        loss.backward()
        return loss

    measured = held_bytes(module, (ids,)) + peak_bytes(step)
    assert 0.97 * found.peak <= measured <= found.peak <= found.budget
    partly = policy(text()[0], text()[1], budget=0.9)
    assert len(partly.blocks) < len(partly.regions)
    with pytest.raises(UsageError, match="every_block"):
        partly()
