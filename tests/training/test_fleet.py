"""Fleet: Paddle's strategy, what becomes of an optimizer, and scripts on 1, 2 and 4 ranks."""

from __future__ import annotations

import contextlib
import io
import runpy
import subprocess
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed_cases import environment
from fleet_cases import at

import recompute as rc
from recompute import fleet
from recompute.communication.lockstep import LockStep
from recompute.errors import RecomputeError, UsageError
from recompute.ops.optimizer.norm_updates import LambUpdate, LarsUpdate
from recompute.training.fleet.fields import CONFIGS, REFUSED, SWITCHES, WITHOUT_EFFECT

pytestmark = pytest.mark.usefixtures("before_fleet")
SCRIPT = Path(__file__).parent / "fleet_script.py"
EXAMPLE = Path(__file__).parents[2] / "examples" / "fleet.py"
#: Paddle's scalar fields (version 3.3)
_SCALARS = """amp recompute localsgd dgc gradient_merge lars lamb pipeline elastic auto a_sync sync_nccl_allreduce
nccl_comm_num use_hierarchical_allreduce hierarchical_allreduce_inter_nranks sync_batch_norm fuse_all_reduce_ops
fuse_grad_size_in_MB fuse_grad_size_in_TFLOPS fuse_grad_size_in_num last_comm_group_size_MB cudnn_exhaustive_search
conv_workspace_size_limit cudnn_batchnorm_spatial_persistent adaptive_localsgd fp16_allreduce sharding
find_unused_parameters tensor_parallel without_graph_optimization calc_comm_same_stream asp fuse_grad_merge semi_auto
adam_d2sum auto_search heter_ccl_mode is_fl_ps_mode with_coordinator qat split_data"""
SCALARS = _SCALARS.split()


def forward(batch: int = 2) -> tuple[rc.Program, rc.Variable]:
    program = rc.load(rc.models.build("mlp"), batch=batch)
    return program, rc.losses.cross_entropy(program["pred.logits"])


def minimized(optimizer: Any, strategy: fleet.DistributedStrategy | None = None, batch: int = 2) -> rc.Program:
    program, loss = forward(batch)
    fleet.distributed_optimizer(optimizer, strategy).minimize(loss)
    return program


# -- the strategy -----------------------------------------------------------------------------------------------------


def test_paddles_fields_are_known() -> None:
    """Each is one of three kinds, and can be set to the value it has."""
    assert len(SCALARS) == 41
    assert sorted(SCALARS) == sorted({**SWITCHES, **WITHOUT_EFFECT, **REFUSED})
    strategy = fleet.DistributedStrategy()
    for name in (*SCALARS, *CONFIGS):
        setattr(strategy, name, getattr(strategy, name))
    assert repr(strategy) == "DistributedStrategy()"


@pytest.mark.parametrize("name", list(REFUSED))
def test_refused_switches_say_why(name: str) -> None:
    strategy = fleet.DistributedStrategy()
    setattr(strategy, name, False)
    with pytest.raises(UsageError, match=rf"strategy\.{name} = True: .{{20}}"):
        setattr(strategy, name, True)
    assert getattr(strategy, name) is False


@pytest.mark.parametrize("name", list(WITHOUT_EFFECT))
def test_what_only_tunes_changes_nothing(name: str) -> None:
    strategy, (default, why) = fleet.DistributedStrategy(), WITHOUT_EFFECT[name]
    setattr(strategy, name, not default if isinstance(default, bool) else default + 1)
    assert repr(strategy).startswith(f"DistributedStrategy({name}=") and len(why) > 15
    with pytest.raises(UsageError, match=f"strategy.{name} must be"):
        setattr(strategy, name, "much")


