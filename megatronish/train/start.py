"""Start of a rank: where it meets the others, the mesh that they make, and the watchdog that all of them share."""

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch

from megatronish.config.config import Config
from megatronish.config.plugins import import_plugins
from megatronish.core.errors import UserError, without_passwords
from megatronish.launch.cleanup import RINGS
from megatronish.launch.device import allocator_note, choose_backend, choose_device, client_of, meeting_store
from megatronish.launch.libraries import (
    dump_flight_record,
    keep_freed_memory,
    set_determinism,
    switch_on_flight_recorder,
)
from megatronish.launch.place import Place
from megatronish.launch.pulse import Pulses
from megatronish.launch.rendezvous import has_lasting_store, launch_in, refuse_addresses
from megatronish.parallel.mesh import Mesh
from megatronish.parallel.pipeline.cuda_graph import own_stream
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


def start_sharing(watchdog: Watchdog, place: Place) -> None:
    """Exchange beats from the first moment, where ranks of one machine were given a file to meet at."""
    if place.rendezvous is None:
        watchdog.share(OwnBoard())
    elif place.rendezvous.startswith(FILE):
        folder = Path(place.rendezvous.removeprefix(FILE) + ".watch")
        watchdog.share(FolderBoard(folder))
        watchdog.share_ring(folder)


def start_mesh(
    config: Config,
    place: Place,
    *,
    on_note: Callable[[str], None] = lambda _note: None,
    on_launch: Callable[[str], None] = lambda _launch: None,
    record: RankRecord | None = None,
    watchdog: Watchdog | None = None,
) -> Mesh:
    """Mesh of the config, on this rank's device; `on_note` hears why that is not the one to be expected.

    `on_launch` hears the name that torchrun's agents have for all attempts.

    The `watchdog` exchanges beats with those of the other ranks as soon as there is a place for it.
    """
    # 1. Before the device is used and the ranks meet: names of plug-ins, what makes a run deterministic, and addresses
    # at which ranks cannot meet.
    import_plugins(config.plugins.plugin)  # where ranks are spawned and not forked, each for itself
    parallel = config.parallel
    set_determinism(config.training)  # before the device is used
    if place.world_size > 1:
        refuse_addresses()
    # 2. The store is where ranks meet: heartbeats, the name of the launch and the choice of GPUs go through it before
    # there are process groups.
    store = meeting_store(place, timeout_minutes=parallel.distributed_timeout_minutes)
    if watchdog is not None and store is not None:
        _share_by_store(watchdog, place, client_of(store))
    if store is not None and has_lasting_store():
        on_launch(launch_in(store))
    device, note = choose_device(parallel.device, place, store=store)
    if note is not None:
        on_note(note)
    # 3. The device's settings for the whole process, before the first tensor on it.
    if device.type == "cpu":
        keep_freed_memory()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        switch_on_flight_recorder(config.run_dir / "logs")
        if (note := allocator_note()) is not None:
            on_note(note)
    if config.training.cuda_graph:
        if device.type != "cuda":
            raise UserError("cuda_graph needs a GPU, and this run is on the CPU; leave --cuda-graph out")
        own_stream(device)  # from here on all work of this rank is there
    # 4. Process groups of the layout, in the same order on all ranks.
    backend = choose_backend(parallel.distributed_backend, device)
    has_experts = config.model.num_experts is not None
    return Mesh.of(parallel, place, device=device, backend=backend, has_experts=has_experts, store=store, record=record)


def _share_by_store(watchdog: Watchdog, place: Place, store: KeyValueStore) -> None:
    """Exchange beats by the store in which the ranks have met, and keep the ring where ranks of one machine see it."""
    is_with_rank_0 = place.rendezvous is not None and not has_lasting_store()
    keeper = (
        "rank 0, whose process has the store of the run," if is_with_rank_0 else "torchrun's agent of the first host"
    )
    watchdog.share(PatientBoard(StoreBoard(store)), kept_by=keeper)
    if place.is_on_one_machine:
        # The process that started the ranks is the same for all of them.
        watchdog.share_ring(Path(tempfile.gettempdir()) / f"{RINGS}{os.getppid()}")
