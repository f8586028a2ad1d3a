"""Kernel providers of places, and whether a block was lowered for a target."""

from __future__ import annotations

from dataclasses import replace

from ..errors import UsageError, nearest
from ..language.ir import Block, Free
from ..language.kernels import PROVIDERS, accepting, fits, with_variants
from ..passes.offloading.transfers import Link
from ..passes.target import Target
from ..places import CUDAPlace, EmulatedCUDAPlace, Place
from ..support.disk import disk_rates
from . import cpu, cuda

#: the operators' own numerics, as a provider's name
OWN = "numpy"


def providers(place: Place | None = None) -> tuple[str, ...]:
    """The kernel providers of a place (None: the CPU), in order of preference."""
    kinds = cuda if isinstance(place, CUDAPlace) else cpu
    kinds.register_all()
    absent = ("cudnn",) if isinstance(place, EmulatedCUDAPlace) else ()  # the emulator does not run libraries
    return tuple(name for name in kinds.PREFERRED if name in PROVIDERS and name not in absent)


def resolved(target: Target) -> Target:
    """The target with the names of its kernel providers (default: all of its place), and with the rates of its disk.

    `("numpy",)` means none.  A target whose providers are all of CUDA is for a CUDA device, whatever its place.
    UsageError for unknown providers.
    """
    if target.disk is not None and target.link is None:
        try:
            target = replace(target, link=Link(*disk_rates(target.disk), 1e-4))
        except OSError as e:
            raise UsageError(f"disk '{target.disk}': cannot write there: {e.strerror}") from None
    if target.providers is None:
        return replace(target, providers=providers(target.place))
    wanted = tuple(n for n in target.providers if n != OWN)
    if not target.on_device and any(n in cuda.PREFERRED for n in wanted):
        target = replace(target, place=CUDAPlace())
    here = providers(CUDAPlace() if target.on_device else None)
    for name in wanted:
        if name not in here:
            kind = "CUDA" if target.on_device else "the processor"
            names = ", ".join((*here, OWN))
            raise UsageError(f"no provider '{name}' for {kind}{nearest(name, here)}; known: {names}")
    return replace(target, providers=wanted)


def slow_precision(target: Target) -> str:
    """Why a step in the target's precision will take longer than in float32, and by how much; "" where it will not."""
    return "" if target.on_device else cpu.slow_precision(target.precision)


def foreign(block: Block, target: Target) -> bool:
    """Whether a block was lowered for kernels of another target, or for other workspaces."""
    names = with_variants(target.kernels, block.products)
    named = {op.kernel for op in block.operators if op.kernel}
    if not named <= set(names) or any(op.kernel and not fits(op) for op in block.operators):
        return True
    on_device = "cuda" in target.kernels  # on which an operator without a kernel is slow
    return on_device and any(
        not op.kernel and not isinstance(op.op, Free) and not op.op.copies and accepting(names, op)
        for op in block.operators
    )
