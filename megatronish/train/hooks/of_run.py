"""The hooks of a run, in the order in which they are called."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from megatronish.checkpoint.replicated.copies import NearbyCopies
from megatronish.config.config import Config
from megatronish.core.aside import Aside
from megatronish.engine.engine import Engine
from megatronish.estimate.planner.forecast import forecast
from megatronish.parallel.mesh import Mesh
from megatronish.report.metrics import RANK_TIMES, Console
from megatronish.report.statistics import num_zeros, params_norm
from megatronish.report.trackers.tracker import Trackers
from megatronish.train.hooks.evaluate import Evaluate
from megatronish.train.hooks.forecast import Forecast
from megatronish.train.hooks.goodput import Goodput
from megatronish.train.hooks.health import Health
from megatronish.train.hooks.log import Log, LogExperts, ProgressBar
from megatronish.train.hooks.nearby import CopyNearby
from megatronish.train.hooks.profile import ProfileSchedule
from megatronish.train.hooks.profiler import MeetStages, MemoryHistory, snapshot_path, step_profiler
from megatronish.train.hooks.replicas import CheckReplicas
from megatronish.train.hooks.save import Save
from megatronish.train.hooks.stop import Stopper
from megatronish.train.hooks.stragglers import Stragglers
from megatronish.train.setup import TrainingJob
from megatronish.train.trainer import Hook, hooks_of


def hooks_of_run(
    job: TrainingJob,
    engine: Engine,
    stopper: Stopper,
    trackers: Trackers,
    *,
    own: Sequence[Hook],
    save: Save,
    copies: NearbyCopies | None,
) -> list[Hook]:
    """All hooks of a run in their order: first that decides to stop, then those that look, the user's `own`, `save`.

    After it come that of copies nearby, which are removed once the last checkpoint is written, and the ledger of time.
    """
    config, mesh, datasets = job.config, job.mesh, job.datasets
    folder = config.run_dir if mesh.is_main else None
    goodput = Goodput(config.run_dir, mesh.record) if mesh.is_main else None
    hooks: list[Hook] = [stopper]
    if folder is not None:  # before hooks that send something after a step, as norms for the log
        with Aside("the forecast").guard():
            hooks.append(_forecast(job, folder))
    limits, has_peers = config.resilience, mesh.world.size > 1
    if limits.straggler_interval and has_peers:
        times = folder and folder / RANK_TIMES
        hooks.append(Stragglers(mesh, interval=limits.straggler_interval, ratio=limits.straggler_ratio, file=times))
    if mesh.is_main:
        hooks.append(Health(config.run_dir))
    hooks.append(_log(job, engine, trackers, goodput))
    if config.model.num_experts is not None:
        hooks.append(LogExperts(config=config.log, folder=folder, trackers=trackers))
    hooks += _recordings(config, mesh)
    if config.training.eval_iters > 0:
        hooks.append(
            Evaluate(
                {name: job.evaluation_of(valid) for name, valid in datasets.valid.items()},
                None if datasets.test is None else job.evaluation_of(datasets.test),
                interval=config.training.eval_interval,
                num_batches=config.training.eval_iters,
                file=folder and folder / "evaluations.jsonl",
                trackers=trackers,
                console=Console.of(config.log.log_format),
            )
        )
    hooks += hooks_of(config.log, job)
    check = None
    if limits.check_replicas_interval and has_peers:
        saves = config.checkpoint.save_interval
        replicas = CheckReplicas(interval=limits.check_replicas_interval, save_interval=saves, stopper=stopper)
        hooks.append(replicas)
        check = replicas.check
    hooks += [*own, save]
    if copies is not None:
        hooks.append(
            CopyNearby(copies, interval=config.checkpoint.save_replicated_interval or 1, save=save, check=check)
        )
    return hooks if goodput is None else [*hooks, goodput]


def _log(job: TrainingJob, engine: Engine, trackers: Trackers, goodput: Goodput | None) -> Log:
    """Lines of the steps, and the columns that the config asks for."""
    log, mesh = job.config.log, job.mesh
    extras: dict[str, Callable[[], float]] = {
        **({"params_norm": partial(params_norm, engine)} if log.log_params_norm else {}),
        **({"num_zeros": lambda: float(num_zeros(engine))} if log.log_num_zeros_in_grad else {}),
        **({"world_size": lambda: mesh.world.size} if log.log_world_size_to_tensorboard else {}),
        **({"goodput": goodput.share} if goodput is not None else {}),
    }
    return Log(
        speed=job.speed,
        config=log,
        file=job.config.run_dir / "metrics.jsonl" if mesh.is_main else None,
        trackers=trackers,
        console=Console.of(log.log_format),
        device=mesh.device,
        extras=extras,
    )


def _forecast(job: TrainingJob, folder: Path) -> Hook:
    """What is expected of the run, to be compared at its end."""
    device = job.mesh.device
    expected = forecast(
        job.config,
        vocab_size=job.vocab_size,
        device_name=job.device_name,
        device_type="cuda" if device.type == "cuda" else "cpu",
    )
    return Forecast(folder / "forecast.json", expected, device)


def _recordings(config: Config, mesh: Mesh) -> list[Hook]:
    """Progress bar, drawn schedules, profiles and memory histories, on the ranks that show or record them."""
    log, folder, rank = config.log, config.run_dir / "profile", mesh.world.rank
    hooks: list[Hook] = []
    if mesh.is_main and (log.progress_bar == "on" or (log.progress_bar == "auto" and sys.stderr.isatty())):
        hooks.append(ProgressBar())
    if log.profile_schedule:
        steps = {"first": log.profile_step_start, "last": log.profile_step_end - 1}
        hooks.append(ProfileSchedule(config.run_dir / "schedule", **steps))
    if log.profile and mesh.pp.size > 1:
        hooks.append(MeetStages(log))
    if rank not in (log.profile_ranks or (0,)):
        return hooks
    if log.profile:
        hooks.append(step_profiler(log, folder, rank=rank, device=mesh.device))
    if log.record_memory_history:
        path = snapshot_path(log.memory_snapshot_path, folder, rank=rank)
        hooks.append(MemoryHistory(path, device=mesh.device, is_main=mesh.is_main))
    return hooks
