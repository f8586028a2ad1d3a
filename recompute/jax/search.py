"""`policy(f, args, budget=...)`: what `jax.checkpoint` saves of a function, so that its gradient fits a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax

from ..budgets import as_budget
from ..devices import Device, device
from ..errors import BudgetError, UsageError
from ..support.tables import human_bytes
from .applying import applied, trace
from .explain import table
from .flat import Flat
from .plans import Candidate, candidates
from .problem import differentiable, given_names

#: XLA's schedulers for CPUs, the one that heeds memory and its default: either may give the lower peak
_CPU_SCHEDULERS: tuple[dict[str, Any], ...] = ({"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}, {})
#: XLA for CPUs removes the barriers of `jax.checkpoint` before it merges equal operations, and then merges what is
#: recomputed with the first computation (seen for all convolutions): with this option the barriers stay
_CPU_BARRIERS = {"xla_disable_hlo_passes": "cse_barrier_expander"}
#: for trials, compiled for their bytes alone: these are known before machine code is made, and half the time is saved
_CPU_QUICK = {"xla_backend_optimization_level": 0}


@dataclass(frozen=True)
class Trial:
    """A compiled plan: `peak`, XLA's bytes of arguments, outputs and temporaries, less what aliases; XLA's `flops`.

    `options`: the compiler options that gave it.
    """

    peak: int
    arguments: int
    outputs: int
    temporaries: int
    flops: float
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Policy:
    """Values to save.  `policy` is for `jax.checkpoint`; `names`: what it saves; `apply` gives values these names.

    `peak`: bytes of arguments, outputs and temporaries of the compiled step, as XLA states them
    (`compiled.memory_analysis()`), at most `budget`; `plain_peak`: without recomputation.  `overhead`: extra time by
    our cost model, as a share; `bound`: what no plan of the same simulated peak can go below (None with scans).
    `compiler_options` are those that it was compiled with: give them to `jax.jit`, or the peak is another.
    """

    names: tuple[str, ...]
    budget: int
    trial: Trial
    plain: Trial
    overhead: float
    bound: float | None
    tried: int
    device: Device
    flat: Flat
    recomputes: bool

    @property
    def peak(self) -> int:
        """Bytes of the compiled step by XLA."""
        return self.trial.peak

    @property
    def plain_peak(self) -> int:
        """The peak without recomputation, in bytes."""
        return self.plain.peak

    @property
    def compiler_options(self) -> Mapping[str, Any]:
        """Options of XLA that the step was compiled with."""
        return self.trial.options

    @property
    def given_names(self) -> dict[str, tuple[int, int]]:
        """The caller's own names (`checkpoint_name`): of how many values each, and how many of them are saved."""
        saved = set(self.names)
        whole = not self.recomputes
        names = given_names(self.flat)
        return {n: (len(ours), sum(whole or o in saved for o in ours)) for n, ours in names.items()}

    @property
    def policy(self) -> Callable[..., bool]:
        """The policy for `jax.checkpoint`."""
        policies = jax.checkpoint_policies
        return policies.everything_saveable if not self.recomputes else policies.save_only_these_names(*self.names)

    def apply(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """A function with the signature and results of `f`, the function planned for, whose gradient recomputes.

        `jax.grad`, `jax.jit` and the rest of JAX take it.  UsageError where `f` or its arguments are not those that
        were planned for: shapes, element types and operations must be the same.
        """
        _as_function(f)
        return applied(f, self.flat, frozenset(self.names), self.policy if self.recomputes else None)

    def explain(self) -> str:
        """A table of the largest results of the forward pass: bytes, what is kept, what computing them again takes."""
        return table(self, self.device)


def _as_function(f: object) -> None:
    if not callable(f):
        raise UsageError(f"f must be a function, not {type(f).__name__}")


def policy(
    f: Callable[..., Any],
    args: Sequence[Any],
    *,
    budget: str | int,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    cost: str = "h200",
    lower: Callable[[Callable[..., Any]], Any] | None = None,
    compiler_options: Mapping[str, Any] | None = None,
) -> Policy:
    """The values of `f(*args)` for `jax.checkpoint` to save, so that its gradient fits `budget`; options: see `Plans`.

    `budget`: as in `rc.RecomputeOptimizer.set_budget`: bytes, "8GiB", "60%" of the peak without recomputation.
    BudgetError below the least peak of all plans, which it states.
    """
    plans = Plans(f, args, argnums=argnums, has_aux=has_aux, cost=cost, lower=lower, compiler_options=compiler_options)
    return plans.within(budget)


class Plans:
    """The plans for one function and one set of shapes: `within(budget)` compiles a few of them until one fits.

    `f(*args)` returns a scalar (with `has_aux`, a pair of it and anything); `args` are arrays, pytrees of them, or
    `jax.ShapeDtypeStruct`s.  `argnums`: the arguments whose gradients are asked for.  `cost`: the device whose rates
    weigh recomputation against memory (`recompute.cost.device`).  `lower`: from a function like `f` to the lowered
    program whose peak counts, e.g. `lambda g: jax.jit(step(g), donate_argnums=0).lower(...)`; by default that of
    `jax.value_and_grad`.  `compiler_options`: for XLA; by default, on CPUs, barriers that stay where recomputation
    needs them, and of both schedulers the one that gives the lower peak (two compilations for each plan tried).
    """

    #: candidates among which the budget is looked for: four or five are compiled, and usual policies that are cheaper
    RUNGS = 16

    def __init__(
        self,
        f: Callable[..., Any],
        args: Sequence[Any],
        *,
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        cost: str = "h200",
        lower: Callable[[Callable[..., Any]], Any] | None = None,
        compiler_options: Mapping[str, Any] | None = None,
    ) -> None:
        _as_function(f)
        self.f, self.args = f, _as_args(args)
        self.argnums = _as_argnums(argnums, len(self.args))
        self.has_aux = has_aux
        self.flat = trace(f, self.args)[0]
        self._check(has_aux, lower)
        places = [i for i, a in enumerate(self.args) for _ in jax.tree.leaves(a)]
        wanted = [k for k, i in enumerate(places) if i in self.argnums and differentiable(self.flat.avals[k])]
        if not wanted:
            raise UsageError(f"nothing to differentiate: arguments {self.argnums} have no floating-point array")
        self._given = compiler_options
        self._lower = lower or self._gradient
        self.device = device(cost)
        self.candidates, self.usual = candidates(self.flat, wanted, self.device, self.RUNGS - 1)
        self.trials: dict[int, Trial] = {}  # 0: without recomputation; then the candidates, then the usual policies

    def _check(self, has_aux: bool, lower: object) -> None:
        """A default step needs a scalar loss."""
        out = self.flat.outputs[0] if self.flat.outputs else None
        aval = self.flat.avals[out] if isinstance(out, int) else getattr(out, "aval", None)
        if lower is None and (aval is None or aval.shape != () or (len(self.flat.outputs) > 1 and not has_aux)):
            raise UsageError(
                "f must return a scalar, the loss (with has_aux=True, a pair of it and anything): or give `lower`, "
                "which lowers the step to compile"
            )

    def within(self, budget: str | int) -> Policy:
        """The cheapest plan found within the budget.  BudgetError where none of those compiled fits.

        A smaller budget never gives a higher peak.  Candidates are searched by halves, always the same ones first; one
        with a lower peak than a cheaper one that fits counts as having that peak.  Then the usual policies that are
        cheaper than the one found are compiled, the cheapest first, until one fits.
        """
        wanted = as_budget(budget)
        if wanted.of_process is not None:
            raise UsageError(f"'{wanted}': XLA's figures are those of a step; give bytes, or a share of the plain peak")
        plain = self.trial(0)
        limit = wanted.within(plain.peak, plain.arguments)
        best = 0 if plain.peak <= limit else -1
        low, high = 1, len(self.candidates)
        floor = 0
        while best != 0 and low <= high:
            middle = (low + high) // 2
            trial = self.trial(middle)
            if max(trial.peak, floor) > limit:
                low = middle + 1
            else:
                high = middle - 1
                if trial.peak >= floor:
                    best, floor = middle, trial.peak
        dearest = math.inf if best < 0 else 0.0 if best == 0 else self.candidates[best - 1].cost
        for k, c in enumerate(self.usual, len(self.candidates) + 1):
            if c.cost < dearest and self.trial(k).peak <= limit:
                best = k
                break
        if best < 0:
            raise self._refusal(wanted.text, limit)
        return self.result(best, limit)

    def trial(self, rung: int) -> Trial:
        """XLA's figures for a compiled candidate (0: without recomputation); each is compiled once.

        With those options that give the lowest peak, whatever the budget: a smaller one never gives a higher peak.
        """
        if rung not in self.trials:
            lowered = self._lower(self.result(rung, 0, judged=False).apply(self.f))
            trials = (_compiled(lowered, options) for options in self._options(rung))
            self.trials[rung] = min(trials, key=lambda t: t.peak)
        return self.trials[rung]

    def _options(self, rung: int) -> list[dict[str, Any]]:
        """Compiler options to try for a candidate: those given, or on CPUs both schedulers."""
        if self._given is not None or jax.default_backend() != "cpu":
            return [dict(self._given or {})]
        barriers = _CPU_BARRIERS if rung and not any(s.body for s in self.flat.steps) else {}
        return [{**barriers, **scheduler} for scheduler in _CPU_SCHEDULERS if all(map(_known, scheduler.items()))]

    def result(self, rung: int, limit: int, *, judged: bool = True) -> Policy:
        """A candidate as a policy (0: nothing is recomputed)."""
        c = [*self.candidates, *self.usual][max(0, rung - 1)]
        bound = c.bound if judged and rung else None
        return Policy(
            names=tuple(sorted(c.names)) if rung else (),
            budget=limit,
            trial=self.trials.get(rung, _NONE),
            plain=self.trials.get(0, _NONE),
            overhead=_extra(c.cost, self.candidates[0]) if rung else 0.0,
            bound=None if bound is None else _extra(bound, c),
            tried=len(self.trials),
            device=self.device,
            flat=self.flat,
            recomputes=rung > 0,
        )

    def _gradient(self, f: Callable[..., Any]) -> Any:
        argnums = self.argnums if len(self.argnums) > 1 else self.argnums[0]
        return jax.jit(jax.value_and_grad(f, argnums, has_aux=self.has_aux)).lower(*self.args)

    def _refusal(self, text: str, limit: int) -> BudgetError:
        least = min(t.peak for t in self.trials.values())
        return BudgetError(
            f"no plan fits into {text} ({limit:,} bytes): the least of {len(self.trials)} compiled plans takes "
            f"{least:,} bytes ({human_bytes(least)}), of which arguments {self.trials[0].arguments:,} and outputs "
            f"{self.trials[0].outputs:,}. Give a larger budget, or a smaller batch"
        )


def _extra(seconds: float, c: Candidate) -> float:
    """Seconds beyond those of the step without recomputation, as a share of these."""
    plain = c.derived.problem.cost
    return seconds / plain - 1 if plain else 0.0


_NONE = Trial(0, 0, 0, 0, 0.0, {})


def _compiled(lowered: Any, options: dict[str, Any]) -> Trial:
    quick = _CPU_QUICK if jax.default_backend() == "cpu" else {}
    compiled = lowered.compile(compiler_options={**options, **quick})
    m = compiled.memory_analysis()
    flops = (compiled.cost_analysis() or {}).get("flops", 0.0)
    arguments, outputs, temporaries = m.argument_size_in_bytes, m.output_size_in_bytes, m.temp_size_in_bytes
    peak = arguments + outputs + temporaries - m.alias_size_in_bytes
    return Trial(peak, arguments, outputs, temporaries, flops, options)


@cache
def _known(option: tuple[str, Any]) -> bool:
    """Whether this XLA has a compiler option (the scheduler's is newer than jax 0.8)."""
    try:
        jax.jit(lambda x: x).lower(0.0).compile(compiler_options=dict([option]))
    except jax.errors.JaxRuntimeError:
        return False
    return True


def _as_args(args: Any) -> tuple[Any, ...]:
    if not isinstance(args, (tuple, list)):
        raise UsageError(f"args must be a tuple of the function's arguments, not a {type(args).__name__}")
    return tuple(args)


def _as_argnums(argnums: Any, count: int) -> tuple[int, ...]:
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    for i in numbers:
        if not isinstance(i, int) or not -count <= i < count:
            raise UsageError(f"argnums {argnums}: the function has the arguments 0 to {count - 1}")
    return tuple(i % count for i in numbers)
