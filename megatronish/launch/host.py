"""The part of a run on one host of a hostfile: a rank for each slot, which no end of the launcher outlives.

`megatronish launch` starts `python -m megatronish.launch.host` on each host over ssh and writes to its standard input:
first a line of JSON, the plan, and later signals, by number, each in a line. The end of the input is the end of the
launcher, or of the connection: the ranks get SIGTERM, and SIGKILL where that does not end them.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from io import FileIO
from types import FrameType

from megatronish.core.errors import signal_name
from megatronish.launch.ancestors import end_with_parent

LOOK_SECONDS = 0.05  # between two looks at the ranks
LATER_SECONDS = 0.3  # after the first failure, for a rank that was killed, and is the reason, to be seen
PEER_SECONDS = 5.0  # after the first failure, for the others to say what they know (peer_seconds)
LEAVE_SECONDS = 10.0  # between SIGTERM and SIGKILL
LOST = 255
"""Exit status of ssh itself, where there is no connection (any more)."""
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


Asked = queue.SimpleQueue[int | None]
"""Signals that the ranks are to get; None where the launcher is gone."""


@dataclass(frozen=True)
class HostPlan:
    """Ranks of one host: `first_rank` and the next ones, a rank for each of `slots`."""

    command: tuple[str, ...]
    slots: tuple[int, ...]
    first_rank: int
    world_size: int
    master_addr: str
    master_port: int
    variables: Mapping[str, str]

    def line(self) -> bytes:
        """The plan as a line of JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def read(cls, line: bytes) -> "HostPlan":
        """The plan of a line."""
        values = json.loads(line)
        return cls(**values | {"command": tuple(values["command"]), "slots": tuple(values["slots"])})

    def environ(self, local_rank: int) -> dict[str, str]:
        """Variables of torch.distributed, as torchrun sets them, and the devices of this host that are used."""
        return {
            **{"CUDA_VISIBLE_DEVICES": ",".join(map(str, self.slots)), **self.variables},
            **{"RANK": str(self.first_rank + local_rank), "WORLD_SIZE": str(self.world_size)},
            **{"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(len(self.slots))},
            **{"MASTER_ADDR": self.master_addr, "MASTER_PORT": str(self.master_port)},
        }


def run_host(plan: HostPlan, orders: FileIO | None) -> int:
    """Start the ranks and wait for them; the exit status of this host, 128 + n where signal n is the reason.

    `orders` are the lines of the launcher; None without a launcher, where Ctrl-C comes to this process.
    """
    asked: Asked = queue.SimpleQueue()
    _forward_signals(asked)
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for local_rank in range(len(plan.slots)):
            ranks.append(
                subprocess.Popen(
                    plan.command,
                    env=os.environ | plan.environ(local_rank),
                    stdin=subprocess.DEVNULL,
                    preexec_fn=end_with_parent,
                    start_new_session=True,  # a Ctrl-C of the terminal comes once, through this process
                )
            )
        if orders is not None:  # after the forks, which a process with threads had better not do
            threading.Thread(target=_listen, args=(orders, asked), daemon=True).start()
        return _wait(ranks, asked, plan.first_rank)
    finally:
        _send(ranks, signal.SIGKILL)


def _wait(ranks: Sequence[subprocess.Popen[bytes]], asked: Asked, first_rank: int) -> int:
    """Obey, until all ranks have ended or one has failed; the exit status."""
    kill_at = float("inf")  # the launcher is gone: SIGKILL from then on
    while not (failed := _failed(ranks)) and any(rank.returncode is None for rank in ranks):
        if _obey(ranks, asked):
            kill_at = min(kill_at, time.monotonic() + LEAVE_SECONDS)
        if time.monotonic() > kill_at:
            _send(ranks, signal.SIGKILL)
    if not failed:
        return 0
    # 1. Peers of a rank that was killed fail in the same moment, so those that fail a little later are looked at, too.
    time.sleep(LATER_SECONDS)
    killed = [number for number in _failed(ranks) if ranks[number].returncode < 0]
    number = (killed or failed)[0]
    code = ranks[number].returncode
    # After an end from outside, how the ranks end is no reason for anything.
    if kill_at == float("inf"):
        how = f"has ended with status {code}" if code > 0 else f"was ended by {signal_name(-code)}"
        print(f"rank {first_rank + number} {how}", file=sys.stderr, flush=True)
    # 2. What the others say of it, and their end.
    status = code if code > 0 else 128 - code
    for seconds, signum in ((peer_seconds(status), signal.SIGTERM), (LEAVE_SECONDS, signal.SIGKILL)):
        until = time.monotonic() + seconds
        while time.monotonic() < until and any(rank.poll() is None for rank in ranks):
            _obey(ranks, asked)
        _send(ranks, signum)
    return status


def peer_seconds(status: int, *, lost: bool = False) -> float:
    """How long the others may speak after a failure with an exit status, 128 + n for signal n, or a host that was lost.

    Of a rank that was killed and of a host that was lost they know only that they have lost them. SIGABRT is no such
    signal: gloo aborts where ranks differ, and the others then say in what.
    """
    is_reason = lost or (status > 128 and status - 128 in signal.valid_signals())
    return LATER_SECONDS if is_reason and status != 128 + signal.SIGABRT else PEER_SECONDS


def _failed(ranks: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Local numbers of the ranks that have failed so far; every rank is looked at."""
    return [number for number, rank in enumerate(ranks) if rank.poll()]


def _obey(ranks: Sequence[subprocess.Popen[bytes]], asked: Asked) -> bool:
    """Wait a moment for an order, and do it; whether the launcher is gone."""
    with contextlib.suppress(queue.Empty):
        signum = asked.get(timeout=LOOK_SECONDS)
        _send(ranks, signal.SIGTERM if signum is None else signum)
        return signum is None
    return False


def _send(ranks: Sequence[subprocess.Popen[bytes]], signum: int) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.send_signal(signum)


def _forward_signals(asked: Asked) -> None:
    def forward(signum: int, _frame: FrameType | None) -> None:
        asked.put(signum)

    for signum in FORWARDED:
        signal.signal(signum, forward)


def _listen(orders: FileIO, asked: Asked) -> None:
    for line in orders:
        asked.put(int(line))
    asked.put(None)


def main() -> int:
    """The plan from the first line of the standard input, and the ranks."""
    # Without a buffer, whose lock a thread that reads holds until the interpreter ends, which fails by that.
    with open(0, "rb", buffering=0, closefd=False) as orders:
        line = orders.readline()
        if not line:  # the launcher has gone before it said anything
            return 1
        return run_host(HostPlan.read(line), orders)


if __name__ == "__main__":
    sys.exit(main())
