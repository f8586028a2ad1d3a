"""What launchers of MPI say to the processes that they start."""

from __future__ import annotations

import pytest

import recompute as rc
from recompute.errors import UsageError
from recompute.runtime.communication.started import size_variable
from recompute.trainer.ranks import ranks_of


@pytest.mark.parametrize(
    ("environment", "name", "without_srun"),
    [
        ({}, "", ""),
        ({"PMI_SIZE": "4", "PMI_RANK": "0"}, "PMI_SIZE", "PMI_SIZE"),
        ({"PMI_SIZE": " ", "OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, "SLURM_STEP_NUM_TASKS", ""),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "", ""),
        ({"PMIX_RANK": "1"}, "", ""),
    ],
)
def test_who_says_how_many_processes_there_are(environment: dict[str, str], name: str, without_srun: str) -> None:
    assert size_variable(environment) == name
    assert size_variable(environment, srun=False) == without_srun


@pytest.mark.parametrize("name", ["PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"])
def test_a_run_of_one_process_is_not_started_several_times(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "3")
    with pytest.raises(UsageError, match="one process, but 3 were started"):
        ranks_of(rc.Mesh.of(dp=1))
