"""The rank of this process, the size of the world and the rendezvous: the only reader of such environment variables.

Three starts: torchrun sets RANK and its companions, srun sets SLURM_PROCID and its companions, and a plain start sets
nothing, so that the launcher itself starts the local ranks (local.py). No torch in here: config needs the number of
ranks before anything heavy is imported.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

from megatronish.errors import UserError

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Place:
    """A rank among its peers: `local_*` counts those on the same machine.

    `rendezvous` is where they meet, as torch.distributed's `init_method` spells it: `file://PATH` after a plain start,
    `env://` under torchrun, `tcp://HOST:PORT` under SLURM, None for a process that is alone. `may_see_own_device`: the
    launcher may have shown each of its ranks another GPU, as SLURM can; local ranks and torchrun's all see the same.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    rendezvous: str | None = None
    may_see_own_device: bool = False

    def __post_init__(self) -> None:
        for name, size_name in (("rank", "world_size"), ("local_rank", "local_world_size")):
            rank, size = getattr(self, name), getattr(self, size_name)
            if not 0 <= rank < size:
                raise UserError(f"{name}={rank} must be at least 0 and below {size_name}={size}")
        if self.local_world_size > self.world_size:
            raise UserError(f"local_world_size={self.local_world_size} exceeds world_size={self.world_size}")


