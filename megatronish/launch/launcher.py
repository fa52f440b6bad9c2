"""A launcher that starts ranks with variables of its own (MPI, SLURM, ...): what they say, and what they leave open.

Each launcher is a row of LAUNCHERS in place.py: the variables of the rank, the number of ranks, and the same among the
ranks of one machine; of several names the first that is set counts.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from megatronish.core.errors import UserError
from megatronish.launch.ancestors import starter

LOWEST_PORT, NUM_PORTS = 12000, 20000  # below the range that systems hand out

# Variables that count machines but number no process: the ranks are torchrun's to start.
MACHINES = {
    "PET_NNODES": "torchrun",
    "NNODES": "torchrun --nnodes $NNODES --node-rank $NODE_RANK ...",
    "GROUP_WORLD_SIZE": "torchrun",
    "SKYPILOT_NUM_NODES": "torchrun --nnodes $SKYPILOT_NUM_NODES --node-rank $SKYPILOT_NODE_RANK ...",
    "AWS_BATCH_JOB_NUM_NODES": "torchrun --nnodes $AWS_BATCH_JOB_NUM_NODES --node-rank $AWS_BATCH_JOB_NODE_INDEX ...",
}


class Numbers(NamedTuple):
    """Numbers of a rank as its launcher says them, and where the ranks meet."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    rendezvous: str


