"""Mutation testing: small changes to the source, one at a time, that the tests must notice.

    python benchmarks/mutation.py [--only GROUP] [--sample N] [--seed S] [--jobs N] [--json FILE] [--known FILE]
                                   [--tier quick]

Mutants are made systematically from the syntax tree (benchmarks/mutation_operators.py) of the files in `GROUPS`, and a
sample is drawn, the same number from each group.  Each is applied in a copy of the tree below a temporary folder, with
a cache of kernels of its own, and the tests that concern its file run (`TESTS`), until one fails.  A mutant that is
known to change nothing that a test could see is in benchmarks/mutation_equivalents.txt, with the reason.

Not part of CI: 200 mutants take about half an hour on one core.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import queue
import random
import resource
import shlex
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from mutation_operators import Mutant, mutants_of

ROOT = Path(__file__).resolve().parent.parent
#: what is mutated: group → files
GROUPS: dict[str, tuple[str, ...]] = {
    "verifier": (
        "recompute/language/verify.py",
        "recompute/language/verify_addresses.py",
        "recompute/language/verify_copies.py",
    ),
    "liveness": ("passes/memory/liveness.py",),
    "storage": ("passes/memory/storage.py",),
    "packing": ("passes/memory/packing.py", "passes/memory/memory_plan.py"),
    "autodiff": ("passes/gradient/autodiff.py", "passes/gradient/versions.py"),
    "updates": (
        "passes/cleanup/eager_updates.py",
        "recompute/ops/optimizer/updates.py",
        "recompute/ops/optimizer/base.py",
    ),
    "recompute": ("passes/recomputation/recompute.py",),
    "random": ("recompute/ops/random/philox.py", "recompute/ops/random/draws.py", "runtime/shared/kernels/random.py"),
    "losses": ("recompute/ops/loss/cross_entropy.py", "runtime/shared/kernels/loss.py"),
    "index": (
        "recompute/ops/indexing/gather.py",
        "runtime/shared/kernels/index.py",
        "runtime/cpu/kernels/index.py",
        "runtime/cpu/kernels/copy.py",
    ),
    "rows": ("runtime/cpu/loops/rows.py", "runtime/cpu/loops/row_columns.py", "runtime/cpu/kernels/reduce.py"),
    "pooling": ("runtime/shared/kernels/windows.py",),
}
CORNERS, GAPS = "tests/cpu/test_kernel_corners.py", "tests/project/test_mutation_gaps.py"
SMALL = "tests/language/test_small_programs.py"
GOLDEN, LANGUAGE = "tests/language/test_golden.py", "tests/language/test_language.py"
VERIFIER, UNTRUSTED = "tests/language/test_verifier.py", "tests/language/test_untrusted_programs.py"
LOSSES, UPDATED = "tests/training/test_losses.py", "tests/passes/test_updated_state.py"
OPERATORS, OPTIMIZERS, ROWS = "tests/ops/test_ops.py", "tests/training/test_optimizers.py", "tests/cpu/test_cpu_rows.py"
SOFT = "CrossEntropy or Likelihood"
#: which tests concern a file: arguments for pytest, the fastest first
TESTS: dict[str, tuple[str, ...]] = {
    "recompute/language/verify.py": (VERIFIER, LANGUAGE, UNTRUSTED),
    "recompute/language/verify_addresses.py": (VERIFIER, LANGUAGE, UNTRUSTED),
    "recompute/language/verify_copies.py": (VERIFIER, "-k", "copies"),
    "passes/memory/liveness.py": ("tests/passes/test_storage.py",),
    "passes/memory/storage.py": ("tests/passes/test_storage.py",),
    "passes/memory/packing.py": ("tests/passes/test_packing.py",),
    "passes/memory/memory_plan.py": ("tests/passes/test_storage.py",),
    "passes/gradient/autodiff.py": (
        SMALL,
        UPDATED,
        GOLDEN,
        "-k",
        "autodiff or updated_state",
    ),
    "passes/gradient/versions.py": (SMALL, UPDATED, "-k", "autodiff or updated_state"),
    "passes/cleanup/eager_updates.py": (SMALL, "-k", "eager"),
    "passes/recomputation/recompute.py": (
        SMALL,
        "tests/training/test_recompute_optimizer.py",
        "-k",
        "rerun or test_recompute_optimizer",
    ),
    "recompute/ops/optimizer/updates.py": ("tests/training/test_updates.py", OPTIMIZERS),
    "recompute/ops/optimizer/base.py": ("tests/training/test_updates.py", OPTIMIZERS),
    "recompute/ops/random/philox.py": ("tests/ops/test_random.py",),
    "recompute/ops/random/draws.py": (
        "tests/ops/test_random.py",
        OPERATORS,
        "-k",
        "test_random or Dropout or Random or Bernoul",
    ),
    "runtime/shared/kernels/random.py": (CORNERS, GAPS, ROWS, "-k", "random or Dropout or Uniform or Bernoulli"),
    "recompute/ops/loss/cross_entropy.py": (
        "tests/training/test_label_losses.py",
        GAPS,
        LOSSES,
        OPERATORS,
        "-k",
        f"losses or {SOFT}",
    ),
    "runtime/shared/kernels/loss.py": (CORNERS, GAPS, ROWS, "-k", f"losses or range or {SOFT}"),
    "recompute/ops/indexing/gather.py": (GAPS, "tests/ops/test_ops_index.py", OPERATORS, "-k", "Gather or index"),
    "runtime/shared/kernels/index.py": (CORNERS, GAPS, ROWS, "-k", "Gather or range or index"),
    "runtime/cpu/kernels/index.py": (CORNERS, GAPS, ROWS, "-k", "Gather or range or index"),
    "runtime/cpu/kernels/copy.py": (
        CORNERS,
        ROWS,
        "-k",
        "Concat or Split or Slice or Pad or Expand or Tile or Reshape or Fill",
    ),
    "runtime/cpu/loops/rows.py": (CORNERS, ROWS, "-k", f"Softmax and not ({SOFT}) or Norm or not_a_number"),
    "runtime/cpu/loops/row_columns.py": (CORNERS, ROWS, "-k", "NormGrad"),
    "runtime/cpu/kernels/reduce.py": (CORNERS, ROWS, "-k", "Reduce or not_a_number"),
    "runtime/shared/kernels/windows.py": (
        CORNERS,
        "tests/cpu/test_cpu_pooling.py",
        "tests/cuda/test_cuda_pooling.py",
        "-k",
        "(cpu_pooling or cuda_pooling or Pool) and not transposes",
    ),
}
#: seconds of the processor for one run of tests: several times what it takes without a mutant, and so much more
TIMES, MORE = 4, 20
MEMORY = 6 << 30
#: which of a file's tests run, as pytest's marks
MARKS = {"quick": "not slow and not hours", "all": "not hours"}


@dataclass
class Result:
    """What became of a mutant: killed, killed (time), survived or equivalent; the test that failed, or the reason."""

    mutant: Mutant
    status: str
    why: str
    seconds: float = 0.0


class Tree:
    """A copy of the package and its tests in which one file at a time is changed.

    Made in a process of its own, which imports the libraries once and forks for each run of tests.
    """

    def __init__(self, root: Path, tier: str) -> None:
        self.root, self.marks = root, MARKS[tier]
        skip = shutil.ignore_patterns("__pycache__", "onnx_backend")
        for name in ("recompute", "tests"):
            shutil.copytree(ROOT / name, root / name, ignore=skip)
        shutil.copy(ROOT / "pyproject.toml", root)
        os.environ.update({f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL", "NUMBA")})
        os.environ.update(PYTHONPATH=str(root), XDG_CACHE_HOME=str(root / "cache"), PYTEST_ADDOPTS="")
        os.chdir(root)
        sys.path.insert(0, str(root))
        for name in ("pytest", "numpy", "onnx", "ml_dtypes", "safetensors.numpy", "rich", "llvmlite", "numba"):
            importlib.import_module(name)
        hypothesis = importlib.import_module("hypothesis")
        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        hypothesis.settings.register_profile("mutation", derandomize=True, database=None, deadline=None, phases=phases)
        hypothesis.settings.load_profile("mutation")

    def path(self, file: str) -> Path:
        """Where a file of the repository is in the copy."""
        return self.root / (file if file.startswith("recompute/") else f"recompute/{file}")

    def test(self, file: str, cpu: float, *, keep: bool = False) -> tuple[int, str, float]:
        """(exit status, why, processor seconds) of the file's tests; `keep` the compiled Python files."""
        said = self.root / "said.txt"
        pid = os.fork()
        if not pid:
            os.setsid()
            _limit(cpu)
            _run_tests(("-m", self.marks, *TESTS[file]), said, keep)
        until = time.monotonic() + 10 * cpu
        while not (done := os.wait4(pid, os.WNOHANG))[0]:
            if time.monotonic() > until:
                os.killpg(pid, signal.SIGKILL)
            time.sleep(0.02)
        taken = done[2].ru_utime + done[2].ru_stime
        return os.waitstatus_to_exitcode(done[1]), _reason(said.read_text(errors="replace")), taken

    def run(self, mutant: Mutant, cpu: float) -> Result:
        """Applies a mutant, runs its tests, and takes it back."""
        path = self.path(mutant.file)
        source, stamp = path.read_bytes(), path.stat().st_mtime
        path.write_bytes(mutant.applied(source))
        os.utime(path, (stamp + 100, stamp + 100))  # so that Python does not take what it compiled before
        try:
            status, why, taken = self.test(mutant.file, cpu)
        finally:
            path.write_bytes(source)
            os.utime(path, (stamp, stamp))
        return Result(mutant, _verdict(status), why, round(taken, 1))

    def baseline(self, files: list[str]) -> dict[str, float]:
        """Seconds that each file's tests may take.  They must pass without a mutant."""
        limits = {}
        for file in files:
            for _ in range(2):  # the second time, kernels are in the cache
                status, why, taken = self.test(file, 600, keep=True)
                if status:
                    raise SystemExit(f"the tests of {file} fail without any mutant: {why}")
            limits[file] = TIMES * taken + MORE
            print(f"     unchanged      {taken:5.1f}s {file}", file=sys.stderr, flush=True)
        return limits


