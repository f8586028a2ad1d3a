"""PyTorch's OpInfo samples through `from_torch`: losses and gradients of every differentiable operator.

    python benchmarks/opinfo.py ROWS.jsonl [--only NAME ...] [--part 0/2] [--samples 40] [--seconds 300]
    python benchmarks/opinfo.py ROWS.jsonl --table

All samples of an operator (`torch.testing`'s op_db, float32, the first variant of each name, at most --samples, evenly
chosen) stand in one module, whose loss is a weighted sum of their results; each sample's part of it is compared.  Where
that module is refused, or its loss or gradients are not PyTorch's, its halves are tried, down to single samples.  An
operator may take --seconds; one that ends its process has a row that says so; operators that have a row in ROWS.jsonl
are not run again.  `--table`: the rows as a table.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import io
import json
import logging
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_unflatten

import recompute as rc
from recompute.errors import RecomputeError

#: how far a gradient may be from PyTorch's, as a share of its tensor's largest element
_NEAR = 2e-3
_LARGEST = 4000  # elements of a sample's tensor, where an operator has samples that are not larger

#: why operators do not agree in all samples: categories, reasons, operators
EXPLAINED = {
    "differs on purpose": {
        "PyTorch gives the gradient of what was kept to what was replaced": "as_strided_scatter",
    },
    "not supported": {
        "an iteration: ONNX has no eigenvalues or singular values": "svd svd_lowrank pca_lowrank pinverse linalg.svd "
        "linalg.svdvals linalg.eig linalg.eigh linalg.eigvals linalg.eigvalsh linalg.pinv linalg.lstsq linalg.cond "
        "linalg.polar linalg.matrix_sqrth linalg.norm linalg.matrix_norm",
        "sparse tensors, and complex numbers of 16 bits": "sparse.mm sparse.sampled_addmm to_sparse chalf",
        "bits of floating-point numbers": "frexp nextafter",
        "conjugates of complex numbers, inside of it": "fft.ihfft2 fft.ihfftn",
        "inside of batch_norm, which agrees: saved statistics, or their gradients": "native_batch_norm "
        "_native_batch_norm_legit _batch_norm_with_update",
        "ONNX and its exporter have no form of it": "_segment_reduce nn.functional.fractional_max_pool2d "
        "nn.functional.fractional_max_pool3d "
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
    },
}
#: categories of operators
MEANINGS = {
    "agrees": f"all samples: weighted sums of results, and gradients within {_NEAR} of their largest element",
    "no gradient": "PyTorch's gradient is 0 everywhere, and a step is refused by name: no parameter would train",
    "random": "draws numbers, which are not PyTorch's",
    "differs on purpose": "the reason is beside it",
    "not supported": "an error names the operator; the reason is beside it",
    "partly": "some samples agree, others are refused by name",
    "no sample": "PyTorch cannot run it here",
}


class Samples(nn.Module):
    """Calls of an operator; the tensors that have gradients are parameters, each times the input, which is 1."""

    def __init__(self, call: Callable[..., Any], samples: Sequence[Any]) -> None:
        super().__init__()
        self.call, self.leaves, self.specs = call, [], []
        self.outputs = [sample.output_process_fn_grad for sample in samples]
        for k, sample in enumerate(samples):
            leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
            for i, leaf in enumerate(leaves):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    self.register_parameter(f"sample{k}_{i}", nn.Parameter(leaf.detach().clone()))
                elif isinstance(leaf, torch.Tensor):
                    self.register_buffer(f"sample{k}_{i}", leaf.detach().clone())
            self.leaves.append(leaves)
            self.specs.append(spec)
        with torch.no_grad():
            for k, y in enumerate(self.results(torch.ones(1))):
                for i, value in enumerate(y):
                    self.register_buffer(f"weight{k}_{i}", torch.randn(value.shape))

    def results(self, one: torch.Tensor) -> Iterator[list[torch.Tensor]]:
        """The floating-point results of every sample."""
        for k, (leaves, spec) in enumerate(zip(self.leaves, self.specs, strict=True)):
            values = list(leaves)
            for i, leaf in enumerate(leaves):
                if isinstance(leaf, torch.Tensor):
                    value = getattr(self, f"sample{k}_{i}")
                    values[i] = value * one.sum() if isinstance(value, nn.Parameter) else value
            x, args, kwargs = tree_unflatten(values, spec)
            found, _ = tree_flatten(self.outputs[k](self.call(x, *args, **kwargs)))
            real = [torch.view_as_real(y.resolve_conj()) if y.is_complex() else y for y in found if torch.is_tensor(y)]
            yield [y for y in real if y.is_floating_point()]

    def forward(self, one: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The weighted sum of all results, and that of each sample."""
        parts = []
        for k, y in enumerate(self.results(one)):
            weighted = ((value * getattr(self, f"weight{k}_{i}")).sum() for i, value in enumerate(y))
            parts.append((one.sum() * 0 + sum(weighted)).float())
        each = torch.stack(parts)
        return each.sum(), each