@dataclass(frozen=True)
class Launcher:
    """A launcher and its variables. `job` has those that are equal on all ranks of a job and on no others.

    `machines` is the number of machines, where the launcher says that instead of the ranks of each. `marker` must be
    set, too, for the row to count.
    """

    name: str
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...] = ()
    machines: str | None = None
    job: tuple[str, ...] = ()
    marker: str | None = None
    start: str = "mpirun"

    def is_in_charge(self, environ: Mapping[str, str]) -> bool:
        """Whether this launcher started this process as one of several ranks."""
        return self._rank_name(environ) is not None and (self.world_size(environ) or 1) > 1

    def numbers(self, environ: Mapping[str, str]) -> Numbers:
        """The numbers of this rank. UserError if some of them, or the rendezvous, cannot be known."""
        rank, size = self._number(environ, self.rank), self.world_size(environ)
        assert rank is not None
        assert size is not None
        local_rank = self._number(environ, self.local_rank)
        local_size = self.local_world_size(environ, size)
        if (local_rank is None or local_size is None) and _is_loopback(environ.get("MASTER_ADDR", "")):
            local_rank, local_size = rank, size  # ranks that meet there are on one machine
        if local_rank is None or local_size is None:
            raise UserError(self._lacks_local(environ))
        address = environ.get("MASTER_ADDR") or self.address(environ)
        if address is None and local_size != size:
            raise UserError(
                f"{self.name} started {size} ranks on several machines, and nothing says where they meet; export "
                "MASTER_ADDR (the host of rank 0) and MASTER_PORT (a free port there) to all ranks, for example "
                "mpirun -x MASTER_ADDR=node1 -x MASTER_PORT=29500 ..."
            )
        address = address or "127.0.0.1"
        port = self.port(environ, is_on_one_machine=local_size == size)
        host = f"[{address}]" if ":" in address else address
        return Numbers(rank, size, local_rank, local_size, f"tcp://{host}:{port}")

    def local_world_size(self, environ: Mapping[str, str], world_size: int) -> int | None:
        """Number of ranks on this machine, None if it is not said."""
        local_size = self._number(environ, self.local_size)
        if local_size is None and self.machines and self.machines in environ:
            return -(-world_size // max(1, integer(environ, self.machines)))
        return local_size

    def address(self, _environ: Mapping[str, str]) -> str | None:
        """Host of rank 0 as the launcher's variables say it."""
        return None

    def port(self, environ: Mapping[str, str], *, is_on_one_machine: bool) -> int:
        """MASTER_PORT, or a port that all ranks of the job derive alike."""
        if "MASTER_PORT" in environ:
            return integer(environ, "MASTER_PORT")
        job = next((environ[name] for name in self.job if environ.get(name)), None)
        if job is None and is_on_one_machine:
            rank_name = self._rank_name(environ)
            assert rank_name is not None
            job = f"process {starter(rank_name, environ[rank_name])}"
        if job is None:
            raise UserError(
                f"{self.name} started ranks on several machines, and MASTER_PORT is not set; export it to all ranks: a "
                f"free port of MASTER_ADDR={environ.get('MASTER_ADDR', '')}"
            )
        return LOWEST_PORT + zlib.crc32(job.encode()) % NUM_PORTS

    def hidden_peers(self, environ: Mapping[str, str]) -> str | None:
        """Why this process may be one of several ranks, although the launcher is not in charge; None if it is alone."""
        for name in (*self.size, *self.local_size):
            if name in environ and integer(environ, name) > 1:
                return (
                    f"{name}={environ[name]} says that {self.name} started {environ[name]} ranks, but "
                    f"{' or '.join(self.rank)} does not say which of them this process is"
                )
        return None

    def lacks_size(self, environ: Mapping[str, str]) -> str | None:
        """Why this process may be one of several ranks, whose number is not said; None if it is not a rank."""
        name = self._rank_name(environ)
        if name is None or self.world_size(environ) is not None:
            return None
        return (
            f"{name}={environ[name]} says that this is a rank of {self.name}, but {' or '.join(self.size)} does not "
            "say how many ranks there are"
        )

    def world_size(self, environ: Mapping[str, str]) -> int | None:
        """Number of ranks, None if it is not said."""
        return self._number(environ, self.size)

    def _rank_name(self, environ: Mapping[str, str]) -> str | None:
        """Name of the variable that has the rank."""
        if self.marker is not None and self.marker not in environ:
            return None
        return next((name for name in self.rank if environ.get(name)), None)

    @staticmethod
    def _number(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
        return next((integer(environ, name) for name in names if environ.get(name)), None)

    def _lacks_local(self, environ: Mapping[str, str]) -> str:
        name = self._rank_name(environ)
        assert name is not None
        lacking = self.local_rank
        if self._number(environ, self.local_rank) is not None:
            lacking = (*self.local_size, *([self.machines] if self.machines else []))
        return (
            f"{name}={environ[name]} says that this is a rank of {self.name}, but the environment lacks "
            f"{' or '.join(lacking)}: start with {self.start}, which sets it, or set all of RANK, WORLD_SIZE, "
            f"LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or unset {name} for a plain start"
        )


def refuse_hidden_peers(environ: Mapping[str, str], launchers: tuple[Launcher, ...]) -> None:
    """UserError if a variable says that there are more ranks and none says which of them this process is."""
    complaints = [launcher.hidden_peers(environ) for launcher in launchers]
    if all(launcher.world_size(environ) is None for launcher in launchers):
        complaints += [launcher.lacks_size(environ) for launcher in launchers]
    if why := next(filter(None, complaints), None):
        raise UserError(
            f"{why}; set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or unset "
            f"{why.partition('=')[0]} for a plain start"
        )
    for name, start in MACHINES.items():
        most = environ.get(name, "").rpartition(":")[2]  # torchrun takes a range, 2:4
        if most.isdecimal() and int(most) > 1:
            raise UserError(
                f"{name}={environ[name]} says that this job has several machines, but this process is started on its "
                f"own; start with {start}, or unset {name} for a run on this machine alone"
            )


def integer(environ: Mapping[str, str], name: str) -> int:
    """The whole number in a variable; UserError if it holds something else."""
    try:
        return int(environ[name])
    except ValueError:
        raise UserError(
            f"{name}={environ[name]} must be a whole number; the launcher sets it (torchrun, srun, mpirun)"
        ) from None


def _is_loopback(address: str) -> bool:
    return address in ("localhost", "::1") or address.startswith("127.")
