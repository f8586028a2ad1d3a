"""Proofs of plans of every kind: which of a step's values are proved equal to the plain step's, and in what time.

    python benchmarks/proof_plans.py [--only NETWORK ...] [--plans PLAN ...]
    python benchmarks/proof_plans.py --exports --plans plain budget
    python benchmarks/proof_plans.py --times [--only NETWORK ...] [--plans PLAN ...]

A row is a network, a column a plan.  `33`: all 33 values (outputs, parameters, buffers, state) are proved; `30/33`:
three are not, and a line below says where the first of them parts.  `-`: the network has no such plan.  `--exports`:
of the architectures that PyTorch exported (tests/data/pytorch_zoo).  `--times`: the time of proofs, of plain steps
unless there are `--plans`, as a part of their compilations', processor seconds, the first in a process and later ones:
medians of five processes.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import itertools
import json
import statistics
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx

import recompute as rc
from recompute.compiling import compiler
from recompute.language.ir import Block

#: networks, with options that make them small
NETWORKS: dict[str, dict[str, Any]] = {
    "mlp": {"features": 64},
    "lenet": {},
    "resnet18": {"image": 32, "width": 16},
    "mobilenet_v2": {"image": 32},
    "unet": {},
    "densenet121": {"image": 32},
    "vit-tiny": {},
    "bert-mini": {},
    "gpt2-tiny": {},
    "llama-tiny": {},
    "moe-tiny": {},
    "lstm": {},
}
BATCH = 4
#: architectures of PyTorch, NAME.tar.xz, each with train.onnx
EXPORTS = Path(__file__).parents[1] / "tests" / "data" / "pytorch_zoo" / "zoo.zip"


def exports() -> list[str]:
    """The architectures that PyTorch can export in training mode."""
    with zipfile.ZipFile(EXPORTS) as archive:
        names = [n.removesuffix(".tar.xz") for n in archive.namelist()]
    return [n for n in names if "train.onnx" in _files(n)]


def _files(name: str) -> dict[str, bytes]:
    with zipfile.ZipFile(EXPORTS) as archive, tarfile.open(fileobj=archive.open(f"{name}.tar.xz")) as tar:
        return {m.name: tar.extractfile(m).read() for m in tar.getmembers()}  # type: ignore[union-attr]


def _exported(name: str) -> rc.Program:
    """An architecture of PyTorch, with weights that are drawn."""
    spec = importlib.util.spec_from_file_location("drawn", EXPORTS.with_name("drawn.py"))
    assert spec is not None and spec.loader is not None
    drawn = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawn)
    files = _files(name)
    model = onnx.ModelProto.FromString(files["train.onnx"])
    drawn.fill(model)
    batch = next(i["shape"][0] for i in json.loads(files["values.json"])["inputs"] if i["shape"])
    return rc.load(model, batch=batch, mode="file")


def trained(name: str, **options: Any) -> tuple[rc.Program, str]:
    """A network of the zoo or of PyTorch, and its loss."""
    if "/" in name:
        program = _exported(name)
        return program, "loss" if "loss" in program else program.outputs[0].name
    program = rc.load(rc.models.build(name, **(options or NETWORKS.get(name, {}))), batch=BATCH)
    outputs = program.block.outputs
    loss = program["loss"] if "loss" in outputs else rc.losses.cross_entropy(program[outputs[0]])
    return program, loss.name


def middle(program: rc.Program) -> list[str]:
    """Every fifth value of the batch."""
    values = [v for o in program.block.operators for v in o.writes()]
    return [v.name for v in values if v.type.is_float and v.ndim > 1][:-1:5]


@dataclass(frozen=True)
class Plan:
    """A kind of plan: the optimizer of the plain step, what the planned one's is made of it, and options of both.

    `mesh`, and options of `DataParallel`: the programs of all its ranks together are compared with one process's step.
    """

    planned: Callable[[Any, rc.Program], Any] = lambda optimizer, program: optimizer
    plain: Callable[[], Any] = rc.Adam
    options: dict[str, Any] = field(default_factory=dict)
    prepared: Callable[[rc.Program], object] = lambda program: None
    mesh: str = ""

    def proof(self, name: str) -> tuple[list[Block], Callable[[Block], rc.Proof]]:
        """The compiled step of a network, or those of all ranks, and what proves another in place of the first."""
        if not self.mesh:
            before, after = self.blocks(name)
            return [after], lambda block: rc.prove(before, block, partly=True)
        whole, _ = self.program(name)
        ranks = [self.program(name, rank)[0] for rank in range(rc.Mesh(self.mesh).ranks)]
        if not any(o.op.communicates for o in ranks[0].block.operators):
            raise rc.UsageError(f"{self.mesh} divides nothing of {name}")

        def proved(block: Block) -> rc.Proof:
            ranks[0].block = block
            return rc.prove_ranks(whole, ranks, self.mesh, partly=True)

        return [r.block for r in ranks], proved

    def program(self, name: str, rank: int | None = None) -> tuple[rc.Program, str]:
        """The plain step of a network, or the compiled one of a rank."""
        program, loss = trained(name)
        program.block = dataclasses.replace(program.block, outputs=(loss,))
        if rank is None:
            self.plain().minimize(program[loss])
            return program, loss
        optimizer = rc.DataParallel(self.plain(), self.mesh, rank, batch=BATCH, **self.options)
        return rc.compile_step(program, loss, optimizer).program, loss

    def blocks(self, name: str, **sizes: Any) -> tuple[Block, Block]:
        """The plain step of a network, and the one that is compiled by the plan."""
        program, loss = trained(name, **sizes)
        program.block = dataclasses.replace(program.block, outputs=(loss,))
        self.prepared(program)
        optimizer = self.planned(self.plain(), program)
        after = rc.compile_step(program, loss, optimizer, **self.options).program.block
        self.plain().minimize(program[loss])
        return program.block, after


def _recomputed(optimizer: Any, program: rc.Program) -> Any:
    return rc.RecomputeOptimizer(optimizer).set_checkpoints(middle(program))


def _offloaded(optimizer: Any, program: rc.Program) -> Any:
    return _recomputed(optimizer, program).set_offload()


def _in_slices(*slices: str) -> Callable[[Any, rc.Program], Any]:
    return lambda optimizer, program: rc.RecomputeOptimizer(optimizer).set_slices(slices)


PLANS = {
    "plain": Plan(),
    "checkpoints": Plan(_recomputed),
    "budget": Plan(options={"budget": "97%"}),
    "slices": Plan(_in_slices("all:0:2")),
    "offload": Plan(_offloaded),
    "sgd": Plan(plain=lambda: rc.Momentum(0.1)),
    "bf16": Plan(plain=lambda: rc.MixedPrecision(rc.Adam(), "bf16")),
    "fp16": Plan(plain=lambda: rc.MixedPrecision(rc.Adam(), "fp16")),
    "qat": Plan(prepared=rc.prepare_qat),
    "store:8": Plan(options={"approximations": "store:8"}),
    "dp": Plan(mesh="dp=2", options={"sync_batch_norm": True}),
    "zero1": Plan(mesh="dp=2", options={"sync_batch_norm": True, "zero": 1}),
    "zero3": Plan(mesh="dp=2", options={"sync_batch_norm": True, "zero": 3}),
    "tp": Plan(mesh="tp=2"),
    "pp": Plan(mesh="pp=2", options={"micro_batches": 2}),
}


def print_table(networks: list[str], plans: list[str]) -> None:
    """Prints how many values are proved."""
    print(" | ".join(["", "network", *plans, ""]).strip())
    print("|---" * (len(plans) + 1) + "|")
    for name in networks:
        cells, said = [], []
        for plan in plans:
            try:
                blocks, proved = PLANS[plan].proof(name)
            except (rc.UsageError, rc.BudgetError):
                cells.append("-")
                continue
            proof = proved(blocks[0])
            count = len(proof.proved) + len(proof.unproved)
            cells.append(str(count) if not proof.unproved else f"{len(proof.proved)}/{count}")
            said += [f"    {plan}: {n}: {why}" for n, why in list(proof.unproved.items())[:1]]
        print(" | ".join(["", name, *cells, ""]).strip(), *said, sep="\n", flush=True)


def print_times(networks: list[str], plans: list[str]) -> None:
    """Prints the time of proofs beside that of compilations: the first in a process, and later ones."""
    print("network       plan         operators   compiled       proof   ratio    again       proof   ratio")
    for name, plan in itertools.product(networks, plans):
        command = [sys.executable, __file__, "--seconds", name, "--plans", plan]
        runs = [subprocess.run(command, capture_output=True, text=True) for _ in range(5)]
        if any(r.returncode for r in runs):  # there is no such plan
            continue
        operators, *seconds = (
            statistics.median(some) for some in zip(*(json.loads(r.stdout) for r in runs), strict=True)
        )
        first, again = (f"{c:9.3f} s {p:9.4f} s {p / c:7.1%}" for c, p in (seconds[:2], seconds[2:]))
        print(f"{name:13} {plan:12} {operators:9,}{first}{again}", flush=True)


def print_seconds(name: str, plan: Plan) -> None:
    """Prints the processor seconds of compilations and of the proofs in them, first and later ones.

    A proof's are also those of the step before recomputation and slices, which is made for it.
    """
    rows: list[tuple[float, float]] = []
    spent: list[float] = []

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            started = time.process_time()
            result = function(*args, **options)
            spent.append(time.process_time() - started)
            return result

        return call

    compiler._made, compiler.prove_blocks = timed(compiler._made), timed(rc.prove)
    for _ in range(6):
        program, loss = trained(name)
        plan.prepared(program)
        optimizer = plan.planned(plan.plain(), program)
        spent.clear()
        started = time.process_time()
        after = rc.compile_step(program, loss, optimizer, prove=True, **plan.options).program.block
        proof = sum(spent[1:])  # the first is the step itself
        rows.append((time.process_time() - started - proof, proof))
    again = [statistics.median(some) for some in zip(*rows[1:], strict=True)]
    print(json.dumps([len(after.operators), *rows[0], *again]))


def main() -> None:
    """Prints one of the tables."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", nargs="+", metavar="NETWORK")
    p.add_argument("--plans", nargs="+", choices=list(PLANS), metavar="PLAN")
    p.add_argument("--exports", action="store_true", help="architectures that PyTorch exported")
    p.add_argument("--times", action="store_true", help="how long proofs take")
    p.add_argument("--seconds", metavar="NETWORK", help=argparse.SUPPRESS)
    args = p.parse_args()
    networks = args.only or (exports() if args.exports else list(NETWORKS))
    if args.seconds:
        print_seconds(args.seconds, PLANS[args.plans[0]])
    elif args.times:
        print_times(networks, args.plans or ["plain"])
    else:
        print_table(networks, args.plans or list(PLANS))


if __name__ == "__main__":
    main()
