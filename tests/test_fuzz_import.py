"""Damaged and nonsensical models: `load` gives a program that passes the verifier, or says what is wrong.

Here 2,000 files; `benchmarks/fuzz_import.py` runs any number, in parallel, with memory and time bounded.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from mutations import corpus, damaged

from recompute import RecomputeError, load, verify

#: files in one test
PART = 250


@pytest.mark.parametrize("part", range(8))
def test_damaged_models_are_refused_or_make_sound_programs(part: int, tmp_path: Path) -> None:
    path = tmp_path / "damaged.onnx"
    loaded = 0
    for seed in range(PART * part, PART * (part + 1)):
        name, raw = damaged(seed, corpus())
        path.write_bytes(raw)
        began = time.perf_counter()
        try:
            program = load(path, batch=2, max_bytes=1 << 28, unroll=seed % 3 == 0)
        except RecomputeError as e:
            assert str(e)
        except Exception as e:
            raise AssertionError(f"seed {seed}, {name}: {type(e).__name__}: {e}") from e
        else:
            verify(program.block)
            loaded += 1
        assert time.perf_counter() - began < 20, f"seed {seed}, {name}"
    assert 0 < loaded < PART
