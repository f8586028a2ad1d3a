"""Samples of several lengths: padded to buckets, they train as they would by themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from text_cases import text_model, texts, trainer

import recompute as rc
from recompute.trainer.buckets import BucketEpoch, BucketFeeding


class Losses(rc.Callback):
    """Losses of all steps, as bits."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_step(self, trainer: Any, step: int, loss: float) -> None:
        self.losses.append(loss)


def _whole(kind: str, length: int, batch: int) -> tuple[Any, str]:
    program = rc.load(text_model(kind), batch=batch, dims={"sequence": length})
    loss = rc.losses.cross_entropy(program["logits"]).name
    rc.SGD(0.05).minimize(program[loss])
    return program, loss


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_losses_equal_those_of_samples_padded_to_the_largest(kind):
    said = Losses()
    t = trainer(kind, optimizer=rc.SGD(0.05), callbacks=[said])
    data = texts(18)
    t.fit(data)
    feeding = BucketFeeding(data, t.buckets, t.programs.inputs(training=True), 3, True)
    epoch = feeding.cut(4, rest=True)
    widths, expected, executor = set(), [], rc.Executor()
    programs: dict[int, tuple[Any, str]] = {}
    weights: dict[str, np.ndarray] | None = None
    for feed, count in feeding.read(epoch, 1, 0):
        width = feed["input_ids"].shape[1]
        widths.add(width)
        rest = ((0, 0), (0, 16 - width))
        whole = {n: np.pad(a, rest, constant_values=-100 if n == "label" else 0) for n, a in feed.items()}
        program, loss = programs.setdefault(count, _whole(kind, 16, count))
        if weights is not None:
            program.data.update({n: a for n, a in weights.items() if n in program.data})
        expected.append(executor.run(program, whole, [loss])[0].item())
        weights = {p.name: program.data[p.name] for p in program.parameters}
    assert widths == {4, 8, 16}
    np.testing.assert_allclose(said.losses, expected, rtol=2e-5)


def test_one_arena_which_is_that_of_the_largest_and_known_before():
    largest = trainer(buckets=(16,), batch=4)
    alone = largest.fit(texts(8, shortest=9)).peak_bytes
    many = trainer(batch=4)
    found = many.fit(texts(40), eval_data=texts(12, seed=1)).peak_bytes
    assert found["measured"] == found["predicted"]
    assert found["training"] - alone["training"] < 4096  # tables of the other lengths, and no arena
    shared = {id(s.session.arena) for s in many.executor._sessions.values()}
    assert len(shared) == 1


def test_nothing_is_compiled_after_the_first_epoch():
    counts: list[int] = []
    t = trainer()

    class Count(rc.Callback):
        def on_epoch(self, trainer: Any, results: dict[str, Any]) -> None:
            counts.append(len(t.programs._training) + len(t.programs._evaluation) + len(t.executor._sessions))

    t.callbacks.append(Count())
    t.fit(texts(30), epochs=3, eval_data=texts(9, seed=1))
    assert counts[0] > 6
    assert len(set(counts)) == 1


def test_order_is_a_function_of_seed_and_epoch_and_each_sample_counts_once():
    t = trainer()
    feeding = BucketFeeding(texts(37), t.buckets, t.programs.inputs(training=True), 3, True)
    epoch = feeding.cut(4, rest=True)

    def read(number: int, first: int = 0) -> list[np.ndarray]:
        return [feed["input_ids"] for feed, _ in feeding.read(epoch, number, first)]

    one = read(1)
    assert sum(len(a) for a in one) == 37
    assert [a.tolist() for a in read(1)] == [a.tolist() for a in one]
    assert [a.tolist() for a in read(1, 5)] == [a.tolist() for a in one[5:]]
    assert [a.tolist() for a in read(2)] != [a.tolist() for a in one]
    assert len({a.shape[1] for a in one}) == 3
    kept = BucketFeeding(texts(37), t.buckets, t.programs.inputs(training=True), 3, False)
    assert [a.tolist() for a, _ in _ids(kept, epoch, 1)] == [a.tolist() for a, _ in _ids(kept, epoch, 2)]


def _ids(feeding: Any, epoch: Any, number: int) -> list[tuple[np.ndarray, int]]:
    return [(feed["input_ids"], count) for feed, count in feeding.read(epoch, number, 0)]


def test_an_epoch_without_shuffling_has_batches_as_their_buckets_fill():
    epoch = BucketEpoch((np.array([0, 2, 5, 6]), np.array([1, 3, 4])), 2, True)
    assert epoch.order(0, 1, shuffle=False).tolist() == [0, 1, 1, 0]


