"""The engine: one step of training on one rank, from micro-batches to updated parameters.

It knows nothing of files, logs or config: hand it the micro-batches of a step and a learning rate, and it computes,
reduces, clips and updates. build.py puts one together; the trainer, the tests and `verify_layout` drive it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from megatronish.attention.zigzag import places_of
from megatronish.core.errors import RunError
from megatronish.engine.balancing import Balancing
from megatronish.engine.forward import PairPreparation
from megatronish.engine.results import NotFiniteError, StepResult, Totals, Votes, meet_stages, no_votes, reduce_sums
from megatronish.model.batch import MicroBatch
from megatronish.objectives.objective import LOSS, metrics_of
from megatronish.objectives.pairs import AnyObjective
from megatronish.optim.global_norm import global_norm
from megatronish.optim.loss_scale import LossScale, LossSpikes
from megatronish.optim.optimizer import Optimizer
from megatronish.parallel import comm
from megatronish.parallel.all_or_none import all_or_none
from megatronish.parallel.data_parallel.data_parallel import DataParallel
from megatronish.parallel.mesh import Axis, Mesh
from megatronish.parallel.pipeline.cuda_graph import ReplayingExecutor
from megatronish.parallel.pipeline.executor import Executor, Observer
from megatronish.parallel.pipeline.stage import ModelStage
from megatronish.parallel.ranges import OPTIMIZER, marked
from megatronish.parallel.schedules.plan import Action


@dataclass
class Engine:
    """One rank's share of a training run. `observers` receive the times of every action.

    `preparation` completes the micro-batches of objectives that compare completions; `reference` is the frozen model
    that some of them compare with.
    """

    mesh: Mesh
    stage: ModelStage
    objective: AnyObjective
    data_parallel: DataParallel
    optimizer: Optimizer
    executor: Executor | ReplayingExecutor
    rule: "UpdateRule"
    preparation: PairPreparation | None = field(default=None, init=False)
    reference: "Engine | None" = field(default=None, init=False)
    observers: list[Observer] = field(default_factory=list, init=False)
    meets_stages: bool = field(default=False, init=False)  # in this step, on all ranks alike: for a profile
    balancing: Balancing = field(init=False)
    arrivals: "GradientArrivals" = field(init=False)

    def __post_init__(self) -> None:
        self.balancing = Balancing(self.stage.model)
        self.arrivals = GradientArrivals(dict(self.stage.model.named_parameters()))

    def step(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        num_steps_done: int,
        learning_rate: float,
        weight_decay: float,
        decoupled_learning_rate: float | None = None,
        votes: Votes = no_votes,
    ) -> StepResult:
        """One update from this rank's micro-batches, after `num_steps_done` others: steps are counted from 1.

        Dropout masks are named by `num_steps_done`. `votes` are asked once the step is computed: numbers of this rank,
        under the same names on every rank, that are reduced with the sums of the step. `decoupled_learning_rate` is for
        the word embedding and the output layer, with --decoupled-lr.
        """
        result = self.gradients(micro_batches, num_steps_done=num_steps_done, votes=votes)
        if not result.skipped:
            with marked(OPTIMIZER):
                self.clip(result.grad_norm)
                self.data_parallel.wait_for_offload()
                self.optimizer.step(
                    learning_rate=learning_rate,
                    weight_decay=weight_decay,
                    decoupled_learning_rate=decoupled_learning_rate,
                )
            self.data_parallel.gather_parameters()
            self.balancing.end_step(result.expert_load)
        self.rule.loss_scale.update(overflow=not math.isfinite(result.grad_norm))
        return result

    def gradients(
        self, micro_batches: Sequence[MicroBatch], *, num_steps_done: int, votes: Votes = no_votes
    ) -> StepResult:
        """Forward and backward: afterwards each data rank holds its part of the summed gradient of loss / weight.

        It is multiplied by the loss scale, which `clip` takes out again.
        """
        weight, scale = weight_of(micro_batches, self.objective, self.mesh), self.rule.loss_scale.scale
        local = self._local(micro_batches)
        self.data_parallel.zero()
        num_sequences = self.mesh.dp.size * sum(len(each.tokens) for each in micro_batches)
        seq_length = micro_batches[0].tokens.shape[1]
        with self.balancing.of_step(num_sequences, seq_length=seq_length, loss_scale=scale):
            sums = self.executor.run(
                self._actions(len(micro_batches)),
                local,
                step=num_steps_done,
                loss_scale=scale / max(weight, 1),
                begin_action=self.data_parallel.begin_action,
                observers=self.observers,
            )
        self.arrivals.check(self.mesh.checkpoint_axis)
        if self.meets_stages:
            meet_stages(self.mesh)
        self.data_parallel.finish_reduction()
        mesh, counted, shapes = self.mesh, self.data_parallel.counted_gradients(), self.balancing.shapes
        norm = global_norm(counted, mesh.domains, pp=mesh.pp, device=mesh.device)
        totals = reduce_sums(sums, votes(), norm, objective=self.objective.names, model=shapes, mesh=mesh)
        metrics = metrics_of(self.objective, totals.objective, weight=weight)
        metrics |= self.balancing.metrics(totals.model, num_sequences=num_sequences)
        grad_norm = totals.norm / scale
        origin = self.balancing.not_finite(sums, totals.model, mesh)
        self.rule.refuse_not_finite(metrics[LOSS], grad_norm, step=num_steps_done + 1, origin=origin)
        skipped = self.rule.skips(grad_norm, step=num_steps_done + 1)
        load = self.balancing.load(totals.model)
        return StepResult(metrics, grad_norm, weight, scale, skipped, totals.votes, load)

    def clip(self, grad_norm: float) -> None:
        """Take the loss scale out of the gradient, and shorten it if it is too long."""
        factor = self.rule.factor(grad_norm)
        if factor != 1.0:
            self.data_parallel.scale(factor)

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> Totals:
        """The objective's sums over all ranks, and what divides them; no dropout, nothing is updated."""
        forwards = [action for action in self._actions(len(micro_batches)) if action.kind == "F"]
        sums = self.executor.run(forwards, self._local(micro_batches), step=None)
        totals = reduce_sums(sums, {}, objective=self.objective.names, model={}, mesh=self.mesh)
        return Totals(totals.objective, weight_of(micro_batches, self.objective, self.mesh))

    def _local(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """What this cp rank holds of whole sequences, prepared for the objective."""
        found = on_rank(micro_batches, self.mesh)
        return found if self.preparation is None else self.preparation(found)

    def _actions(self, num_microbatches: int) -> list[Action]:
        return self.stage.stages.actions(self.mesh.pp.rank, num_microbatches)


def on_rank(micro_batches: Sequence[MicroBatch], mesh: Mesh) -> list[MicroBatch]:
    """What this cp rank holds of whole sequences, on its device."""
    cp, found = mesh.cp, list(micro_batches)
    if cp.size > 1:
        found = [each.at(places_of(each.tokens.shape[1], cp.rank, cp.size)) for each in found]
    return [each.to(mesh.device) for each in found]


def weight_of(micro_batches: Sequence[MicroBatch], objective: AnyObjective, mesh: Mesh) -> int:
    """The divisor of the step's sums, over all data ranks. It is counted and summed on the CPU.

    cp ranks have the same whole sequences, so only those of dp add up.
    """
    weight = torch.tensor(sum(objective.weight(batch) for batch in micro_batches))
    return int(comm.all_reduce(weight, mesh.dp))


class UpdateRule(NamedTuple):
    """Loss scale, clipping, and the check for what is not finite."""

    loss_scale: LossScale
    clip_grad: float
    check_finite: bool
    spikes: LossSpikes

    def factor(self, grad_norm: float) -> float:
        """What the gradient is multiplied by: it takes the loss scale out, and shortens what is above `clip_grad`."""
        factor = 1.0 / self.loss_scale.scale
        if self.clip_grad > 0 and grad_norm > self.clip_grad:
            factor *= self.clip_grad / (grad_norm + 1e-6)
        return factor

    def skips(self, grad_norm: float, *, step: int) -> bool:
        """Whether a step is left out: its gradient overflowed in fp16, or is far longer than usual."""
        if not math.isfinite(grad_norm):
            return self.loss_scale.skips_overflow
        return self.spikes.skips(grad_norm, step=step)

    def refuse_not_finite(self, loss: float, grad_norm: float, *, step: int, origin: str | None = None) -> None:
        """NotFiniteError, unless a smaller loss scale may help: then the step is left out and the run continues.

        `origin` says where the first number was that was not finite, if that is known.
        """
        is_finite = math.isfinite(loss) and math.isfinite(grad_norm)
        if is_finite or not self.check_finite or self.loss_scale.can_shrink:
            return
        scale = self.loss_scale.scale
        too_large = f"; the loss scale of {scale} may be too large for fp16, too" if scale > 1 else ""
        found = f": {origin}" if origin else ""
        raise NotFiniteError(
            f"loss={loss} and grad_norm={grad_norm} in step {step} must be finite{found}; the parameters are as they "
            f"were before this step. Lower --lr, lengthen the warm-up, or look at the data of this step{too_large}"
        )


NAMED = 3
"""Parameters that the error names."""


class GradientArrivals:
    """Learning parameters of this rank at which no gradient has arrived yet, until they are checked for once."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._missing = {name: None for name, parameter in parameters.items() if parameter.requires_grad}
        self._hooks: list[RemovableHandle] | None = [
            parameters[name].register_post_accumulate_grad_hook(_Arrived(self._missing, name)) for name in self._missing
        ]

    def check(self, axis: Axis) -> None:
        """RunError on all ranks of the axis, the first time, if a parameter of one of them has had no gradient."""
        if self._hooks is not None:
            for hook in self._hooks:
                hook.remove()
            self._hooks = None
            all_or_none(axis, self._refuse_missing)

    def _refuse_missing(self) -> None:
        if not self._missing:
            return
        first, number = ", ".join(list(self._missing)[:NAMED]), len(self._missing)
        more = f" and {number - NAMED} more parameters" if number > NAMED else ""
        raise RunError(
            f"no gradient has reached {first}{more} in the first step, so they would never learn; look for a detach(), "
            "a no_grad() or an unused module on the way from them to the loss, or freeze them (requires_grad=False)"
        )


class _Arrived:
    """Hook that crosses a name off. It holds no parameter, so that nothing keeps a model alive."""

    def __init__(self, missing: dict[str, None], name: str) -> None:
        self.missing, self.name = missing, name

    def __call__(self, _parameter: nn.Parameter) -> None:
        self.missing.pop(self.name, None)
