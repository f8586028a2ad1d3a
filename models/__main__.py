"""Writes a network of the zoo to a file: `python -m recompute.models lenet -o lenet.onnx`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx

from ..errors import UsageError
from ..support.files import replacing
from . import build, info, names, parameters


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status (0, or 2 for a mistake in the arguments)."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.list:
        for name in names():
            print(f"{name:12} {info(name).description}")
        return 0
    if options.name is None:
        parser.error("give the name of a network; --list shows them")
    try:
        values = _parse_options(options.name, options.option)
        batch = int(options.batch) if options.batch.isdecimal() else options.batch
        model = build(options.name, batch=batch, weights=options.weights, seed=options.seed, **values)
    except ValueError as error:
        parser.error(str(error))
    path = Path(options.output or f"{options.name}.onnx")
    try:
        save(model, path)
    except OSError as error:
        parser.error(f"cannot write '{path}': {error.strerror or error}")
    count = sum(_size(shape) for shape in parameters(model).values())
    print(f"{path}: {count:,} parameters, {path.stat().st_size:,} bytes")
    return 0


def save(model: onnx.ModelProto, path: Path) -> None:
    """Writes a model; the file is there whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_bytes(model.SerializeToString(deterministic=True))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m recompute.models", description=__doc__)
    parser.add_argument("name", nargs="?", help="a network of the zoo, such as resnet50")
    parser.add_argument("-o", "--output", help="the file to write (default: NAME.onnx)")
    parser.add_argument("--batch", default="N", help="the batch: a size, or a symbol (default: N)")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="may be repeated")
    parser.add_argument("--no-weights", dest="weights", action="store_false", help="shapes only, for planning")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the weights (default: 0)")
    parser.add_argument("--list", action="store_true", help="list the zoo and stop")
    return parser


def _parse_options(name: str, pairs: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE strings to values of the types that the network's options have."""
    defaults = info(name).options
    values: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise UsageError(f"--option wants KEY=VALUE, not {pair!r}")
        # An unknown key is left to build(), whose message names the nearest ones.
        values[key] = _parse_value(key, text, defaults.get(key, ""))
    return values


def _parse_value(key: str, text: str, default: Any) -> Any:
    try:
        if isinstance(default, bool):
            return {"true": True, "false": False}[text.lower()]
        if isinstance(default, tuple):
            parts = tuple(int(part) for part in text.split(","))
            return parts[0] if key == "image" and len(parts) == 1 else parts
        return type(default)(text)
    except (KeyError, ValueError):
        raise UsageError(f"--option {key}={text}: expected a value like {default!r}") from None


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for dim in shape:
        size *= dim
    return size


if __name__ == "__main__":
    sys.exit(main())
