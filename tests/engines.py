"""What does one rank of a run hold and do? An engine and its batches, made from the flags of a tiny run."""

from pathlib import Path

from jobs import tiny

from megatronish.config.read import read_config
from megatronish.launch.place import Place
from megatronish.train.engine import Engine
from megatronish.train.job import Job
from megatronish.train.run import start_mesh

NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"


def world_size_of(flags: str) -> int:
    """The ranks that a run with these flags has."""
    return read_config(tiny(Path("never-written"), flags))[0].layout.world_size


def open_job(place: Place, flags: str) -> Job:
    """This rank joins the others of a run with these flags."""
    config, _ = read_config(tiny(Path("never-written"), flags))
    return Job.open(config, start_mesh(config, place))


def take_step(job: Job, engine: Engine, step: int) -> None:
    """Step number `step` on its batch."""
    batch = job.config.global_batch_size
    micro_batches = job.batches_of(job.datasets.train)(step * batch, batch)
    engine.step(micro_batches, step=step, learning_rate=1e-3, weight_decay=0.1)
