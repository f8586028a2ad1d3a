"""`rc.look` and `--look`: what a file holds and what training it takes; the command that it gives works."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import recompute as rc
from recompute.cli import command
from recompute.report.look import Look, Port

RNG = np.random.default_rng(0)
value = helper.make_tensor_value_info
make = helper.make_node


def _weights(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def _model(nodes: list[Any], inputs: list[Any], outputs: list[Any], held: dict[str, Any]) -> onnx.ModelProto:
    tensors = [onnx.numpy_helper.from_array(np.asarray(a), n) for n, a in held.items()]
    graph = helper.make_graph(nodes, "g", inputs, [value(n, 1, None) for n in outputs], tensors)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8, producer_name="mine", producer_version="1.2")


def _classifier(batch: Any = "N") -> onnx.ModelProto:
    nodes = [
        make("MatMul", ["x", "w1"], ["a"]), make("Relu", ["a"], ["r"]), make("MatMul", ["r", "w2"], ["z"]),
        make("Add", ["z", "b2"], ["logits"]), make("Softmax", ["logits"], ["p"], axis=1),
        make("Identity", ["p"], ["y"]),
    ]  # fmt: skip
    held = {"w1": _weights(6, 8), "w2": _weights(8, 4), "b2": _weights(4)}
    return _model(nodes, [value("x", 1, [batch, 6])], ["y"], held)


def _text() -> onnx.ModelProto:
    """Two open dimensions besides the batch, of which one has no name."""
    nodes = [make("Gather", ["emb", "ids"], ["e"]), make("MatMul", ["e", "mt"], ["s"])]
    inputs = [value("ids", 7, ["batch", "src len"]), value("mt", 1, ["batch", 6, "?"])]
    return _model(nodes, inputs, ["s"], {"emb": _weights(9, 6)})


def _chosen() -> onnx.ModelProto:
    def branch(name: str) -> onnx.GraphProto:
        held = [onnx.numpy_helper.from_array(_weights(6, 4), f"w{name}")]
        return helper.make_graph(
            [make("MatMul", ["x", f"w{name}"], [name])], name, [], [value(name, 1, ["N", 4])], held
        )

    nodes = [
        make("Equal", ["rate", "k"], ["c"]),
        make("If", ["c"], ["y"], then_branch=branch("t"), else_branch=branch("e")),
    ]
    inputs = [value("x", 1, ["N", 6]), value("rate", 7, [])]
    return _model(nodes, inputs, ["y"], {"k": np.array(16000, np.int64)})


def _loop() -> onnx.ModelProto:
    """A Loop whose trip count is an input: it loads only where that is bound."""
    body = helper.make_graph(
        [make("Identity", ["c"], ["d"]), make("Mul", ["a", "w"], ["b"])],
        "body",
        [value("i", 7, []), value("c", 9, []), value("a", 1, None)],
        [value("d", 9, []), value("b", 1, None)],
    )
    nodes = [make("Loop", ["n", "", "x"], ["y"], body=body)]
    return _model(nodes, [value("x", 1, ["N", 6]), value("n", 7, [])], ["y"], {"w": _weights(1, 6)})


def _recurrent() -> onnx.ModelProto:
    """A state [1, ?, 5] that has the batch along axis 1, and a length of at least 64 (a convolution's window)."""
    nodes = [
        make("Conv", ["x", "f"], ["c"]), make("ReduceMean", ["c"], ["m"], axes=[2], keepdims=0),
        make("Squeeze", ["state", "zero"], ["s"]), make("Add", ["m", "s"], ["y"]),
    ]  # fmt: skip
    inputs = [value("x", 1, [None, 1, None]), value("state", 1, [1, None, 5])]
    return _model(nodes, inputs, ["y"], {"f": _weights(5, 1, 40), "zero": np.zeros(1, np.int64)})


def test_facts_of_a_classifier() -> None:
    found = rc.look(_classifier())
    assert (found.producer, dict(found.opsets)) == ("mine 1.2", {"": 17, "ai.onnx.ml": 1})
    assert found.inputs == (Port("x", "f32", ("N", 6)),)
    assert found.operators == {"MatMul": 2, "Relu": 1, "Add": 1, "Softmax": 1, "Identity": 1}
    assert found.tensor_bytes == 4 * (48 + 32 + 4)
    head = found.heads[0]
    assert (head.weight, head.shape, head.scores, head.kind) == ("w2", (8, 4), "logits", "Softmax")
    assert (found.loss, found.loss_reason) == ("cross_entropy", "cross_entropy, as 'y' is made by Softmax")
    assert (found.trained, found.parameters, found.open) == (("w1", "w2", "b2"), 84, ("N",))
    assert (found.problem, found.fixed_batch) == ("", None)


def _rounded() -> onnx.ModelProto:
    """Two products, with activations in 8 bits between them: nothing before these trains without an option."""
    nodes = [
        make("MatMul", ["x", "w"], ["a"]),
        make("QuantizeLinear", ["a", "s", "z"], ["q"]),
        make("DequantizeLinear", ["q", "s", "z"], ["d"]),
        make("MatMul", ["d", "v"], ["y"]),
    ]
    held = {"w": _weights(6, 4), "v": _weights(4, 3), "s": np.array(0.1, np.float32), "z": np.array(0, np.int8)}
    return _model(nodes, [value("x", 1, ["N", 6])], ["y"], held)


@pytest.mark.parametrize(
    ("make_model", "options"),
    [
        (_classifier, "--batch 8"),
        (_text, "--batch 8 --dim 'src len'=16 --dim mt.2=16"),
        (_chosen, "--batch 8"),
        (_loop, "--batch 8 --set n=1"),
        (_recurrent, "--batch 8 --dim x.2=64 --dim state.1=8"),
        (lambda: _classifier(1), ""),
        (_rounded, "--batch 8 --quantization ste"),
    ],
)
def test_the_command_works(make_model: Any, options: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a model.onnx"
    onnx.save(make_model(), path)
    found = rc.look(path)
    assert found.command == f"recompute-compile '{path}' {options}".strip()
    assert str(found).endswith(f"this compiles it:\n  {found.command}")
    assert command.main(shlex.split(found.command)[1:]) == 0
    assert "peak memory" in capsys.readouterr().out


def test_a_condition_on_an_input_and_a_fixed_batch() -> None:
    found = rc.look(_chosen())
    assert str(found.conditions[0]) == "If 'y' depends on the input 'rate', compared with 16000: --set rate=16000"
    assert "both of its branches are computed" in found.notes[0]
    assert rc.look(_chosen(), set={"rate": 16000}, batch=3).command.endswith("--batch 3 --set rate=16000")
    assert "fixed at 1; --batch N opens it" in str(rc.look(_classifier(1)))


def test_what_is_quantised_and_frozen() -> None:
    nodes = [
        make("DequantizeLinear", ["q", "s"], ["w"]),
        make("MatMul", ["x", "w"], ["z"]),
        make("Add", ["z", "b"], ["y"]),
    ]
    held = {"q": np.ones((6, 4), np.int8), "s": np.array(0.1, np.float32), "b": _weights(4)}
    found = rc.look(_model(nodes, [value("x", 1, ["N", 6])], ["y"], held))
    assert (found.quantised, found.stored) == ({"DequantizeLinear": 1}, {"i8": 24, "f32": 5})
    assert found.frozen == {"a scale of integers, which do not train": 1, "integers of a frozen weight": 1}
    assert (found.heads[0].weight, found.trained) == ("q", ("b",))


def _after(*nodes: onnx.NodeProto) -> Look:
    """A product of w, and nodes behind it that make y."""
    held = {"w": _weights(4, 4), "v": _weights(1, 4)}
    return rc.look(_model([make("MatMul", ["x", "w"], ["a"]), *nodes], [value("x", 1, ["N", 4])], ["y"], held))


def test_what_no_gradient_reaches() -> None:
    found = _after(make("Round", ["a"], ["r"]), make("Mul", ["r", "v"], ["y"]))
    assert found.no_gradient == ("w",)
    assert "none reaches 1 tensor: w" in str(found)


def test_an_operator_without_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> Any:
        raise rc.ModelError("Unique has no gradient")

    monkeypatch.setattr("recompute.analysis.look.differentiate", refused)
    found = rc.look(_classifier())
    assert found.gradient_error == "Unique has no gradient"
    assert str(found).endswith(f"begin with:\n  {found.command}")


def test_an_operator_that_is_not_known() -> None:
    found = _after(make("NoSuch", ["a"], ["y"]))
    assert "NoSuch" in found.problem
    assert str(found).endswith(f"begin with:\n  {found.command}")


def test_no_default_loss() -> None:
    nodes = [make("MatMul", ["x", "w"], ["a"]), make("Sigmoid", ["a"], ["p"]), make("MatMul", ["x", "v"], ["q"])]
    found = rc.look(_model(nodes, [value("x", 1, ["N", 6])], ["p", "q"], {"w": _weights(6, 3), "v": _weights(6, 2)}))
    assert found.loss == ""
    assert "2 unlike outputs" in found.loss_reason
    assert found.command.endswith("--loss mse:p")
    assert [h.weight for h in found.heads] == ["w", "v"]


def test_sizes_are_tried_until_values_have_elements() -> None:
    """An image of 16 × 16 is nothing behind poolings that take 32 × 32."""
    pool = make("MaxPool", ["x"], ["p"], kernel_shape=[32, 32], strides=[32, 32])
    nodes = [pool, make("GlobalAveragePool", ["p"], ["g"]), make("Mul", ["g", "w"], ["y"])]
    found = rc.look(_model(nodes, [value("x", 1, [None, 3, "h", "h"])], ["y"], {"w": _weights(3, 1, 1)}))
    assert found.command.endswith("--batch 8 --dim h=64")
    assert "the window is larger than the padded input" in rc.look(
        _model(nodes, [value("x", 1, [None, 3, 8, 8])], ["y"], {"w": _weights(3, 1, 1)})
    ).problem  # fmt: skip


def test_html_and_text() -> None:
    found = rc.look(_classifier())
    page = found._repr_html_()
    assert page.startswith("<table>")
    assert "<tr><th>loss</th><td>cross_entropy, as &#x27;y&#x27; is made by Softmax" in page
    assert len(str(found).splitlines()) < 24
    assert max(map(len, str(found).splitlines())) <= 120


# -- the command line ------------------------------------------------------------------------------------


def test_a_bare_command_looks_where_something_is_open(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "open.onnx"
    onnx.save(_text(), path)
    assert command.main([str(path)]) == 2
    said = capsys.readouterr()
    assert f"recompute-compile {path} --batch 8 --dim 'src len'=16 --dim mt.2=16" in said.out
    assert "dimensions of the inputs are open" in said.err
    assert command.main([str(path), "--batch", "2"]) == 2
    assert "begin with" not in capsys.readouterr().out


def test_a_state_that_fixes_the_batch() -> None:
    inputs = [value("x", 1, ["N", 3]), value("h", 1, [1, 3])]
    nodes = [make("MatMul", ["x", "w"], ["a"]), make("Concat", ["a", "h"], ["y"], axis=1)]
    found = rc.look(_model(nodes, inputs, ["y"], {"w": _weights(3, 3)}))
    assert (found.problem, found.command.split(" --loss")[0]) == ("", "recompute-compile MODEL.onnx --batch 1")


def test_a_bare_command_looks_where_nothing_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "relu.onnx"
    onnx.save(_model([make("Relu", ["x"], ["y"])], [value("x", 1, ["N", 6])], ["y"], {}), path)
    assert command.main([str(path)]) == 2
    said = capsys.readouterr()
    assert "  operators   1 Relu" in said.out
    assert "depends on no parameter" in said.err
    assert command.main([str(path), "--loss", "mse:y"]) == 2  # something is asked for: the error alone
    assert "operators" not in capsys.readouterr().out


def test_look_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "net.onnx"
    onnx.save(_classifier(), path)
    assert command.main([str(path), "--look", "--json", "-"]) == 0
    told = json.loads(capsys.readouterr().out)["look"]
    assert told == json.loads(json.dumps(rc.look(path).to_dict()))
    assert command.main([str(path), "--look", "--batch", "3"]) == 0
    assert "--batch 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["gpt2-tiny", "--look"], "'gpt2-tiny' is none"),
        (["net.onnx", "--look", "--run", "1"], "leave out --run"),
        (["net.onnx", "--look", "--loss", "mse"], "leave out --loss"),
    ],
)
def test_what_look_does_not_take(options: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(options) == 2
    assert why in capsys.readouterr().err


def test_a_broken_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.onnx").write_bytes(b"nothing")
    with pytest.raises(rc.ModelError, match="no ONNX model"):
        rc.look(tmp_path / "x.onnx")
    assert isinstance(rc.look(_classifier()), Look)