def place_from_environment(environ: Mapping[str, str] = os.environ) -> Place | None:
    """The place that torchrun or srun gave this process; None after a plain start. UserError if broken."""
    if any(name in environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return _torchrun_place(environ)
    if "SLURM_PROCID" in environ and not _in_a_job_shell(environ) and _slurm_world_size(environ) > 1:
        return _slurm_place(environ)
    return None


def threads_per_rank(environ: Mapping[str, str], local_world_size: int) -> int | None:
    """Threads a rank computes with; None leaves torch's own choice: OMP_NUM_THREADS if given, else all cores.

    Several ranks on one machine get one thread each: two busy ranks with two threads each on two cores run a matrix
    product fifty times slower.
    """
    return None if local_world_size == 1 or environ.get("OMP_NUM_THREADS") else 1


def expand_hosts(nodelist: str) -> list[str]:
    """The hosts of SLURM's bracket notation: `n[01-03,07],x5` is n01 n02 n03 n07 x5."""
    number = r"\d+(?:-\d+)?"
    host = rf"(?:[^\[\],\s]|\[{number}(?:,{number})*\])+"
    if not re.fullmatch(f"{host}(?:,{host})*", nodelist):
        raise UserError(f"cannot read the SLURM node list {nodelist!r}; set MASTER_ADDR to the first host")
    hosts: list[str] = []
    for pattern in re.findall(host, nodelist):
        # Splitting at brackets leaves plain text at even places and numbers at odd ones.
        parts = re.split(r"\[([^\]]*)\]", pattern)
        choices = [_expand_numbers(part) if i % 2 else [part] for i, part in enumerate(parts)]
        hosts += ["".join(choice) for choice in product(*choices)]
    return hosts


def _expand_numbers(numbers: str) -> list[str]:
    """`08-10,12` is 08 09 10 12: zeros in front are part of the names."""
    expanded = []
    for piece in numbers.split(","):
        first, _, last = piece.partition("-")
        expanded += [f"{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1)]
    return expanded


def _torchrun_place(environ: Mapping[str, str]) -> Place:
    missing = [name for name in TORCHRUN if not environ.get(name)]
    if missing:
        present = ", ".join(f"{name}={environ[name]}" for name in TORCHRUN if environ.get(name))
        raise UserError(
            f"the environment says {present or 'that this is a rank'} but lacks {', '.join(missing)}: "
            "torchrun sets all of them; start with torchrun, or unset them for a plain start"
        )
    _integer(environ, "MASTER_PORT")
    return Place(
        rank=_integer(environ, "RANK"),
        world_size=_integer(environ, "WORLD_SIZE"),
        local_rank=_integer(environ, "LOCAL_RANK"),
        local_world_size=_integer(environ, "LOCAL_WORLD_SIZE"),
        rendezvous="env://",
        # Somebody else may set torchrun's variables for tasks of srun; torchrun itself names its run.
        may_see_own_device="TORCHELASTIC_RUN_ID" not in environ,
    )


def _in_a_job_shell(environ: Mapping[str, str]) -> bool:
    """Whether this is a batch script or an interactive shell of a job, where no srun has started the other tasks.

    SLURM says SLURM_PROCID=0 and the job's number of tasks there too, so a rank would wait for peers that never come.
    On a node SLURMD_NODENAME is always set; SLURM_STEP_ID comes from srun alone.
    """
    return "SLURMD_NODENAME" in environ and "SLURM_STEP_ID" not in environ


def _slurm_world_size(environ: Mapping[str, str]) -> int:
    for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"):
        if name in environ:
            return _integer(environ, name)
    return 1


def _slurm_place(environ: Mapping[str, str]) -> Place:
    lists = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    nodelist = next((environ[name] for name in lists if environ.get(name)), None)
    hosts = expand_hosts(nodelist) if nodelist else []
    address = environ.get("MASTER_ADDR") or (hosts[0] if hosts else None)
    if address is None or "SLURM_LOCALID" not in environ:
        lacking = "SLURM_LOCALID" if address else "MASTER_ADDR, SLURM_STEP_NODELIST and SLURM_JOB_NODELIST"
        raise UserError(
            f"SLURM_PROCID={environ['SLURM_PROCID']} says that this is a rank under SLURM, but the environment lacks "
            f"{lacking}: start with srun, which sets them, or unset SLURM_PROCID for a plain start"
        )
    world_size = _slurm_world_size(environ)
    return Place(
        rank=_integer(environ, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=_integer(environ, "SLURM_LOCALID"),
        local_world_size=_slurm_local_world_size(environ, world_size, num_hosts=len(hosts) or 1),
        rendezvous=f"tcp://{address}:{_slurm_port(environ)}",
        may_see_own_device=True,
    )


def _slurm_local_world_size(environ: Mapping[str, str], world_size: int, *, num_hosts: int) -> int:
    """Tasks on this node. SLURM_STEP_TASKS_PER_NODE=2(x3),1 is three nodes of two tasks and one of one."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    if name in environ:
        if not re.fullmatch(r"\d+(\(x\d+\))?(,\d+(\(x\d+\))?)*", environ[name]):
            raise UserError(f"{name}={environ[name]} must look like 4 or 2(x3),1; start with srun, which sets it")
        runs = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ[name])
        counts = [int(tasks) for tasks, repeat in runs for _ in range(int(repeat or 1))]
        node = _integer(environ, "SLURM_NODEID") if "SLURM_NODEID" in environ else 0
        return counts[min(node, len(counts) - 1)]
    if "SLURM_NTASKS_PER_NODE" in environ:
        return min(_integer(environ, "SLURM_NTASKS_PER_NODE"), world_size)
    return -(-world_size // num_hosts)


def _slurm_port(environ: Mapping[str, str]) -> int:
    """MASTER_PORT, or one that every rank of this job step derives alike, below the range that systems hand out."""
    if "MASTER_PORT" in environ:
        return _integer(environ, "MASTER_PORT")
    if "SLURM_JOB_ID" not in environ:
        raise UserError("neither MASTER_PORT nor SLURM_JOB_ID is set; set MASTER_PORT to a free port of the first host")
    step = _integer(environ, "SLURM_STEP_ID") if "SLURM_STEP_ID" in environ else 0
    return 12000 + (31 * _integer(environ, "SLURM_JOB_ID") + step) % 20000


def _integer(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise UserError(f"{name}={environ[name]} must be a whole number; torchrun and srun set it") from None
