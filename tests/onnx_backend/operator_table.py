"""docs/operators.md: what becomes of every ONNX operator, from the schemas, our registry and the suite's cases.

`python tests/onnx_backend/suite.py --update` writes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx

DOCUMENT = Path(__file__).parents[2] / "docs" / "operators.md"
#: ONNX Runtime's version, how many cases its CPU provider passes, and those of not_passing.txt
ONNXRUNTIME = Path(__file__).with_name("onnxruntime.txt")
_OURS = ("", "ai.onnx")
#: settled while importing: they leave no operators
COMPILE_TIME = {"Constant", "ConstantOfShape", "Range", "Shape", "Size"}
_TRAINING = "ai.onnx.preview.training"
#: operators of whose gradient no case of the suite says something: nodes from x to y, with such an operator last
LEFT_OUT = (
    [onnx.helper.make_node("GlobalLpPool", ["x"], ["y"])],
    [
        onnx.helper.make_node("Mul", ["x", "x"], ["square"]),
        onnx.helper.make_node("Gradient", ["x"], ["y"], domain=_TRAINING, xs=["x"], y="square"),
    ],
)
#: why an operator is not there
WHY = {
    "Multinomial": "draws from data, untested by the suite",
    "MaxRoiPool": "superseded by RoiAlign, untested by the suite",
    "Scatter": "superseded by ScatterElements",
    "CastMap": "maps",
    "DictVectorizer": "maps",
    "ZipMap": "maps",
    "CategoryMapper": "superseded by LabelEncoder",
}


@dataclass
class Facts:
    """What the suite's cases show of an operator.  `gradient`: "yes", "no" or "flat" for each case that says."""

    passed: int = 0
    cases: int = 0
    means: Counter[str] = field(default_factory=Counter)
    classes: set[str] = field(default_factory=set)
    gradient: set[str] = field(default_factory=set)


def schemas() -> dict[tuple[str, str], list[Any]]:
    """(domain, operator) → its schemas, the oldest first."""
    found: dict[tuple[str, str], list[Any]] = {}
    for s in onnx.defs.get_all_schemas_with_history():
        found.setdefault((s.domain, s.name), []).append(s)
    return {k: sorted(v, key=lambda s: s.since_version) for k, v in sorted(found.items())}


def gather(case: Any, outcome: Any, programs: Iterable[Any], facts: dict[tuple[str, str], Facts]) -> None:
    """Adds what a case shows."""
    model = case.model()
    kinds = {("" if n.domain in _OURS else n.domain, n.op_type) for n in model.graph.node}
    for kind in kinds:
        facts.setdefault(kind, Facts()).cases += 1
        facts[kind].passed += outcome.status == "passed"
    alone = kinds - {("", "Constant")}
    if outcome.status != "passed" or len(alone) != 1 or case.name.endswith("_expanded") or "_expanded_" in case.name:
        return
    found = facts[next(iter(alone))]
    found.means[outcome.how] += 1
    for program in programs:
        found.classes |= {o.op.name for o in program.block.operators} - {"Identity"}
        found.gradient |= _gradients(program)


def _gradients(program: Any) -> set[str]:
    """Whether a gradient reaches a floating-point input from each floating-point output."""
    from recompute.errors import RecomputeError
    from recompute.passes.gradient.autodiff import differentiate

    block, found = program.block, set()
    values = block.values()
    wanted = [v.name for v in (*block.inputs, *block.buffers) if v.type.is_float and v.size]
    for name in block.outputs:
        if not values[name].type.is_float or not wanted or not values[name].size:
            continue
        b = program.builder(prefix="loss")
        loss = b.ReduceSum(values[name], keepdims=0) if values[name].ndim else b.Identity(values[name])
        whole = block.with_operators([*block.operators, *b.operators], constants=(*block.constants, *b.constants))
        try:
            found.add("yes" if differentiate(whole, loss.name, wanted)[1] else "flat")
        except RecomputeError:
            found.add("no")
    return found


