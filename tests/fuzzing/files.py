"""File number k of a seed: what it is, and what becomes of it."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Sequence
from pathlib import Path

from . import onnx_files, programs, raw, records, seeds
from .targets import TARGETS

FUZZERS = ("bytes", "structure")
SUFFIX = {"onnx": ".onnx", "text": ".rir", "step": ".onnx", "plan": ".json", "state": ".safetensors", "data": ".npz"}
#: names of errors that say nothing to a user, in a message that is one of ours
UNCLEAR = re.compile(
    r"\b(KeyError|UFuncTypeError|IndexError|AttributeError|TypeError|ValueError|AssertionError|OverflowError|ZeroDivisionError"
    r"|UnboundLocalError|RecursionError|StopIteration|NotImplementedError|object has no attribute|NoneType)\b"
)
#: where an error's name stands behind the node or operator that it is about
NAMED = re.compile(r" \((Index|Value)Error\)$|^\w+Error in\s|invalid inputs or attributes \([^\n]*\)")


@functools.cache
def _texts(kind: str, everything: bool) -> list[str]:
    return [data.decode() for _, data in seeds.corpus(kind, everything)]


def damaged(kind: str, fuzzer: str, seed: int, number: int, everything: bool = True) -> tuple[str, bytes]:
    """(the original's name, the damaged file): the same for the same arguments."""
    r = random.Random(f"{kind}/{fuzzer}/{seed}/{number}")
    corpus: Sequence[tuple[str, bytes]] = seeds.corpus(kind, everything)
    i = r.randrange(len(corpus))
    name, original = corpus[i]
    if fuzzer == "bytes":
        if kind == "text" or (kind == "plan" and r.random() < 0.7):
            text = raw.damaged_text(r, _texts(kind, everything)[i], _texts(kind, everything))
            return name, text.encode("utf-8", "surrogatepass")
        return name, raw.damaged_bytes(r, original, [data for _, data in r.sample(corpus, min(3, len(corpus)))])
    if kind == "onnx":
        return name, onnx_files.damaged_model(r, original)
    if kind == "text":
        return name, programs.damaged_program(r, original.decode()).encode("utf-8", "surrogatepass")
    return name, records.DAMAGE[kind](r, original)


def outcome(kind: str, path: Path, number: int, name: str) -> str:
    """ "ran", "loaded", "refused", or "unclear: ..." for a refusal in words that only a programmer reads.

    Whatever is raised that is no RecomputeError goes through.
    """
    from recompute import RecomputeError

    try:
        return TARGETS[kind](path, number, name)
    except RecomputeError as e:
        message = str(e)
        if not message:
            return "unclear: an error without a text"
        found = UNCLEAR.search(NAMED.sub("", message))
        return f"unclear: {' '.join(message.split())}" if found else "refused"
