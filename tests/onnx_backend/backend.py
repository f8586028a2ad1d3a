"""This package as an ONNX backend (`onnx.backend.base.Backend`), on NumPy.

    from backend import Backend

    outputs = Backend.prepare(model).run([x, y])

Programs are static.  A model is therefore compiled when inputs are given, for their shapes, and for the contents of
those inputs that must be known at compile time (axes, target shapes, pads, conditions): these are bound as constants.
Runs with the same shapes and the same contents of bound inputs share one program.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import onnx
from onnx.backend.base import Backend as _Backend
from onnx.backend.base import BackendRep

from recompute.errors import ModelError, UsageError, nearest
from recompute.importer.convert import prepare
from recompute.importer.fold import Known
from recompute.importer.graphs import names_read
from recompute.importer.limits import Budget
from recompute.importer.load import Importer
from recompute.importer.model import read_model
from recompute.importer.trained import TrainRule
from recompute.language.ir import Value
from recompute.language.program import Program
from recompute.language.types import DTYPES, TensorType
from recompute.runtime import Executor

#: number of programs that a prepared model caches
_KEPT = 8
#: limit on the work of compiling one, in seconds
_SECONDS = 600


class Backend(_Backend):
    """Runs ONNX models and nodes through this package's importer and executor.  Device: "CPU"."""

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Whether models run on `device` ("CPU" only)."""
        return device.split(":")[0] == "CPU"

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> PreparedModel:
        """A model, ready to run.  UsageError for other devices; ONNX's own error for an invalid model."""
        if not cls.supports_device(device):
            raise UsageError(f"device '{device}' is not supported; 'CPU' is")
        onnx.checker.check_model(model)
        return PreparedModel(model)

    @classmethod
    def run_node(
        cls, node: onnx.NodeProto, inputs: Any, device: str = "CPU", outputs_info: Any = None, **kwargs: Any
    ) -> tuple[Any, ...]:
        """Runs one node on `inputs` (a list, for the inputs that are present; or a dictionary by name)."""
        names = list(dict.fromkeys(n for n in node.input if n))
        arrays = dict(inputs) if isinstance(inputs, Mapping) else dict(zip(names, inputs, strict=True))
        opset = kwargs.get("opset_version", onnx.defs.onnx_opset_version())
        infos = [_value_info(n, np.asarray(arrays[n])) for n in names]
        outputs = [onnx.ValueInfoProto(name=o) for o in node.output if o]
        graph = onnx.helper.make_graph([node], "node", infos, outputs)
        imports = [onnx.helper.make_opsetid(node.domain, opset)]
        return PreparedModel(onnx.helper.make_model(graph, opset_imports=imports)).run([arrays[n] for n in names])


def _value_info(name: str, array: np.ndarray) -> onnx.ValueInfoProto:
    kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
    return onnx.helper.make_tensor_value_info(name, kind, array.shape)


class PreparedModel(BackendRep):
    """A model that is compiled at its first run, and again for other shapes or other bound contents."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = model
        self.source = prepare(read_model(model))
        weights = {t.name for t in self.source.graph.initializer}
        self.inputs = [i.name for i in self.source.graph.input if i.name not in weights]
        #: inputs whose contents are bound into the program, as found by runs so far
        self.bound: list[str] = []
        self.executor = Executor()
        self._programs: dict[Any, Specialised] = {}

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The model's outputs, in order; `inputs`: a list in the order of the model's inputs, or by name.

        Sequences are lists, an empty optional is None, strings are object arrays.  ModelError if the model, for these
        inputs, is not a static program of supported operators.
        """
        feed, lists = _tensors(self._by_name(inputs))
        found = self.specialised(feed, lists)
        program = found.program
        kept = {v.name: program.data[v.name].copy() for v in _updated(program)}
        fed = {v.name: feed[v.name] for v in program.inputs}
        names = [v.name for v in program.outputs]
        results = dict(zip(names, self.executor.run(program, fed, names), strict=True)) if names else {}
        for name, array in kept.items():  # a model keeps nothing between runs
            program.data[name][...] = array
        return tuple(found.output(o.name, results) for o in self.source.graph.output)

    def _by_name(self, inputs: Any) -> dict[str, Any]:
        if not isinstance(inputs, Mapping):
            listed = list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
            if len(listed) > len(self.inputs):
                raise UsageError(f"{len(listed)} inputs for a model that takes {len(self.inputs)}")
            inputs = dict(zip(self.inputs, listed, strict=False))
        for name in self.inputs:
            if name not in inputs:
                raise UsageError(f"input '{name}' is missing")
        for name in inputs:
            if name not in self.inputs:
                raise UsageError(f"the model has no input '{name}'{nearest(name, self.inputs)}")
        return dict(inputs)

    def specialised(self, feed: Mapping[str, np.ndarray], lists: Mapping[str, list[str] | None]) -> Specialised:
        """The program for these inputs (see `_tensors`), compiled if there is none yet."""
        self.bound += [n for n, a in feed.items() if a.dtype == object and n not in self.bound]
        while True:
            key = (
                tuple((n, str(a.dtype), a.shape, _bits(a) if n in self.bound else None) for n, a in feed.items()),
                tuple((n, None if names is None else len(names)) for n, names in lists.items()),
            )
            found = self._programs.get(key)
            if found is not None:
                return found
            found = Specialised(self.source, feed, lists, self.bound)
            if found.wanted:
                self.bound += found.wanted
                continue
            while len(self._programs) >= _KEPT:
                self._programs.pop(next(iter(self._programs)))
            self._programs[key] = found
            return found

    def programs(self) -> list[Specialised]:
        """The programs compiled so far."""
        return list(self._programs.values())


