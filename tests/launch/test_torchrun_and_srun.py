"""Tests of ranks that torchrun or srun starts: their place, by the variables that they set, and their endings."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launchers import (
    Starter,
    sum_of_ranks,
)

from megatronish.core.errors import UserError
from megatronish.launch.device import meeting_store
from megatronish.launch.place import (
    FEWEST_LOCAL_RANKS,
    Place,
    place_from_environment,
    refuse_too_many,
    threads_per_rank,
)
from megatronish.launch.rendezvous import address_to_listen_on
from megatronish.launch.slurm import expand_hosts


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    starter = Starter(tmp_path)
    yield starter
    starter.end()


TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[08-09,12]-ib",
    "SLURM_JOB_ID": "1000",
    "SLURMD_NODENAME": "gpu09",
}


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_without_variables_it_is_a_plain_start() -> None:
    assert place_from_environment({}) is None


def test_torchrun_gives_a_place() -> None:
    under_torchrun = TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}
    assert place_from_environment(under_torchrun) == Place(5, 8, 1, 4, "env://")
    assert place_from_environment(SLURM | under_torchrun) == Place(5, 8, 1, 4, "env://")


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"])
def test_half_of_torchruns_variables_are_refused_by_name(missing: str) -> None:
    environ = {name: value for name, value in TORCHRUN.items() if name != missing}
    with pytest.raises(UserError, match=rf"lacks {missing}: torchrun sets all of them"):
        place_from_environment(environ)


def test_broken_variables_are_refused_with_their_value() -> None:
    with pytest.raises(UserError, match="RANK=five must be a whole number"):
        place_from_environment(TORCHRUN | {"RANK": "five"})
    with pytest.raises(UserError, match="rank=8 must be at least 0 and below world_size=8"):
        place_from_environment(TORCHRUN | {"RANK": "8"})
    with pytest.raises(UserError, match="local_world_size=4 exceeds world_size=3"):
        place_from_environment(TORCHRUN | {"RANK": "0", "WORLD_SIZE": "3"})
    with pytest.raises(UserError, match=r"SLURM_STEP_TASKS_PER_NODE=two must look like 4 or 2\(x3\),1"):
        place_from_environment(SLURM | {"SLURM_STEP_TASKS_PER_NODE": "two"})
    # No list of that length is made; what says nothing is a number all the same.
    most = place_from_environment(SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x999999999999)"})
    assert most is not None and most.local_world_size == 2
    with pytest.raises(UserError):
        place_from_environment(SLURM | {"SLURM_STEP_TASKS_PER_NODE": "0(x0)"})
    with pytest.raises(UserError, match=r"SLURM_PROCID=3 says .* lacks SLURM_LOCALID: start with srun"):
        place_from_environment({name: value for name, value in SLURM.items() if name != "SLURM_LOCALID"})


def test_srun_gives_a_place_and_the_first_host_is_where_ranks_meet() -> None:
    assert place_from_environment(SLURM) == Place(3, 5, 1, 2, "tcp://gpu08-ib:23002", may_see_own_device=True)
    other = place_from_environment(SLURM | {"SLURM_PROCID": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "2"})
    assert other == Place(4, 5, 0, 1, "tcp://gpu08-ib:23002", may_see_own_device=True)
    given = place_from_environment(SLURM | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"})
    assert given is not None
    assert given.rendezvous == "tcp://10.0.0.1:4000"


def test_a_bare_slurm_environment_will_do() -> None:
    bare = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_JOB_NODELIST": "a[1-2]"}
    assert place_from_environment(bare | {"MASTER_PORT": "4000"}) == Place(
        1, 4, 1, 2, "tcp://a1:4000", may_see_own_device=True
    )
    with pytest.raises(UserError, match="neither MASTER_PORT nor SLURM_JOB_ID is set"):
        place_from_environment(bare)


def test_inside_a_job_without_srun_it_is_a_plain_start() -> None:
    assert place_from_environment({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"}) is None
    assert place_from_environment(SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) is None
    batch_script = {name: value for name, value in SLURM.items() if "STEP" not in name}
    assert place_from_environment(batch_script) is None


def test_slurms_node_lists_are_read() -> None:
    assert expand_hosts("node[01-03,07],x5") == ["node01", "node02", "node03", "node07", "x5"]
    assert expand_hosts("r[0-1]n[9-10]") == ["r0n9", "r0n10", "r1n9", "r1n10"]
    assert expand_hosts("login.cluster") == ["login.cluster"]
    for broken in ("n[1-3", "n]1[", "n[a-b]", "n[1-]", "a,,b", ""):
        with pytest.raises(UserError, match=r"cannot read the SLURM node list .* set MASTER_ADDR"):
            expand_hosts(broken)


def test_threads_are_one_per_rank_unless_the_user_or_solitude_says_otherwise() -> None:
    assert threads_per_rank({}, 8) == 1
    assert threads_per_rank({}, 1) is None
    assert threads_per_rank({"OMP_NUM_THREADS": "3"}, 8) is None


def test_ranks_started_by_srun_meet(start: Starter) -> None:
    shared = {"SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "127.0.0.1", "MASTER_PORT": free_port()}
    ranks = [start(2, sum_of_ranks, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank), **shared) for rank in range(2)]
    assert [rank.wait() for rank in ranks] == [0, 0]
    assert [rank.log(i) != "" for i, rank in enumerate(ranks)] == [True, True]
    assert ranks[0].output == "the sum is 1, on 1 thread\n"
    assert ranks[1].output == ""


def listens(place: Place) -> int:
    """Rank 0 prints the addresses at which it listens, as the system writes them."""
    store = meeting_store(place, timeout_minutes=1.0)
    sockets = {os.readlink(each)[8:-1] for each in Path("/proc/self/fd").iterdir() if each.is_symlink()}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    print(*sorted({row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in sockets}))
    assert store is not None
    store.add("done", 1)
    while place.rank == 0 and store.add("done", 0) < place.world_size:
        time.sleep(0.01)
    return 0


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="the system does not say who listens")
def test_the_store_of_a_meeting_on_loopback_listens_on_loopback(start: Starter) -> None:
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    ranks = [start(2, listens, RANK=str(rank), LOCAL_RANK=str(rank), **shared) for rank in range(2)]
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].errors
    assert ranks[0].output == "0100007F\n"  # 127.0.0.1 alone


def test_rank_zero_listens_where_the_others_look_for_it() -> None:
    assert address_to_listen_on("127.0.0.1", is_on_one_machine=False) == "127.0.0.1"
    assert address_to_listen_on("localhost", is_on_one_machine=False) == "127.0.0.1"
    assert address_to_listen_on("10.1.2.3", is_on_one_machine=False) == "10.1.2.3"
    name = socket.gethostname()
    assert address_to_listen_on(name, is_on_one_machine=False) is None  # other machines may know it otherwise


def test_a_plain_start_of_more_ranks_than_the_machine_can_run_is_refused() -> None:
    refuse_too_many(FEWEST_LOCAL_RANKS)
    with pytest.raises(
        UserError, match=r"the layout needs 100000 ranks, and a plain start begins at most \d+ processes"
    ):
        refuse_too_many(100_000)


def test_a_world_that_does_not_fit_the_layout_is_the_users_to_mend(start: Starter) -> None:
    launcher = start(4, sum_of_ranks, **TORCHRUN)
    assert launcher.wait() == 2
    assert "the layout needs 4 ranks but 8 were started" in launcher.errors


def test_torchrun_ends_with_the_message_of_the_rank_that_failed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from launchers import last_rank_raises, launch\n"
        "sys.exit(launch(last_rank_raises, world_size=2))\n",
        encoding="utf-8",
    )
    path = os.pathsep.join(sys.path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port", free_port()]
    run = subprocess.run(
        [*torchrun, str(script)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert run.returncode == 1
    assert "rank 1 failed: Traceback" in run.stderr
    assert "ArithmeticError: one too many" in run.stderr
    assert "rank 0 failed" not in run.stderr
    # Below its own traceback torchrun repeats the message that the rank has left for it.
    assert run.stderr.rstrip().splitlines()[-2].strip() == "ArithmeticError: one too many"
