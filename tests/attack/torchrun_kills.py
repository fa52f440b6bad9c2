"""Kills of random workers under torchrun, one after the other in one run, each followed by torchrun's own restart.

No environment variable is set. After every kill all ranks must be new ones that make steps; at the end the losses must
be those of a run that was left in peace, no step missing.

Then hosts are killed: two agents train as one job, one of them and its worker are killed at once, the other has no
restarts left, and must end with the sentence of its own rank. torch's traceback of the agent may follow.

    PYTHONPATH=.:tests/support:tests/attack:tests/launch python tests/attack/torchrun_kills.py [kills]   (minutes)
"""

import contextlib
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from jobs import run_job, steps_of, tiny
from paths import ROOT
from ranks import wait_until
from results import Result, publish
from test_torchrun_restarts import workers
from test_two_nodes import ADDRESSES, _free_port

from megatronish.train.folder import last_step

RANKS, STEPS_BETWEEN, LIMIT = 2, 4, 60.0


def attack(kills: int, folder: Path) -> tuple[int, list[float]]:
    """Kills after which no step was made, and the seconds from each of the others to the next new step."""
    run, numbers = folder / "run", random.Random(1)
    flags = f"--train-iters {STEPS_BETWEEN * 3 * kills} --save-interval 2 --zero-stage 1"
    argv = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--max-restarts", str(kills)]
    argv += [
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "localhost:0",
        str(ROOT / "pretrain_gpt.py"),
        *tiny(run, flags),
    ]
    metrics, failed, seconds = run / "metrics.jsonl", 0, []
    with (folder / "errors").open("w") as errors:
        agent = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=errors)
        for _ in range(kills):
            before = last_step(metrics)
            if not wait_until(lambda at=before: last_step(metrics) >= at + STEPS_BETWEEN, timeout=LIMIT):
                failed += 1
                break
            known = workers(run)
            if len(known) < RANKS:  # it has finished
                break
            made, begin = last_step(metrics), time.monotonic()
            os.kill(numbers.choice(known), signal.SIGKILL)
            new = wait_until(lambda old=known: len(set(workers(run)) - set(old)) == RANKS, timeout=LIMIT)
            if not (new and wait_until(lambda at=made: last_step(metrics) > at, timeout=LIMIT)):
                failed += 1
                break
            seconds.append(time.monotonic() - begin)
        if agent.wait(LIMIT * 2) != 0:
            failed += 1
            print((folder / "errors").read_text()[-3000:])
    calm = run_job(tiny(folder / "calm", f"{flags} --dp {RANKS}"), folder, seconds=LIMIT * 2)
    assert calm.status == 0, calm.errors
    differs = steps_of(run) != steps_of(folder / "calm")
    return failed + differs, seconds


def kill_host(flags: str, killed: int, folder: Path) -> tuple[bool, float]:
    """Whether the other host ends with its own sentence, and the seconds until then."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-id=two"]
    torchrun += ["--rdzv-backend=c10d", f"--rdzv-endpoint={ADDRESSES[0]}:{_free_port(ADDRESSES[0])}"]
    argv = [str(ROOT / "pretrain_gpt.py"), *tiny(folder / "run", f"{flags} --train-iters 100000")]
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    environ = os.environ | {"GLOO_SOCKET_IFNAME": loopback, "OMP_NUM_THREADS": "1"}
    agents = []
    for number, address in enumerate(ADDRESSES):
        command = [*torchrun, f"--local-addr={address}", *argv]
        with (folder / f"host_{number}").open("w") as out:
            agents.append(subprocess.Popen(command, env=environ, stdout=out, stderr=out, start_new_session=True))
    try:
        if not wait_until(lambda: last_step(folder / "run" / "metrics.jsonl") > 5, timeout=LIMIT):
            return False, 0.0
        os.killpg(agents[killed].pid, signal.SIGKILL)
        begin, other = time.monotonic(), 1 - killed
        status = agents[other].wait(LIMIT)
        seconds = time.monotonic() - begin
    finally:
        for agent in agents:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGKILL)
    told = (folder / f"host_{other}").read_text()
    is_told = re.search(r"^rank \d failed: a rank that this one communicates with has ended", told, re.MULTILINE)
    if status != 1 or not is_told:
        print(f"{flags}, host {killed} killed: status {status}\n{told[-4000:]}")
    return status == 1 and is_told is not None, seconds


def main() -> int:
    """Attack and print; 1 if a kill was not recovered from, a loss differs, or a lost host was not told."""
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    with tempfile.TemporaryDirectory() as folder:
        failed, seconds = attack(kills, Path(folder))
    middle = statistics.median(seconds) if seconds else 0.0
    told = f"to a new step {middle:.1f} s (at most {max(seconds, default=0):.1f}); losses equal bit for bit"
    workers_killed = Result("workers killed under torchrun", len(seconds), failed, told)
    hosts = []
    for flags in ("--dp 2", "--pp 2"):
        for killed in range(2):
            with tempfile.TemporaryDirectory() as folder:
                hosts.append(kill_host(flags, killed, Path(folder)))
    slowest = max(seconds for _, seconds in hosts)
    told = f"the other host ends with its own sentence, at most {slowest:.1f} s later"
    wrong = sum(not is_told for is_told, _ in hosts)
    return publish(workers_killed, Result("hosts killed under torchrun", len(hosts), wrong, told))


if __name__ == "__main__":
    sys.exit(main())
