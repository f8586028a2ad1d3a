"""Training for epochs: batches, means, evaluation, memory, callbacks."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from trainer_cases import data, model, trainer

import recompute as rc
from recompute.errors import UsageError
from recompute.trainer.order import Order


def by_hand(samples: dict, batch: int, epochs: int) -> list[float]:
    """The losses of each step by executors alone, a program for each size of a batch, with shared arrays."""
    t = trainer(batch=batch)
    executor, losses = rc.Executor(), []
    count = len(samples["label"])
    for epoch in range(1, epochs + 1):
        order = Order(count, 3, epoch).at(0, count)
        for begin in range(0, count, batch):
            part = order[begin : begin + batch]
            program = t.programs.training(t.programs.at(len(part)))
            (loss,) = executor.run(program, {n: a[part] for n, a in samples.items()}, [t.loss])
            losses.append(float(loss))
    return losses


def test_losses_are_those_of_the_steps_by_hand() -> None:
    samples = data(50)
    seen: list[float] = []

    class Keep(rc.Callback):
        def on_step(self, trainer: object, step: int, loss: float) -> None:
            seen.append(loss)

    t = trainer(callbacks=[Keep()])
    history = t.fit(samples, epochs=3)
    assert history.steps == 12
    assert seen == by_hand(samples, 16, 3)
    sizes = np.array([16, 16, 16, 2] * 3)
    means = [float(np.sum((np.array(seen) * sizes)[4 * e : 4 * e + 4])) / 50 for e in range(3)]
    assert [e["train"]["loss"] for e in history.epochs] == pytest.approx(means, rel=1e-12)
    assert history.epochs[-1]["train"]["loss"] < 0.7 * history.epochs[0]["train"]["loss"]


def test_the_small_last_batch_counts_as_much_as_its_samples() -> None:
    """Without statistics of batches, a step of 2 samples is that of PyTorch: the mean over 2."""
    program = rc.load(model(dropout=0.0, normalised=False), batch=4)
    t = rc.Trainer(program, rc.SGD(0.5), loss=rc.losses.cross_entropy(program["logits"]), quiet=True)
    samples = data(6)
    before = {n: np.array(a) for n, a in program.data.items()}
    t.fit(samples, epochs=1, shuffle=False)
    weights = {n: before[n].astype(np.float64) for n in ("fc1.weight", "fc1.bias", "fc2.weight")}
    for part in (slice(0, 4), slice(4, 6)):
        x, label = samples["x"][part].astype(np.float64), samples["label"][part]
        h = x @ weights["fc1.weight"] + weights["fc1.bias"]
        r = np.maximum(h, 0)
        logits = r @ weights["fc2.weight"]
        p = np.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        p[np.arange(len(label)), label] -= 1
        p /= len(label)
        down = (p @ weights["fc2.weight"].T) * (h > 0)
        weights["fc2.weight"] -= 0.5 * r.T @ p
        weights["fc1.weight"] -= 0.5 * x.T @ down
        weights["fc1.bias"] -= 0.5 * down.sum(0)
    for name, wanted in weights.items():
        np.testing.assert_allclose(program.data[name], wanted, rtol=2e-5, atol=2e-6)


def test_recomputed_and_plain_runs_end_with_the_same_bits() -> None:
    plain = trainer().fit(data(), epochs=2)
    recomputed = trainer(optimizer=rc.RecomputeOptimizer(rc.Adam(1e-2)).set_checkpoints(["r"])).fit(data(), epochs=2)
    assert plain.weights_sha256 == recomputed.weights_sha256
    assert [e["train"] for e in plain.epochs] == [e["train"] for e in recomputed.epochs]


def test_evaluation_uses_running_statistics_and_the_same_weights() -> None:
    t = trainer(metrics=(rc.metrics.Accuracy(),))
    held = data(37, seed=1)
    history = t.fit(data(), epochs=4, eval_data=held, eval_batch=10)
    (logits,) = t.program.evaluate({"x": held["x"]}, ["logits"])
    p = logits.astype(np.float64)
    log = p - np.log(np.exp(p).sum(1, keepdims=True))
    found = history.epochs[-1]["eval"]
    assert found["loss"] == pytest.approx(-log[np.arange(37), held["label"]].mean(), rel=1e-5)
    assert found["accuracy"] == (logits.argmax(1) == held["label"]).mean()
    assert t.evaluate(held) == pytest.approx(found, rel=1e-6)
    np.testing.assert_array_equal(t.predict({"x": held["x"]}, ["logits"], batch=37)["logits"], logits)


def test_the_peak_is_said_before_and_kept_to_the_byte() -> None:
    said: list[int] = []

    class Said(rc.Callback):
        def on_begin(self, trainer: object) -> None:
            said.append(trainer.history.peak_bytes["predicted"])  # type: ignore[attr-defined]

    history = trainer(callbacks=[Said()]).fit(data(), epochs=1, eval_data=data(21, seed=1))
    assert said == [history.peak_bytes["measured"]]
    assert history.peak_bytes["evaluation"] <= history.peak_bytes["training"] == history.peak_bytes["predicted"]


def test_on_a_device_each_program_has_memory_of_its_own() -> None:
    """On emulated CUDA: the same curve but for rounding, and the memory that was said."""
    place = rc.EmulatedCUDAPlace()
    small = {n: a[:10] for n, a in data().items()}
    made = [trainer(batch=4, place=p, optimizer=rc.SGD(0.1)) for p in (None, place)]
    here, there = (t.fit(small, epochs=1, eval_data=small) for t in made)
    assert there.epochs[0]["train"]["loss"] == pytest.approx(here.epochs[0]["train"]["loss"], rel=1e-5)
    assert there.epochs[0]["eval"]["loss"] == pytest.approx(here.epochs[0]["eval"]["loss"], rel=1e-5)
    assert there.peak_bytes["measured"] == there.peak_bytes["predicted"] > here.peak_bytes["predicted"]


def test_a_fixed_batch_leaves_the_rest_out_and_says_so() -> None:
    fixed = model()
    fixed.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 16
    program = rc.load(fixed)
    t = rc.Trainer(program, rc.Adam(), loss=rc.losses.cross_entropy(program["logits"]), quiet=True)
    history = t.fit(data(50), epochs=1)
    assert history.steps == 3
    assert "2 of 50 samples are left out" in history.notes[0]


def test_streams_of_batches() -> None:
    samples = data(40)
    batches = [{n: a[i : i + 16] for n, a in samples.items()} for i in range(0, 40, 16)]
    history = trainer().fit(batches, epochs=2)
    assert history.steps == 6
    assert history.epochs[0]["samples"] == 40


def test_early_stopping_and_the_best_epoch() -> None:
    t = trainer(callbacks=[rc.EarlyStopping("train.loss", patience=2, min_delta=100.0)])
    history = t.fit(data(), epochs=9)
    assert len(history.epochs) == 3
    assert history.stopped.startswith("train.loss has not improved for 2 epochs")
    assert history.best is not None
    assert history.best["epoch"] == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs must be a whole number of at least 1, not 0"),
        ({"resume": True}, "resume needs save"),
    ],
)
def test_wrong_options(options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        trainer().fit(data(), **options)


def test_what_is_monitored_is_known_before() -> None:
    with pytest.raises(UsageError, match=r"no result 'eval.f1' to monitor; it has: train.loss"):
        trainer(monitor="eval.f1").fit(data())


def test_errors_of_the_data_come_before_the_first_step() -> None:
    t = trainer()
    with pytest.raises(UsageError, match="'label'"):
        t.fit({"x": data()["x"]})
    wrong = data()
    wrong["label"][7] = 3
    with pytest.raises(UsageError, match=r"has 3 in sample 7 .* but the model takes 0 to 2"):
        t.fit(wrong)
    wrong = data()
    wrong["x"][9, 1] = np.nan
    with pytest.raises(UsageError, match="has NaN in sample 9"):
        t.fit(wrong)
    assert t.program.data["step"] == 0


@pytest.mark.parametrize("count", [21, 5])
def test_with_loss_scaling_every_sample_is_evaluated(count: int) -> None:
    """Also in the smaller last batch, and where there are fewer samples than a batch."""
    history = trainer(optimizer=rc.amp.decorate(rc.Adam(1e-2))).fit(data(32), eval_data=data(count, seed=1))
    plain = trainer(optimizer=rc.amp.decorate(rc.Adam(1e-2))).fit(data(32), eval_data=data(count, seed=1), eval_batch=1)
    assert history.notes == []
    assert history.epochs[0]["eval"]["loss"] == pytest.approx(plain.epochs[0]["eval"]["loss"], rel=1e-5)


def test_fewer_samples_to_evaluate_than_a_fixed_batch_are_an_error_before_the_first_step() -> None:
    program = rc.load(model(), batch=16)
    loss = rc.losses.cross_entropy(program["logits"])
    program.again = None
    with pytest.raises(rc.UsageError, match="5 samples to evaluate, fewer than a batch of 16"):
        rc.Trainer(program, rc.Adam(1e-2), loss=loss, quiet=True).fit(data(32), eval_data=data(5))


def test_predictions_are_fitted_as_the_data_of_fit() -> None:
    t = trainer(metrics=("accuracy",))
    samples = data(20)
    t.fit(samples, epochs=1)
    wide = {"label": samples["label"], "x": samples["x"].astype(np.float64)}
    found = t.predict(wide, ["logits"], batch=8)["logits"]
    np.testing.assert_array_equal(found, t.predict({"x": samples["x"]}, ["logits"], batch=8)["logits"])
    np.testing.assert_allclose(found, t.predict({"x": samples["x"]}, ["logits"])["logits"], rtol=1e-5, atol=1e-6)
    assert t.metrics[0].name == "accuracy"


def test_what_a_run_prints(capsys: pytest.CaptureFixture[str]) -> None:
    t = trainer()
    t.quiet = False
    t.fit(data(10), epochs=1, eval_data=data(10))
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("note: a batch of 16 is more than the 10 samples")
    assert out[1].startswith("peak memory: ")
    assert out[2].startswith("epoch 1/1: train loss ")


def test_a_callback_is_a_callback() -> None:
    with pytest.raises(UsageError, match=r"a callback must be of a class that inherits from rc\.Callback, not <object"):
        trainer(callbacks=[object()])


def test_programs_that_share_an_arena_take_turns() -> None:
    """docs/threads.md: different programs may run in threads with one executor."""
    t = trainer()
    t.fit(data(32), eval_data=data(32, seed=1))
    executor, outputs = t.executor, t.programs.outputs
    first, other = (t.programs.evaluation(t.programs.at(b)) for b in (16, 8))
    feeds = {b: {n: a[:b] for n, a in data(32).items()} for b in (16, 8)}
    (wanted,) = executor.run(first, feeds[16], outputs)
    ended, errors = threading.Event(), []

    def beside() -> None:
        try:
            while not ended.is_set():
                executor.run(other, feeds[8], outputs)
        except Exception as e:
            errors.append(e)

    thread = threading.Thread(target=beside)
    thread.start()
    try:
        for _ in range(500):
            (found,) = executor.run(first, feeds[16], outputs)
            assert found == wanted
    finally:
        ended.set()
        thread.join(10)
    assert errors == []
