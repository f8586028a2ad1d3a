"""How long finding a mesh takes, what is found, and what planning GPT-3 175B takes.

    python benchmarks/mesh_search.py [8b 70b 405b 175b]        writes benchmarks/results/mesh_search.txt

LLaMA-3 8B, 70B and 405B on 8, 64 and 1,024 H100s, at sequences of 8,192 tokens, by the command line's `--mesh auto`;
then all stages of a pipeline of GPT-3 175B (tp 8, pp 8, three chunks, as Megatron's), with as many micro-batches as it
takes until the schedule repeats itself.  Times are of this machine with nothing else running; memory is the most that
one process, and that its largest child, had resident.
"""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path

from zoo_steps import headline, machine

from recompute.analysis.cluster.candidates import Candidate
from recompute.analysis.cluster.search import Search
from recompute.analysis.compiled_stages import compiled_stages
from recompute.cost import device
from recompute.passes import Target

RESULT = Path(__file__).resolve().parent / "results" / "mesh_search.txt"
LINK = "node=8,nvlink=450GB/s,net=50GB/s"
#: network, ranks, batch in sequences
SEARCHES = {"8b": ("llama3-8b", 8, 128), "70b": ("llama3-70b", 64, 256), "405b": ("llama-405b", 1024, 1024)}
GIB = 2**30


def found(name: str) -> str:
    """A search by the command line, with its time and memory."""
    network, ranks, batch = SEARCHES[name]
    given = [network, "--mesh", "auto", "--ranks", str(ranks), "--batch", str(batch), "--precision", "bf16"]
    given += ["--device", "h100-80", "--link", LINK]
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "recompute.cli", *given], capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - begin
    return f"$ recompute-compile {' '.join(given)}\n{done.stdout}{done.stderr if done.returncode else ''}" + spent(
        seconds
    )


def planned() -> str:
    """All stages of GPT-3 175B."""
    begin = time.perf_counter()
    target = Target(cost=device("a100-80"), precision="bf16")
    search = Search("gpt3-175b", 64, 64, "node=8,nvlink=300GB/s,net=25GB/s", None, None, target, None, {})
    c = Candidate(1, 8, 8, 1, 0, "interleaved", 3, True, "none")
    stages = compiled_stages(search.steps, search.parallel(c, search.repeating(c)), range(c.pp), None)
    lines = [
        f"gpt3-175b, pp=8,tp=8, 3 chunks, {search.repeating(c)} micro-batches of 1: operators and peak of each stage",
        *(
            f"  {place}  {len(s.block.operators):>9,}  {s.figures.peak_bytes:>16,}"
            for place, s in sorted(stages.items())
        ),
    ]
    return "\n".join(lines) + "\n" + spent(time.perf_counter() - begin)


def spent(seconds: float) -> str:
    """Time, and memory of this process and its children."""
    own, children = (
        resource.getrusage(who).ru_maxrss * 1024 / GIB for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return f"-- {seconds:.0f} s; resident at most {own:.2f} GiB here, {children:.2f} GiB in the largest child\n"


def main() -> None:
    """Runs what is asked for, all by default."""
    asked = sys.argv[1:] or [*SEARCHES, "175b"]
    lines = [headline(machine()), f"{os.cpu_count()} processors, {platform.machine()}", ""]
    for name in asked:
        lines.append(planned() if name == "175b" else found(name))
        print(lines[-1], flush=True)
    RESULT.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
