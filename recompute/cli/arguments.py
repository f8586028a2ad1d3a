"""The argument parser of `recompute-compile`."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..report import pictures
from . import memory as cli_memory
from . import plan as cli_plan
from . import ranks as cli_ranks
from .parsing import Parser, group_option, lora_option, real, whole

EPILOG = """\
examples:
  recompute-compile models/mlp.onnx --checkpoints fc_1,pred
  recompute-compile resnet50 --batch 8 --checkpoints 'layer?.?.out' --run 2
  recompute-compile model.onnx --look
  recompute-compile bert-tiny --batch 8 --list-checkpoints
  recompute-compile resnet50 --memory-budget 16GiB --max-batch
  recompute-compile resnet50 --batch 64 --memory-budget 60% --save-plan plan.json
  recompute-compile resnet50 --batch 64 --memory-budget 50% --compare
  recompute-compile bert-base --mesh dp=16 --zero 2 --batch 512 --link node=8,nvlink=450GB/s,net=50GB/s
  recompute-compile model.onnx --input-shapes x:[64,3,224,224] --checkpoints @kept.txt -o step.onnx --json step.json

exit codes: 0 success, 1 the job failed (a broken file, an unsupported operator), 2 the request was wrong,
128 + N ended by signal N
"""


def parser() -> Parser:
    """The parser with all options."""
    p = Parser(
        prog="recompute-compile",
        usage="recompute-compile MODEL [options]",
        description="Compile an ONNX model into a training step that recomputes activations instead of\n"
        "keeping them, and print its memory and time before anything runs.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("model", help="an .onnx file, or the name of a network in the zoo (--list-models)", nargs="?")
    p.add_argument("--list-models", action="store_true", help="print the networks of the zoo and stop")
    p.add_argument(
        "--look", action="store_true", help="print what the file holds and what training it takes, with a command that "
        "compiles it, and stop",
    )  # fmt: skip
    _add_what(p)
    _add_outputs(p)
    cli_memory.add_arguments(p)
    cli_plan.add_arguments(p)
    cli_ranks.add_arguments(p)
    pictures.add_arguments(p)
    run = p.add_argument_group("what to run")
    run.add_argument("--run", type=whole, metavar="N", help="train N steps and report the measured peak")
    run.add_argument("--data", type=Path, metavar="FILE.npz", help="one array per input (default: a synthetic batch)")
    run.add_argument(
        "--stop-on-nan",
        action="store_true",
        help="end at the first step whose loss is infinite or NaN, before it updates anything, and print where this "
        "came up",
    )
    run.add_argument(
        "--check",
        action="store_true",
        help="compare the forward pass with ONNX Runtime, and recomputed steps with plain ones",
    )
    run.add_argument(
        "--prove",
        action="store_true",
        help="prove that the step that will run computes what the plain one does: the same expressions of inputs, "
        "weights and state, whatever was recomputed, sliced, fused and moved",
    )
    noise = p.add_mutually_exclusive_group()
    noise.add_argument("-v", "--verbose", action="store_true", help="print more details, and tracebacks of errors")
    noise.add_argument("-q", "--quiet", action="store_true", help="print errors only, and the last loss of --run")
    return p


def _add_outputs(p: argparse.ArgumentParser) -> None:
    """Options of what is written and printed, and of passes of one's own."""
    out = p.add_argument_group("what to write")
    out.add_argument("-o", "--output", type=Path, metavar="OUT.onnx", help="the training step as an ONNX file")
    out.add_argument(
        "--save-trained",
        type=Path,
        metavar="OUT.onnx",
        help="with --run: the trained model as an ONNX file for inference",
    )
    out.add_argument(
        "--library",
        type=Path,
        metavar="DIR",
        help="the training step as a library in C: object code without Python, a header, weights (docs/library.md)",
    )
    out.add_argument("--name", help="with --library: what its files and functions are named (default: step)")
    out.add_argument("--target", metavar="T", help="with --library: x86_64 (default), aarch64 or wasm32")
    out.add_argument("--cpu", metavar="CPU", help="with --library: the processor, such as x86-64-v3 or native")
    out.add_argument("--json", type=Path, metavar="FILE", help="the report as JSON ('-' for standard output)")
    out.add_argument("--dump-ir", type=Path, metavar="DIR", help="the text of the program after each pass")
    says = "print the passes that make and compile the step, in order, and stop"
    out.add_argument("--list-parameters", action="store_true", help="print which tensors train, and why, and stop")
    out.add_argument("--print-passes", action="store_true", help=says)
    add_passes(out)


def add_passes(group: argparse._ArgumentGroup) -> None:
    """Options for passes of one's own."""
    group.add_argument(
        "--insert-pass", action="append", default=[], metavar="after:NAME=PASS", help="also run a pass of your own "
        "before or after one of recompute-compile --print-passes; may be repeated",
    )  # fmt: skip
    group.add_argument(
        "--load-passes", action="append", default=[], metavar="FILE.py", help="run a Python file that defines passes"
    )


def _add_what(p: argparse.ArgumentParser) -> None:
    """Options that define the step: model, loss, optimizer, checkpoints, place."""
    what = p.add_argument_group("what to compile")
    what.add_argument(
        "--checkpoints", metavar="A,B,...", help="values to keep: names, globs, or @file with one per line"
    )
    what.add_argument(
        "--offload",
        action="store_true",
        help="copy the checkpoints to host memory until the backward pass; with --memory-budget, offload the values "
        "for which this is faster than recomputing",
    )
    what.add_argument(
        "--list-checkpoints", action="store_true", help="print checkpoint candidates: values that cut the graph; stop"
    )
    add_model(what)
    _add_long_sequences(what)
    _add_target(what)
    add_loading(what)


