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


#: kernel → which of its figures were better, and how the script names it; -1: all are as before
CHANGED = {"column_sums_f32": (2, "instructions a byte"), "bias_sums_f32": (1, "MB a launch"),
           "columns_copy": (4, "warps"), "cross_entropy_float_longlong_double_by32": (-1, "")}  # fmt: skip


def test_kernels_that_got_worse_are_found(tmp_path: Path) -> None:
    """Beside a table of other texts, which were better, or as they are."""
    table = TABLE.read_text()
    for kernel, (column, _) in CHANGED.items():
        line = next(x for x in table[table.index("lstm b128") :].splitlines() if x.endswith(f"  {kernel}"))
        words = line.split()
        if column > 0:
            words[column] = f"{float(words[column]) / 2:.4f}" if "." in words[column] else str(2 * int(words[column]))
        words[7] = "0" * 12
        table = table.replace(line, " ".join(words))
    (tmp_path / "table.txt").write_text(table)
    done = compared("lstm", tmp_path / "table.txt")
    assert done.returncode == 1 and "4 not in the table" in done.stdout, done.stdout + done.stderr
    for kernel, (_, said) in CHANGED.items():
        assert bool(re.search(f"{kernel}: .*{said}", done.stdout)) == bool(said), done.stdout


def test_a_table_that_misses_many_kernels_is_refused(tmp_path: Path) -> None:
    (tmp_path / "table.txt").write_text("")
    done = compared("resnet50", tmp_path / "table.txt")
    assert done.returncode == 1 and "run benchmarks/gpu/kernel_table.py" in done.stdout, done.stdout + done.stderr
