"""Watch of a training run: its watchdog, the board of its ranks, and what is kept of a hang."""

import json
import os
import re
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from megatronish.config.config import Config
from megatronish.core.errors import without_passwords
from megatronish.launch.cleanup import RINGS
from megatronish.launch.libraries import dump_flight_record
from megatronish.launch.place import Place
from megatronish.launch.pulse import Pulses
from megatronish.launch.rendezvous import has_lasting_store
from megatronish.train.hooks.health import LONGEST, say_health
from megatronish.watch.heartbeat import Beat, FolderBoard, KeyValueStore, OwnBoard, PatientBoard, StoreBoard
from megatronish.watch.observer import HangLimits
from megatronish.watch.record import RankRecord
from megatronish.watch.watchdog import Watchdog

FILE = "file://"
HANG = "hang.json"
"""File in the folder of logs: the report of the last hang, and the state of every rank."""


def watchdog_of(config: Config, place: Place, record: RankRecord, pulses: Pulses | None = None) -> Watchdog:
    """The watchdog of a run's rank, which has no board yet; its guard sees `pulses`."""
    wanted, logs = config.resilience, config.run_dir / "logs"
    limits = HangLimits.of(
        step=wanted.hang_seconds,
        start=wanted.hang_seconds_start,
        evaluation=wanted.hang_seconds_evaluation,
        save=wanted.hang_seconds_save,
        timeout=60 * config.parallel.distributed_timeout_minutes,
    )

    def keep(report: str, beats: Mapping[int, Beat]) -> None:
        report = without_passwords(report)
        if beats:
            state = {"report": report, "ranks": {rank: asdict(beats[rank]) for rank in sorted(beats)}}
            (logs / HANG).write_text(json.dumps(state, indent=1), encoding="utf-8")
            phase = report.splitlines()[0].replace("the run hangs", "hangs", 1)[:LONGEST]
            say_health(config.run_dir, step=max(0, record.step - 1), phase=phase)
        dump_flight_record(logs / f"flight_record_rank_{place.rank}")

    watchdog = Watchdog(record, limits, config.layout, rank=place.rank, leave=place.leave, on_report=keep)
    if pulses is not None:
        with suppress(OSError):  # no memory file: its pulses come without stacks
            watchdog.pulse_to(pulses, place.rank if pulses.count > 1 else 0)
    return watchdog


def lost_rank(record: RankRecord, error: BaseException) -> str:
    """The sentence of a rank whose collective fails because another rank has ended, or cannot be reached any more."""
    entry, where = record.newest.get(record.main_thread), "a transfer"
    if entry is not None and entry.peer is not None:
        where = f"the {entry.operation} {entry.number:,} over {entry.line.name}, whose other end is rank {entry.peer},"
    elif entry is not None:
        ranks = ", ".join(map(str, entry.line.ranks[:16])) + (", ..." if len(entry.line.ranks) > 16 else "")
        where = f"{entry.operation} {entry.number:,} of {entry.line.name} (ranks {ranks})"
    reason = re.sub(r"^\[[^\]]*\] ", "", without_passwords(str(error)).partition("\n")[0])[:200]
    failed = f"{where} failed in step {record.step} ({reason})" if record.step else f"{where} failed ({reason})"
    return (
        f"a rank that this one communicates with has ended, or its machine is cut off: {failed}. "
        "Look for the first of these ranks that failed, and for its machine; a run continues from its newest checkpoint"
    )


def start_sharing(watchdog: Watchdog, place: Place) -> None:
    """Exchange beats from the first moment, where ranks of one machine were given a file to meet at."""
    if place.rendezvous is None:
        watchdog.share(OwnBoard())
    elif place.rendezvous.startswith(FILE):
        folder = Path(place.rendezvous.removeprefix(FILE) + ".watch")
        watchdog.share(FolderBoard(folder))
        watchdog.share_ring(folder)


def share_by_store(watchdog: Watchdog, place: Place, store: KeyValueStore) -> None:
    """Exchange beats by the store in which the ranks have met, and keep the ring where ranks of one machine see it."""
    is_with_rank_0 = place.rendezvous is not None and not has_lasting_store()
    keeper = (
        "rank 0, whose process has the store of the run," if is_with_rank_0 else "torchrun's agent of the first host"
    )
    watchdog.share(PatientBoard(StoreBoard(store)), kept_by=keeper)
    if place.is_on_one_machine:
        # The process that started the ranks is the same for all of them.
        watchdog.share_ring(Path(tempfile.gettempdir()) / f"{RINGS}{os.getppid()}")
