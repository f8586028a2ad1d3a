"""What a block goes through before its memory is planned, so that this machine's kernels run it."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ..errors import UsageError, nearest
from ..ir import Block, Free, Operator
from ..kernels import PROVIDERS, accepting, fits, provider, with_variants
from ..passes import ChannelsLast, ChooseKernels, FoldTransposes, Fusion, Lowering, OpenNorms, Pass
from ..passes.layouts import turned, turned_operator
from ..types import TensorType
from . import cpu, cuda
from .places import CUDAPlace, EmulatedCUDAPlace, Place

#: the operators' own numerics, as a provider's name
OWN = "numpy"


def providers(place: Place | None = None) -> tuple[str, ...]:
    """The providers that there are for a place (None: this machine's processor), the most preferred first."""
    kinds = cuda if isinstance(place, CUDAPlace) else cpu
    kinds.register_all()
    absent = ("cudnn",) if isinstance(place, EmulatedCUDAPlace) else ()  # the emulator runs no library
    return tuple(name for name in kinds.MODULES if name in PROVIDERS and name not in absent)


def lowering(names: Sequence[str] | None = None, place: Place | None = None) -> Lowering:
    """The lowering for these providers, of the processor or of CUDA (None: all that there are for `place`;
    `("numpy",)` or none: no lowering).

    UsageError for a provider that is not here, and for providers of both.
    """
    if isinstance(names, str):
        names = names.split(",")
    wanted = providers(place) if names is None else tuple(n for n in names if n != OWN)
    on_cuda = isinstance(place, CUDAPlace) or any(n in cuda.MODULES for n in wanted)
    here = providers(CUDAPlace() if on_cuda else None)
    for name in wanted:
        if name not in here:
            kind = "CUDA" if on_cuda else "the processor"
            known = ", ".join((*here, OWN))
            raise UsageError(f"no provider '{name}' for {kind}{nearest(name, here)}; here are: {known}")
    if not wanted:
        return Lowering()
    fusion: tuple[Pass, ...] = (OpenNorms(), Fusion(device=on_cuda)) if {"loops", "cuda"} & set(wanted) else ()
    passes = (FoldTransposes(), ChannelsLast(wanted), *fusion, ChooseKernels(wanted))
    return Lowering(passes, functools.partial(_workspace, wanted), wanted)


def _workspace(names: tuple[str, ...], op: Operator) -> tuple[TensorType, ...]:
    """What the kernel will need that runs an operator; its own numerics' where there is none."""
    form = turned(op)
    if form is not None and form.always:
        last = turned_operator(op, form)
        if taken := accepting(names, last):
            return provider(taken).scratch(last)
    taken = accepting(names, op)
    return provider(taken).scratch(op) if taken else op.workspace()


def foreign(block: Block, to: Lowering) -> bool:
    """Whether a block was lowered for kernels that are not those of a lowering, or need other workspaces here."""
    names = with_variants(to.providers, block.products)
    named = {op.kernel for op in block.operators if op.kernel}
    if not named <= set(names) or any(op.kernel and not fits(op) for op in block.operators):
        return True
    on_device = "cuda" in to.providers  # where an operator without a kernel is slow
    return on_device and any(
        not op.kernel and not isinstance(op.op, Free) and not op.op.copies and accepting(names, op)
        for op in block.operators
    )
