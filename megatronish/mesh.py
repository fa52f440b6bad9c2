"""Which process groups stand over the grid? The only file that creates them.

A module is never told the mesh: it is handed the `Axis` it communicates on. An axis of size one has no group, and
`comm` then issues no collective; that is how one process runs the same code as a thousand.
"""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megatronish.errors import UserError
from megatronish.layout import Coordinates, Layout


@dataclass(frozen=True)
class Axis:
    """One line of ranks through the mesh, and this process's place on it."""

    name: str
    size: int = 1
    rank: int = 0
    ranks: tuple[int, ...] = (0,)
    group: dist.ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        """Whether this process starts the line."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this process ends the line."""
        return self.rank == self.size - 1


@dataclass(frozen=True)
class Mesh:
    """The axes of this process.

    `data` flattens dp and cp: gradients reduce over both. `shared` and `copied` are data cut into groups that share
    what ZeRO shares, neighbours first, and across these groups; `fully_shared` is `shared` as torch's `fully_shard`
    wants it, where that was asked for. `embedding_axis` joins the first and the last stage, which share a tied
    embedding. `p2p_axes` are pp four times more, for what travels between stages: by kind (F activations, B their
    gradients) and whether to a later stage. NCCL matches by order within a group, so no two directions may share one.
    `checkpoint_axis` is the world once more, over gloo: checkpoints are written by a thread beside training, and what
    two threads send through one group would be mixed up.
    """

    layout: Layout
    coordinates: Coordinates
    device: torch.device
    world: Axis
    checkpoint_axis: Axis
    pp: Axis
    dp: Axis
    cp: Axis
    tp: Axis
    data: Axis
    shared: Axis
    copied: Axis
    embedding_axis: Axis
    p2p_axes: dict[tuple[str, bool], Axis]
    fully_shared: DeviceMesh | None = None

    @classmethod
    def start(
        cls,
        layout: Layout | None = None,
        *,
        rank: int = 0,
        init_method: str | None = None,
        device: torch.device | None = None,
        backend: str = "gloo",
        timeout_minutes: float = 10.0,
        copies: int = 1,
        fully_shared: bool = False,
    ) -> "Mesh":
        """Join the run's process group and make the groups of `layout`; no group at all for a single process.

        `init_method` is `env://` or `file://PATH`, as torch.distributed has it. `copies` is the number of groups that
        share what ZeRO shares. `fully_shared` is for `fully_shard`, which needs a group even of a single process.
        """
        layout = layout or Layout()
        device = device or torch.device("cpu")
        timeout = timedelta(minutes=timeout_minutes)
        if layout.world_size > 1:
            dist.init_process_group(
                backend, init_method=init_method, rank=rank, world_size=layout.world_size, timeout=timeout
            )
        elif fully_shared:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)

        def axis(name: str, groups: list[list[int]], *, at_least: int = 2, over: str | None = None) -> Axis:
            """Every rank calls this for every group, in the same order: that is how torch keeps their names apart."""
            mine = Axis(name, 1, 0, (rank,))
            for ranks in groups:
                group = dist.new_group(ranks, timeout=timeout, backend=over) if len(ranks) >= at_least else None
                if rank in ranks:
                    mine = Axis(name, len(ranks), ranks.index(rank), tuple(ranks), group)
            return mine

        data = layout.groups("dp", "cp")
        share = layout.dp * layout.cp // copies
        last = layout.pp - 1
        stages = layout.groups("pp")
        shared = axis(
            "shared",
            [each[i : i + share] for each in data for i in range(0, len(each), share)],
            at_least=1 if fully_shared else 2,
        )
        return cls(
            layout=layout,
            coordinates=layout.coordinates(rank),
            device=device,
            world=axis("world", [list(range(layout.world_size))]),
            checkpoint_axis=axis("checkpoint", [list(range(layout.world_size))], over="gloo"),
            pp=axis("pp", stages),
            dp=axis("dp", layout.groups("dp")),
            cp=axis("cp", layout.groups("cp")),
            tp=axis("tp", layout.groups("tp")),
            data=axis("data", data),
            shared=shared,
            copied=axis("copied", [each[i::share] for each in data for i in range(share)]),
            embedding_axis=axis("embedding", [[stage[0], stage[last]] for stage in stages] if layout.pp > 1 else []),
            p2p_axes={
                (kind, up): axis(f"{kind} {'up' if up else 'down'}", stages) for kind in "FB" for up in (True, False)
            },
            fully_shared=DeviceMesh.from_group(shared.group, device.type) if fully_shared and shared.group else None,
        )

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that speaks for all."""
        return self.world.rank == 0


def choose_backend(wanted: str, device: torch.device) -> str:
    """What torch.distributed is told: beside a device's own backend there is always gloo, for what lives on the CPU.

    UserError for a name that neither torch nor a plug-in knows.
    """
    name = wanted
    if wanted == "auto":
        name = "nccl" if device.type == "cuda" else "gloo"
    if name not in dist.Backend.backend_list:
        known = ", ".join(sorted(set(dist.Backend.backend_list) - {"undefined"}))
        raise UserError(f"distributed_backend={wanted} is none that this torch knows; it knows {known}")
    return name if name == "gloo" or device.type == "cpu" else f"cpu:gloo,{device.type}:{name}"


def leave() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


@dataclass(frozen=True)
class TensorParallel:
    """Tensor parallelism of a layer: the axis over which its weights are cut.

    With `sequence`, activations between a row-parallel and the next column-parallel layer are cut over the same axis
    along the sequence (sequence parallelism, Korthikanti et al. 2022, arXiv:2205.05198). One rank cuts nothing.
    """

    axis: Axis = Axis("tp")
    sequence: bool = False

    @property
    def size(self) -> int:
        """Number of ranks that share the layer."""
        return self.axis.size

    @property
    def cuts_sequence(self) -> bool:
        """Whether a rank holds only a part [S/tp, B, D] of the residual stream."""
        return self.sequence and self.axis.size > 1

    @property
    def sequence_axis(self) -> Axis:
        """Axis that cuts the residual stream along the sequence: one of a single rank without sequence parallelism."""
        return self.axis if self.cuts_sequence else Axis("sequence")
