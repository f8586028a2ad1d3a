"""Parsing of option values, and the target that the options describe."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import UsageError

if TYPE_CHECKING:
    from ..compiling.sources import Loading
    from ..language.program import Program
    from ..passes.inserting import Insertion
    from ..passes.target import Target


def finite(x: Any) -> Any:
    """The value with None in place of infinities and NaN, which JSON cannot represent."""
    if isinstance(x, float):
        return x if math.isfinite(x) else None
    if isinstance(x, dict):
        return {k: finite(v) for k, v in x.items()}
    return [finite(v) for v in x] if isinstance(x, (list, tuple)) else x


def target_of(args: argparse.Namespace) -> Target:
    """The target that the options describe."""
    from ..passes.target import Target

    return Target(
        args.place,
        args.providers,
        args.cost,
        args.precision,
        schedule=not args.no_schedule,
        rebuild=not args.no_rebuild,
        fuse_attention=args.fuse_attention,
        fuse_head=not args.no_fuse_head,
        inserted=insertions_of(args),
    )


def insertions_of(args: argparse.Namespace) -> tuple[Insertion, ...]:
    """The passes of --insert-pass, after the files of --load-passes are run."""
    from ..passes.inserting import insertion
    from ..support.plug_ins import import_file

    for path in getattr(args, "load_passes", ()):
        import_file(path)
    return tuple(map(insertion, getattr(args, "insert_pass", ())))


def loading_of(args: argparse.Namespace) -> Loading:
    """How the options say that the model is loaded, batch and shapes aside."""
    from ..budgets import as_bytes
    from ..compiling.sources import Loading

    return Loading(
        trainable=split(args.trainable) if args.trainable else None,
        freeze=split(args.freeze) if args.freeze else None,
        unroll=split(args.unroll) if isinstance(args.unroll, str) else bool(args.unroll),
        seed=args.seed,
        max_seconds=args.max_seconds,
        max_bytes=None if args.max_bytes is None else as_bytes(args.max_bytes),
        dims={**{n: max(s) for n, s in bucket_sizes(getattr(args, "buckets", ())).items()}, **sizes(args.dim)},
        set=dict(bound(s) for s in args.set),
        quantization=args.quantization,
        edit=_edited(args),
    )


def _edited(args: argparse.Namespace) -> Callable[[Program], Program] | None:
    """The edit of the program that --lora or --dequantize asks for; None without either."""
    from ..tuning import dequantize, lora

    if args.lora is not None:
        return lambda program: lora(program, **args.lora)
    return None if args.dequantize is None else lambda program: dequantize(program, split(args.dequantize))


def split(text: str) -> list[str]:
    """The parts of a comma-separated list, without empty ones."""
    return [part.strip() for part in text.split(",") if part.strip()]


def input_shapes(items: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Shapes by input name from `x:[1,2]`; one item may hold several.  UsageError if one cannot be parsed."""
    shapes: dict[str, tuple[int, ...]] = {}
    for item in items:
        for part in item.replace("],", "];").split(";"):
            name, _, dims = part.rpartition(":")
            try:
                if not name or not dims.strip().startswith("["):
                    raise ValueError
                shapes[name.strip()] = tuple(int(d) for d in dims.strip(" []").split(",") if d.strip())
                if any(d < 0 for d in shapes[name.strip()]):
                    raise ValueError
            except ValueError:
                raise UsageError(f"--input-shapes: cannot read '{part}' (expected e.g. x:[64,3,224,224])") from None
    return shapes


def sizes(items: Sequence[str]) -> dict[str, int]:
    """Sizes of open dimensions by name, from `name=16`.  UsageError if one cannot be parsed."""
    result: dict[str, int] = {}
    for item in items:
        name, _, size = item.rpartition("=")
        if not name or not size.isdecimal():
            raise UsageError(f"--dim: cannot read '{item}' (expected e.g. src_len=16)")
        result[name] = int(size)
    return result


def bucket_sizes(items: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Sizes of open dimensions by name, from `sequence=64,128`.  UsageError if one cannot be parsed."""
    result: dict[str, tuple[int, ...]] = {}
    for item in items:
        name, _, listed = item.rpartition("=")
        parts = split(listed)
        if not name or not parts or not all(p.isdecimal() and int(p) for p in parts):
            raise UsageError(f"--buckets: cannot read '{item}' (expected e.g. sequence=64,128,256)")
        result[name] = tuple(map(int, parts))
    return result


def paddings(items: Sequence[str]) -> dict[str, Any]:
    """How inputs are padded, from `label=-100`, `x=0:left` or `attention_mask=mask:input_ids`.

    UsageError if one cannot be parsed.
    """
    from ..data import MaskOf, Pad

    result: dict[str, Any] = {}
    for item in items:
        name, _, text = item.partition("=")
        value, _, rest = text.partition(":")
        if name and value == "mask" and rest:
            column, _, side = rest.partition(":")
            result[name] = MaskOf(column, side or "right")
            continue
        try:
            result[name] = Pad(int(value) if value.lstrip("-").isdecimal() else float(value), rest or "right")
        except ValueError:
            name = ""
        if not name:
            raise UsageError(f"--pad: cannot read '{item}' (expected e.g. label=-100, x=0:left or mask=mask:input_ids)")
    return result


def bound(text: str) -> tuple[str, Any]:
    """(input, number or list) of `rate=16000` or `sizes=[1,2]`.  UsageError if it cannot be parsed."""
    name, sign, value = text.partition("=")
    try:
        if not sign or not name:
            raise ValueError
        return name, json.loads({"True": "true", "False": "false"}.get(value, value))
    except ValueError:
        raise UsageError(f"--set: cannot read '{text}' (expected e.g. rate=16000)") from None


def zoo_option(text: str) -> tuple[str, Any]:
    """(key, value) of `key=value`; numbers, lists of numbers and booleans are converted.  UsageError without `=`."""
    key, sign, value = text.partition("=")
    if not sign:
        raise UsageError(f"--option: cannot read '{text}' (expected key=value)")
    for kind in (int, float):
        try:
            return key, kind(value)
        except ValueError:
            continue
    if all(part.isdecimal() for part in value.split(",")):
        return key, tuple(int(part) for part in value.split(","))
    return key, {"true": True, "false": False}.get(value.lower(), value)
