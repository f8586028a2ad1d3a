"""Processor seconds (user and system) of planning: each case in a process of its own.

    python benchmarks/planning_seconds.py [CASE ...]        (default: all of CASES)

Prints seconds to import and to make the step's block, those of planning (everything after that), those of the whole
process, operators of the step, and what was found: the peak as a share of the plain one and the extra time, or a
refusal.  Costs are those of an A100 in its table, so that nothing is measured but planning.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np

HEADER = ("case", "operators", "made s", "planned s", "whole s", "found")
WIDTHS = (18, 9, 7, 9, 8, 44)


def seconds() -> float:
    """Processor seconds of this process and of its children that have ended."""
    found = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in found)


def zoo(name: str, batch: int, **options: Any) -> tuple[Any, str]:
    """A zoo network without weights, and its loss."""
    import recompute as rc
    from recompute.compiling.steps import attach_loss

    program = rc.load(rc.models.build(name, batch=batch, weights=False, **options))
    return program, attach_loss(program, None)[0]


def lstm(steps: int) -> tuple[Any, str]:
    """An LSTM of 64 units with one LSTM operator a step (Gruslys's grain): a step reads its input and the state."""
    import recompute as rc
    from recompute.compiling.steps import attach_loss
    from recompute.models.common import ZEROS, Init, Net
    from recompute.models.registry import InputSpec

    batch, units = 64, 64
    net = Net(batch=batch, weights=False, seed=0)
    x = net.input(InputSpec("x", "float32", (steps, batch, units)))
    init = Init("uniform", 0.125)
    weights = [net.parameter(f"lstm.{n}", (1, 4 * units, units), init) for n in ("weight_ih", "weight_hh")]
    weights.append(net.parameter("lstm.bias", (1, 8 * units), ZEROS))
    state = [net.constant("start", np.zeros((1, batch, units), np.float32))] * 2
    axis, ends = net.constant("axis", [0]), [net.constant(f"at{i}", [i]) for i in range(steps + 1)]
    for i in range(steps):
        row = net.add("Slice", [x, ends[i], ends[i + 1], axis], f"x{i}")
        state = net.add_many(
            "LSTM", [row, *weights, "", *state], ["", f"h{i}", f"c{i}"], name=f"s{i}", hidden_size=units
        )[1:]
    last = net.add("Squeeze", [state[0], axis], "last")
    net.output(net.gemm(last, "logits", sizes=(units, 10), init=init), (batch, 10))
    program = rc.load(net.model("lstm", description=""))
    return program, attach_loss(program, None)[0]


def resnet(blocks: int) -> tuple[Any, str]:
    """Chen's network: pre-activation bottlenecks (He et al. 2016) on images of 32 x 32, three stages of `blocks`.

    111 are ResNet-1,001.
    """
    import recompute as rc
    from recompute.compiling.steps import attach_loss
    from recompute.models.common import Net
    from recompute.models.registry import InputSpec

    net = Net(batch=32, weights=False, seed=0)
    x = net.input(InputSpec("x", "float32", (32, 3, 32, 32)))
    x, size = net.conv(x, "stem", channels=(3, 16), kernel=3, padding=1, bias=False), 16
    for stage in range(3):
        inner, out = 16 << stage, 64 << stage
        for i in range(blocks):
            stride = 2 if stage and not i else 1
            x = _pre_activation(net, x, f"stage{stage}.{i}", (size, inner, out), stride)
            size = out
    x = net.add("Relu", [net.batch_norm(x, "last", channels=size)], "last.relu")
    net.classifier(x, sizes=(size, 10), params="fc")
    program = rc.load(net.model(f"resnet{9 * blocks + 2}", description=""))
    return program, attach_loss(program, None)[0]


def _pre_activation(net: Any, x: str, name: str, sizes: tuple[int, int, int], stride: int) -> str:
    """x + three convolutions, each after a norm and ReLU; where sizes change, the first ReLU is projected, too."""
    first, inner, out = sizes
    y = x
    for k, (given, made, kernel) in enumerate([(first, inner, 1), (inner, inner, 3), (inner, out, 1)]):
        y = net.add("Relu", [net.batch_norm(y, f"{name}.bn{k}", channels=given)], f"{name}.relu{k}")
        if not k and (first != out or stride > 1):
            x = net.conv(y, f"{name}.short", channels=(first, out), kernel=1, stride=stride, bias=False)
        window = {"kernel": kernel, "stride": stride if k == 1 else 1, "padding": kernel // 2}
        y = net.conv(y, f"{name}.conv{k}", channels=(given, made), bias=False, **window)
    return net.add("Add", [y, x], f"{name}.out")


def chain(operators: int) -> tuple[Any, str]:
    """A chain of so many element-wise operators."""
    return _traced([("Sin", "Tanh")[i % 2] for i in range(operators)])


def euler(steps: int) -> tuple[Any, str]:
    """x + 0.01 tanh(W x), unrolled."""
    from onnx import TensorProto, helper, numpy_helper

    w = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32) / 8
    held = [numpy_helper.from_array(w, "w"), numpy_helper.from_array(np.float32([0.01]), "h")]
    nodes, x = [], "x"
    for i in range(steps):
        nodes += [
            helper.make_node("MatMul", [x, "w"], [f"m{i}"]),
            helper.make_node("Tanh", [f"m{i}"], [f"t{i}"]),
            helper.make_node("Mul", [f"t{i}", "h"], [f"d{i}"]),
            helper.make_node("Add", [x, f"d{i}"], [f"x{i}"]),
        ]
        x = f"x{i}"
    return _mean(nodes, x, held, [32, 64], TensorProto.FLOAT)


def _traced(kinds: list[str]) -> tuple[Any, str]:
    from onnx import TensorProto, helper, numpy_helper

    nodes = [helper.make_node("Mul", ["x", "w"], ["y"])]
    x = "y"
    for i, kind in enumerate(kinds):
        nodes.append(helper.make_node(kind, [x], [f"y{i}"]))
        x = f"y{i}"
    return _mean(nodes, x, [numpy_helper.from_array(np.ones(64, np.float32), "w")], [32, 64], TensorProto.FLOAT)


def _mean(nodes: list[Any], x: str, held: list[Any], shape: list[int], kind: int) -> tuple[Any, str]:
    from onnx import helper

    import recompute as rc

    nodes.append(helper.make_node("ReduceMean", [x], ["loss"], keepdims=0))
    graph = helper.make_graph(
        nodes, "step", [helper.make_tensor_value_info("x", kind, shape)],
        [helper.make_tensor_value_info("loss", kind, [])], held,
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return rc.load(model), "loss"


#: a low budget
LOW = "30% of activations"
#: by name: how the program is made, the budget, options of planning
CASES: dict[str, tuple[Callable[[], tuple[Any, str]], str, dict[str, Any]]] = {
    "bert-large-40%": (lambda: zoo("bert-large", 1), "40%", {}),
    "bert-large-97%": (lambda: zoo("bert-large", 1), "97%", {}),
    "gpt2-small-60%": (lambda: zoo("gpt2-small", 1), "60%", {}),
    "gpt2-small-85%": (lambda: zoo("gpt2-small", 1), "85%", {}),
    **{f"gpt2-{n}-70%": (lambda n=n: zoo("gpt2-small", 8, layers=n), "70%", {}) for n in (12, 48, 96)},  # type: ignore[misc]
    **{f"gpt2-{n}-30%": (lambda n=n: zoo("gpt2-small", 8, layers=n), LOW, {}) for n in (6, 12, 24, 48, 96)},  # type: ignore[misc]
    **{f"resnet{9 * n + 2}-30%": (lambda n=n: resnet(n), LOW, {}) for n in (18, 37, 111)},  # type: ignore[misc]
    **{f"lstm-{n}-30%": (lambda n=n: lstm(n), LOW, {}) for n in (300, 1000, 2000, 5000)},  # type: ignore[misc]
    "euler-300": (lambda: euler(300), "50%", {}),
    "euler-1000": (lambda: euler(1000), "50%", {}),
    "chain-1000": (lambda: chain(1000), "50%", {}),
    "chain-10000": (lambda: chain(10000), "50%", {}),
    "resnet50-60%": (lambda: zoo("resnet50", 16), "60%", {}),
    "mobilenet_v2-60%": (lambda: zoo("mobilenet_v2", 16), "60%", {}),
    "densenet121-5s": (lambda: zoo("densenet121", 8), "60%", {"seconds": 5}),
    "resnet50-15s": (lambda: zoo("resnet50", 16), "60%", {"seconds": 15}),
}


def measured(case: str) -> str:
    """The row of a case."""
    from zoo_steps import row_text

    import recompute as rc
    from recompute.compiling.compiler import compile_step
    from recompute.cost import device

    make, budget, options = CASES[case]
    program, loss = make()
    target = rc.Target(providers=(), cost=device("a100-80"))
    made, operators, row = seconds(), len(program.block.operators), ""
    try:
        step = compile_step(program, loss, rc.Adam(), budget=budget, target=target, **options)
        p = step.planned
        gap = "" if p.gap is None else f", gap {p.gap:.2%}"
        row = f"{p.peak_bytes / p.plain_peak_bytes:.2%}, {p.overhead:+.3%}{gap}, {p.planning_seconds:.1f} s"
        operators = len(step.logical.operators) if hasattr(step, "logical") else len(step.program.logical.operators)
    except rc.BudgetError as e:
        row = f"refused: {e}"
    end = seconds()
    return row_text((case, str(operators), f"{made:.1f}", f"{end - made:.1f}", f"{end:.1f}", row), WIDTHS)


def main() -> int:
    """Prints the table."""
    from zoo_steps import headline, machine, row_text

    print(headline(machine()))
    print(row_text(HEADER, WIDTHS))
    for case in sys.argv[1:] or CASES:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            print(pool.submit(measured, case).result(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
