"""How compile time grows with a model: graphs of many shapes, each compiled into a training step and run once as it is.

    python benchmarks/scaling.py [--size 10000] [--times 2] [--seconds N] [SHAPE ...]

Each shape is compiled at `--size` nodes and at `--times` as many (`--times 10` with the default size: 100,000), each in
a process of its own on one core.  Prints CPU seconds of `import`, of `step` (backward pass, Adam, every pass, the
memory plan, the verifier after each pass) and of `run` (planning the forward pass, binding it, one run), the most
memory that the process took, and how many times as long the larger one took.  Exits with 1 where importing and one of
the other two take more CPU seconds than `--seconds`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper

import recompute as rc
from recompute.compiling.compiler import compile_step
from recompute.compiling.steps import attach_loss

node = helper.make_node


def model(
    nodes: Sequence[onnx.NodeProto],
    weights: Sequence[onnx.TensorProto] = (),
    *,
    outputs: Sequence[str] = ("y",),
    shape: Sequence[int] = (2, 3),
    out: Sequence[int] | None = None,
) -> onnx.ModelProto:
    """A model that reads `first`, which is the input `x` plus a weight, so that there is something to train."""
    first = node("Add", ["x", "b"], ["first"])
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
    results = [helper.make_tensor_value_info(o, TensorProto.FLOAT, out or shape) for o in outputs]
    graph = helper.make_graph([first, *nodes], "scaling", inputs, results, [weight("b", shape[-1:]), *weights])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def weight(name: str, shape: Sequence[int]) -> onnx.TensorProto:
    """An initializer."""
    data = np.full(shape, 0.5, np.float32)
    return helper.make_tensor(name, TensorProto.FLOAT, shape, data.tobytes(), raw=True)


def chain(n: int, shape: Sequence[int] = (2, 3), kinds: Sequence[str] = ("Relu",), every: int = 0) -> onnx.ModelProto:
    """n element-wise operators, one after the other; every so many is an output."""
    names = ["first", *(f"v{i}" for i in range(n - 1)), "y"]
    nodes = [node(kinds[i % len(kinds)], [names[i]], [names[i + 1]]) for i in range(n)]
    outputs = ["y", *names[1:-1:every]] if every else ["y"]
    return model(nodes, shape=shape, outputs=outputs)


def fan(n: int, kind: str) -> onnx.ModelProto:
    """One value read by n operators, whose results go into one."""
    parts = [f"v{i}" for i in range(n)]
    nodes = [node("Neg", ["first"], [p]) for p in parts]
    joined = node(kind, parts, ["y"], **({"axis": 0} if kind == "Concat" else {}))
    return model([*nodes, joined], out=(2 * n, 3) if kind == "Concat" else (2, 3))


def tree(n: int, shape: Sequence[int] = (2, 3)) -> onnx.ModelProto:
    """One value read by n / 2 operators, whose results are added in pairs."""
    level = [f"v{i}" for i in range(n // 2)]
    nodes = [node("Neg", ["first"], [p]) for p in level]
    while len(level) > 1:
        sums = [f"{a}+" for a in level[: len(level) // 2]]
        nodes += [node("Add", [a, b], [s]) for a, b, s in zip(level[::2], level[1::2], sums, strict=False)]
        level = sums + level[2 * len(sums) :]
    return model([*nodes, node("Identity", level, ["y"])], shape=shape)


def residual(n: int) -> onnx.ModelProto:
    """x + relu(x), again and again."""
    nodes, last = [], "first"
    for i in range(n // 2):
        nodes += [node("Relu", [last], [f"r{i}"]), node("Add", [last, f"r{i}"], [f"s{i}"])]
        last = f"s{i}"
    return model([*nodes, node("Identity", [last], ["y"])])


def weighted(n: int, kinds: Sequence[str], shape: Sequence[int]) -> onnx.ModelProto:
    """Operators with a weight each; after the first of `kinds` come the others, which have none."""
    nodes, last, weights = [], "first", []
    for i in range(n // (2 * len(kinds) - 1)):
        weights.append(weight(f"w{i}", shape))
        for k, kind in enumerate(kinds):
            nodes.append(node(kind, [last, f"w{i}"] if k == 0 else [last], [f"{kind}{i}"]))
            last = f"{kind}{i}"
    return model([*nodes, node("Identity", [last], ["y"])], weights)


def reshaped(n: int) -> onnx.ModelProto:
    """Shape arithmetic that is folded, and views."""
    nodes, last = [], "first"
    for i in range(n // 4):
        nodes += [
            node("Shape", [last], [f"h{i}"]),
            node("Relu", [last], [f"r{i}"]),
            node("Reshape", [f"r{i}", f"h{i}"], [f"s{i}"]),
            node("Transpose", [f"s{i}"], [f"t{i}"]),
        ]
        last = f"t{i}"
    return model([*nodes, node("ReduceMean", [last], ["y"], keepdims=0)], out=())


#: name → the model with about so many nodes
SHAPES: dict[str, Callable[[int], onnx.ModelProto]] = {
    "chain": chain,
    "large-chain": lambda n: chain(n, (128, 256), ("Tanh", "Sigmoid")),
    "sum": lambda n: fan(n, "Sum"),
    "concat": lambda n: fan(n, "Concat"),
    "tree": tree,
    "large-tree": lambda n: tree(n, (128, 256)),
    "residual": residual,
    "weights": lambda n: weighted(n, ("Add",), (3,)),
    "matmuls": lambda n: weighted(n, ("MatMul", "Tanh"), (3, 3)),
    "outputs": lambda n: chain(n, every=10),
    "checkpoints": chain,
    "reshaped": reshaped,
}


def compiled(shape: str, n: int) -> str:
    """Compiles a shape of n nodes in this process; what it took as text."""
    proto = SHAPES[shape](n)
    times = [time.process_time()]
    program = rc.load(proto)
    outputs = program.block.outputs
    times.append(time.process_time())
    x = program.block.inputs[0]
    rc.Executor().run(program, {x.name: np.ones(x.shape, np.float32)}, outputs)
    times.append(time.process_time())
    loss, _ = attach_loss(program, None)
    checkpoints = [f"v{i}" for i in range(0, n - 1, max(n // 1000, 1))] if shape == "checkpoints" else None
    step = compile_step(program, loss, rc.optimizers.Adam(), checkpoints=checkpoints)
    times.append(time.process_time())
    load, run, made = (b - a for a, b in itertools.pairwise(times))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return f"{load:.1f} {made:.1f} {run:.1f} {memory} {len(step.program.operators)}"


def measured(shape: str, n: int) -> tuple[list[float], int, int]:
    """CPU seconds (import, step, run), MiB and instructions of a process of its own."""
    command = [sys.executable, __file__, "--one", shape, "--size", str(n)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.split()
    return [float(s) for s in found[:3]], int(found[3]), int(found[4])


def main() -> int:
    """Prints the table; 1 where something took too long."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=f"of {', '.join(SHAPES)} (default: all)")
    parser.add_argument("--size", type=int, default=10_000, help="nodes of the smaller graph (default: 10000)")
    parser.add_argument("--times", type=int, default=2, help="how many times as large the larger one is (default: 2)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="CPU seconds that either may take")
    parser.add_argument("--one", metavar="SHAPE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        print(compiled(args.one, args.size))
        return 0
    print("shape            nodes  instructions  import    step     run    MiB  times")
    late = False
    for shape in args.shapes or SHAPES:
        before = 0.0
        for n in (args.size, args.size * args.times):
            seconds, memory, count = measured(shape, n)
            whole = seconds[0] + max(seconds[1:])
            ratio = f"{sum(seconds) / before:6.1f}" if before else ""
            columns = " ".join(f"{s:7.1f}" for s in seconds)
            print(f"{shape:<12} {n:>9,} {count:>13,} {columns} {memory:>6,} {ratio}", flush=True)
            before, late = sum(seconds), late or whole > args.seconds
    return int(late)


if __name__ == "__main__":
    sys.exit(main())
