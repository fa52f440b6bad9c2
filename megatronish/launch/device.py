"""The device of a rank and the torch.distributed backend that goes with it.

`--device auto` is CUDA where every rank of the run has a GPU of its own, else the CPU; no two ranks may answer that
differently. Ranks that a plain start forked see the same, so each decides by itself. Under torchrun, SLURM or MPI a
rank sees what its launcher shows it, so they tell each other in the store in which they meet anyway.
"""

import errno
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple
from urllib.parse import urlparse

import torch
import torch.distributed as dist

from megatronish.core.errors import RunError, UserError
from megatronish.launch.place import Place
from megatronish.launch.rendezvous import address_to_listen_on, has_lasting_store, store_of_attempt

ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Variables that torch reads once, when it first uses a GPU."""


@dataclass(frozen=True)
class VisibleDevices:
    """CUDA devices that a process sees: their number, and a name by which other processes know one of them, too."""

    count: int
    identity: Callable[[int], str | None]


class ChosenDevice(NamedTuple):
    """Device of a rank, and a sentence for the user where it is not what was to be expected."""

    device: torch.device
    note: str | None = None


def visible_devices() -> VisibleDevices:
    """CUDA devices that torch sees here."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return VisibleDevices(
        count, lambda index: str(getattr(torch.cuda.get_device_properties(index), "uuid", "")) or None
    )


def choose_device(
    wanted: str, place: Place, *, store: dist.Store | None = None, visible: VisibleDevices | None = None
) -> ChosenDevice:
    """The CPU, or a CUDA device of this rank's own; `wanted` is "auto", "cpu" or "cuda".

    `store` is that of `meeting_store`. UserError for too few devices; with "auto" only on several machines, where the
    CPU is hardly what was wanted.
    """
    if wanted == "cpu":
        return ChosenDevice(torch.device("cpu"))
    visible = visible or visible_devices()
    index, identity = 0, None
    has_own = _has_own_device(place, visible.count)
    if wanted == "cuda" or has_own:
        index = device_index(wanted, place, device_count=visible.count)
        identity = visible.identity(index) if store is not None else None
    if wanted == "auto" and (lacking := _count_lacking(place, store, has_own=has_own, identity=identity)):
        return ChosenDevice(torch.device("cpu"), _why_cpu(place, visible.count, lacking=lacking))
    return ChosenDevice(torch.device("cuda", index))


def allocator_note(environ: Mapping[str, str] = os.environ) -> str | None:
    """Advice for torch's allocator on CUDA, None where it is set: tensors of many sizes leave holes."""
    if any(name in environ for name in ALLOCATOR_SETTINGS):
        return None
    return (
        "memory: torch's allocator keeps segments of fixed sizes, in whose holes larger tensors do not fit; export "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True lets them grow"
    )


def meeting_store(place: Place, *, timeout_minutes: float = 10.0) -> dist.Store | None:
    """The store in which the ranks of another launcher meet, and first agree on their device; None for other ranks.

    RunError if its port is in use, or if rank 0 cannot be reached.
    """
    if place.rendezvous is None or place.rendezvous.startswith("file://"):
        return None
    timeout = timedelta(minutes=timeout_minutes)
    try:
        if has_lasting_store():
            meeting = dist.rendezvous(place.rendezvous, place.rank, place.world_size, timeout=timeout)
            store, _rank, _world_size = next(meeting)
        else:
            store = _store_of_ranks(place, timeout)
    except dist.DistNetworkError as error:
        where = place.rendezvous
        if where == "env://":
            where = f"MASTER_ADDR={os.environ.get('MASTER_ADDR')} MASTER_PORT={os.environ.get('MASTER_PORT')}"
        reason = str(error).partition("\n")[0]
        raise RunError(
            f"the ranks cannot meet at {where}: {reason}; if the port is in use, export another MASTER_PORT to all "
            "ranks; if rank 0 cannot be reached, export as MASTER_ADDR a name of its machine that the others know"
        ) from error
    store.set_timeout(timeout)
    if place.rendezvous == "env://" and has_lasting_store():
        return store_of_attempt(store, place, timeout=timeout)
    return store


def _store_of_ranks(place: Place, timeout: timedelta) -> dist.Store:
    """The store that rank 0 keeps. It listens where the others look for it alone, as far as that is known there."""
    url = urlparse(place.rendezvous or "")
    host, port = url.hostname, url.port
    if place.rendezvous == "env://":
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    assert host is not None and port is not None
    is_keeper, listening = place.rank == 0, None
    if is_keeper and (address := address_to_listen_on(host, is_on_one_machine=place.is_on_one_machine)) is not None:
        listening = _listen(address, port)
    options: dict[str, Any] = {} if listening is None else {"master_listen_fd": listening.detach()}
    return dist.TCPStore(host, port, place.world_size, is_keeper, timeout=timeout, multi_tenant=True, **options)


