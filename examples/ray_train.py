"""A run of several ranks under Ray Train: each worker of Ray is a rank, and Ray starts them again after a failure.

    pip install "ray[train]"
    python examples/ray_train.py --workers 2 --save s3://bucket/run -- --config demo --mock-data --train-iters 20

What follows `--` are the flags of `megatronish pretrain`. Workers share nothing but --save: its newest whole checkpoint
is what a restarted run, of as many workers or of another number, resumes from.
"""

import argparse
import os
import socket
import sys
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig, collective, get_context, report
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from megatronish import Hook, Place, StepRecord, Trainer, UserError, read_config, train_rank


class Report(Hook):
    """Tell Ray the loss of every `interval`-th step, on all workers: each report takes about a second."""

    def __init__(self, interval: int) -> None:
        self.interval = interval

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        """Report a step."""
        if record.step % self.interval == 0:
            report({"step": record.step, "loss": record.result.loss})


def be_rank(settings: dict[str, Any]) -> None:
    """A worker: find the other ranks, then train."""
    context = get_context()
    meeting = collective.broadcast_from_rank_zero(_free_address() if context.get_world_rank() == 0 else None)
    place = Place(
        rank=context.get_world_rank(),
        world_size=context.get_world_size(),
        local_rank=context.get_local_rank(),
        local_world_size=context.get_local_world_size(),
        rendezvous=f"tcp://{meeting}",
    )
    config, notes = read_config(settings["argv"], world_size=place.world_size)
    os.chdir(settings["folder"])  # Ray gives each worker a folder of its own
    train_rank(config, place, notes=notes, hooks=[Report(settings["interval"])])


def _free_address() -> str:
    """Address of this machine with a port that is free."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return f"{ray.util.get_node_ip_address()}:{listener.getsockname()[1]}"


def main() -> int:
    """Run the example; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--save", required=True, help="folder or URL that all workers reach")
    parser.add_argument("--report-interval", type=int, default=50, help="steps between reports to Ray")
    parser.add_argument("--use-gpu", action="store_true")
    parser.add_argument("flags", nargs="*", help="flags of megatronish pretrain, after --")
    arguments = parser.parse_args()
    argv = [*arguments.flags, "--save", arguments.save]
    try:
        read_config(argv, world_size=arguments.workers)  # a mistake shows here, before Ray starts anything
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    trainer = DataParallelTrainer(
        be_rank,
        train_loop_config={"argv": argv, "folder": str(Path.cwd()), "interval": arguments.report_interval},
        scaling_config=ScalingConfig(num_workers=arguments.workers, use_gpu=arguments.use_gpu),
        run_config=RunConfig(
            name="megatronish", storage_path=str(Path.cwd() / "ray"), failure_config=FailureConfig(max_failures=3)
        ),
    )
    failure = trainer.fit().error
    print("finished" if failure is None else failure)
    return 0 if failure is None else 1


if __name__ == "__main__":
    sys.exit(main())
