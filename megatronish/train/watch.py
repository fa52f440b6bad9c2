"""Watch of a training run: its watchdog, the board of its ranks, and what is kept of a hang."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from megatronish.config.config import Config
from megatronish.launch.flight_recorder import dump_flight_record
from megatronish.launch.place import Place
from megatronish.watch.beat import Beat
from megatronish.watch.board import Board, FolderBoard, KeyValueStore, OwnBoard, StoreBoard
from megatronish.watch.limits import HangLimits
from megatronish.watch.record import Recorder
from megatronish.watch.watchdog import Watchdog

HANG = "hang.json"
"""File in the folder of logs: the report of the last hang, and the state of every rank."""


def watchdog_of(config: Config, place: Place, record: Recorder) -> Watchdog:
    """The watchdog of a run's rank, which has no board yet."""
    wanted, logs = config.resilience, config.run_dir / "logs"
    limits = HangLimits.of(
        step=wanted.hang_seconds,
        start=wanted.hang_seconds_start,
        evaluation=wanted.hang_seconds_evaluation,
        save=wanted.hang_seconds_save,
        timeout=60 * config.parallel.distributed_timeout_minutes,
    )

    def keep(report: str, beats: Mapping[int, Beat]) -> None:
        if beats:
            state = {"report": report, "ranks": {rank: asdict(beats[rank]) for rank in sorted(beats)}}
            (logs / HANG).write_text(json.dumps(state, indent=1), encoding="utf-8")
        dump_flight_record(logs / f"flight_record_rank_{place.rank}")

    return Watchdog(record, limits, config.layout, rank=place.rank, leave=place.leave, on_report=keep)


def board_of(place: Place, store: KeyValueStore | None) -> Board:
    """Where the ranks of a run leave their beats: next to the file in which they meet, or in their store."""
    if place.rendezvous is not None and place.rendezvous.startswith("file://"):
        return FolderBoard(Path(place.rendezvous.removeprefix("file://") + ".watch"))
    return OwnBoard() if store is None else StoreBoard(store)
