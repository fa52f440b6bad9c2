"""The W&B tracker (Weights & Biases): points, config and summary; offline where the service cannot be reached.

The environment variables of W&B work as usual: WANDB_MODE, WANDB_API_KEY, WANDB_BASE_URL and others.
"""

import importlib
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatronish.config.sections.run import LogConfig
from megatronish.core.errors import without_passwords
from megatronish.report.trackers.tracker import (
    LONGEST_WAIT,
    Points,
    RunDescription,
    RunSummary,
    Tracker,
    keep_id,
    kept_id,
)

INIT_SECONDS = 15.0  # for the service to answer, before the run is kept offline


class WeightsAndBiases(Tracker):
    """One W&B run for each run folder: a resumed run continues it."""

    title = "W&B"

    def __init__(self, log: LogConfig) -> None:
        self.log = log

    @classmethod
    def of(cls, log: LogConfig, _folder: Path) -> "WeightsAndBiases | None":
        """Tracker of a config that names a project."""
        return cls(log) if log.wandb_project else None

    def begin(self, run: RunDescription) -> str:
        """Begin the run, or continue it; offline if the service does not take it."""
        try:
            wandb: Any = importlib.import_module("wandb")
        except ImportError as error:
            raise ModuleNotFoundError("wandb is not installed; pip install 'megatronish[wandb]'") from error
        run_id = kept_id(run, "wandb") or uuid.uuid4().hex[:8]
        keep_id(run, "wandb", run_id)
        reason = None
        sys.argv[:] = map(without_passwords, sys.argv)  # W&B keeps the command line; nothing here reads it again
        try:
            # On a terminal W&B would ask for a key, and wait.
            if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False):
                raise ConnectionError("no API key; `wandb login` keeps one")
            self._run = self._open(wandb, run, run_id, mode=None)
        except Exception as error:
            reason = " ".join(without_passwords(str(error)).split())
            self._run = self._open(wandb, run, run_id, mode="offline")
        if self._run.disabled:
            return "W&B: disabled by WANDB_MODE"
        if not self._run.offline:
            return f"W&B: {self._run.url}"
        folder = self._run.settings.sync_dir
        cause = f"not reached ({reason:.200})" if reason else "offline"
        return f"W&B: {cause}; this run is kept in {folder}, and `wandb sync --append {folder}` uploads it"

    def _open(self, wandb: Any, run: RunDescription, run_id: str, *, mode: str | None) -> Any:
        folder = self.log.wandb_save_dir or str(run.folder)
        limits = {"init_timeout": INIT_SECONDS, "finish_timeout": LONGEST_WAIT - 5}
        return wandb.init(
            project=self.log.wandb_project,
            entity=self.log.wandb_entity or None,
            name=self.log.wandb_exp_name or run.name,
            dir=folder,
            id=run_id,
            resume="allow",
            mode=mode,
            config=run.config,
            allow_val_change=True,  # a resume may change layout and logging
            settings=wandb.Settings(console="off", silent=True, **limits),
        )

    def add(self, points: Sequence[Points]) -> None:
        """Log the values of each step; those of a step that is repeated after a resume are there already."""
        for values, step, samples in points:
            self._run.log({**values, "consumed samples": samples}, step=step)

    def end(self, summary: RunSummary) -> None:
        """Add how the run ended; W&B keeps the last values by itself."""
        self._run.summary.update({"ending": summary.ending})
        self._run.finish(exit_code=int(summary.has_failed))
