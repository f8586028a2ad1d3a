"""Other networks on the axes of a mesh, and what else a step has: experts, channels, clipping, checkpoints."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from sharded_cases import adam, communications, ranks_of, same_as_one_rank

import recompute as rc
from recompute.communication.mesh import Mesh
from recompute.errors import UsageError
from recompute.language.program import Program
from recompute.training.parallel import DataParallel

GPT = {"layers": 2, "hidden": 16, "heads": 4, "vocab": 24, "seq": 8, "context": 8}


def gpt() -> tuple[Program, Any]:
    program = rc.load(rc.models.build("gpt2-tiny", **GPT), batch=4)
    return program, rc.losses.cross_entropy(program["logits"])


def built(nodes: list[Any], weights: dict[str, Any], shape: list[Any], outputs: int) -> tuple[Program, Any]:
    graph = helper.make_graph(
        nodes, "network", [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", outputs])],
        [numpy_helper.from_array(np.asarray(a, np.int64 if "." in n else np.float32), n) for n, a in weights.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    onnx.checker.check_model(model)
    program = rc.load(model, batch=4)
    return program, rc.losses.cross_entropy(program["logits"])


def experts() -> tuple[Program, Any]:
    """x f32[N, 6, 8] → four experts of two matrices each; gates share every row among them by weight."""
    g = np.random.default_rng(1)
    weights = {"gate": g.standard_normal((8, 4)), "up": g.standard_normal((4, 8, 16)) * 0.3,
               "down": g.standard_normal((4, 16, 8)) * 0.3, "head": g.standard_normal((8, 3)),
               "one.axis": [1], "last.axis": [3]}  # fmt: skip
    nodes = [
        helper.make_node("MatMul", ["x", "gate"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["share"], axis=-1),
        helper.make_node("Transpose", ["share"], ["by_expert"], perm=[0, 2, 1]),
        helper.make_node("Unsqueeze", ["by_expert", "last.axis"], ["column"]),
        helper.make_node("Unsqueeze", ["x", "one.axis"], ["rows"]),
        helper.make_node("Mul", ["rows", "column"], ["dispatched"]),
        helper.make_node("MatMul", ["dispatched", "up"], ["hidden"]),
        helper.make_node("Relu", ["hidden"], ["active"]),
        helper.make_node("MatMul", ["active", "down"], ["given"]),
        helper.make_node("ReduceSum", ["given", "one.axis"], ["combined"], keepdims=0),
        helper.make_node("Add", ["combined", "x"], ["y"]),
        helper.make_node("ReduceMean", ["y", "one.axis"], ["pooled"], keepdims=0),
        helper.make_node("MatMul", ["pooled", "head"], ["logits"]),
    ]
    return built(nodes, weights, ["N", 6, 8], 3)


def channels() -> tuple[Program, Any]:
    """x f32[N, 2, 6, 6] → two convolutions with batch statistics between them, and a sum of both."""
    g = np.random.default_rng(2)
    weights = {"first": g.standard_normal((4, 2, 3, 3)), "a": g.standard_normal((8, 4, 3, 3)) * 0.3,
               "scale": np.ones(8), "bias": np.zeros(8), "mean": np.zeros(8), "var": np.ones(8),
               "b": g.standard_normal((4, 8, 3, 3)) * 0.3, "fc": g.standard_normal((4, 3)),
               "offset": np.zeros(3)}  # fmt: skip
    nodes = [
        helper.make_node("Conv", ["x", "first"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Conv", ["c", "a"], ["d"], pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["d", "scale", "bias", "mean", "var"], ["n"]),
        helper.make_node("Relu", ["n"], ["r"]),
        helper.make_node("Conv", ["r", "b"], ["e"], pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["e", "c"], ["s"]),
        helper.make_node("GlobalAveragePool", ["s"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("Gemm", ["f", "fc", "offset"], ["logits"]),
    ]
    return built(nodes, weights, ["N", 2, 6, 6], 3)


@pytest.mark.parametrize("mesh", ["ep=2", "ep=4", "dp=2,ep=2"])
def test_experts(mesh: str) -> None:
    """Each rank has its experts' matrices, and their outputs are added up: one sum in each direction."""
    programs = same_as_one_rank(experts, mesh)
    assert {n: v.cuts[0][1].place.axis for n, v in programs[0].divided.items()} == {"up": 0, "down": 0}
    assert communications(programs[0].block)[("forward", "AllReduce")] == 1


def test_experts_in_16_bits() -> None:
    """Their products read casts of the matrices."""
    programs = [p for p, _ in ranks_of(experts, "ep=2", lambda: rc.amp.MixedPrecision(adam(), "bf16"))]
    assert set(programs[0].divided) >= {"up", "down"}


