"""What a model file is and what training it takes, on one screen: the facts that `rc.look` finds, as text and HTML."""

from __future__ import annotations

import html
import shlex
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..errors import one_line, printable
from ..support.tables import human_bytes

#: width of the text, and lines that one fact may take
_WIDTH, _LINES = 118, 3


@dataclass(frozen=True)
class Port:
    """An input or an output: its name, its element type, and its shape, with the names of open dimensions.

    `shape` is None where the file does not tell the number of dimensions.  An open dimension without a name is called
    `INPUT.AXIS`, as for `dims=`.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...] | None

    def __str__(self) -> str:
        dims = "?" if self.shape is None else ", ".join(map(str, self.shape))
        return f"{self.name} {self.dtype}[{dims}]"


@dataclass(frozen=True)
class HeadFact:
    """The head of an output: the last layer's weight ("" where none is found), the layer's result, and what follows it.

    `kind`: "Softmax", "LogSoftmax" or "Sigmoid", "" where the scores themselves are the output.
    """

    output: str
    scores: str
    kind: str
    weight: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        layer = f"'{self.weight}' {list(self.shape)} makes " if self.weight else "no layer is found that makes "
        behind = "" if self.scores == self.output else f", the scores '{self.scores}'"
        return f"{layer}'{self.output}'{behind}{f' before {self.kind}' if self.kind else ''}"


@dataclass(frozen=True)
class Condition:
    """An If or a Loop whose branch or trip count depends on inputs; `values`: numbers with which these are compared."""

    node: str
    kind: str
    inputs: tuple[str, ...]
    values: tuple[float, ...]

    @property
    def example(self) -> float | None:
        """A number to bind the input to; None where several inputs matter."""
        return None if len(self.inputs) != 1 else self.values[0] if self.values else 1

    def __str__(self) -> str:
        names = ", ".join(f"'{n}'" for n in self.inputs)
        values = f", compared with {', '.join(f'{v:g}' for v in self.values)}" if self.values else ""
        number = "VALUE" if self.example is None else f"{self.example:g}"
        bound = " ".join(f"--set {shlex.quote(n)}={number}" for n in self.inputs)
        return f"{self.kind} '{self.node}' depends on the input {names}{values}: {bound}"


@dataclass(frozen=True)
class Look:
    """What `rc.look` finds about a model; prints as one screen of text, and in a notebook as a table.

    `operators`: nodes by operator; `tensor_bytes`: of all tensors in the file; `open`: names of open dimensions;
    `fixed_batch`: the batch that the file fixes (None: it is open, or there is none); `command`: compiles the model;
    `problem`: why it does not ("" where it does).  `trained` and `parameters`: names of what trains, and how many
    numbers; `frozen`: reason → tensors that do not train; `stored`: element type → numbers in the file's tensors;
    `quantised`: nodes by operator; `loss`: the default loss ("" where none can be told), `loss_reason`: why;
    `no_gradient`: trained tensors that no gradient reaches, `gradient_error`: the operator that stops the backward
    pass; `notes`: warnings of loading.
    """

    model: str
    producer: str
    opsets: Mapping[str, int]
    operators: Mapping[str, int]
    tensor_bytes: int
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    open: tuple[str, ...]
    fixed_batch: int | None
    command: str
    stored: Mapping[str, int]
    quantised: Mapping[str, int]
    conditions: tuple[Condition, ...] = ()
    problem: str = ""
    trained: tuple[str, ...] = ()
    parameters: int = 0
    frozen: Mapping[str, int] = field(default_factory=dict)
    heads: tuple[HeadFact, ...] = ()
    loss: str = ""
    loss_reason: str = ""
    no_gradient: tuple[str, ...] = ()
    gradient_error: str = ""
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The facts for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [one_line(self.model)]
        for label, said in self._rows():
            wrapped = textwrap.wrap(
                printable(" ".join(said.split())), _WIDTH - 14, max_lines=_LINES, placeholder=" ..."
            )
            lines += [f"  {label if i == 0 else '':<11} {line}" for i, line in enumerate(wrapped)]
        works = bool(self.trained) and not (self.problem or self.gradient_error)
        lines.append(f"{'this compiles it' if works else 'begin with'}:\n  {self.command}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = [("model", self.model), *self._rows(), ("command", self.command)]
        cells = (f"<tr><th>{html.escape(label)}</th><td>{html.escape(said)}</td></tr>" for label, said in rows)
        return f"<table>{''.join(cells)}</table>"

    def _rows(self) -> Iterator[tuple[str, str]]:
        """Facts with their labels; those that say nothing are left out."""
        domains = ", ".join(f"{d or 'opset'} {v}" for d, v in self.opsets.items())
        nodes = sum(self.operators.values())
        size = human_bytes(self.tensor_bytes)
        yield "file", f"{self.producer or 'no producer named'}, {domains}, {nodes:,} nodes, {size} of tensors"
        yield "operators", _counted(self.operators)
        yield "inputs", ", ".join(map(str, self.inputs)) or "none"
        yield "outputs", ", ".join(map(str, self.outputs)) or "none"
        if self.open:
            yield "open", ", ".join(self.open)
        if self.fixed_batch is not None:
            more = "; --batch N opens it, after a check on samples" if self.fixed_batch == 1 else ""
            yield "batch", f"fixed at {self.fixed_batch}{more}"
        for condition in self.conditions:
            yield "condition", str(condition)
        if self.quantised:
            yield "quantised", _counted(self.quantised)
        if set(self.stored) - {"f32", "i64", "bool"}:
            yield "stored", ", ".join(f"{n:,} {kind}" for kind, n in self.stored.items())
        if self.problem:
            yield "problem", self.problem
            return
        for head in self.heads:
            yield "head", str(head)
        yield "loss", f"{self.loss_reason} (--loss sets it)" if self.loss else f"none: {self.loss_reason}"
        named = f", {self.parameters:,} numbers{_some(self.trained, ': ')}" if self.trained else ""
        yield "trains", f"{_tensors(self.trained)}{named}"
        if self.frozen:
            yield "does not", "; ".join(f"{why} ({n})" for why, n in self.frozen.items())
        if self.gradient_error:
            yield "gradients", self.gradient_error
        elif self.no_gradient:
            yield "gradients", f"none reaches {_tensors(self.no_gradient)}{_some(self.no_gradient, ': ')}"
        for note in self.notes:
            yield "note", note


def _tensors(names: Sequence[str]) -> str:
    return f"{len(names)} tensor{'s' * (len(names) != 1)}" if names else "nothing"


def _counted(counts: Mapping[str, int]) -> str:
    return _some([f"{n} {name}" for name, n in counts.items()], "", most=10)


def _some(names: Iterable[str], before: str, most: int = 4) -> str:
    listed = list(names)
    more = f", and {len(listed) - most} more" if len(listed) > most else ""
    return f"{before}{', '.join(listed[:most])}{more}" if listed else ""
