"""Process groups over the grid of ranks: the only file that creates them.

A module is never told the mesh: it is handed the `Axis` it communicates on. An axis of size one has no group, and
`comm` then issues no collective; that is how one process runs the same code as a thousand.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megatronish.config.sections.parallel import ParallelConfig
from megatronish.core.errors import RunError
from megatronish.core.layout import Coordinates, ExpertLayout, Layout, RowRoom
from megatronish.launch.os_errors import mishap
from megatronish.launch.place import Place
from megatronish.parallel.schedules.plan import EVERY_LINE, Kind, lines
from megatronish.parallel.schedules.table import SCHEDULES
from megatronish.watch.record import LineRecord, RankRecord

WAITED_FOR = ("tp", "cp", "ep", "etp")
"""Axes whose collectives stand between two products of the same layer: the stage computes next what they bring."""
LINE_ENDS = (" up", " down")  # of the names of lines between stages
LINE_BLOCKS = 4
"""Blocks of a line between stages. A receive is posted ahead and waits on the device: more blocks would wait, too."""


AS_MANY_AS_THERE_ARE = RowRoom()


@dataclass(frozen=True)
class Axis:
    """A line of ranks through the mesh, and this process's rank on it. `line` records its collectives."""

    name: str
    size: int = 1
    rank: int = 0
    ranks: tuple[int, ...] = (0,)
    group: dist.ProcessGroup | None = None
    line: LineRecord | None = field(default=None, compare=False, repr=False)

    @property
    def is_first(self) -> bool:
        """Whether this process starts the line."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this process ends the line."""
        return self.rank == self.size - 1


@dataclass(frozen=True)
class Domain:
    """Reduction domain: the groups of ranks that sum the gradients of some parameters. A `Sharding` names its domain.

    The ranks of `shard` share what ZeRO shards (one rank without ZeRO), those of `replicate` hold copies of it;
    together they are the data ranks of the domain (dp x cp). `model` has the axes that may cut a parameter, by name.
    `holders` join the pipeline stages that hold a tied parameter (`Sharding.tied`): "ends" the first and the last one,
    where both hold a tied embedding, "stages" all of them. `device_mesh` is `shard` as torch's `fully_shard` wants it,
    with ZeRO-3. `secondary` are those neighbours on `shard` that keep among themselves what was gathered (hpZ), and
    `secondary_mesh` is `shard` cut into such neighbours.

    With an outer optimizer (DiLoCo) `shard` and `replicate` are the data ranks of one island alone, and `islands` are
    the ranks that keep the same elements in every island: between two outer steps, with other values.
    """

    name: str = "dense"
    shard: Axis = field(default_factory=partial(Axis, "shard"))
    replicate: Axis = field(default_factory=partial(Axis, "replicate"))
    islands: Axis = field(default_factory=partial(Axis, "islands"))
    model: Mapping[str, Axis] = field(default_factory=dict)
    holders: Mapping[str, Axis] = field(default_factory=dict)
    device_mesh: DeviceMesh | None = None
    secondary: Axis = field(default_factory=partial(Axis, "secondary"))
    secondary_mesh: DeviceMesh | None = None

    @property
    def counting_axes(self) -> tuple[Axis, ...]:
        """Axes over which a count is summed: `shard`, whose parts are disjoint, and every model axis.

        Of the copies that model ranks hold `Sharding.is_counted` leaves one. `replicate` is no such axis: its ranks
        hold the same and would count it again.
        """
        return self.shard, *self.model.values()

    @property
    def unsharded(self) -> "Domain":
        """The domain as it concerns what lies sharded already: each rank, and those that hold copies of its shard."""
        return replace(self, shard=Axis("shard"))


def dense_domain(tp: Axis) -> dict[str, Domain]:
    """The only domain of a model without data ranks, whose layers tp cuts."""
    return {"dense": Domain(model={"tp": tp})}


