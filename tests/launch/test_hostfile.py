"""Tests of hostfiles, of --include and --exclude, and of what the launch command refuses before it starts anything."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from megatronish.commands.launch import main
from megatronish.core.errors import UserError
from megatronish.launch.host import LATER_SECONDS, LOST, PEER_SECONDS, HostPlan, peer_seconds
from megatronish.launch.hostfile import Host, chosen, read_hostfile
from megatronish.launch.ssh import Reach, exported

THREE = "a slots=4\nb slots=2\n\n# c slots=8\nd.example-1.org   slots = 1  # the old one\n"
HOSTS = [Host("a", (0, 1, 2, 3)), Host("b", (0, 1)), Host("d.example-1.org", (0,))]


def written(folder: Path, text: str | bytes = THREE) -> Path:
    path = folder / "hosts"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def choose(include: str = "", exclude: str = "", num_nodes: int | None = None, num_gpus: int | None = None) -> Any:
    return chosen(HOSTS, include=include, exclude=exclude, num_nodes=num_nodes, num_gpus=num_gpus)


def test_a_hostfile_has_hosts_with_their_slots_in_its_order(tmp_path: Path) -> None:
    assert read_hostfile(written(tmp_path)) == HOSTS


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ({}, ["a:0,1,2,3", "b:0,1", "d.example-1.org:0"]),
        ({"include": "a"}, ["a:0,1,2,3"]),
        ({"include": "b@a:3,1"}, ["a:1,3", "b:0,1"]),
        ({"include": "a:0@a:2"}, ["a:0,2"]),
        ({"exclude": "b"}, ["a:0,1,2,3", "d.example-1.org:0"]),
        ({"exclude": "a:0,2@d.example-1.org:0"}, ["a:1,3", "b:0,1"]),
        ({"num_nodes": 2}, ["a:0,1,2,3", "b:0,1"]),
        ({"num_nodes": 2, "num_gpus": 1}, ["a:0", "b:0"]),
    ],
)
def test_hosts_and_slots_are_chosen_as_deepspeed_does(flags: dict[str, Any], names: list[str]) -> None:
    assert [f"{host.name}:{','.join(map(str, host.slots))}" for host in choose(**flags)] == names


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"include": "a", "exclude": "b"}, "--include and --exclude contradict each other"),
        ({"include": "z"}, "--include z: 'z' is not in the hostfile, which has a, b, d.example-1.org"),
        ({"exclude": "a@"}, "--exclude a@: '' is not in the hostfile"),
        ({"include": "a:4"}, "a has no slot '4'; its slots are 0 to 3, as in a:0,1"),
        ({"include": "a:"}, "a has no slot ''"),
        ({"include": "a:-1"}, "a has no slot '-1'"),
        ({"exclude": "a@b@d.example-1.org"}, "leaves no slot of the hostfile; exclude less"),
        ({"num_nodes": 4}, "--num-nodes 4 is more than the 3 hosts of the hostfile; lower it"),
        ({"num_gpus": 2}, "--num-gpus 2 is more than the 1 slots of d.example-1.org; lower it, or --exclude that host"),
        ({"include": "a", "num_gpus": 2}, "leave --include and --exclude out"),
    ],
)
def test_a_choice_that_cannot_be_is_a_sentence(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        choose(**flags)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no host; write lines such as: worker-0 slots=8"),
        ("# a slots=1\n", "names no host"),
        ("a slots=1\na slots=2\n", "line 2: a is in line 1 already; give each host one line with all its slots"),
        ("a\n", "line 1: 'a' must be a host and its slots, such as: worker-0 slots=8"),
        ("a slots=x\n", "line 1: 'a slots=x' must be a host and its slots"),
        ("a slots=-1\n", "line 1: 'a slots=-1' must be a host and its slots"),
        ("a slots=4 max=8\n", "line 1: 'a slots=4 max=8' must be a host and its slots"),
        ("a slots=0\n", "line 1: slots=0 of a must be between 1 and 1024; put a # before a host that is not used"),
        ("a slots=" + "9" * 5000, "slots=99999999999999999999 of a must be between 1 and 1024"),
        ("a slots=\u0663\n", "must be a host and its slots"),
        ("a slots=99999999999999999999\n", "of a must be between 1 and 1024"),
        ("-oProxyCommand=x slots=1\n", "'-oProxyCommand=x' is no name of a host"),
        ("me@a slots=1\n", "'me@a' is no name of a host, which has letters, digits, dots and dashes; a user or a port"),
        ("a;reboot slots=1\n", "'a;reboot' is no name of a host"),
        (b"\xff\xfe slots=1\n", "is not text in UTF-8"),
        ("a slots=1\n" * 200_000, "is longer than 1,048,576 bytes"),
    ],
)
def test_a_crooked_hostfile_is_a_sentence(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(UserError) as error:
        read_hostfile(written(tmp_path, text))
    assert message in str(error.value)


def test_a_hostfile_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot be read: No such file or directory; give a file of lines such as"):
        read_hostfile(tmp_path / "hosts")
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        read_hostfile(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="cannot be read: it is no file but a pipe or a device"):
        read_hostfile(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "what is to run comes after --, as in: launch --hostfile hosts -- pretrain"),
        ("--", "nothing follows --; give the command that is to run"),
        ("-- pretrian --tp 2", "pretrian after -- is neither a command of megatronish nor a Python file"),
        ("-- launch --hostfile b", "launch after -- is neither"),
        ("--no-ssh -- pretrain", "--no-ssh needs the number of this host; add --node-rank, 0 to 2"),
        ("--node-rank 0 -- pretrain", "--node-rank is for --no-ssh; leave it out"),
        ("--no-ssh --node-rank 3 -- pretrain", "--node-rank 3 must be 0 to 2: the hosts are a, b, d.example-1.org"),
        ("--master-port 70000 -- pretrain", "--master-port 70000 must be between 1 and 65535"),
        ("--num-nodes 0 -- pretrain", "--num-nodes 0 must be at least 1"),
        ("--master-addr a --export NOT_SET_HERE -- pretrain", "--export NOT_SET_HERE: NOT_SET_HERE is not set here"),
        ("--hosts b -- pretrain", "--hosts is not a flag"),
    ],
)
def test_flags_that_cannot_be_are_sentences_before_anything_starts(tmp_path: Path, flags: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        main(["--hostfile", str(written(tmp_path)), *flags.split()], program="launch")
    assert message in str(error.value)


def test_hosts_get_what_communication_and_trackers_read_and_no_more() -> None:
    environ = {"NCCL_DEBUG": "INFO", "HOME": "/home/me", "PYTHONPATH": "/p", "RANK": "3", "CUDA_VISIBLE_DEVICES": "7"}
    assert exported(environ, ["HOME", "MINE=a=b"]) == {
        **{"NCCL_DEBUG": "INFO", "PYTHONPATH": "/p", "HOME": "/home/me", "MINE": "a=b"}
    }


def test_a_plan_goes_over_a_line_and_numbers_the_ranks() -> None:
    plan = HostPlan((sys.executable, "-c", "a b\n'"), (1, 3), 4, 6, "10.0.0.1", 29500, {"A": "ä\n", "RANK": "9"})
    assert plan.line().count(b"\n") == 1
    assert HostPlan.read(plan.line()) == plan
    assert plan.environ(1) == {
        **{"A": "ä\n", "RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
        **{"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "CUDA_VISIBLE_DEVICES": "1,3"},
    }


def test_ssh_may_ask_nothing_and_this_machine_needs_none() -> None:
    assert Reach().words("localhost", "cd /x") == ["sh", "-c", "cd /x"]
    words = Reach(("-p", "2222")).words("far", "cd /x")
    assert words[0] == "ssh" and words[-2:] == ["far", "cd /x"]
    assert words[1:3] == ["-o", "BatchMode=yes"] and words[-4:-2] == ["-p", "2222"]


def test_others_may_speak_for_long_where_they_know_more_than_that_they_lost_their_peer() -> None:
    assert [peer_seconds(status) for status in (1, 2, 128 + signal.SIGABRT, 254, LOST)] == [PEER_SECONDS] * 5
    assert [peer_seconds(LOST, lost=True), peer_seconds(128 + signal.SIGKILL)] == [LATER_SECONDS] * 2
