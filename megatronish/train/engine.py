"""What does one step need? This rank's piece of the model, its gradients and its optimizer, put together.

`Engine` is the part of training that knows nothing of files, logs or config: hand it the micro-batches of a step and
a learning rate, and it computes, reduces, clips and updates. The trainer, the tests and `verify_layout` all drive it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from megatronish import comm
from megatronish.attention.zigzag import places_of
from megatronish.config.model import ModelConfig
from megatronish.config.optimizer import OptimizerConfig
from megatronish.config.parallel import ParallelConfig
from megatronish.config.recompute import RecomputeConfig
from megatronish.config.training import TrainingConfig
from megatronish.data_parallel.data_parallel import DataParallel
from megatronish.data_parallel.fully_sharded import FullySharded
from megatronish.data_parallel.settings import DataParallelSettings
from megatronish.data_parallel.zero import Zero
from megatronish.errors import RunError
from megatronish.layers.linear import split_backward
from megatronish.layers.weight_gradients import WeightGradients
from megatronish.mesh import Axis, Mesh, TensorParallel
from megatronish.model.batch import MicroBatch
from megatronish.model.block import MakeBlock, TransformerBlock
from megatronish.model.execution import Execution
from megatronish.model.gpt import GPT, ModelChunk
from megatronish.model.recompute import Recompute
from megatronish.optim.clip import global_norm, num_zeros
from megatronish.optim.loss_scale import LossScale, loss_scale_of
from megatronish.optim.optimizer import Optimizer
from megatronish.pipeline.executor import Executor, Observer
from megatronish.pipeline.stages import Stages
from megatronish.pipeline.transfers import Boundary
from megatronish.schedule.plan import Action, StageChunk
from megatronish.sharding import Shard, Sharding, collect_shardings, initialize

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class NotFiniteError(RunError):
    """The loss or the gradient norm became infinite or not a number."""


@dataclass(frozen=True)
class StepResult:
    """What a step showed, the same on every rank. `loss` is the mean over the predictions that count.

    `loss_scale` is what the loss was multiplied by; `skipped` says that the gradient overflowed and changed nothing.
    """

    loss: float
    grad_norm: float
    num_loss_tokens: int
    loss_scale: float = 1.0
    skipped: bool = False


@dataclass
class Engine:
    """One rank's share of a training run."""

    mesh: Mesh
    stages: Stages
    model: GPT
    shardings: dict[str, Sharding]
    data_parallel: DataParallel
    optimizer: Optimizer
    executor: Executor
    loss_scale: LossScale
    clip_grad: float
    check_finite: bool
    observers: list[Observer] = field(default_factory=list)
    """Each is told the times of every action of a step."""

    @classmethod
    def build(
        cls,
        mesh: Mesh,
        *,
        model: ModelConfig,
        parallel: ParallelConfig,
        training: TrainingConfig,
        optimizer: OptimizerConfig,
        vocab_size: int,
        recompute: RecomputeConfig | None = None,
        make_block: MakeBlock = TransformerBlock,
        learns: bool = True,
    ) -> "Engine":
        """Parameters are initialised as their names and the seed say, in fp32, and rounded to the run's precision.

        An engine that does not learn only evaluates: it holds neither gradients nor optimizer states, and its
        parameters are for a checkpoint to fill.
        """
        assert parallel.pipeline_model_parallel_size == mesh.pp.size, "the mesh is not that of the config"
        tp = TensorParallel(mesh.tp, parallel.sequence_parallel)
        stages = Stages.of(parallel, model, vocab_size=vocab_size, seq_length=training.seq_length)
        places = [StageChunk(mesh.pp.rank, chunk) for chunk in range(stages.num_chunks)]
        settings = DataParallelSettings.of(parallel, DTYPES[training.precision])
        # ZeRO-3 allocates each rank's rows alone; what it shards need not be anywhere whole.
        with torch.device("meta") if settings.zero_stage == 3 else mesh.device:
            stage = GPT(
                model,
                vocab_size=vocab_size,
                num_positions=model.max_position_embeddings or training.seq_length,
                tp=tp,
                chunks=[
                    ModelChunk(stages.layers_at(place), stages.is_first(place), stages.is_last(place))
                    for place in places
                ],
                execution=Execution(
                    mesh.cp,
                    parallel.cp_comm_type,
                    training.attention_backend,
                    _recompute(recompute or RecomputeConfig(), mesh.tp),
                    dropout_seed=training.seed,
                ),
                make_block=make_block,
            )
        shardings = collect_shardings(stage)
        if not learns:
            stage.requires_grad_(False)
        dtype = DTYPES[training.precision]
        splits_backward = stages.schedule.has_weight_gradients
        data_parallel = _share(stage, shardings, stages, mesh, settings, seed=training.seed if learns else None)
        for buffer in stage.buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.to(dtype)
        for module, names in stage.by_first_use():
            data_parallel.gather_before(module, names)
        weight_gradients = None
        if splits_backward:
            weight_gradients = WeightGradients(data_parallel.sums, delivered=data_parallel.weight_gradient_ready)
            split_backward(stage, weight_gradients)
        local_seq_length = training.seq_length // mesh.cp.size // tp.sequence_axis.size
        boundary = Boundary(
            (local_seq_length, training.micro_batch_size, model.hidden_size),
            dtype,
            mesh.device,
            same_over=Axis("tp") if tp.cuts_sequence else mesh.tp,
        )
        return cls(
            mesh=mesh,
            stages=stages,
            model=stage,
            shardings=shardings,
            data_parallel=data_parallel,
            optimizer=Optimizer(
                data_parallel.shards,
                data_parallel.gradients,
                {name: shardings[name] for name, parameter in stage.named_parameters() if parameter.requires_grad},
                mesh.domains,
                optimizer,
                device=mesh.device,
            ),
            executor=Executor(
                [partial(_summed, stage, chunk) for chunk in range(stages.num_chunks)],
                stages.placement,
                lines=mesh.p2p_axes,
                boundary=boundary,
                weight_gradients=weight_gradients,
            ),
            loss_scale=loss_scale_of(training),
            clip_grad=optimizer.clip_grad,
            check_finite=training.check_for_nan_in_loss_and_grad,
        )

    def step(
        self, micro_batches: Sequence[MicroBatch], *, num_steps_done: int, learning_rate: float, weight_decay: float
    ) -> StepResult:
        """One update from this rank's micro-batches, after `num_steps_done` others: steps are counted from 1.

        Dropout masks are named by `num_steps_done`.
        """
        result = self.gradients(micro_batches, num_steps_done=num_steps_done)
        if not result.skipped:
            self.clip(result.grad_norm)
            self.data_parallel.wait_for_offload()
            self.optimizer.step(learning_rate=learning_rate, weight_decay=weight_decay)
            self.data_parallel.gather_parameters()
        self.loss_scale.update(overflow=not math.isfinite(result.grad_norm))
        return result

    def gradients(self, micro_batches: Sequence[MicroBatch], *, num_steps_done: int) -> StepResult:
        """Leaves on the data axis the gradient of the mean loss over all predictions of the step that count.

        Times the loss scale: `clip` takes it out again.
        """
        micro_batches = self._mine(micro_batches)
        num_tokens, scale = self._count_loss_tokens(micro_batches), self.loss_scale.scale
        self.data_parallel.zero()
        total = self.executor.run(
            self._actions(len(micro_batches)),
            micro_batches,
            step=num_steps_done,
            loss_scale=scale / max(num_tokens, 1),
            starting=self.data_parallel.begin_action,
            observers=self.observers,
        )
        self.data_parallel.finish_reduction()
        loss = self._sum_over_ranks(total) / max(num_tokens, 1)
        grad_norm = self._global_norm(self.data_parallel.counted_gradients()) / scale
        is_finite = math.isfinite(loss) and math.isfinite(grad_norm)
        # Where a smaller scale may help, the step is left out and the run goes on.
        if self.check_finite and not is_finite and not self.loss_scale.can_shrink:
            too_large = f"; the loss scale of {scale} may be too large for fp16, too" if scale > 1 else ""
            raise NotFiniteError(
                f"loss={loss} and grad_norm={grad_norm} in step {num_steps_done + 1} must be finite; the parameters "
                "are as they were before this step. Lower --lr, lengthen the warm-up, or look at the data of this "
                f"step{too_large}"
            )
        skipped = not math.isfinite(grad_norm) and self.loss_scale.skips_overflow
        return StepResult(loss, grad_norm, num_tokens, scale, skipped)

    def clip(self, grad_norm: float) -> None:
        """Take the loss scale out of the gradient, and shorten it to `clip_grad` if it is longer."""
        factor = 1.0 / self.loss_scale.scale
        if self.clip_grad > 0 and grad_norm > self.clip_grad:
            factor *= self.clip_grad / (grad_norm + 1e-6)
        if factor != 1.0:
            self.data_parallel.scale(factor)

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> tuple[float, int]:
        """The sum of losses over all ranks, and the predictions in it; no dropout, nothing is updated."""
        forwards = [action for action in self._actions(len(micro_batches)) if action.kind == "F"]
        micro_batches = self._mine(micro_batches)
        total = self.executor.run(forwards, micro_batches, step=None)
        return self._sum_over_ranks(total), self._count_loss_tokens(micro_batches)

    def _mine(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """What this cp rank holds of whole sequences, on its device."""
        cp, found = self.mesh.cp, list(micro_batches)
        if cp.size > 1:
            found = [each.at(places_of(each.tokens.shape[1], cp.rank, cp.size)) for each in found]
        return [each.to(self.mesh.device) for each in found]

    def _count_loss_tokens(self, micro_batches: Sequence[MicroBatch]) -> int:
        """Predictions of the step that count, over all data ranks."""
        count = sum(micro_batch.num_loss_tokens for micro_batch in micro_batches)
        return int(comm.all_reduce(torch.tensor(count, device=self.mesh.device), self.mesh.data))

    def params_norm(self) -> float:
        """The 2-norm of all parameters."""
        return self._global_norm(self._by_domain({name: [shard.master] for name, shard in self._counted_shards()}))

    def num_zeros(self) -> int:
        """Gradient elements that are exactly zero, padding of the vocabulary left out."""
        gradients = self.data_parallel.gradients
        elements = {
            name: [piece.view(gradients[name]) for piece in shard.pieces]
            for name, shard in self._counted_shards()
            if name in gradients
        }
        mesh = self.mesh
        return num_zeros(self._by_domain(elements), mesh.domains, pp=mesh.pp, device=mesh.device)

    def _global_norm(self, counted: Mapping[str, Sequence[torch.Tensor]]) -> float:
        return global_norm(counted, self.mesh.domains, pp=self.mesh.pp, device=self.mesh.device)

    def _counted_shards(self) -> Iterator[tuple[str, Shard]]:
        """The shards whose elements this rank counts."""
        sharing = self.data_parallel
        return ((name, shard) for name, shard in sharing.shards.items() if name in sharing.counted)

    def _by_domain(self, tensors: Mapping[str, Sequence[torch.Tensor]]) -> dict[str, list[torch.Tensor]]:
        """Tensors by parameter, grouped by their reduction domain."""
        found: dict[str, list[torch.Tensor]] = {name: [] for name in self.mesh.domains}
        for name, parts in tensors.items():
            found[self.shardings[name].domain] += parts
        return found

    def _actions(self, num_microbatches: int) -> list[Action]:
        return self.stages.actions(self.mesh.pp.rank, num_microbatches)

    def _sum_over_ranks(self, total: torch.Tensor) -> float:
        """Over data ranks and stages; tp ranks hold the same."""
        return float(comm.all_reduce(comm.all_reduce(total.double(), self.mesh.data), self.mesh.pp))


def _share(
    stage: GPT,
    shardings: dict[str, Sharding],
    stages: Stages,
    mesh: Mesh,
    settings: DataParallelSettings,
    *,
    seed: int | None,
) -> DataParallel:
    """What the data ranks make of this rank's stage of the model."""
    if settings.zero_stage == 3:
        chunks = [[stage.layers[str(layer)] for layer in chunk.layers] for chunk in stage.chunks]
        return FullySharded(stage, chunks, shardings, mesh.domains, settings, device=mesh.device, seed=seed)
    if seed is not None:
        initialize(stage, shardings, seed=seed, domains=mesh.domains)
    deferred = "W" if stages.schedule.has_weight_gradients else "B"
    return Zero(
        dict(stage.named_parameters()),
        shardings,
        mesh.domains,
        settings,
        sources={
            name: frozenset((user.chunk, deferred if user.is_linear else "B") for user in users)
            for name, users in stage.users().items()
        },
    )


def _summed(stage: GPT, chunk: int, x: torch.Tensor | None, batch: MicroBatch, *, step: int | None) -> torch.Tensor:
    """A chunk's forward; where it ends the model, the sum of the losses that count."""
    y = stage(x, batch, step=step, chunk=chunk)
    return (y * batch.loss_mask.t()).sum() if stage.chunks[chunk].is_last else y


def _recompute(config: RecomputeConfig, tp: Axis) -> Recompute:
    """Settings, and the axis over which they apply."""
    return Recompute(
        config.recompute_granularity,
        config.recompute_method,
        config.recompute_num_layers,
        shard_axis=tp if config.distribute_saved_activations else Axis("tp"),
        offload=config.offload_saved_activations,
    )
