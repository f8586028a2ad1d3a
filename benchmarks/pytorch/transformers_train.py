"""Training steps of transformers beside PyTorch's: peak memory and time, in one process, taking turns.

    OMP_NUM_THREADS=2 python benchmarks/pytorch/transformers_train.py --only GPT --json steps.json

PyTorch's variants: as installed, and `torch.compile`, both with scaled_dot_product_attention; the best one counts.
Peaks are above the parameters: PyTorch's from the profiler's memory events of the second step, ours as the executor
holds them (the prediction must be the same number).  SGD, float32; dropout is off, so that losses can be compared.
`budget`: the lowest of some budgets, as shares of PyTorch's peak, for which a plan was found, and its time.
Environment: TURNS (steps of each that are timed, 5), COMPILE=0 (leaves torch.compile out), EXACT=1 (losses and
gradients beside float64), BUDGET=1, EXPORTER (of ours: dynamo or torchscript; default: the first that can).
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from table import rows
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile, record_function

import recompute as rc
from recompute.errors import BudgetError
from recompute.passes import memory_report

LINE = (
    "{network:22} peak {torch_mib:7.1f} -> {mib:7.1f} MiB ({share:.2f})  step {torch_seconds:7.3f} -> {seconds:7.3f} s "
    "({ratio:.2f} of {best})  loss {loss_difference:.0e}{more}"
)
#: budgets that are tried, as shares of PyTorch's peak
_SHARES = (0.4, 0.35, 0.3)
_LR = 0.01


class Layer(nn.Module):
    """A pre-norm transformer layer with scaled_dot_product_attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        b, t, d = x.shape
        parts = self.qkv(self.n1(x)).chunk(3, -1)
        q, k, v = (y.reshape(b, t, self.heads, d // self.heads).transpose(1, 2) for y in parts)
        y = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d)
        x = x + self.out(y)
        return x + self.down(functional.gelu(self.up(self.n2(x))))


class Small(nn.Module):
    """Two layers of 256, 4 heads, 1,000 words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(1000, 256), nn.Linear(256, 1000)
        self.layers = nn.Sequential(Layer(256, 4), Layer(256, 4))

    def forward(self, ids: Any) -> Any:
        return self.head(self.layers(self.words(ids)))


class Logits(nn.Module):
    """A Hugging Face model whose output is its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Any) -> Any:
        return self.model(x).logits


def small(length: int) -> Callable[[], tuple[nn.Module, Any, Any]]:
    """The small network at a sequence length."""

    def make() -> tuple[nn.Module, Any, Any]:
        ids = torch.randint(0, 1000, (1, length))
        return Small(), ids, ids

    return make


def hugging_face(kind: str, batch: int, length: int, **options: Any) -> Callable[[], tuple[nn.Module, Any, Any]]:
    """A language model of transformers, with targets for every position."""

    def make() -> tuple[nn.Module, Any, Any]:
        import transformers

        config = getattr(transformers, f"{kind}Config")(use_cache=False, **options)
        names = {"GPT2": "GPT2LMHeadModel", "Bert": "BertForMaskedLM", "Llama": "LlamaForCausalLM"}
        model = getattr(transformers, names[kind])(config)
        ids = torch.randint(0, config.vocab_size, (batch, length))
        return Logits(model), ids, torch.randint(0, config.vocab_size, (batch, length))

    return make


def vision(batch: int) -> Callable[[], tuple[nn.Module, Any, Any]]:
    """ViT-B/16 of transformers."""

    def make() -> tuple[nn.Module, Any, Any]:
        import transformers

        config = transformers.ViTConfig(num_labels=1000)
        model = Logits(transformers.ViTForImageClassification(config))
        return model, torch.randn(batch, 3, 224, 224), torch.randint(0, 1000, (batch,))

    return make


