"""What the machine code of five networks' kernels needs, a row a kernel, in benchmarks/results/gpu_kernels.txt.

kernel_table.py [--compare] [--table FILE] [ROW...]      beginnings of the networks' titles (all)

Without a device, as estimate.py, whose counts of instructions these are.  A kernel whose text is in the table is not
compiled again.  `--compare` writes nothing, and ends with 1 where a kernel of another text is worse than the table's of
its name, or where the table misses many.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import estimate
from estimate import Kernels
from machine_code import Entry

from recompute.runtime.cuda.device import nvrtc
from recompute.runtime.cuda.device.kernel import Launch

TABLE = Path(__file__).parents[1] / "results" / "gpu_kernels.txt"
NETWORKS = ("gpt2-small b8 s1024 bf16", "resnet50 b64 bf16", "bert-base b32 s128 bf16", "vit-base b64 bf16",
            "lstm b128 s100 fp32")  # fmt: skip
#: by how much instructions a byte and bytes a launch may grow; warps may not get fewer, nor the stack larger
MARGIN = 1.1
#: kernels that the table may miss
MOST_MISSING = 60
#: of a multiprocessor: warps, blocks, registers, bytes of shared memory, and those that a block takes at least (machine
#: code counts them, too, where there are others)
_WARPS, _BLOCKS, _REGISTERS, _SHARED, _RESERVED = 64, 32, 65536, 228 << 10, 1 << 10
_HEAD = """launches: of the kernel, a step; MB: bytes of a launch's buffers, on average; ins/B: threads' instructions a
byte of them; warps: at a time on a multiprocessor, of 64; shared: bytes of a block; stack: bytes of a thread (spills).
"""
_COLUMNS = "launches         MB     ins/B registers warps shared stack  digest        kernel"


@dataclass(frozen=True)
class Row:
    """A kernel of a network; see _HEAD."""

    launches: int
    megabytes: float
    instructions: float
    registers: int
    warps: int
    shared: int
    stack: int
    digest: str
    name: str

    def __str__(self) -> str:
        figures = f"{self.launches:>8} {self.megabytes:>10.4f} {self.instructions:>9.3f} {self.registers:>9}"
        return f"{figures} {self.warps:>5} {self.shared:>6} {self.stack:>5}  {self.digest}  {self.name}"

    def worse(self, before: Row) -> list[str]:
        """What is worse than before, in words."""
        grown = [f"{what} {old} -> {new}" for what, old, new in (
            ("instructions a byte", before.instructions, self.instructions),
            ("MB a launch", before.megabytes, self.megabytes),
        ) if new > old * MARGIN + 0.001]  # fmt: skip
        if self.warps < before.warps:
            grown.append(f"warps {before.warps} -> {self.warps} ({before.registers} -> {self.registers} registers)")
        return grown + [f"stack {before.stack} -> {self.stack}"] * (self.stack > before.stack)


def warps(needs: Entry, threads: int) -> int:
    """That a multiprocessor of an H100 has at a time, in blocks of `threads`."""
    block = -(-threads // 32)
    registers = -(-needs.registers // 8) * 8 * 32 * block
    blocks = min(_BLOCKS, _WARPS // block, _REGISTERS // registers, _SHARED // max(needs.shared, _RESERVED))
    return blocks * block


def row(uses: Sequence[tuple[Launch, float]], code: Kernels | None, known: dict[str, Row]) -> Row:
    """Of one kernel's launches, each with the flops that it is to do.  None: the machine code's part is known."""
    moved = sum(estimate.bytes_of(c) for c, _ in uses)
    if code is None:
        old = known[uses[0][0].kernel.digest[:12]]
        return dataclasses.replace(old, launches=len(uses), megabytes=round(moved / len(uses) / 1e6, 4))
    count = 32 * sum(estimate.instructions(c, code, flops) for c, flops in uses)
    largest = max((c for c, _ in uses), key=estimate.bytes_of)
    threads = largest.block[0] * largest.block[1] * largest.block[2]
    kernel, needs = largest.kernel, code.needs
    return Row(len(uses), round(moved / len(uses) / 1e6, 4), round(count / max(moved, 1), 3), needs.registers,
               warps(needs, threads), needs.shared, needs.stack, kernel.digest[:12], kernel.name)  # fmt: skip


def read(path: Path) -> dict[str, list[Row]]:
    """A table's rows by network."""
    kinds = [f.type for f in dataclasses.fields(Row)]
    found: dict[str, list[Row]] = {}
    title = ""
    for line in path.read_text().splitlines() if path.exists() else ():
        words = line.split()
        if line in NETWORKS:
            title = line
        elif title and len(words) == len(kinds) and words[0].isdigit():
            values = [{"int": int, "float": float, "str": str}[str(k)](w) for k, w in zip(kinds, words, strict=True)]
            found.setdefault(title, []).append(Row(*values))
    return found


