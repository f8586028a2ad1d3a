"""Help and error formatting: a short help, errors of one line that say what to do, and values that are checked."""

from __future__ import annotations

import argparse
import math
import re
from typing import Any, NoReturn

from ..budgets import Budget, as_budget
from ..errors import UsageError, nearest
from .ending import say

#: options that `--help` prints; `--help-all` prints all
SHORT = """\
usage: recompute-compile MODEL [options]

Compile an ONNX model into a training step that recomputes activations instead
of keeping them; its memory and time are printed before anything runs.  MODEL is
an .onnx file, or a network of the zoo (--list-models prints them).

  --look                 print what the file holds, and a command for it
  --batch N              samples per step, if the model leaves their number open
  --checkpoints A,B,...  keep these values, and recompute the others
  --memory-budget SIZE   choose what to recompute to fit 16GiB, 500MB, 60%, ...
  --max-batch            find the biggest batch that fits --memory-budget
  --loss NAME            cross_entropy, mse, ... (default: by the output)
  --optimizer NAME       sgd, momentum, adamw, ... (default: adam); --lr X
  --precision P          fp32 (default), tf32, bf16, bf16-pure or fp16
  --place P              where it runs: cpu (default), cuda, cuda:N
  --run N                train N steps; --data FILE.npz has the samples
  -o FILE.onnx           write the training step; --report FILE.html: pictures
  -v, -q                 print more; print errors only
  --help-all             print all options, and more examples

example: recompute-compile resnet50 --batch 8 --memory-budget 60% --run 2
"""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are UsageErrors, and which takes no abbreviations, as these change with new options."""

    #: options that `--help` prints
    short = SHORT

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, add_help=False, **options)
        group = self.add_argument_group("help")
        group.add_argument("-h", "--help", action=_Help, short=True, help="print the options that are used most")
        group.add_argument("--help-all", action=_Help, short=False, help="print all options")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """The options.  UsageError for the first one that is unknown, with the nearest that is known."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if not unknown:
            return parsed
        name = next((a for a in unknown if a.startswith("-")), unknown[0]).partition("=")[0]
        if not name.startswith("-"):
            raise UsageError(
                f"unexpected argument '{name}': one model is compiled at a time, and each option takes one value "
                "(several names are separated by commas)"
            )
        stem = name.lstrip("-")
        options = {option.lstrip("-"): option for option in self._option_string_actions if option.startswith("--")}
        near = re.sub(r"(?<=mean )(.*)(?=\?\))", lambda m: options[m[0]], nearest(stem, options, n=1))
        raise UsageError(f"unknown option '{name}'{near or ' (--help-all prints all options)'}")

    def error(self, message: str) -> NoReturn:
        """UsageError in place of argparse's usage and message."""
        match = re.fullmatch(r"argument ([^:]+): (.*)", message, re.DOTALL)
        if match is None:
            raise UsageError(message)
        option, said = match[1].split("/")[-1], match[2]
        if said == "expected one argument":
            what = self._option_string_actions[option].metavar or option.lstrip("-").upper()
            raise UsageError(f"{option} needs a value: {option} {what}")
        if other := re.fullmatch(r"not allowed with argument (\S+)", said):
            raise UsageError(f"{option} and {other[1].split('/')[-1]} exclude each other: give one of them")
        if said.startswith("ignored explicit argument"):
            raise UsageError(f"{option} takes no value")
        raise UsageError(f"{option}: {said}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(c) for c in action.choices]
            raise argparse.ArgumentError(
                action, f"unknown value '{value}'{nearest(str(value), choices)}; known: {', '.join(choices)}"
            )


class _Help(argparse.Action):
    """Prints a help and ends the command."""

    def __init__(self, *, short: bool, **options: Any) -> None:
        super().__init__(nargs=0, default=argparse.SUPPRESS, **{**options, "dest": argparse.SUPPRESS})
        self.short = short

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """`SHORT`, or all options."""
        say((getattr(parser, "short", SHORT) if self.short else parser.format_help()).rstrip())
        parser.exit()


def whole(text: str) -> int:
    """A whole number."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, not '{text}'") from None


def real(text: str) -> float:
    """A finite number."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"expected a number, not '{text}'")
    return number


def group_option(text: str) -> dict[str, Any]:
    """The parameter group of `--group 'head.*:lr=1e-3,weight_decay=0'`, as optimizers take it."""
    match, _, settings = text.rpartition(":")
    pairs = [part.partition("=") for part in settings.split(",") if part.strip()]
    names = [name.strip() for name in match.split(",") if name.strip()]
    if not names or not pairs or not all(sign and key.strip() for key, sign, _ in pairs):
        raise argparse.ArgumentTypeError(f"cannot read '{text}' (expected e.g. 'head.*:lr=1e-3,weight_decay=0')")
    return {"match": names, **{key.strip(): _setting(text, value.strip()) for key, _, value in pairs}}


def lora_option(text: str) -> dict[str, Any]:
    """The adapters of `--lora r=8,targets=*q_proj*,*v_proj*`, as `rc.lora` takes them; a part without a `=` continues
    the list before it."""
    options: dict[str, Any] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        key, sign, value = part.partition("=")
        if not sign and options and isinstance(options[key := next(reversed(options))], list):
            options[key].append(part)
            continue
        kind = _LORA.get(key.strip())
        try:
            if not sign or kind is None or key in options:
                raise ValueError
            options[key.strip()] = [value.strip()] if kind is list else kind(value)
        except ValueError:
            keys = ", ".join(f"{k}=" for k in _LORA)
            raise argparse.ArgumentTypeError(
                f"cannot read '{part}' (expected e.g. r=8,targets=*q_proj*,*v_proj*; known: {keys})"
            ) from None
    if not options.get("targets"):
        raise argparse.ArgumentTypeError("name the weights that get adapters: targets=*q_proj*,*v_proj*")
    return {"patterns": options.pop("targets"), **options}


def _truth(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()] if text.lower() in ("true", "false") else bool(int(text))


#: options of --lora
_LORA: dict[str, Any] = {
    "targets": list, "r": int, "alpha": float, "dropout": float, "dora": _truth, "seed": int, "train": list,
}  # fmt: skip


def _setting(text: str, value: str) -> Any:
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    try:
        return float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}': expected a number, true or false, not '{value}'") from None


def given_budget(text: str, *, small: bool = False) -> Budget:
    """--memory-budget.  UsageError for a small number without a unit, hardly meant in bytes, unless `small`."""
    try:
        budget = as_budget(text)
    except UsageError as e:
        raise UsageError(f"--memory-budget: {e}") from None
    text, amount = text.strip(), budget.bytes
    if amount is None or amount >= 1_000_000 or text[-1].isalpha() or small:
        return budget
    meant = f"{text}%, or {text}GiB" if amount <= 100 else f"{text}MB"
    raise UsageError(
        f"--memory-budget {text} is {text} bytes: did you mean {meant}? (% is a share of the plain step's peak)"
    )
