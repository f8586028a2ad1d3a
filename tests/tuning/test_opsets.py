"""Files of opsets 9 to 21: edited, trained and exported they keep their opset, inputs, domains and names."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from tests.opset_cases import NETWORKS, OPSETS, ROWS, feed_of, row

import recompute as rc

ort = pytest.importorskip("onnxruntime")
BATCH = 4


def cases(*names: Any) -> list[Any]:
    """At each opset; those of opset 9 are quick to have (of networks, the first), the others are marked slow."""
    quick = {(9, *combined) for combined in itertools.product(names[0][:1] if len(names) > 1 else names[0], *names[1:])}
    every = itertools.product(OPSETS, *names)
    return [pytest.param(*c, marks=() if c in quick else pytest.mark.slow) for c in every]


close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)


def scores(model: onnx.ModelProto, feed: dict[str, np.ndarray]) -> np.ndarray:
    """ONNX Runtime's first output."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    found = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return found.run(None, feed)[0]


def trained(program: rc.Program, feed: dict[str, np.ndarray]) -> list[float]:
    """The losses of three steps; adapters begin with numbers whose gradients reach all that they have."""
    for name in (n for n in program.data if "lora_B" in n):
        program.data[name] = np.linspace(-1, 1, program.data[name].size, dtype=np.float32).reshape(
            program.data[name].shape
        )
    loss = rc.losses.cross_entropy(program)
    rc.SGD(0.1).minimize(loss)
    executor, labels = rc.Executor(), np.arange(BATCH) % 3
    losses = [float(executor.run(program, {**feed, "label": labels}, [loss])[0]) for _ in range(3)]
    assert np.isfinite(losses).all() and losses[0] != losses[1]
    return losses


def interface(model: onnx.ModelProto) -> Any:
    """Inputs with their dimensions, opsets."""
    dims = [(i.name, [d.dim_param or d.dim_value for d in i.type.tensor_type.shape.dim]) for i in model.graph.input]
    return dims, [(o.domain, o.version) for o in model.opset_import]


def names(model: onnx.ModelProto) -> set[str]:
    return {o for n in model.graph.node for o in n.output} | {t.name for t in model.graph.initializer}


#: edit → what it makes of a program, a weight that adapters can have, and a value before the head
EDITS: dict[str, Callable[[rc.Program, str, str], rc.Program]] = {
    "none": lambda p, w, at: p,
    "replace_head": lambda p, w, at: rc.edit.replace_head(p, 3),
    "replace_head without bias": lambda p, w, at: rc.edit.replace_head(p, 3, bias=False),
    "lora": lambda p, w, at: rc.lora(p, w, r=2),
    "lora with dropout": lambda p, w, at: rc.lora(p, w, r=2, dropout=0.25),
    "dora": lambda p, w, at: rc.lora(p, w, r=2, dora=True),
    "dora with dropout": lambda p, w, at: rc.lora(p, w, r=2, dora=True, dropout=0.25),
    "freeze": lambda p, w, at: p.freeze(w) or p,
    "cut": lambda p, w, at: rc.edit.linear(rc.edit.cut(p, at), 3),
    "linear without bias": lambda p, w, at: rc.edit.linear(rc.edit.cut(p, at), 3, bias=False),
    "quantize_frozen": lambda p, w, at: rc.quantize_frozen(p, w),
    "prepare_qat": lambda p, w, at: rc.prepare_qat(p, reduce_range=True),
}
#: edits that need DequantizeLinear with an axis → the opset that files before 13 get
RAISED = {"quantize_frozen": 18, "prepare_qat": 21}


@functools.cache
def losses_of(network: str, edit: str) -> list[float]:
    """At the newest opset."""
    make, weight, at = NETWORKS[network]
    model = make(OPSETS[-1])
    return trained(EDITS[edit](rc.load(model, batch=BATCH), weight, at), feed_of(model, BATCH))