def gather_ours(facts: dict[tuple[str, str], Facts]) -> None:
    """Adds what our kernels' own samples, and models for what the suite leaves out, say about gradients."""
    from backend import Backend

    from recompute.language.op import REGISTRY
    from recompute.language.program import Program
    from recompute.testing import case_block, cases

    for domain, name in schemas():
        cls = REGISTRY.get(name) if domain == "" else None
        for case in cases(cls) if cls is not None else ():
            if case.gradient and not case.op.updates:
                facts.setdefault((domain, name), Facts()).gradient |= _gradients(Program(case_block(case)[0]))
    x = np.linspace(-1, 1, 36, dtype=np.float32).reshape(1, 1, 6, 6)
    opsets = [onnx.helper.make_opsetid("", 22), onnx.helper.make_opsetid(_TRAINING, 1)]
    for nodes in LEFT_OUT:
        ends = [[onnx.helper.make_tensor_value_info(n, 1, x.shape if n == "x" else [None] * 4)] for n in "xy"]
        graph = onnx.helper.make_graph(nodes, "left out", *ends)
        prepared = Backend.prepare(onnx.helper.make_model(graph, opset_imports=opsets))
        prepared.run([x])
        for s in prepared.programs():
            facts.setdefault((nodes[-1].domain, nodes[-1].op_type), Facts()).gradient |= _gradients(s.program)


# -- columns ---------------------------------------------------------------------------------------------------------


def _forward(domain: str, name: str, latest: Any, facts: Facts) -> str:
    from recompute.importer.control import CONTROL
    from recompute.language.op import IMPORTERS, REGISTRY
    from recompute.ops.reference.nodes import REFERENCE

    if latest.deprecated and facts.passed and (domain, name) not in IMPORTERS:
        return "converted by onnx"
    if domain == "" and name in CONTROL:
        return "settled at compile time"
    if domain == "" and name in COMPILE_TIME:
        return "compile time"
    if domain == "" and name in REGISTRY:
        return "own kernel"
    if (domain, name) in IMPORTERS:
        parts = sorted(facts.classes)
        return "own kernels: " + ", ".join(parts) if 0 < len(parts) <= 3 else "own kernels, several"
    if name in REFERENCE.get(domain, ()):
        return "reference" if facts.cases else "reference, untested"
    if latest.has_function or latest.has_context_dependent_function:
        return "function body"
    return f"no ({WHY.get(name, 'not done')})"


def _gradient(forward: str, latest: Any, facts: Facts) -> str:
    if forward.startswith("no"):
        return ""
    if forward.startswith("reference"):
        return "no" if latest.domain == "" and _takes_floats(latest) else "not differentiable"
    if facts.gradient & {"yes", "no"}:
        return "yes" if "yes" in facts.gradient else "no"
    if forward == "settled at compile time":
        return "yes"
    return "yes, zero" if "flat" in facts.gradient and _takes_floats(latest) else "not differentiable"


def _takes_floats(schema: Any) -> bool:
    """Whether ONNX calls an input differentiable."""
    yes = onnx.defs.OpSchema.DifferentiationCategory.Differentiable
    return any(i.differentiation_category == yes for i in schema.inputs)


def _cuda(forward: str, name: str, facts: Facts) -> str:
    from recompute.language.op import REGISTRY

    if forward.startswith(("no", "reference")):
        return "no" if forward.startswith("reference") else ""
    if forward.endswith("compile time"):
        return "yes"
    classes = {name} if forward == "own kernel" else facts.classes
    return "no" if any(REGISTRY[c].on_host for c in classes if c in REGISTRY) else "yes"


def rows(facts: Mapping[tuple[str, str], Facts]) -> list[tuple[str, ...]]:
    """One row for each operator: name, versions, forward, gradient, CUDA, cases."""
    found = []
    for (domain, name), versions in schemas().items():
        f = facts.get((domain, name), Facts())
        forward = _forward(domain, name, versions[-1], f)
        numbers = [str(s.since_version) for s in versions]
        shown = numbers[0] if len(numbers) == 1 else f"{numbers[0]}–{numbers[-1]}"
        cases = f"{f.passed}/{f.cases}" if f.cases else ""
        label = f"{name} (deprecated)" if versions[-1].deprecated else name
        gradient = _gradient(forward, versions[-1], f)
        found.append((domain or "ai.onnx", label, shown, forward, gradient, _cuda(forward, name, f), cases))
    return found