def rows(session: Any, kernels: dict[str, Any], known: Sequence[Row]) -> list[Row]:
    """Those of a step, the kernels with the most bytes first.  `known`: rows whose machine code is not looked at again,
    but beside new kernels of one operator: they share its multiplications."""
    old = {r.digest: r for r in known}
    launches = [(step, [c for c in step.calls if isinstance(c, Launch)]) for step in session.steps]
    wanted = {c.kernel.digest for _, cs in launches if any(c.kernel.digest[:12] not in old for c in cs) for c in cs}
    code = estimate.listed({d: kernels[d] for d in wanted})
    uses: dict[str, list[tuple[Launch, float]]] = {}
    for step, cs in launches:
        flops = estimate.flops_of(step, code) if all(c.kernel.digest in code for c in cs) else {}
        for c in cs:
            uses.setdefault(c.kernel.digest, []).append((c, flops.get(id(c), 0.0)))
    found = [row(u, None if d[:12] in old else code[d], old) for d, u in uses.items()]
    return sorted(found, key=lambda r: (-r.launches * r.megabytes, r.name, r.digest))


def compare(now: Sequence[Row], before: Sequence[Row]) -> list[str]:
    """What got worse.  Of several kernels of a name, one must have been no better."""
    many, few = (sum(r.launches for r in rs) for rs in (now, before))
    wrong = [f"launches {few} -> {many}"] if before and many > few * MARGIN else []
    for r in now:
        faults = [r.worse(b) for b in before if b.name == r.name]
        if faults and all(faults):
            wrong.append(f"{r.name}: {', '.join(min(faults, key=len))}")
    return wrong


def main() -> int:
    """Writes the table, or compares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*")
    parser.add_argument("--compare", action="store_true", help="write nothing; exit code 1 where something is worse")
    parser.add_argument("--table", type=Path, default=TABLE)
    given = parser.parse_args()
    before, wrong, missing = read(given.table), [], 0
    after = dict(before)
    titles = [t for t in NETWORKS if not given.rows or any(t.startswith(r) for r in given.rows)]
    for title, _, session, kernels in estimate.sessions(titles):
        if title not in NETWORKS:
            continue
        known = before.get(title, [])
        new = len({d[:12] for d in kernels} - {r.digest for r in known})
        missing += new
        if given.compare and missing > MOST_MISSING:
            break
        after[title] = rows(session, kernels, known)
        wrong += [f"{title}: {w}" for w in compare(after[title], known)]
        print(f"{title}: {len(after[title])} kernels, {new} not in the table", flush=True)
    print(*wrong, sep="\n")
    if not given.compare:
        version = ".".join(map(str, nvrtc.library().getVersion()))
        parts = [f"{t}\n{_COLUMNS}\n" + "".join(f"{r}\n" for r in after[t]) for t in NETWORKS if t in after]
        given.table.write_text("\n".join([f"NVRTC {version} for {estimate.TARGET}, no device.\n", _HEAD, *parts]))
        return 0
    if missing > MOST_MISSING:
        print(f"{given.table.name} misses {missing} kernels: run benchmarks/gpu/kernel_table.py")
    return int(bool(wrong) or missing > MOST_MISSING)


if __name__ == "__main__":
    sys.exit(main())
