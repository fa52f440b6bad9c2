"""The variables of SLURM: tasks of a job step, its nodes, and what a batch script sees without being a task."""

import re
from collections.abc import Mapping
from itertools import product

from megatronish.core.errors import UserError
from megatronish.launch.launcher import LOWEST_PORT, NUM_PORTS, Launcher, integer

NODELISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")

MOST_HOSTS = 1_000_000


class Slurm(Launcher):
    """Launcher srun: the nodes of the step say where the ranks meet, and how many of them are on each node."""

    def is_in_charge(self, environ: Mapping[str, str]) -> bool:
        """Whether srun started this process as one of several tasks."""
        return not is_job_shell(environ) and super().is_in_charge(environ)

    def hidden_peers(self, environ: Mapping[str, str]) -> str | None:
        """Why this process may be one of several tasks; without a step, the job's number of tasks says nothing."""
        return super().hidden_peers(environ) if _in_step(environ) else None

    def lacks_size(self, environ: Mapping[str, str]) -> str | None:
        """Why this process may be one of several tasks whose number is not said; a batch script is none of them."""
        return super().lacks_size(environ) if _in_step(environ) else None

    def local_world_size(self, environ: Mapping[str, str], world_size: int) -> int | None:
        """Tasks on this node. SLURM_STEP_TASKS_PER_NODE=2(x3),1 is three nodes of two tasks and one of one."""
        name = "SLURM_STEP_TASKS_PER_NODE"
        if name in environ:
            if not re.fullmatch(r"\d+(\(x\d+\))?(,\d+(\(x\d+\))?)*", environ[name]):
                raise UserError(f"{name}={environ[name]} must look like 4 or 2(x3),1; start with srun, which sets it")
            runs = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ[name])
            node = integer(environ, "SLURM_NODEID") if "SLURM_NODEID" in environ else 0
            for tasks, repeat in runs:
                node -= int(repeat or 1)
                if node < 0:
                    return int(tasks)
            return int(runs[-1][0])
        if "SLURM_NTASKS_PER_NODE" in environ:
            return min(integer(environ, "SLURM_NTASKS_PER_NODE"), world_size)
        return -(-world_size // (len(_hosts(environ)) or 1))

    def address(self, environ: Mapping[str, str]) -> str | None:
        """The first node of the step. UserError if no list of nodes is set."""
        hosts = _hosts(environ)
        if not hosts:
            raise UserError(
                f"SLURM_PROCID={environ['SLURM_PROCID']} says that this is a rank under SLURM, but the environment "
                "lacks MASTER_ADDR, SLURM_STEP_NODELIST and SLURM_JOB_NODELIST: start with srun, which sets them, or "
                "unset SLURM_PROCID for a plain start"
            )
        return hosts[0]

    def port(self, environ: Mapping[str, str], *, is_on_one_machine: bool) -> int:
        """MASTER_PORT, or one that every rank of this job step derives alike."""
        if "MASTER_PORT" in environ:
            return integer(environ, "MASTER_PORT")
        if "SLURM_JOB_ID" not in environ:
            raise UserError(
                "neither MASTER_PORT nor SLURM_JOB_ID is set; set MASTER_PORT to a free port of the first host"
            )
        step = integer(environ, "SLURM_STEP_ID") if "SLURM_STEP_ID" in environ else 0
        return LOWEST_PORT + (31 * integer(environ, "SLURM_JOB_ID") + step) % NUM_PORTS


def is_job_shell(environ: Mapping[str, str]) -> bool:
    """Whether this is a batch script or an interactive shell of a job, where no srun has started the other tasks.

    SLURM says SLURM_PROCID=0 and the job's number of tasks there too, so a rank would wait for peers that never come.
    On a node SLURMD_NODENAME is always set; SLURM_STEP_ID comes from srun alone.
    """
    return "SLURMD_NODENAME" in environ and "SLURM_STEP_ID" not in environ


def _in_step(environ: Mapping[str, str]) -> bool:
    return "SLURM_STEP_ID" in environ or ("SLURM_PROCID" in environ and not is_job_shell(environ))


def unused_places(environ: Mapping[str, str], *, world_size: int) -> str | None:
    """Note for a plain start of `world_size` ranks in a job with more nodes or tasks, which it leaves idle; else None.

    A note and no error: a batch script, and the shell of salloc, may run one process on purpose.
    """
    if is_job_shell(environ) and (nodes := _count(environ, "SLURM_JOB_NUM_NODES")) > 1:
        return (
            f"this SLURM job has {nodes} nodes, and a plain start uses this one alone; srun starts ranks on all of them"
        )
    tasks = _count(environ, "SLURM_NTASKS")
    if _in_step(environ) or tasks <= world_size:
        return None
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    return (
        f"SLURM_NTASKS={tasks} says that this job has {tasks} tasks, and a plain start runs {ranks} here; srun starts "
        "a rank for each task"
    )


def _count(environ: Mapping[str, str], name: str) -> int:
    """The number in a variable that only a note depends on: 1 where there is none."""
    number = environ.get(name, "")
    return int(number) if number.isdecimal() else 1


def expand_hosts(nodelist: str) -> list[str]:
    """The hosts of SLURM's bracket notation: `n[01-03,07],x5` is n01 n02 n03 n07 x5."""
    number = r"\d+(?:-\d+)?"
    host = rf"(?:[^\[\],\s]|\[{number}(?:,{number})*\])+"
    if not re.fullmatch(f"{host}(?:,{host})*", nodelist):
        raise UserError(f"cannot read the SLURM node list {nodelist!r}; set MASTER_ADDR to the first host")
    hosts: list[str] = []
    if _num_hosts(nodelist) > MOST_HOSTS:
        raise UserError(
            f"the SLURM node list {nodelist!r} names more than {MOST_HOSTS:,} hosts; set MASTER_ADDR to the first host"
        )
    for pattern in re.findall(host, nodelist):
        # Splitting at brackets leaves plain text at even places and numbers at odd ones.
        parts = re.split(r"\[([^\]]*)\]", pattern)
        choices = [_expand_numbers(part) if i % 2 else [part] for i, part in enumerate(parts)]
        hosts += ["".join(choice) for choice in product(*choices)]
    return hosts


def _num_hosts(nodelist: str) -> int:
    """An upper bound of the number of hosts in a list, without writing them out."""
    total = 1
    for numbers in re.findall(r"\[([^\]]*)\]", nodelist):
        ends = [piece.partition("-") for piece in numbers.split(",")]
        total *= sum(max(int(last or first) - int(first) + 1, 0) for first, _, last in ends)
    return total


def _expand_numbers(numbers: str) -> list[str]:
    """`08-10,12` is 08 09 10 12: zeros in front are part of the names."""
    expanded = []
    for piece in numbers.split(","):
        first, _, last = piece.partition("-")
        expanded += [f"{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1)]
    return expanded


def _hosts(environ: Mapping[str, str]) -> list[str]:
    nodelist = next((environ[name] for name in NODELISTS if environ.get(name)), None)
    return expand_hosts(nodelist) if nodelist else []
