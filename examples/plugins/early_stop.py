"""A hook that stops a run once its loss does not fall any more, and writes every best loss to a file.

    python pretrain_gpt.py --plugin examples/plugins/early_stop.py --hook early_stop --hook-args patience=100 ...

Hooks are called in this order: what decides to stop, the log line, the profile, evaluation, the hooks of --hook in
their order, saving. A hook may look at everything and change nothing but `trainer.stop_reason`.
"""

import json
import math
from typing import Any

from megatronish.plugins import register_hook
from megatronish.report.statistics import params_norm
from megatronish.train.setup import TrainingJob
from megatronish.train.trainer import Hook, StepRecord, Trainer


class EarlyStop(Hook):
    """Called on every rank at every step, with the same numbers: so all ranks decide the same."""

    def __init__(self, job: TrainingJob, *, patience: int) -> None:
        self.patience, self.file = patience, job.config.run_dir / "best.jsonl"
        self.best, self.best_step = math.inf, 0

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        """What ranks must do together (here a norm over all of them) stands outside of what the main rank does."""
        if record.result.loss < self.best:
            self.best, self.best_step = record.result.loss, record.step
            line = {"step": record.step, "loss": self.best, "params_norm": params_norm(trainer.engine)}
            if trainer.engine.mesh.is_main:
                with self.file.open("a") as file:
                    file.write(json.dumps(line) + "\n")
        elif record.step - self.best_step >= self.patience:
            trainer.stop_reason = f"the loss has not fallen for {self.patience} steps"

    def state(self) -> dict[str, Any]:
        """What checkpoints keep; a resumed run gets it back in `load_state`."""
        return {"best": self.best, "best_step": self.best_step} if self.best_step else {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Called before the first step after a resume."""
        self.best, self.best_step = state["best"], state["best_step"]


register_hook("early_stop", EarlyStop, options={"patience": 1000})
