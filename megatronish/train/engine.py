"""What does one step need? This rank's piece of the model, its gradients and its optimizer, put together.

`Engine` is the part of training that knows nothing of files, logs or config: hand it the micro-batches of a step and
a learning rate, and it computes, reduces, clips and updates. The trainer, the tests and `verify_layout` all drive it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from megatronish import comm
from megatronish.attention.zigzag import places_of
from megatronish.config.model import ModelConfig
from megatronish.config.optimizer import OptimizerConfig
from megatronish.config.parallel import ParallelConfig
from megatronish.config.recompute import RecomputeConfig
from megatronish.config.training import TrainingConfig
from megatronish.data_parallel.fully_sharded import FullySharded
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
from megatronish.pipeline.executor import Executor, Record
from megatronish.pipeline.stages import Stages
from megatronish.pipeline.transfers import Boundary
from megatronish.schedule.plan import Action, StageChunk
from megatronish.sharding import Sharding, collect_shardings, initialize

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
    data_parallel: Zero | FullySharded
    optimizer: Optimizer
    executor: Executor
    loss_scale: LossScale
    clip_grad: float
    check_finite: bool
    record: Record | None = None
    """Told the times of every action of a step, while it is set."""

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
        with mesh.device:
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
        if learns:
            initialize(stage, shardings, seed=training.seed, tp=mesh.tp)
        else:
            stage.requires_grad_(False)
        dtype = DTYPES[training.precision]
        splits_backward = stages.schedule.has_weight_gradients
        data_parallel = _share(stage, shardings, stages, mesh, parallel, dtype)
        for buffer in stage.buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.to(dtype)
        for module, names in stage.by_first_use():
            data_parallel.wait_before(module, names)
        weight_gradients = None
        if splits_backward:
            assert isinstance(data_parallel, Zero), "fully_shard reduces gradients before a W action computes them"
            weight_gradients = WeightGradients(data_parallel.sums, delivered=data_parallel.delivered)
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
                optimizer,
                device=mesh.device,
                tp=mesh.tp,
                shard_axis=data_parallel.shard_axis,
                replicate_axis=data_parallel.replicate_axis,
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
        self, micro_batches: Sequence[MicroBatch], *, step: int, learning_rate: float, weight_decay: float
    ) -> StepResult:
        """One update from this rank's micro-batches of global step number `step`."""
        result = self.gradients(micro_batches, step=step)
        if not result.skipped:
            self.clip(result.grad_norm)
            self.data_parallel.collect()
            self.optimizer.step(learning_rate=learning_rate, weight_decay=weight_decay)
            self.data_parallel.publish()
        self.loss_scale.update(overflow=not math.isfinite(result.grad_norm))
        return result

    def gradients(self, micro_batches: Sequence[MicroBatch], *, step: int) -> StepResult:
        """Leaves on the data axis the gradient of the mean loss over all predictions of the step that count.

        Times the loss scale: `clip` takes it out again.
        """
        micro_batches = self._mine(micro_batches)
        num_tokens, scale = self._count_loss_tokens(micro_batches), self.loss_scale.scale
        self.data_parallel.zero()
        total = self.executor.run(
            self._actions(len(micro_batches)),
            micro_batches,
            step=step,
            loss_scale=scale / max(num_tokens, 1),
            starting=self.data_parallel.starting,
            record=self.record,
        )
        self.data_parallel.finish()
        loss = self._sum_over_ranks(total) / max(num_tokens, 1)
        counted = self.data_parallel.counted_gradients()
        grad_norm = global_norm(counted, over=self._counting_axes, device=self.mesh.device) / scale
        is_finite = math.isfinite(loss) and math.isfinite(grad_norm)
        # Where a smaller scale may help, the step is left out and the run goes on.
        if self.check_finite and not is_finite and not self.loss_scale.can_shrink:
            too_large = f"; the loss scale of {scale} may be too large for fp16, too" if scale > 1 else ""
            raise NotFiniteError(
                f"loss={loss} and grad_norm={grad_norm} in step {step + 1} must be finite; the parameters are as they "
                f"were before this step. Lower --lr, lengthen the warm-up, or look at the data of this step{too_large}"
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
        masters = [self.data_parallel.shards[name].master for name in self.data_parallel.counted]
        return global_norm(masters, over=self._counting_axes, device=self.mesh.device)

    def num_zeros(self) -> int:
        """Gradient elements that are exactly zero, padding of the vocabulary left out."""
        sharing = self.data_parallel
        learning = sharing.counted & sharing.gradients.keys()
        elements = [piece.view(sharing.gradients[name]) for name in learning for piece in sharing.shards[name].pieces]
        return num_zeros(elements, over=self._counting_axes, device=self.mesh.device)

    @property
    def _counting_axes(self) -> tuple[Axis, ...]:
        """Those over which counted elements differ."""
        return self.data_parallel.shard_axis, self.mesh.tp, self.mesh.pp

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
    parallel: ParallelConfig,
    dtype: torch.dtype,
) -> Zero | FullySharded:
    """What the data axis makes of this rank's piece of the model."""
    # Where the model ends on the stage it starts from, nobody else holds its tied embedding.
    embedding_axis = (
        mesh.embedding_axis if stages.placement[0].stage != stages.placement[-1].stage else Axis("embedding")
    )
    reduce_dtype = torch.bfloat16 if parallel.grad_reduce_in_bf16 else torch.float32
    masters_on = torch.device("cpu") if parallel.optimizer_cpu_offload and not parallel.param_cpu_offload else None
    if parallel.zero == 3:
        assert mesh.fully_shared is not None, "the mesh is not that of the config"
        return FullySharded(
            stage,
            [[stage.layers[str(layer)] for layer in chunk.layers] for chunk in stage.chunks],
            shardings,
            mesh=mesh.fully_shared,
            dtype=dtype,
            shard_axis=mesh.shared,
            replicate_axis=mesh.copied,
            tp=mesh.tp,
            embedding_axis=embedding_axis,
            bucket_size=parallel.ddp_bucket_size,
            reduce_dtype=reduce_dtype,
            masters_on=masters_on,
            offload_parameters=parallel.param_cpu_offload,
        )
    defer = "W" if stages.schedule.has_weight_gradients else "B"
    return Zero(
        dict(stage.named_parameters()),
        shardings,
        stage=parallel.zero,
        dtype=dtype,
        shard_axis=mesh.shared if parallel.zero else Axis("shared"),
        replicate_axis=mesh.copied if parallel.zero else mesh.data,
        tp=mesh.tp,
        embedding_axis=embedding_axis,
        bucket_size=parallel.ddp_bucket_size,
        overlap_reduce=parallel.overlap_grad_reduce,
        overlap_gather=parallel.overlap_param_gather,
        reduce_dtype=reduce_dtype,
        masters_on=masters_on,
        sources={
            name: frozenset((user.chunk, defer if user.is_linear else "B") for user in users)
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
