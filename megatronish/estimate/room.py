"""Room for a run: what its ranks expect to take of the machines that they are on, against what these have.

On the CPU the expected tensors of all ranks of a machine count against its available memory, its swap included, within
the limits of control groups. On GPUs each rank counts against the whole memory of its own device, and what is offloaded
against the machine. Expectations are near and not exact, so a start is refused where they exceed what is there by more
than `MARGIN` alone. Each rank looks while none has allocated its model yet.
"""

import socket
import time
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatronish.config.check import problems
from megatronish.config.config import Config
from megatronish.core.aside import Aside
from megatronish.core.errors import UserError
from megatronish.estimate.costs.layout_costs import memory_of_stages
from megatronish.estimate.costs.memory_table import Memory, format_bytes
from megatronish.estimate.links.facts import available_memory, free_swap
from megatronish.launch.place import place_from_environment
from megatronish.ops.library import fuses_dropout
from megatronish.parallel.all_or_none import all_or_none, from_all
from megatronish.parallel.mesh import Mesh
from megatronish.specs.costs import DeviceType

MARGIN = 1.1
OF_A_RANK = 64 * 2**20
"""Bytes that a rank on a CPU takes besides tensors, once its libraries are there: threads, connections, buffers."""
MOST_RANKS = 4096
SECONDS = 1.5  # for the search of what would fit
MOST_PROPOSED = 2
Change = tuple[str, dict[str, Any]]


class Claim(NamedTuple):
    """What ranks expect to take of one memory: bytes, of how many, and whose it is."""

    needs: int
    has: int
    of: str

    @property
    def is_too_much(self) -> bool:
        """Whether a start is refused."""
        return self.needs > MARGIN * self.has


