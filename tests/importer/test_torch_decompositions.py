"""Operators that PyTorch's exporter lacks: losses and gradients beside PyTorch's, and what is refused by name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import recompute as rc

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("onnxscript", reason="onnxscript is not installed")
from recompute.torch.lowering import _table  # noqa: E402

pytestmark = pytest.mark.slow

NAN, INF = float("nan"), float("inf")
X = [[0.3, -1.5, 0.3, 2.5], [-0.75, 4.0, -2.25, 0.125]]
Y = [[0.5, -0.0, float("nan"), -3.0], [0.0, 4.0, -2.5, 0.25]]


BAGS = torch.tensor([[0, 1, 3], [1, 1, 1], [2, 3, 1]])


class Weighted(torch.nn.Module):
    """A weighted sum of a function of a parameter."""

    def __init__(self, function: Callable[[Any], Any], w: Any) -> None:
        super().__init__()
        self.function, self.w = function, torch.nn.Parameter(torch.tensor(w))

    def forward(self, one: Any) -> Any:
        y = self.function(self.w * one.sum())
        return (y * torch.arange(1.0, 1 + y.numel()).reshape(y.shape)).sum()


CASES = {
    "copysign": lambda w: torch.copysign(w, torch.tensor(Y).nan_to_num(1.0)),
    "fmax": lambda w: torch.fmax(w, torch.tensor(Y)),
    "fmin": lambda w: torch.fmin(torch.tensor(Y), w),
    "hypot": lambda w: torch.hypot(w, w.flip(1) + 1),
    "erfinv": lambda w: torch.erfinv(w / 4.5),
    "lgamma": lambda w: torch.lgamma(w),
    "cummax": lambda w: torch.cummax(w, 1)[0],
    "cummin of a number": lambda w: torch.cummin(w[0, 1], 0)[0],
    "indices of cummax": lambda w: w.gather(1, torch.cummax(w, 1)[1]),
    "median": lambda w: torch.median(w),
    "median of rows with NaN": lambda w: torch.median(torch.where(w > 3, NAN, w), 1)[0].nan_to_num(7.0) + w[:, 0],
    "median of a number": lambda w: torch.median(w[0, 1], 0)[0],
    "diagonal_scatter": lambda w: torch.diagonal_scatter(w, w[0, :2] * 2, offset=1),
    "diagonal_scatter, of three axes": lambda w: torch.diagonal_scatter(
        w.reshape(2, 2, -1), w.reshape(2, 2, -1).diagonal(-1, 0, 1) * 2, -1, 0, 1
    ).sum(0),
    "cov": lambda w: torch.cov(w, fweights=torch.tensor([1, 2, 1, 3])),
    "corrcoef": lambda w: torch.corrcoef(w),
    "combinations": lambda w: torch.combinations(w[0], 2, with_replacement=True),
    "method cov": lambda w: w.cov(correction=0),
    "ends of erfinv": lambda w: torch.erfinv(w.clamp(-1, 1)).clamp(-3, 3),
    "poles of lgamma": lambda w: torch.lgamma(w.floor()).clamp(max=50) + w,
    "cummax after NaN": lambda w: torch.cummax(torch.where(w > 3, NAN, w), 1)[0].nan_to_num(7.0),
    "large hypot": lambda w: torch.hypot(w * 1e25, w.flip(1) * 1e25) * 1e-25,
    "digamma": lambda w: torch.digamma(w),
    "polygamma": lambda w: torch.special.polygamma(2, w),
    "Bessel functions": lambda w: torch.i0(w) + torch.special.i1e(w * 30),
    "nanmedian": lambda w: torch.nanmedian(torch.where(w > 3, NAN, w)),
    "nanmedian of rows": lambda w: torch.nanmedian(torch.where(w > 3, NAN, w), 1)[0],
    "put": lambda w: torch.put(w, torch.tensor([0, -1, 5]), w[0, :3] * 2, accumulate=True),
    "index_reduce": lambda w: torch.index_reduce(w, 1, torch.tensor([3, 0]), w[:, :2] * 2, "mean"),
    "masked_select": lambda w: torch.masked_select(w, torch.tensor([True, False, True, True])).exp().sum(),
    "places filled twice": lambda w: w.index_fill(1, torch.tensor([2, 0, 2]), w[0, 0]),
    "another name for a division": lambda w: torch.divide(w, torch.arange(1, 5)) * torch.less(w, torch.arange(4)),
    "Fourier transform of another size": lambda w: torch.view_as_real(torch.fft.fftn(w, s=(3, 3), norm="ortho")),
    "axes that squeeze leaves": lambda w: w.unsqueeze(1).squeeze((0, 1)),
    "statistics of a layer norm": lambda w: sum(torch.native_layer_norm(w, (4,), w[0], None, 1e-5)),
    "numbers with an axis": lambda w: (
        w[0, 0].amax(0) * w[1, 1].norm(dim=-1) + w[0, 1].topk(1, 0)[0] + w[1, 0].gather(0, torch.tensor([0]))
    ),
    "scatter to a number": lambda w: w[0, 0].scatter_add(0, torch.tensor(0), w[1, 1]) + w.sum(),
    "normal equations": lambda w: torch.cholesky_solve(w, torch.linalg.cholesky(w @ w.T, upper=True), upper=True),
    "linear systems": lambda w: torch.linalg.solve(w[:, :2], w[:, 2:]) + torch.linalg.inv(w[:, :2].exp()),
    "slogdet": lambda w: torch.linalg.slogdet(w[:, 1:3])[1],
    "QR": lambda w: torch.linalg.qr(w.T)[0].T + torch.linalg.qr(w)[1] + torch.ormqr(w[:, :1], w[0, :1], w),
    "matrix_exp": lambda w: torch.matrix_exp(w[:, :2]),
    "normal distribution": lambda w: torch.special.log_ndtr(w * 3) + torch.special.ndtri(torch.sigmoid(w * 2)),
    "bounds of logit that cross": lambda w: torch.logit(w / 5, 0.6) + torch.logit(w / 5, 0.1),
    "mode": lambda w: torch.mode(w.clamp(-1, 2), 1)[0] * w[:, 0] + torch.mode(w, 1)[1],
    "places in a volume": lambda w: torch.grid_sampler_3d(
        w.reshape(1, 1, 2, 2, 2), (w[:, :3] / 5).reshape(1, 1, 1, 2, 3), 0, 0, False
    ),
    "cross entropy of one sample": lambda w: (
        torch.nn.functional.cross_entropy(w[0], torch.tensor(2), weight=torch.arange(1.0, 5).to(w), reduction="sum") + w
    ),
    "adaptive pools": lambda w: torch.nn.functional.adaptive_max_pool2d(w[None], (1, 3)).sum(0),
    "antialiased resizing": lambda w: torch.nn.functional.interpolate(
        w.reshape(1, 2, 2, 2).repeat(1, 1, 3, 2), scale_factor=(0.6, 1.3), mode="bicubic", antialias=True
    ),
    "antialiased corners": lambda w: torch.nn.functional.interpolate(
        w[None, None], size=(1, 3), mode="bilinear", align_corners=True, antialias=True
    ),
    "average pools with a divisor": lambda w: torch.nn.functional.avg_pool2d(
        w[None], 2, 3, 1, ceil_mode=True, divisor_override=3
    ),
    "Gaussian likelihood": lambda w: torch.nn.functional.gaussian_nll_loss(
        w, w.flip(0), w.sum(1) ** 2 / 10, full=True, eps=0.2, reduction="sum"
    ),
    "bags with padding": lambda w: torch.cat(
        [torch.nn.functional.embedding_bag(BAGS, w.T, mode=mode, padding_idx=-3) for mode in ("mean", "sum", "max")]
    ),
    "weighted bags with padding": lambda w: torch.nn.functional.embedding_bag(
        BAGS, w.T, mode="sum", per_sample_weights=w[:, :3].repeat(2, 1)[:3], padding_idx=1
    ),
    "median of large numbers": lambda w: torch.median(w.clamp(0.3, 0.3) * 1e38 * 10) * 1e-37 + w.sum(),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_pytorch(name: str) -> None:
    trains_alike(CASES[name])


def test_products_of_groups_whose_ends_are_data() -> None:
    """Experts of transformers: rows by the matrix of their group, an empty one among them, and rows of no group."""
    pytest.importorskip("transformers.integrations.moe", reason="transformers is not installed")
    grouped, ends = torch.ops.transformers.grouped_mm_fallback, torch.tensor([3, 3, 7], dtype=torch.int32)
    trains_alike(lambda w: grouped(w.T.repeat(2, 2), torch.stack([w, w * 2, w * w]).reshape(3, 4, 2), ends))


def trains_alike(function: Callable[[Any], Any]) -> None:
    """Loss and gradient of a program are PyTorch's in float64."""
    module, exact = Weighted(function, X), Weighted(function, X).double()
    loss = exact(torch.ones(1, dtype=torch.float64))
    loss.backward()
    program = rc.from_torch(module, (torch.ones(1),), dynamic_batch=False)
    before = np.array(program.data["w"])
    rc.SGD(1.0).minimize(program.outputs[0])
    (value,) = rc.Executor().run(program, {"one": np.ones(1, "f4")}, [program.outputs[0]])
    gradient = exact.w.grad.numpy()
    assert value == pytest.approx(loss.item(), rel=2e-5, abs=2e-5)
    np.testing.assert_allclose(before - program.data["w"], gradient, rtol=2e-5, atol=2e-5 * np.abs(gradient).max())


