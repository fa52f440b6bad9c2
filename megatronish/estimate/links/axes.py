"""Axes that are measured: process groups of the backend of the device, and the machines of their ranks."""

import socket
from collections.abc import Sequence

from megatronish.parallel.all_or_none import from_all
from megatronish.parallel.mesh import Axis, Mesh, backend_of, new_axis


def open_axes(mesh: Mesh, groups: dict[str, list[list[int]]], *, backend: str) -> dict[str, Axis]:
    """An axis of process groups of the device's backend for each; every rank calls this."""
    of_device = backend_of(mesh.device.type, backend)
    return {name: new_axis(name, ranks, rank=mesh.world.rank, backend=of_device) for name, ranks in groups.items()}


def count_nodes(groups: Sequence[Sequence[int]], hosts: Sequence[str]) -> int:
    """Machines of the group that is spread over most of them; `hosts` are those of all ranks."""
    return max(len({hosts[rank] for rank in ranks}) for ranks in groups)


def hosts_of(mesh: Mesh) -> list[str]:
    """Name of every rank's machine."""
    return from_all(mesh.checkpoint_axis, socket.gethostname)
