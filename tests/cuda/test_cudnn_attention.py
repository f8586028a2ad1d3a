"""Attention by cuDNN: what it is asked for, by a stand-in that computes on the host; and cuDNN itself, planning it."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import cuda_cases
import cudnn_nowhere
import numpy as np
import pytest
from guard_pages import array_at

from recompute.errors import JobError
from recompute.language.ir import Operator, Value
from recompute.language.types import TensorType
from recompute.ops.attention.heads_last import MATRICES, heads_last_form
from recompute.ops.attention.tiled import TiledAttention
from recompute.ops.attention.tiled_grad import TiledAttentionGrad
from recompute.runtime.cuda.device.kernel import Buffer, Library
from recompute.runtime.cuda.kernels import cudnn_attention
from recompute.runtime.cuda.providers.cudnn import Cudnn

CASES = {
    "heads": ({"scale": 0.3}, (2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 16)),
    "causal": ({"scale": 0.5, "last": 0}, (2, 3, 6, 8), (2, 3, 6, 8), (2, 3, 6, 8)),
    "shared keys": ({"last": 0}, (2, 2, 3, 5, 8), (2, 2, 1, 5, 8), (2, 2, 1, 5, 8)),
    "one head of keys": ({"scale": 0.3}, (2, 4, 5, 8), (2, 1, 5, 8), (2, 1, 5, 8)),
    "one matrix for all": ({"scale": 0.3}, (2, 4, 5, 8), (1, 1, 5, 8), (1, 1, 5, 8)),
    "mask": ({"scale": 0.3}, (2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8), (2, 1, 1, 7)),
    "bias of heads": ({"scale": 0.3, "last": 0}, (2, 4, 5, 8), (2, 1, 5, 8), (2, 1, 5, 8), (4, 5, 5)),
    "no batch": ({"scale": 0.3}, (4, 5, 8), (4, 5, 8), (4, 5, 8)),
}


class Tensor(cudnn_nowhere.Tensor):
    """A tensor of a graph; it knows its address when the graph runs."""

    def __init__(self, dim: Any = None, stride: Any = None, dtype: str = "", name: str = "") -> None:
        super().__init__(dim, stride)
        self.dtype, self.aligned = dtype, {"f32": 4, "f16": 2 if name == "bias" else 16}

    def set_data_type(self, dtype: str) -> None:
        self.dtype = dtype

    def set_alignment(self, to: int) -> None:
        assert to == self.aligned.get(self.dtype, 16)


class Graph:
    """A graph of one attention, in float64."""

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}

    def tensor(self, name: str, dim: list[int], stride: list[int], data_type: str) -> Tensor:
        plain = [math.prod(dim[i + 1 :]) for i in range(4)]
        assert stride in (plain, [plain[0], dim[3], dim[1] * dim[3], 1]), "rows follow each other, or heads lie beside"
        return Tensor(dim, stride, data_type, name)

    def sdpa(self, *, generate_stats: bool, name: str, **given: Any) -> tuple[Tensor, Tensor]:
        assert generate_stats
        self.given, self.made = given, (Tensor(), Tensor())
        return self.made

    def sdpa_backward(self, *, use_deterministic_algorithm: bool, name: str, **given: Any) -> list[Tensor]:
        assert use_deterministic_algorithm
        self.given, self.made = given, [Tensor(), Tensor(), Tensor()]
        return self.made

    def run(self, addresses: dict[int, int]) -> None:
        def at(t: Tensor) -> np.ndarray:
            flat = array_at(addresses[id(t)], TensorType(t.dtype, (math.prod(t.dim),)))
            return np.lib.stride_tricks.as_strided(flat, t.dim, [n * flat.itemsize for n in t.stride])

        g = self.given
        q, k, v = (np.asarray(at(g[n]), np.float64) for n in "qkv")
        share = q.shape[1] // k.shape[1]
        k, v = np.repeat(k, share, 1), np.repeat(v, share, 1)
        scores = g["attn_scale"] * q @ np.swapaxes(k, -1, -2)
        if "bias" in g:
            scores = scores + at(g["bias"])
        if g["use_causal_mask"]:
            scores = np.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -np.inf)
        lse = np.log(np.exp(scores).sum(-1, keepdims=True))
        p = np.exp(scores - lse)
        if "dO" not in g:
            at(self.made[0])[...], at(self.made[1])[...] = p @ v, lse
            return
        stats, seen = at(g["stats"]), np.isfinite(lse)
        np.testing.assert_allclose(stats[seen], lse[seen], atol=1e-3)
        p = np.exp(scores - stats)
        dy, y = (np.asarray(at(g[n]), np.float64) for n in ("dO", "o"))
        ds = p * (dy @ np.swapaxes(v, -1, -2) - (dy * y).sum(-1, keepdims=True)) * g["attn_scale"]
        dk, dv = np.swapaxes(ds, -1, -2) @ q, np.swapaxes(p, -1, -2) @ dy
        at(self.made[0])[...] = ds @ k
        for t, d in zip(self.made[1:], (dk, dv), strict=True):
            b, h, s, e = d.shape
            at(t)[...] = d.reshape(b, h // share, share, s, e).sum(2)


@pytest.fixture
def provider(monkeypatch: Any) -> Any:
    from recompute.runtime.cuda.device import cudnn

    def planned(graph: Graph, tensors: list[Tensor], device: int, unwanted: Any, room: int) -> Any:
        class Plan:
            workspace = 64

            def run(self, addresses: tuple[int, ...], workspace: int, stream: int) -> None:
                graph.run(dict(zip(map(id, tensors), addresses, strict=True)))

        return Plan()

    for name, stand_in in (("begun", lambda *_: Graph()), ("planned", planned), ("kind", str),
                           ("current_device", lambda: 0)):  # fmt: skip
        monkeypatch.setattr(cudnn, name, stand_in)
    cudnn_attention.plan.cache_clear()
    yield Cudnn()
    cudnn_attention.plan.cache_clear()


def applied(op: Any, arrays: list[np.ndarray | None], want: int) -> Operator:
    ins = tuple(None if a is None else Value(f"x{i}", TensorType.of(a)) for i, a in enumerate(arrays))
    outs = op.infer(*(None if v is None else v.type for v in ins))
    return Operator(op, ins, tuple(Value(f"y{i}", t) for i, t in enumerate(outs[:want])))


def both(provider: Any, op: Any, arrays: list[np.ndarray | None], want: int) -> tuple[list, list]:
    """Results of the provider, and of the operator's own numerics in float32."""
    bound = applied(op, arrays, want)
    assert provider.accepts(bound)
    held = [None if a is None else np.ascontiguousarray(a) for a in arrays]
    outs, scratch = ([np.zeros(t.shape, t.numpy) for t in types]
                     for types in ([v.type for v in bound.outputs if v], provider.scratch(bound)))  # fmt: skip
    buffers = [[None if a is None else Buffer(a.ctypes.data, TensorType.of(a)) for a in part]
               for part in (held, outs, scratch)]  # fmt: skip
    calls = provider.bind(bound, *buffers)
    assert [isinstance(c, Library) for c in calls].count(True) == 1
    for call in calls:
        if isinstance(call, Library):
            call.run(0)
        else:
            cuda_cases.device().prepare(call)()
    wide = [None if a is None else a.astype(np.float32) for a in arrays]
    exact = applied(op, wide, want)
    expected = [np.zeros(v.shape, v.type.numpy) for v in exact.outputs if v]
    op.compute(wide, expected, [np.zeros(t.shape, t.numpy) for t in exact.workspace()])
    return outs, expected


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str, provider: Any) -> None:
    options, *shapes = CASES[name]
    draw = np.random.default_rng(1)
    given: list[Any] = [draw.normal(size=s).astype(np.float16) for s in shapes]
    op = TiledAttention(**options)
    found, expected = both(provider, op, given, 2)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-3)
    alone, _ = both(provider, op, given, 1)
    assert np.array_equal(alone[0], found[0])
    y, lse = found
    dy = draw.normal(size=y.shape).astype(np.float16)
    given = [*given, None][:4]
    for a, b in zip(*both(provider, TiledAttentionGrad(**op.options()), [*given, y, lse, dy], 3), strict=True):
        np.testing.assert_allclose(a, b, rtol=5e-3, atol=2e-2)


