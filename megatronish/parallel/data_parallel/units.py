"""Units of torch's `fully_shard`, each gathered and reduced as one: bytes counted, and what neighbours keep of it.

hpZ of ZeRO++ (Wang et al. 2023, arXiv:2306.10209), where N ranks are those of a machine: a forward gathers a unit over
all ranks that shard it, from rows in fp32. When it ends, each rank keeps one part of N, in the precision of the run:
the secondary partition. The backward gathers it over these N ranks alone.

No parameter changes inside a step. So every later forward and backward of the step gathers over the N ranks, too, and
not only the first backward: torch's own `reshard_after_forward=N` forgets the parts after every backward. They are
forgotten when the last backward of the step is done with them; between two steps there are rows alone.
"""

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from megatronish.core.errors import RunError
from megatronish.parallel import comm
from megatronish.parallel.block_codes import decode, encoded
from megatronish.parallel.bucketing import WEIGHT_CODES
from megatronish.parallel.data_parallel.coded_sums import start_coded_sum
from megatronish.parallel.data_parallel.coded_weights import round_weights
from megatronish.parallel.data_parallel.data_parallel import DataParallelSettings
from megatronish.parallel.mesh import Axis, Domain
from megatronish.parallel.sharding import HasShardings

# Transfers of torch's `fully_shard` with their bytes counted on the line of the axis, as those of comm.py are.


class CountedAllGather(DefaultAllGather):
    """Torch's all-gather of a unit's parameters, over one of these axes, which torch chooses."""

    def __init__(self, *axes: Axis) -> None:
        self._axes = axes

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, *args: Any, **kwargs: Any
    ) -> Any:
        """[s] -> [size * s], as torch does it."""
        _count(self._axes, "all_gather", input_tensor, group)
        return super().__call__(output_tensor, input_tensor, group, *args, **kwargs)


class CodedAllGather(CountedAllGather):
    """All-gather of a unit's parameters for torch's `fully_shard`: of matrices as codes (qwZ), of the rest as they are.

    Over any other axis than the first goes what was gathered before, as it is (hpZ).
    """

    def __init__(self, axis: Axis, secondary: Axis, block: int, unit: FSDPModule) -> None:
        super().__init__(axis, secondary)
        self._axis, self._block = axis, block
        parameters = [parameter for group in _groups_of(unit) for parameter in group.fsdp_params]
        self._parts = [_part_of(parameter) for parameter in parameters]
        self._matrices = [each for each, part in zip(parameters, self._parts, strict=True) if part.is_rounded]

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, *args: Any, **kwargs: Any
    ) -> Any:
        """[s] -> [n * s]: in each of n rows the parts of the parameters follow each other."""
        if self._axis.group is None or self._axis.group.group_name != group.group_name:
            return super().__call__(output_tensor, input_tensor, group, *args, **kwargs)
        sizes = [part.size for part in self._parts]
        rows, columns = input_tensor.split(sizes), output_tensor.view(self._axis.size, -1).split(sizes, dim=1)
        vectors = [number for number, part in enumerate(self._parts) if not part.is_rounded]
        if vectors:
            sent = torch.cat([rows[number] for number in vectors])
            whole = sent.new_empty(self._axis.size, len(sent))
            super().__call__(whole.view(-1), sent, group)
            for number, arrived in zip(vectors, whole.split([sizes[number] for number in vectors], 1), strict=True):
                columns[number].copy_(arrived)
        if self._matrices:
            self._gather_codes([each for each, part in zip(columns, self._parts, strict=True) if part.is_rounded])
        return None

    def _gather_codes(self, into: Sequence[Tensor]) -> None:
        """Write all rows of the matrices, [n, s] each, as their codes say."""
        # Codes of the rows themselves, in fp32: what torch hands over may be rounded to 16 bits.
        masters = [matrix._sharded_param_data.view(-1, self._block) for matrix in self._matrices]
        codes = torch.cat([encoded(each, WEIGHT_CODES).to(into[0].device) for each in masters])
        arrived = comm.start_all_gather(codes, self._axis).wait().view(self._axis.size, *codes.shape)
        for whole, of_ranks in zip(into, arrived.split([len(each) for each in masters], dim=1), strict=True):
            for row, of_rank in zip(whole, of_ranks, strict=True):
                decode(of_rank, WEIGHT_CODES, row.view(-1, self._block))


