"""Networks of the zoo, narrowed so that they train in a moment, and compiled steps that a session's tests share."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

import recompute as rc
from recompute import models
from recompute.compiling.compiler import CompiledStep, compile_step
from recompute.data.batches import synthetic_batch
from recompute.models import registry

#: options that narrow the networks whose names begin so
NARROW: dict[str, dict[str, Any]] = {
    "alexnet": {"width": 4, "image": 63, "classes": 10, "hidden": 16},
    "amoebanet": {"width": 2, "cells": 3, "image": 16},
    "darts": {"width": 2, "cells": 3, "image": 16},
    "nasnet": {"width": 2, "cells": 3, "image": 16},
    "densenet": {"width": 4, "growth": 2, "blocks": (2, 3, 3, 2), "image": 32, "classes": 10},
    "ds_cnn": {"width": 4, "frames": 9, "coefficients": 6, "classes": 3},
    "fcos": {"width": 4, "image": 32, "channels": 8, "groups": 2, "blocks": (1, 1, 1, 1), "classes": 2, "depth": 1},
    "fcn8": {"width": 2, "hidden": 8, "image": 32, "classes": 4},
    "pspnet": {"width": 2, "blocks": (1, 2, 2, 1), "image": (41, 44), "classes": 4},
    "segnet": {"width": 2, "image": 32, "classes": 4},
    "googlenet": {"width": 4, "image": 32, "classes": 10},
    "inception": {"width": 2, "image": 75, "classes": 10},
    "unet": {"width": 2, "image": (16, 32), "classes": 4},
    "mobilenet": {"width": 2, "image": 64, "classes": 10},
    "resnet": {"width": 8, "image": 32, "classes": 10},
    "vgg": {"image": 32, "classes": 10, "hidden": 32},
    "bert": {"hidden": 32, "heads": 2, "seq": 12, "vocab": 50, "positions": 16},
    "roberta": {"layers": 2, "hidden": 32, "heads": 2, "seq": 12, "vocab": 50, "positions": 16},
    "gpt2": {"hidden": 32, "heads": 2, "seq": 12, "vocab": 50, "context": 16},
    "vit": {"layers": 2, "hidden": 32, "heads": 2, "image": 32, "classes": 10},
    "llama": {"hidden": 32, "inner": 48, "heads": 4, "groups": 2, "seq": 12, "vocab": 50},
    "moe": {"hidden": 32, "inner": 16, "heads": 4, "groups": 2, "seq": 12, "vocab": 50, "tokens": 6, "capacity": 4},
    "lstm": {"seq": 6, "features": 8, "hidden": 12},
}
#: variants that, narrowed, are still of another kind than the first of their family: deeper, with other blocks
_ALSO = ("bert-medium", "resnet50", "gpt2-small", "llama-block", "vgg11_bn")


def narrow(name: str) -> dict[str, Any]:
    """The options that make a network small; none where it is."""
    return next((options for family, options in NARROW.items() if name.startswith(family)), {})


def zoo() -> list[str]:
    """The networks that tests go through: the first of every family, and variants of another kind."""
    firsts = {family: name for name, (family, _) in reversed(registry._REGISTRY.items())}.values()
    return [name for name in models.names() if name in firsts or name in _ALSO]


@lru_cache(64)
def network(name: str, batch: int = 2) -> tuple[rc.Program, str, dict[str, np.ndarray]]:
    """A narrowed network with its loss, the loss's name, and a batch."""
    program = rc.load(models.build(name, batch=batch, **narrow(name)), seed=3)
    kind, _ = rc.losses.natural_loss(program)
    loss = kind if kind in program else getattr(rc.losses, kind)(program).name
    entry = models.info(name, **narrow(name))
    return program, loss, synthetic_batch(program, 0, {s.name: s for s in entry.inputs})


@lru_cache(64)
def compiled(name: str, batch: int = 2) -> CompiledStep:
    """A step of a narrowed network by Momentum.  Nobody may train its arrays: run a clone of its program."""
    program, loss, _ = network(name, batch)
    return compile_step(program, loss, rc.Momentum(learning_rate=0.01))
