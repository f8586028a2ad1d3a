"""What notebooks show of programs, compiled steps and estimates."""

from __future__ import annotations

import dataclasses
import re
from xml.etree import ElementTree

import pytest

import recompute as rc
from recompute.compiling.compiler import CompiledStep
from recompute.report.notebook import html_of
from recompute.support.tables import plain_table, render


@pytest.fixture(scope="module")
def program() -> rc.Program:
    return rc.load(rc.models.build("lenet"), batch=8)


@pytest.fixture(scope="module")
def step(program: rc.Program) -> CompiledStep:
    loss = rc.losses.cross_entropy(program.outputs[0])
    return rc.compile_step(program, loss, rc.Adam(), checkpoints=["pool1"])


def drawn(shown: str) -> ElementTree.Element:
    found = re.search(r"<svg.*</svg>", shown, re.DOTALL)
    assert found, shown
    return ElementTree.fromstring(found[0])


def test_a_program_shows_what_it_takes(program: rc.Program) -> None:
    shown = program._repr_html_()
    assert f"{program.block.inputs[0].name}: " in shown and "<svg" not in shown
    assert f"{sum(v.size for v in program.block.parameters):,} numbers" in shown


def test_a_compiled_step_shows_memory_over_time(step: CompiledStep) -> None:
    shown = step._repr_html_()
    assert f"peak {step.figures.peak_bytes:,} bytes>" in repr(step) and f"{step.figures.peak_bytes:,} bytes" in shown
    bands = drawn(shown).findall("polygon")
    assert {b.findtext("title", "").partition(":")[0] for b in bands} >= {"parameters", "optimizer state", "gradients"}
    heights = [float(y) for b in bands for y in re.findall(r",([\d.]+)", b.attrib["points"])]
    assert min(heights) == 0  # the peak touches the upper edge
    marks = drawn(shown).findall("rect")
    assert len(marks) == step.figures.recomputed_operators > 0


def test_names_are_text(program: rc.Program) -> None:
    other = program.clone()
    other.block = dataclasses.replace(other.block, name="<script>")
    assert "<script>" not in html_of(other)


def test_tables_are_text_in_notebooks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    table = plain_table("batch", "peak")
    table.add_row("8", "64")
    assert "\x1b" not in render(table) and render(table).split() == ["batch", "peak", "─" * 14, "8", "64"]


def test_estimates_show_bytes_by_role() -> None:
    shown = rc.estimate("mlp", batch=8)._repr_html_()
    assert shown.startswith("<b>mlp, batch 8</b>") and "optimizer state" in shown
