"""Pretraining of a GPT: read the config, start the ranks, train."""

import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from megatronish.commands.configuration import read_config
from megatronish.commands.dry_run import dry_run_ranks
from megatronish.commands.exit_status import exit_status_of_ranks, is_main
from megatronish.config.config import Config
from megatronish.config.settings import read_command_line
from megatronish.config.shipped import fields_given
from megatronish.core.errors import signal_name
from megatronish.launch.imports import importing
from megatronish.launch.place import Place, place_from_environment, refuse_too_many

METRICS = "metrics.jsonl"
TRACEBACK = "Traceback (most recent call last):"


def main(
    argv: Sequence[str],
    *,
    program: str = "megatronish pretrain",
    check: Callable[[Sequence[str]], None] = lambda _argv: None,
) -> int:
    """Run the command; the exit status. `check` raises UserError for flags that are wrong for another reason."""
    return exit_status_of_ranks(partial(_run, argv, program, check))


def with_settings(argv: Sequence[str], settings: Mapping[str, str | None], *, run_dir: str) -> list[str]:
    """The command line with these settings in front of it, but those that flags or the file have given.

    A value of None is that of a flag without one. `run_dir` is the folder of a run without a config file.
    """
    line = read_command_line(argv)
    given = fields_given(line)
    if line.config_file is None:
        settings = {**settings, "run_dir": run_dir}
    flags = [(f"--{name.replace('_', '-')}", value) for name, value in settings.items() if name not in given]
    return [*(word for words in flags for word in words if word is not None), *argv]


def _run(argv: Sequence[str], program: str, check: Callable[[Sequence[str]], None], place: Place | None) -> int:
    check(argv)
    config, notes = read_config(argv, world_size=place.world_size if place else None, program=program)
    if not config.log.dry_run:
        if place is None:  # before torch is imported
            refuse_too_many(config.layout.world_size)
        return pretrain(config, notes)
    if config.log.rank is not None:
        return dry_run_ranks(argv) if is_main(place) else 0
    # torch is imported only now, and in `pretrain`: --help and the errors of a config need not wait for it.
    from megatronish.report.first_lines import dry_run

    return dry_run(config, notes) if is_main(place) else 0


def pretrain(config: Config, notes: Sequence[str] = ()) -> int:
    """Train on all ranks of the config's layout; the exit status: 0 finished, 2 a user error, 1 a failure.

    Starts the ranks on this machine, or is one of them where torchrun or srun started this process. `notes` are printed
    with the first lines. An error is printed, not raised.
    """
    with importing():
        from megatronish.checkpoint.folder import STATE, find_checkpoint, step_of
        from megatronish.core.remote import is_url
        from megatronish.inference.sample import print_sample
        from megatronish.launch.local import launch
        from megatronish.launch.patience import apart
        from megatronish.launch.rank import DISK_SECONDS
        from megatronish.launch.restarts import Restarts
        from megatronish.train.folder import last_step
        from megatronish.train.hooks.health import HEALTH, say_last
        from megatronish.train.preflight import preflight_run
        from megatronish.train.run import train

    if config.log.preflight:
        return launch(partial(preflight_run, config, notes), world_size=config.layout.world_size)
    run = partial(train, config, notes)

    def last_made() -> int:
        """Number of the last step, by what was written last: not every step is logged, or told once a second."""
        steps = {path: last_step(path) for path in (config.run_dir / METRICS, config.run_dir / HEALTH)}
        with suppress(OSError):
            saved = None if is_url(config.save_place) else find_checkpoint(Path(config.save_place))
            steps |= {} if saved is None else {saved / STATE: step_of(saved.name)}
        return steps[max(steps, key=_time_of)]

    save = None if is_url(config.save_place) else Path(config.save_place)
    restarts = Restarts(config.resilience.max_restarts, last_made, config.run_dir, save)
    logs, wanted = config.run_dir / "logs", config.resilience
    patience = wanted.hang_seconds_start or wanted.hang_seconds or DISK_SECONDS
    status = launch(run, world_size=config.layout.world_size, log_dir=logs, restarts=restarts, patience=patience)
    if status and place_from_environment() is None:
        ending = _ending_of(status, restarts.sentence)
        apart(2.0, partial(say_last, config.run_dir, ending, knows_first=bool(restarts.sentence)), otherwise=None)
    return status or (print_sample(config) if place_from_environment() is None else 0)


def _ending_of(status: int, sentence: str) -> str:
    """The last word of a run whose ranks could not say it themselves."""
    if sentence and status < 128:
        lines = sentence.splitlines()
        return f"failed: {lines[0].replace(TRACEBACK, lines[-1])[:200]}"
    number = status - 128
    is_signal = number in signal.valid_signals()
    return f"ended by {signal_name(number)}" if is_signal else f"failed: status {status}"


def _time_of(path: Path) -> float:
    """Time of the last change of a file; 0 if it is not there."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
