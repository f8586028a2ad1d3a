"""Memory saved by fine-tuning fewer parameters: gradients, optimizer state, saved activations, peak; by compiling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..boundary import as_function, as_program
from ..compiling.compiler import CompiledStep, compile_step
from ..compiling.steps import Loss, attach_loss
from ..errors import UsageError
from ..importer.trained import FROZEN
from ..language.ir import Role
from ..language.program import Program
from ..passes import Target
from ..support.tables import human_bytes, plain_table, render
from ..training.optimizers import Adam
from ..training.protocol import AnyOptimizer
from .graph import Graph, loaded_again, model_of
from .lora import adapters_of
from .merge import replace_weight, without_adapters

__all__ = ["Training", "TrainingSaved", "savings", "training"]


@dataclass(frozen=True)
class Training:
    """Memory of a training step: parameters and tensors that train, and bytes by what they are for.

    `weight_bytes`: parameters and buffers, frozen ones too; `gradient_bytes`: one gradient for each trained element;
    `state_bytes`: the optimizer's; `kept_bytes`: forward values that the backward pass reads; `peak_bytes`: all that
    the executor allocates.
    """

    trained: int
    tensors: int
    weight_bytes: int
    gradient_bytes: int
    state_bytes: int
    kept_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class TrainingSaved:
    """Training everything beside training what trains now; printed as a table."""

    before: Training
    after: Training

    def __str__(self) -> str:
        b, a = self.before, self.after
        table = plain_table("training", "all of it", "what trains now", "change")
        table.add_row("parameters that train", f"{b.trained:,}", f"{a.trained:,}", _change(b.trained, a.trained))
        for what, name in _ROWS:
            x, y = getattr(b, name), getattr(a, name)
            table.add_row(what, human_bytes(x), human_bytes(y), _change(x, y))
        return render(table)


_ROWS = (
    ("weights, frozen ones too", "weight_bytes"),
    ("gradients", "gradient_bytes"),
    ("optimizer state", "state_bytes"),
    ("kept for the backward pass", "kept_bytes"),
    ("peak memory", "peak_bytes"),
)


def _change(before: int, after: int) -> str:
    return "" if not before else f"{after / before - 1:+.1%}"


def training(
    program: Program, optimizer: AnyOptimizer | None = None, *, loss: Loss = None, target: Target | None = None
) -> Training:
    """The memory of a program's step, by compiling it; the program stays as it is.

    `optimizer`: default Adam; `loss`: as for `rc.estimate`, of a program that has none.
    """
    if any(op.role is Role.OPTIMIZE for op in as_program(program).operators):
        raise UsageError("the program is already a training step: compare programs from before minimize")
    own = Program(program.block, program.data, source=program.source)
    own.take_origin(program)
    name = attach_loss(own, loss)[0]
    return training_of(compile_step(own, name, optimizer or Adam(), target=target))


def training_of(step: CompiledStep) -> Training:
    """The memory of a compiled step."""
    block = step.program.block
    values = {v.name: v for v in block.parameters}
    trained = [values[n] for n, _ in step.program.gradients]
    return Training(
        trained=sum(v.size for v in trained),
        tensors=len(trained),
        weight_bytes=sum(v.nbytes for v in (*block.parameters, *block.buffers)),
        gradient_bytes=sum(v.nbytes for v in trained),
        state_bytes=sum(v.nbytes for v in block.state),
        kept_bytes=step.figures.kept_bytes,
        peak_bytes=step.figures.peak_bytes,
    )


def savings(
    program: Program,
    optimizer: Callable[[], AnyOptimizer] = Adam,
    *,
    beside: Program | None = None,
    loss: Loss = None,
    target: Target | None = None,
) -> TrainingSaved:
    """The memory saved because only a part of a program trains: `print(rc.tuning.savings(program))`.

    `beside`: the program to compare with (default: its model without adapters, weights in 8 bits in floating point
    again, and all of it training).  `optimizer`: a function that makes one.  Both steps are compiled, none is run.
    """
    as_function(optimizer, "optimizer", "nothing and makes an optimizer, such as rc.Adam")
    before = everything(as_program(program)) if beside is None else beside
    first, second = (training(p, optimizer(), loss=loss, target=target) for p in (before, program))
    return TrainingSaved(first, second)


def everything(program: Program) -> Program:
    """The program that trains all of a program's model: without adapters, nothing frozen, nothing in 8 bits."""
    adapters = [] if program.source is None else adapters_of(program.source)
    if not adapters and (program.source is None or not any(p.key == FROZEN for p in program.source.metadata_props)):
        frozen = {t.name for t in program.tensors if t.why == "frozen"}
        block = program.block
        own = Program(
            block.with_operators(
                block.operators,
                parameters=(*block.parameters, *(v for v in block.buffers if v.name in frozen)),
                buffers=tuple(v for v in block.buffers if v.name not in frozen),
            ),
            program.data,
            source=program.source,
        )
        own.take_origin(program)
        return own
    graph = Graph(model_of(program))
    without_adapters(graph, adapters)
    scales = graph.said(FROZEN) or ()
    for node in [n for n in graph.nodes if n.op_type == "DequantizeLinear" and n.input[1] in scales]:
        replace_weight(graph, node.output[0], graph.constant_matrix(node.output[0]))
    graph.say(FROZEN, None)
    return loaded_again(program, graph.finish())
