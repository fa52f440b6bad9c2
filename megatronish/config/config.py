"""Config of a run: its sections, and values derived from several sections."""

from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Self

from megatronish.config.plugins import PluginsConfig
from megatronish.config.sections.data import ChatConfig, DataConfig, FimConfig
from megatronish.config.sections.finetuning import AdapterConfig, PreferenceConfig, ReferenceKind
from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.optimizer import OptimizerConfig
from megatronish.config.sections.parallel import ParallelConfig
from megatronish.config.sections.run import CheckpointConfig, LogConfig, ResilienceConfig
from megatronish.config.sections.training import RecomputeConfig, TrainingConfig
from megatronish.core.layout import DeepEPNeeds, Layout, RowRoom, choices_of_an_expert
from megatronish.core.names import OBJECTIVE_NAMES
from megatronish.parallel.schedules.table import SCHEDULES


def rows_of_experts(
    model: ModelConfig, room: RowRoom, tokens: int, ep: int, num_sequences: int, seq_length: int
) -> tuple[int, int]:
    """Rows that a rank with so many `tokens` sends to experts: where the load is even, and as there is room for them.

    The tokens, those of its etp ranks, are of `num_sequences` sequences.
    """
    assert model.num_experts is not None
    sizes = {"num_chosen": model.moe_router_topk, "num_experts": model.num_experts}
    capacity = None
    if model.moe_expert_capacity_factor is not None:
        limit = choices_of_an_expert(model.moe_expert_capacity_factor, **sizes, seq_length=seq_length)
        capacity = num_sequences * min(limit, tokens // num_sequences)
    rows, even = room.rows(tokens, ep=ep, capacity=capacity, **sizes), tokens * model.moe_router_topk
    return even, even if rows is None else ep * rows


@dataclass(frozen=True)
class Config:
    """Config of a run, with one module for each section. A function takes the section that it reads, not the whole."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    fim: FimConfig = field(default_factory=FimConfig)
    chat: ChatConfig = field(default_factory=ChatConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    plugins: PluginsConfig = field(default_factory=PluginsConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    resilience: ResilienceConfig = field(default_factory=ResilienceConfig)

    def with_fields(self, **values: Any) -> Self:
        """Copy with these values of fields of any section."""
        changed: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            changed.setdefault(_section_of_fields()[name], {})[name] = value
        return replace(self, **{section: replace(getattr(self, section), **of) for section, of in changed.items()})

    @property
    def layout(self) -> Layout:
        """Sizes of the mesh."""
        return self.parallel.layout

    @property
    def global_batch_size(self) -> int:
        """Samples in one step, after any ramp-up of the batch size."""
        return self.training.global_batch_size or self.training.micro_batch_size * self.layout.dp

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of a step on each data rank."""
        return self.global_batch_size // (self.training.micro_batch_size * self.layout.dp)

    @property
    def reference(self) -> ReferenceKind | None:
        """What the objective compares with; None for one that compares with no other model."""
        if not OBJECTIVE_NAMES[self.training.objective].has_reference:
            return None
        return self.preference.reference or ("adapters-off" if self.adapter.is_used else "model")

    @property
    def run_dir(self) -> Path:
        """Folder of all files that the run writes; for one on object storage, the local folder that is copied there."""
        name = self.log.run_dir or "runs/pretrain_gpt"
        protocol, separator, rest = name.partition("://")
        if separator:  # neither a password nor a key is a part of a folder's name
            rest = rest.partition("?")[0]
            host, slash, path = rest.rpartition("@")[2].partition("/")
            rest = f"{host}{slash}{path}"
        return Path("runs", protocol, *rest.split("/")) if separator else Path(name)

    @property
    def run_url(self) -> str | None:
        """URL of a run folder on object storage; None for one on a disk."""
        name = self.log.run_dir or ""
        return name.rstrip("/") if "://" in name else None

    @property
    def sends_latents(self) -> bool:
        """Whether latents go round a ring over cp in the place of keys and values, as they are smaller.

        The weight that makes heads of them must then be there as it is, and have its gradient at once. The largest
        logits are those of keys.
        """
        layout, parallel = self.layout, self.parallel
        goes_round = layout.cp > 1 and parallel.cp_comm_type == "p2p" and self.model.has_small_latents(layout.tp)
        has_others = self.adapter.is_used or self.measures_logits
        return goes_round and not has_others and not SCHEDULES[parallel.schedule].has_weight_gradients

    @property
    def multiplies_by_pieces(self) -> bool:
        """Whether products over tp are computed piece by piece, while the next one goes round.

        A base of codes is dequantised once a product, which would be once a piece.
        """
        parallel = self.parallel
        return parallel.tp_comm_overlap and parallel.sequence_parallel and self.adapter.quantize_base is None

    @property
    def rows_of_experts(self) -> tuple[int, int]:
        """Rows of a micro-batch that a rank sends to experts: where the load is even, and as there is room for them."""
        layout, training, (ep, etp) = self.layout, self.training, self.parallel.expert_layout
        tokens = training.micro_batch_size * training.seq_length // layout.cp // layout.tp * etp
        room = self.parallel.row_room
        return rows_of_experts(self.model, room, tokens, ep, training.micro_batch_size, training.seq_length)

    @property
    def deep_ep_needs(self) -> DeepEPNeeds:
        """What DeepEP would have to do."""
        ep, precision = self.parallel.expert_model_parallel_size, self.training.precision
        return DeepEPNeeds(ep, self.model.hidden_size, precision)

    @property
    def measures_logits(self) -> bool:
        """Whether the largest logits of attention are measured in training."""
        return self.optimizer.qk_clip or self.log.log_max_attention_logit

    @property
    def save_place(self) -> str:
        """Folder of the run's checkpoints, a path or a URL."""
        return self.checkpoint.save or f"{self.run_url or self.run_dir}/checkpoints"

    @property
    def tensorboard_dir(self) -> Path:
        """Folder of TensorBoard's files."""
        return Path(self.log.tensorboard_dir) if self.log.tensorboard_dir else self.run_dir / "tensorboard"


@cache
def _section_of_fields() -> dict[str, str]:
    """Name of the section of each field."""
    return {name: section for section, of_section in vars(Config()).items() for name in vars(of_section)}
