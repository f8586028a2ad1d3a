"""`recompute-compile`: compiles an ONNX model into a training step and reports its memory and time."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import JobError, OpenDimensionsError, RecomputeError, UsageError
from ..places import as_place
from ..support.files import replacing, together
from . import ending as cli_ending
from .frozen import report_frozen
from .model import ModelJob, ModelReport
from .outputs import begin_library, begin_portable, list_models, write_models
from .values import finite, target_of


def main(argv: Sequence[str] | None = None) -> int:
    """The console script.  Returns the exit code."""
    args = argparse.Namespace(verbose=False)
    with cli_ending.prepared(args):
        try:
            from .arguments import parser  # slow to import; an interruption is handled from here on

            code = _run(parser().parse_args(argv, args))
            cli_ending.flush()
        except BaseException as e:
            code = cli_ending.exit_code(e, args.verbose)
    return code


def _run(args: argparse.Namespace) -> int:
    """Carries out the request of the parsed arguments.  Returns the exit code."""
    from . import costs as cli_costs

    _check_arguments(args)
    if args.list_models:
        return list_models()
    if args.library is not None:
        begin_library(args)
    elif args.portable_bits:
        begin_portable(args)
    with cli_costs.chosen(args):
        return _Job(args).run()


def _check_arguments(args: argparse.Namespace) -> None:
    """Checks the arguments before any work is done.  UsageError for the first that is wrong."""
    if args.model is None and not args.list_models:
        where = "give a model" if args.profile is None else "give a model before --profile"
        raise UsageError(f"{where}: an .onnx file or a zoo name (--list-models prints them; -h helps)")
    if args.run is not None and args.run < 1:
        raise UsageError(f"--run needs at least 1 step, not {args.run}")
    there = as_place(args.place)
    if args.run is not None and args.place != "cpu":
        from ..runtime import Executor

        Executor(there)  # reports a missing device or library now, not after planning
    if args.batch is not None and args.batch < 1:
        raise UsageError(f"--batch must be at least 1, not {args.batch}")
    if not 0 <= args.seed < 1 << 63:
        raise UsageError(f"--seed must be in [0, 2^63), not {args.seed}")
    from ..report import pictures
    from . import cluster as cli_cluster
    from . import conflicts
    from . import memory as cli_memory
    from . import outputs as cli_outputs
    from . import plan as cli_plan
    from . import ranks as cli_ranks

    pictures.check_arguments(args)
    cli_memory.check_arguments(args)
    args.cluster = cli_cluster.mesh_asked(args)
    conflicts.check(args, _facts(args))
    cli_plan.check_arguments(args)
    cli_ranks.check_arguments(args)
    cli_outputs.check_arguments(args)
    cli_memory.check_data(args)


def _facts(args: argparse.Namespace) -> list[str]:
    """The facts of `conflicts` that hold for these options."""
    from .cluster import AUTO
    from .plan import is_problem

    modes = ["a planning problem"] if args.model is not None and is_problem(args.model) else []
    if args.mesh is not None:
        modes.append("--mesh auto" if args.cluster == AUTO else "a mesh with pp" if args.cluster else "a mesh")
    return modes


@dataclass
class Report(ModelReport):
    """All results of the command; `--json` writes it (docs/cli.md describes each field)."""

    look: dict[str, Any] | None = None
    tensors: list[dict[str, Any]] | None = None
    candidates: list[dict[str, Any]] | None = None
    precision: str = "fp32"
    costs: str = ""
    checkpoints: list[str] = field(default_factory=list)
    frozen: dict[str, Any] | None = None
    plain: dict[str, Any] | None = None
    recompute: dict[str, Any] | None = None
    run: dict[str, Any] | None = None
    profile: dict[str, Any] | None = None
    check: dict[str, Any] | None = None
    output: str | None = None
    library: list[str] = field(default_factory=list)
    trained: str | None = None
    pictures: list[str] = field(default_factory=list)
    proof: dict[str, Any] | None = None
    planned: dict[str, Any] | None = None
    compare: list[dict[str, Any]] | None = None
    pareto: dict[str, Any] | None = None
    estimate: dict[str, Any] | None = None
    max_batch: dict[str, Any] | None = None
    ranks: dict[str, Any] | None = None
    cluster: dict[str, Any] | None = None


class _Job(ModelJob):
    """One invocation, from the model to the report."""

    report: Report

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args, Report(model=args.model or "", costs=args.cost.name, precision=args.precision or "fp32"))
        self.seconds: list[float] | None = None  # measured, per operator
        self.estimated: Any = None  # the estimate of all ranks
        self.micro_batches = args.pieces
        self.again = args.ranks is not None
        self.available: int | None = None  # free memory of this machine in bytes, where it is checked
        self.written: list[tuple[Path, str]] = []  # with remarks; reported once the files have their final names

    def run(self) -> int:
        """Does the whole job.  Output files get their names together at the end; a failed job leaves none."""
        with together():
            try:
                self.work()
            except RecomputeError as e:
                if self.is_first() or (isinstance(e, OpenDimensionsError) and not self.has_sizes()):
                    self.look()  # what the file holds, with a command that works or why there is none
                raise
            self.write_json()
        for path, what in self.written:
            self.say(f"wrote {path}{what}")
        return self.verdict()

    def is_first(self) -> bool:
        """Whether the command names a model's file and nothing else."""
        from .arguments import parser
        from .plan import is_problem

        model = self.args.model
        if not Path(model).is_file() or is_problem(model):
            return False
        plain = vars(parser().parse_args([model]))
        return all(getattr(self.args, n) == value for n, value in plain.items() if n not in ("json", "verbose"))

    def work(self) -> None:
        """Loads the model, attaches a loss, compiles both steps, then writes, runs and checks them."""
        from ..compiling.compiler import checkpoint_candidates, resolve_checkpoints
        from ..passes.base import dumping
        from . import cluster as cli_cluster
        from . import memory as cli_memory
        from . import plan as cli_plan
        from . import ranks as cli_ranks

        if self.args.print_passes:
            return self.print_passes()
        if self.args.look:
            self.look()
            return
        if cli_plan.is_problem(self.args.model):
            return cli_plan.plan_problem(self)
        if cli_cluster.answer(self) or cli_memory.before_loading(self, self.wants_more()):
            return
        program = self.load()
        if self.args.list_parameters:
            return self.print_parameters(program)
        with dumping(self.args.dump_ir):
            loss = self.attach_loss(program)
            cli_memory.check_data(self.args, program)
            if self.args.list_checkpoints:
                return self.print_candidates(*checkpoint_candidates(program.block))
            wanted = self.checkpoint_patterns()
            names = resolve_checkpoints(program, wanted) if wanted is not None else None
            if cli_plan.answers(self, program, loss, names):
                return
            plain, step = self.both(program, loss, names)
        cli_ranks.estimate(self, program, loss, plain, step)
        self.print_results(plain, step)
        if step.proof is not None:
            self.report.proof = asdict(step.proof)
            self.say(str(step.proof))
        if self.args.check or self.args.run is not None:
            cli_memory.before_running(self, step)
        if self.args.check:
            from ..analysis.check import check_step

            self.report.check = check_step(self, program, plain, step, loss)
        if self.args.run is not None:
            self.train(step, loss)
        else:
            write_models(self, step)
        self.draw(program, plain, step, loss)

    def wants_more(self) -> bool:
        """Whether a file is to be written or something run besides the estimate."""
        from ..report import pictures

        a = self.args
        return bool(a.output or a.library or a.run or a.check or a.dump_ir or a.list_checkpoints or pictures.paths(a))

    def optimizer(self, rate: Any = None, clip: Any = None) -> Any:
        """A new optimizer, with the slices of --slice."""
        from ..training.optimizers import RecomputeOptimizer
        from .ranks import among_ranks

        found = super().optimizer(rate, clip)
        found = RecomputeOptimizer(found).set_slices(self.args.slice) if self.args.slice else found
        return among_ranks(self.args, found)

    def needs_weights(self) -> bool:
        """Whether a network of the zoo is built with weights."""
        return self.wants_more() or self.args.list_parameters

    def compile(self, program: Any, loss: str, **options: Any) -> Any:
        """A training step with a new optimizer."""
        from ..compiling.compiler import compile_step
        from .job import progress
        from .ranks import sharing

        with progress(self.args) as update:
            options["progress"] = lambda p: update(str(p))
            optimizer = sharing(self.args, self.optimizer(), program)
            options.setdefault("prove", self.args.prove)
            return compile_step(program, loss, optimizer, target=target_of(self.args), **options)

    # -- what comes out -------------------------------------------------------------------------------------------

    def both(self, program: Any, loss: str, names: list[str] | None) -> tuple[Any, Any]:
        """The plain step, and the one that recomputes what is asked for; the passes of the latter are dumped."""
        from ..passes.base import dumping
        from . import plan as cli_plan
        from .job import request_of

        if names is None and request_of(self.args) is None:
            plain = step = self.compile(program, loss)
            self.report.plain = asdict(plain.figures)
            return plain, step
        with dumping(None):
            plain = self.compile(program, loss, prove=False)
        self.report.plain = asdict(plain.figures)
        if names is not None:
            return plain, self.between(program, loss, names)
        return plain, cli_plan.planned_step(self, program, loss, plain)

    def between(self, program: Any, loss: str, names: list[str]) -> Any:
        """The step that keeps checkpoints, and recomputes what lies between them."""
        step = self.compile(
            program, loss, checkpoints=names, offload=self.args.offload, approximations=self.args.allow or ()
        )  # fmt: skip
        self.report.recompute = asdict(step.figures)
        self.report.checkpoints = list(step.plan.checkpoints if step.plan else names)
        self.report.notes += list(step.plan.notes if step.plan else ())
        return step

    def print_results(self, plain: Any, step: Any) -> None:
        """Prints figures, what freezing saves, the plan, and all ranks."""
        from . import plan as cli_plan
        from . import ranks as cli_ranks

        self.print_table()
        report_frozen(self, plain)
        cli_plan.report_plan(self, step)
        cli_ranks.report_ranks(self)

    def print_table(self) -> None:
        """Prints the figures of the plain and the recomputed step side by side."""
        if self.args.quiet:
            return
        from ..runtime.lowering import slow_precision

        slow = slow_precision(target_of(self.args)) if self.args.device is None else ""
        for note in (*([slow] if slow else ()), *self.report.notes):
            cli_ending.tell(f"note: {note}")
        from ..support.tables import before_after

        self.say(before_after(self.report))

    def print_passes(self) -> None:
        """Prints the passes of the step in order, without reading a model."""
        from ..compiling.compiler import check_inserted, with_precision
        from ..language.program import Program
        from ..passes import RecomputePlan, step_passes
        from ..passes.gradient.stop_on_nan import StopOnNan
        from ..planning.step import target_of as resolved
        from ..support.tables import passes_table
        from ..training.pipeline import pipeline
        from . import cluster as cli_cluster
        from .job import request_of

        args, loss = self.args, self.args.loss or "loss"
        request, checkpoints = request_of(args), tuple(self.checkpoint_patterns() or ())
        optimizer = self.optimizer()
        if args.cluster is not None:
            optimizer = cli_cluster.among_stages(args, optimizer)
        spec = with_precision(optimizer, args.precision).with_(target=target_of(args))
        if request is None:
            spec = spec.with_(checkpoints=checkpoints, offload=bool(checkpoints) and args.offload)
        else:
            spec = spec.before_slices().with_(target=spec.target)
        target = resolved(spec.target)
        check_inserted(spec, Program(), loss, target)
        moved = checkpoints if spec.offload else ()
        lines = [
            *([StopOnNan(loss)] if args.stop_on_nan else ()),
            *pipeline(spec, Program(), loss),
            *step_passes(target, None if request is None else RecomputePlan(), moved=moved),
        ]
        self.say(passes_table(lines), always=True)

    def look(self) -> dict[str, Any]:
        """The screen, whose facts the report holds too."""
        self.report.look = super().look()
        return self.report.look

    def print_parameters(self, program: Any) -> None:
        """Which tensors of the model are trained, and why."""
        from ..support.tables import tensors_table

        self.report.tensors = [
            {"name": t.name, "type": str(t.type), "trains": t.trains, "why": t.why} for t in program.tensors
        ]
        self.say(tensors_table(program.tensors), always=True)

    def print_candidates(self, candidates: Sequence[Any], always: Sequence[Any]) -> None:
        """Prints the checkpoint candidates with their sizes."""
        from ..support.tables import candidates_table

        self.report.candidates = [
            {"name": c.value.name, "type": str(c.value.type), "bytes": c.value.nbytes, "flops": c.flops}
            for c in candidates
        ]
        self.say(candidates_table(candidates, always), always=True)

    def train(self, step: Any, loss: str) -> None:
        """Trains, and compares the measured peak with the predicted one."""
        from ..compiling.compiler import train
        from ..report import pictures
        from ..runtime import Executor
        from ..support.tables import progress_bar, progress_binding

        batches = self.batches(step.program)
        quiet = self.args.quiet
        executor = Executor(as_place(self.args.place))
        with progress_binding(quiet=quiet) as binding:
            session = executor.session(step.program, [loss], binding)
        with progress_bar(self.args.run, quiet=quiet) as progress:
            losses, seconds, measured = train(step, loss, batches, self.args.run, progress, executor)
        predicted = step.figures.peak_bytes
        self.report.run = {
            "steps": self.args.run,
            "losses": losses,
            "step_seconds": seconds,
            "measured_peak_bytes": measured,
            "predicted_peak_bytes": predicted,
            "place": self.args.place,
            "on_host": [op.op.name for op in session.on_host],
            "measured_host_bytes": executor.session(step.program, [loss]).measured_host_bytes,
            "predicted_host_bytes": step.figures.host_bytes,
        }
        if session.on_host:
            names = ", ".join(sorted({op.op.name for op in session.on_host}))
            self.say(f"{len(session.on_host)} operators run on the host, outside the CUDA graph: {names}")
        same = "as predicted" if measured == predicted else f"predicted {predicted:,}"
        self.say(f"ran {self.args.run} steps: loss {losses[0]:.6g} → {losses[-1]:.6g}, "
                 f"{sorted(seconds)[len(seconds) // 2]:.3f} s per step, peak {measured:,} bytes ({same})")  # fmt: skip
        if quiet and not self.to_stdout:
            cli_ending.say(f"loss {losses[-1]:.6g}")
        write_models(self, step)  # before steps that are only timed
        if pictures.paths(self.args) or self.args.profile is not None:
            self.time_operators(step, loss, next(batches), executor)

    def batches(self, program: Any) -> Iterator[dict[str, Any]]:
        """The feeds: batches of --data, or one synthetic batch again and again."""
        from ..data.batches import npz_batches, synthetic_batch

        if self.args.data is not None:
            return npz_batches(self.args.data, program)
        return itertools.repeat(synthetic_batch(program, self.args.seed, self.specs))

    def time_operators(self, step: Any, loss: str, feed: Any, executor: Any) -> None:
        """Times each operator; with --profile, prints where the time goes."""
        from ..analysis import operator_times as times
        from ..cost import this_cpu

        count = times.timed_steps(self.args.run) if self.args.profile is not None else 1
        self.seconds = times.operator_seconds(step.program, loss, feed, count, executor)
        if self.args.profile is not None:
            timings = times.step_times(step.program.block, self.seconds, this_cpu(), count)
            self.report.profile = timings.as_json()
            self.say(times.tables(timings))

    def draw(self, program: Any, plain: Any, step: Any, loss: str) -> None:
        """Writes the requested pictures."""
        from ..report.pictures import Pictures

        def recompile(names: list[str]) -> Any:
            return self.compile(program, loss, checkpoints=names)

        from .ranks import exchange

        pictures = Pictures(self.report, program, plain, step, recompile, self.seconds, exchange(self.args))
        for path in pictures.write(self.args):
            self.report.pictures.append(str(path))
            self.written.append((path, ""))

    def write_json(self) -> None:
        """Writes the report as JSON."""
        if self.args.json is None:
            return
        text = json.dumps(finite(asdict(self.report)), indent=2, allow_nan=False) + "\n"
        if self.to_stdout:
            print(text, end="", flush=True)
        else:
            with replacing(self.args.json) as temporary:
                temporary.write_text(text)

    def verdict(self) -> int:
        """Exit code 0; JobError if a check failed or the measured peak is not the predicted one."""
        run, check = self.report.run, self.report.check
        if run and any(run[f"measured_{k}_bytes"] != run[f"predicted_{k}_bytes"] for k in ("peak", "host")):
            raise JobError("the measured peak differs from the predicted one: this is a bug in the compiler")
        if check and not check["passed"]:
            raise JobError("--check found a difference: see the lines above")
        return 0
