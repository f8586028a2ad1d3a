"""The tables of options that exclude each other, and of those that need another."""

from __future__ import annotations

import argparse

import pytest

from recompute.cli import conflicts
from recompute.cli.arguments import parser
from recompute.cli.train_arguments import parser as training_parser
from recompute.errors import UsageError

TABLES = {
    "compile": (parser, conflicts.EXCLUDED, conflicts.NEEDED),
    "train": (training_parser, conflicts.TRAINING_EXCLUDED, conflicts.TRAINING_NEEDED),
}


def given(*names: str) -> argparse.Namespace:
    """Options of which only these are given."""
    every = {n for _, x, n_ in TABLES.values() for a, b, _ in (*x, *n_) for n in (a, *b) if " " not in n}
    return argparse.Namespace(**{n: "1" if n in names else None for n in every})


@pytest.mark.parametrize("command", TABLES)
def test_names_are_options(command: str) -> None:
    make, excluded, needed = TABLES[command]
    known = {a.dest for a in make()._actions} | {"budget"}
    facts = {"a planning problem", "a mesh", "a mesh with pp", "--mesh auto"}
    named = {n for a, b, _ in (*excluded, *needed) for n in (a, *b)}
    assert named <= known | facts
    assert {conflicts.option(n) for n in named if " " not in n} <= set(make()._option_string_actions)


@pytest.mark.parametrize("command", TABLES)
def test_every_pair_is_refused(command: str) -> None:
    _, excluded, needed = TABLES[command]
    for a, others, why in excluded:
        for b in others:
            with pytest.raises(UsageError) as caught:
                conflicts.check(given(a, b), [a] if " " in a else [], [(a, others, why)], ())
            assert str(caught.value) == f"{why}: leave out {conflicts.option(b)}"
    for a, others, what in needed:
        facts = [a] if " " in a else []
        with pytest.raises(UsageError) as caught:
            conflicts.check(given(a), facts, (), [(a, others, what)])
        assert str(caught.value) == f"{conflicts.option(a)} needs {what}"
        for b in others:
            conflicts.check(given(a, b), [*facts, *([b] if " " in b else [])], (), [(a, others, what)])
