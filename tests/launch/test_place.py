"""Tests of the launchers' variables: MPI, Kubernetes, Flux, SLURM give a place, or a sentence says what is missing."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import tiny
from launchers import Starter, sum_of_ranks
from paths import ROOT
from test_torchrun_and_srun import SLURM, TORCHRUN

from megatronish.core.errors import UserError
from megatronish.launch.local import launch
from megatronish.launch.place import LAUNCHERS, Place, place_from_environment
from megatronish.launch.slurm import unused_places

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "3",
    "PMIX_NAMESPACE": "1694826497",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "3",
    "MV2_COMM_WORLD_SIZE": "4",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}
PALS = {
    "PALS_RANKID": "3",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "PALS_LOCAL_RANKID": "1",
    "PMI_LOCAL_SIZE": "2",
    "PALS_APID": "c0ffee",
}
JSRUN = {
    f"JSM_NAMESPACE_{name}": value
    for name, value in zip(("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"), "3412", strict=True)
}
FLUX = {
    "FLUX_TASK_RANK": "3",
    "FLUX_JOB_SIZE": "4",
    "FLUX_TASK_LOCAL_ID": "1",
    "FLUX_JOB_NNODES": "2",
    "FLUX_JOB_ID": "f1",
}
PMI = {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"}
PMIX = {"PMIX_RANK": "3", "PMIX_SIZE": "4", "PMIX_LOCAL_RANK": "1", "PMIX_LOCAL_SIZE": "2"}
ALL = {
    "Open MPI": OPEN_MPI,
    "MVAPICH2": MVAPICH,
    "MPICH or Intel MPI": MPICH,
    "Cray PALS": PALS,
    "jsrun": JSRUN,
    "Flux": FLUX,
    "PMI": PMI,
    "PMIx": PMIX,
}
MEETING = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
PYTORCH_JOB = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    starter = Starter(tmp_path)
    yield starter
    starter.end()


def place_of(environ: dict[str, str]) -> Place:
    place = place_from_environment(environ)
    assert place is not None
    return place


def test_every_launcher_of_the_table_is_tested() -> None:
    assert {launcher.name for launcher in LAUNCHERS} == {*ALL, "SLURM"}


@pytest.mark.parametrize("environ", ALL.values(), ids=ALL.keys())
def test_every_launcher_gives_a_place(environ: dict[str, str]) -> None:
    assert place_of(environ | MEETING) == Place(3, 4, 1, 2, "tcp://node1:29500", may_see_own_device=True)


@pytest.mark.parametrize("environ", ALL.values(), ids=ALL.keys())
def test_ranks_on_several_machines_need_to_be_told_where_they_meet(environ: dict[str, str]) -> None:
    with pytest.raises(
        UserError, match=r"started 4 ranks on several machines, .*; export MASTER_ADDR .* mpirun -x MAS"
    ):
        place_of(environ)


@pytest.mark.parametrize("environ", ALL.values(), ids=ALL.keys())
def test_ranks_of_one_machine_meet_on_it_at_a_port_that_all_derive_alike(environ: dict[str, str]) -> None:
    def of(rank: str) -> Place:
        numbers = {name: {"3": rank, "1": rank, "2": "4"}.get(value, value) for name, value in environ.items()}
        return place_of(numbers | ({"FLUX_JOB_NNODES": "1"} if environ is FLUX else {}))

    places = [of(str(rank)) for rank in range(4)]
    assert [(place.rank, place.local_rank, place.is_on_one_machine) for place in places] == [
        (rank, rank, True) for rank in range(4)
    ]
    (meeting,) = {place.rendezvous for place in places}
    assert meeting is not None
    host, _, port = meeting.rpartition(":")
    assert host == "tcp://127.0.0.1"
    assert 12000 <= int(port) < 32000


def test_two_jobs_on_one_machine_meet_at_different_ports() -> None:
    alone = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    assert place_of(alone).rendezvous != place_of(alone | {"PMIX_NAMESPACE": "1694826498"}).rendezvous


@pytest.mark.parametrize("environ", ALL.values(), ids=ALL.keys())
def test_a_launcher_that_started_one_process_leaves_a_plain_start(environ: dict[str, str]) -> None:
    alone = {name: {"3": "0", "4": "1", "1": "0", "2": "1"}.get(value, value) for name, value in environ.items()}
    assert place_from_environment(alone) is None


def test_mpirun_in_a_job_of_slurm_counts_and_so_does_srun_that_sets_pmi_too() -> None:
    inherited = SLURM | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    for environ in (OPEN_MPI, MPICH, MVAPICH, FLUX):
        assert place_of(inherited | environ | MEETING).rank == 3
        assert place_of(inherited | environ | MEETING).world_size == 4
    by_srun = SLURM | {"PMI_RANK": "3", "PMI_SIZE": "5", "PMIX_RANK": "3", "PMIX_NAMESPACE": "slurm.pmix.1.0"}
    assert place_of(by_srun) == place_of(SLURM)
    assert place_of(SLURM | OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}) == place_of(SLURM)


def test_torchrun_under_another_launcher_counts() -> None:
    under_torchrun = TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}
    for environ in ALL.values():
        assert place_of(environ | under_torchrun) == Place(5, 8, 1, 4, "env://")


def test_a_pod_with_rank_and_world_size_alone_is_one_process() -> None:
    assert place_of(PYTORCH_JOB) == Place(1, 2, 0, 1, "env://", may_see_own_device=True)
    for more in ({}, {"PET_NPROC_PER_NODE": "auto"}, {"PET_NPROC_PER_NODE": "1", "PET_NNODES": "2"}):
        assert place_of(PYTORCH_JOB | more).local_world_size == 1
    with pytest.raises(UserError, match=r"PET_NPROC_PER_NODE=8 says .* LOCAL_RANK does not say .* start with torchrun"):
        place_of(PYTORCH_JOB | {"PET_NPROC_PER_NODE": "8"})


def test_the_local_rank_comes_from_the_launcher_whose_rank_was_copied() -> None:
    copied = PYTORCH_JOB | {"RANK": "3", "WORLD_SIZE": "4"}
    assert place_of(copied | OPEN_MPI) == Place(3, 4, 1, 2, "env://", may_see_own_device=True)
    assert place_of(PYTORCH_JOB | {"RANK": "3", "WORLD_SIZE": "5"} | SLURM).local_rank == 1
    # The launcher of DeepSpeed has a name of its own for one of them.
    assert place_of(copied | {"LOCAL_RANK": "1", "LOCAL_SIZE": "2"}).local_world_size == 2


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "2"}, r"OMPI_COMM_WORLD_SIZE=2 says that Open MPI started 2 ranks, but OMPI_COMM_WO"),
        ({"PMI_SIZE": "2"}, "PMI_SIZE=2 says that .* started 2 ranks, but PMI_RANK does not say which"),
        ({"FLUX_JOB_SIZE": "2"}, "FLUX_JOB_SIZE=2 says .* unset FLUX_JOB_SIZE for a plain start"),
        (
            {"OMPI_COMM_WORLD_RANK": "0"},
            "OMPI_COMM_WORLD_RANK=0 says that this is a rank of Open MPI, but OMPI_COMM_WO",
        ),
        (
            {"PMIX_RANK": "0"},
            "PMIX_RANK=0 says .* does not say how many ranks there are; set RANK, WORLD_SIZE, LOCAL_R",
        ),
        (
            {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"},
            "SLURM_NTASKS=2 says that SLURM started 2 ranks, but SLURM_PROCID",
        ),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2"},
            "PMI_RANK=1 says .* lacks PMI_LOCAL_RANK or MPI_LOCALRANKID: start with mp",
        ),
        ({"PET_NNODES": "2"}, "PET_NNODES=2 says that this job has several machines, .* start with torchrun, or unset"),
        ({"PET_NNODES": "1:4"}, "PET_NNODES=1:4 says that this job has several machines"),
        ({"NODE_RANK": "0", "NNODES": "2"}, r"NNODES=2 says .* torchrun --nnodes \$NNODES --node-rank"),
        ({"GROUP_WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}, "GROUP_WORLD_SIZE=2 says that this job has several"),
        ({"LOCAL_WORLD_SIZE": "2"}, "the environment says LOCAL_WORLD_SIZE=2 but lacks RANK, WORLD_SIZE, LOCAL_RANK"),
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE=abc must be a whole number; the launcher sets it"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "the environment says RANK=0, WORLD_SIZE=2 but lacks MASTER_ADDR"),
        ({"SKYPILOT_NUM_NODES": "2"}, r"SKYPILOT_NUM_NODES=2 says .* torchrun --nnodes \$SKYPILOT_NUM_NODES"),
        ({"OMPI_COMM_WORLD_SIZE": "two"}, r"OMPI_COMM_WORLD_SIZE=two must be a whole number; the launcher sets it"),
    ],
)
def test_more_than_one_is_never_ignored(environ: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        place_from_environment(environ)


@pytest.mark.parametrize(
    "environ",
    [
        {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "8"},
        {"WORLD_SIZE": ""},
        {"SKYPILOT_NUM_NODES": "1"},
        {"SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"},
        {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "PMIX_RANK": "0"},
    ],
)
def test_one_machine_is_a_plain_start(environ: dict[str, str]) -> None:
    assert place_from_environment(environ) is None


def test_ranks_without_local_numbers_that_meet_on_loopback_are_on_one_machine() -> None:
    bare = {"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "4000"}
    assert place_of(bare) == Place(1, 2, 1, 2, "tcp://localhost:4000", may_see_own_device=True)


def test_an_address_of_ipv6_is_bracketed() -> None:
    assert place_of(OPEN_MPI | {"MASTER_ADDR": "fd00::2", "MASTER_PORT": "1"}).rendezvous == "tcp://[fd00::2]:1"


def test_a_plain_start_in_a_job_of_several_nodes_says_that_it_uses_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"SLURMD_NODENAME": "n1", "SLURM_JOB_NUM_NODES": "4", "SLURM_PROCID": "0"}.items():
        monkeypatch.setenv(name, value)
    assert launch(lambda _place: 0, world_size=1) == 0
    assert capsys.readouterr().err == (
        "note: this SLURM job has 4 nodes, and a plain start uses this one alone; srun starts ranks on all of them\n"
    )


@pytest.mark.parametrize("shell", [{}, {"SLURMD_NODENAME": "n1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}])
def test_a_plain_start_in_a_job_of_several_tasks_names_srun(
    shell: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "1", **shell}.items():
        monkeypatch.setenv(name, value)
    assert launch(lambda _place: 0, world_size=1) == 0
    assert capsys.readouterr().err == (
        "note: SLURM_NTASKS=4 says that this job has 4 tasks, and a plain start runs 1 rank here; srun starts a rank "
        "for each task\n"
    )


@pytest.mark.parametrize(
    ("environ", "world_size"),
    [
        ({"SLURM_NTASKS": "4"}, 4),
        ({"SLURM_NTASKS": "1"}, 1),
        ({"SLURM_NTASKS": "many"}, 1),
        ({"SLURM_JOB_ID": "1"}, 1),
        ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "4"}, 1),  # a place, or an error, comes before any note
    ],
)
def test_a_plain_start_that_leaves_no_task_out_says_nothing(environ: dict[str, str], world_size: int) -> None:
    assert unused_places(environ, world_size=world_size) is None


@pytest.mark.skipif(sys.platform != "linux", reason="environments of other processes are read from /proc")
def test_a_shell_between_mpirun_and_a_rank_does_not_change_the_port() -> None:
    code = "from megatronish.launch.place import place_from_environment; print(place_from_environment().rendezvous)"
    direct = [sys.executable, "-c", code]
    wrapped = ["sh", "-c", f'"{sys.executable}" -c "{code}"; true']
    meetings = set()
    for rank, command in enumerate((direct, wrapped, wrapped)):
        alone = {"PMI_RANK": str(rank), "PMI_SIZE": "3", "MPI_LOCALRANKID": str(rank), "MPI_LOCALNRANKS": "3"}
        environ = os.environ | alone | {"PYTHONPATH": str(ROOT)}
        meetings.add(subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout)
    assert len(meetings) == 1


@pytest.mark.parametrize("kind", ["Open MPI", "MPICH or Intel MPI", "PyTorchJob"])
def test_ranks_started_so_meet(start: Starter, kind: str) -> None:
    def of(rank: int) -> dict[str, str]:
        if kind == "PyTorchJob":
            return PYTORCH_JOB | {"RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "31417"}
        size, job = {"4": "2"}, {"1694826497": str(os.getpid())}
        return {
            name: ({"3": str(rank), "1": str(rank)} | size | job).get(value, value) for name, value in ALL[kind].items()
        }

    ranks = [start(2, sum_of_ranks, **of(rank)) for rank in range(2)]
    assert [rank.wait() for rank in ranks] == [0, 0]
    assert ranks[0].output.startswith("the sum is 1, ")
    assert ranks[1].output == ""


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun, which no requirement brings")
def test_a_real_mpirun_starts_one_run(tmp_path: Path) -> None:
    flags = ["--allow-run-as-root", "--oversubscribe"] if "Open MPI" in _version_of_mpirun() else []
    argv = tiny(tmp_path / "run", "--tp 2 --exit-interval 2")
    done = subprocess.run(
        ["mpirun", *flags, "-n", "2", sys.executable, str(ROOT / "pretrain_gpt.py"), *argv],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("megatronish on 2 ranks") == 1
    assert "megatronish on 1 rank" not in done.stdout


def _version_of_mpirun() -> str:
    return subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=True).stdout
