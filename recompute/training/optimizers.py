"""Optimizers: SGD, Momentum, Adagrad, RMSProp, Adam, AdamW, LAMB and LARS.

Names and calls are Paddle's.  An optimizer adds operators to the program: it declares state for each parameter, and
emits updates, each of which runs as soon as its gradient is final.  If the defaults of Paddle and PyTorch differ,
PyTorch's are used, because results are checked against it; the docstring of the class states the difference.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from ..errors import UsageError
from ..ops.optimizer.norm_updates import LambUpdate, LarsUpdate
from ..ops.optimizer.storage import LEAST
from ..ops.optimizer.updates import AdagradUpdate, AdamUpdate, MomentumUpdate, RMSPropUpdate, SGDUpdate
from .base import Optimizer, must_have_whole
from .gradient_merge import GradientMerge, GradientMergeOptimizer
from .numbers import fraction, number
from .protocol import AnyOptimizer
from .recompute_optimizer import RecomputeOptimizer, RecomputeWarning

#: values of `moments` beside None
EIGHT_BITS = "8-bit"
#: optimizers that `--optimizer` accepts
NAMES = ("SGD", "Momentum", "Nesterov", "Adagrad", "RMSProp", "Adam", "AdamW", "Lamb", "Lars")

__all__ = [
    "NAMES",
    "AnyOptimizer",
    "GradientMerge",
    "GradientMergeOptimizer",
    "Optimizer",
    "RecomputeOptimizer",
    "RecomputeWarning",
    *NAMES,
]


class SGD(Optimizer):
    """w ← w - lr·g."""

    def update(self, weight_decay):
        return SGDUpdate(weight_decay=weight_decay)


class Momentum(Optimizer):
    """v ← momentum·v + (1 - dampening)·g, w ← w - lr·v; with `use_nesterov` w ← w - lr·(g + momentum·v).

    momentum 0.9 is Paddle's default (PyTorch's SGD has 0).  `dampening` is PyTorch's: the first gradient counts whole.
    """

    slots = ("momentum",)

    def __init__(
        self,
        learning_rate: Any = 0.001,
        *,
        momentum: float = 0.9,
        dampening: float = 0.0,
        use_nesterov: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(learning_rate, **options)
        self.momentum, self.dampening = number("momentum", momentum), number("dampening", dampening)
        self.use_nesterov = use_nesterov
        if use_nesterov and self.dampening:
            raise UsageError("Nesterov momentum takes no dampening")

    def update(self, weight_decay):
        return MomentumUpdate(self.momentum, self.dampening, self.use_nesterov, weight_decay)


class Nesterov(Momentum):
    """Momentum with `use_nesterov=True`."""

    def __init__(self, learning_rate: Any = 0.001, *, momentum: float = 0.9, **options: Any) -> None:
        super().__init__(learning_rate, momentum=momentum, use_nesterov=True, **options)


class Adagrad(Optimizer):
    """s ← s + g², w ← w - lr·g / (√s + epsilon).

    epsilon 1e-10 is PyTorch's (Paddle: 1e-6).
    """

    slots = ("moment",)

    def __init__(
        self,
        learning_rate: Any = 0.01,
        *,
        epsilon: float = 1e-10,
        initial_accumulator_value: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(learning_rate, **options)
        self.epsilon = number("epsilon", epsilon)
        self.initial_accumulator_value = number("initial_accumulator_value", initial_accumulator_value)

    def update(self, weight_decay):
        return AdagradUpdate(self.epsilon, weight_decay)

    def initial(self, slot):
        """initial_accumulator_value."""
        return self.initial_accumulator_value


class RMSProp(Optimizer):
    """s ← rho·s + (1 - rho)·g², w ← w - lr·g / (√s + epsilon), optionally centered and with momentum.

    rho 0.99 and epsilon 1e-8, added outside the root, are PyTorch's (Paddle: 0.95 and 1e-6, inside the root).
    """

    slots = ("mean_square", "mean_grad", "momentum")

    def __init__(
        self,
        learning_rate: Any = 0.01,
        *,
        rho: float = 0.99,
        epsilon: float = 1e-8,
        momentum: float = 0.0,
        centered: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(learning_rate, **options)
        self.rho, self.epsilon, self.momentum = rho, number("epsilon", epsilon), number("momentum", momentum)
        self.centered = centered

    def slots_used(self):
        """mean_grad if centered, momentum if not 0."""
        return {"mean_square": True, "mean_grad": self.centered, "momentum": self.momentum > 0}

    def update(self, weight_decay):
        return RMSPropUpdate(self.rho, self.epsilon, self.momentum, weight_decay)


class Adam(Optimizer):
    """Adam (Kingma & Ba 2015); defaults are Paddle's and PyTorch's.  `amsgrad`: Reddi et al. 2018.

    `moments`: None keeps the moments in float32 (bfloat16 with precision "bf16-pure"), "8-bit" in 8 bits (Dettmers et
    al. 2022, as bitsandbytes does): blocks of 256 codes with a float32 each, of parameters of at least 4,096 elements.
    """

    slots = ("moment1", "moment2", "moment2_max")
    decoupled: ClassVar[bool] = False

    def __init__(
        self,
        learning_rate: Any = 0.001,
        *,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        amsgrad: bool = False,
        moments: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(learning_rate, **options)
        self.beta1, self.beta2 = fraction("beta1", beta1), fraction("beta2", beta2)
        self.epsilon, self.amsgrad = number("epsilon", epsilon), amsgrad
        if moments not in (None, EIGHT_BITS):
            raise UsageError(f"moments must be None or '{EIGHT_BITS}', not {moments!r}")
        self.moments = moments

    def slots_used(self):
        """moment2_max with amsgrad only."""
        return {"moment1": True, "moment2": True, "moment2_max": self.amsgrad}

    def update(self, weight_decay):
        return AdamUpdate(self.beta1, self.beta2, self.epsilon, weight_decay, self.decoupled)

    def stored(self, op, program, p, stochastic):
        """The stored state; moments in 8 bits where they are asked for and the parameter is large."""
        found = super().stored(op, program, p, stochastic)
        if self.moments != EIGHT_BITS or p.size < LEAST or p.dtype == "f64":
            return found
        must_have_whole(program, "moments in 8 bits", instead="moments=None")
        return dataclasses.replace(found, eight_bits=True)


class AdamW(Adam):
    """Adam with decoupled weight decay: w ← w - lr·weight_decay·w (Loshchilov & Hutter 2019); default 0.01."""

    decoupled = True

    def __init__(self, learning_rate: Any = 0.001, *, weight_decay: float = 0.01, **options: Any) -> None:
        super().__init__(learning_rate, weight_decay=weight_decay, **options)


class Lamb(Optimizer):
    """LAMB (You et al. 2020): Adam's step and weight decay, scaled by ‖w‖/‖step‖.  Defaults are Paddle's."""

    slots = ("moment1", "moment2")

    def __init__(
        self,
        learning_rate: Any = 0.001,
        *,
        weight_decay: float = 0.01,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-6,
        **options: Any,
    ) -> None:
        super().__init__(learning_rate, weight_decay=weight_decay, **options)
        self.beta1, self.beta2 = fraction("beta1", beta1), fraction("beta2", beta2)
        self.epsilon = number("epsilon", epsilon)

    def update(self, weight_decay):
        return LambUpdate(self.beta1, self.beta2, self.epsilon, weight_decay)


class Lars(Optimizer):
    """LARS with momentum (You, Gitman & Ginsburg 2017): the learning rate is scaled by ‖w‖/‖g‖.  Paddle's defaults."""

    slots = ("momentum",)

    def __init__(
        self,
        learning_rate: Any = 0.001,
        *,
        momentum: float = 0.9,
        lars_coeff: float = 0.001,
        weight_decay: float = 0.0005,
        epsilon: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(learning_rate, weight_decay=weight_decay, **options)
        self.momentum, self.lars_coeff = number("momentum", momentum), number("lars_coeff", lars_coeff)
        self.epsilon = number("epsilon", epsilon)

    def update(self, weight_decay):
        return LarsUpdate(self.momentum, self.lars_coeff, weight_decay, self.epsilon)
