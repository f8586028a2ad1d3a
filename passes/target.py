"""Targets: what a step is compiled for (place, kernel providers, cost model, precision)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..boundary import as_texts
from ..devices import CostModel, as_cost
from ..errors import UsageError, expect, nearest
from ..places import CPUPlace, CUDAPlace, Place, as_place
from .gradient.precision import check_precision
from .inserting import Insertion, insertion
from .offloading.transfers import LINK, Link

#: the values of `inserted`
_TEXTS = "texts such as 'after:autodiff=my-pass'"


@dataclass(frozen=True, init=False)
class Target:
    """The target of a compilation.

    `place`: where the step will run (a place, or its name such as "cuda:0"); compiling needs no device.  `providers`:
    kernel providers in order of preference (None: all for the place; `("numpy",)`: the operators' own numerics).
    `cost`: the cost model, or the name of a device such as "h200" (None: the data sheet of the place's device, or this
    CPU's roofline).  `precision`: "fp32", "tf32", "bf16", "bf16-pure" or "fp16" (None: that of the optimizer).
    `schedule`: whether independent operators may be reordered to lower the peak.  `rebuild`: whether normalised values
    that gradients read may be recomputed from values that are kept anyway (passes/recomputation/rebuild.py), and
    weights in another precision made again (temporary_weights.py, beside it).  `fuse_attention`,
    `fuse_head`: whether optimizers make attention, and a large product with a vocabulary and its cross entropy, one
    operator each (passes/attention/find_attention.py, passes/loss/find_head.py); of no effect on what is a training
    step already.  `link`: the rate of copies to host memory (None: that of `cost`).  `inserted`: passes of
    the user's own, such as "after:autodiff=my-pass" (passes/inserting.py).
    """

    place: Place = CPUPlace()  # noqa: RUF009 - frozen
    providers: Sequence[str] | None = None
    cost: CostModel | None = None
    precision: str | None = None
    schedule: bool = True
    rebuild: bool = True
    fuse_attention: bool = True
    fuse_head: bool = True
    link: Link | None = None
    inserted: Sequence[str | Insertion] = ()

    def __init__(
        self,
        place: Place | str | None = None,
        providers: Sequence[str] | str | None = None,
        cost: CostModel | str | None = None,
        precision: str | None = None,
        schedule: bool = True,
        rebuild: bool = True,
        fuse_attention: bool = True,
        fuse_head: bool = True,
        link: Link | None = None,
        inserted: Sequence[str | Insertion] | str | Insertion = (),
    ) -> None:
        more = (inserted,) if isinstance(inserted, (str, Insertion)) else expect("inserted", inserted, Iterable, _TEXTS)
        names = providers.split(",") if isinstance(providers, str) else providers
        fields = {
            "place": as_place(place),
            "providers": None if names is None else tuple(as_texts(names, "providers")),
            "cost": None if cost is None else as_cost(cost),
            "precision": None if precision is None else check_precision(precision),
            "schedule": expect("schedule", schedule, bool, "True or False"),
            "rebuild": expect("rebuild", rebuild, bool, "True or False"),
            "fuse_attention": expect("fuse_attention", fuse_attention, bool, "True or False"),
            "fuse_head": expect("fuse_head", fuse_head, bool, "True or False"),
            "link": None if link is None else expect("link", link, Link, "a Link: bytes a second out and back"),
            "inserted": tuple(insertion(expect("inserted", x, (str, Insertion), _TEXTS)) for x in more),
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    @property
    def on_device(self) -> bool:
        """Whether the step runs on a CUDA device, or on an emulated one."""
        return isinstance(self.place, CUDAPlace)

    @property
    def rates(self) -> Link:
        """The rate of copies to host memory; where neither the user nor a cost model says one, that of `LINK`."""
        return self.link or LINK

    @property
    def disk(self) -> str | None:
        """The folder for parameters, state and values that have no room in memory."""
        return str(self.place.disk) if isinstance(self.place, CPUPlace) and self.place.disk is not None else None

    @property
    def kernels(self) -> tuple[str, ...]:
        """The providers of a target that was resolved (see runtime/lowering.py)."""
        assert self.providers is not None, "resolve the target first: its providers are those of a place"
        return tuple(self.providers)

    @property
    def insertions(self) -> tuple[Insertion, ...]:
        """The passes that are inserted."""
        return tuple(map(insertion, self.inserted))

    def makes_the_same_as(self, other: Target) -> bool:
        """Whether a step compiled for one of two resolved targets is that of the other, however it is priced."""
        return type(self.place) is type(other.place) and (
            self.kernels, self.schedule, self.rebuild, self.inserted
        ) == (other.kernels, other.schedule, other.rebuild, other.inserted)  # fmt: skip


def target_fields() -> tuple[str, ...]:
    """The fields of a target that users can set."""
    return tuple(f.name for f in dataclasses.fields(Target) if f.name != "link")


def target_from(target: Target | None, options: dict[str, Any]) -> Target:
    """The target, or one made from its fields, which are removed from `options`.  UsageError if both are given."""
    fields = {name: options.pop(name) for name in target_fields() if name in options}
    fields = {name: value for name, value in fields.items() if value is not None}
    if target is not None:
        expect("target", target, Target, "an rc.Target")
    if target is not None and fields:
        name = next(iter(fields))
        raise UsageError(f"target and {name} both define the target: give target=rc.Target({name}=..., ...)")
    return target or Target(**fields)


def target_given(target: Target | None, options: dict[str, Any], function: str) -> Target:
    """`target_from` for options that must all be fields of a target.  UsageError for others."""
    result = target_from(target, options)
    for name in options:
        raise UsageError(f"{function} has no option '{name}'{nearest(name, target_fields())}")
    return result
