"""ZeRO-3 on torch's `fully_shard`: the data ranks shard parameters, gradients and optimizer states.

Each rank keeps some rows of every parameter, in fp32: they are the optimizer's masters, unless those are offloaded.
Rows of what is frozen are in the precision of the run, or in their codes. A layer's parameters are all-gathered, in the
precision of the run, when its forward or its backward begins, and freed when it ends; what is left of the stage
(embedding, final norm, head) is one more such unit around them. In the backward of each micro-batch the gradients of a
unit are reduce-scattered, as ZeRO-2's are, and add up in fp32 where the optimizer reads them.

The stage comes on the meta device. Rows are allocated once it is sharded, and filled with what their names and places
say: no rank ever holds more than its share of the model and what one layer is gathered into.

What `fully_shard` is not asked to do: groups that are replicas of each other (hybrid sharding) sum their gradients once
a step and not once a micro-batch, before tp ranks with partial gradients and the holders of a tied embedding sum
theirs.

While a layer computes, a GPU gathers the next one's parameters: in a forward because the CPU runs ahead of it, in a
backward because each unit knows which one comes next.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice, pairwise

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from megatronish.parallel import comm
from megatronish.parallel.data_parallel.data_parallel import DataParallelSettings, Offload
from megatronish.parallel.data_parallel.gradients import BucketPlan, plan_buckets
from megatronish.parallel.data_parallel.units import Keeping, make_units
from megatronish.parallel.data_parallel.zero import OffloadedGradients, memory_on
from megatronish.parallel.disk import DiskFile, ask_for, copy_between, release
from megatronish.parallel.mesh import Axis, Domain
from megatronish.parallel.pinned import Form
from megatronish.parallel.sharding import FlatPiece, Piece, Shard, Sharding, fill_initial, flat_pieces


class FullySharded:
    """Parameters and gradients of one rank's stage, by rows: a `DataParallel`.

    `stage` lies on the meta device; `chunks` are the layers of each of its chunks. With `seed` None the rows are zeros,
    for a checkpoint to fill.
    """

    def __init__(
        self,
        stage: nn.Module,
        chunks: Sequence[Sequence[nn.Module]],
        shardings: Mapping[str, Sharding],
        domains: Mapping[str, Domain],
        settings: DataParallelSettings,
        *,
        device: torch.device,
        seed: int | None,
    ) -> None:
        self.domains, self.reduce_dtype, self._device = domains, settings.reduce_dtype, device
        for parameter in stage.parameters():
            if parameter.is_floating_point() and not parameter.requires_grad:  # it needs no master
                parameter.data = parameter.data.to(settings.dtype)
        domain_of = {name: domains[sharding.domain] for name, sharding in shardings.items()}
        self._keeping = Keeping()
        # 1. Units, from the inside out: what has its own data ranks (experts), every layer, and the rest of the stage.
        make = partial(make_units, settings=settings, keeping=self._keeping)
        for module, domain in _of_other_domains(stage, domain_of):
            make([module], domain)
        self._stage, *layers = make([stage, *(layer for chunk in chunks for layer in chunk)], domains["dense"])
        # 2. Prefetch in a backward, inside of a chunk; between chunks the schedule decides (`begin_action`).
        waiting = iter(layers)
        self._chunks = [list(islice(waiting, len(chunk))) for chunk in chunks]
        for before, layer in (pair for chunk in self._chunks for pair in pairwise(chunk)):
            layer.set_modules_to_backward_prefetch([before])
        # 3. Memory, now that each rank has only its rows; all of it is filled below or by a checkpoint.
        _allocate(stage, settings.offload, device)

        # Rows of this rank, flat, and the rectangles of the global tensors that they are.
        kept = {name: parameter for name, parameter in _sharded(stage) if _rows(parameter).numel()}
        self._rows = {name: _rows(parameter) for name, parameter in kept.items()}
        pieces = {
            name: _pieces(parameter, shardings[name].pieces(domain_of[name].model), domain_of[name].shard)
            for name, parameter in kept.items()
        }
        for name, rows in self._rows.items():
            rows.zero_()
            if seed is not None:
                for piece in pieces[name]:
                    fill_initial(piece.view(rows), shardings[name], piece.global_offset, names=(seed, "init", name))
            release(rows)

        # Where gradients add up: buckets of what this rank keeps, which are not sharded further.
        self._plans, frozen = (self._plan(kept, shardings, settings, learns=learns) for learns in (True, False))
        counted = {name for plan in (*self._plans, *frozen) if plan.counted for name in plan.names}
        self.counted = {name for name in counted if self._rows[name].is_floating_point()}
        # fp32, whatever the rows are, and flat, so that replicas and partial sums need one collective a bucket.
        self._sums = [torch.zeros(plan.size, device=self._rows[plan.names[0]].device) for plan in self._plans]
        _let_add_up(stage, self._views(self._sums))
        self._masters: dict[str, Tensor] = {}
        # 4. Masters apart from the rows, where they are offloaded: else the fp32 rows are the masters.
        if settings.offload.masters_on is not None:
            self._masters = self._apart(settings.offload)
            copy_between([(master, self._rows[name]) for name, master in self._masters.items()])
        self._offloaded = OffloadedGradients(self._sums, settings.offload.gradients_on)
        self.gradients = self._views(self._offloaded.tensors)
        self.shards = {name: Shard(self._masters.get(name, rows), pieces[name]) for name, rows in self._rows.items()}

    def _plan(
        self,
        kept: Mapping[str, DTensor],
        shardings: Mapping[str, Sharding],
        settings: DataParallelSettings,
        *,
        learns: bool,
    ) -> list[BucketPlan]:
        """Buckets of the rows that learn, or of those that are frozen."""
        names = [name for name, parameter in kept.items() if parameter.requires_grad == learns]
        return plan_buckets(
            {name: self._rows[name] for name in names},
            shardings,
            {name: domain.unsharded for name, domain in self.domains.items()},
            bucket_size=settings.bucket_size,
            alignment=1,
            sources=dict.fromkeys(names, frozenset()),
        )

    def _apart(self, offload: Offload) -> dict[str, Tensor]:
        """Memory for masters, in the CPU's or in a file."""
        if offload.folder is None:
            return self._views(memory_on(torch.device("cpu"), self._sums))
        names = [name for plan in self._plans for name in plan.names]
        forms = [Form(tuple(self._rows[name].shape), torch.float32) for name in names]
        return dict(zip(names, DiskFile(offload.folder).zeros(forms), strict=True))

    def _views(self, flats: Sequence[Tensor]) -> dict[str, Tensor]:
        """Each parameter's elements in the flat tensors of the plans."""
        pairs = zip(self._plans, flats, strict=True)
        return {name: view for plan, flat in pairs for name, view in plan.views(flat, self._rows).items()}

    sum_of = None
    """Nowhere: gradients are reduced as autograd hands them on."""

    def zero(self) -> None:
        """Forget the gradients of the step before."""
        self._keeping.forget()
        for total in self._sums:
            total.zero_()

    def begin_action(self, action: tuple[str, int, int], is_last: bool) -> None:
        """(kind, chunk, micro-batch) comes next, and is the last of its kind in its chunk or not."""
        kind, chunk, _ = action
        self._keeping.begin_action(kind, chunk, is_last=is_last)
        if kind == "B":
            # A backward that is not its chunk's last leaves its reductions in progress: they overlap with what comes
            # next.
            self._stage.set_is_last_backward(is_last)
            self._stage.set_modules_to_backward_prefetch(self._chunks[chunk][-1:])

    def weight_gradient_ready(self, parameter: nn.Parameter) -> None:
        """No W actions: `fully_shard` reduces gradients before one could compute them."""
        raise AssertionError("ZeRO-3 has no deferred weight gradients")

    @property
    def sums(self) -> dict[nn.Parameter, Tensor]:
        """Nothing: no gradient is kept whole."""
        return {}

    def finish_reduction(self) -> None:
        """Returns once every gradient is summed: over data ranks, then over replicas, tp and tied stages."""
        # What is offloaded goes to the device and back, a bucket at a time: NCCL sends nothing from the CPU's memory.
        # 1. Replicas, which `fully_shard` does not know of. All transfers are started before one is waited for, except
        # for those that use the device as a detour.
        under_way = []
        for plan, total in zip(self._plans, self._sums, strict=True):
            if plan.domain.replicate.size > 1:
                on_device = total.to(self._device, self.reduce_dtype)
                pending = comm.start_all_reduce(on_device, plan.domain.replicate)
                if total.device == self._device:
                    under_way.append((total, pending))
                else:
                    total.copy_(pending.wait())
        for total, pending in under_way:
            total.copy_(pending.wait())
        # 2. Partial gradients and tied embeddings, once the sums above are complete.
        for plan, total in zip(self._plans, self._sums, strict=True):
            if plan.sums_over:
                on_device = total.to(self._device)
                for axis in plan.sums_over:
                    comm.all_reduce(on_device, axis)
                if on_device is not total:
                    total.copy_(on_device)
        # 3. To where the optimizer is.
        self._offloaded.start()

    def scale(self, factor: float) -> None:
        """Multiply every gradient of this rank by `factor`."""
        for total in self._sums:
            total.mul_(factor)
        self._offloaded.scale(factor)

    def counted_gradients(self) -> dict[str, list[Tensor]]:
        """Flat tensors with the gradients that this rank counts, and zeros, by domain."""
        gradients: dict[str, list[Tensor]] = {name: [] for name in self.domains}
        for plan, total in zip(self._plans, self._sums, strict=True):
            if plan.counted:
                gradients[plan.domain.name].append(total)
        return gradients

    def wait_for_offload(self) -> None:
        """Returns once the gradients are where the optimizer reads them."""
        self._offloaded.finish()

    def gather_parameters(self, *, frozen: bool = False) -> None:
        """Bring the masters back to where the model is gathered from; the frozen parameters never left."""
        copy_between([(self._rows[name], master) for name, master in self._masters.items()])

    def wait_for_parameters(self) -> None:
        """Nothing to wait for: rows are written before the step ends."""

    def gather_before(self, module: nn.Module, names: Sequence[str]) -> None:
        """A forward waits for what it gathers in any case."""