def operators() -> list[Any]:
    """The differentiable operators of op_db in float32, one variant of each."""
    first: dict[str, Any] = {}
    for op in op_db:
        if op.supports_autograd and torch.float32 in op.dtypes:
            first.setdefault(op.name, op)
    return list(first.values())


def samples_of(op: Any, most: int) -> list[Any]:
    """Samples with a gradient, evenly chosen; those with a large tensor only where all have one."""
    usable, large = [], []
    for sample in op.sample_inputs("cpu", torch.float32, requires_grad=True):
        leaves, _ = tree_flatten((sample.input, sample.args, sample.kwargs))
        tensors = [t for t in leaves if isinstance(t, torch.Tensor)]
        if any(t.requires_grad and t.numel() for t in tensors):
            (usable if all(t.numel() <= _LARGEST for t in tensors) else large).append(sample)
    usable = usable or large
    return [usable[i * len(usable) // most] for i in range(most)] if len(usable) > most else usable


def of_pytorch(module: Samples) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Each sample's part of the loss, and the gradients, by PyTorch."""
    torch.manual_seed(0)
    loss, each = module(torch.ones(1))
    if not loss.requires_grad:
        raise ValueError("no result depends on a parameter")
    loss.backward()
    zero = {n: np.zeros(p.shape, "f4") for n, p in module.named_parameters()}
    found = {n: p.grad.numpy(force=True).copy() for n, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    return each.numpy(force=True), zero | found


def of_ours(module: Samples) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Each sample's part of the loss, and the gradients, by a step of SGD on the imported module."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        program = rc.from_torch(module, (torch.ones(1),), dynamic_batch=False)
    loss, each = program.outputs
    _, pairs = rc.SGD(1.0).minimize(loss)
    fetched = [each, *(gradient for _, gradient in pairs)]
    values, *gradients = rc.Executor().run(program, {program.inputs[0].name: np.ones(1, "f4")}, fetched)
    return values, {p.name: g for (p, _), g in zip(pairs, gradients, strict=True)}


def difference(module: Samples) -> str:
    """What differs from PyTorch, or nothing."""
    values, ours = of_ours(module)
    want, gradients = of_pytorch(module)
    for here, there in zip(values, want, strict=True):
        if not np.isclose(here, there, rtol=_NEAR, atol=_NEAR, equal_nan=True):
            return f"loss {here:.6g}, PyTorch's {there:.6g}"
    for name, gradient in gradients.items():
        there = ours.get(name, np.zeros_like(gradient))
        finite = np.abs(gradient[np.isfinite(gradient)])
        largest = np.abs(getattr(module, name).detach().numpy()).max(initial=0)
        size = max(finite.max(initial=0), largest * 1e-3, 1e-6)
        # where a gradient is 0 but for rounding, that of the loss is left
        part = abs(want[int(name.removeprefix("sample").partition("_")[0])])
        rounding = 4 * np.finfo("f4").eps * part / max(largest, 1e-6) if np.isfinite(part) else 0.0
        if not np.allclose(there, gradient, rtol=0, atol=_NEAR * size + rounding, equal_nan=True):
            return f"gradient of {name}: {np.nanmax(np.abs(there - gradient)) / size:.2g} of its largest element"
    return ""


def judged(op: Any, samples: Sequence[Any]) -> Iterator[tuple[str, str]]:
    """Verdict and reason of each sample."""
    try:
        module = Samples(op.op, samples).train()
        said = difference(module)
        verdict = "differs" if said else "agrees"
    except RecomputeError as e:
        said = " ".join(str(e).split())[:300]
        if "depends on no parameter" in said and not any(g.any() for g in of_pytorch(module)[1].values()):
            yield from [("no gradient", "PyTorch's gradients are 0, too")] * len(samples)
            return
        differs = "not what the module" in said or "differ" in said
        verdict = "not exported" if "cannot export" in said else "refused, differs" if differs else "refused"
    except Exception as e:
        verdict, said = "error", f"{type(e).__name__}: {' '.join(str(e).split())[:300]}"
    if verdict == "agrees" or len(samples) == 1:
        yield from [(verdict, said)] * len(samples)
        return
    half = len(samples) // 2
    yield from judged(op, samples[:half])
    yield from judged(op, samples[half:])


def is_random(op: Any, samples: Sequence[Any]) -> bool:
    """Whether an operator draws numbers; op_db's wrappers of such operators set the seed, which is prevented."""
    seeded = torch.manual_seed
    with torch.no_grad(), mock.patch.object(torch, "manual_seed"):
        values = []
        for seed in (0, 1):
            seeded(seed)
            module = Samples(op.op, samples)
            values.append([y for results in module.results(torch.ones(1)) for y in results])
    return any(not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(*values, strict=True))


def row_of(op: Any, most: int) -> dict[str, Any]:
    """An operator's row: how many samples have which verdict, and an example of each reason."""
    torch.manual_seed(0)
    samples = samples_of(op, most)
    row: dict[str, Any] = {"op": op.name, "samples": len(samples)}
    if not samples:
        return row
    try:
        row["random"] = is_random(op, samples)
    except Exception as e:
        return row | {"invalid": f"{type(e).__name__}: {str(e)[:200]}"}
    verdicts = list(judged(op, samples))
    row["verdicts"] = dict(collections.Counter(v for v, _ in verdicts))
    row["reasons"] = {v: next(r for w, r in verdicts if w == v) for v in row["verdicts"] if v != "agrees"}
    return row


def _child(names: Sequence[str], most: int, pipe: Any) -> None:
    from torch.onnx._internal.exporter import _registration

    registry = _registration.ONNXRegistry  # of all functions: every export makes it anew, and changes nothing in it
    registry.from_torchlib = staticmethod(functools.cache(registry.from_torchlib))
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    by_name = {op.name: op for op in operators()}
    for name in names:
        pipe.send(row_of(by_name[name], most))


def rows_of(names: Sequence[str], most: int, seconds: float) -> Iterator[dict[str, Any]]:
    """The operators' rows by a process that another one follows where an operator ends it or takes so many seconds."""
    names = list(names)
    while names:
        here, there = multiprocessing.get_context("fork").Pipe(duplex=False)
        process = multiprocessing.get_context("fork").Process(target=_child, args=(names, most, there))
        process.start()
        there.close()
        try:
            while names and here.poll(seconds):
                row = here.recv()
                del names[0]
                yield row
            if names:
                yield {"op": names.pop(0), "ended": f"no answer in {seconds:.0f} s"}
        except EOFError:
            process.join()
            code = process.exitcode or 0
            yield {"op": names.pop(0), "ended": signal.Signals(-code).name if code < 0 else f"exit code {code}"}
        finally:
            process.kill()
            process.join()


def _explained(row: dict[str, Any]) -> tuple[str, str] | None:
    """Category and reason."""
    pairs = ((word, why, names) for word, reasons in EXPLAINED.items() for why, names in reasons.items())
    return next(((word, why) for word, why, names in pairs if row["op"] in names.split()), None)


def verdict(row: dict[str, Any]) -> str:
    """The category of an operator."""
    verdicts = row.get("verdicts", {})
    if set(verdicts) == {"agrees"}:
        return "agrees"
    if verdicts and set(verdicts) <= {"agrees", "no gradient"}:
        return "no gradient"
    if "ended" in row:
        return "no answer"
    if not verdicts:
        return "no sample"
    if row.get("random"):
        return "random"
    if "differs" in verdicts or "error" in verdicts:
        return "differs"
    if explained := _explained(row):  # last: a reason is for refusals, and hides nothing else
        return explained[0]
    return "partly" if "agrees" in verdicts else next(iter(verdicts))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Counts, and a line for each operator that does not agree."""
    counts = collections.Counter(map(verdict, rows))
    total = sum(row.get("samples", 0) for row in rows)
    agree = sum(row.get("verdicts", {}).get("agrees", 0) for row in rows)
    lines = [f"PyTorch {torch.__version__}: {len(rows)} operators, {total} samples, {agree} agree", ""]
    lines += [f"{n:4} {word:20} {MEANINGS.get(word, '')}".rstrip() for word, n in counts.most_common()]
    for word in [w for w in counts if w != "agrees"]:
        lines += ["", word]
        for row in sorted((r for r in rows if verdict(r) == word), key=lambda r: r["op"]):
            shares = ", ".join(f"{v} {n}" for v, n in row.get("verdicts", {}).items())
            reasons = "; ".join(row.get("reasons", {}).values()) or row.get("ended") or row.get("invalid", "")
            explained = _explained(row)
            why = explained[1] if explained and word == explained[0] else reasons[:160]
            lines.append(f"    {row['op']}: {shares or 'no verdict'}: {why}")
    return "\n".join(lines)


def main() -> None:
    """Runs operators, or prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.rows.read_text().splitlines()] if options.rows.exists() else []
    if options.table:
        print(table(list({row["op"]: row for row in rows}.values())))
        return
    part, parts = map(int, options.part.split("/"))
    ready = set() if options.only else {row["op"] for row in rows}
    names = [op.name for op in operators() if not options.only or op.name in options.only][part::parts]
    for row in rows_of([name for name in names if name not in ready], options.samples, options.seconds):
        with options.rows.open("a") as file:
            file.write(json.dumps(row) + os.linesep)
        print(f"{row['op']}: {verdict(row)} {row.get('verdicts', row)}", flush=True)


if __name__ == "__main__":
    main()
