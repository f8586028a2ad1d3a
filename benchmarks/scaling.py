"""How compile time grows: a chain of N ONNX operators through import, autodiff, recomputation and the memory plan.

    python benchmarks/scaling.py [N ...]        (default: 10000 20000)

Prints seconds per stage and the ratio between successive sizes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

import recompute as rc
from recompute.compiler import without_gc
from recompute.passes import Autodiff, Liveness, MemoryPlan, Recompute


def chain(n: int) -> onnx.ModelProto:
    """n operators: MatMul and Tanh in turn, then a mean."""
    nodes, weights, last = [], [], "x"
    identity = np.eye(8, dtype="f4").tobytes()
    for i in range((n - 1) // 2):
        weights.append(helper.make_tensor(f"w{i}", TensorProto.FLOAT, (8, 8), identity, raw=True))
        nodes.append(helper.make_node("MatMul", [last, f"w{i}"], [f"m{i}"]))
        nodes.append(helper.make_node("Tanh", [f"m{i}"], [f"t{i}"]))
        last = f"t{i}"
    nodes.append(helper.make_node("ReduceMean", [last], ["loss"], keepdims=0))
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 8])
    loss = helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])
    graph = helper.make_graph(nodes, "chain", [x], [loss], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])


def compile_chain(n: int) -> tuple[dict[str, float], int]:
    """Seconds by stage, and the number of operators of the recomputed step."""
    seconds: dict[str, float] = {}

    def timed(stage: str, run: Callable[[Any], Any], argument: Any) -> Any:
        start = time.perf_counter()
        result = run(argument)
        seconds[stage] = time.perf_counter() - start
        return result

    model = chain(n)
    checkpoints = tuple(f"t{i}" for i in range(50, (n - 1) // 2, 50))
    with without_gc():
        block = timed("import", rc.load, model).block
        passes = [Autodiff(), Recompute(checkpoints), Liveness(), MemoryPlan()]
        for p in passes:
            block = timed(p.name, p.run, block)
            timed(f"verify {p.name}", rc.verify, block)
    return seconds, len(block.operators)


def main() -> None:
    """Compiles chains of the sizes given and prints the table."""
    totals: list[float] = []
    for n in [int(a) for a in sys.argv[1:]] or [10_000, 20_000]:
        seconds, operators = compile_chain(n)
        totals.append(sum(seconds.values()))
        ratio = f", {totals[-1] / totals[-2]:.2f} times the last" if len(totals) > 1 else ""
        stages = ", ".join(f"{k} {v:.2f}" for k, v in seconds.items() if not k.startswith("verify"))
        print(f"{n:>7,} operators: {totals[-1]:6.2f} s{ratio}  ({stages}; {operators:,} instructions)")


if __name__ == "__main__":
    main()
