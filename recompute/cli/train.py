"""`recompute-train`: trains a model on one's own data, for epochs, with evaluation, checkpoints and resume."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import OpenDimensionsError, RecomputeError, UsageError
from ..places import CPUPlace, as_place
from ..runtime.communication.started import given_rank
from ..support.files import replacing
from ..trainer.ranks import Ranks, ends_like_first, meet, ranks_of
from . import ending as cli_ending
from .model import ModelJob, ModelReport
from .outputs import begin_portable, build_library_for
from .train_arguments import check, parser
from .values import bucket_sizes, finite, insertions_of, paddings, split

#: losses whose labels are classes
_OF_CLASSES = ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss", "LinearCrossEntropy")


def main(argv: Sequence[str] | None = None) -> int:
    """The console script.  Returns the exit code."""
    args = argparse.Namespace(verbose=False)
    with cli_ending.prepared(args):
        try:
            code = _run(argv, args)
            cli_ending.flush()
        except BaseException as e:
            code = cli_ending.exit_code(e, args.verbose, "recompute-train")
    return code


def _run(argv: Sequence[str] | None, args: argparse.Namespace) -> int:
    """Errors that all ranks have are printed once; one that this process has alone ends all of them."""
    try:
        parser().parse_args(argv, args)
        meet(args.mesh)
        ranks = ranks_of(args.mesh, None if args.mesh is None else as_place(args.place))
    except RecomputeError as e:
        if ends_like_first(str(e)):
            return e.exit_code
        raise type(e)(f"rank {given_rank()}: {e}") if given_rank() not in ("", "0") else e from None
    args.quiet |= not ranks.leads
    try:
        check(args)
        if args.library:
            _begin_library(portable=args.portable_bits)
        elif args.portable_bits:
            begin_portable(args)
        return _TrainJob(args, ranks).run()
    except RecomputeError as e:
        if ranks.repeats(str(e)):
            return e.exit_code
        raise type(e)(f"rank {ranks.rank}: {e}") if not ranks.leads else e from None


class _TrainJob(ModelJob):
    """One invocation, from the model to the results."""

    report: ModelReport
    again = True

    def __init__(self, args: argparse.Namespace, ranks: Ranks) -> None:
        super().__init__(args, ModelReport(model=args.model))
        self.ranks = ranks

    def run(self) -> int:
        """Trains.  Returns the exit code: 130 after Ctrl-C, 143 after SIGTERM, once the run is saved."""
        from ..data import Dataset, dataset
        from ..trainer.buckets import steps_of_epoch
        from ..trainer.callbacks import EarlyStopping
        from ..trainer.saving import Saving
        from ..trainer.trainer import Trainer

        args = self.args
        data = dataset(args.data)
        assert isinstance(data, Dataset)
        evaluation = None if args.eval is None else dataset(args.eval)
        _check_classes(data, evaluation)
        place = as_place(args.place)
        buckets, padding = bucket_sizes(args.buckets), paddings(args.pad)
        program = self._loaded()
        if args.batch is not None and program.block.batch != args.batch:
            raise UsageError(
                f"--batch {args.batch} conflicts with the model's fixed batch size {program.block.batch}: "
                "export it with a dynamic first dimension, or leave out --batch"
            )
        if args.batch is None:
            self.say(f"batch: {program.block.batch} (--batch N sets it, where the model leaves it open)")
        loss = self.attach_loss(program)
        a_step = (program.block.batch or 1) * (args.gradient_merge or 1)
        steps = args.epochs * steps_of_epoch(program, data, buckets, padding, a_step)
        optimizer = self._optimizer(steps)
        metrics = self._metrics(program, evaluation is not None)
        callbacks: list[Any] = []
        if args.patience is not None:
            callbacks.append(
                EarlyStopping(args.monitor or ("eval.loss" if evaluation is not None else "train.loss"), args.patience)
            )
        saving = None
        if args.save is not None:
            saving = Saving(args.save, steps=args.save_steps, keep=args.keep, tensorboard=args.tensorboard,
                            log_ranks=args.log_ranks)  # fmt: skip
        trainer = Trainer(program, optimizer, loss=loss, metrics=metrics, seed=args.seed, place=place,
                          callbacks=callbacks, monitor=args.monitor, quiet=args.quiet, mesh=self.ranks, zero=args.zero,
                          micro_batches=args.micro_batches, buckets=buckets or None,
                          padding=padding, library=args.library)  # fmt: skip
        trainer.say = self.say
        history = trainer.fit(
            data, epochs=args.epochs, eval_data=evaluation, eval_batch=args.eval_batch, shuffle=not args.no_shuffle,
            drop_last=args.drop_last, save=saving, resume=args.resume,
        )  # fmt: skip
        if self.ranks.leads:
            self._finish(history, program)
        return {"interrupted": 130, "ended by SIGTERM": 143}.get(history.stopped, 0)

    def _loaded(self) -> Any:
        """The program; where dimensions are open, what the file holds is printed before the error."""
        try:
            return self.load()
        except OpenDimensionsError:
            if not self.has_sizes():
                self.look()
            raise

    def _optimizer(self, steps: int) -> Any:
        """The optimizer with its schedule and clipping, precision and recomputation."""
        from ..passes.target import Target
        from ..training.amp import with_precision
        from ..training.averages import ExponentialMovingAverage
        from ..training.gradient_merge import GradientMergeOptimizer
        from ..training.recompute_optimizer import RecomputeOptimizer
        from ..training.with_passes import WithPasses

        args = self.args
        optimizer = with_precision(self.optimizer(_rate(args, steps), _clipping(args)), args.precision)
        if inserted := insertions_of(args):
            optimizer = WithPasses(optimizer, inserted)
        if args.ema is not None:
            optimizer = ExponentialMovingAverage(optimizer, args.ema)
        patterns = self.checkpoint_patterns()
        if args.gradient_merge is not None:
            optimizer = GradientMergeOptimizer(optimizer, args.gradient_merge)
        elif patterns is not None or args.budget is not None or args.allow is not None:
            optimizer = RecomputeOptimizer(optimizer)
        if args.allow is not None:
            optimizer.set_approximations(args.allow)
        if patterns is not None:
            return optimizer.set_checkpoints(patterns)
        if args.budget is None:
            return optimizer
        place = as_place(args.place)
        target = None if place == CPUPlace() else Target(place)
        # slices would add gradients up in another order: the bits of a run must not depend on its budget
        return optimizer.set_budget(args.budget, target=target, slicing=False)

    def _metrics(self, program: Any, evaluates: bool) -> list[Any]:
        """The metrics of --metrics; by default accuracy, where the labels are classes."""
        from .. import metrics

        if self.args.metrics is not None:
            return [metrics.named(name) for name in split(self.args.metrics)]
        classes = any(op.op.name in _OF_CLASSES for op in program.operators)
        return [metrics.Accuracy()] if evaluates and classes else []

    def _finish(self, history: Any, program: Any) -> None:
        """Prints and writes the results; adapters in PEFT's files beside the model."""
        from ..exporter.compiled import save_model
        from ..tuning import requantize, save_adapter, save_onnx_adapter

        if history.epochs and not math.isfinite(history.epochs[-1]["train"]["loss"]):
            cli_ending.tell(f"warning: {history.notes[-1]}")
        peaks = history.peak_bytes
        same = "as predicted" if peaks["measured"] == peaks["predicted"] else f"predicted {peaks['predicted']:,}"
        ended = f" ({history.stopped})" if history.stopped else ""
        if history.steps == (history.resumed_at or 0):
            self.say(f"no step was left to do after {history.steps:,}{ended}")
        else:
            self.say(f"trained {history.steps:,} steps{ended}, peak {peaks['measured']:,} bytes ({same})")
        if self.args.save is not None:
            if self.args.lora is not None:
                save_adapter(program, Path(self.args.save) / "adapter")
            if self.args.onnx_adapter:
                save_onnx_adapter(program, Path(self.args.save) / "adapter")
            if self.args.dequantize is not None:
                save_model(requantize(program, self.args.model), Path(self.args.save) / "quantized.onnx")
            self.say(f"wrote {self.args.save}")
        if self.args.json is not None:
            text = json.dumps(finite({**vars(self.report), **history.to_dict()}), indent=1, allow_nan=False)
            if self.to_stdout:
                cli_ending.say(text)
                return
            with replacing(self.args.json) as temporary:
                temporary.write_text(text + "\n")