def _listen(address: str, port: int) -> socket.socket | None:
    """A socket that listens there; None where the address is not this machine's. DistNetworkError if it is taken."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.socket(family)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((address, port))
        listening.listen(2048)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRNOTAVAIL:  # that of a service, or before a translation of addresses
            return None
        raise dist.DistNetworkError(f"port {port} of {address} cannot be listened on: {error.strerror}") from error
    return listening


def client_of(store: dist.Store) -> Any:
    """Another client of the same store, for another thread: a `get` that blocks keeps all users of its client out."""
    clone = getattr(store, "clone", None)  # torch's stubs do not have it
    return store if clone is None else clone()


def _has_own_device(place: Place, device_count: int) -> bool:
    return place.local_world_size <= device_count or (device_count == 1 and place.may_see_own_device)


def _count_lacking(place: Place, store: dist.Store | None, *, has_own: bool, identity: str | None) -> int:
    """Number of ranks of the run that have no device of their own. Two that see the same one device share it."""
    if store is None:  # ranks that see the same
        return 0 if has_own else place.world_size
    if has_own and identity is not None and store.add(f"device/{identity}", 1) > 1:
        has_own = False
    if not has_own:
        store.add("devices/lacking", 1)
    if store.add("devices/counted", 1) == place.world_size:
        store.set("devices/complete", "yes")
    try:
        store.wait(["devices/complete"])
    except dist.DistStoreError as error:
        counted = store.add("devices/counted", 0)
        raise UserError(
            f"only {counted} of {place.world_size} ranks came to the rendezvous within --distributed-timeout-minutes; "
            "look for the first rank that failed, and start all of them"
        ) from error
    return int(store.add("devices/lacking", 0))


def _why_cpu(place: Place, device_count: int, *, lacking: int) -> str | None:
    """A sentence for a run that could have been on GPUs; None where there is none. UserError on several machines."""
    if lacking == place.world_size and device_count == 0:
        return None
    if not place.is_on_one_machine:
        raise UserError(
            f"device=auto: {lacking} of {place.world_size} ranks have no GPU of their own (this rank sees "
            f"{device_count}, and {place.local_world_size} ranks are on its machine); start one rank a GPU, or choose "
            "--device cpu"
        )
    gpus, ranks = ("1 GPU", "1 rank") if device_count == 1 else (f"{device_count} GPUs", f"{device_count} ranks")
    return (
        f"device: the CPU, because {place.local_world_size} ranks need as many GPUs and this machine has {gpus}; for "
        f"the GPU, use a layout of {ranks} (--tp, --pp, --cp, --dp)"
    )


def device_index(wanted: str, place: Place, *, device_count: int) -> int:
    """The index, among the `device_count` devices that this process sees, of the rank's own device.

    Ranks that see the same devices take them in order. SLURM can also show each task one device of its own
    (`--gpus-per-task=1`, `--gpu-bind=single:1`), which every task then calls number 0; a script under mpirun can set
    CUDA_VISIBLE_DEVICES to the same effect. UserError for too few devices.
    """
    if place.local_world_size <= device_count:
        return place.local_rank
    if device_count == 1 and place.may_see_own_device:
        return 0
    remedy = "use fewer ranks, or --device cpu"
    if place.may_see_own_device:
        number = place.local_world_size
        remedy = (
            f"ask for {number} GPUs a node, all of them shown to every task (srun --gpus-per-node={number}) or one "
            f"to each (srun --gpus-per-task=1), {remedy}"
        )
    raise UserError(
        f"device={wanted} with {place.local_world_size} ranks on this machine needs as many GPUs, and torch sees "
        f"{device_count}; {remedy}"
    )


def choose_backend(wanted: str, device: torch.device) -> str:
    """The backend argument of `init_process_group`: a device's own backend, and gloo for tensors on the CPU.

    UserError for a name that neither torch nor a plug-in knows.
    """
    name = wanted
    if wanted == "auto":
        name = "nccl" if device.type == "cuda" else "gloo"
    if name not in dist.Backend.backend_list:
        known = ", ".join(sorted(set(dist.Backend.backend_list) - {"undefined"}))
        raise UserError(f"distributed_backend={wanted} is none that this torch knows; it knows {known}")
    if name == "nccl" and device.type == "cpu":
        raise UserError("distributed_backend=nccl needs a GPU for every rank, but the device is the CPU; leave it out")
    return name if name == "gloo" or device.type == "cpu" else f"cpu:gloo,{device.type}:{name}"
