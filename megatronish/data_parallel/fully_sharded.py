"""How do the ranks of the data axis share the parameters too? ZeRO-3, on torch's `fully_shard`.

Each rank keeps some rows of every parameter, in fp32: they are the optimizer's masters. A layer's parameters are
gathered, in the precision of the run, when its forward or its backward begins, and freed when it ends; what is left of
the stage (embedding, final norm, head) is one more such unit around them. After the backward of each micro-batch the
gradients are reduce-scattered, as ZeRO-2's are, and add up in fp32 where the optimizer reads them.

What `fully_shard` is not asked to do: groups that are copies of each other (hybrid sharding) sum their gradients once a
step and not once a micro-batch, before tp ranks with partial gradients and the holders of a tied embedding sum
theirs.

While a layer computes, a GPU gathers the next one's parameters: in a forward because the CPU runs ahead of it, in a
backward because each unit is told which one comes next.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from megatronish import comm
from megatronish.data_parallel.offload import OffloadedGradients, memory_on
from megatronish.data_parallel.plan import BucketPlan, plan_buckets
from megatronish.mesh import Axis
from megatronish.sharding import FlatPiece, Piece, Shard, Sharding, flat_pieces


class FullySharded:
    """Parameters and gradients of one rank's stage, by rows. It takes the place of `Zero`, whose attributes it has.

    `chunks` are the layers of each chunk of the stage. `mesh` is `shard_axis` as torch knows it.
    """

    def __init__(
        self,
        stage: nn.Module,
        chunks: Sequence[Sequence[nn.Module]],
        shardings: Mapping[str, Sharding],
        *,
        mesh: DeviceMesh,
        dtype: torch.dtype,
        shard_axis: Axis,
        replicate_axis: Axis,
        tp: Axis,
        embedding_axis: Axis,
        bucket_size: int,
        reduce_dtype: torch.dtype,
        masters_on: torch.device | None = None,
        offload_parameters: bool = False,
    ) -> None:
        """`masters_on` is where masters live if not where the parameters do, which is the CPU if these are offloaded.

        What is left to sum after the backwards is summed `bucket_size` elements at a time.
        """
        self.shard_axis, self.replicate_axis, self.reduce_dtype = shard_axis, replicate_axis, reduce_dtype
        self._stage, *layers = _fully_shard(
            [stage, *(layer for chunk in chunks for layer in chunk)],
            mesh=mesh,
            mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False),
            offload_policy=CPUOffloadPolicy(mesh.device_type == "cuda") if offload_parameters else OffloadPolicy(),
        )
        waiting = iter(layers)
        self._chunks = [list(islice(waiting, len(chunk))) for chunk in chunks]
        for before, layer in (pair for chunk in self._chunks for pair in pairwise(chunk)):
            layer.set_modules_to_backward_prefetch([before])

        kept = {name: parameter for name, parameter in _sharded(stage) if _rows(parameter).numel()}
        self._rows = {name: _rows(parameter) for name, parameter in kept.items()}

        def plan(learns: bool) -> list[BucketPlan]:
            names = [name for name, parameter in kept.items() if parameter.requires_grad == learns]
            return plan_buckets(
                {name: self._rows[name] for name in names},
                shardings,
                tp=tp,
                embedding_axis=embedding_axis,
                shard_axis=Axis("shared"),  # what lies here is this rank's already
                bucket_size=bucket_size,
                sources=dict.fromkeys(names, frozenset()),
            )

        self._plans = plan(learns=True)
        self.counted = {name for each in (*self._plans, *plan(learns=False)) if each.counted for name in each.names}
        self._sums = [torch.zeros(each.size, device=self._rows[each.names[0]].device) for each in self._plans]
        for name, total in self._views(self._sums).items():
            _let_add_up(kept[name], in_=total)
        self._masters: dict[str, Tensor] = {}
        if masters_on is not None:
            self._masters = self._views([memory_on(masters_on, each) for each in self._sums])
            for name, master in self._masters.items():
                master.copy_(self._rows[name])
        self._seen = OffloadedGradients(self._sums, masters_on)
        self.gradients = self._views(self._seen.tensors)
        self.shards = {
            name: Shard(
                self._masters.get(name, rows),
                _pieces(kept[name], shardings[name].pieces(tp), shard_axis),
            )
            for name, rows in self._rows.items()
        }

    def _views(self, flats: Sequence[Tensor]) -> dict[str, Tensor]:
        """Each parameter's elements in the flat tensors of the plans."""
        pairs = zip(self._plans, flats, strict=True)
        return {name: view for plan, flat in pairs for name, view in plan.views(flat, self._rows).items()}

    def zero(self) -> None:
        """Begin a step."""
        for total in self._sums:
            total.zero_()

    def starting(self, action: tuple[str, int, int], is_last: bool) -> None:
        """(kind, chunk, micro-batch) comes next, and is the last of its kind in its chunk or not."""
        kind, chunk, _ = action
        if kind == "B":
            self._stage.set_is_last_backward(is_last)
            self._stage.set_modules_to_backward_prefetch(self._chunks[chunk][-1:])

    def finish(self) -> None:
        """Returns once every gradient is summed over all that it must be summed over."""
        if self.replicate_axis.size > 1:
            sums = [comm.start_all_reduce(total.to(self.reduce_dtype), self.replicate_axis) for total in self._sums]
            for total, pending in zip(self._sums, sums, strict=True):
                total.copy_(pending.wait())
        for plan, total in zip(self._plans, self._sums, strict=True):
            for axis in plan.finishing_axes:
                comm.all_reduce(total, axis)
        self._seen.start()

    def scale(self, factor: float) -> None:
        """Multiply every gradient."""
        for total in self._sums:
            total.mul_(factor)
        self._seen.scale(factor)

    def counted_gradients(self) -> list[Tensor]:
        """Flat tensors with the gradients that this rank counts."""
        return [total for plan, total in zip(self._plans, self._sums, strict=True) if plan.counted]

    def collect(self) -> None:
        """Returns once the gradients are where the optimizer reads them."""
        self._seen.finish()

    def publish(self, *, frozen: bool = False) -> None:
        """Bring the masters back to where the model is gathered from; the frozen ones never left."""
        for name, master in self._masters.items():
            self._rows[name].copy_(master, non_blocking=True)

    def wait_before(self, module: nn.Module, names: Sequence[str]) -> None:
        """A forward waits for what it gathers in any case."""


