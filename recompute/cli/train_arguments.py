"""The argument parser of `recompute-train`."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..errors import UsageError
from ..support.files import why_not_writable
from . import conflicts
from .arguments import add_loading, add_model, add_passes, add_portable
from .outputs import check_not_read
from .parsing import Parser, given_budget, real, whole

SHORT = """\
usage: recompute-train MODEL --data FILE [options]

Train MODEL (an .onnx file, or a network of the zoo) on your own data; the
memory is printed before anything runs.  FILE: .npz with one array a column,
.csv, .tsv, .parquet, .jsonl, or a folder of images with a folder a class.

  --data FILE --eval FILE  what to train on, and what to evaluate after each epoch
  --epochs N             how often to see all of it (default: 1); --batch N
  --buckets DIM=A,B,...  samples of several sizes, padded to the next of these
  --loss NAME            cross_entropy, mse, ... (default: by the output); --metrics
  --optimizer NAME       sgd, momentum, adamw, ... (default: adam); --lr X
  --checkpoints A,B,...  keep these values, and recompute the others; or
  --memory-budget SIZE   choose what to recompute to fit 16GiB, 500MB, 60%, ...
  --mesh dp=N,tp=M,...   processes of mpiexec share each step: samples along dp,
                         layers along pp, operators along tp; --zero STAGE
  --save DIR             checkpoints, log.jsonl, and the trained model.onnx
  --resume               go on from the newest checkpoint in DIR, to the bit
  --json FILE            losses, metrics, memory, and the hash of the weights
  --help-all             print all options

