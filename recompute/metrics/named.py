"""Metrics by name, for command lines and lists of names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from ..errors import UsageError, expect, nearest
from .base import Metric
from .classification import Accuracy, TopK
from .perplexity import Perplexity
from .scikit_learn import ScikitLearn
from .sequences import CharacterErrorRate

_NAMED: dict[str, Callable[[], Metric]] = {
    "accuracy": Accuracy,
    "top5": TopK,
    "perplexity": Perplexity,
    "cer": CharacterErrorRate,
    "f1": lambda: ScikitLearn("f1_score", average="macro", name="f1"),
    "f1_micro": lambda: ScikitLearn("f1_score", average="micro", name="f1_micro"),
    "f1_binary": lambda: ScikitLearn("f1_score", average="binary", name="f1_binary"),
    "mae": lambda: ScikitLearn("mean_absolute_error", classes=False, ignore_index=None, name="mae"),
    "mse": lambda: ScikitLearn("mean_squared_error", classes=False, ignore_index=None, name="mse"),
}
#: names that `named` takes; so does "top" with any number
NAMES = tuple(_NAMED)


def named(name: str) -> Metric:
    """A new metric with its default settings, by one of `NAMES`, or "topK" for a number K.  UsageError for others."""
    match = re.fullmatch(r"top([1-9][0-9]{0,5})", expect("metric", name, str, "a name such as 'accuracy'"))
    if match:
        return TopK(int(match[1]))
    if name not in _NAMED:
        raise UsageError(f"there is no metric '{name}'{nearest(name, NAMES)}; there are {', '.join(NAMES)}")
    return _NAMED[name]()


def as_metrics(metrics: Iterable[Metric | str]) -> list[Metric]:
    """The metrics, those that are given by name included.  UsageError for all else."""
    sequence = expect("metrics", metrics, Iterable, "a list of rc.metrics")
    listed = (named(m) if isinstance(m, str) else m for m in sequence)
    return [expect("a metric", m, Metric, "one of rc.metrics or its name") for m in listed]
