"""What the commands share: the model with its loss, the optimizer, and the checkpoints, as the options say."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UsageError, nearest
from ..support.files import regular
from . import ending as cli_ending
from .frozen import unfrozen
from .outputs import report_attention
from .values import input_shapes, loading_of, split, zoo_option


@dataclass
class ModelReport:
    """The results that the commands share; `--json` writes them (docs/cli.md describes each field)."""

    model: str = ""
    batch: int | None = None
    inputs: dict[str, str] = field(default_factory=dict)
    parameters: int = 0
    loss: str = ""
    loss_reason: str = ""
    optimizer: str = ""
    notes: list[str] = field(default_factory=list)


class ModelJob:
    """One invocation of a command, as far as it loads a model and sets an optimizer up; `report` has its results."""

    #: whether networks of the zoo are built for any batch, and not for one
    open_batch = False
    #: what a default batch is multiplied by
    micro_batches = 1

    def __init__(self, args: argparse.Namespace, report: Any) -> None:
        self.args, self.report = args, report
        self.specs: dict[str, Any] = {}
        self.unfrozen: Any = None  # the program from before --freeze
        self.without_weights = False  # a network of the zoo of which only figures are asked for
        self.to_stdout = args.json is not None and str(args.json) == "-"

    def say(self, text: str) -> None:
        """Prints text for people: to standard error where standard output carries JSON."""
        if not self.args.quiet:
            (cli_ending.tell if self.to_stdout else cli_ending.say)(text)

    def needs_weights(self) -> bool:
        """Whether a network of the zoo is built with weights."""
        return True

    def load(self) -> Any:
        """The model as a program with fixed shapes."""
        from .. import models
        from ..models.common import parameters as zoo_parameters

        args = self.args
        source: Any = args.model
        loading, trains = loading_of(args), None
        batch = args.batch
        if not Path(args.model).is_file() and args.model in models.names():
            source = self.build_zoo(models)
            batch = self.report.batch if self.open_batch else None
        elif args.option:
            raise UsageError("--option applies only to networks of the zoo")
        elif not Path(args.model).exists():
            near = nearest(args.model, models.names())
            raise UsageError(f"'{args.model}' is neither a file nor a network of the zoo{near}")
        shapes = input_shapes(args.input_shapes)
        if self.without_weights and loading.trainable is None:
            trains = list(zoo_parameters(source))
        if isinstance(source, str):
            batch = self.default_batch(source, batch, shapes or dict(loading.dims), loading.max_bytes)
        program = loading.read(source, trains, batch=batch, input_shapes=shapes or None, init=args.init)
        self.unfrozen = None if loading.freeze is None else unfrozen(program)
        loading.frozen(program)
        if args.fuse_attention and args.verbose:
            report_attention(self, program)
        self.report.inputs = {v.name: str(v.type) for v in program.block.inputs}
        self.report.parameters = sum(v.size for v in program.block.parameters)
        if self.report.batch is None:
            self.report.batch = program.block.batch
        return program

    def build_zoo(self, models: Any) -> Any:
        """A zoo network at the requested batch, or at its default."""
        options = dict(zoo_option(o) for o in self.args.option)
        try:
            entry = models.info(self.args.model, **options)
            self.report.batch = self.args.batch or entry.default_batch * self.micro_batches
            self.specs = {s.name: s for s in (*entry.inputs, *((entry.label,) if entry.label else ()))}
            self.say(f"building {self.args.model}: {entry.description}")
            # figures alone need no weights: drawing them takes longer than planning for some networks
            self.without_weights = not self.needs_weights()
            chosen = {"seed": self.args.seed, "weights": not self.without_weights}
            fixed = None if self.open_batch else self.report.batch
            return models.build(self.args.model, batch=fixed, **chosen, **options)
        except ValueError as e:
            raise UsageError(str(e)) from None

    def default_batch(self, path: str, batch: int | None, shapes: dict[str, Any], max_bytes: int | None) -> int | None:
        """The batch for a file whose first dimension alone is dynamic: 32, which is then printed."""
        if batch is not None or shapes:
            return batch
        from ..importer.model import open_dimensions, read_model

        is_open = open_dimensions(read_model(path, max_bytes=max_bytes).graph)
        if is_open and all(axis == 0 for _, axis in is_open):
            found = 32 * self.micro_batches
            self.say(f"batch: {found} (the model's batch dimension is dynamic; --batch N sets it)")
            return found
        return None

    def attach_loss(self, program: Any) -> str:
        """The name of the loss, which is appended if the model has none."""
        from ..compiling.steps import attach_loss

        self.report.loss, self.report.loss_reason = attach_loss(program, self.args.loss, self.args.stop_on_nan)
        if self.args.loss is None:
            self.say(f"loss: {self.report.loss_reason} (--loss sets it)")
        return self.report.loss

    def optimizer(self, rate: Any = None, clip: Any = None) -> Any:
        """A new optimizer of the requested kind; `rate`: its learning rate or schedule (None: --lr)."""
        from ..training import optimizers

        kinds = {n.lower(): getattr(optimizers, n) for n in optimizers.NAMES}
        kind = self.args.optimizer.lower().replace("-", "").replace("_", "")
        if kind not in kinds:
            raise UsageError(f"unknown optimizer '{kind}'{nearest(kind, kinds)}; known: {', '.join(kinds)}")
        self.report.optimizer = kind
        rate = self.args.lr if rate is None else rate
        return kinds[kind](learning_rate=rate, groups=self.args.group, grad_clip=clip)

    def checkpoint_patterns(self) -> list[str] | None:
        """The patterns of --checkpoints, with `@file` replaced by the file's lines."""
        if self.args.checkpoints is None:
            return None
        found: list[str] = []
        for item in split(self.args.checkpoints):
            if item.startswith("@"):
                try:
                    lines = regular(item[1:]).read_text().splitlines()
                except (OSError, UnicodeDecodeError) as e:
                    raise UsageError(f"--checkpoints: cannot read '{item[1:]}': {e}") from None
                found += [line.strip() for line in lines if line.strip() and not line.startswith("#")]
            else:
                found.append(item)
        if not found:
            raise UsageError("--checkpoints is empty: give names, globs or @file (--list-checkpoints shows candidates)")
        return found