def _of_other_domains(stage: nn.Module, domain_of: Mapping[str, Domain]) -> Iterator[tuple[nn.Module, Domain]]:
    """The largest modules all of whose parameters are of one domain other than the dense one."""
    paths: list[str] = []
    # Outer modules come first, so a module inside one that was found is left to it.
    for path, module in stage.named_modules():
        names = {domain_of[f"{path}.{name}".lstrip(".")].name for name, _ in module.named_parameters()}
        if len(names) == 1 and names != {"dense"} and not any(path.startswith(f"{other}.") for other in paths):
            paths.append(path)
            yield module, next(domain for domain in domain_of.values() if domain.name in names)


def _allocate(stage: nn.Module, offload: Offload, device: torch.device) -> None:
    """Give this rank's rows memory: of the device, of the CPU, or in a file, padded as `fully_shard` would pad them."""
    if offload.what != "parameters" or offload.folder is None:
        stage.to_empty(device=torch.device("cpu") if offload.what == "parameters" else device)
        return
    allocate_rows(stage, DiskFile(offload.folder), device)


def _sharded(stage: nn.Module) -> Iterator[tuple[str, DTensor]]:
    """The parameters, which `fully_shard` has made DTensors."""
    for name, parameter in stage.named_parameters():
        assert isinstance(parameter, DTensor)
        yield name, parameter


