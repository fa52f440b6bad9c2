"""Tests of the launcher over ssh: two hosts that are started by a stand-in for ssh, on this machine, train as one."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import SECONDS, steps_of, tiny, train_on_ranks
from paths import ROOT
from ranks import is_running, wait_until

# It leaves its options out, as ssh does, notes the process of each host, and runs the command here. Like sshd, it hands
# on no variable of the caller except those that a login has; unlike it, those of the test itself.
STAND_IN = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do case "$1" in -o|-p) shift 2;; *) shift;; esac; done
host=$1; shift
if [ "$host" = gone ]; then echo "ssh: Could not resolve hostname gone" >&2; exit 255; fi
case "$*" in *launch.host*) echo $$ > "$(dirname "$0")/$host.pid";; esac
exec env -i PATH="$PATH" HOME="$HOME" OMP_NUM_THREADS=1 sh -c "$*"
"""
# In one piece, which print does not write where output has no buffer.
TELL = 'import os\nos.write(1, f\'{os.environ["RANK"]} {os.environ["MASTER_ADDR"]}\\n\'.encode())\n'
SLOW = "--train-iters 10000 --log-interval 1 --lr-decay-style constant"
ONE_EACH = "alpha slots=1\nbeta slots=1\n"


class Hosts:
    """Hosts alpha and beta of two slots each, and the command that trains on them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        stand_in = folder / "bin" / "ssh"
        stand_in.parent.mkdir()
        stand_in.write_text(STAND_IN)
        stand_in.chmod(0o755)
        (folder / "hosts").write_text("alpha slots=2\nbeta slots=2\n")

    @contextlib.contextmanager
    def started(self, flags: str, *command: str) -> Iterator["subprocess.Popen[str]"]:
        """The launcher in a session of its own, which is killed at the end."""
        with socket.socket() as listener:
            listener.bind(("", 0))
            port = listener.getsockname()[1]
        launch = [sys.executable, "-m", "megatronish", "launch", "--hostfile", str(self.folder / "hosts")]
        process = subprocess.Popen(
            [*launch, "--master-port", str(port), *flags.split(), "--", *command],
            **{"cwd": ROOT, "text": True, "start_new_session": True},
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE},
            env=os.environ | {"PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "GLOO_MARK": "here"},
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def run(self, flags: str, *command: str) -> "subprocess.CompletedProcess[str]":
        with self.started(flags, *command) as process:
            output, errors = process.communicate(timeout=2 * SECONDS)
        return subprocess.CompletedProcess(command, process.returncode, output, errors)

    def pid(self, host: str) -> int:
        """Process of a host."""
        return int((self.folder / "bin" / f"{host}.pid").read_text())

    def left(self) -> list[str]:
        """Hosts that still run, and command lines of processes of a run in this folder."""
        found = [path.stem for path in self.folder.glob("bin/*.pid") if is_running(int(path.read_text()))]
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if str(self.folder) in words:
                    found.append(words)
        return found


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    return Hosts(tmp_path)


def test_two_hosts_train_as_one_and_save_when_they_are_told_to_leave(hosts: Hosts, tmp_path: Path) -> None:
    """Their lines have their names."""
    with hosts.started("", "pretrain", *tiny(tmp_path / "run", f"--tp 2 {SLOW}")) as process:
        assert wait_until(lambda: len(_steps(tmp_path / "run")) > 5, timeout=2 * SECONDS)
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=SECONDS)
    assert (process.returncode, errors) == (0, "")
    assert " saved " in output
    lines = output.splitlines()
    assert lines[0].startswith("4 ranks on 2 hosts, which meet at ")
    assert lines[0].endswith(": alpha ranks 0 to 1 on devices 0,1; beta ranks 2 to 3 on devices 0,1")
    assert "alpha: megatronish on 4 ranks: dp 2 x tp 2 x pp 1" in lines
    assert all(line.startswith(("alpha: ", "beta: ")) for line in lines[1:])
    train_on_ranks(tiny(tmp_path / "one", "--lr-decay-style constant"))
    one, two = steps_of(tmp_path / "one"), steps_of(tmp_path / "run")
    assert sorted(one) == [1, 2, 3, 4, 5, 6] and sorted(two) == [*range(1, max(two) + 1)]
    for step, seen in one.items():
        assert two[step] == pytest.approx(seen, rel=1e-5)
    assert _gone(hosts)


def test_each_rank_knows_its_place_and_its_devices(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "tell.py").write_text(
        "import os, sys\n"
        "names = 'RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE CUDA_VISIBLE_DEVICES GLOO_MARK MINE'.split()\n"
        "words = [*(str(os.environ.get(name)) for name in names), *sys.argv[1:], os.getcwd()]\n"
        "os.write(1, (' '.join(words) + '\\n').encode())\n"
    )
    done = hosts.run("--exclude alpha:0 --export MINE=5", str(tmp_path / "tell.py"), "a b", "$HOME")
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()[1:]) == [
        f"alpha: 0 3 0 1 1 here 5 a b $HOME {ROOT}",
        f"beta: 1 3 0 2 0,1 here 5 a b $HOME {ROOT}",
        f"beta: 2 3 1 2 0,1 here 5 a b $HOME {ROOT}",
    ]


def test_this_host_alone_is_started_without_ssh(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "tell.py").write_text(TELL)
    done = hosts.run("--no-ssh --node-rank 1", str(tmp_path / "tell.py"))
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["2 alpha", "3 alpha"])


def test_more_or_fewer_slots_than_the_layout_needs_are_a_sentence(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(ONE_EACH)
    done = hosts.run("", "pretrain", *tiny(tmp_path / "run", "--tp 2 --dp 4"))
    assert done.returncode == 2
    assert "alpha: " in done.stderr and "8" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].endswith("has failed with status 2; the other hosts were ended")


# A rank that waits for its peers, as in training, and needs nothing but torch.
TOGETHER = """
import sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
while True:
    dist.all_reduce(torch.ones(1))
    open(sys.argv[1], "w").close()
