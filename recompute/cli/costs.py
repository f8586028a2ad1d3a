"""`--device` and `--profile`: the cost model behind estimated times."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UsageError
from .ending import tell
from .job import request_of

if TYPE_CHECKING:
    from ..profile import Profile


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """Adds the options to a group."""
    group.add_argument("--device", metavar="NAME", help="estimate times for h200, a100-80, ... (default: this machine)")
    group.add_argument(
        "--profile",
        type=Path,
        nargs="?",
        const=Path(),
        metavar="FILE",
        help="measure each distinct operator on this machine once, and store its time in FILE (default: a cache); "
        "with --run N: print the time of each operator in these steps",
    )


def check_arguments(args: argparse.Namespace) -> None:
    """Checks the options before any work is done, and looks up the device."""
    from ..cost import device

    if args.profile is not None and args.device is not None:
        raise UsageError("--profile measures this machine, --device estimates another: give one of them")
    args.cost = None if args.device is None else device(args.device)
    if args.precision == "tf32" and args.cost is not None:
        args.cost = args.cost.with_tf32()


def _prices(args: argparse.Namespace) -> bool:
    """Whether operators are measured in isolation, for a plan or an estimate.  `--run N --profile` without a FILE
    only times the steps that run."""
    if args.profile is None or args.run is None or args.model is None:
        return args.profile is not None
    return args.profile != Path() or request_of(args) is not None or args.estimate


@contextlib.contextmanager
def chosen(args: argparse.Namespace) -> Iterator[None]:
    """Sets `args.cost`, the cost model.  Measured times are saved even if the job fails or is interrupted."""
    from ..cost import costs_of
    from ..places import as_place

    args.cost = args.cost or costs_of(as_place(args.place))
    if not _prices(args):
        yield
        return
    from ..profile import Profile

    def warn(text: str) -> None:
        tell(f"warning: {text}")

    with Profile(None if args.profile == Path() else args.profile, warn=warn) as profile:
        args.cost = profile
        try:
            yield
        finally:
            if not args.quiet:
                _say(profile)


def _say(profile: Profile) -> None:
    """Prints how many operators were measured, and which were not."""
    measured, skipped = profile.measured, profile.skipped
    if measured:
        tell(f"measured {measured - len(skipped):,} operators")
    for key, why in list(skipped.items())[:5]:
        tell(f"note: not measured, estimated by the roofline instead: {key}: {why}")
    if len(skipped) > 5:
        tell(f"note: {len(skipped) - 5:,} more operators were not measured")
