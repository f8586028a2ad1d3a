"""Parts that both commands share: the model with its loss, the optimizer, and the checkpoints, as the options say."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UsageError, nearest
from ..support.files import regular
from . import ending as cli_ending
from .frozen import unfrozen
from .outputs import report_attention
from .values import bound, input_shapes, loading_of, sizes, split, zoo_option


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

    #: whether the batch of a network of the zoo stays open
    again = False
    #: the factor of a default batch
    micro_batches = 1

    def __init__(self, args: argparse.Namespace, report: Any) -> None:
        self.args, self.report = args, report
        self.specs: Mapping[str, Any] = {}
        self.unfrozen: Any = None  # the program from before --freeze
        self.to_stdout = args.json is not None and str(args.json) == "-"

    def say(self, text: str, *, always: bool = False) -> None:
        """Prints text for people, with --quiet only `always`: to standard error where standard output carries JSON."""
        if always or not self.args.quiet:
            (cli_ending.tell if self.to_stdout else cli_ending.say)(text)

    def has_sizes(self) -> bool:
        """Whether sizes of open dimensions are given."""
        return bool(self.args.batch or self.args.dim or self.args.input_shapes)

    def look(self) -> dict[str, Any]:
        """Prints what the file holds, and what training it takes; the facts."""
        from ..analysis.look import look

        args = self.args
        if not Path(args.model).is_file():
            raise UsageError(f"--look reads a model's file, and '{args.model}' is none (--list-models: the zoo)")
        facts = look(args.model, batch=args.batch, dims=sizes(args.dim), set=dict(map(bound, args.set)))
        self.say(str(facts))
        return facts.to_dict()

    def needs_weights(self) -> bool:
        """Whether a network of the zoo is built with weights."""
        return True

    def load(self) -> Any:
        """The model as a program with fixed shapes."""
        from ..compiling.sources import source_of

        args = self.args
        file = Path(args.model).is_file()
        # figures alone need no weights: drawing those of the zoo takes longer than planning for some networks
        loading = dataclasses.replace(
            loading_of(args), init=args.init, again=self.again, weights=file or self.needs_weights()
        )
        options, shapes = dict(zoo_option(o) for o in args.option), input_shapes(args.input_shapes)
        source = source_of(args.model, shapes, options, loading)
        self.specs = source.specs
        if source.specs:
            self.say(source.what)
        batch = args.batch or source.default * (1 if source.fixed else self.micro_batches)
        if source.fixed is None and not source.specs and args.batch is None and not shapes:
            self.say(f"batch: {batch} (the model's batch dimension is dynamic; --batch N sets it)")
        if source.fixed not in (None, batch):
            self.say(f"batch: {batch} (the file fixes {source.fixed}; made for others, and checked on samples)")
        program = source.whole(batch)
        self.unfrozen = None if loading.freeze is None else unfrozen(program)
        loading.frozen(program)
        if args.fuse_attention and args.verbose:
            report_attention(self, program)
        self.report.inputs = {v.name: str(v.type) for v in program.block.inputs}
        self.report.parameters = sum(v.size for v in program.block.parameters)
        self.report.batch = program.block.batch
        return program

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
        more = {} if self.args.moments is None else {"moments": self.args.moments}
        return kinds[kind](learning_rate=rate, groups=self.args.group, grad_clip=clip, **more)

    def checkpoint_patterns(self) -> list[str] | None:
        """The patterns of --checkpoints, with `@file` replaced by the file's lines."""
        if self.args.checkpoints is None:
            return None
        patterns: list[str] = []
        for item in split(self.args.checkpoints):
            if item.startswith("@"):
                try:
                    lines = regular(item[1:]).read_text().splitlines()
                except (OSError, UnicodeDecodeError) as e:
                    raise UsageError(f"--checkpoints: cannot read '{item[1:]}': {e}") from None
                patterns += [line.strip() for line in lines if line.strip() and not line.startswith("#")]
            else:
                patterns.append(item)
        if not patterns:
            raise UsageError("--checkpoints is empty: give names, globs or @file (--list-checkpoints shows candidates)")
        return patterns
