"""The ONNX project's backend suite, run through our Backend: one outcome for each case.

python tests/onnx_backend/suite.py                    all cases, counts by category
python tests/onnx_backend/suite.py -v resize          cases whose name holds "resize" (or a regular expression)
python tests/onnx_backend/suite.py --op Resize -v     cases that have a node Resize
python tests/onnx_backend/suite.py --trace NAME       one case: its model, our program, the error where it rises
python tests/onnx_backend/suite.py --onnxruntime      all cases in ONNX Runtime: which of them we do not pass
python tests/onnx_backend/suite.py --update           all cases; rewrites not_passing.txt and docs/operators.md
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.backend.test
import operator_table

NOT_PASSING = Path(__file__).with_name("not_passing.txt")
DATA = Path(onnx.backend.test.__file__).parent / "data"
CATEGORIES = ("node", "simple", "pytorch-converted", "pytorch-operator", "light")


@dataclass
class Case:
    """One case of the suite; `source` is onnx's own description of it."""

    name: str
    category: str
    source: Any

    def model(self) -> onnx.ModelProto:
        """The model."""
        if self.source.model is not None:
            return self.source.model
        if self.category == "light":
            return onnx.load(DATA / "light" / Path(self.source.url).name)
        return onnx.load(Path(self.source.model_dir) / "model.onnx")

    def data(self, model: onnx.ModelProto) -> Iterator[tuple[list[Any], list[Any]]]:
        """Pairs of inputs and expected outputs."""
        if self.source.data_sets is not None:
            for ins, outs in self.source.data_sets:
                yield [_plain(a) for a in ins], [_plain(a) for a in outs]
        elif self.category == "light":
            yield _light_data(Path(self.source.url).stem, model)
        else:
            for folder in sorted(Path(self.source.model_dir).glob("test_data_set*")):
                given = _read(folder, "input", model.graph.input), _read(folder, "output", model.graph.output)
                yield given

    def operators(self) -> set[str]:
        """Operators in the model."""
        return {n.op_type for n in self.model().graph.node}


@dataclass
class Outcome:
    """How a case went.

    `status`: "passed", "failed" (wrong results, or an error that is not ours) or "unsupported" (our error says why).
    `how`: the weakest means by which a node was settled: "kernels", "function bodies", "folded" (of run-time inputs,
    by onnx's evaluator) or "reference".
    """

    status: str
    how: str = ""
    reason: str = ""


def _plain(a: Any) -> Any:
    return onnx.numpy_helper.to_array(a) if isinstance(a, onnx.TensorProto) else a


def _light_data(stem: str, model: onnx.ModelProto) -> tuple[list[Any], list[Any]]:
    """The input that onnx's runner makes for its light models, and the output beside them."""
    weights = {t.name for t in model.graph.initializer}
    inputs = []
    for i in model.graph.input:
        if i.name not in weights:
            shape = tuple(d.dim_value or 1 for d in i.type.tensor_type.shape.dim)
            n = int(np.prod(shape))
            inputs.append((np.arange(n).reshape(shape) / n).astype(np.float32))
    return inputs, [_tensor(DATA / "light" / f"{stem}_output_0.pb")]


def _tensor(path: Path) -> np.ndarray:
    return onnx.numpy_helper.to_array(onnx.load_tensor(path))


def _read(folder: Path, what: str, infos: Any) -> list[Any]:
    found: list[Any] = []
    for i, info in zip(range(len(list(folder.glob(f"{what}_*.pb")))), infos, strict=False):
        raw = (folder / f"{what}_{i}.pb").read_bytes()
        if info.type.HasField("sequence_type"):
            sequence = onnx.SequenceProto.FromString(raw)
            found.append(onnx.numpy_helper.to_list(sequence))
        elif info.type.HasField("optional_type"):
            found.append(onnx.numpy_helper.to_optional(onnx.OptionalProto.FromString(raw)))
        else:
            found.append(onnx.numpy_helper.to_array(onnx.TensorProto.FromString(raw)))
    return found


@functools.lru_cache(maxsize=1)
def load_cases() -> tuple[Case, ...]:
    """All cases, by category and name.  Takes about five seconds: onnx makes the node cases anew."""
    from onnx.backend.test.loader import load_model_tests

    found = []
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        for category in CATEGORIES:
            kind = "real" if category == "light" else category
            for source in sorted(load_model_tests(kind=kind), key=lambda c: c.name):
                found.append(Case(source.name, category, source))
    return tuple(found)


