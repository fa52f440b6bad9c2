"""The rank of this process, the size of the world and the rendezvous, by the environment variables of its launcher.

Variables of torch.distributed (RANK, WORLD_SIZE, ...) come first, then those of the launchers in LAUNCHERS, in their
order. A plain start sets nothing, so that the launcher of this package starts the local ranks (local.py). A variable
that says "more than one" is never ignored: it leads to a place or to a UserError. No torch in here: config needs the
number of ranks before anything heavy is imported.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from megatronish.core.errors import UserError
from megatronish.launch.launcher import Launcher, integer, refuse_hidden_peers
from megatronish.launch.pulse import Pulses
from megatronish.launch.slurm import Slurm

ENV = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
RANKS_PER_CORE, FEWEST_LOCAL_RANKS = 16, 64  # of a plain start
LOCAL = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")

# The first row that says more than one rank counts. The order resolves what looks like a contradiction: mpirun and
# Flux run inside a job of SLURM, whose variables their ranks inherit, so they come before it; a bare PMI_RANK or
# PMIX_RANK comes after it, because srun sets that, too, and says more by its own variables.
LAUNCHERS = (
    Launcher(
        "Open MPI",
        rank=("OMPI_COMM_WORLD_RANK",),
        size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri"),
    ),
    Launcher(
        "MVAPICH2",
        rank=("MV2_COMM_WORLD_RANK",),
        size=("MV2_COMM_WORLD_SIZE",),
        local_rank=("MV2_COMM_WORLD_LOCAL_RANK",),
        local_size=("MV2_COMM_WORLD_LOCAL_SIZE",),
    ),
    Launcher(
        "MPICH or Intel MPI",
        rank=("PMI_RANK",),
        size=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID",),
        local_size=("MPI_LOCALNRANKS",),
        job=("I_MPI_HYDRA_UUID",),
        marker="MPI_LOCALRANKID",
    ),
    Launcher(
        "Cray PALS",
        rank=("PALS_RANKID",),
        size=("PALS_SIZE", "PMI_SIZE"),
        local_rank=("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
        local_size=("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
        job=("PALS_APID",),
        start="mpiexec",
    ),
    Launcher(
        "jsrun",
        rank=("JSM_NAMESPACE_RANK",),
        size=("JSM_NAMESPACE_SIZE",),
        local_rank=("JSM_NAMESPACE_LOCAL_RANK",),
        local_size=("JSM_NAMESPACE_LOCAL_SIZE",),
        start="jsrun",
    ),
    Launcher(
        "Flux",
        rank=("FLUX_TASK_RANK",),
        size=("FLUX_JOB_SIZE",),
        local_rank=("FLUX_TASK_LOCAL_ID",),
        machines="FLUX_JOB_NNODES",
        job=("FLUX_JOB_ID",),
        start="flux run",
    ),
    Slurm(
        "SLURM",
        rank=("SLURM_PROCID",),
        size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
        local_rank=("SLURM_LOCALID",),
        start="srun",
    ),
    Launcher(
        "PMI",
        rank=("PMI_RANK",),
        size=("PMI_SIZE",),
        local_rank=("PMI_LOCAL_RANK", "MPI_LOCALRANKID"),
        local_size=("PMI_LOCAL_SIZE", "MPI_LOCALNRANKS"),
        job=("PMI_JOBID",),
    ),
    Launcher(
        "PMIx",
        rank=("PMIX_RANK",),
        size=("PMIX_SIZE",),
        local_rank=("PMIX_LOCAL_RANK",),
        local_size=("PMIX_LOCAL_SIZE",),
        job=("PMIX_NAMESPACE",),
        start="prterun",
    ),
)


def leave_quietly(_report: str, _is_reporter: bool) -> None:
    """End this process with status 1 where nothing was arranged for its last words."""
    os._exit(1)


@dataclass(frozen=True)
class Place:
    """A rank among its peers: `local_*` counts those on the same machine.

    `rendezvous` is where they meet, as torch.distributed's `init_method` spells it: `file://PATH` after a plain start,
    `env://` under torchrun, `tcp://HOST:PORT` under MPI and SLURM, None for a process that is alone.
    `may_see_own_device`: the launcher may have shown each of its ranks another GPU, as SLURM can; local ranks and
    torchrun's all see the same. `leave` ends this process at once, from any thread, with status 1 and a message about
    the whole run, which every rank has; the second argument says whether this rank is the one to print it. `launch` is
    the same in all starts by a launcher of this package that starts again, and in no others; `launched` is when the
    first of them began, in seconds of the machine's monotonic clock. Other launchers say neither here: under torchrun
    the name of the launch is in the store in which ranks meet. `guarded` is the context in which pulses of this rank
    are watched from outside of its process: see guard.py.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    rendezvous: str | None = None
    may_see_own_device: bool = False
    leave: Callable[[str, bool], None] = field(default=leave_quietly, compare=False, repr=False)
    launch: str = ""
    launched: float | None = None
    guarded: Callable[[], AbstractContextManager[Pulses | None]] = field(default=nullcontext, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, size_name in (("rank", "world_size"), ("local_rank", "local_world_size")):
            rank, size = getattr(self, name), getattr(self, size_name)
            if not 0 <= rank < size:
                raise UserError(f"{name}={rank} must be at least 0 and below {size_name}={size}")
        if self.local_world_size > self.world_size:
            raise UserError(f"local_world_size={self.local_world_size} exceeds world_size={self.world_size}")

    @property
    def is_on_one_machine(self) -> bool:
        """Whether all ranks of the run are on this machine."""
        return self.local_world_size == self.world_size


def place_from_environment(environ: Mapping[str, str] = os.environ) -> Place | None:
    """The place that a launcher gave this process; None after a plain start.

    UserError if a variable is missing or broken, or says that there are more ranks and none says which this one is.
    """
    launcher = next((launcher for launcher in LAUNCHERS if launcher.is_in_charge(environ)), None)
    is_one_of_several = environ.get("LOCAL_WORLD_SIZE", "1") != "1"
    if is_one_of_several or any(environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return _env_place(environ, launcher)
    if launcher is None:
        refuse_hidden_peers(environ, LAUNCHERS)
        return None
    return Place(*launcher.numbers(environ), may_see_own_device=True)


def _env_place(environ: Mapping[str, str], launcher: Launcher | None) -> Place:
    """The place that RANK, WORLD_SIZE and the other variables of torch.distributed say. UserError if any is missing.

    torchrun sets all six. Kubernetes operators (PyTorchJob, Volcano) leave LOCAL_RANK and LOCAL_WORLD_SIZE out and
    start one process a pod; a script may have copied RANK and WORLD_SIZE from the variables of `launcher`, which then
    knows the local ones.
    """
    given = {name: value for name in ENV if (value := environ.get(name) or _alias(environ, name))}
    for name in given.keys() - {"MASTER_ADDR"}:
        integer(given, name)
    said = ", ".join(f"{name}={value}" for name, value in given.items())
    if not given.keys() & set(LOCAL) and {"RANK", "WORLD_SIZE"} <= given.keys():
        given |= _local_numbers(environ, launcher)
    missing = [name for name in ENV if name not in given]
    if missing:
        raise UserError(
            f"the environment says {said or 'that this is a rank'} but lacks {', '.join(missing)}: "
            "torchrun sets all of them; start with torchrun, or unset them for a plain start"
        )
    return Place(
        rank=integer(given, "RANK"),
        world_size=integer(given, "WORLD_SIZE"),
        local_rank=integer(given, "LOCAL_RANK"),
        local_world_size=integer(given, "LOCAL_WORLD_SIZE"),
        rendezvous="env://",
        # Somebody else may set these variables for tasks of srun; torchrun itself names its run.
        may_see_own_device="TORCHELASTIC_RUN_ID" not in environ,
    )


def _alias(environ: Mapping[str, str], name: str) -> str | None:
    """LOCAL_SIZE for LOCAL_WORLD_SIZE: that is how the launcher of DeepSpeed calls it."""
    return environ.get("LOCAL_SIZE") if name == "LOCAL_WORLD_SIZE" and "LOCAL_RANK" in environ else None


def _local_numbers(environ: Mapping[str, str], launcher: Launcher | None) -> dict[str, str]:
    """LOCAL_RANK and LOCAL_WORLD_SIZE where they are not set: those of the launcher, else one rank on this machine."""
    if launcher is not None:
        numbers = launcher.numbers(environ)
        if (str(numbers.rank), str(numbers.world_size)) == (environ["RANK"], environ["WORLD_SIZE"]):
            return {"LOCAL_RANK": str(numbers.local_rank), "LOCAL_WORLD_SIZE": str(numbers.local_world_size)}
    processes = environ.get("PET_NPROC_PER_NODE", "")
    if processes.isdecimal() and int(processes) > 1:
        raise UserError(
            f"PET_NPROC_PER_NODE={processes} says that this pod runs {processes} ranks, but LOCAL_RANK does not say "
            "which of them this process is; start with torchrun, which reads the PET_ variables"
        )
    return {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


def refuse_too_many(world_size: int) -> None:
    """UserError for more ranks than a plain start begins here: each is a process with memory of its own."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    most = max(FEWEST_LOCAL_RANKS, RANKS_PER_CORE * cores)
    if world_size > most:
        raise UserError(
            f"the layout needs {world_size} ranks, and a plain start begins at most {most} processes on this machine "
            f"with {cores} core{'s' if cores > 1 else ''} ({RANKS_PER_CORE} a core, and {FEWEST_LOCAL_RANKS} at "
            "least); use a smaller layout (--dp, --tp, --pp, --cp), start the ranks with torchrun or srun on several "
            "machines, or try the layout with --dry-run, which starts none"
        )


def threads_per_rank(environ: Mapping[str, str], local_world_size: int) -> int | None:
    """Threads a rank computes with; None leaves torch's own choice: OMP_NUM_THREADS if given, else all cores.

    Several ranks on one machine get one thread each: two busy ranks with two threads each on two cores run a matrix
    product fifty times slower.
    """
    return None if local_world_size == 1 or environ.get("OMP_NUM_THREADS") else 1
