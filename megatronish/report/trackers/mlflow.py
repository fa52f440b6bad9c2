"""The MLflow tracker: points as metrics, the config as parameters, into a server, a database or a folder.

The environment variables of MLflow work as usual: MLFLOW_TRACKING_URI, MLFLOW_TRACKING_USERNAME and others.
"""

import importlib
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatronish.config.sections.run import LogConfig
from megatronish.core.errors import without_passwords
from megatronish.report.trackers.tracker import (
    Points,
    RunDescription,
    RunSummary,
    Tracker,
    flattened,
    keep_id,
    kept_id,
)

MOST_PARAMETERS, MOST_METRICS = 100, 1000  # of one call
LONGEST_PARAMETER = 500  # characters: the least of what MLflow's stores allow


class MLflow(Tracker):
    """One MLflow run for each run folder: a resumed run continues it."""

    title = "MLflow"

    def __init__(self, log: LogConfig) -> None:
        self.log = log

    @classmethod
    def of(cls, log: LogConfig, _folder: Path) -> "MLflow | None":
        """Tracker of a config that names an experiment."""
        return cls(log) if log.mlflow_experiment else None

    def begin(self, run: RunDescription) -> str:
        """Begin the run, or continue it."""
        try:
            mlflow: Any = importlib.import_module("mlflow")
            self._entities: Any = importlib.import_module("mlflow.entities")
        except ImportError as error:
            raise ModuleNotFoundError("mlflow is not installed; pip install 'megatronish[mlflow]'") from error
        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.ERROR)
        self._client = mlflow.MlflowClient(tracking_uri=_uri(self.log.mlflow_tracking_uri))
        run_id = kept_id(run, "mlflow")
        known = self._known(run_id) if run_id else None
        if run_id is None or known is None:
            run_id, known = self._new(run), {}
            keep_id(run, "mlflow", run_id)
        self._run_id = run_id
        self._add_parameters(run, known)
        where = without_passwords(self._client.tracking_uri)
        return f"MLflow: run {run_id} of experiment {self.log.mlflow_experiment} in {where}"

    def _known(self, run_id: str) -> dict[str, str] | None:
        """Parameters of a run of an earlier start, which runs again; None if this store does not have it."""
        try:
            run = self._client.get_run(run_id)
        except Exception as error:
            if getattr(error, "error_code", "") != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        self._client.update_run(run_id, status="RUNNING")
        return dict(run.data.params)

    def _new(self, run: RunDescription) -> str:
        name = self.log.mlflow_experiment
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(name)
        made = self._client.create_run(experiment_id, run_name=self.log.mlflow_run_name or run.name)
        return made.info.run_id

    def _add_parameters(self, run: RunDescription, known: dict[str, str]) -> None:
        """Add the config. MLflow's parameters never change: what a resume has changed becomes a tag."""
        values = {name: str(value)[:LONGEST_PARAMETER] for name, value in flattened(run.config).items()}
        new = [self._entities.Param(name, value) for name, value in values.items() if name not in known]
        for first in range(0, len(new), MOST_PARAMETERS):
            self._client.log_batch(self._run_id, params=new[first : first + MOST_PARAMETERS])
        for name, value in values.items():
            if name in known and known[name] != value:
                self._client.set_tag(self._run_id, f"{name} from step {run.first_step + 1}", value)

    def add(self, points: Sequence[Points]) -> None:
        """Log the values of all these steps in as few calls as possible."""
        now = int(1000 * time.time())
        metrics = [
            self._entities.Metric(tag, float(value), now, step)
            for values, step, samples in points
            for tag, value in {**values, "consumed samples": samples}.items()
        ]
        for first in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[first : first + MOST_METRICS])

    def end(self, summary: RunSummary) -> None:
        """Add how the run ended; MLflow keeps the last values by itself."""
        self._client.set_tag(self._run_id, "ending", summary.ending)
        self._client.set_terminated(self._run_id, "FAILED" if summary.has_failed else "FINISHED")


def _uri(given: str | None) -> str | None:
    """URI of --mlflow-tracking-uri, which may be a path: of a database if it ends in .db, else of a folder."""
    if given is None or "://" in given or given == "databricks":
        return given
    path = Path(given).absolute()
    if path.suffix == ".db":
        return f"sqlite:///{path}"
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow wants a database; the user wants a folder
    return path.as_uri()