class RoundedGroup(FSDPParamGroup):
    """What torch has of a unit that no other rank shares: its matrices are rounded where they are needed (qwZ)."""

    block: int

    def wait_for_unshard(self) -> None:
        """The unit is needed now. Torch copies what it would gather, in the precision of the run."""
        if self._all_gather_result is None:
            return
        super().wait_for_unshard()
        for parameter in self.fsdp_params:
            if _part_of(parameter).is_rounded:
                whole = parameter.all_gather_outputs[0]
                # Torch copies so, too: what autograd has saved of the unit is gathered again in its place.
                with torch.autograd._unsafe_preserve_version_counter(whole):
                    round_weights(parameter._sharded_param_data, self.block, into=whole)


class CountedReduceScatter(DefaultReduceScatter):
    """Torch's reduce-scatter of a unit's gradients, over one of these axes."""

    def __init__(self, *axes: Axis) -> None:
        self._axes = axes

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, *args: Any, **kwargs: Any
    ) -> Any:
        """[size * s] -> [s], as torch does it."""
        _count(self._axes, "reduce_scatter", input_tensor, group)
        return super().__call__(output_tensor, input_tensor, group, *args, **kwargs)


class UnitPart(NamedTuple):
    """Elements of a parameter in a part of a unit; whether it is a matrix, and whether qwZ rounds it."""

    size: int
    is_matrix: bool
    is_rounded: bool


class CodedReduceScatter(CountedReduceScatter):
    """Reduce-scatter of a unit's gradients for torch's `fully_shard`: of matrices by codes, of the rest exactly.

    `parts` says what the unit's parameters that learn are, in torch's order.
    """

    def __init__(self, axis: Axis, dtype: str, parts: Sequence[UnitPart]) -> None:
        super().__init__(axis)
        self._axis, self._dtype, self._parts = axis, dtype, parts

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, *args: Any, **kwargs: Any
    ) -> Any:
        """[n * s] -> [s]: in each of n rows the parts of the parameters follow each other."""
        parts, rows = self._parts, input_tensor.view(self._axis.size, -1)
        if sum(part.size for part in parts) != rows.shape[1]:
            raise RunError(
                "not every parameter of a layer has a gradient, so what is a matrix is not known; leave "
                "--zero-quantized-gradients out"
            )
        columns = rows.split([part.size for part in parts], dim=1)
        into = output_tensor.split([part.size for part in parts])
        vectors = [number for number, part in enumerate(parts) if not part.is_matrix]
        if vectors:
            exact = torch.cat([columns[number] for number in vectors], dim=1)
            summed = exact.new_empty(exact.shape[1])
            super().__call__(summed, exact.view(-1), group, *args, **kwargs)
            for number, part in zip(vectors, summed.split([parts[number].size for number in vectors]), strict=True):
                into[number].copy_(part)
        matrices = [number for number, part in enumerate(parts) if part.is_matrix]
        for number in matrices:
            into[number].copy_(columns[number][self._axis.rank])
        if matrices:
            terms, own = ([each[number] for number in matrices] for each in (columns, into))
            start_coded_sum(terms, self._axis, self._dtype, own=own).wait()


def parts_of(unit: FSDPModule) -> list[UnitPart]:
    """The parameters of a unit that learn, in the order in which torch reduces their gradients."""
    parameters = (parameter for group in _groups_of(unit) for parameter in group.fsdp_params)
    return [_part_of(parameter) for parameter in parameters if parameter.sharded_param.requires_grad]


def _part_of(parameter: FSDPParam) -> UnitPart:
    module, name = parameter._module_info.module, parameter._module_info.param_name
    assert isinstance(module, HasShardings)
    sharding = module.shardings()[name]
    return UnitPart(parameter.padded_sharded_param_size.numel(), not sharding.is_vector, sharding.is_rounded)


def _count(axes: Sequence[Axis], operation: str, x: Tensor, group: ProcessGroup) -> None:
    """Count x on the line of that axis whose group it goes over: ranks of several lines may be the same."""
    for axis in axes:
        if axis.line is not None and axis.group is not None and axis.group.group_name == group.group_name:
            axis.line.count(operation, x)


# What neighbours keep


