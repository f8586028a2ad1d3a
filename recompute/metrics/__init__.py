"""Metrics of an evaluation: each reads a program's outputs and the labels of the batch, and adds up exactly.

    metric = rc.metrics.Accuracy().bind(program)
    for batch in batches:  # of any sizes
        metric.update({"logits": program.evaluate(batch, ["logits"])[0]}, batch)
    print(metric.name, metric.result())

What is summed is summed exactly, in float64 and in whole numbers: the result does not depend on how the samples were
divided into batches.
"""

from .base import LABELS, Metric
from .classification import Accuracy, TopK
from .named import NAMES, named
from .perplexity import Perplexity
from .scikit_learn import ScikitLearn
from .sequences import CharacterErrorRate, ctc_decode, edit_distance

__all__ = [
    "LABELS",
    "NAMES",
    "Accuracy",
    "CharacterErrorRate",
    "Metric",
    "Perplexity",
    "ScikitLearn",
    "TopK",
    "ctc_decode",
    "edit_distance",
    "named",
]