_STILL = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
NETWORKS: dict[str, Callable[[], tuple[nn.Module, Any, Any]]] = {
    "small, 1,024": small(1024),
    "small, 4,096": small(4096),
    "small, 16,384": small(16384),
    "GPT-2 small, 1,024": hugging_face("GPT2", 1, 1024, **_STILL),
    "BERT-base, 512": hugging_face("Bert", 2, 512, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
    "LLaMA block, 2,048": hugging_face(
        "Llama", 1, 2048, vocab_size=32000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=1,
        num_attention_heads=16, num_key_value_heads=4, max_position_embeddings=2048,
    ),
    "ViT-B/16": vision(8),
}  # fmt: skip


def loss_of(out: Any, target: Any) -> Any:
    """Cross entropy over all positions."""
    return functional.cross_entropy(out.reshape(-1, out.shape[-1]), target.reshape(-1))


def torch_step(net: nn.Module, x: Any, target: Any, *, compiled: bool) -> Callable[[], float]:
    """A step of PyTorch."""
    optimizer = torch.optim.SGD(net.parameters(), lr=_LR)

    def forward() -> Any:
        return loss_of(net(x), target)

    found = torch.compile(forward) if compiled else forward

    def step() -> float:
        optimizer.zero_grad()
        loss = found()
        loss.backward()
        optimizer.step()
        return float(loss)

    return step


def torch_peak(step: Callable[[], float], parameters: int) -> int:
    """Bytes above the parameters that a step allocates at most; gradients of the step before are freed first."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as p, record_function("step"):
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        p.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())["traceEvents"]
    events = sorted(
        ((float(e["ts"]), int(e["args"]["Bytes"])) for e in trace if e.get("name") == "[memory]"), key=lambda e: e[0]
    )
    now = peak = parameters  # the gradients of the step before
    for _, size in events:
        now += size
        peak = max(peak, now)
    return peak


def ours(net: nn.Module, x: Any, target: Any) -> tuple[rc.Program, dict[str, np.ndarray]]:
    """The exported program with its loss, and the batch."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(None):
        warnings.simplefilter("ignore")
        exporter = os.environ.get("EXPORTER", "auto")
        program = rc.from_torch(net, (x,), loss=loss_of, targets=(target,), exporter=exporter)
    names = [v.name for v in program.block.inputs]
    return program, dict(zip(names, (x.numpy(), target.numpy()), strict=True))


def our_step(
    program: rc.Program, feed: dict[str, np.ndarray], budget: int | None = None
) -> tuple[Callable[[], float], int, int]:
    """A step of ours, its predicted peak and the one that the executor holds."""
    step = program.clone()
    optimizer: Any = rc.SGD(_LR)
    (rc.RecomputeOptimizer(optimizer).set_budget(budget) if budget else optimizer).minimize(step["loss"])
    executor = rc.Executor()
    session = executor.session(step, ["loss"])
    predicted = memory_report(session.block).peak
    return lambda: float(executor.run(step, feed, ["loss"])[0]), predicted, session.measured_peak_bytes


def row(name: str, make: Any) -> dict[str, Any]:
    """Everything about one network."""
    torch.manual_seed(0)
    net, x, target = make()
    net.train()
    parameters = sum(p.numel() * p.element_size() for p in net.parameters())
    program, feed = ours(net, x, target)
    step, predicted, measured = our_step(program, feed)
    exact = _exact(net, x, target, program, feed) if os.environ.get("EXACT") == "1" else {}
    steps: dict[str, Callable[[], float]] = {"PyTorch": torch_step(net, x, target, compiled=False)}
    first = steps["PyTorch"](), step()
    peak = torch_peak(steps["PyTorch"], parameters)
    if os.environ.get("COMPILE") != "0":
        steps["torch.compile"] = torch_step(net, x, target, compiled=True)
    times = _times({**steps, "ours": step}, int(os.environ.get("TURNS", "5")))
    best = min(steps, key=times.__getitem__)
    above = measured - sum(v.value.nbytes for v in program.parameters)
    found = {
        "network": name, "torch_mib": peak / 2**20, "mib": above / 2**20, "share": above / peak,
        "predicted": predicted, "measured": measured, "torch_seconds": times[best], "seconds": times["ours"],
        "ratio": times["ours"] / times[best], "best": best, "times": times,
        "loss_difference": abs(first[0] - first[1]) / abs(first[0]), **exact,
    }  # fmt: skip
    assert predicted == measured, f"{name}: {predicted} bytes were predicted, {measured} are held"
    if os.environ.get("BUDGET") == "1":
        found |= _within(program, feed, peak, parameters)
    found["more"] = "".join(f"  {k} {found[k]}" for k in ("gradients", "budget") if k in found)
    return found


def _times(steps: dict[str, Callable[[], float]], turns: int) -> dict[str, float]:
    """Medians of seconds, steps taking turns; the first of each is not counted."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(turns + 1):
        for name, step in steps.items():
            begin = time.perf_counter()
            step()
            if turn:
                taken[name].append(time.perf_counter() - begin)
    return {name: float(np.median(t)) for name, t in taken.items()}


def _within(program: rc.Program, feed: dict[str, np.ndarray], peak: int, parameters: int) -> dict[str, Any]:
    """The lowest of the budgets for which there is a plan."""
    found: dict[str, Any] = {}
    for share in _SHARES:
        try:
            step, predicted, measured = our_step(program, feed, parameters + int(share * peak))
        except BudgetError:
            break
        assert predicted == measured
        seconds = _times({"ours": step}, 2)["ours"]
        found["budget"] = f"{(measured - parameters) / peak:.2f} of PyTorch's peak in {seconds:.3f} s"
    return found


def _exact(net: nn.Module, x: Any, target: Any, program: rc.Program, feed: dict[str, np.ndarray]) -> dict[str, Any]:
    """Largest differences of the loss and of gradients, relative to each one's largest number, to float64."""
    import copy

    double = copy.deepcopy(net).double()
    loss = loss_of(double(x.double() if x.is_floating_point() else x), target)
    loss.backward()
    wanted = {n: p.grad.numpy() for n, p in double.named_parameters() if p.grad is not None}
    step = program.clone()
    pairs = rc.SGD(_LR).backward(step["loss"])
    found = rc.Executor().run(step, feed, ["loss", *(g.name for _, g in pairs)])
    worst = 0.0
    for (p, _), g in zip(pairs, found[1:], strict=True):
        for name, w in wanted.items():
            if name == p.name:
                g = g.T if g.shape != w.shape else g
                worst = max(worst, float(np.abs(g - w).max() / (np.abs(w).max() or 1.0)))
    apart = abs(float(found[0]) - float(loss)) / abs(float(loss))
    return {"loss_float64": apart, "gradients": f"loss {apart:.0e}, gradients {worst:.0e} from float64"}


if __name__ == "__main__":
    rows(NETWORKS, __doc__, LINE, row)