class Keeping:
    """Whether units keep their parts: from the first forward of a step until its last backward begins."""

    def __init__(self) -> None:
        self._chunks: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def begin_action(self, kind: str, chunk: int, *, is_last: bool) -> None:
        """An action of this kind comes next in a chunk, and is the last of its kind there or not."""
        if kind == "F":
            self._chunks.add(chunk)
        elif is_last:
            self._chunks.discard(chunk)

    def forget(self) -> None:
        """A step begins, whatever became of the one before."""
        self._chunks.clear()


class KeptGroup(FSDPParamGroup):
    """What torch gathers for a unit, which is kept by neighbours while `keeping` says so."""

    keeping: Keeping

    def reshard(self) -> None:
        """The unit is not needed whole for now. Torch calls it after every forward and backward, and when all ends."""
        if self.keeping:
            if self.is_unsharded:  # else it is kept already, or was not gathered yet
                self._to_sharded_post_forward()
                # The parts are copied where layers compute, and gathered from elsewhere: on a GPU that must wait.
                self._reshard_after_forward_event = self.device_handle.Event()
                self._reshard_after_forward_event.record()
            return
        self._to_sharded()
        for parameter in self.fsdp_params:  # of a unit without a backward they are there still
            parameter._sharded_post_forward_param = parameter._sharded_post_forward_param_data = None


def keep_over(unit: FSDPModule, mesh: DeviceMesh, keeping: Keeping) -> None:
    """From now on the neighbours in a row of `mesh` keep what the unit has gathered."""
    info = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    for group in _groups_of(unit):
        for parameter in group.fsdp_params:
            parameter.post_forward_mesh_info = info
            # It reads the whole parameter's shape alone.
            parameter._init_sharded_post_forward_param_metadata(torch.empty(parameter._orig_size, device="meta"))
        group.post_forward_mesh_info = info
        group.__class__ = KeptGroup
        assert isinstance(group, KeptGroup)
        group.keeping = keeping


def _groups_of(unit: FSDPModule) -> Sequence[FSDPParamGroup]:
    return unit._get_fsdp_state()._fsdp_param_groups


def _gather_by(unit: FSDPModule, domain: Domain, block: int | None) -> None:
    """From now on a unit's parameters are gathered so: as they are, or matrices as codes in such blocks."""
    if block is None:
        unit.set_custom_all_gather(CountedAllGather(domain.shard, domain.secondary))
    elif domain.shard.size > 1:
        unit.set_custom_all_gather(CodedAllGather(domain.shard, domain.secondary, block, unit))
    else:
        for group in _groups_of(unit):
            group.__class__ = RoundedGroup
            assert isinstance(group, RoundedGroup)
            group.block = block


def make_units(
    modules: Sequence[nn.Module], domain: Domain, settings: DataParallelSettings, keeping: Keeping
) -> list[FSDPModule]:
    """From the last to the first, as a module takes what those inside it have not taken. Gradients add up as sums."""
    mesh = domain.device_mesh
    assert mesh is not None, "the mesh was made for another stage of ZeRO"
    # torch warns, in every step after a save, of writing into the output: nothing here does.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module", category=UserWarning)
    precision = MixedPrecisionPolicy(
        param_dtype=settings.dtype, reduce_dtype=settings.reduce_dtype, cast_forward_inputs=False
    )
    pins = mesh.device_type == "cuda" and settings.offload.folder is None
    offload = CPUOffloadPolicy(pins) if settings.offload.what == "parameters" else OffloadPolicy()
    for module in reversed(modules):
        fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=precision, offload_policy=offload)
    units: list[FSDPModule] = [module for module in modules if isinstance(module, FSDPModule)]
    # Sums and no means: the loss is divided once, by a count over all ranks.
    for unit in units:
        unit.set_gradient_divide_factor(1)
        unit.set_force_sum_reduction_for_comms(True)
        _gather_by(unit, domain, settings.weight_block)
        if settings.codes is not None and domain.shard.size > 1:
            unit.set_custom_reduce_scatter(CodedReduceScatter(domain.shard, settings.codes, parts_of(unit)))
        else:
            unit.set_custom_reduce_scatter(CountedReduceScatter(domain.shard))
        if domain.secondary_mesh is not None:
            keep_over(unit, domain.secondary_mesh, keeping)
    return units