@dataclass(frozen=True)
class ExpertParallel:
    """Expert parallelism of a layer: ranks of `ep` hold different experts, ranks of `etp` parts of the same ones.

    `room` says how many rows a rank of ep sends each other one in training. `exchange` sends them by DeepEP
    (parallel/deep_ep.py), where it can.
    """

    ep: Axis = Axis("ep")
    etp: Axis = Axis("etp")
    room: RowRoom = AS_MANY_AS_THERE_ARE
    exchange: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Mesh:
    """The axes of this process.

    Gradients reduce over dp and cp: `domains` cut these ranks into the groups that ZeRO shards over and across them, by
    the name of each reduction domain. `embedding_axis` joins the first and the last position of the pipeline.
    `p2p_axes` are more process groups over the ranks of pp, for what stages send: one by kind (F activations, B their
    gradients) and direction (True: to a later stage), of those that the schedule has. NCCL matches by order within a
    group, so no two directions may share one. `checkpoint_axis` is the world once more, over gloo: checkpoints are
    written by a thread in the background of training, and what two threads send through one group would be mixed up.

    With an outer optimizer `dp` are the dp ranks of this rank's island: the number of islands times its size is that of
    the layout.

    On GPUs `world` moves tensors of the GPU and of the CPU, `dp` and `checkpoint_axis` those of the CPU, and every
    other axis those of the GPU: a group of gloo connects each of its ranks with each, when it is made.
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
    embedding_axis: Axis
    p2p_axes: Mapping[tuple[str, bool], Axis]
    domains: dict[str, Domain]
    experts: ExpertParallel
    record: RankRecord = field(default_factory=RankRecord, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        parallel: ParallelConfig,
        place: Place | None = None,
        *,
        device: torch.device | None = None,
        backend: str = "gloo",
        has_experts: bool = False,
        store: dist.Store | None = None,
        record: RankRecord | None = None,
    ) -> "Mesh":
        """The mesh of a config on the rank at `place`, by default the only one. `record` takes its collectives."""
        place = place or Place()
        schedule = SCHEDULES[parallel.schedule]
        placement = schedule.place(num_stages=parallel.layout.pp)
        return cls.start(
            parallel.layout,
            rank=place.rank,
            init_method=place.rendezvous,
            store=store,
            device=device,
            backend=backend,
            timeout_minutes=parallel.distributed_timeout_minutes,
            zero_stage=parallel.zero,
            copies=parallel.num_copies,
            islands=parallel.num_islands,
            secondary=parallel.zero_hpz_partition_size,
            embedding_stages=(placement[0].stage, placement[-1].stage),
            # Two chunks a stage, where a schedule takes any number, already go round on every line of more.
            lines=lines(schedule.place(num_stages=parallel.layout.pp, num_chunks=schedule.num_chunks or 2)),
            experts=parallel.expert_layout if has_experts else None,
            record=record,
        )

    @classmethod
    def start(
        cls,
        layout: Layout | None = None,
        *,
        rank: int = 0,
        init_method: str | None = None,
        store: dist.Store | None = None,
        device: torch.device | None = None,
        backend: str = "gloo",
        timeout_minutes: float = 10.0,
        zero_stage: int = 0,
        copies: int = 1,
        islands: int = 1,
        secondary: int | None = None,
        embedding_stages: tuple[int, int] = (0, -1),
        lines: Collection[tuple[Kind, bool]] = EVERY_LINE,
        experts: ExpertLayout | None = None,
        record: RankRecord | None = None,
    ) -> "Mesh":
        """Join the run's process group and make the groups of `layout`; no group at all for a single process.

        `init_method` is `env://` or `file://PATH`, as torch.distributed has it; a `store` that is open takes its place.
        In each of `islands` `copies` groups shard what ZeRO shards, and `secondary` neighbours of each keep what was
        gathered. The ends of the model are on `embedding_stages`; `lines` are those of `p2p_axes`. `experts` is the
        grid of a model with experts, on the same ranks.
        """
        layout, record, device = layout or Layout(), record or RankRecord(), device or torch.device("cpu")
        timeout, kept_over = timedelta(minutes=timeout_minutes), (secondary or 0) * layout.tp
        if layout.world_size > 1:
            meeting: dict[str, Any] = {"init_method": init_method} if store is None else {"store": store}
            _meet(backend, rank=rank, world_size=layout.world_size, timeout=timeout, **meeting)
        elif zero_stage == 3:  # fully_shard needs a group even of a single process
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        everyone = tuple(range(layout.world_size))
        axis = partial(new_axis, rank=rank, timeout=timeout, backend=backend_of(device.type, backend), record=record)
        stages, shares = layout.groups("pp"), (zero_stage, islands, copies, kept_over)
        tp, pp = axis("tp", layout.groups("tp")), axis("pp", stages)
        tied = {"ends": axis("embedding", _ends_of(stages, embedding_stages)), "stages": pp}
        domain = partial(_domain, shares=DataShares(*shares), axis=axis, device=device)
        domains = {"dense": domain("dense", layout.groups("dp", "cp"), model={"tp": tp}, holders=tied)}
        if experts is not None:
            groups = layout.expert_groups(experts)
            axes = {name: axis(name, groups[name]) for name in ("ep", "etp")}
            domains["experts"] = domain("experts", groups["edp"], model=axes)
        return cls(
            layout=layout,
            coordinates=layout.coordinates(rank),
            device=device,
            world=_world(everyone, rank, record),
            checkpoint_axis=axis("checkpoint", [everyone], backend=backend_of("cpu", backend, otherwise="gloo")),
            pp=pp,
            dp=axis("dp", _in_rows(layout.groups("dp"), islands), backend=backend_of("cpu", backend)),
            cp=axis("cp", layout.groups("cp")),
            tp=tp,
            embedding_axis=tied["ends"],
            p2p_axes={(kind, up): axis(f"{kind} {'up' if up else 'down'}", stages) for kind, up in sorted(lines)},
            domains=domains,
            experts=ExpertParallel(axes["ep"], axes["etp"]) if experts is not None else ExpertParallel(),
            record=record,
        )

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that speaks for all."""
        return self.world.rank == 0

    @property
    def islands(self) -> Axis:
        """The ranks in this rank's place of every island, and the number of its own; one island without outer steps."""
        return self.domains["dense"].islands

    @property
    def speaks_for_island(self) -> bool:
        """Whether this rank is the one that says what all ranks of its island know."""
        return all(axis.is_first for axis in (self.pp, self.dp, self.cp, self.tp))

    def with_domain(self, domain: Domain) -> "Mesh":
        """The same mesh with one more reduction domain."""
        return replace(self, domains={**self.domains, domain.name: domain})