def test_sparse_tensors_are_refused_by_name() -> None:
    module = torch.nn.Linear(4, 4)
    module.register_buffer("table", torch.eye(4).to_sparse())
    with pytest.raises(rc.ModelError, match="'table' is a sparse_coo tensor, which no ONNX model can hold"):
        rc.from_torch(module, (torch.ones(2, 4),))
    with pytest.raises(rc.ModelError, match="'example input 0' is a sparse_csr tensor"):
        rc.from_torch(torch.nn.Linear(4, 4), (torch.eye(4).to_sparse_csr(),))


POINTS = [1.0, -2.0, 0.0, -0.0, 3.0, NAN, INF, -INF, -0.5, 0.5, 2.5, -1.0, 1e-3, 200.0]
EVERY = {
    "copysign.Tensor": (POINTS, [-1.0, 2.0, -0.0, 0.0, 1.0] * 2 + [1.0, -1.0, 2.0, 1.0]),
    "copysign.Scalar": (POINTS, -0.5),
    "fmax.default": (POINTS, POINTS[::-1]),
    "fmin.default": (POINTS, POINTS[::-1]),
    "hypot.default": (POINTS, POINTS[::-1]),
    "erfinv.default": (POINTS,),
    "lgamma.default": (POINTS,),
    "cummax.default": (POINTS, 0),
    "cummin.default": (POINTS, 0),
    "median.default": (POINTS,),
    "digamma.default": (POINTS,),
    "special_log_ndtr.default": (POINTS,),
    "special_ndtri.default": (POINTS,),
    "logit.default": (POINTS, 0.25),
    "i0.default": (POINTS,),
    "special_i1e.default": (POINTS,),
    "nanmedian.default": (POINTS,),
}


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int64", "int32"])
@pytest.mark.parametrize("name", EVERY)
def test_all_values_of_all_types_are_those_of_pytorch(name: str, dtype: str) -> None:
    """NaN, infinities, zeros of both signs, what is outside of a function's domain; and without NaN and infinities."""
    overload = getattr(getattr(torch.ops.aten, name.split(".")[0]), name.split(".")[1])
    kind = getattr(torch, dtype)
    columns = [a for a in EVERY[name] if isinstance(a, list)]
    finite = [i for i in range(len(POINTS)) if all(abs(c[i]) < INF for c in columns)]
    for at in (range(len(POINTS)), finite) if kind.is_floating_point else (finite,):
        given = [torch.tensor([a[i] for i in at]).to(kind) if isinstance(a, list) else a for a in EVERY[name]]
        try:
            expected = overload(*given)
        except NotImplementedError:
            pytest.skip(f"PyTorch has no {name} of {dtype}")
        found = _table()[overload](*given)
        if isinstance(expected, torch.Tensor):
            expected, found = (expected,), (found,)
        tolerance = {"float16": 4e-3, "bfloat16": 3e-2, "float64": 1e-12}.get(dtype, 2e-6)
        for a, b in zip(expected, found, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(b.double(), a.double(), rtol=tolerance, atol=tolerance)


def test_running_statistics_of_an_instance_norm_are_kept() -> None:
    module, x = torch.nn.InstanceNorm1d(2, affine=True, track_running_stats=True).train(), torch.randn(3, 2, 5)
    program = rc.from_torch(module, (x,), dynamic_batch=False)
    rc.Executor().run(program, {program.inputs[0].name: x.numpy()})
    module(x)
    for name in ("running_mean", "running_var"):
        np.testing.assert_allclose(program.data[name], getattr(module, name), rtol=1e-5, atol=1e-6)


def test_a_functional_batch_norm_updates_the_statistics_of_its_module() -> None:
    class Norm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor([1.0, 2.0, 0.5]))
            self.register_buffer("mean", torch.zeros(3))
            self.register_buffer("variance", torch.ones(3))

        def forward(self, x: Any) -> Any:
            y = torch.nn.functional.batch_norm(x, self.mean, self.variance, self.weight, training=True, momentum=0.3)
            return (y - x).square().mean()

    module, x = Norm().train(), torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    program = rc.from_torch(module, (x,), dynamic_batch=False)
    rc.SGD(0.1).minimize(program.outputs[0])
    (value,) = rc.Executor().run(program, {program.inputs[0].name: x.numpy()}, [program.outputs[0]])
    module.load_state_dict({"weight": module.weight, "mean": torch.zeros(3), "variance": torch.ones(3)})
    assert value == pytest.approx(module(x).item(), rel=1e-5)
    for name in ("mean", "variance"):
        np.testing.assert_allclose(program.data[name], getattr(module, name), rtol=1e-5, atol=1e-6)