def test_resume_is_bit_equal(tmp_path):
    whole = Losses()
    history = trainer(model={"dropout": 0.2}, callbacks=[whole]).fit(texts(30), epochs=3)
    first = Losses()
    t = trainer(model={"dropout": 0.2}, callbacks=[first])

    class Stop(rc.Callback):
        def on_step(self, trainer: Any, step: int, loss: float) -> None:
            if step == 13:
                trainer.stop("enough")

    t.callbacks.append(Stop())
    t.fit(texts(30), epochs=3, save=tmp_path / "run")
    second = Losses()
    resumed = trainer(model={"dropout": 0.2}, callbacks=[second]).fit(
        texts(30), epochs=3, save=tmp_path / "run", resume=True
    )
    assert len(first.losses) == 13
    assert first.losses + second.losses == whole.losses
    assert resumed.weights_sha256 == history.weights_sha256
    with pytest.raises(rc.UsageError, match=r"its data was .*buckets"):
        trainer(buckets=(8, 16)).fit(texts(30), epochs=3, save=tmp_path / "run", resume=True)


def test_images_of_several_sizes():
    program = rc.load(_convolution(), batch=2, dims={"height": 8, "width": 8})
    loss = rc.losses.cross_entropy(program["logits"])
    t = rc.Trainer(program, rc.SGD(0.1), loss=loss, buckets={"height": (4, 8), "width": (4, 8)}, quiet=True)
    g = np.random.default_rng(0)
    sizes = [(3, 4), (4, 7), (8, 8), (2, 2), (5, 3), (8, 5)]
    data = {"x": [g.standard_normal((1, h, w)).astype(np.float32) for h, w in sizes], "label": np.arange(6) % 3}
    history = t.fit(data, epochs=2)
    assert np.isfinite(history.epochs[-1]["train"]["loss"])
    assert {dict(at.dims)["height"] * 10 + dict(at.dims)["width"] for at in t.programs._training} == {44, 48, 88} | {84}
    assert t.predict(data, ["logits"])["logits"].shape == (6, 3)


