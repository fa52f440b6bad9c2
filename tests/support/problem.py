"""A problem of the theorem, and how it is spread over ranks and over time."""

import tempfile
from dataclasses import dataclass, field, replace
from typing import Any

from megatronish.config.sections.finetuning import AdapterConfig
from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.optimizer import OptimizerConfig
from megatronish.config.sections.parallel import ParallelConfig
from megatronish.config.sections.training import AttentionBackend, RecomputeConfig
from megatronish.core.layout import Layout

SEED = 7
VOCABULARY = 131  # of tokens; padded to 132, 136 or more, by tp
EOD = 0
NUM_STEPS = 2
CYCLE = (0.9, 0.8)
"""Momentum of each step, as one cycle changes it: of all optimizers."""
CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2}
CLIP = 0.5  # below every gradient norm here, so that clipping acts
CLIP_OF_ADAPTERS = 0.01
SGD_RATE = 0.1
SGD = OptimizerConfig(optimizer="sgd", clip_grad=CLIP)
# Damped, so that Adam makes no whole steps of the noise of gradients that are next to nothing.
ADAM = OptimizerConfig(lr=1e-3, adam_eps=1e-4, clip_grad=CLIP)
# Large steps for matrices alone: at 20 times this rate noise of embeddings, which Adam steps, shows.
OPTIMIZERS = {
    "sgd": SGD,
    "adam": ADAM,
    "muon": replace(ADAM, optimizer="muon", muon_nesterov=True, muon_extra_scale_factor=4.0),
}

DISK = tempfile.gettempdir()
"""Where tests keep what is offloaded to a disk. In memory it is slow to no purpose, and computes the same."""

DECOUPLED: dict[str, Any] = {"decoupled_lr": 3e-3, "apply_wd_to_qk_layernorm": True}


@dataclass(frozen=True)
class Problem:
    """What is trained. No layout shows in it, but for sizes that every layout of the test could divide."""

    model: ModelConfig
    seq_length: int
    global_batch_size: int
    eod_mask_loss: bool = False
    documents: bool = False
    optimizer: str = "adam"
    decoupled: bool = False
    bf16: bool = False
    fp16: bool = False
    seed: int = SEED
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    """With adapters they alone learn."""
    largest_logit: float | None = None
    """The threshold of QK-clip, with an alpha that tells queries from keys."""
    weight_block: int | None = None
    """Elements of the blocks of codes that it computes with (qwZ)."""

    @property
    def clip(self) -> float:
        """Below every gradient norm, so that clipping acts."""
        return CLIP_OF_ADAPTERS if self.adapter.is_used else CLIP


@dataclass(frozen=True)
class Spread:
    """How it is spread over ranks and over time."""

    layout: Layout
    micro_batch_size: int
    sequence_parallel: bool = False
    by_pieces: bool = False
    """Products over tp are computed piece by piece, as the pieces of the sequence arrive."""
    schedule: str = "1f1b"
    num_chunks: int | None = None
    split: str = "even"
    overlap: bool = True
    cp_comm_type: str = "p2p"
    attention_backend: AttentionBackend = "auto"
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    zero: int = 0
    copies: int = 1
    offload: str = "none"
    secondary: int | None = None
    """Neighbours that keep what ZeRO-3 has gathered (hpZ)."""
    on_disk: bool = False
    outer_interval: int | None = None
    """Steps between two outer steps, of as many islands as there are copies (DiLoCo)."""
    outer_move_dtype: str = "fp32"
    ep: int = 1
    etp: int | None = None
    room: float | None = None
    """Rows that ranks of ep send each other, times the mean."""
    pads: bool = False
    """They send what the capacity of experts leaves."""
    dispatcher: str = "alltoall"
    compile: str | None = None
    """The backend of torch.compile, with --compile."""

    @property
    def parallel(self) -> ParallelConfig:
        """As a user would write it.

        `uneven`: the number of layers of the first stage is given; `ends`: embedding and head count as layers.
        """
        return ParallelConfig(
            tensor_model_parallel_size=self.layout.tp,
            pipeline_model_parallel_size=self.layout.pp,
            data_parallel_size=self.layout.dp,
            context_parallel_size=self.layout.cp,
            expert_model_parallel_size=self.ep,
            expert_tensor_parallel_size=self.etp,
            moe_token_dispatcher_type=self.dispatcher,  # type: ignore[arg-type]
            moe_expert_rank_capacity_factor=self.room,
            moe_pad_expert_input_to_capacity=self.pads,
            cp_comm_type=self.cp_comm_type,  # type: ignore[arg-type]
            sequence_parallel=self.sequence_parallel,
            tp_comm_overlap=self.by_pieces,
            pipeline_schedule=self.schedule,  # type: ignore[arg-type]
            num_virtual_stages_per_pipeline_rank=self.num_chunks,
            pipeline_split="auto" if self.split == "auto" else "even",
            account_for_embedding_in_pipeline_split=self.split == "ends",
            account_for_loss_in_pipeline_split=self.split == "ends",
            decoder_first_pipeline_num_layers=CHUNKS[self.schedule] + 1 if self.split == "uneven" else None,
            overlap_grad_reduce=self.overlap,
            overlap_param_gather=self.overlap,
            ddp_bucket_size=3000,  # a few parameters: every rank has several buckets
            zero_stage=self.zero,  # type: ignore[arg-type]
            num_distributed_optimizer_instances=self.copies,
            outer_optimizer=None if self.outer_interval is None else "nesterov",
            outer_interval=self.outer_interval or 500,
            outer_move_dtype=self.outer_move_dtype,  # type: ignore[arg-type]
            zero_hpz_partition_size=self.secondary,
            optimizer_cpu_offload=self.offload == "optimizer",
            param_cpu_offload=self.offload == "parameters",
            offload_folder=DISK if self.on_disk else None,
        )
