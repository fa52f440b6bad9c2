"""Section [parallel] of a config: the mesh, the pipeline schedule, ZeRO and devices."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from megatronish.config.marks import NamedIn, at_least, at_most, fraction, greater_than
from megatronish.core.layout import ExpertLayout, Layout, RowRoom
from megatronish.parallel.schedules.table import SCHEDULES

_SCHEDULE_NAMES = f"{{None,{','.join(SCHEDULES)}}}"  # as --help shows them


@dataclass(frozen=True)
class ParallelConfig:
    """Sizes of the mesh's axes, communication, pipeline schedule and ZeRO."""

    tensor_model_parallel_size: Annotated[int, tyro.conf.arg(aliases=["--tp"]), at_least(1), at_most(100_000)] = 1
    """tp: ranks that share every layer."""
    pipeline_model_parallel_size: Annotated[int, tyro.conf.arg(aliases=["--pp"]), at_least(1), at_most(100_000)] = 1
    """pp: stages that the layers are cut into."""
    data_parallel_size: Annotated[int | None, tyro.conf.arg(aliases=["--dp"]), at_least(1), at_most(100_000)] = None
    """dp: copies of the model. Derived: all ranks / (tp pp cp), or 1 on a plain start."""
    context_parallel_size: Annotated[int, tyro.conf.arg(aliases=["--cp"]), at_least(1), at_most(100_000)] = 1
    """cp: ranks that share one sequence."""
    expert_model_parallel_size: Annotated[int, tyro.conf.arg(aliases=["--ep"]), at_least(1), at_most(100_000)] = 1
    """ep: ranks that share the experts of a layer out. They are taken from the ranks of dp, cp and tp."""
    expert_tensor_parallel_size: Annotated[
        int | None, tyro.conf.arg(aliases=["--etp"]), at_least(1), at_most(100_000)
    ] = None
    """etp: ranks that share every expert. Derived: tp."""
    moe_token_dispatcher_type: Literal["alltoall", "deepep"] = "alltoall"
    """How tokens go to experts of other ranks: a row for each choice, or by DeepEP once to each rank, where its package
    and GPUs are there (elsewhere alltoall)."""
    moe_expert_rank_capacity_factor: Annotated[float | None, at_least(1), at_most(2**31 - 1)] = None
    """Rows that a rank of ep sends each other one, times the mean: no host waits for numbers of rows. A step with more
    rows is computed again with all of them. Derived: as many as there are."""
    moe_pad_expert_input_to_capacity: bool = False
    """With moe_expert_capacity_factor: as many rows are sent as it leaves at most, so that no host waits for them."""
    cp_comm_type: Literal["p2p", "a2a"] = "p2p"
    """How attention sees the whole sequence: p2p sends keys and values round a ring, a2a trades sequence for heads."""
    sequence_parallel: bool = False
    """Norms, dropout and the residual stream hold 1/tp of the sequence (needs tp > 1)."""
    tp_comm_overlap: bool = False
    """With sequence_parallel: each piece of the sequence is multiplied while the next one goes round the tp ranks."""
    tp_comm_overlap_backend: Literal["p2p", "symm_mem"] = "p2p"
    """How pieces go round: messages, or memory that GPUs of one machine read from each other (elsewhere messages)."""
    pipeline_schedule: Annotated[str | None, NamedIn(SCHEDULES), tyro.conf.arg(metavar=_SCHEDULE_NAMES)] = None
    """Order of the passes over the stages. Derived: interleaved where virtual stages are asked for, else 1f1b."""
    num_layers_per_virtual_pipeline_stage: Annotated[int | None, at_least(1), at_most(100_000)] = None
    """Interleave: each stage holds several chunks of so many layers."""
    num_virtual_stages_per_pipeline_rank: Annotated[int | None, at_least(1), at_most(100_000)] = None
    """Interleave: each stage holds so many chunks."""
    pipeline_split: Literal["even", "auto"] = "even"
    """even: equal stages, as far as they can be; auto: the slowest stage is as fast as can be, head counted."""
    account_for_embedding_in_pipeline_split: bool = False
    """The embedding counts as one layer of the even split."""
    account_for_loss_in_pipeline_split: bool = False
    """The head counts as one layer of the even split."""
    decoder_first_pipeline_num_layers: Annotated[int | None, at_least(1), at_most(100_000)] = None
    """Layers of the first stage; the others share the rest."""
    decoder_last_pipeline_num_layers: Annotated[int | None, at_least(1), at_most(100_000)] = None
    """Layers of the last stage; the others share the rest."""
    overlap_grad_reduce: bool = True
    """Exchange each gradient bucket as soon as it is final, while the backward continues."""
    grad_reduce_in_bf16: bool = False
    """Gradients are summed in bf16 instead of fp32: half the bytes, and 8 bits of each sum (needs --bf16)."""
    ddp_bucket_size: Annotated[int, at_least(1), at_most(2**63 - 1)] = 8_000_000
    """Elements of one gradient bucket."""
    use_distributed_optimizer: bool = False
    """ZeRO-1: the ranks of dp and cp share masters and optimizer states. The same as --zero-stage 1."""
    zero_stage: Literal[0, 1, 2, 3] | None = None
    """What the ranks of dp and cp share: 1 optimizer states, 2 gradients too, 3 parameters too. Derived: 0."""
    num_distributed_optimizer_instances: Annotated[
        int, tyro.conf.arg(aliases=["--dp-replicate"]), at_least(1), at_most(2**63 - 1)
    ] = 1
    """Hybrid sharding: groups of ranks that share among themselves and hold copies of each other."""
    outer_optimizer: Literal["nesterov"] | None = None
    """DiLoCo: these groups are islands. Each trains alone, and an outer step by Nesterov SGD joins their moves."""
    outer_interval: Annotated[int, at_least(1), at_most(2**63 - 1)] = 500
    """Steps that an island trains alone: the outer step follows each step that is a multiple of it, and the last."""
    outer_lr: Annotated[float, greater_than(0)] = 0.7
    """Learning rate of the outer step. With 1 and no momentum the islands' parameters are averaged."""
    outer_momentum: Annotated[float, fraction(excluding=1)] = 0.9
    """Nesterov momentum of the outer step."""
    outer_move_dtype: Literal["fp32", "int8", "int4"] = "fp32"
    """What the islands send of their moves: numbers, or codes of blocks with a scale each."""
    zero_hpz_partition_size: Annotated[int | None, at_least(1), at_most(100_000)] = None
    """hpZ: so many neighbouring ranks keep what ZeRO-3 has gathered, so that a step gathers it over all ranks once."""
    zero_quantized_gradients: Literal["int8", "int4"] | None = None
    """qgZ: gradients of matrices are sent as codes with a scale for 128 of them, and summed in fp32 (ZeRO 1 to 3)."""
    zero_quantized_weights: Literal["int8"] | None = None
    """qwZ: masters are sent as codes, and the model computes with matrices rounded to them, in every layout."""
    zero_quantized_weights_block: Annotated[int, at_least(8), at_most(4096)] = 128
    """Elements of a row that share a scale there; a multiple of 8 that divides every row on every rank."""
    overlap_param_gather: bool = True
    """Gather updated parameters while the next forward computes."""
    optimizer_cpu_offload: bool = False
    """Masters and optimizer states live in the CPU's memory, and the CPU takes the step."""
    param_cpu_offload: bool = False
    """The parameters too: a layer's share is brought to the device when the layer is gathered (ZeRO-3)."""
    offload_folder: str | None = None
    """Folder of a local disk (NVMe) in which what is offloaded lives, in files without names, instead of in memory."""
    distributed_backend: str = "auto"
    """auto: nccl on CUDA, gloo on CPU; or any that torch.distributed knows, a plug-in's too."""
    distributed_timeout_minutes: Annotated[float, greater_than(0), at_most(525_600)] = 10.0
    """A collective that waits longer than this ends the run."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where there is one."""

    @property
    def layout(self) -> Layout:
        """Sizes of the mesh. `read_config` has set data_parallel_size before they are read."""
        return Layout(
            pp=self.pipeline_model_parallel_size,
            dp=self.data_parallel_size or 1,
            cp=self.context_parallel_size,
            tp=self.tensor_model_parallel_size,
        )

    @property
    def expert_layout(self) -> ExpertLayout:
        """Sizes of the grid of experts."""
        return ExpertLayout(
            self.expert_model_parallel_size, self.expert_tensor_parallel_size or self.tensor_model_parallel_size
        )

    @property
    def row_room(self) -> RowRoom:
        """Rows that a rank of ep sends each other one."""
        return RowRoom(self.moe_expert_rank_capacity_factor, self.moe_pad_expert_input_to_capacity)

    @property
    def wants_deep_ep(self) -> bool:
        """Whether tokens are to go to experts of other ranks by DeepEP."""
        return self.moe_token_dispatcher_type == "deepep" and self.expert_model_parallel_size > 1

    @property
    def has_rooms(self) -> bool:
        """Whether ranks send each other as many rows of experts as there is room for."""
        is_asked = self.moe_expert_rank_capacity_factor is not None or self.moe_pad_expert_input_to_capacity
        return is_asked and self.expert_model_parallel_size > 1

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model: tp * pp * cp."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def schedule(self) -> str:
        """Name of the schedule: by default interleaved with virtual stages, else 1f1b."""
        if self.pipeline_schedule is not None:
            return self.pipeline_schedule
        several = (self.num_virtual_stages_per_pipeline_rank or 1) > 1
        return "interleaved" if several or self.num_layers_per_virtual_pipeline_stage is not None else "1f1b"

    @property
    def zero(self) -> int:
        """Stage of ZeRO, 0 to 3."""
        return self.zero_stage if self.zero_stage is not None else int(self.use_distributed_optimizer)

    @property
    def num_islands(self) -> int:
        """Groups of ranks that train alone between two outer steps; one without an outer optimizer."""
        return self.num_distributed_optimizer_instances if self.outer_optimizer is not None else 1

    @property
    def num_copies(self) -> int:
        """Groups of an island that hold copies of each other and share among themselves what ZeRO shares."""
        return self.num_distributed_optimizer_instances // self.num_islands

    @property
    def ends_in_split(self) -> tuple[int, int]:
        """1 for each of embedding and head that counts as a layer of the even split, else 0."""
        return int(self.account_for_embedding_in_pipeline_split), int(self.account_for_loss_in_pipeline_split)

    def num_chunks(self, num_layers: int) -> int:
        """Model chunks on each pipeline stage."""
        return SCHEDULES[self.schedule].num_chunks or self.num_virtual_chunks(num_layers)

    def num_virtual_chunks(self, num_layers: int) -> int:
        """Model chunks on each stage by the fields for virtual stages alone."""
        if self.num_layers_per_virtual_pipeline_stage is not None:
            layers_of_a_round = self.pipeline_model_parallel_size * self.num_layers_per_virtual_pipeline_stage
            return max(1, (num_layers + sum(self.ends_in_split)) // layers_of_a_round)
        return self.num_virtual_stages_per_pipeline_rank or 1
