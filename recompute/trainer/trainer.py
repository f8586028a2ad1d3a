"""`Trainer`: trains a program on one's own data, for epochs, with evaluation, checkpoints and resume."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from ..boundary import as_program, as_texts
from ..communication.mesh import Mesh
from ..compiling.steps import attach_loss
from ..errors import NotFiniteError, UsageError, expect, nearest
from ..exporter.trained import export_trained
from ..language.ir import Value
from ..language.program import Program, Variable
from ..metrics.named import as_metrics
from ..places import Place, as_place
from ..runtime.communication.memory import ResidentGrowth
from ..training.averages import applied, averages_of
from ..training.protocol import AnyOptimizer, as_optimizer
from .alike import compare_evaluations, compare_runs, in_step
from .batches import ahead, samples_of
from .buckets import BucketFeeding, Buckets
from .callbacks import Callback, EarlyStopping, as_callbacks, better, mode_of, monitored
from .epochs import epoch_of, training_sizes
from .evaluation import evaluated, why_no_evaluation
from .feeding import Feeding
from .folder import occupied_by
from .history import History
from .interrupts import SIGNALLED, Interrupts
from .log import Log
from .padding_seen import padding_notes
from .programs import Peak, Programs
from .progress import Progress, begin_lines, epoch_line, shown
from .ranks import Ranks, ranks_of, rows_of, shared
from .run import Run, must_be_fresh, take_over
from .run import save as save_checkpoint
from .saving import Saving, load
from .through_library import Library, need_one_step
from .whole import weights_sha256, whole_program


class Trainer:
    """Trains a program, evaluates it, saves it and resumes it.

    `program`: a forward pass, from `rc.load` or `rc.from_torch`, which `optimizer` (any of `rc.optimizers`, also a
    `RecomputeOptimizer`) makes a training step; or a training step, with `optimizer` None.  `loss`: a Variable, the
    name of a value or of a function of `rc.losses` (None: the program's own, or the natural one).  `metrics`: objects
    of `rc.metrics`, for the evaluation.  `seed`: of the order of samples; the same seed gives the same run, to the bit.
    `place`: where it runs, such as "cuda:0" (None: the CPU).  `callbacks`: see `Callback`.  `monitor`: the result that
    says which epoch is the best, such as "eval.accuracy" (default: the loss).  `quiet`: prints nothing; else the peak
    before the first step, a line for each epoch, and a progress bar on a terminal.

    Where the optimizer keeps moving averages of the weights (`rc.ExponentialMovingAverage`), these are evaluated and
    exported.  After `fit` the program has the trained weights: `rc.export_trained(program)`, `program.evaluate(...)`.

    `mesh` ("dp=4", "dp=2,tp=2", or a `recompute.Mesh`): this is one of so many processes, which share a step: samples
    along dp, layers along pp, operators along other axes (see `rc.DataParallel`); the program's batch is that of all of
    them.  `zero`: what those along dp divide.  `micro_batches`: how many pieces the batch is cut into; the same number
    gives the same bits for any number of ranks along dp (default: the largest power of two, at most 8, that divides the
    batch; not fewer than these ranks).  All make the same calls; callbacks run on rank 0.

    `buckets`: sizes of open dimensions by their names in the model, such as {"sequence": (64, 128, 256)}: samples of
    different sizes (ragged columns) are padded to the next one, a batch has samples of one, and all steps share one
    arena.  `padding`: by input, a value, `rc.data.Pad(value, "left")`, or `rc.data.MaskOf(column)`; by default, labels
    are padded with the one that the loss ignores, other inputs with 0 on the right.

    `library`: steps are taken by the step's library (`rc.write_library`), as a check: the bits are those of a run
    without it, both after `rc.build_for`, which comes first in the process; memory is that of both.
    """

    def __init__(
        self,
        program: Program,
        optimizer: AnyOptimizer | None = None,
        *,
        loss: str | Variable | Callable[[Program], Variable] | None = None,
        metrics: Sequence[Any] = (),
        seed: int = 0,
        place: Place | str | None = None,
        callbacks: Sequence[Callback] = (),
        monitor: str = "",
        quiet: bool = False,
        mesh: str | Mesh | Ranks | None = None,
        zero: int = 0,
        micro_batches: int | None = None,
        buckets: Mapping[str, Any] | None = None,
        padding: Mapping[str, Any] | None = None,
        library: bool = False,
    ) -> None:
        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not 0 <= seed < 1 << 63:
            raise UsageError(f"seed must be a whole number in [0, 2^63), not {seed!r}")
        optimizer = None if optimizer is None else as_optimizer(optimizer)
        name = as_program(program).loss if optimizer is None and loss is None else attach_loss(program, loss)[0]
        place = as_place(place)
        self.ranks = ranks_of(mesh, place)
        if library:
            need_one_step(place, self.ranks.mesh, buckets)
        optimizer = shared(optimizer, self.ranks, program, zero, micro_batches)
        if not name:
            raise UsageError("cannot infer the loss of the training step: give loss=")
        self.program, self.loss, self.seed, self.quiet = program, name, int(seed), quiet or not self.ranks.leads
        self.monitor = monitor
        self.metrics = [m.bind(program) for m in as_metrics(metrics)]
        needed = [program[n].name for m in self.metrics for n in m.needs]
        self.programs = Programs(program, name, optimizer, place, needed, self.ranks)
        self.buckets = None if buckets is None else Buckets(self.programs, buckets, padding)
        if buckets is None and padding:
            raise UsageError("padding says how samples are padded to buckets, and there are none: give buckets")
        self.callbacks = as_callbacks(callbacks)
        #: prints a line of progress, unless `quiet`
        self.say: Callable[[str], object] = print
        self.averages = bool(averages_of(program))
        self._run: Run | None = None
        self._with_library = library

    @property
    def executor(self) -> Any:
        """The executor of all programs."""
        return self.programs.executor

    @property
    def history(self) -> History:
        """The results of the last `fit`."""
        return self._run.history if self._run is not None else History()

    def stop(self, reason: str) -> None:
        """Ends the run after the step that runs."""
        if self._run is not None:
            self._run.asked = reason

    @property
    def _called(self) -> list[Callback]:
        return self.callbacks if self.ranks.leads else []

    def _agree(self, run: Run) -> None:
        """All ranks stop if one is asked to."""
        run.reason = self.ranks.agreed(run.asked)

    # -- training -------------------------------------------------------------------------------------------------

    def fit(
        self,
        data: Any,
        *,
        epochs: int = 1,
        eval_data: Any = None,
        eval_batch: int | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        save: str | PathLike[str] | Saving | None = None,
        resume: bool = False,
    ) -> History:
        """Trains for `epochs` epochs of `data` (anything `rc.data.dataset` takes), and returns the results.

        Each epoch has an order of its own, which follows from the seed (`shuffle`).  A last batch with fewer samples
        runs in a step that is compiled for it, so that every sample counts once, and as much as any other; `drop_last`
        leaves it out, as do models with a fixed batch.  `eval_data` is evaluated after each epoch, in inference mode,
        in batches of `eval_batch` (default: the program's).

        `save`: a folder for checkpoints, log.jsonl, and, at the end, the trained model, model.onnx; or a `Saving`, to
        say more.  `resume` continues from the newest complete checkpoint there, if there is one: the following losses
        and the final weights are the same bits as those of a run that was never interrupted, also with another memory
        budget.  Ctrl-C ends the run after the step, and saves.

        UsageError for data that do not fit the model, JobError for a folder that cannot be written.
        """
        _whole("epochs", expect("epochs", epochs, (int, np.integer), "a whole number of at least 1"))
        saving = save if save is None or isinstance(save, Saving) else Saving(save)
        run = self._begin(data, epochs, eval_data, shuffle, drop_last, saving)
        compare_runs(self, run, resume=resume, drop_last=drop_last, eval_batch=eval_batch)
        with occupied_by(self.ranks, None if saving is None else saving.folder):
            return self._fitted(run, eval_batch, resume=resume)

    def _fitted(self, run: Run, eval_batch: int | None, *, resume: bool) -> History:
        """The run, in a folder of its own."""
        saving, resumed = run.saving, None
        if resume:
            self.programs.move_to_disk()
            resumed = take_over(run, self.program, self._facts(run), self._called)
        else:
            must_be_fresh(run)
        peak = self._planned(run, eval_batch)
        if saving is not None:
            self.ranks.together("the log", lambda: self._log(run, saving, resumed))
        growth = contextlib.nullcontext() if self.ranks.mesh is None else ResidentGrowth()
        try:
            run.log.write("begin", run.history.steps, peak_bytes=peak.total, seed=self.seed, epochs=run.epochs)
            with shown(peak.total, quiet=self.quiet) as run.progress, Interrupts(self.stop), growth as grown:
                self._epochs(run)
            self._end(run, None if run.reason in SIGNALLED or saving is None else saving.folder, grown)
        finally:
            run.log.close()
        return run.history

    def _log(self, run: Run, saving: Saving, resumed: int | None) -> None:
        """Begins the log: that of rank 0, and of the others where it is asked for."""
        rank = self.ranks.rank
        if rank == 0 or saving.log_ranks:
            run.log = Log(saving.folder, resumed, saving.tensorboard and rank == 0, epoch=run.first_epoch, rank=rank)

    def _epochs(self, run: Run) -> None:
        if not self.quiet:
            for line in begin_lines(run.history, run.peaks):
                self.say(line)
        for callback in self._called:
            callback.on_begin(self)
        for number in range(run.first_epoch, run.epochs + 1):
            self._agree(run)
            if run.reason:
                break
            self._epoch(run, number)
        self._agree(run)

    def _begin(
        self, data: Any, epochs: int, eval_data: Any, shuffle: bool, drop_last: bool, saving: Saving | None
    ) -> Run:
        """The run before its first step: the data are checked."""
        feeding = self._feeding(data, self.programs.inputs(training=True), shuffle=shuffle)
        other = None if eval_data is None else self._evaluating(eval_data)
        epoch, notes = epoch_of(feeding, self.programs, drop_last=drop_last)
        notes = [*self.programs.idle_axes(), *notes]
        run = Run(feeding, other, epochs, epoch, saving, drop_last=drop_last, ranks=self.ranks)
        run.monitor = self.monitor or ("eval.loss" if other is not None else "train.loss")
        names = ["train.loss", *(f"eval.{n}" for n in ("loss", *(m.name for m in self.metrics)) if other is not None)]
        for wanted in (run.monitor, *(c.monitor for c in self.callbacks if isinstance(c, EarlyStopping))):
            if not any(wanted == n or wanted.startswith(f"{n}.") for n in names):
                raise UsageError(f"an epoch has no result '{wanted}' to monitor{nearest(wanted, names)}; it has: "
                                 f"{', '.join(names)}")  # fmt: skip
        run.history.notes = notes
        self._run = run
        return run

    def _planned(self, run: Run, eval_batch: int | None) -> Peak:
        """The memory of all programs, before anything runs."""
        training, evaluation = training_sizes(run.data, run.epoch, self.programs), []
        if run.eval_data is not None:
            run.eval_data.batch = _whole("eval_batch", eval_batch) or self.programs.evaluated
            sizes = [self.programs.at(*size) for size in run.eval_data.sizes(run.eval_data.batch)]
            evaluation = [at for at in sizes if not why_no_evaluation(self.programs, run, at)]
        peak = self.programs.plan(training, evaluation)
        run.history.notes += padding_notes(self.programs, run.data)
        if self._with_library:
            self.programs.library = Library(self.program, training, self.programs.own)
        if self.ranks.mesh is not None:  # so that memory that grows while steps run is none of theirs
            self.programs.bind(training, evaluation)
        run.peaks = self.ranks.collect("the predicted memory of all ranks", peak.total)
        run.history.peak_bytes = {
            "predicted": peak.total, "training": peak.values + peak.training, "evaluation": peak.evaluation and
            peak.values + peak.evaluation,
        }  # fmt: skip
        return peak

    def _epoch(self, run: Run, number: int) -> None:
        """The steps of an epoch from `first_batch` on, its evaluation and its checkpoint."""
        first, run.first_batch = run.first_batch, 0
        if not first:
            run.total, run.samples = 0.0, 0
        started, before = time.perf_counter(), run.samples
        run.progress.epoch(number, run.epochs, None if run.epoch is None else run.epoch.batches, first)
        done = first
        with ahead(self._batches(run, number, first)) as feeds:
            for feed, count in in_step(feeds, run.data, self.ranks):
                loss = self._step(run, feed, count)
                done += 1
                run.total, run.samples = run.total + loss * count, run.samples + count
                run.progress.step(loss, count)
                if run.saving is not None and run.saving.due(run.history.steps):
                    self._save(run, number, done)
                if run.reason:
                    break
        if run.reason and (run.epoch is None or done < run.epoch.batches):
            self._save(run, number, done)
            return
        if not run.samples:
            raise UsageError(f"{run.data.name} gave no batch in epoch {number}")
        seconds = time.perf_counter() - started
        results: dict[str, Any] = {
            "epoch": number, "steps": run.history.steps, "samples": run.samples, "seconds": seconds,
            "samples_per_second": (run.samples - before) / max(seconds, 1e-9),
            "train": {"loss": run.total / run.samples},
        }  # fmt: skip
        if run.eval_data is not None:
            results["eval"] = self._evaluated(run.eval_data, run.progress)
        self._finished(run, number, results)

    def _finished(self, run: Run, number: int, results: dict[str, Any]) -> None:
        """Ends an epoch: the log, the best result, callbacks, a checkpoint."""
        run.history.epochs.append(results)
        run.log.write("epoch", run.history.steps, **{k: v for k, v in results.items() if k != "steps"})
        value = monitored(results, run.monitor)
        if better(value, None if run.history.best is None else run.history.best["value"], mode_of(run.monitor)):
            run.history.best = {"epoch": number, "step": run.history.steps, "monitor": run.monitor, "value": value}
            run.best_step = run.history.steps
        if not self.quiet:
            self.say(epoch_line(results, run.epochs))
        for callback in self._called:
            callback.on_epoch(self, results)
        self._save(run, number + 1, 0)

    def _batches(self, run: Run, number: int, first: int) -> Iterator[tuple[dict[str, np.ndarray], int]]:
        """This process's rows of each batch, and the number of samples of the whole batch."""
        rows = self.programs.rows
        if run.epoch is None:
            for feed in run.data.stream(number, first):
                count = samples_of(feed)
                yield rows_of(feed, rows(count)), count
            return
        yield from run.data.read(run.epoch, number, first, rows)

    def _step(self, run: Run, feed: dict[str, np.ndarray], count: int) -> float:
        """A training step of `count` samples; its loss."""
        program = self.programs.training(self.programs.fed(count, feed))
        number = run.history.steps + 1
        try:
            loss = self.programs.step(program, feed)
        except NotFiniteError as e:
            raise NotFiniteError(f"step {number}: {e}") from None
        run.history.steps = number
        run.log.write("step", number, loss=loss, samples=count)
        for callback in self._called:
            callback.on_step(self, number, loss)
        self._agree(run)
        return loss

    def _end(self, run: Run, folder: Path | None, grown: ResidentGrowth | None) -> None:
        """The last figures, and the trained model in a folder."""
        history = run.history
        history.stopped = run.reason
        history.peak_bytes["measured"] = self.programs.measured_bytes()
        if grown is not None:
            peaks = {n: history.peak_bytes[n] for n in ("predicted", "measured")}
            record = {"rank": self.ranks.rank, "peak_bytes": peaks, "resident_growth": grown.peak}
            history.ranks = self.ranks.collect("the memory of all ranks", record)
        history.weights_sha256 = weights_sha256(self.program, self.ranks)
        for callback in self._called:
            callback.on_end(self)
        run.log.write("end", history.steps, stopped=history.stopped, peak_bytes=history.peak_bytes["measured"],
                      weights_sha256=history.weights_sha256)  # fmt: skip
        if not np.isfinite(history.epochs[-1]["train"]["loss"] if history.epochs else 0.0):
            history.notes.append("the loss is not finite: stop_on_nan (--stop-on-nan) says where this comes up first")
        if folder is not None and self.program.source is not None:
            self._export(run, folder)

    def _export(self, run: Run, folder: Path) -> None:
        """Writes model.onnx with the last weights, and best.onnx with those of the best epoch, if that is another."""
        self._exported(folder / "model.onnx")
        there = run.checkpoints
        assert there is not None
        steps = 0 if run.best_step is None else run.best_step, run.history.steps

        def chosen() -> tuple[Any, Any]:
            (folder / "best.onnx").unlink(missing_ok=True)
            return None if run.best_step in (None, steps[1]) else there.at(steps[0]), there.at(steps[1])

        best, last = self.ranks.first("the checkpoint of the best epoch", chosen)
        if best is not None and last is not None:
            load(self.program, best)
            try:
                self._exported(folder / "best.onnx")
            finally:
                load(self.program, last)

    def _exported(self, path: Path) -> None:
        with applied(self.program) if self.averages else contextlib.nullcontext():
            whole = whole_program(self.program, self.ranks)
            self.ranks.first(f"'{path.name}'", lambda: _nothing(whole and export_trained(whole, path)))

    def _facts(self, run: Run) -> dict[str, Any]:
        """Facts that must be equal when the run is resumed."""
        facts = {"seed": self.seed, "batch_size": self.programs.batch, "data": run.data.facts()}
        facts |= {"loss": self.loss, "optimizer": self.programs.options["optimizer"]}
        options = {**self.programs.options, "drop_last": str(run.drop_last), "epochs": str(run.epochs)}
        return {**facts, "micro_batches": self.programs.micro_batches, "options": options}

    def _save(self, run: Run, epoch: int, batch: int) -> None:
        """A checkpoint from which epoch `epoch` goes on at batch `batch`."""
        save_checkpoint(run, self.program, {"epoch": epoch, "batch": batch, **self._facts(run)}, self._called)

    # -- evaluation -----------------------------------------------------------------------------------------------

    def evaluate(self, data: Any, *, batch: int | None = None) -> dict[str, Any]:
        """The mean loss and the metrics over a dataset, in inference mode."""
        feeding = self._evaluating(data)
        feeding.batch = _whole("batch", batch) or self.programs.evaluated
        compare_evaluations(self, feeding)
        return self._evaluated(feeding, Progress())

    def _evaluating(self, data: Any) -> Feeding:
        """Data for the evaluation, with the columns that metrics read besides the program's inputs."""
        columns = [name for m in self.metrics for name in m.columns]
        return self._feeding(data, self.programs.inputs(training=False), also=columns)

    def _feeding(self, data: Any, inputs: Sequence[Value], *, shuffle: bool = False, also: Sequence[str] = ()) -> Any:
        """Data with columns for these inputs, padded to buckets where there are some."""
        if self.buckets is not None:
            return BucketFeeding(data, self.buckets, inputs, self.seed, shuffle, also)
        return Feeding(data, self.program, inputs, self.seed, shuffle, also)

    def _evaluated(self, data: Feeding, progress: Progress) -> dict[str, Any]:
        with applied(self.program) if self.averages else contextlib.nullcontext():
            return evaluated(self.programs, self.metrics, data, progress)

    def predict(
        self, data: Any, outputs: Iterable[str | Variable], *, batch: int | None = None
    ) -> dict[str, np.ndarray]:
        """Values of the forward pass for all samples of a dataset, in its order, in inference mode.

        With a mesh, each process computes all of them.  With buckets, of values that have no dimension of theirs.
        """
        names = as_texts(outputs, "outputs")
        inputs = self.program.for_test(None, names).block.inputs
        feeding = self._feeding(data, inputs)
        feeding.batch = _whole("batch", batch) or self.programs.batch
        parts: dict[str, list[np.ndarray]] = {n: [] for n in names}
        with applied(self.program) if self.averages else contextlib.nullcontext():
            program = whole_program(self.program, self.ranks, everywhere=True)
            assert program is not None
            for feed, _ in feeding.in_order():
                for name, value in zip(names, program.evaluate(feed, names), strict=True):
                    parts[name].append(value)
        return feeding.joined(parts)


def _whole(name: str, value: Any) -> Any:
    """None, or a whole number of at least 1.  UsageError for others."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1):
        raise UsageError(f"{name} must be a whole number of at least 1, not {value!r}")
    return value


def _nothing(made: Any) -> None:
    """So that a model is not sent to the other ranks."""