def _rate(args: argparse.Namespace, steps: int) -> Any:
    """The learning rate: a number, or a schedule over all steps of the run."""
    from ..training import lr

    after = max(1, steps - args.warmup)
    kinds = {
        "constant": lambda: args.lr,
        "linear": lambda: lr.PolynomialDecay(args.lr, after, end_lr=0.0),
        "cosine": lambda: lr.CosineAnnealingDecay(args.lr, after),
    }
    schedule = kinds[args.schedule]()
    return lr.LinearWarmup(schedule, args.warmup, 0.0, args.lr) if args.warmup else schedule


def _clipping(args: argparse.Namespace) -> Any:
    """Clipping by the norm of all gradients; None without --clip-norm."""
    from ..training.clip import ClipGradByGlobalNorm

    return None if args.clip_norm is None else ClipGradByGlobalNorm(args.clip_norm)


def _begin_library(*, portable: bool) -> None:
    """Native code is made for libraries of this machine.  UsageError, MissingExtraError where there are none."""
    import platform

    target = platform.machine()
    build_library_for(target, "native" if target == "x86_64" else None, portable=portable)


def _check_classes(data: Any, evaluation: Any) -> None:
    """UsageError where folders of images have other classes: their numbers would mean something else."""
    train, held = (getattr(d, "classes", None) for d in (data, evaluation))
    if train is not None and held is not None and train != held:
        raise UsageError(
            f"the classes of {data.name} are {', '.join(train)}, those of {evaluation.name} are {', '.join(held)}: "
            "give both a folder of images for each class"
        )