@cuda_cases.needs_compiler
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("last", [False, True])
def test_a_query_that_sees_no_key_has_no_weights(last: bool, provider: Any) -> None:
    """The result and its gradients are 0, as those of our own kernels; the stand-in's are NaN, as cuDNN's may be."""
    draw = np.random.default_rng(5)
    q, k, v = (draw.normal(size=(2, 3, 5, 8)).astype(np.float16) for _ in range(3))
    bias = np.zeros((2, 1, 5, 5), np.float16)
    bias[1, :, 2] = bias[0, :, 4, 1:] = -np.inf
    op, gradient = TiledAttention(scale=0.3), TiledAttentionGrad(scale=0.3)

    def ran(op: Any, arrays: list[Any], want: int) -> tuple[list, list]:
        ins, outs = MATRICES[type(op)] if last else ((), ())
        form = heads_last_form(op, ins, outs) if last else op
        found, expected = both(
            provider, form, [a.swapaxes(1, 2) if i in ins else a for i, a in enumerate(arrays)], want
        )
        return tuple([a.swapaxes(1, 2) if i in outs else a for i, a in enumerate(x)] for x in (found, expected))

    found, expected = ran(op, [q, k, v, bias], 2)
    y, lse = found
    assert not y[1, :, 2].any() and np.isneginf(lse[1, :, 2]).all() and np.isfinite(y).all()
    dy = draw.normal(size=y.shape).astype(np.float16)
    made, wanted = ran(gradient, [q, k, v, bias, y, lse, dy], 3)
    for a, b in zip((*found, *made), (*expected, *wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=5e-3, atol=2e-2)
    assert not made[0][1, :, 2].any()


@pytest.mark.parametrize("name", ["heads", "causal", "mask", "one head of keys"])
def test_heads_beside_each_other(name: str, provider: Any) -> None:
    options, *shapes = CASES[name]
    draw = np.random.default_rng(2)
    given: list[Any] = [*(draw.normal(size=s).astype(np.float16) for s in shapes), None][:4]
    op = TiledAttention(**options)
    y, lse = both(provider, op, given, 2)[0]
    backward = TiledAttentionGrad(**op.options())
    dy = draw.normal(size=y.shape).astype(np.float16)
    for rule, inputs, want in ((op, given, 2), (backward, [*given, y, lse, dy], 3)):
        ins, outs = MATRICES[type(rule)]
        plain = both(provider, rule, inputs, want)[0]
        for some in (ins, outs), (ins[:2], outs[:1]), (ins[2:], outs[1:]):
            turned = [a.swapaxes(1, 2) if i in some[0] else a for i, a in enumerate(inputs)]
            found = both(provider, heads_last_form(rule, *some), turned, want)[0]
            for i, (a, b) in enumerate(zip(found, plain, strict=True)):
                assert np.array_equal(a.swapaxes(1, 2) if i in some[1] else a, b)


def test_operands_between_16_bytes(provider: Any) -> None:
    """The operator that cannot run is named; a bias and the log-sum-exp may begin at any element of theirs."""
    x, lse = TensorType("f16", (2, 2, 3, 8)), TensorType("f32", (2, 2, 3))
    types = [x, x, x, TensorType("f16", (3, 3)), x, lse, x, x, x, x]
    op = Operator(TiledAttentionGrad(), *(tuple(Value(f"v{i}", t) for i, t in part)
                                          for part in (enumerate(types[:7]), enumerate(types[7:], 7))))  # fmt: skip
    scratch = [Buffer(0, t) for t in provider.scratch(op)]
    for i in range(len(types)):
        buffers = [Buffer(4096 + (4 if i == j else 0), t) for j, t in enumerate(types)]
        if i in (3, 5):
            assert provider.bind(op, buffers[:7], buffers[7:], scratch)
        else:
            with pytest.raises(JobError, match=r"(?s)multiples of 16 bytes.*--providers.*TiledAttentionGrad"):
                provider.bind(op, buffers[:7], buffers[7:], scratch)


@pytest.mark.parametrize(
    ("options", "last", "dtype"),
    [({"cap": 2.0}, 8, "f2"), ({"first": -1}, 8, "f2"), ({"last": 1}, 8, "f2"), ({}, 12, "f2"), ({}, 8, "f4"),
     ({"ratio": 0.5}, 8, "f2")],
)  # fmt: skip
def test_what_is_left_to_others(options: dict, last: int, dtype: str, provider: Any) -> None:
    arrays: list[Any] = [np.ones((2, 3, last), dtype) for _ in range(3)]
    if "ratio" in options:
        arrays += [None, np.array(1)]
    assert not provider.accepts(applied(TiledAttention(**options), arrays, 2))
    bias = np.ones((3, 3), "f2")
    assert not provider.accepts(applied(TiledAttention(), [*[np.ones((2, 3, 8), "f2")] * 3, bias], 2))  # no four axes
    x, lse = np.ones((2, 2, 3, 8), "f2"), np.ones((2, 2, 3), "f4")
    assert provider.accepts(applied(TiledAttentionGrad(), [x, x, x, bias, x, lse, x], 3))
    assert not provider.accepts(applied(TiledAttentionGrad(), [x, x, x, bias, x, lse, x], 4))  # the bias's gradient


REAL = """
import cudnn_nowhere
cudnn_nowhere.install()
from recompute.runtime.cuda.kernels.cudnn_attention import Heads, plan
alike = (8, 12, 12, 1024, 1024, 64, 64, True, .125, "bf16")
last = (*alike, (), "", ("q", "k", "v", "y", "dy", "dq", "dk", "dv"))
shared = (2, 8, 2, 100, 130, 128, 128, False, .1, "f16", (2, 1, 1, 130), "f16")
for h in (Heads(*alike), Heads(*last), Heads(*shared)):
    for gradient in (False, True):
        found = plan(h, 0, gradient=gradient)
        assert not isinstance(found, str), found
        print(found.workspace)
"""


@pytest.mark.slow
@pytest.mark.skipif(bool(cudnn_nowhere.missing()), reason=cudnn_nowhere.missing() or "cuDNN is there")
def test_cudnn_itself_plans_it() -> None:
    """In a process of its own, for an H100 that is not there."""
    path = [sys.path[0], cudnn_nowhere.__file__.rpartition("/")[0]]
    code = f"import sys; sys.path[:0] = {path!r}\n{REAL}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [int(x) <= cudnn_attention.WORKSPACE for x in done.stdout.split()] == [True] * 6
