"""The engine: one step of training on one rank, from micro-batches to updated parameters.

It knows nothing of files, logs or config. build.py puts one together; trainer, tests and `verify_layout` drive it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from megatronish.engine.balancing import Balancing
from megatronish.engine.forward import Preparation, on_rank, weight_of, with_factors
from megatronish.engine.qk_clip import QKClip
from megatronish.engine.results import GradientArrivals, StepResult, StepSums, UpdateRule, Votes, no_votes, reduce_sums
from megatronish.model.batch import MicroBatch
from megatronish.objectives.objective import LOSS, metrics_of
from megatronish.objectives.pairs import AnyObjective
from megatronish.optim.global_norm import global_norm
from megatronish.optim.optimizer import Optimizer
from megatronish.optim.outer import OuterOptimizer
from megatronish.parallel.data_parallel.data_parallel import DataParallel
from megatronish.parallel.mesh import Mesh
from megatronish.parallel.pipeline.cuda_graph import ReplayingExecutor
from megatronish.parallel.pipeline.executor import Executor, Observer, meet_stages
from megatronish.parallel.pipeline.stage import ModelStage
from megatronish.parallel.ranges import OPTIMIZER, marked


@dataclass
class Engine:
    """One rank's share of a training run. `observers` receive the times of every action.

    `preparation` completes the micro-batches of objectives that need numbers of a whole step; `reference` is the frozen
    model that some of them compare with. `outer` joins the moves of islands (DiLoCo).
    """

    mesh: Mesh
    stage: ModelStage
    objective: AnyObjective
    data_parallel: DataParallel
    optimizer: Optimizer
    executor: Executor | ReplayingExecutor
    rule: UpdateRule
    preparation: Preparation | None = field(default=None, init=False)
    reference: "Engine | None" = field(default=None, init=False)
    outer: OuterOptimizer | None = field(default=None, init=False)
    qk_clip: QKClip = field(default_factory=QKClip, init=False)
    island_norm: float = field(default=0.0, init=False)  # of the last gradient, on the ranks of an island alike
    observers: list[Observer] = field(default_factory=list, init=False)
    meets_stages: bool = field(default=False, init=False)  # in this step, on all ranks alike: for a profile
    balancing: Balancing = field(init=False)
    arrivals: GradientArrivals = field(init=False)

    def __post_init__(self) -> None:
        self.balancing = Balancing(self.stage.model)
        self.arrivals = GradientArrivals(dict(self.stage.model.named_parameters()), self.stage.shardings)

    def step(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        num_steps_done: int,
        learning_rate: float,
        weight_decay: float,
        decoupled_learning_rate: float | None = None,
        momentum: float | None = None,
        votes: Votes = no_votes,
        is_last: bool = False,
    ) -> StepResult:
        """One update from this rank's micro-batches, after `num_steps_done` others: steps are counted from 1.

        Dropout masks are named by `num_steps_done`. `votes` are asked once the step is computed: numbers of this rank,
        under the same names on every rank, reduced with the sums of the step. `decoupled_learning_rate` is that of
        embedding and head, `momentum` is given where it cycles. An outer step follows where due, and if `is_last`.
        """
        result = self.gradients(micro_batches, num_steps_done=num_steps_done, votes=votes)
        if not result.skipped:
            with marked(OPTIMIZER):
                divisor = self.clip(self.island_norm)
                self.data_parallel.wait_for_offload()
                self.optimizer.step(
                    learning_rate=learning_rate,
                    weight_decay=weight_decay,
                    decoupled_learning_rate=decoupled_learning_rate,
                    momentum=momentum,
                    divisor=divisor,
                )
                self.qk_clip.end_step(self.stage.model, self.optimizer)
            self.balancing.end_step(result.expert_load)
        joins = self.outer is not None and self.outer.step_if_due(num_steps_done + 1, is_last=is_last)
        if joins or not result.skipped:
            self.data_parallel.gather_parameters()
        self.rule.loss_scale.update(overflow=not math.isfinite(result.grad_norm))
        return result

    def gradients(
        self, micro_batches: Sequence[MicroBatch], *, num_steps_done: int, votes: Votes = no_votes, pads: bool = True
    ) -> StepResult:
        """A step without its update: the gradient of loss scale x loss / weight, summed (ZeRO: a part a rank)."""
        mesh, names, shapes = self.mesh, self.objective.names, self.balancing.shapes
        weight, scale = weight_of(micro_batches, self.objective, mesh), self.rule.loss_scale.scale
        local = with_factors(self._local(micro_batches, num_depths=self.stage.model.num_depths), mesh)
        # 1. Forward and backward by the plan of this stage; the reduction of gradients starts meanwhile.
        self.data_parallel.zero()
        self.qk_clip.begin()
        num_sequences = mesh.dp.size * sum(len(batch.tokens) for batch in micro_batches)
        length, gradient = micro_batches[0].tokens.shape[1], scale / max(weight, 1)
        plan, begin = self.stage.stages.actions(mesh.pp.rank, len(micro_batches)), self.data_parallel.begin_action
        with self.balancing.of_step(num_sequences, seq_length=length, loss_scale=scale, pads=pads):
            sums = self.executor.run(
                plan, local, step=num_steps_done, loss_gradient=gradient, begin_action=begin, observers=self.observers
            )
        # 2. The rest of the reduction, and what all ranks see of the step.
        self.arrivals.check(mesh.checkpoint_axis)
        if self.meets_stages:
            meet_stages(mesh)
        self.data_parallel.finish_reduction()
        norm = global_norm(self.data_parallel.counted_gradients(), mesh.domains, pp=mesh.pp, device=mesh.device)
        numbers = votes()
        reduced = reduce_sums(sums, numbers, norm, weight=weight, objective=names, model=shapes, mesh=mesh)
        if self.balancing.lacked_room(reduced.model):  # all is computed again, with as many rows as there are
            return self.gradients(micro_batches, num_steps_done=num_steps_done, votes=lambda: numbers, pads=False)
        metrics = metrics_of(self.objective, reduced.objective, weight=reduced.weight)
        metrics |= self.balancing.metrics(reduced.model, num_sequences=mesh.islands.size * num_sequences)
        metrics |= self.qk_clip.metrics(mesh)
        # 3. Is it finite, and does it count?
        grad_norm = reduced.mean_norm / scale
        origin = self.balancing.not_finite(sums, reduced.model, mesh)
        self.rule.refuse_not_finite(metrics[LOSS], grad_norm, step=num_steps_done + 1, origin=origin)
        skipped = self.rule.skips(grad_norm, step=num_steps_done + 1)
        self.island_norm, load = reduced.norm / scale, self.balancing.load(reduced.model)
        return StepResult(metrics, grad_norm, reduced.weight, scale, skipped, reduced.votes, load)

    def clip(self, grad_norm: float) -> float:
        """Take the loss scale out of the gradient, and shorten it if it is too long; what the optimizer divides by."""
        return self.rule.shorten(grad_norm, self.data_parallel, self.optimizer)

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> StepSums:
        """The objective's sums over all ranks, and what divides them; no dropout, nothing is updated."""
        plan = self.stage.stages.actions(self.mesh.pp.rank, len(micro_batches))
        sums = self.executor.run([each for each in plan if each.kind == "F"], self._local(micro_batches), step=None)
        weight = weight_of(micro_batches, self.objective, self.mesh)
        return reduce_sums(sums, {}, weight=weight, objective=self.objective.names, model={}, mesh=self.mesh)

    def _local(self, micro_batches: Sequence[MicroBatch], *, num_depths: int = 0) -> list[MicroBatch]:
        """What this cp rank holds of whole sequences, prepared for the objective."""
        return (self.preparation or list)(on_rank(micro_batches, self.mesh, num_depths=num_depths))
