"""docs/data.md: its code runs, and its errors are those that are raised."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import recompute as rc
from recompute.errors import UsageError
from recompute.language.types import Value

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
IMAGE = Value("image", rc.TensorType("f32", (4, 2)))
LABEL = Value("label", rc.TensorType("i64", (4,)))


def test_the_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for library in ("PIL", "tokenizers"):
        pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    for block in blocks:
        exec(compile(block, "docs/data.md", "exec"), names)
    assert len(blocks) == 8 and f"# {capsys.readouterr().out.strip()}" in PAGE


def test_the_errors_are_as_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = " ".join(PAGE.split())
    x = np.zeros((20, 2))
    x[17, 1] = np.nan
    np.savez("digits.npz", image=x, label=np.zeros(20))
    data = rc.data.dataset("digits.npz")
    for call in (
        lambda: rc.data.fitted(data, [IMAGE, LABEL]),
        lambda: rc.data.check_values(rc.data.fitted(data, [IMAGE])),  # type: ignore[arg-type]
    ):
        with pytest.raises(UsageError) as found:
            call()
        assert str(found.value) in shown


def test_every_option_of_images_is_described() -> None:
    import inspect

    options = list(inspect.signature(rc.data.ImageFolder.__init__).parameters)[2:]
    table = PAGE[PAGE.index("## Images") : PAGE.index("## Text")]
    assert all(re.search(rf"^\| [^|]*`{name}`", table, re.MULTILINE) for name in options)