def _tensors(inputs: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, list[str] | None]]:
    """The tensors among the inputs, and the names of the parts of those that are sequences (None: nothing)."""
    feed: dict[str, np.ndarray] = {}
    lists: dict[str, list[str] | None] = {}
    for name, given in inputs.items():
        if given is None:
            lists[name] = None
        elif isinstance(given, (list, tuple)):
            lists[name] = [f"{name}/{i}" for i in range(len(given))]
            feed.update((f"{name}/{i}", _array(name, item)) for i, item in enumerate(given))
        else:
            feed[name] = _array(name, given)
    return feed, lists


def _array(name: str, given: Any) -> np.ndarray:
    if isinstance(given, onnx.TensorProto):
        given = onnx.numpy_helper.to_array(given)
    if given is None or isinstance(given, (list, tuple, dict)):
        raise ModelError(f"input '{name}' is neither a tensor nor a sequence of tensors")
    array = np.asarray(given)
    if array.dtype.kind in "OUST":
        return array.astype(object)
    if array.dtype not in DTYPES.values():
        raise ModelError(f"input '{name}' has element type {array.dtype}, which is not supported")
    return array


def _bits(array: np.ndarray) -> Any:
    return tuple(array.reshape(-1).tolist()) if array.dtype == object else array.tobytes()


def _updated(program: Program) -> list[Value]:
    """Buffers that the program updates."""
    written = {v.name for o in program.operators for v in o.writes() if o.op.updates}
    return [v for v in program.block.persistent() if v.name in written]


class Specialised:
    """One attempt to compile a model for some inputs.

    `wanted`: inputs that must be bound before it can succeed; if it is empty, `program` is set.  Outputs that are known
    at compile time, and sequences, are not outputs of the program: `output` returns them.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        feed: Mapping[str, np.ndarray],
        lists: Mapping[str, list[str] | None],
        bound: Iterable[str],
    ) -> None:
        self.importer = importer = _Importer(model)
        self.bound = set(bound) & set(feed)
        for name in self.bound:
            importer.known[name] = Known(np.array(feed[name]), "folded")
        importer.declare_inputs({n: TensorType.of(a) for n, a in feed.items() if n not in importer.known})
        for name, parts in lists.items():
            if parts is None:
                importer.nothing.add(name)
            else:
                importer.sequences[name] = parts
        self.wanted: list[str] = []
        try:
            importer.run()
            self.program = self._program(model)
        except ModelError:
            self.wanted = sorted(importer.sources(importer.asked) & {v.name for v in importer.inputs})
            if not self.wanted:
                raise

    def _program(self, model: onnx.ModelProto) -> Program:
        """The program of the outputs, and parts of outputs, that are computed in the step."""
        importer = self.importer
        parts = [p for o in model.graph.output for p in importer.sequences.get(o.name, [o.name])]
        computed = [n for n in dict.fromkeys(parts) if n not in importer.known and n not in importer.nothing]
        importer.graph = onnx.GraphProto(name=model.graph.name)
        importer.graph.output.extend(onnx.ValueInfoProto(name=n) for n in computed)
        program = importer.program(model)
        self.values = dict(zip(computed, program.block.outputs, strict=True))
        return program

    def output(self, name: str, results: Mapping[str, np.ndarray]) -> Any:
        """An output of the model, from the results of a run of the program."""
        importer = self.importer
        if name in importer.nothing:
            return None
        if name in importer.sequences:
            return [self.output(part, results) for part in importer.sequences[name]]
        return np.array(importer.known[name].array) if name in importer.known else results[self.values[name]]

    @property
    def means(self) -> set[str]:
        """How nodes without an operator class were handled: "reference", "folded" (of inputs), "function bodies"."""
        found = {"reference"} if any(o.op.name == "Reference" for o in self.program.operators) else set()
        if any(self.importer.sources([name]) & self.bound for name in self.importer.folded):
            found.add("folded")
        if self.importer.expanded:
            found.add("function bodies")
        return found


class _Importer(Importer):
    """An importer that records which values had to be known and were not, and how each node was handled."""

    def __init__(self, model: onnx.ModelProto) -> None:
        budget = Budget(max_seconds=_SECONDS)
        budget.most_of_one *= 100  # the caller has given the inputs
        rule = TrainRule(model, model.graph, [])
        super().__init__(model, training=None, seed=0, rule=rule, budget=budget)
        self.selected.whole = True  # results have their own sizes: masks are bound
        self.asked: set[str] = set()
        #: values that were computed while importing
        self.folded: list[str] = []
        #: operators that were replaced by their function bodies
        self.expanded: list[str] = []
        self._readers: dict[str, tuple[str, ...]] = {}

    def contents(self, name: str) -> Known | None:
        """As in the importer; records unknown values."""
        found = super().contents(name)
        if found is None:
            self.asked.add(name)
        return found

    def run_node(self, node: onnx.NodeProto) -> None:
        """As in the importer; records the handling."""
        before, asked, self.asked = len(self._problems), self.asked, set()
        read = tuple(n for n in names_read([node]) if n)
        self._readers.update((o, read) for o in node.output if o)
        super().run_node(node)
        if len(self._problems) > before:
            self.asked |= asked
        else:
            self.asked = asked
            self.folded += [o for o in node.output if o in self.known]

    def expand_node(self, node: onnx.NodeProto) -> None:
        """As in the importer; records the handling."""
        super().expand_node(node)
        self.expanded.append(node.op_type)

    def sources(self, names: Iterable[str]) -> set[str]:
        """The names, and those of all values from which they are computed."""
        seen: set[str] = set()
        todo = list(names)
        while todo:
            name = todo.pop()
            if name not in seen:
                seen.add(name)
                todo += self._readers.get(name, ())
        return seen