class Reduced(torch.nn.Module):
    """A function of inputs times a weight, of any batch."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function, self.w = function, torch.nn.Parameter(torch.tensor([1.5, -2.0, 0.5]))

    def forward(self, x: Any) -> Any:
        return x * self.function(x * self.w)


BATCHES = {
    "median": lambda y: torch.median(y),
    "filled places": lambda y: y.index_fill(0, torch.tensor([0, -1]), 2.0),
    "largest, without self": lambda y: torch.scatter_reduce(y * 2, 0, (y > 0).long(), y, "amax", include_self=False),
}


def test_squeeze_of_the_batch_s_axis_fixes_the_batch() -> None:
    """At a batch of 1 the axis goes, at others it stays."""
    module = Reduced(lambda y: y.squeeze(0))
    for count in (1, 4):
        x = torch.randn(count, 3)
        program = rc.from_torch(module, (x,))
        (y,) = program.evaluate({"x": x.numpy()}, [program.outputs[0].name])
        np.testing.assert_allclose(y, module(x).detach(), rtol=1e-6)
        with pytest.raises(rc.UsageError, match=f"fixes its batch at {count}"):
            program.evaluate({"x": np.ones((5 - count, 3), "f4")}, [program.outputs[0].name])


@pytest.mark.parametrize("name", ["lgamma", "digamma", "polygamma"])
def test_digits_near_zeros_of_a_function(name: str) -> None:
    """Values near 0 are as exact as others; PyTorch's in float32 are not, those in float64 are compared."""
    order = (1,) * (name == "polygamma")
    x = torch.tensor([1 + 2**-20, 2 - 2**-18, 1.4616321, -2.4570247, 1.0625, 2.3])
    operator = getattr(torch.ops.aten, name).default
    exact = operator(*order, x.double())
    np.testing.assert_allclose(_table()[operator](*order, x), exact, rtol=2e-7)


