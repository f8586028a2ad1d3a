"""No kernel of the five networks of benchmarks/results/gpu_kernels.txt got worse, by its machine code.

Only kernels whose text is not in the table are compiled; `python benchmarks/gpu/kernel_table.py` writes the table.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_cuda_nvrtc import version, wheels

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu" / "kernel_table.py"
TABLE = SCRIPT.parents[1] / "results" / "gpu_kernels.txt"
NETWORKS = ("gpt2-small", "resnet50", "bert-base", "vit-base", "lstm")


def compared(network: str, table: Path = TABLE) -> subprocess.CompletedProcess[str]:
    """The script's answer.  The test is skipped without NVRTC or NVIDIA's tools."""
    version()
    if not all(any((Path(p) / tool).exists() for p in wheels()) for tool in ("cuobjdump", "nvdisasm")):
        pytest.skip("nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm come with the extra 'dev', on Linux")
    if not SCRIPT.exists():
        pytest.skip("a source distribution has no benchmarks")
    command = [sys.executable, str(SCRIPT), "--compare", "--table", str(table), network]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.parametrize("network", NETWORKS)
def test_no_kernel_got_worse(network: str) -> None:
    done = compared(network)
    assert done.returncode == 0, done.stdout + done.stderr


def changed(line: str, column: int, factor: float) -> str:
    """A row of the table of another text, with a figure times a factor."""
    words = line.split()
    words[column] = f"{float(words[column]) * factor:.4f}" if "." in words[column] else str(int(words[column]) * 2)
    words[7] = "0" * 12
    return " ".join(words)


@pytest.mark.parametrize(
    ("column", "said"), [(2, "instructions a byte"), (1, "MB a launch"), (4, "warps"), (-1, "")],
    ids=["instructions", "bytes", "warps", "as-before"],
)  # fmt: skip
def test_a_kernel_that_got_worse_is_found(column: int, said: str, tmp_path: Path) -> None:
    """Beside a table that says that it was better, or as it is."""
    kernel = "column_sums_f32"
    text = TABLE.read_text()
    line = next(x for x in text.splitlines() if x.endswith(kernel))
    row = changed(line, column, 0.5) if column > 0 else changed(line, 2, 1.0)
    table = tmp_path / "table.txt"
    table.write_text(text.replace(line, row))
    done = compared("lstm", table)
    assert "1 not in the table" in done.stdout, done.stdout + done.stderr
    assert done.returncode == bool(said) and bool(re.search(f"{kernel}: .*{said}", done.stdout)) == bool(said)


def test_a_table_that_misses_many_kernels_is_refused(tmp_path: Path) -> None:
    (tmp_path / "table.txt").write_text("")
    done = compared("resnet50", tmp_path / "table.txt")
    assert done.returncode == 1 and "run benchmarks/gpu/kernel_table.py" in done.stdout, done.stdout + done.stderr