def _limit(cpu: float) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (int(cpu) + 1, int(cpu) + 5))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _run_tests(selection: tuple[str, ...], said: Path, keep: bool) -> NoReturn:
    """Ends the process with pytest's status."""
    out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    if not keep:
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    status = 1
    try:
        import pytest

        options = ["-x", "-q", "-p", "no:cacheprovider", "--no-header", "-W", "ignore", "--tb=line"]
        status = int(pytest.main([*options, *selection]))
        sys.stdout.flush()
    finally:
        os._exit(status)


def _verdict(status: int) -> str:
    if status > 3:  # no tests, or wrong arguments; 2: a module could not be imported
        raise SystemExit(f"pytest ended with {status}")
    if status in (-signal.SIGXCPU, -signal.SIGKILL):
        return "killed (time)"
    if status < 0:
        return "killed (crash)"
    return "survived" if status == 0 else "killed"


def _reason(said: str) -> str:
    lines = said.splitlines()
    found = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return (found or lines or [""])[0 if found else -1][:160]


def sample(groups: list[str], count: int, seed: int) -> list[Mutant]:
    """As many mutants from each group; fewer where it has fewer."""
    chosen: list[Mutant] = []
    for group in groups:
        every = [m for file in GROUPS[group] for m in mutants_of(file, (ROOT / file).read_bytes(), group)]
        share = -(-count // len(GROUPS))
        chosen += random.Random(f"{seed} {group}").sample(every, min(share, len(every)))
    return chosen


def equivalents() -> dict[tuple[str, ...], str]:
    """(file, function, line before, line after) → why nothing could notice it."""
    blocks = (ROOT / "benchmarks" / "mutation_equivalents.txt").read_text().strip().split("\n\n")[1:]
    found = {}
    for block in blocks:
        place, before, after, why = (line.strip() for line in block.splitlines())
        file, _, function = place.partition(" ")
        found[file, function, before, after] = why
    return found


def run_all(chosen: list[Mutant], jobs: int, earlier: list[Path], tier: str) -> list[Result]:
    """Every mutant's result, in order; those known to be equivalent, or killed before, are not run."""
    known = equivalents()
    rows = [r for path in earlier for r in json.loads(path.read_text())["mutants"] if r["status"].startswith("killed")]
    killed = {(r["file"], r["function"], r["before"], r["after"]): r for r in rows}
    results = {m: Result(m, r["status"], r["why"], r["seconds"]) for m in chosen if (r := killed.get(m.key))}
    results.update((m, Result(m, "equivalent", why)) for m in chosen if (why := known.get(m.key)))
    left = [m for m in chosen if m not in results]
    found: multiprocessing.Queue[Result] = multiprocessing.Queue()
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        parts = [left[i::jobs] for i in range(jobs)]
        workers = [
            multiprocessing.Process(target=_work, args=(Path(folder) / str(i), tier, part, found))
            for i, part in enumerate(parts)
        ]
        for w in workers:
            w.start()
        while len(results) < len(chosen):
            try:
                r = found.get(timeout=1)
            except queue.Empty:
                if any(w.exitcode for w in workers):
                    raise SystemExit("a worker has stopped") from None
                continue
            results[r.mutant] = r
            print(
                f"{len(results):4} {r.status:14} {r.seconds:5.1f}s {r.mutant}  [{r.why[:90]}]",
                file=sys.stderr,
                flush=True,
            )
        for w in workers:
            w.join()
    return [results[m] for m in chosen]


def _work(folder: Path, tier: str, part: list[Mutant], found: multiprocessing.Queue[Result]) -> None:
    tree = Tree(folder, tier)
    limits = tree.baseline(sorted({m.file for m in part}))
    for m in part:
        found.put(tree.run(m, limits[m.file]))


def report(results: list[Result], seed: int) -> tuple[str, dict[str, Any]]:
    """The table, and the same as data."""
    lines = [f"{'group':12}{'mutants':>9}{'equivalent':>12}{'killed':>9}{'survived':>10}{'score':>8}"]
    names = [*dict.fromkeys(r.mutant.group for r in results), "all"]
    figures: dict[str, dict[str, float]] = {}
    for name in names:
        of = [r.status for r in results if name in (r.mutant.group, "all")]
        same, survived = of.count("equivalent"), of.count("survived")
        killed = len(of) - same - survived
        score = round(killed / max(1, len(of) - same), 4)
        figures[name] = {"mutants": len(of), "equivalent": same, "killed": killed, "survived": survived, "score": score}
        lines.append(f"{name:12}{len(of):9}{same:12}{killed:9}{survived:10}{100 * score:7.1f}%")
    lines.append(f"\nseed {seed}; score: killed / (mutants - equivalent)")
    for title, status in (("Survived", "survived"), ("Equivalent", "equivalent")):
        found = [r for r in results if r.status == status]
        lines.append(f"\n{title}:" if found else f"\n{title}: none")
        lines += [f"  {r.mutant}" + (f"\n      {r.why}" if status == "equivalent" else "") for r in found]
    rows = [{**asdict(r.mutant), "status": r.status, "why": r.why, "seconds": r.seconds} for r in results]
    for row in rows:
        for key in ("start", "end", "text"):
            del row[key]
    return "\n".join(lines), {"seed": seed, "figures": figures, "mutants": rows}


def main() -> None:
    """Draws, runs, and reports."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=GROUPS, help="a group (may be given several times)")
    parser.add_argument("--sample", type=int, default=216, help="mutants in all, were all groups run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the results there")
    parser.add_argument("--tier", choices=MARKS, default="all", help="the quick tests only, or the slow ones besides")
    parser.add_argument("--list", action="store_true", help="only show the mutants that would run")
    parser.add_argument(
        "--known", type=Path, action="append", default=[],
        help="results of an earlier run (--json) of the same source: what was killed there is not run again",
    )  # fmt: skip
    args = parser.parse_args()
    chosen = sample(args.only or list(GROUPS), args.sample, args.seed)
    if args.list:
        for m in chosen:
            print(f"{m.group:10} {m}")
        return
    words = ["--sample", str(args.sample), "--seed", str(args.seed), "--tier", args.tier]
    command = shlex.join(["python", "benchmarks/mutation.py", *words])
    text, data = report(run_all(chosen, args.jobs, args.known, args.tier), args.seed)
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, python {sys.version.split()[0]}; {command}")
    print(text)
    if args.json:
        args.json.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