def test_solutions_of_any_size_are_a_few_operators() -> None:
    matrix = (torch.eye(80) * 30 + torch.arange(6400.0).reshape(80, 80).sin()).tolist()
    module = Weighted(
        lambda w: torch.linalg.solve(w, w[0]) + torch.linalg.solve_triangular(w, w, upper=True)[1], matrix
    )
    program = rc.from_torch(module, (torch.ones(1),), dynamic_batch=False)  # compares gradients, too
    assert len(program.operators) < 50


@pytest.mark.parametrize("upper", [False, True])
def test_gradients_of_cholesky_solutions_are_those_of_a_whole_factor(upper: bool) -> None:
    """PyTorch's: the triangle that is not read has a gradient."""
    module = Weighted(
        lambda w: torch.cholesky_inverse(w[:, :2], upper) + torch.cholesky_solve(w[:, 2:], w[:, :2], upper), X
    )
    rc.from_torch(module, (torch.ones(1),), dynamic_batch=False)


def test_ctc_loss_takes_other_batches_and_no_inference() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(3, 4)

        def forward(self, x: Any, y: Any, lengths: Any) -> Any:
            scores = self.linear(x).log_softmax(-1).transpose(0, 1)
            return torch.nn.functional.ctc_loss(scores, y, torch.full_like(lengths, 5), lengths)

    def batch(n: int) -> tuple[Any, ...]:
        return torch.randn(n, 5, 3), torch.randint(1, 4, (n, 2)), torch.arange(n) % 3

    module = Model()
    program = rc.from_torch(module, batch(4))
    assert [o.op.name for o in program.operators].count("CTCLoss") == 1
    assert "Exp" not in [o.op.name for o in program.operators]  # a LogSoftmax makes it unnecessary
    inputs = batch(7)
    feed = {v.name: t.numpy() for v, t in zip(program.inputs, inputs, strict=True)}
    (loss,) = program.evaluate(feed, [program.outputs[0].name])
    assert loss == pytest.approx(module(*inputs).item(), rel=1e-5)
    feed[program.inputs[2].name] = np.full(7, 3)
    with pytest.raises(rc.RecomputeError, match="a length of labels is negative, or more than they have entries"):
        program.evaluate(feed, [program.outputs[0].name])
    with pytest.raises(rc.UsageError, match="ONNX has no CTCLoss"):
        rc.export_trained(program)