def run_case(case: Case, facts: dict[Any, Any] | None = None) -> Outcome:
    """Runs a case; `facts` gets what it shows of its operators (see operator_table)."""
    programs: list[Any] = []
    outcome = _run(case, programs)
    if facts is not None:
        operator_table.gather(case, outcome, programs, facts)
    return outcome


def _run(case: Case, programs: list[Any]) -> Outcome:
    from backend import Backend

    from recompute.errors import RecomputeError

    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            model = case.model()
            prepared = Backend.prepare(model)
            for inputs, wanted in case.data(model):
                _compare(case, wanted, prepared.run(inputs))
        programs += [s.program for s in prepared.programs()]
        return Outcome("passed", _how(prepared))
    except RecomputeError as e:
        lines = [line.strip() for line in str(e).splitlines()]
        return Outcome("unsupported", reason=" ".join(lines).replace("this model cannot be trained here: ", ""))
    except AssertionError as e:
        return Outcome("failed", reason=" ".join(str(e).split())[:300])
    except Exception as e:
        return Outcome("failed", reason=f"{type(e).__name__}: {' '.join(str(e).split())[:300]}")


def _compare(case: Case, wanted: list[Any], results: Any) -> None:
    """By onnx's own rule and tolerances; the parts of a sequence one by one."""
    from onnx.backend.test.runner import Runner

    assert len(wanted) == len(results), f"{len(results)} outputs, not {len(wanted)}"
    for want, result in zip(wanted, results, strict=True):
        if isinstance(want, (list, tuple)) and isinstance(result, (list, tuple)):
            _compare(case, list(want), result)
        elif want is None or result is None:
            assert want is result, f"{type(result).__name__}, not {type(want).__name__}"
        else:
            Runner.assert_similar_outputs([want], [result], case.source.rtol, case.source.atol)


def _how(prepared: Any) -> str:
    settled = set().union(*(s.means for s in prepared.programs()))
    return next((m for m in ("reference", "folded", "function bodies") if m in settled), "kernels")


def select(pattern: str | None, op: str | None) -> Iterable[Case]:
    """Cases whose name matches a regular expression and that have a node of an operator."""
    for case in load_cases():
        if pattern and not re.search(pattern, case.name):
            continue
        if op and op not in case.operators():
            continue
        yield case


def read_not_passing() -> dict[str, str]:
    """Cases that need not pass, with the reason."""
    lines = NOT_PASSING.read_text(encoding="utf-8").splitlines()
    return dict(line.split("  ", 1) for line in lines if line and not line.startswith("#"))


#: why cases will not pass, by regular expressions on their names
REASONS = {
    r"bernoulli|training_dropout": "random: ONNX does not say which numbers are drawn, the suite wants NumPy's",
    r"attention_4d_causal_fp16": "float16: the expected values are further from exact arithmetic than ours",
    r"resize_downsample_scales_\w+_align_corners": (
        "the suite divides by a fractional length; the specification, PyTorch and ONNX Runtime by that of the result"
    ),
    r"maxunpool_export_with_output_shape": (
        "the indices are of another shape than the result, which PyTorch's never are"
    ),
}


def reasons(outcomes: dict[str, Outcome]) -> dict[str, str]:
    """Why cases do not pass."""
    found = {}
    for name, o in outcomes.items():
        if o.status != "passed":
            known = next((why for pattern, why in REASONS.items() if re.search(pattern, name)), None)
            found[name] = known or f"{o.status}: {o.reason[:160]}".rstrip()
    return found


def write_not_passing(outcomes: dict[str, Outcome]) -> None:
    """Writes down the cases that do not pass."""
    rest = sorted(f"{name}  {why}" for name, why in reasons(outcomes).items())
    head = ["# Cases of ONNX's backend suite that do not pass, and why.  `suite.py --update` writes this file."]
    NOT_PASSING.write_text("\n".join([*head, *rest]) + "\n", encoding="utf-8")


def counts(outcomes: dict[str, Outcome]) -> str:
    """A table of outcomes by category, and the means by which cases passed."""
    category = {c.name: c.category for c in load_cases()}
    lines = [f"{'category':18} {'cases':>6} {'passed':>7} {'unsupported':>12} {'failed':>7}"]
    for wanted in (*CATEGORIES, "all"):
        of = Counter(o.status for n, o in outcomes.items() if wanted in ("all", category[n]))
        if sum(of.values()):
            numbers = f"{of['passed']:7} {of['unsupported']:12} {of['failed']:7}"
            lines.append(f"{wanted:18} {sum(of.values()):6} {numbers}")
    means = Counter(o.how for o in outcomes.values() if o.status == "passed")
    lines.append("passed by: " + ", ".join(f"{how} {n}" for how, n in means.most_common()))
    return "\n".join(lines)