def _convolution() -> Any:
    from onnx import TensorProto, helper, numpy_helper

    g = np.random.default_rng(1)
    tensors = {"w": g.standard_normal((4, 1, 3, 3)), "fc": g.standard_normal((4, 3))}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("GlobalAveragePool", ["c"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("MatMul", ["f", "fc"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes, "images", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 1, "height", "width"])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 3])],
        [numpy_helper.from_array(a.astype(np.float32), n) for n, a in tensors.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def test_masks_are_made_where_the_data_have_none_and_sides_are_kept():
    t = trainer(
        "bert",
        padding={
            "attention_mask": rc.data.MaskOf("input_ids", "left"),
            "input_ids": rc.data.Pad(7, "left"),
            "label": rc.data.Pad(-100, "left"),
        },
    )
    data = {"input_ids": [[1, 2], [3, 4, 5]], "label": [[1, 2], [3, 4, 5]]}
    feeding = BucketFeeding(data, t.buckets, t.programs.inputs(training=True), 0, False)
    ((feed, _),) = feeding.read(feeding.cut(4, rest=True), 1, 0)
    assert feed["input_ids"].tolist() == [[7, 7, 1, 2], [7, 3, 4, 5]]
    assert feed["attention_mask"].tolist() == [[0, 0, 1, 1], [0, 1, 1, 1]]
    assert feed["label"].tolist() == [[-100, -100, 1, 2], [-100, 3, 4, 5]]


def _mean_square() -> rc.Trainer:
    program = rc.load(text_model(), batch=4, dims={"sequence": 16})
    loss = rc.losses.mse(program["logits"])
    return rc.Trainer(program, rc.SGD(0.1), loss=loss, buckets={"sequence": (8, 16)}, quiet=True)


def _all_labels_count() -> rc.Trainer:
    program = rc.load(text_model(), batch=4, dims={"sequence": 16})
    loss = rc.losses.cross_entropy(program["logits"], ignore_index=None)
    return rc.Trainer(program, rc.SGD(0.1), loss=loss, buckets={"sequence": (8, 16)}, quiet=True)


def _stream() -> Any:
    return rc.data.dataset(lambda: iter([]))


def _unknown() -> Any:
    program = rc.load(text_model(), batch=4, dims={"sequence": 16})
    return rc.Trainer(program, rc.SGD(0.1), loss="cross_entropy", buckets={"seq": (8, 16)})


_BOXES = {"input_ids": [[1], [2, 3]], "label": [np.zeros((1, 32), np.float32), np.zeros((2, 32), np.float32)]}
_UNLIKE = {"input_ids": [[1], [2, 3]], "label": [[1], [2, 3, 4, 5, 6]]}
#: what is done, and what the error says
CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "no such dimension": (_unknown, r"no open dimension 'seq'.*open are: sequence"),
    "no sizes": (lambda: trainer(buckets=()), "'sequence' needs whole numbers of at least 1"),
    "longer than the largest": (lambda: trainer(buckets=(4, 8)).fit(texts(9)), r"sample \d+ of arrays .*bucket, 8"),
    "labels that all count": (lambda: _all_labels_count().fit(texts(9)), r"what pads 'label'.*ignores no label"),
    "numbers as labels": (lambda: _mean_square().fit(_BOXES), "what pads 'label'"),
    "more labels than words": (lambda: trainer().fit(_UNLIKE), r"column 'label' of arrays has \[5\] in sample 1"),
    "a stream": (lambda: trainer().fit(_stream()), "any order"),
    "a mesh": (lambda: trainer(mesh="dp=1"), "not combined with a mesh"),
    "padding of nothing": (lambda: trainer(padding={"words": 1}).fit(texts(9)), "padding: 'words' is no input"),
    "no such padding": (lambda: trainer(padding={"input_ids": 0.5}).fit(texts(9)), "cannot be padded with 0.5"),
    "no such side": (lambda: trainer(padding={"input_ids": rc.data.Pad(0, "top")}).fit(texts(9)), "the side must be"),
    "values of all sizes": (lambda: trainer().predict(texts(9), ["logits"]), "'logits' has another size in each"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_is_refused_by_name(case):
    make, text = CASES[case]
    with pytest.raises(rc.UsageError, match=text):
        make()


def test_ragged_columns_without_buckets_say_what_to_give():
    program = rc.load(text_model(), batch=4, dims={"sequence": 16})
    t = rc.Trainer(program, rc.SGD(0.1), loss="cross_entropy", quiet=True)
    with pytest.raises(rc.UsageError, match=r"different sizes: .*buckets"):
        t.fit(texts(9))


def test_micro_batches_and_budgets_with_buckets():
    plain, merged = Losses(), Losses()
    data = texts(24)
    trainer(batch=4, optimizer=rc.SGD(0.05), callbacks=[plain], buckets=(16,)).fit(data)
    budget = rc.RecomputeOptimizer(rc.SGD(0.05)).set_budget("90%")
    t = trainer(batch=4, optimizer=budget, callbacks=[merged], buckets=(16,))
    t.fit(data)
    assert plain.losses == merged.losses
    small = trainer(batch=4, optimizer=rc.RecomputeOptimizer(rc.SGD(0.05)).set_budget("90%"))
    found = small.fit(data).peak_bytes
    assert found["measured"] == found["predicted"]
    assert all(p.plan is None for at, p in small.programs._training.items() if dict(at.dims)["sequence"] < 16)
    accumulated = trainer(batch=2, optimizer=rc.GradientMergeOptimizer(rc.SGD(0.05), 2))
    same = Losses()
    accumulated.callbacks.append(same)
    accumulated.fit(data)
    unmerged = Losses()
    trainer(batch=4, optimizer=rc.SGD(0.05), callbacks=[unmerged]).fit(data)
    assert len(same.losses) == len(unmerged.losses)
    assert same.losses[0] == pytest.approx(unmerged.losses[0], rel=0.1)  # means of two means: other weights of words


def test_padding_that_has_a_part_in_the_loss_is_said():
    masked, causal = trainer("bert"), trainer("gpt2")
    assert masked.fit(texts(9)).notes == causal.fit(texts(9)).notes == []
    left = {"input_ids": rc.data.Pad(0, "left"), "label": rc.data.Pad(-100, "left")}
    (note,) = trainer("gpt2", padding=left).fit(texts(9)).notes
    assert note.startswith("padding has a part in the loss: that of sample")
    ones = {**texts(9), "attention_mask": [[1] * len(row) for row in texts(9)["input_ids"]]}
    (note,) = trainer("bert", padding={"attention_mask": 1}).fit(ones).notes
    assert "other values in the padding of input_ids" in note
    assert trainer("bert").fit(ones).notes == []
