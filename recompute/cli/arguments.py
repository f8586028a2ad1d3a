"""What `recompute-compile` takes on its command line."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

from ..errors import printable
from ..report import pictures
from . import memory as cli_memory
from . import plan as cli_plan

EPILOG = """\
examples:
  recompute-compile models/mlp.onnx --checkpoints fc_1,pred
  recompute-compile resnet50 --batch 8 --checkpoints 'layer?.?.out' --run 2
  recompute-compile bert-tiny --batch 8 --list-checkpoints
  recompute-compile resnet50 --memory-budget 16GiB --max-batch
  recompute-compile resnet50 --batch 64 --memory-budget 60% --save-plan plan.json
  recompute-compile resnet50 --batch 64 --memory-budget 50% --compare
  recompute-compile model.onnx --input-shapes x:[64,3,224,224] --checkpoints @kept.txt -o step.onnx --json step.json

exit codes: 0 done, 1 the job failed (a broken file, an operator that is not supported), 2 the request was wrong,
128 + N ended by signal N
"""


class _Parser(argparse.ArgumentParser):
    """Errors repeat what was typed: printable, and short."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(message, 2000))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = _Parser(
        prog="recompute-compile",
        description="Compile an ONNX model into a training step that recomputes what it does not keep, and say what "
        "it costs before anything runs.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("model", help="an .onnx file, or a network of the zoo (--list-models)", nargs="?")
    p.add_argument("--list-models", action="store_true", help="print the networks of the zoo and stop")
    _add_what(p)
    out = p.add_argument_group("what to write")
    out.add_argument("-o", "--output", type=Path, metavar="OUT.onnx", help="the training step as an ONNX file")
    out.add_argument("--json", type=Path, metavar="FILE", help="the report as JSON ('-': standard output)")
    out.add_argument("--dump-ir", type=Path, metavar="DIR", help="the program's text after each pass")
    out.add_argument(
        "--list-parameters", action="store_true", help="print which tensors are trained, and why, and stop"
    )
    out.add_argument(
        "--print-passes", action="store_true", help="print the passes that the step goes through, and stop"
    )
    cli_memory.add_arguments(p)
    cli_plan.add_arguments(p)
    pictures.add_arguments(p)
    run = p.add_argument_group("what to run")
    run.add_argument("--run", type=int, metavar="N", help="train N steps and report the measured peak")
    run.add_argument("--data", type=Path, metavar="FILE.npz", help="one array an input (default: one synthetic batch)")
    run.add_argument("--check", action="store_true", help="compare with ONNX Runtime, and recomputed with plain steps")
    noise = p.add_mutually_exclusive_group()
    noise.add_argument("-v", "--verbose", action="store_true", help="say more, and show tracebacks")
    noise.add_argument("-q", "--quiet", action="store_true", help="print errors only")
    return p


def _add_what(p: argparse.ArgumentParser) -> None:
    """The arguments that say what is compiled."""
    what = p.add_argument_group("what to compile")
    what.add_argument("--checkpoints", metavar="A,B,...", help="values to keep: names, globs, or @file with one a line")
    what.add_argument(
        "--offload",
        action="store_true",
        help="checkpoints wait in host memory; with --memory-budget: as many values as make the step faster",
    )
    what.add_argument("--list-checkpoints", action="store_true", help="print values that cut the graph, and stop")
    what.add_argument("--batch", type=int, metavar="N", help="size of the open batch dimension")
    what.add_argument("--input-shapes", metavar="X:[...]", action="append", default=[], help="an input's whole shape")
    what.add_argument(
        "--option", metavar="K=V", action="append", default=[], help="an option of a zoo network (seq=512)"
    )
    what.add_argument("--seq", type=int, metavar="N", help="the same as --option seq=N")
    what.add_argument(
        "--loss", help="the loss on the model's output (cross_entropy, mse, ...), or a scalar value's name"
    )
    what.add_argument("--optimizer", default="adam", help="sgd, momentum, adam, adamw, ... (default: adam)")
    what.add_argument("--lr", type=float, default=1e-3, help="learning rate (default: 0.001)")
    what.add_argument(
        "--precision", choices=("fp32", "tf32", "bf16", "fp16"),
        help="what the forward and backward pass compute in; parameters stay float32 (default: fp32)",
    )  # fmt: skip
    what.add_argument("--trainable", metavar="A,B,...", help="parameters to train: names or globs (default: all)")
    what.add_argument("--no-schedule", action="store_true", help="do not reorder operators to need less memory")
    what.add_argument("--no-rebuild", action="store_true", help="keep normalised values instead of making them again")
    what.add_argument(
        "--providers", metavar="A,B,...", help="whose kernels run the step, in order of preference (numpy: none's)"
    )
    what.add_argument(
        "--place",
        default="cpu",
        metavar="P",
        help="where it runs: cpu (default), cuda, cuda:N, or emulated (no device)",
    )
    what.add_argument(
        "--max-seconds", type=float, metavar="S", help="seconds of work that loading a file may take (default: 6)"
    )
    what.add_argument(
        "--max-bytes",
        metavar="SIZE",
        help="the most that one tensor of a file, and all that loading makes, may take",
    )
    what.add_argument("--init", choices=("he", "glorot"), help="draw the weights anew, seeded")
    what.add_argument("--seed", type=int, default=0, help="seed of dropout, --init and synthetic data (default: 0)")
    what.add_argument(
        "--unroll", metavar="A,B,...", nargs="?", const=True, help="write recurrent nodes step by step (default: all)"
    )
