"""Which kernels are faster on which family of processors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from convolution_cases import case, in_form
from kernel_cases import applied

from recompute.errors import UsageError
from recompute.language import kernels
from recompute.language.kernels import PROVIDERS, accepting
from recompute.ops.convolution.conv import ConvGradWeight
from recompute.ops.linear.products import MatMul
from recompute.runtime.cpu import PREFERRED, processors, register_all
from recompute.runtime.cpu.device import native
from recompute.runtime.cpu.device.toolchain import Toolchain
from recompute.runtime.cpu.primitives import convolutions
from recompute.runtime.cpu.processors import Processor, convolution_class, nearest_first, product_class
from recompute.runtime.cpu.providers import onednn, products
from recompute.runtime.shared.convolved import convolved

register_all()
NAMES = tuple(n for n in PREFERRED if n in PROVIDERS)
there = pytest.mark.skipif(bool(onednn.unavailable()), reason=onednn.unavailable() or "there")


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, float]]:
    """Ratios of this processor, none at first; what was chosen before is forgotten, and plans that a test makes."""
    ratios: dict[str, float] = {}
    here = Processor("here", "", ratios, {"product tn": 0.9, "product nt": 0.5})
    monkeypatch.setattr(processors, "processor", lambda: here)
    monkeypatch.setattr(kernels, "_answers", {})
    yield ratios
    convolutions.plan.cache_clear()


def test_the_nearest_family() -> None:
    """Itself, then the same vectors, then the same vendor."""
    known = ["amd-avx2", "intel-avx512"]
    found = {n: nearest_first(n, known)[0] for n in ("amd-avx2", "intel-avx2", "amd-avx512", "intel-sse", "aarch64")}
    assert found == {"amd-avx2": "amd-avx2", "intel-avx2": "amd-avx2", "amd-avx512": "intel-avx512",
                     "intel-sse": "intel-avx512", "aarch64": "amd-avx2"}  # fmt: skip
    assert nearest_first("amd-avx512", [*known, "amd-avx512"]) == ["amd-avx512", "intel-avx512", "amd-avx2"]
    assert nearest_first("amd-avx2", []) == []


def test_a_family_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in processors.families():
        monkeypatch.setenv("RECOMPUTE_PROCESSOR", name)
        assert processors.family() == name
    monkeypatch.setenv("RECOMPUTE_PROCESSOR", "vax")
    with pytest.raises(UsageError, match="RECOMPUTE_PROCESSOR is 'vax'; families that were measured: amd-avx2, "):
        processors.family()


def test_a_family_has_no_wider_vectors() -> None:
    """Another process compiles for AVX2, and its steps have the numbers that any have."""
    native.toolchain()  # else the test is skipped
    code = """
import recompute as rc
from recompute.runtime.cpu.device import native
from recompute.data.batches import synthetic_batch
assert "+avx512f" not in native.toolchain().features
program = rc.load(rc.models.build("lenet", batch=2))
loss = rc.losses.cross_entropy(program.outputs[0])
rc.SGD(0.1).minimize(loss)
feed = synthetic_batch(program)
print([float(rc.Executor().run(program, feed, [loss])[0]) for _ in range(2)])
"""
    losses = []
    for family in ("amd-avx2", ""):
        environment = {**os.environ, "RECOMPUTE_PROCESSOR": family}
        code = code if family else code.replace("assert", "#")
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        losses.append(json.loads(done.stdout))
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_convolutions_measured_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that a family's file lacks has the nearest other's share; products have their own family's only."""
    files = {
        "amd-avx2": {"input winograd wide": 0.5, "weight winograd wide": 0.4, "product nn": 0.5},
        "amd-avx512": {"input winograd wide": 0.6, "input spatial wide": 1.5},
        "intel-avx512": {"input spatial wide": 1.1, "product nt": 0.9},
    }
    monkeypatch.setattr(processors, "families", lambda: list(files))
    monkeypatch.setattr(processors, "family", lambda: "intel-avx512")
    monkeypatch.setattr(processors, "read", lambda name: Processor(name, "", files[name], {}))
    processors.processor.cache_clear()
    try:
        here = processors.processor()
    finally:
        processors.processor.cache_clear()
    assert here.family == "intel-avx512"
    assert here.ratios == {
        "input spatial wide": 1.1, "product nt": 0.9, "input winograd wide": 0.6, "weight winograd wide": 0.4,
    }  # fmt: skip


def test_files() -> None:
    """Every family's file says where it was measured, and holds shares of classes."""
    assert {"amd-avx2", "amd-avx512", "intel-avx512"} <= set(processors.families())
    forms = ("thin ", "small ", "long ", "deep ", "")
    kinds = ("output ", "input ", "weight ", *(f"{form}product" for form in forms))
    for name in processors.families():
        found = processors.read(name)
        assert found.about
        assert all(c.startswith(kinds) and 0 < ratio < 100 for c, ratio in found.ratios.items())
        assert {c for c in found.ratios if "product" in c} == set(found.blas)
        assert all(0 < ratio < 100 for ratio in found.blas.values())
    assert processors.processor().family in processors.families()