"""


def test_a_host_that_dies_ends_the_run_with_its_sentence(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(ONE_EACH)
    (tmp_path / "together.py").write_text(TOGETHER)
    with hosts.started("", str(tmp_path / "together.py"), str(tmp_path / "met")) as process:
        assert wait_until((tmp_path / "met").exists, timeout=2 * SECONDS)
        os.kill(hosts.pid("beta"), signal.SIGKILL)
        _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert errors.splitlines()[-1] == (
        "host beta was lost: its process here was ended by SIGKILL; the other hosts were ended"
    )
    assert _gone(hosts)


def test_a_rank_that_fails_is_the_reason_and_those_that_are_ended_are_not(hosts: Hosts, tmp_path: Path) -> None:
    """Nor those that end without it."""
    (tmp_path / "fail.py").write_text(
        "import os, pathlib, sys, time\n"
        "rank = int(os.environ['RANK'])\n"
        "fails = pathlib.Path(sys.argv[1])\n"
        "if rank == 3:\n    fails.touch()\n    sys.exit('no more')\n"
        "while rank != 2 or not fails.exists():\n    time.sleep(0.01)\n"
        "time.sleep(1)\n"
        "os._exit(1)\n"
    )
    done = hosts.run("", str(tmp_path / "fail.py"), str(tmp_path / "fails"))
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "beta: no more",
        "beta: rank 3 has ended with status 1",
        "host beta has failed with status 1; the other hosts were ended",
    ]
    assert _gone(hosts)


def test_a_host_that_is_this_machine_needs_no_ssh(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    (tmp_path / "bin" / "ssh").unlink()
    (tmp_path / "tell.py").write_text(TELL)
    done = hosts.run("", str(tmp_path / "tell.py"))
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()[1:]) == ["localhost: 0 127.0.0.1", "localhost: 1 127.0.0.1"]


def test_a_rank_that_is_killed_is_the_reason_on_whichever_host(hosts: Hosts, tmp_path: Path) -> None:
    """Though a peer may fail before that is seen; and its other peers, which know nothing more, are not waited for."""
    (tmp_path / "hosts").write_text("alpha slots=1\nbeta slots=3\n")
    (tmp_path / "die.py").write_text(
        "import os, pathlib, signal, sys, time\n"
        "rank, lost, ready = int(os.environ['RANK']), *map(pathlib.Path, sys.argv[1:])\n"
        "if rank == 2:\n    ready.touch()\n"
        "while rank == 1 and not ready.exists():\n    time.sleep(0.01)\n"
        "if rank == 1:\n    lost.touch()\n    sys.exit(1)\n"
        "while rank == 2 and not lost.exists():\n    time.sleep(0.01)\n"
        "if rank == 2:\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(300)\n"
    )
    done = hosts.run("", str(tmp_path / "die.py"), str(tmp_path / "lost"), str(tmp_path / "ready"))
    assert done.returncode == 128 + signal.SIGKILL
    assert done.stderr.splitlines() == [
        "beta: rank 2 was ended by SIGKILL",
        "host beta has failed: a rank was ended by SIGKILL; the other hosts were ended",
    ]
    assert _gone(hosts)


def test_a_second_ctrl_c_ends_ranks_that_do_not_listen(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "deaf.py").write_text(
        "import pathlib, signal, sys, time\n"
        "for each in (signal.SIGINT, signal.SIGTERM):\n    signal.signal(each, lambda *_: print('no', flush=True))\n"
        "print('ready', flush=True)\n"
        "end = time.monotonic() + 60\n"
        "while time.monotonic() < end:\n    time.sleep(0.1)\n"
    )
    with hosts.started("", str(tmp_path / "deaf.py")) as process:
        assert process.stdout is not None
        for word in ("ready", "no"):
            if word == "no":
                process.send_signal(signal.SIGINT)
            for _ in range(4):
                while word not in process.stdout.readline():
                    pass
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=SECONDS)
    assert process.returncode == 128 + signal.SIGINT
    assert time.monotonic() - begin < 30  # and not the 60 of the ranks
    assert _gone(hosts)


@pytest.mark.sweep
def test_nothing_outlives_a_launcher_that_is_killed(hosts: Hosts, tmp_path: Path) -> None:
    with hosts.started("", "pretrain", *tiny(tmp_path / "run", f"--tp 2 {SLOW}")) as process:
        wait_until(lambda: len(_steps(tmp_path / "run")) > 2, timeout=2 * SECONDS)
        process.kill()
        assert _gone(hosts)


def test_a_host_that_cannot_be_reached_is_a_sentence(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("gone slots=1\nalpha slots=1\n")
    first = hosts.run("--ssh-port 2222", "pretrain")
    assert first.returncode == 2
    assert first.stderr == (
        "host gone cannot be reached: ssh: Could not resolve hostname gone; this must work without a password: "
        "ssh -o BatchMode=yes -p 2222 gone true\n"
    )
    (tmp_path / "hosts").write_text("alpha slots=1\ngone slots=1\n")
    (tmp_path / "wait.py").write_text("import time\ntime.sleep(300)\n")
    later = hosts.run("", str(tmp_path / "wait.py"))
    assert later.returncode == 1
    assert later.stderr.splitlines()[-1] == (
        "host gone cannot be reached, or was lost (ssh has ended with status 255); the other hosts were ended"
    )
    assert _gone(hosts)


def _steps(run_dir: Path) -> dict[int, object]:
    return dict(steps_of(run_dir)) if (run_dir / "metrics.jsonl").exists() else {}


def _gone(hosts: Hosts) -> bool:
    """Whether nothing is left of a run, by and by: those that are asked to end have 10 seconds."""
    return wait_until(lambda: not hosts.left(), timeout=SECONDS)