def main() -> int:
    """Runs what the arguments ask for; 1 where a case failed or is unsupported."""
    parser = argparse.ArgumentParser(description="ONNX's backend suite through recompute's Backend")
    parser.add_argument("pattern", nargs="?", help="regular expression for names of cases")
    parser.add_argument("--op", help="only cases with a node of this operator")
    parser.add_argument("-v", action="store_true", help="one line for each case, not only for those that do not pass")
    parser.add_argument("--trace", action="store_true", help="let errors through: with one case, to see where")
    parser.add_argument("--update", action="store_true", help="rewrite not_passing.txt")
    parser.add_argument("--onnxruntime", action="store_true", help="which cases ONNX Runtime's CPU provider passes")
    args = parser.parse_args()
    if args.onnxruntime:
        return in_onnxruntime()
    outcomes: dict[str, Outcome] = {}
    update = args.update and not (args.pattern or args.op)
    facts: dict[Any, Any] | None = {} if update else None
    start = time.perf_counter()
    for case in select(args.pattern, args.op):
        if args.trace:
            trace(case)
        outcomes[case.name] = o = run_case(case, facts)
        if args.v or o.status != "passed":
            print(f"{o.status:12} {case.name}: {o.reason or o.how}", flush=True)
    print(counts(outcomes))
    if facts is not None:
        write_not_passing(outcomes)
        operator_table.gather_ours(facts)
        page = operator_table.document(facts, counts(outcomes), reasons(outcomes))
        operator_table.DOCUMENT.write_text(page, encoding="utf-8")
    print(f"{time.perf_counter() - start:.0f} s")
    return int(any(o.status != "passed" for o in outcomes.values()))


def in_onnxruntime() -> int:
    """Writes onnxruntime.txt (see operator_table); 1 where ONNX Runtime passes a case that we do not."""
    import onnxruntime as ort

    passed = [c.name for c in load_cases() if _passes_in_runtime(ort, c)]
    more = [n for n in passed if n in read_not_passing()]
    operator_table.ONNXRUNTIME.write_text("\n".join([ort.__version__, str(len(passed)), *more]) + "\n")
    print(f"ONNX Runtime {ort.__version__} passes {len(passed)} cases, these are not ours:", *(more or ["none"]))
    return int(bool(more))


def _passes_in_runtime(ort: Any, case: Case) -> bool:
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            model = case.model()
            options = ort.SessionOptions()
            options.intra_op_num_threads, options.log_severity_level = 1, 4
            session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
            for inputs, wanted in case.data(model):
                _compare(case, wanted, _run_in_runtime(ort, session, model, inputs))
        return True
    except Exception:  # ONNX Runtime's errors have no base of their own
        return False


def _run_in_runtime(ort: Any, session: Any, model: onnx.ModelProto, inputs: list[Any]) -> list[Any]:
    """Element types that NumPy itself does not have travel as bits."""
    kinds = {i.name: i.type.tensor_type.elem_type for i in model.graph.input}
    arrays = [np.asarray(a) if isinstance(a, (np.ndarray, np.generic)) else a for a in inputs]
    feed = dict(zip([i.name for i in session.get_inputs()], arrays, strict=False))
    if any(_is_odd(a) for a in feed.values()):
        values = {n: _ort_value(ort.OrtValue, a, kinds[n]) for n, a in feed.items()}
        results = [r.numpy() for r in session.run_with_ort_values(None, values)]
    else:
        results = session.run(None, feed)
    for i, o in enumerate(model.graph.output):
        t = onnx.helper.tensor_dtype_to_np_dtype(o.type.tensor_type.elem_type or 1)
        if t.kind == "V" and results[i].dtype.itemsize == t.itemsize:
            results[i] = results[i].view(t)
    return results


def _is_odd(a: Any) -> bool:
    return isinstance(a, np.ndarray) and a.dtype.kind == "V"


def _ort_value(cls: Any, a: np.ndarray, kind: int) -> Any:
    if not _is_odd(a):
        return cls.ortvalue_from_numpy(a)
    return cls.ortvalue_from_numpy_with_onnx_type(a.view({1: np.uint8, 2: np.uint16}[a.dtype.itemsize]), kind)


def trace(case: Case) -> None:
    """Runs a case with errors let through, and prints its programs."""
    from backend import Backend

    model = case.model()
    print(onnx.printer.to_text(model))
    prepared = Backend.prepare(model)
    for inputs, wanted in case.data(model):
        results = prepared.run(inputs)
        for s in prepared.programs():
            print(s.program)
        _compare(case, wanted, results)


if __name__ == "__main__":
    sys.exit(main())