class RankRoom(NamedTuple):
    """What a rank finds: its machine, the available bytes, and the device's name and bytes (None: a CPU)."""

    machine: str
    available: int
    device: tuple[str, int] | None

    @classmethod
    def of(cls, device: torch.device) -> "RankRoom":
        """As it is now."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            boot = ""
        own = None
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            own = properties.name, properties.total_memory
        return cls(f"{socket.gethostname()} {boot}", available_memory() + free_swap(), own)


def refuse_without_room(config: Config, mesh: Mesh, *, vocab_size: int) -> None:
    """UserError on all ranks if a machine or a device lacks memory for its ranks. A collective call.

    If it cannot be found out, by a fault of this module or of the machine, a line says so and the run starts.
    """
    if not config.resilience.check_memory:
        return
    aside = Aside("the comparison of memory")

    def own() -> RankRoom | None:
        with aside.guard():
            return RankRoom.of(mesh.device)
        return None

    rooms = from_all(mesh.checkpoint_axis, own)
    everyone = [room for room in rooms if room is not None]
    if len(everyone) < len(rooms):  # the same on all ranks
        return

    def look() -> None:
        said = None
        if mesh.is_main:
            with aside.guard():
                said = sentence(config, everyone, vocab_size=vocab_size)
        if said is not None:
            raise UserError(f"{said}; --no-check-memory starts it none the less")

    all_or_none(mesh.checkpoint_axis, look)


def note_on_room(config: Config, device_type: DeviceType, *, vocab_size: int) -> str | None:
    """The same of a run that is not started, whose ranks would all be on this machine; None if there is room.

    Under another launcher this process does not know who is where, and many ranks are never on one machine.
    """
    number = config.layout.world_size
    if place_from_environment() is not None or number > MOST_RANKS or not config.resilience.check_memory:
        return None
    said = None
    with Aside("the comparison of memory").guard():
        said = sentence(config, [RankRoom.of(torch.device(device_type))] * number, vocab_size=vocab_size)
    return None if said is None else f"a start of all ranks here would be refused: {said}"


def sentence(config: Config, everyone: Sequence[RankRoom], *, vocab_size: int) -> str | None:
    """What lacks memory, and flags with which it would not; None if nothing lacks."""
    lacking = fullest(config, everyone, vocab_size=vocab_size)
    if not lacking.is_too_much:
        return None
    needs, has = format_bytes(lacking.needs), format_bytes(lacking.has)
    return f"the run expects {needs} of memory on {lacking.of}, which has {has}; " + _remedy(
        config, everyone, vocab_size
    )


def fullest(config: Config, everyone: Sequence[RankRoom], *, vocab_size: int) -> Claim:
    """The claim that takes most of what is there."""
    on_gpu = any(room.device is not None for room in everyone)
    expected = _expected(config, vocab_size, "cuda" if on_gpu else "cpu")
    return max(_claims(config, everyone, expected), key=lambda claim: claim.needs / max(1, claim.has))


def _claims(config: Config, everyone: Sequence[RankRoom], expected: Sequence[Memory]) -> Iterator[Claim]:
    machines: dict[str, list[int]] = {}
    for rank, room in enumerate(everyone):
        machines.setdefault(room.machine, []).append(rank)
        memory = expected[config.layout.coordinates(rank).pp]
        if room.device is not None:
            name, size = room.device
            yield Claim(memory.total, size, f"the device of rank {rank} ({name})")
    for ranks in machines.values():
        of_ranks = [expected[config.layout.coordinates(rank).pp] for rank in ranks]
        on_gpu = everyone[ranks[0]].device is not None
        needs = sum(memory.host if on_gpu else memory.total + memory.host + OF_A_RANK for memory in of_ranks)
        host = everyone[ranks[0]].machine.partition(" ")[0]
        number = f"{len(ranks)} ranks" if len(ranks) > 1 else "1 rank"
        yield Claim(needs, min(everyone[rank].available for rank in ranks), f"{host or 'other machines'} ({number})")


def _expected(config: Config, vocab_size: int, device: DeviceType) -> list[Memory]:
    return memory_of_stages(config, vocab_size=vocab_size, device=device, kernels=fuses_dropout(device))


def _remedy(config: Config, everyone: Sequence[RankRoom], vocab_size: int) -> str:
    """Flags with which it would fit: single ones, or pairs; else the smallest that was tried."""
    begin, fitting = time.monotonic(), list[str]()
    smallest: tuple[float, str] | None = None
    single = list(_changes(config, on_gpu=everyone[0].device is not None))
    for several in (*((each,) for each in single), *combinations(single, 2)):
        if len(fitting) == MOST_PROPOSED or (time.monotonic() - begin > SECONDS):
            break
        flags = " ".join(flag for flag, _ in several)
        changed = config.with_fields(**{name: value for _, fields in several for name, value in fields.items()})
        if (fitting and any(flag in flags for flag in fitting)) or problems(changed):
            continue
        claim = fullest(changed, everyone[: changed.layout.world_size], vocab_size=vocab_size)
        if claim.needs <= claim.has:
            fitting.append(flags)
        smallest = min(smallest or (claim.needs, flags), (claim.needs, flags))
    if fitting:
        return f"it would fit with {' or with '.join(fitting)}"
    tried = f" (with {smallest[1]} it still takes {format_bytes(smallest[0])})" if smallest else ""
    return f"use more machines or a smaller model{tried}"


def _changes(config: Config, *, on_gpu: bool) -> Iterator[Change]:
    """Changes of one thing that change nothing of what is learned, the cheapest first."""
    parallel, layout, training = config.parallel, config.layout, config.training
    if training.micro_batch_size > 1:
        yield "--micro-batch-size 1", {"micro_batch_size": 1}
    if layout.dp * layout.cp > 1:
        for stage in range(max(1, parallel.zero + 1), 4):
            yield f"--zero-stage {stage}", {"zero_stage": stage, "use_distributed_optimizer": False}
    if config.recompute.recompute_granularity != "full":
        yield "--recompute-granularity full", {"recompute_granularity": "full"}
    if on_gpu and not (parallel.optimizer_cpu_offload or parallel.param_cpu_offload):
        least = max(1, parallel.zero)
        flags = "--optimizer-cpu-offload" + ("" if parallel.zero else " --zero-stage 1")
        yield flags, {"optimizer_cpu_offload": True, "zero_stage": least}
    if not on_gpu and layout.dp > 1:
        yield "--dp 1", {"data_parallel_size": 1}  # of as many samples a step
    for times in (2, 4, 8):
        if layout.dp % times == 0:
            tp, dp = times * layout.tp, layout.dp // times
            fields = {"tensor_model_parallel_size": tp, "data_parallel_size": dp}
            yield f"--tp {tp} --dp {dp}", fields