def test_explanations_are_for_refusals() -> None:
    """The OpInfo table hides neither that no answer came nor that one differs."""
    opinfo = pytest.importorskip("opinfo")
    assert opinfo.verdict({"op": "linalg.svd", "ended": "no answer in 120 s"}) == "no answer"
    assert opinfo.verdict({"op": "linalg.svd", "invalid": "TypeError"}) == "no sample"
    assert opinfo.verdict({"op": "linalg.svd", "verdicts": {"differs": 1, "refused": 2}}) == "differs"
    assert opinfo.verdict({"op": "linalg.svd", "verdicts": {"agrees": 1, "refused": 2}}) == "not supported"


@pytest.mark.parametrize("name", BATCHES)
def test_other_batches_than_the_example_s_are_those_of_pytorch(name: str) -> None:
    module = Reduced(BATCHES[name])
    program = rc.from_torch(module, (torch.randn(4, 3),))
    for count in (2, 7):
        x = torch.randn(count, 3)
        x[0, 1] = NAN if "self" in name else x[0, 1]
        (y,) = program.evaluate({"x": x.numpy()}, [program.outputs[0].name])
        np.testing.assert_allclose(y, module(x).detach(), rtol=1e-6)


def test_a_size_that_a_decomposition_takes_for_a_number_fixes_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    from recompute.torch import lowering

    def median(x: Any) -> Any:
        rows = torch.ops.aten.sort.default(x.reshape(-1), 0, False)[0]
        return rows[(rows.shape[0] - 1) // 2]  # an index is a number

    table = {**_table(), torch.ops.aten.median.default: median}
    monkeypatch.setattr(lowering, "_table", lambda: table)
    program = rc.from_torch(Reduced(torch.median), (torch.randn(4, 3),))
    with pytest.raises(rc.UsageError, match="fixes its batch at 4"):
        program.evaluate({"x": np.ones((7, 3), "f4")}, [program.outputs[0].name])