@pytest.mark.parametrize(
    ("name", "configs", "why"),
    [
        ("sharding_configs", {"stage": 4}, r"\['stage'\] is 4, it must be 1 \(state"),
        ("sharding_configs", {"offload": True}, "must be False: state stays"),
        ("sharding_configs", {"mp_degree": 2}, "is 2, it must be 1"),
        ("sharding_configs", {"stages": 1}, r"no key 'stages' \(did you mean stage"),
        ("hybrid_configs", {"pp_degree": 2}, "'pp_degree'.* must be 1"),
        ("hybrid_configs", {"dp_degree": 0}, "must be a number from 1"),
        ("amp_configs", {"use_pure_fp16": True}, "parameters and their updates stay in float32"),
        ("amp_configs", {"custom_white_list": ["mul"]}, "custom_black_varnames"),
        ("amp_configs", {"decr_every_n_nan_or_inf": 2}, "must be 1"),
        ("gradient_scale_configs", {"scale_strategy": "customized"}, "must be 'avg' or 'sum'"),
        ("gradient_merge_configs", {"k_steps": 0}, "must be a number from 1"),
        ("recompute_configs", {"enable_tuning": True}, "give a budget"),
        ("localsgd_configs", {"steps": 1}, "no key 'steps'"),
    ],
)
def test_wrong_configs(name: str, configs: dict[str, Any], why: str) -> None:
    strategy = fleet.DistributedStrategy()
    with pytest.raises(UsageError, match=why):
        setattr(strategy, name, configs)
    assert getattr(strategy, name) == getattr(fleet.DistributedStrategy(), name)


def test_parameter_server_messages() -> None:
    with pytest.raises(UsageError, match="no parameter servers"):
        fleet.DistributedStrategy().downpour_table_param = []
    with pytest.raises(AttributeError):
        fleet.DistributedStrategy().downpour_table_param  # noqa: B018


# -- what becomes of an optimizer -------------------------------------------------------------------------------------


def updates(program: rc.Program, kind: type) -> list[Any]:
    return [o.op for o in program.operators if isinstance(o.op, kind)]


def test_lars_and_lamb_replace_optimizers() -> None:
    strategy = fleet.DistributedStrategy()
    strategy.lars = True
    strategy.lars_configs = {"lars_coeff": 0.5, "lars_weight_decay": 0.25, "exclude_from_weight_decay": ["bias"]}
    found = updates(minimized(rc.Momentum(0.1, momentum=0.7), strategy), LarsUpdate)
    assert {op.weight_decay for op in found} == {0.25, 0.0}
    assert {(op.momentum, op.coefficient) for op in found} == {(0.7, 0.5)}
    strategy = fleet.DistributedStrategy()
    strategy.lamb = True
    found = updates(minimized(rc.Adam(0.1, beta1=0.5), strategy), LambUpdate)
    assert {(op.beta1, op.weight_decay) for op in found} == {(0.5, 0.01)}


@pytest.mark.parametrize(
    ("switch", "optimizer", "why"),
    [
        ("lars", rc.Adam(), "lars replaces Momentum, but the optimizer is Adam"),
        ("lamb", rc.AdamW(), "lamb replaces Adam, but the optimizer is AdamW"),
        (
            "lamb",
            rc.Adam(weight_decay=0.1),
            r"Adam's weight_decay are not combined.*lamb_configs\['lamb_weight_decay'\]",
        ),
        ("lamb", rc.Adam(amsgrad=True), "Adam's amsgrad are not combined"),
        ("lars", rc.Nesterov(), "Momentum's use_nesterov are not combined"),
    ],
)
def test_what_lars_and_lamb_cannot_replace(switch: str, optimizer: Any, why: str) -> None:
    strategy = fleet.DistributedStrategy()
    setattr(strategy, switch, True)
    with pytest.raises(UsageError, match=why):
        fleet.distributed_optimizer(optimizer, strategy)