@pytest.mark.parametrize(("opset", "network", "edit"), cases(list(NETWORKS), list(EDITS)))
def test_edits_keep_the_form_of_the_file(opset: int, network: str, edit: str) -> None:
    make, weight, at = NETWORKS[network]
    model = make(opset)
    feed = feed_of(model, BATCH)
    program = EDITS[edit](rc.load(model, batch=BATCH), weight, at)
    np.testing.assert_allclose(trained(program, feed), losses_of(network, edit), rtol=1e-5)
    merges = edit in ("lora", "dora", "lora with dropout", "dora with dropout")
    inputs, opsets = interface(model)
    if opset < 13 and edit in RAISED:
        opsets = [("", RAISED[edit])]
    for exported in [rc.export_trained(program), *([rc.merge_adapters(program)] if merges else [])]:
        onnx.checker.check_model(exported, full_check=edit != "prepare_qat")
        assert interface(exported) == ([i for i in inputs if i[0] in {n.name for n in exported.graph.input}], opsets)
        (y,) = exported.graph.output
        assert y.type.tensor_type.shape.dim[0].dim_param == "N"
        assert names(exported) <= names(model) or edit not in ("none", "freeze")
        given = {i.name: feed[i.name] for i in exported.graph.input}
        got = scores(exported, given)
        if edit == "quantize_frozen":  # ONNX Runtime rounds activations of such products, too
            assert np.abs(got - program.evaluate(feed)[0]).max() < 0.05 * np.abs(got).max()
            continue
        tolerance = {"rtol": 1e-3, "atol": 1e-3} if edit == "prepare_qat" else {}
        close(got, program.evaluate(feed)[0], **tolerance)
        close(scores(exported, {n: a[:1] for n, a in given.items()}), got[:1], **tolerance)


@pytest.mark.parametrize(("opset", "network"), cases(list(NETWORKS)))
def test_a_file_of_batch_1_is_trained_at_another(opset: int, network: str) -> None:
    make = NETWORKS[network][0]
    fixed = make(opset, fixed=1)
    feed = feed_of(fixed, BATCH)
    program = rc.load(fixed, batch=BATCH)
    np.testing.assert_allclose(trained(program, feed), losses_of(network, "none"), rtol=1e-5)
    exported = rc.export_trained(program)
    onnx.checker.check_model(exported, full_check=True)
    inputs, opsets = interface(exported)
    assert opsets == [("", opset)] and [(n, d[0]) for n, d in inputs] == [(n, "batch") for n in feed]
    assert exported.graph.output[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    close(scores(exported, feed), program.evaluate(feed)[0])


@functools.cache
def losses_of_row(name: str, opset: int) -> list[float]:
    """Of the newest of the opsets in which a row is the same."""
    same = ROWS[name][1]
    model = row(name, OPSETS[-1] if opset >= same else same - 1)
    return trained(rc.load(model, batch=BATCH), feed_of(model, BATCH))


@pytest.mark.parametrize(("opset", "name"), [c for c in cases(list(ROWS)) if c.values[0] >= ROWS[c.values[1]][2]])
def test_operators_whose_signature_changed(opset: int, name: str) -> None:
    """Values and, by the losses of three steps, gradients; also of a file that fixes its batch."""
    model = row(name, opset)
    feed = feed_of(model, BATCH)
    program, opened = rc.load(model, batch=BATCH), rc.load(row(name, opset, fixed=1), batch=BATCH)
    if name != "BatchNormalization":
        close(scores(model, feed), program.evaluate(feed)[0])
    for p in (program, opened):
        np.testing.assert_allclose(trained(p, feed), losses_of_row(name, opset), rtol=1e-5)
        exported = rc.export_trained(p)
        assert interface(exported)[1] == [("", opset)]
        onnx.checker.check_model(exported, full_check=True)
        close(scores(exported, feed), p.evaluate(feed)[0])
