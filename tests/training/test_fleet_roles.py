"""Fleet: which rank this process is, by MPI, Paddle's environment variables and role makers."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
from fleet_cases import at

import recompute as rc
from recompute import fleet
from recompute.errors import JobError, UsageError
from recompute.training.fleet.absent import ABSENT

pytestmark = pytest.mark.usefixtures("before_fleet")


def test_a_process_alone_is_one_rank() -> None:
    fleet.init(is_collective=True)
    assert (fleet.worker_index(), fleet.worker_num(), fleet.rank(), fleet.nranks(), fleet.world_size()) == (
        0,
        1,
        0,
        1,
        1,
    )
    assert (fleet.local_rank(), fleet.node_num()) == (0, 1)
    assert fleet.is_first_worker() and fleet.is_worker() and not fleet.is_server()
    assert len(fleet.worker_endpoints()) == 1 and isinstance(fleet.worker_endpoints(to_string=True), str)
    fleet.barrier_worker()
    fleet.init_worker()
    fleet.stop_worker()
    assert fleet.all_reduce([1, 2]).tolist() == [1, 2]
    assert fleet.util.get_file_shard(["a", "b"]) == ["a", "b"]
    groups = fleet.get_hybrid_communicate_group()
    assert groups.get_data_parallel_world_size() == groups.get_model_parallel_world_size() == 1


def test_names_before_init() -> None:
    with pytest.raises(UsageError, match=r"call fleet\.init"):
        fleet.worker_num()


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({"PADDLE_TRAINERS_NUM": "4", "PADDLE_TRAINER_ID": "1"}, r"PADDLE_TRAINERS_NUM=4\): 4 ranks, but MPI did not"),
        ({"PADDLE_TRAINER_ENDPOINTS": "a:1,b:2"}, r"--nproc 2 SCRIPT"),
        ({"PADDLE_TRAINERS_NUM": "two"}, "PADDLE_TRAINERS_NUM is 'two', which is no number"),
        ({"PADDLE_TRAINERS_NUM": "2", "PADDLE_TRAINER_ID": "2"}, "no rank 2 among 2"),
        ({"PADDLE_TRAINERS_NUM": "2", "PADDLE_TRAINER_ENDPOINTS": "a:1"}, "1 endpoints for 2 ranks"),
        ({"PADDLE_TRAINERS_NUM": "0"}, "at least 1 rank"),
    ],
)
def test_paddles_variables_without_mpi(environment: dict[str, str], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=why):
        fleet.init()


def test_paddles_variables_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ID": "0", "S_NUM": "1", "_ENDPOINTS": "10.0.0.1:6170"}.items():
        monkeypatch.setenv(f"PADDLE_TRAINER{name if name != 'ID' else '_ID'}", value)
    fleet.init(fleet.PaddleCloudRoleMaker(is_collective=True))
    assert fleet.worker_endpoints() == ["10.0.0.1:6170"]


class _Engine:
    """An engine whose other ranks say what they are told."""

    def __init__(self, rank: int, says: Callable[[str, Any], list[Any]]) -> None:
        self.rank, self.says = rank, says

    def collect(self, what: str, value: Any, root: int | None = None) -> list[Any]:
        return self.says(what, value)


def started(monkeypatch: pytest.MonkeyPatch, size: int, engine: _Engine, known: int | None = None) -> None:
    """As if mpiexec had started this process."""
    from recompute.runtime.communication import mpi

    monkeypatch.setenv("PMI_SIZE", str(size))
    module = types.SimpleNamespace(COMM_WORLD=types.SimpleNamespace(size=known or size))
    monkeypatch.setattr(mpi, "load_mpi", lambda: module)
    monkeypatch.setattr(mpi, "engine_of", lambda mesh: engine)


def test_mpi_says_who_we_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def says(what: str, value: Any) -> list[Any]:
        return [(host, value[1]) for host in ("a", "a", "b", "b")] if what == "fleet.init" else [value] * 4

    started(monkeypatch, 4, _Engine(3, says))
    with pytest.raises(UsageError, match=r"4 processes were started, and each would train alone: call fleet\.init"):
        fleet.distributed_optimizer(rc.SGD())
    fleet.init()
    assert (fleet.rank(), fleet.world_size(), fleet.local_rank(), fleet.node_num()) == (3, 4, 1, 2)
    assert fleet.worker_endpoints() == ["a:0", "a:1", "b:2", "b:3"]
    assert fleet.all_reduce(2) == 8 and fleet.all_reduce([2, 3], "max").tolist() == [2, 3]
    assert fleet.util.get_file_shard(list("abcdef")) == ["f"]
    with pytest.raises(UsageError, match=r"mode must be one of sum, max, min, not 'mean'"):
        fleet.all_reduce(2, "mean")


def test_what_contradicts_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks raise the same error, also those with which all is well."""
    started(monkeypatch, 2, _Engine(0, lambda what, value: [value, value]))
    monkeypatch.setenv("PADDLE_TRAINER_ID", "0")
    with pytest.raises(UsageError, match=r"MPI reports rank 1 of 2, but the environment \(PADDLE_TRAINER_ID=0\)"):
        fleet.init()
    with pytest.raises(UsageError, match=r"MPI reports rank 0 of 2, but UserDefinedRoleMaker: 3 ranks"):
        fleet.init(fleet.UserDefinedRoleMaker(worker_num=3))
    started(monkeypatch, 2, _Engine(0, lambda what, value: [value]), known=1)
    with pytest.raises(JobError, match="2 processes were started, but MPI knows of 1"):
        fleet.init()


def test_ranks_that_are_said_by_hand_are_not_run() -> None:
    at(1, 4)
    assert (fleet.rank(), fleet.world_size()) == (1, 4)
    with pytest.raises(UsageError, match=r"fleet\.barrier_worker needs all 4 ranks, but no process runs as one"):
        fleet.barrier_worker()


def test_wrong_roles() -> None:
    for make in (
        lambda: fleet.init(is_collective=False),
        lambda: fleet.PaddleCloudRoleMaker(is_collective=False),
        lambda: fleet.UserDefinedRoleMaker(role=fleet.Role.SERVER),
    ):
        with pytest.raises(UsageError, match="no parameter servers"):
            make()
    with pytest.raises(UsageError, match="current_id must be a whole number"):
        fleet.UserDefinedRoleMaker(current_id="0")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="role_maker must be"):
        fleet.init("worker")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="strategy must be a DistributedStrategy"):
        fleet.init(strategy={"amp": True})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", list(ABSENT))
def test_functions_that_are_not_here_say_what_to_do(name: str) -> None:
    with pytest.raises(UsageError, match=f"fleet.{name}: .* "):
        getattr(fleet, name)(1, main_program=2)
