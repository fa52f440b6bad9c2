"""Table of trackers: a new one is a file in this folder and a line here."""

from collections.abc import Callable
from pathlib import Path

from megatronish.config.sections.run import LogConfig
from megatronish.report.trackers.mlflow import MLflow
from megatronish.report.trackers.tensorboard import TensorBoard
from megatronish.report.trackers.tracker import RunDescription, Tracker, Trackers
from megatronish.report.trackers.wandb import WeightsAndBiases

TRACKERS: dict[str, Callable[[LogConfig, Path], Tracker | None]] = {
    "tensorboard": TensorBoard.of,
    "wandb": WeightsAndBiases.of,
    "mlflow": MLflow.of,
}
"""Makers of trackers from section [log] and TensorBoard's folder; None where the section does not ask for one."""


def open_trackers(log: LogConfig, folder: Path, run: RunDescription) -> Trackers:
    """Trackers that a section [log] asks for; TensorBoard's writes into `folder`."""
    made = [make(log, folder) for make in TRACKERS.values()]
    return Trackers([tracker for tracker in made if tracker is not None], run)
