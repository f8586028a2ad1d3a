"""What a step is compiled for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import UsageError, nearest
from ..language.ir import Operator
from ..places import CPUPlace, CUDAPlace, Place
from .offloading.transfers import LINK, Link


class CostModel(Protocol):
    """What operators cost: the same answer for the same operator, as long as the process lives."""

    @property
    def name(self) -> str:
        """What messages call it."""

    def seconds(self, operator: Operator) -> float:
        """Time of one operator."""


@dataclass(frozen=True)
class Target:
    """What a step is compiled for.

    `place`: where it will run; a device need not be there to compile for it.  `providers`: whose kernels run it, the
    most preferred first (None: all that there are for the place; `("numpy",)`: the operators' own numerics).  `cost`:
    what times are estimated by (None: the data sheet of the place's device, or this CPU's roofline).  `precision`:
    "fp32", "tf32", "bf16" or "fp16" (None: as the optimizer says).  `schedule`: whether independent operators may
    change places to need less memory.  `rebuild`: whether normalised values that gradients read may be recomputed
    from what is kept anyway (passes/recomputation/rebuild.py).  `link`: the way to host memory, which `resolved` takes
    from `cost`.
    """

    place: Place = CPUPlace()  # noqa: RUF009 - frozen
    providers: Sequence[str] | None = None
    cost: CostModel | None = None
    precision: str | None = None
    schedule: bool = True
    rebuild: bool = True
    link: Link = LINK

    def __post_init__(self) -> None:
        if isinstance(self.providers, str):
            object.__setattr__(self, "providers", tuple(self.providers.split(",")))
        elif self.providers is not None:
            object.__setattr__(self, "providers", tuple(self.providers))

    @property
    def on_device(self) -> bool:
        """Whether the step runs on a CUDA device, or on an emulated one."""
        return isinstance(self.place, CUDAPlace)

    @property
    def kernels(self) -> tuple[str, ...]:
        """The providers of a target that was resolved (see runtime/lowering.py)."""
        assert self.providers is not None, "resolve the target first: its providers are those of a place"
        return tuple(self.providers)

    def makes_the_same_as(self, other: Target) -> bool:
        """Whether a step compiled for one of two resolved targets is that of the other, however it is priced."""
        return type(self.place) is type(other.place) and (self.kernels, self.schedule, self.rebuild) == (
            other.kernels,
            other.schedule,
            other.rebuild,
        )


def target_fields() -> tuple[str, ...]:
    """What a user says of a target."""
    return tuple(f.name for f in dataclasses.fields(Target) if f.name != "link")


def target_from(target: Target | None, options: dict[str, Any]) -> Target:
    """A target, or one made of its fields, which are taken out of `options`.  UsageError where both are given."""
    given = {name: options.pop(name) for name in target_fields() if name in options}
    given = {name: value for name, value in given.items() if value is not None}
    if target is not None and given:
        name = next(iter(given))
        raise UsageError(f"target and {name} both say what the step is for: give target=rc.Target({name}=..., ...)")
    return target or Target(**given)


def target_given(target: Target | None, options: dict[str, Any], function: str) -> Target:
    """`target_from` where nothing else may be left.  UsageError for what is no field of a target."""
    found = target_from(target, options)
    for name in options:
        raise UsageError(f"{function} has no option '{name}'{nearest(name, target_fields())}")
    return found
