"""Table of trackers: a new one is a file in this folder and a line here."""

from collections.abc import Callable

from megatronish.config.config import Config
from megatronish.report.trackers.mlflow import MLflow
from megatronish.report.trackers.tensorboard import TensorBoard
from megatronish.report.trackers.tracker import RunDescription, Tracker, Trackers
from megatronish.report.trackers.wandb import WeightsAndBiases

TRACKERS: dict[str, Callable[[Config], Tracker | None]] = {
    "tensorboard": TensorBoard.of,
    "wandb": WeightsAndBiases.of,
    "mlflow": MLflow.of,
}
"""Makers of trackers; None where the config does not ask for one."""


def open_trackers(config: Config, run: RunDescription) -> Trackers:
    """Trackers that a config asks for."""
    made = [make(config) for make in TRACKERS.values()]
    return Trackers([tracker for tracker in made if tracker is not None], run)