def _fully_shard(
    modules: Sequence[nn.Module], *, mesh: DeviceMesh, mp_policy: MixedPrecisionPolicy, offload_policy: OffloadPolicy
) -> list[FSDPModule]:
    """From the last to the first, as a module takes what those inside it have not taken. Gradients add up as sums."""
    for module in reversed(modules):
        fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=mp_policy, offload_policy=offload_policy)
    units: list[FSDPModule] = [module for module in modules if isinstance(module, FSDPModule)]
    for unit in units:
        unit.set_gradient_divide_factor(1)
        unit.set_force_sum_reduction_for_comms(True)
    return units


def _sharded(stage: nn.Module) -> Iterator[tuple[str, DTensor]]:
    """The parameters, which are no longer what they were."""
    for name, parameter in stage.named_parameters():
        assert isinstance(parameter, DTensor)
        yield name, parameter


def _local(parameter: DTensor) -> Tensor:
    with torch.no_grad():
        return parameter.to_local()


def _rows(parameter: DTensor) -> Tensor:
    """What this rank keeps, flat."""
    return _local(parameter).view(-1)


@torch.no_grad()
def _let_add_up(parameter: DTensor, *, in_: Tensor) -> None:
    """From now on `fully_shard` adds the gradient of this rank's rows there.

    `DTensor.from_local` would not do: it moves what is offloaded to the device of the mesh.
    """
    gradient = torch.zeros_like(parameter)
    assert isinstance(gradient, DTensor)
    local = _local(gradient)
    local.data = in_.view(local.shape)
    parameter.grad = gradient


def _pieces(parameter: DTensor, pieces: Iterable[Piece], axis: Axis) -> tuple[FlatPiece, ...]:
    """The rectangles of the global tensor that this rank's rows are: as many for each but the last ranks."""
    num_rows, row = parameter.shape[0], parameter.shape[1:].numel()
    start = min(axis.rank * -(-num_rows // axis.size), num_rows) * row
    return flat_pieces(list(pieces), parameter.shape, start, start + _local(parameter).numel())