@pytest.mark.parametrize(
    ("set_up", "why"),
    [
        ({"hybrid_configs": {"dp_degree": 4}}, r"hybrid_configs\['dp_degree'\] is 4, but there are 2 ranks"),
        ({"sharding": True, "sharding_configs": {"sharding_degree": 8}}, r"'sharding_degree'\] is 8, but there are 2"),
        (
            {"hybrid_configs": {"sharding_degree": 4}},
            r"hybrid_configs\['sharding_degree'\] is 4, but there are 2 ranks",
        ),
        (
            {
                "sharding": True,
                "sharding_configs": {"gradient_merge_acc_step": 3},
                "gradient_merge": True,
                "gradient_merge_configs": {"k_steps": 2},
            },
            r"gradient_merge_configs\['k_steps'\] is 2 and .*\['gradient_merge_acc_step'\] is 3",
        ),
    ],
)
def test_degrees_that_are_not_those_of_the_ranks(set_up: dict[str, Any], why: str) -> None:
    at(0, 2)
    strategy = fleet.DistributedStrategy()
    for name, value in set_up.items():
        setattr(strategy, name, value)
    with pytest.raises(UsageError, match=why):
        fleet.distributed_optimizer(rc.Adam(), strategy)


def test_other_ways_to_say_sharding_and_merge() -> None:
    at(1, 2)
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 1, "sharding_degree": 2}
    strategy.sharding_configs = {"gradient_merge_acc_step": 3, "stage": 2}
    program = minimized(rc.Adam(), strategy)
    assert program.sharded and program.block.inputs[0].shape[0] == 6
    strategy.sharding_configs = {"dp_degree": 1}
    fleet.init(fleet.UserDefinedRoleMaker(current_id=1, worker_num=2), strategy=strategy)
    assert fleet.get_hybrid_communicate_group().get_sharding_parallel_rank() == 1
    assert minimized(rc.Adam()).sharded, "init's strategy is the default"


def test_sums_of_one_rank_are_those_of_many() -> None:
    """The optimizer may merge gradients itself: sums are made in the tree in any case."""
    fleet.init()
    assert isinstance(fleet.distributed_optimizer(rc.GradientMerge(rc.SGD(), 4)), rc.DataParallel)
    strategy = fleet.DistributedStrategy()
    strategy.sharding_configs = {"dp_degree": 4}  # which is read with sharding only
    assert isinstance(fleet.distributed_optimizer(rc.SGD(), strategy), rc.SGD)


def of_all(ranks: int, strategy: fleet.DistributedStrategy | None, batch: int) -> dict[str, np.ndarray]:
    """Weights after a step of all ranks in one process."""
    programs = []
    for rank in range(ranks):
        at(rank, ranks)
        programs.append(minimized(rc.SGD(0.5), strategy, batch))
    blocks = [p.block for p in programs]
    data = {v.name: np.array(programs[0].data[v.name]) for v in blocks[0].persistent() if v.name in programs[0].data}
    g = np.random.default_rng(0)
    each = blocks[0].inputs[0].shape[0]
    whole = {
        "x": g.standard_normal((each * ranks, 32)).astype(np.float32),
        "label": g.integers(0, 2, (each * ranks,)),
    }
    machine = LockStep(blocks, rc.Mesh.of(dp=ranks), data)
    machine.run([{n: a[r * each : (r + 1) * each] for n, a in whole.items()} for r in range(ranks)])
    return {v.name: machine.state[0][v.name] - data[v.name] for v in blocks[0].parameters}