def held(parameter: Tensor) -> Tensor:
    """What this rank holds of a parameter: its rows if it is sharded, else the parameter itself."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _local(parameter: DTensor) -> Tensor:
    with torch.no_grad():
        return parameter.to_local()


def _rows(parameter: DTensor) -> Tensor:
    """What this rank keeps, flat."""
    return _local(parameter).view(-1)


@torch.no_grad()
def _let_add_up(stage: nn.Module, sums: Mapping[str, Tensor]) -> None:
    """From now on `fully_shard` adds the gradient of this rank's rows there.

    `DTensor.from_local` would not do: it moves what is offloaded to the device of the mesh.
    """
    for name, parameter in _sharded(stage):
        if not parameter.requires_grad:
            continue
        # `zeros_like` makes a DTensor with the right layout; only the memory behind it is replaced. One without rows
        # has a gradient, too: what `fully_shard` would give it keeps the padding of all rows in memory.
        gradient = torch.zeros_like(parameter)
        assert isinstance(gradient, DTensor)
        local = _local(gradient)
        local.data = sums[name].view(local.shape) if name in sums else local.new_zeros(local.shape)
        parameter.grad = gradient


def _pieces(parameter: DTensor, pieces: Iterable[Piece], axis: Axis) -> tuple[FlatPiece, ...]:
    """The rectangles of the global tensor that this rank's rows are: as many for each but the last ranks."""
    # torch shards dim 0 as torch.chunk does: ceil(rows / ranks) each, the last ranks fewer or none.
    num_rows, row = parameter.shape[0], parameter.shape[1:].numel()
    start = min(axis.rank * -(-num_rows // axis.size), num_rows) * row
    return flat_pieces(list(pieces), parameter.shape, start, start + _local(parameter).numel())


# Rows on a disk: memory for `fully_shard` in a file, read before a unit is gathered and then forgotten.
#
# `fully_shard` keeps a rank's rows of a parameter in one tensor, padded to as many rows as the first rank has. It would
# pad by copying into memory of its own; here the tensor in the file is padded from the start, and takes its place.
#
# A unit's rows are asked for when the unit before it is gathered. Which one comes next follows from what came after the
# same two units the last time: in a forward the layer above, in a backward the one below. A wrong guess costs time
# alone.


def allocate_rows(stage: nn.Module, disk: DiskFile, device: torch.device) -> None:
    """As `stage.to_empty(device=device)`, with this rank's rows in the file."""
    groups = list(_groups(stage))
    places = {id(place.sharded_param): place for group in groups for place in group.fsdp_params}
    parameters = [each for each in stage.parameters() if isinstance(each, DTensor)]
    forms = [Form(tuple(places[id(each)].padded_sharded_param_size), each.dtype) for each in parameters]
    rows = {id(each): padded for each, padded in zip(parameters, disk.zeros(forms), strict=True)}

    def allocated(tensor: Tensor) -> Tensor:
        if (padded := rows.get(id(tensor))) is None:
            return torch.empty_like(tensor, device=device)
        place = places[id(tensor)]
        # `fully_shard` knows memory that is padded already by its address.
        place._sharded_param_data = padded.view(-1)
        return place.to_sharded_dtensor(padded[: place.sharded_size[0]])

    stage._apply(allocated)
    order = ReadOrder()
    for group in groups:
        order.follow(group)


def _groups(stage: nn.Module) -> Iterator[FSDPParamGroup]:
    for unit in stage.modules():
        if isinstance(unit, FSDPModule):
            yield from unit._get_fsdp_state()._fsdp_param_groups


class ReadOrder:
    """The order in which units are gathered, as far as it was seen."""

    def __init__(self) -> None:
        self._last: tuple[FSDPParamGroup | None, FSDPParamGroup | None] = (None, None)
        self._after: dict[tuple[FSDPParamGroup | None, FSDPParamGroup | None], FSDPParamGroup] = {}

    def follow(self, group: FSDPParamGroup) -> None:
        """From now on have rows read when the group, or the one before it, is gathered, and forgotten afterwards."""
        unshard, wait_for_unshard = group.unshard, group.wait_for_unshard

        def read_and_unshard(async_op: bool = False) -> None:
            if not (group.is_unsharded or group._all_gather_result):
                self._gathers(group)
            unshard(async_op)

        def wait_and_forget() -> None:
            is_gathered = bool(group._all_gather_result)
            wait_for_unshard()
            if is_gathered:  # from the rows, in `unshard` or on a rank alone in the wait
                release(*_rows_of(group))

        vars(group).update(unshard=read_and_unshard, wait_for_unshard=wait_and_forget)

    def _gathers(self, group: FSDPParamGroup) -> None:
        self._after[self._last] = group
        self._last = self._last[1], group
        ask_for(_rows_of(group))
        if (following := self._after.get(self._last)) is not None:
            ask_for(_rows_of(following))


def _rows_of(group: FSDPParamGroup) -> list[Tensor]:
    return [place._sharded_param_data for place in group.fsdp_params]