def add_model(what: argparse._ArgumentGroup) -> None:
    """Options of the model and its training: batch, shapes, loss, optimizer, precision, frozen parameters."""
    what.add_argument("--batch", type=whole, metavar="N", help="size of the dynamic batch dimension")
    what.add_argument(
        "--input-shapes", metavar="X:[...]", action="append", default=[], help="the full shape of an input"
    )
    what.add_argument(
        "--dim", metavar="NAME=N", action="append", default=[],
        help="the size of an open dimension, by its name in the file or as INPUT.AXIS; may be repeated",
    )  # fmt: skip
    what.add_argument(
        "--set", metavar="INPUT=V", action="append", default=[],
        help="bind an input to a number, or to a list of numbers: rate=16000; may be repeated",
    )  # fmt: skip
    what.add_argument(
        "--option", metavar="K=V", action="append", default=[], help="an option of a zoo network (seq=512)"
    )
    what.add_argument("--seq", type=whole, metavar="N", help="short for --option seq=N")
    what.add_argument(
        "--loss", help="the loss on the model's output (cross_entropy, mse, ..., mse:OUTPUT), or the name of a scalar"
    )
    what.add_argument("--optimizer", default="adam", help="sgd, momentum, adam, adamw, ... (default: adam)")
    what.add_argument("--lr", type=real, default=1e-3, help="learning rate (default: 0.001)")
    what.add_argument(
        "--group",
        metavar="'NAMES:K=V,...'",
        action="append",
        type=group_option,
        default=[],
        help="other options of the optimizer for the parameters that names or globs match, such as "
        "'head.*:lr=1e-2,weight_decay=0'; may be repeated",
    )
    what.add_argument(
        "--precision", choices=("fp32", "tf32", "bf16", "bf16-pure", "fp16"),
        help="precision of the forward and backward pass; parameters stay float32, but with bf16-pure, which has them "
        "and the optimizer's state in bfloat16, too (default: fp32)",
    )  # fmt: skip
    what.add_argument(
        "--moments", choices=("8-bit",), help="keep the moments of Adam and AdamW in 8 bits (default: in float32)"
    )
    _add_trained(what)


def _add_trained(what: argparse._ArgumentGroup) -> None:
    what.add_argument(
        "--lora", type=lora_option, metavar="r=8,targets=A,B,...",
        help="train LoRA adapters beside the weights that names or globs match, and nothing else; also alpha=16, "
        "dropout=0.1, dora=true, seed=0, train=NAMES (what trains besides)",
    )  # fmt: skip
    what.add_argument(
        "--dequantize", nargs="?", const="*", metavar="A,B,...",
        help="train weights of integers as floats (all, or those that names or globs match); recompute-train --save "
        "also writes them rounded to the file's own form, as quantized.onnx",
    )  # fmt: skip
    what.add_argument("--trainable", metavar="A,B,...", help="parameters to train: names or globs (default: all)")
    what.add_argument(
        "--freeze",
        metavar="A,B,...",
        help="parameters not to train; what lies before the first that trains is in inference mode",
    )


def _add_long_sequences(what: argparse._ArgumentGroup) -> None:
    """Options that keep what grows with the sequence from existing whole."""
    what.add_argument(
        "--fuse-attention",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="attention in tiles, which keeps no scores (default); --verbose says where",
    )
    what.add_argument("--no-fuse-head", action="store_true", help="keep the logits of a large vocabulary whole")
    what.add_argument(
        "--slice",
        metavar="REGION:AXIS:PIECES",
        action="append",
        default=[],
        help="run a part of the step in slices, of which only one exists at a time: FIRST..LAST:AXIS:PIECES from the "
        "operator that makes FIRST to the one that makes LAST, or all:0:PIECES for slices of the batch; may be "
        "repeated",
    )


def _add_target(what: argparse._ArgumentGroup) -> None:
    """Options of the compilation: order, recomputation by default, kernel providers, place."""
    what.add_argument("--no-schedule", action="store_true", help="do not reorder operators to lower the peak")
    what.add_argument("--no-rebuild", action="store_true", help="do not recompute normalised values by default")
    what.add_argument(
        "--providers", metavar="A,B,...", help="kernel providers, in order of preference (numpy: no native kernels)"
    )
    what.add_argument(
        "--place",
        default="cpu",
        metavar="P",
        help="where the step runs: cpu (default), cpu:FOLDER (with --memory-budget, parameters and optimizer state may "
        "be on disk there), cuda, cuda:N, or emulated (CUDA kernels on the CPU)",
    )
    add_portable(what)


def add_portable(what: argparse._ArgumentGroup) -> None:
    """The option that makes bits independent of the processor."""
    what.add_argument(
        "--portable-bits",
        action="store_true",
        help="the same losses and weights, bit for bit, on every processor, by kernels of fixed order (docs/cpu.md)",
    )


def add_loading(what: argparse._ArgumentGroup) -> None:
    """Options of loading a model: limits, initialisation, seed, unrolling."""
    what.add_argument(
        "--max-seconds", type=real, metavar="S", help="limit on the work of loading a file, in seconds (default: 6)"
    )
    what.add_argument(
        "--max-bytes", metavar="SIZE", help="limit on one tensor of a file, and on all constants that loading computes"
    )
    what.add_argument(
        "--quantization", choices=("ste",), help="ste: gradients pass QuantizeLinear and then DequantizeLinear as if "
        "they did not round",
    )  # fmt: skip
    what.add_argument("--init", choices=("he", "glorot"), help="replace the weights by random ones")
    what.add_argument("--seed", type=whole, default=0, help="seed of dropout, --init and synthetic data (default: 0)")
    what.add_argument(
        "--unroll",
        metavar="A,B,...",
        nargs="?",
        const=True,
        help="unroll recurrent nodes over time: names or globs (default: all)",
    )
