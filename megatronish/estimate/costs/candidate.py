"""Candidate layouts: what a search varies, the group sizes that follow, and the config that runs a candidate."""

from typing import Any, Literal, NamedTuple

from megatronish.config.check import problems, refuse_unrunnable_plans
from megatronish.config.config import Config
from megatronish.core.errors import UserError
from megatronish.parallel.schedules.table import SCHEDULES

Recompute = Literal["none", "selective", "full"]
UNSET = {
    "data_parallel_size": None,
    "num_layers_per_virtual_pipeline_stage": None,
    "num_virtual_stages_per_pipeline_rank": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "use_distributed_optimizer": False,
    "num_distributed_optimizer_instances": 1,
    "zero_hpz_partition_size": None,
    "outer_optimizer": None,
    "outer_interval": 500,
    "outer_lr": 0.7,
    "outer_momentum": 0.9,
    "outer_move_dtype": "fp32",
    "recompute_granularity": None,
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
    "distribute_saved_activations": False,
    "offload_saved_activations": False,
}
"""Fields of a layout that no candidate varies: what the file says of them belongs to its own layout."""


class MeshSizes(NamedTuple):
    """Sizes of the axes; layouts of one mesh differ in smaller choices."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def world_size(self) -> int:
        """All ranks: tp x cp x dp x pp."""
        return self.tp * self.pp * self.dp * self.cp

    @property
    def edp(self) -> int:
        """Ranks that hold copies of an expert."""
        return max(1, self.tp * self.cp * self.dp // (self.ep * self.etp))

    @property
    def copies(self) -> dict[str, tuple[int, int]]:
        """Of each domain the ranks that hold copies of a parameter, and how far they are apart."""
        return {"dense": (self.cp * self.dp, self.tp), "experts": (self.edp, self.ep * self.etp)}


class Candidate(NamedTuple):
    """One layout of a run."""

    mesh: MeshSizes
    micro_batch: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    zero: int = 0
    recompute: Recompute = "none"
    sequence_parallel: bool = False

    def num_microbatches(self, global_batch: int) -> int:
        """Micro-batches of a step."""
        return max(1, global_batch // (self.micro_batch * self.mesh.dp))

    def of_a_layer(self, schedule: str = "1f1b") -> "Candidate":
        """What of a layout decides the sizes and times of layers: neither data ranks nor stages."""
        tp, _, _, cp, ep, etp = self.mesh
        mesh = MeshSizes(tp, 1, 1, cp, ep, etp)
        return Candidate(mesh, self.micro_batch, schedule, 1, 0, self.recompute, self.sequence_parallel)

    @property
    def mesh_text(self) -> str:
        """The mesh as reports have it: `tp 8 pp 8 dp 16`."""
        mesh = self.mesh
        parts = [f"tp {mesh.tp}", f"pp {mesh.pp}", f"dp {mesh.dp}"]
        parts += [f"cp {mesh.cp}"] if mesh.cp > 1 else []
        parts += [f"ep {mesh.ep} etp {mesh.etp}"] if mesh.ep > 1 or mesh.etp not in (1, mesh.tp) else []
        return " ".join(parts)

    @property
    def choices_text(self) -> str:
        """The smaller choices: `1f1b, micro-batch 2, ZeRO-1`."""
        schedule = f"{self.schedule} x{self.chunks}" if SCHEDULES[self.schedule].num_chunks is None else self.schedule
        return ", ".join(
            [
                *([schedule] if self.mesh.pp > 1 else []),
                f"micro-batch {self.micro_batch}",
                f"ZeRO-{self.zero}",
                *(["sequence parallel"] if self.sequence_parallel else []),
                *([f"{self.recompute} recomputation"] if self.recompute != "none" else []),
            ]
        )


def candidate_of(config: Config) -> Candidate:
    """The layout of a config."""
    layout, parallel = config.layout, config.parallel
    ep, etp = parallel.expert_layout
    return Candidate(
        MeshSizes(layout.tp, layout.pp, layout.dp, layout.cp, ep, etp),
        config.training.micro_batch_size,
        parallel.schedule,
        parallel.num_chunks(config.model.num_layers),
        parallel.zero,
        config.recompute.recompute_granularity or "none",
        parallel.sequence_parallel,
    )


UNASKED = ("lr", "train_iters", "data_path", "tokenizer_type")
"""Fields that a run needs, and an estimate does not: how fast it learns, how long, from what."""


def config_of(base: Config, candidate: Candidate) -> Config:
    """The config of a run in this layout; batch, model and everything else stay."""
    mesh = candidate.mesh
    takes_any_chunks = SCHEDULES[candidate.schedule].num_chunks is None
    layout: dict[str, Any] = {
        **UNSET,
        "tensor_model_parallel_size": mesh.tp,
        "pipeline_model_parallel_size": mesh.pp,
        "data_parallel_size": mesh.dp,
        "context_parallel_size": mesh.cp,
        "expert_model_parallel_size": mesh.ep,
        "expert_tensor_parallel_size": mesh.etp if base.model.num_experts is not None else None,
        "sequence_parallel": candidate.sequence_parallel,
        "pipeline_schedule": candidate.schedule,
        "num_virtual_stages_per_pipeline_rank": candidate.chunks if takes_any_chunks else None,
        "zero_stage": candidate.zero,
        "recompute_granularity": None if candidate.recompute == "none" else candidate.recompute,
        "recompute_modules": base.recompute.recompute_modules if candidate.recompute == "selective" else (),
        "micro_batch_size": candidate.micro_batch,
        "global_batch_size": base.global_batch_size,
    }
    return base.with_fields(**layout)


def least_zero(base: Config) -> int:
    """The least stage of ZeRO that the settings allow which no layout changes: offloading and codes need some."""
    return min(
        (0, 1, 3), key=lambda zero: len(problems(config_of(base, Candidate(MeshSizes(), zero=zero)), invalid=UNASKED))
    )


def without_layout(base: Config) -> Config:
    """The config on one device, under the least ZeRO that its other settings allow; its batch stays as it is."""
    return config_of(base, Candidate(MeshSizes(), zero=least_zero(base)))


def complaints(config: Config) -> list[str]:
    """What the project's rules and its simulator of schedules say against a config."""
    sentences = problems(config, invalid=UNASKED)
    if not sentences:
        try:
            refuse_unrunnable_plans(config)
        except UserError as error:
            sentences.append(str(error))
    return sentences
