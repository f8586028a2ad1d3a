"""Identical layers of a forward pass, and the network with fewer of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import recompute as rc
from recompute.language.program import Program
from recompute.language.verify import verify
from recompute.passes.pipelines.cuts import places_of
from recompute.passes.pipelines.repeats import repeats, segments, shortened
from recompute.passes.pipelines.schedules import Pipe
from recompute.training.stages import with_own_layers

GPT = {"layers": 6, "hidden": 16, "heads": 2, "vocab": 24, "seq": 8, "dropout": 0.0}


def forward(name: str, **options: Any) -> Program:
    program = rc.load(rc.models.build(name, seed=0, **options), batch=2)
    rc.losses.cross_entropy(program["logits"])
    return program


@pytest.mark.parametrize(
    ("name", "options", "layers"),
    [
        ("gpt2-tiny", GPT, 6),
        ("llama-tiny", {"layers": 5}, 5),
        ("resnet18", {"width": 4, "blocks": (1, 1, 1, 1), "image": 16, "classes": 3}, 1),
    ],
)
def test_layers_are_found(name: str, options: dict[str, Any], layers: int) -> None:
    """One less than there are: the last has no neighbour behind it."""
    found = list(repeats(segments(forward(name, **options).block)))
    assert len(found) == layers - 1


def test_what_is_left_is_a_network_of_fewer_layers() -> None:
    """With the weights of the layers that are left, it computes what a network of that depth does."""
    program = forward("gpt2-tiny", **GPT)
    block = verify(shortened(program.block, ["h.2.out"], {0}))
    names = {v.name.split(".")[1] for v in block.parameters if v.name.startswith("h.")}
    assert names == {"0", "1", "2", "5"}
    short = Program(block, {v.name: program.data[v.name] for v in block.persistent() if v.name in program.data})
    other = forward("gpt2-tiny", **{**GPT, "layers": 4})
    for v in other.block.parameters:
        other.data[v.name] = program.data[v.name.replace("h.3.", "h.5.")]
    feed = {v.name: np.ones(v.shape, v.type.numpy) for v in block.inputs}
    executor = rc.Executor()
    assert executor.run(short, feed, ["logits"])[0].tobytes() == executor.run(other, feed, ["logits"])[0].tobytes()


def test_a_cut_that_several_values_cross_leaves_all() -> None:
    block = forward("gpt2-tiny", **GPT).block
    inside = next(v.name for o in block.operators for v in o.writes() if "attn" in v.name)
    assert shortened(block, [inside], set()) is block


def test_layers_that_differ_stay() -> None:
    """A parameter that two layers share, or another width, makes layers different."""
    block = forward("resnet18", width=4, blocks=(1, 1, 1, 1), image=16, classes=3).block
    assert shortened(block, [], set()) is block


def test_a_stage_of_a_network_without_such_layers_is_compiled_in_all_of_it() -> None:
    program = forward("resnet18", width=4, blocks=(1, 1, 1, 1), image=16, classes=3)
    assert with_own_layers(program, Pipe("pp", 2, 0), [list(places_of(program.block))[3][1]]) is program
    deep = forward("gpt2-tiny", **GPT)
    short = with_own_layers(deep, Pipe("pp", 2, 0), ["h.2.out"])
    assert short is not deep and set(short.data) < set(deep.data)