def backend_of(device_type: str, backend: str, *, otherwise: str | None = None) -> str:
    """The part of a process group's `backend` that moves tensors of a device: cuda:nccl of cpu:gloo,cuda:nccl.

    A backend without parts is that of every device; `otherwise` takes its place, except that of the fake one of a dry
    run, which has no peers to connect to.
    """
    if backend == "fake":
        return backend
    parts = backend.split(",")
    return next((part for part in parts if part.startswith(f"{device_type}:")), otherwise or backend)


def new_axis(
    name: str,
    groups: Sequence[Sequence[int]],
    *,
    rank: int,
    timeout: timedelta | None = None,
    at_least: int = 2,
    backend: str | None = None,
    record: RankRecord | None = None,
) -> Axis:
    """The axis of this rank among `groups`, those of at least so many ranks with a process group.

    `record` takes the axis's collectives. Every rank calls this for every group, in the same order: that is how torch
    keeps their names apart.
    """
    mine = Axis(name, 1, 0, (rank,))
    make = partial(dist.new_group, timeout=timeout, backend=backend, group_desc=name)  # the name is for profiles
    for ranks in groups:
        options = options_of(name, backend, timeout)
        group = make(list(ranks), pg_options=options) if len(ranks) >= at_least else None
        if rank in ranks:
            line = record.line(name, ranks) if record is not None and group is not None else None
            mine = Axis(name, len(ranks), list(ranks).index(rank), tuple(ranks), group, line)
    return mine


def options_of(name: str, backend: str | None, timeout: timedelta | None) -> Any:
    """Options of a group of an axis, an object of its own, as torch writes into it; None where it has none.

    NCCL's kernels on a stream of high priority start as soon as a block of the device is free. On an ordinary one they
    wait until all blocks of the product before them have started, which is the product that should hide them.
    Gradients, which nothing waits for until the step ends, stay behind.
    """
    is_line = name.endswith(LINE_ENDS)
    is_nccl = backend is not None and backend.rpartition(":")[2] == "nccl" and "," not in backend
    if not is_nccl or not (is_line or name in WAITED_FOR) or not dist.is_nccl_available():
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if timeout is not None:
        options._timeout = timeout
    if is_line and hasattr(options, "config"):
        options.config.max_ctas = LINE_BLOCKS
    return options


def _meet(backend: str, *, rank: int, **meeting: Any) -> None:
    """Join the run's process group; RunError if another rank ends meanwhile."""
    try:
        dist.init_process_group(backend, rank=rank, **meeting)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        if (sentence := mishap(error)) is not None:
            raise RunError(sentence) from error
        reason = str(error).partition("\n")[0]
        raise RunError(
            f"rank {rank} lost the others while they met ({reason}); look for the first rank that failed, and start "
            "all of them"
        ) from error


def _world(ranks: tuple[int, ...], rank: int, record: RankRecord) -> Axis:
    """All ranks: torch's own group, if there are several."""
    if len(ranks) == 1:
        return Axis("world", 1, rank, ranks)
    return Axis("world", len(ranks), rank, ranks, dist.group.WORLD, record.line("world", ranks))


