"""The exact packer: constraint programming over addresses (CP-SAT's NoOverlap2D), for small programs or on request."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import load_extra
from .packing import MOST, Lifetime, height, lower_bound, pack


def pack_exact(lifetimes: Sequence[Lifetime], *, align: int = 64, seconds: float = 10.0) -> tuple[dict[str, int], int]:
    """(addresses by name, proven lower bound of the arena in bytes).

    Each allocation is a rectangle, time × address, and no two may overlap; the height of the arena is minimised,
    starting from the heuristics' plan, which is optimal if its height equals the bound.  MissingExtraError without
    ortools (extra `plan`).
    """
    cp_model = load_extra("ortools.sat.python.cp_model", "plan", "the exact memory packer")
    hint = pack(lifetimes)
    bound, top = lower_bound(lifetimes), height(lifetimes, hint)
    if bound == top or top > MOST:
        return hint, bound
    model = cp_model.CpModel()
    ceiling = model.new_int_var(bound // align, top // align, "height")
    addresses, times, places = {}, [], []
    for x in lifetimes:
        if not x.size:
            continue
        units = x.size // align
        at = addresses[x.name] = model.new_int_var(0, top // align - units, x.name)
        times.append(model.new_fixed_size_interval_var(x.start, x.end + 1 - x.start, ""))
        places.append(model.new_fixed_size_interval_var(at, units, ""))
        model.add(at + units <= ceiling)
        model.add_hint(at, hint[x.name] // align)
    model.add_no_overlap_2d(times, places)
    model.minimize(ceiling)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.random_seed = 0
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return hint, bound
    plan = {name: int(solver.value(at)) * align for name, at in addresses.items()}
    plan.update({x.name: 0 for x in lifetimes if not x.size})
    return plan, max(bound, int(solver.best_objective_bound) * align)