def test_classes() -> None:
    """Of convolutions by kind, form and channels; of products by what lies transposed and their form."""
    wanted = {
        ("3x3", "output"): "output spatial narrow",
        ("1x1", "input"): "input pointwise narrow",
        ("1x1 stride", "weight"): "weight pointwise strided narrow",
        ("depthwise", "weight"): "weight depthwise",
        ("3x3 many pixels", "input"): "input winograd wide",
        ("3x3 many pixels", "weight"): "weight winograd wide",
    }
    for (name, kind), text in wanted.items():
        c = convolved(applied(*_form(name, kind)))
        assert c is not None
        assert convolution_class(c) == text
    assert product_class(512, 512, 512, ta=False, tb=True) == "product nt"
    assert product_class(512, 512, 511, ta=False, tb=True) == "small product nt"
    assert product_class(512, 512, 511, ta=False, tb=True, small=False) == "product nt"
    assert product_class(64, 1024, 64, ta=True, tb=False, small=False) == "long product tn"
    assert product_class(512, 512, 4, ta=True, tb=False) == "thin product tn"
    assert product_class(256, 30000, 256, ta=False, tb=True) == "long product nt"
    assert product_class(256, 256, 30000, ta=False, tb=False) == "deep product nn"


def _form(name: str, kind: str) -> tuple:
    op, arrays = in_form(*case(name, kind))
    return op, *arrays


@there
@pytest.mark.parametrize("kind", ["output", "input", "weight"])
def test_convolutions_go_where_they_are_faster(kind: str, table: dict[str, float]) -> None:
    """To oneDNN where nothing is known, to our kernels where the table says so, and they are among the chosen ones."""
    bound = applied(*_form("3x3", kind))
    assert accepting(NAMES, bound) == "onednn"
    table[f"{kind} spatial narrow"] = 0.5
    kernels._answers.clear()
    assert accepting(NAMES, bound) == "convolution"
    assert accepting(("onednn",), bound) == "onednn"
    table[f"{kind} spatial narrow"] = 1.5
    kernels._answers.clear()
    assert accepting(NAMES, bound) == "onednn"


@there
def test_gradients_of_weights_in_our_threads(table: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """They are taken where they are a little slower, too, if oneDNN's threads would wait for each other: where parts
    of the batch have no room.  What was not measured is oneDNN's."""
    images = np.ones((4, 32, 24, 24), np.float32)
    form, turned = in_form(ConvGradWeight(pads=(1, 1, 1, 1), kernel=(3, 3)), [images, images])
    bound = applied(form, *turned)
    table["weight winograd narrow"] = 1.05
    monkeypatch.setattr(convolutions, "_WORTH", 1)
    convolutions.plan.cache_clear()
    assert accepting(NAMES, bound) == "onednn"
    monkeypatch.setattr(convolutions, "_SUMMED", 0)
    convolutions.plan.cache_clear()
    kernels._answers.clear()
    assert accepting(NAMES, bound) == "convolution"
    del table["weight winograd narrow"]
    kernels._answers.clear()
    assert accepting(NAMES, bound) == "onednn"


@there
@pytest.mark.skipif("blas" not in PROVIDERS, reason="NumPy's BLAS cannot be called")
def test_products_go_where_they_are_faster(table: dict[str, float]) -> None:
    """To oneDNN, to BLAS where it is clearly faster, to our kernels where they were measured and are about as fast."""
    x = np.ones((128, 128), np.float32)
    tn, nt, nn = (applied(MatMul(transA=a, transB=b), x, x) for a, b in ((1, 0), (0, 1), (0, 0)))
    assert [accepting(NAMES, op) for op in (tn, nt, nn)] == ["blas", "blas", "onednn"]
    table |= {"product tn": 0.95, "product nt": 0.6, "product nn": 1.15}
    kernels._answers.clear()
    assert [accepting(NAMES, op) for op in (tn, nt, nn)] == ["products", "blas", "onednn"]
    table["product nn"] = 1.01
    kernels._answers.clear()
    assert accepting(NAMES, nn) == "products"
    assert accepting(("onednn",), nn) == "onednn"
    assert products.fastest((128, 128, 128, False, False), onednn=True) == "products"
    table["small product nn"] = 1.15  # a small one's own figure comes first
    assert products.fastest((128, 128, 128, False, False), onednn=True) == "onednn"
    assert products.fastest((512, 512, 512, False, False), onednn=True) == "products"


@pytest.mark.skipif("blas" not in PROVIDERS, reason="NumPy's BLAS cannot be called")
def test_products_without_onednn(table: dict[str, float]) -> None:
    """BLAS where nothing was measured, or where it is faster; batches and other types are BLAS's."""
    names = ("blas", "products")
    x = np.ones((128, 128), np.float32)
    op = applied(MatMul(transA=1), x, x)
    assert accepting(names, op) == "blas"
    assert accepting(("products",), op) == "products"
    table["product tn"] = 0.9
    kernels._answers.clear()
    assert accepting(names, op) == "products"
    small = np.ones((64, 64), np.float32)
    assert accepting(names, applied(MatMul(transA=1), small, small)) == "blas"
    wide, batch = x.astype(np.float64), np.ones((2, 128, 128), np.float32)
    assert accepting(names, applied(MatMul(transA=1), wide, wide)) == "blas"
    assert accepting(names, applied(MatMul(), batch, batch)) == "blas"


def test_no_feature_of_x86_is_asked_of_other_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    binding = pytest.importorskip("llvmlite.binding")
    monkeypatch.setattr(binding, "get_host_cpu_features", lambda: binding.targets.FeatureMap({"neon": True}))
    monkeypatch.setattr(binding.Target, "create_target_machine", lambda self, **options: options["features"])
    monkeypatch.setattr(binding, "create_mcjit_compiler", lambda module, machine: None)
    assert Toolchain().machine == "+neon"