def test_gradients_of_ranks_are_added_up_on_request() -> None:
    """Twice the step with two ranks, whatever micro-batches they have; merged sums are of a rank's micro-batches."""
    strategy = fleet.DistributedStrategy()
    mean = of_all(2, strategy, 4)
    strategy.gradient_scale_configs = {"scale_strategy": "sum"}
    added = of_all(2, strategy, 4)
    assert all(a.any() for a in mean.values())
    strategy.gradient_merge, strategy.gradient_merge_configs = True, {"k_steps": 2, "avg": False}
    both = of_all(2, strategy, 2)
    strategy.gradient_scale_configs = {"scale_strategy": "avg"}
    merged = of_all(2, strategy, 2)
    for n in mean:
        np.testing.assert_allclose(added[n], 2 * mean[n], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(both[n], 4 * mean[n], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(merged[n], 2 * mean[n], rtol=1e-4, atol=1e-6)


# -- running it -------------------------------------------------------------------------------------------------------


def test_one_rank_trains_as_without_fleet(tmp_path: Path) -> None:
    program, loss = forward()
    rc.Adam().minimize(loss)
    fleet.init()
    other = minimized(rc.Adam())
    assert rc.show(program.block) == rc.show(other.block) and other.mesh is None
    fleet.save_persistables(rc.Executor(), str(tmp_path / "new"), other)
    rc.load_state(other, tmp_path / "new" / "persistables.safetensors")
    with pytest.raises(UsageError, match="needs the program"):
        fleet.save_persistables(rc.Executor(), str(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot make the folder"):
        fleet.save_persistables(rc.Executor(), str(tmp_path / "file" / "x"), other)


def test_a_program_says_what_mesh_its_executor_needs() -> None:
    at(0, 2)
    program = minimized(rc.SGD())
    assert program.mesh == program.clone().mesh == rc.Mesh.of(dp=2)
    feed = {v.name: np.zeros(v.shape, v.type.numpy) for v in program.block.inputs}
    with pytest.raises(RecomputeError, match=r"mesh dp=2 has 2 ranks, but 1 started|finds no MPI library|'mpi4py'"):
        rc.Executor().run(program, feed)
    engine: Any = types.SimpleNamespace(mesh=rc.Mesh.of(dp=4))
    with pytest.raises(UsageError, match=r"made for the mesh dp=2, and this executor is a rank of dp=4"):
        rc.Executor(engine=engine).run(program, feed)


def launched(ranks: int, script: Path, *arguments: object) -> str:
    """What a script prints on several ranks."""
    command = [sys.executable, "-m", "recompute.launch", "--nproc", str(ranks), str(script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def alone(script: Path, *arguments: object) -> str:
    """What it prints in this process."""
    with pytest.MonkeyPatch.context() as patch, io.StringIO() as out, contextlib.redirect_stdout(out):
        patch.setattr(sys, "argv", [str(script), *map(str, arguments)])
        with warnings.catch_warnings():
            runpy.run_path(str(script), run_name="__main__")
        return out.getvalue()


def result(text: str, ranks: int) -> str:
    """All but the number of ranks, in the one line that rank 0 prints."""
    (line,) = text.splitlines()
    assert f"ranks {ranks}" in line
    return line.replace(f"ranks {ranks}", "")


@pytest.mark.usefixtures("mpi")
def test_the_example_on_two_ranks() -> None:
    assert result(launched(2, EXAMPLE), 2) == result(alone(EXAMPLE), 1)


@pytest.fixture(scope="module")
def on_one_rank(tmp_path_factory: pytest.TempPathFactory) -> str:
    return result(alone(SCRIPT, 4, 0, tmp_path_factory.mktemp("one")), 1)


@pytest.mark.usefixtures("mpi")
@pytest.mark.parametrize(("ranks", "stage"), [(2, 0), (2, 1), (2, 3), (4, 0), (4, 2), (4, 3)])
def test_a_script_gives_the_same_bits_on_any_number_of_ranks(
    ranks: int, stage: int, tmp_path: Path, on_one_rank: str
) -> None:
    """Each rank feeds its own batch; ranks x micro-batches stay the same; one file of all ranks."""
    assert result(launched(ranks, SCRIPT, 4 // ranks, stage, tmp_path), ranks) == on_one_rank


def test_the_page_has_every_field_and_function() -> None:
    page = (Path(__file__).parents[2] / "docs" / "fleet.md").read_text()
    fields = [n for n in SCALARS if f"`{n}`" not in page]
    functions = [n for n in fleet.__all__ if n[0].islower() and n != "util" and f"{n}(" not in page]
    assert not fields and not functions