def _ends_of(stages: Sequence[Sequence[int]], ends: tuple[int, int]) -> list[list[int]]:
    """The ranks of each pipeline that hold the ends of the model, where they are two."""
    first, last = ends
    return [[ranks[first], ranks[last]] for ranks in stages if ranks[first] != ranks[last]]


class DataShares(NamedTuple):
    """How the data ranks of a domain are cut: into `islands` in a row, with ZeRO each into `copies` groups that shard.

    Of every `kept_over` ranks in a row, of the whole stage, those of a group keep what it has gathered; 0: none do.
    """

    zero_stage: int
    islands: int
    copies: int
    kept_over: int


def _domain(
    name: str,
    groups: Sequence[Sequence[int]],
    *,
    shares: DataShares,
    axis: partial[Axis],
    device: torch.device,
    **model: Any,
) -> Domain:
    """Data ranks `groups` of a domain, and other fields of it, `model`."""
    zero_stage, islands, copies, kept_over = shares
    size = len(groups[0]) // islands
    model["islands"] = axis("islands", [ranks[i::size] for ranks in groups for i in range(size)])
    groups = _in_rows(groups, islands)
    if zero_stage == 0:
        return Domain(name, replicate=axis("replicate", groups), **model)
    size = len(groups[0]) // copies
    shards = [ranks[i : i + size] for ranks in groups for i in range(0, len(ranks), size)]
    replicas = [ranks[i::size] for ranks in groups for i in range(size)]
    shard = axis("shard", shards, at_least=1 if zero_stage == 3 else 2)
    device_mesh = DeviceMesh.from_group(shard.group, device.type) if shard.group and zero_stage == 3 else None
    domain = Domain(name, shard=shard, replicate=axis("replicate", replicas), device_mesh=device_mesh, **model)
    if kept_over == 0:
        return domain
    number = kept_over // (groups[0][1] - groups[0][0])  # apart lie ranks that hold the same
    neighbours = axis("secondary", [ranks[i : i + number] for ranks in shards for i in range(0, size, number)])
    return replace(domain, secondary=neighbours, secondary_mesh=_cut(shard, neighbours, device))


def _in_rows(groups: Sequence[Sequence[int]], number: int) -> list[Sequence[int]]:
    """Each group cut into `number` rows of neighbours."""
    return [ranks[i : i + len(ranks) // number] for ranks in groups for i in range(0, len(ranks), len(ranks) // number)]


def _cut(shard: Axis, neighbours: Axis, device: torch.device) -> DeviceMesh:
    """The ranks of `shard` in rows of neighbours.

    torch would make the groups of such a mesh itself, those of this rank's shard group alone: with a second one, whose
    ranks wait for groups of their own, it hangs. Nothing is sent between rows, so `shard` stands for those groups.
    """
    rows = torch.tensor(shard.ranks, dtype=torch.int).view(-1, neighbours.size)
    assert shard.group is not None and neighbours.group is not None
    return DeviceMesh.from_group(
        [shard.group, neighbours.group], device.type, rows, mesh_dim_names=("rows", neighbours.name)
    )


def leave() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


@dataclass(frozen=True)
class TensorParallel:
    """Tensor parallelism of a layer: the axis over which its weights are cut.

    With `sequence`, activations between a row-parallel and the next column-parallel layer are cut over the same axis
    along the sequence (sequence parallelism, Korthikanti et al. 2022, arXiv:2205.05198). One rank cuts nothing.
    `experts` are the axes over which the experts of a layer lie, which are laid over the same ranks. With `by_pieces`
    the products of a cut sequence are computed piece by piece, while the next one is on its way, which `shares_memory`
    if the ranks read each other's (parallel/symmetric.py).
    """

    axis: Axis = Axis("tp")
    sequence: bool = False
    experts: ExpertParallel = ExpertParallel()
    by_pieces: bool = False
    shares_memory: bool = False

    @property
    def size(self) -> int:
        """Number of ranks that share the layer."""
        return self.axis.size

    @property
    def cuts_sequence(self) -> bool:
        """Whether a rank holds only a part [S/tp, B, D] of the residual stream."""
        return self.sequence and self.axis.size > 1

    @property
    def partial_over(self) -> frozenset[str]:
        """Axes over which a rank sees a part of the tokens, for the `Sharding` of what every rank holds whole."""
        return frozenset({"tp"} if self.cuts_sequence else ())

    @property
    def sequence_axis(self) -> Axis:
        """Axis that cuts the residual stream along the sequence: one of a single rank without sequence parallelism."""
        return self.axis if self.cuts_sequence else Axis("sequence")
