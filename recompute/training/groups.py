"""Parameter groups: hyper-parameters of their own for the parameters that a pattern matches, as PyTorch has them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UsageError, nearest
from ..language.program import Program, Variable
from ..support.patterns import Patterns

__all__ = ["Group", "assigned", "groups_from"]

#: PyTorch's names of hyper-parameters, where ours differ
_SYNONYMS = {"lr": "learning_rate", "eps": "epsilon", "alpha": "rho", "nesterov": "use_nesterov"}
#: options of the whole optimizer, not of a group
_COMMON = ("parameters", "apply_decay_param_fun", "grad_clip", "groups")
#: most parameters that an error lists
_LISTED = 8


@dataclass(frozen=True, eq=False)
class Group:
    """One group: its position, the names, globs and Variables of its parameters, and its hyper-parameters.

    `rate`: its learning rate, a number or a schedule (None: that of the optimizer).
    """

    index: int
    match: tuple[str | Variable, ...]
    settings: Mapping[str, Any]
    rate: Any = None

    def applied(self, optimizer: Any) -> Any:
        """A copy of the optimizer with the group's hyper-parameters.  UsageError if they contradict each other."""
        own = copy.copy(optimizer)
        for name, value in self.settings.items():
            setattr(own, name, value)
        mine = (n for n in inspect.signature(type(own)).parameters if n not in (*_COMMON, "learning_rate"))
        _made(type(own), self.index, {n: getattr(own, n) for n in mine if hasattr(own, n)})
        return own


def groups_from(kind: type, groups: Any) -> tuple[Group, ...]:
    """The groups that a user gave to an optimizer of a class.  UsageError for unknown keys and wrong values."""
    if isinstance(groups, (str, Mapping)) or not isinstance(groups, Iterable):
        raise UsageError(f"groups must be a list of dicts such as {{'match': 'head.*', 'lr': 1e-3}}, not {groups!r}")
    return tuple(_group(kind, i, g) for i, g in enumerate(groups))


def _group(kind: type, index: int, options: Any) -> Group:
    if not isinstance(options, Mapping) or "match" not in options:
        hint = (
            " (PyTorch's 'params' is called match here)" if isinstance(options, Mapping) and "params" in options else ""
        )
        raise UsageError(
            f"groups[{index}] must be a dict with 'match', the names or globs of its parameters, such as "
            f"{{'match': 'head.*', 'lr': 1e-3}}, not {options!r}{hint}"
        )
    match = options["match"]
    match = (match,) if isinstance(match, (str, Variable)) else tuple(match) if isinstance(match, Iterable) else ()
    if not match or not all(isinstance(m, (str, Variable)) for m in match):
        raise UsageError(f"groups[{index}]: match takes names, globs and Variables, not {options['match']!r}")
    settings = dict(_settings(kind, index, {k: v for k, v in options.items() if k != "match"}))
    rule = _made(kind, index, settings)
    rate = rule._rate if "learning_rate" in settings else None
    return Group(index, match, {n: getattr(rule, n) for n in settings if n != "learning_rate"}, rate)


def _settings(kind: type, index: int, given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    names = _hyper_parameters(kind)
    for key, value in given.items():
        if key == "betas" and {"beta1", "beta2"} <= set(names):
            if not isinstance(value, Sequence) or len(value) != 2:
                raise UsageError(f"groups[{index}]: betas must be two numbers, not {value!r}")
            yield from zip(("beta1", "beta2"), value, strict=True)
            continue
        name = key if key in names else _SYNONYMS.get(key, key)
        if name not in names:
            raise UsageError(
                f"groups[{index}]: {kind.__name__} has no hyper-parameter '{key}'{nearest(str(key), names)}; "
                f"it has: {', '.join(names)}"
            )
        yield name, value


def called(name: str, kind: type) -> str:
    """The name here of an option of other libraries, for a message."""
    names = _hyper_parameters(kind)
    synonym = {"betas": "beta1 and beta2", **_SYNONYMS}.get(name, "")
    if synonym.partition(" ")[0] in names:
        return f": it is called {synonym} here"
    return nearest(name, [*names, *_COMMON])


def _hyper_parameters(kind: type) -> list[str]:
    """The options of a class of optimizers, its parents' included."""
    names: dict[str, None] = {}
    for cls in kind.__mro__:
        init = cls.__dict__.get("__init__")
        if init is None or cls is object:
            continue
        parameters = inspect.signature(init).parameters.values()
        names.update((p.name, None) for p in list(parameters)[1:] if p.kind is not p.VAR_KEYWORD)
        if not any(p.kind is p.VAR_KEYWORD for p in parameters) or "grad_clip" in names:
            break
    return [name for name in names if name not in _COMMON]


def _made(kind: type, index: int, settings: Mapping[str, Any]) -> Any:
    """An optimizer of the class, whose constructor checks the hyper-parameters."""
    try:
        return kind(**settings)
    except (UsageError, TypeError) as e:
        raise UsageError(f"groups[{index}]: {e}") from None


def assigned(groups: Sequence[Group], program: Program, trained: Sequence[str]) -> dict[str, Group]:
    """The group of each trained parameter that is in one.

    UsageError for patterns that match none, and for parameters that two groups match.
    """
    by_name: dict[str, tuple[Group, str]] = {}
    for group in groups:
        for pattern in group.match:
            text = pattern.name if isinstance(pattern, Variable) else pattern
            for name in _matches(program, pattern, trained):
                other, by = by_name.setdefault(name, (group, text))
                if other is not group:
                    raise UsageError(
                        f"parameter '{name}' is in two groups: groups[{other.index}] ('{by}') and "
                        f"groups[{group.index}] ('{text}'): narrow one of the two patterns"
                    )
    return {name: group for name, (group, _) in by_name.items()}


def _matches(program: Program, pattern: str | Variable, trained: Sequence[str]) -> list[str]:
    """Trained parameters whose name, or alias, a pattern matches."""
    if isinstance(pattern, Variable):
        if pattern.program is not program:
            raise UsageError(f"groups: '{pattern.name}' belongs to another program")
        pattern = pattern.name
    names = _fitting(program, pattern, trained)
    if names:
        return names
    if _fitting(program, pattern, [v.name for v in program.block.persistent()]):
        raise UsageError(f"groups: '{pattern}' matches no parameter that is trained, only others")
    glob = pattern.removeprefix("^").removesuffix("$").replace("\\.", ".").replace(".*", "*").replace(".+", "*")
    if glob != pattern and _fitting(program, glob, trained):
        raise UsageError(
            f"groups: '{pattern}' matches no parameter: patterns are globs, not regular expressions (did you mean "
            f"'{glob}'?)"
        )
    near = nearest(pattern, trained)
    has = ", ".join(trained[:_LISTED]) + ", ..." * (len(trained) > _LISTED)
    raise UsageError(f"groups: '{pattern}' matches no parameter{near or f'; trained are {has}'}")


def _fitting(program: Program, pattern: str, names: Sequence[str]) -> list[str]:
    fits = Patterns(pattern).fit
    by_alias = {target for alias, target in program.aliases.items() if fits(alias)}
    return [n for n in names if n in by_alias or fits(n)]