example: recompute-train lenet --data train.npz --eval test.npz --epochs 5 --save run
"""
_SCHEDULES = ("constant", "linear", "cosine")


def parser() -> Parser:
    """The parser with all options."""
    p = Parser(
        prog="recompute-train",
        usage="recompute-train MODEL --data FILE [options]",
        description="Train an ONNX model on your own data, for epochs, with evaluation, checkpoints and resume.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.short = SHORT
    p.add_argument("model", help="an .onnx file, or the name of a network in the zoo", nargs="?")
    _add_data(p.add_argument_group("data"))
    _add_run(p.add_argument_group("the run"))
    _add_ranks(p.add_argument_group("several processes (mpiexec -n N recompute-train ... --mesh MESH)"))
    what = p.add_argument_group("what to train")
    what.add_argument("--checkpoints", metavar="A,B,...", help="values to keep, others are recomputed")
    what.add_argument("--memory-budget", dest="budget", metavar="SIZE", help="recompute as much as is needed to fit")
    what.add_argument(
        "--allow",
        metavar="A,B,...",
        help="permit approximate gradients: sketch:0.2, bits:4, store:8 (see recompute-compile --help)",
    )
    add_model(what)
    add_passes(what)
    what.add_argument(
        "--place",
        default="cpu",
        metavar="P",
        help="cpu (default), cpu:FOLDER (with "
        "--memory-budget, parameters and optimizer state may be on disk there), cuda, cuda:N, or emulated",
    )
    add_portable(what)
    add_loading(what)
    noise = p.add_mutually_exclusive_group()
    noise.add_argument("-v", "--verbose", action="store_true", help="tracebacks of errors, and more details")
    noise.add_argument("-q", "--quiet", action="store_true", help="print errors only")
    return p


def _add_data(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--data", metavar="FILE", help="training samples: .npz, .npy, .csv, .tsv, .parquet, .jsonl, folder"
    )
    group.add_argument("--eval", metavar="FILE", help="the samples to evaluate after each epoch")
    group.add_argument(
        "--eval-batch",
        type=whole,
        metavar="N",
        help="batch of the evaluation (default: --batch; with --mesh a micro-batch)",
    )
    group.add_argument("--no-shuffle", action="store_true", help="keep the order of the samples")
    group.add_argument("--drop-last", action="store_true", help="leave out a last batch with fewer samples")
    group.add_argument(
        "--buckets", action="append", default=[], metavar="DIM=A,B,...",
        help="samples of several sizes: pad each to the next of these sizes of the model's open dimension DIM "
        "(sequence=64,128,256); repeat it for others",
    )  # fmt: skip
    group.add_argument(
        "--pad", action="append", default=[], metavar="INPUT=VALUE",
        help="with what --buckets pads (default: labels with the one that the loss ignores, others with 0, on the "
        "right); INPUT=VALUE:left, or INPUT=mask:COLUMN for 1 where COLUMN has values",
    )  # fmt: skip
    group.add_argument("--metrics", metavar="A,B,...", help="accuracy, top5, f1, ... (default: accuracy, for classes)")


def _add_run(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--epochs", type=whole, default=1, metavar="N", help="passes over all samples (default: 1)")
    group.add_argument("--schedule", choices=_SCHEDULES, default="constant", help="of the learning rate")
    group.add_argument("--warmup", type=whole, default=0, metavar="N", help="steps in which the rate rises from 0")
    group.add_argument("--clip-norm", type=real, metavar="X", help="largest norm of all gradients together")
    group.add_argument("--gradient-merge", type=whole, metavar="K", help="a step of K times --batch, one at a time")
    group.add_argument("--ema", type=real, metavar="D", help="average the weights with decay D; evaluate the averages")
    group.add_argument("--stop-on-nan", action="store_true", help="end at a step whose loss is not finite")
    group.add_argument("--patience", type=whole, metavar="N", help="end after N epochs without a better result")
    group.add_argument("--monitor", default="", metavar="NAME", help="eval.loss (default), eval.accuracy, ...")
    group.add_argument("--save", type=Path, metavar="DIR", help="folder for checkpoints, log.jsonl and model.onnx")
    group.add_argument(
        "--onnx-adapter", action="store_true",
        help="with --lora, also write the adapters to DIR/adapter as ONNX Runtime's file, adapter.onnx_adapter, and "
        "model.onnx, whose optional inputs they are",
    )  # fmt: skip
    group.add_argument("--save-steps", type=whole, metavar="N", help="also save a checkpoint every N steps")
    group.add_argument(
        "--keep", type=whole, default=2, metavar="N", help="checkpoints that stay, and the best (default: 2)"
    )
    group.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --save")
    group.add_argument("--tensorboard", action="store_true", help="also write TensorBoard's event files")
    group.add_argument(
        "--library", action="store_true",
        help="take the steps by the step's library in C (docs/library.md), as a check: the kernels are the library's",
    )  # fmt: skip
    group.add_argument("--json", type=Path, metavar="FILE", help="the results as JSON ('-' for standard output)")


def _add_ranks(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--mesh",
        metavar="MESH",
        help="such as dp=4 or dp=2,tp=2: as many processes share each step; they have other samples along dp, other "
        "layers along pp, parts of operators along tp, cp and ep; --batch is that of all of them",
    )
    group.add_argument(
        "--zero", type=int, choices=(0, 1, 2, 3), default=0, help="stage of ZeRO: 0 (default): none; 1, 2: ranks have "
        "shards of parameters, optimizer state and gradients; 3: parameters are gathered again for the backward pass",
    )  # fmt: skip
    group.add_argument(
        "--micro-batches", type=whole, metavar="V",
        help="cut each step into V pieces: the same V gives the same bits for any number of ranks along dp (default: "
        "the largest power of two, at most 8, that divides the batch; a multiple of --gradient-merge, not fewer than "
        "the ranks along dp)",
    )  # fmt: skip
    group.add_argument("--log-ranks", action="store_true", help="a log of each rank in --save, log.rank1.jsonl, ...")


def check(args: argparse.Namespace) -> None:
    """UsageError for the first option that is wrong, before any work is done."""
    if args.model is None:
        raise UsageError("give a model: an .onnx file or a zoo name (recompute-compile --list-models prints them)")
    if args.data is None:
        raise UsageError("give the samples to train on: --data FILE")
    if args.budget is not None:
        given_budget(args.budget)
    conflicts.check(args, (), conflicts.TRAINING_EXCLUDED, conflicts.TRAINING_NEEDED)
    for name in ("batch", "epochs", "eval_batch", "save_steps", "keep", "patience", "gradient_merge", "micro_batches"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}")
    if not 0 <= args.seed < 1 << 63:
        raise UsageError(f"--seed must be in [0, 2^63), not {args.seed}")
    if args.warmup < 0:
        raise UsageError(f"--warmup must not be negative, but it is {args.warmup}")
    if args.json is not None and str(args.json) != "-" and (why := why_not_writable(args.json)):
        raise UsageError(f"--json: '{args.json}' cannot be written: {why}")
    if args.json is not None:
        check_not_read(args, "--json", args.json)
    if args.save is not None and not args.resume:
        for name in ("model.onnx", "best.onnx", "quantized.onnx", "log.jsonl"):
            check_not_read(args, "--save", args.save / name)
    args.fuse_attention = True