def added() -> tuple[Program, Any]:
    """x f32[N, 6, 8] → its product with the sum of two matrices, which have one gradient."""
    g = np.random.default_rng(1)
    weights = {"p": g.standard_normal((8, 5)), "q": g.standard_normal((8, 5)), "head": g.standard_normal((5, 3)),
               "one.axis": [1]}  # fmt: skip
    nodes = [
        helper.make_node("Add", ["p", "q"], ["matrix"]),
        helper.make_node("MatMul", ["x", "matrix"], ["y"]),
        helper.make_node("ReduceMean", ["y", "one.axis"], ["pooled"], keepdims=0),
        helper.make_node("MatMul", ["pooled", "head"], ["logits"]),
    ]
    return built(nodes, weights, ["N", 6, 8], 3)


@pytest.mark.parametrize("zero", [1, 2])
def test_parameters_with_one_gradient_have_one_sum(zero: int) -> None:
    block = same_as_one_rank(added, "dp=2,cp=2", zero=zero, micro_batches=4, accumulate="running")[0].block
    assert communications(block)[("backward", "AllReduce")] == 2


@pytest.mark.parametrize("mesh", ["tp=2", "tp=4", "dp=2,tp=2"])
def test_channels(mesh: str) -> None:
    """Output channels of the first convolution, their statistics, input channels of the second."""
    programs = same_as_one_rank(channels, mesh) if "dp" not in mesh else [p for p, _ in ranks_of(channels, mesh)]
    assert {"a", "scale", "bias", "mean", "var", "b"} <= set(programs[0].divided)
    assert communications(programs[0].block)[("forward", "AllReduce")] == 1


CLIPS = {
    "all": lambda: adam(grad_clip=rc.clip.ClipGradByGlobalNorm(0.1)),
    "each": lambda: adam(grad_clip=rc.clip.ClipGradByNorm(0.01)),
}


@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,tp=2"])
@pytest.mark.parametrize("clip", list(CLIPS))
def test_norms_count_parts_once(clip: str, mesh: str) -> None:
    same_as_one_rank(gpt, mesh, CLIPS[clip])


@pytest.mark.parametrize("sums", ["kept", "again"])
@pytest.mark.parametrize("mesh", ["tp=2", "cp=2", "dp=2,tp=2"])
def test_recomputation_gathers_again(mesh: str, sums: str) -> None:
    """What is gathered is not kept for it; a sum over ranks is repeated only if no checkpoint is behind it."""
    inside = ["h.0.attn.out", "h.1.attn.out"] if sums == "kept" else []

    def with_checkpoints() -> Any:
        return rc.RecomputeOptimizer(adam()).set_checkpoints(["embeddings.out", "h.0.out", "h.1.out", *inside])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rc.RecomputeWarning)
        program = same_as_one_rank(gpt, mesh, with_checkpoints)[0]
    again = [o for o in program.operators if o.role is rc.Role.RECOMPUTE]
    found = {o.op.name for o in again if o.op.communicates == "begin"}
    assert found == {"AllGather", *(["ReduceScatter"] if sums == "again" and "tp" in mesh else [])}


@pytest.mark.parametrize("mesh", ["tp=2,cp=2", "dp=2,tp=2,cp=2"])
def test_several_axes(mesh: str) -> None:
    """Whatever their order, the sequence is cut by cp first, and tp divides what that leaves."""
    block = same_as_one_rank(gpt, mesh)[0].block
    assert {o.op.axis for o in block.operators if o.op.communicates == "begin"} >= {"cp", "tp"}  # type: ignore[attr-defined]


def test_micro_batches_number_their_own_communication() -> None:
    """Two micro-batches a rank: twice the communication of one."""
    one, two = (communications(same_as_one_rank(gpt, "dp=2,tp=2", micro_batches=n)[0].block) for n in (2, 4))
    for kind in ("ReduceScatter", "AllGather"):
        assert two["backward", kind] == 2 * one["backward", kind]


def test_norms_of_whole_parameters_are_refused() -> None:
    with pytest.raises(UsageError, match="mesh tp=2 and Lamb are not combined"):
        DataParallel(rc.Lamb(), Mesh.of(tp=2), 0, batch=4).minimize(gpt()[1])


def test_estimates_are_of_the_parts() -> None:
    """Peaks fall with the ranks, without the sequence less than with it; each axis has its own bytes."""
    options = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 32, "seq": 64, "context": 64}
    found = {
        mesh: rc.estimate("gpt2-tiny", mesh=mesh, batch=4, options=options).ranks for mesh in ("dp=1", "tp=2", "tp=4")
    }
    assert all(e is not None for e in found.values())
    peaks = {mesh: e.peak_bytes for mesh, e in found.items()}  # type: ignore[union-attr]
    print(peaks)
    assert peaks["tp=4"] < 0.7 * peaks["tp=2"] < 0.7 * 0.7 * peaks["dp=1"]
    assert {c.axis for c in found["tp=2"].channels} == {"tp"}  # type: ignore[union-attr]