HEAD = """# Operators

Generated by `python tests/onnx_backend/suite.py --update`, with onnx {version}; do not edit.

The command runs the ONNX project's own backend suite (`onnx.backend.test`) through `tests/onnx_backend/backend.py` on
NumPy, prints these counts, and writes this page and `tests/onnx_backend/not_passing.txt`. CI runs the suite whole
(about 20 seconds) and fails where a case that is not in that file does not pass, or one that is there does.

```
{counts}
```

How cases passed: by *kernels* of ours; with at least one node replaced by the *function body* that ONNX publishes; with
nodes *folded*: a program is static, so the Backend binds those inputs that must be known (shapes, axes, conditions, and
for `NonZero`, `Unique`, `NonMaxSuppression` and operators on strings everything) and ONNX's evaluator computes what
depends on them alone while importing; by *reference*: one operator of ours that hands the node to ONNX's evaluator.

## Cases that do not pass

{reasons}

{runtime}

## Table

Versions: the opsets in which ONNX changed the operator, first and last; models of every opset from 1 on are read.
Gradient: *yes* where one flows from an output of a case (of the suite, or of ours) to an input; its values are checked
elsewhere, each kernel's samples in float64 against central differences. ONNX calls an input of {differentiable}
operators of this table differentiable; {covered} of them have a gradient here{missing}.
CUDA: *yes* where kernels run all of it, *no* where the host computes it or some of its types. Cases: passed / all
cases of the suite with such a node, functions written out included.
"""


def document(facts: Mapping[tuple[str, str], Facts], counts: str, reasons: Mapping[str, str]) -> str:
    """The page."""
    table = rows(facts)
    open_ = {n: g for n, g in _differentiable(table).items() if not g.startswith("yes")}
    missing = f" (not: {', '.join(f'{n}: {g}' for n, g in open_.items())})" if open_ else ""
    numbers = {"differentiable": len(_differentiable(table)), "covered": len(_differentiable(table)) - len(open_)}
    shown = {"version": onnx.__version__, "counts": counts, "reasons": _listed(reasons), "missing": missing}
    shown["runtime"] = _runtime(reasons)
    lines = [HEAD.format(**numbers, **shown)]
    for domain in dict.fromkeys(r[0] for r in table):
        of = [r[1:] for r in table if r[0] == domain]
        means = Counter(r[2].split(":")[0].split(",")[0].split(" (")[0] for r in of)
        lines.append(f"### {domain}\n\n{len(of)} operators: " + ", ".join(f"{k} {n}" for k, n in means.most_common()))
        lines.append("\n| Operator | Versions | Forward | Gradient | CUDA | Cases |\n|---|---|---|---|---|---|")
        lines += ["| " + " | ".join(r) + " |" for r in of]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _runtime(reasons: Mapping[str, str]) -> str:
    """What ONNX Runtime passes of that, as `suite.py --onnxruntime` has written down."""
    version, number, *names = ONNXRUNTIME.read_text(encoding="utf-8").split()
    ours = [f"`{n}`" for n in names if n in reasons]
    return (
        f"ONNX Runtime {version}'s CPU provider passes {number} cases (`suite.py --onnxruntime` finds out); of "
        f"the cases above it passes {', '.join(ours) or 'none'}."
    )


def _differentiable(table: Iterable[tuple[str, ...]]) -> dict[str, str]:
    """Operators one of whose inputs ONNX calls differentiable, with what the table says of their gradients."""
    said = {(r[0] if r[0] != "ai.onnx" else "", r[1]): r[4] or "no forward" for r in table}
    return {
        name: said[domain, name]
        for (domain, name), versions in schemas().items()
        if (domain, name) in said and _takes_floats(versions[-1])
    }


def _listed(reasons: Mapping[str, str]) -> str:
    by: dict[str, list[str]] = {}
    for name, why in sorted(reasons.items()):
        by.setdefault(why, []).append(f"`{name}`")
    return "\n".join(f"- {', '.join(names)}: {why}" for why, names in by.items()) or "None."
