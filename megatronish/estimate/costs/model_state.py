"""Model state of a rank, and what ZeRO shares of it.

In fp32 a parameter takes 4 bytes, its gradient 4 and Adam 8, 16 in all; in 16 bits it takes 2, a gradient in fp32 4,
master weight and Adam 12, 18 in all. A frozen parameter has neither gradient nor master. What ZeRO shares is divided by
the ranks that share it (docs/SHARDING.md has the table): dense parameters over dp and cp, experts over the ranks that
hold the same ones.

FSDP shares the rows of each parameter. Where they are not a multiple of the ranks (few experts over many ranks) the
weights of all ranks are padded, as is what is gathered; gradients and the optimizer's states have true rows alone, so
the first ranks have most of them and the last ones may have none.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple

from megatronish.config.config import Config
from megatronish.core.names import OPTIMIZER_NAMES
from megatronish.estimate.costs.layer_kinds import StageKinds
from megatronish.estimate.costs.memory_table import Memory
from megatronish.estimate.costs.parameters import Quantised, quantised
from megatronish.estimate.costs.stage_parameters import StageParameter
from megatronish.estimate.costs.state_traffic import DataRanks, data_ranks
from megatronish.parallel.bucketing import rounded_up
from megatronish.specs.costs import Count, sum_counts


class ZeroSettings(NamedTuple):
    """What ZeRO shares among how many ranks, and what of it waits in the CPU's memory, or `on_disk`.

    With `rounds_weights` the model computes with codes of the masters (qwZ), which are apart in fp32, too.
    """

    stage: int = 0
    ranks: int = 1
    offloads_optimizer: bool = False
    offloads_parameters: bool = False
    on_disk: bool = False
    rounds_weights: bool = False

    @classmethod
    def of(cls, config: Config, domain: str = "dense") -> "ZeroSettings":
        """The settings that the flags give, for the parameters of a domain."""
        parallel = config.parallel
        return cls(
            stage=parallel.zero,
            ranks=data_ranks(config)[domain].shard,
            offloads_optimizer=parallel.optimizer_cpu_offload or parallel.param_cpu_offload,
            offloads_parameters=parallel.param_cpu_offload,
            on_disk=parallel.offload_folder is not None,
            rounds_weights=parallel.zero_quantized_weights is not None,
        )


def frozen_state(count: int, zero: ZeroSettings, *, element_bytes: int) -> Memory:
    """Frozen parameters of a rank, in the dtype that is computed in (`element_bytes` is 1 for bytes); no masters."""
    size = element_bytes * (-(-count // zero.ranks) if zero.stage == 3 else count)
    if not zero.offloads_parameters:
        return Memory(size, 0, 0)
    return Memory(0, 0, 0, disk=size) if zero.on_disk else Memory(0, 0, 0, host=size)


def model_state(count: int, num_moments: int, zero: ZeroSettings, *, element_bytes: int) -> Memory:
    """Parameters, gradients and optimizer of a rank that computes with `count` parameters, padding left out.

    `num_moments` are the elements that its optimizers would keep with its masters if nothing were shared.
    `element_bytes` are those of the dtype that is computed in: 4 in fp32, else 2.
    """
    share, moments = (-(-each // zero.ranks) for each in (count, num_moments))
    parameters = 4 * share if zero.stage == 3 else element_bytes * count
    gradients = 4 * (count if zero.stage < 2 else share)
    if zero.offloads_parameters and zero.on_disk:  # gradients add up over micro-batches: in memory
        return Memory(0, 0, 0, host=gradients, disk=parameters + 4 * moments)
    if (
        zero.offloads_optimizer and zero.on_disk and not zero.offloads_parameters
    ):  # which reads gradients where they are
        return Memory(parameters, gradients, 0, disk=4 * share + 4 * moments)
    if zero.offloads_parameters:
        return Memory(0, 0, 0, host=parameters + gradients + 4 * moments)
    if zero.offloads_optimizer:  # masters, and the gradients that they are stepped by
        return Memory(parameters, gradients, 0, host=(4 + 4) * share + 4 * moments)
    # In fp32 they are the parameters, as in ZeRO-3.
    masters = 4 * share if zero.stage < 3 and (element_bytes < 4 or zero.rounds_weights) else 0
    return Memory(parameters, gradients, masters + 4 * moments)


class StageCounts(NamedTuple):
    """Parameters of a stage: all, those that learn, those of them in matrices; `blocks` are held in 4 bits."""

    held: Count
    learned: Count
    in_matrices: Count
    blocks: Quantised

    @classmethod
    def of(cls, config: Config, stage: StageKinds, *, vocab_size: int) -> "StageCounts":
        """Of a config, with a vocabulary padded for tp."""
        model, adapter, counts = config.model, config.adapter, stage.counts
        padded = model.padded_vocab_size(vocab_size, config.layout.tp)
        held = stage.parameters(model, vocab_size=padded, seq_length=config.training.seq_length)
        if not adapter.is_used:
            matrices = sum_counts(kind.cost.matrices * number for kind, number in counts.items())
            return cls(held, held, matrices, Quantised(Count(), Count()))
        blocks = [(quantised(model, [kind.first], adapter), number) for kind, number in counts.items()]
        parameters, stored = (sum_counts(block[part] * number for block, number in blocks) for part in range(2))
        return cls(held, stage.adapters, Count(), Quantised(parameters, stored))


def stage_state(config: Config, counts: StageCounts) -> Memory:
    """Parameters, gradients and optimizer of a stage, with even shares; and a second model of --reference model."""
    width = 4 if config.training.precision == "fp32" else 2
    tp, experts = config.layout.tp, config.parallel.expert_layout
    grid = prod(experts)
    num_moments = OPTIMIZER_NAMES[config.optimizer.optimizer].num_moments
    frozen = counts.held + counts.blocks.parameters * -1 if config.adapter.is_used else Count()
    state = Memory(0, 0, 0)
    for domain in data_ranks(config):
        zero = ZeroSettings.of(config, domain)

        def on_rank(count: Count, domain: str = domain) -> int:
            return count.of_experts(grid, experts.etp) if domain == "experts" else count.without_experts.per_rank(tp)

        learned = on_rank(counts.learned)
        moments = num_moments(count=learned, in_matrices=on_rank(counts.in_matrices))
        if config.parallel.outer_optimizer is not None:  # outer parameters and their momentum
            moments += 2 * learned
        state = state.plus(model_state(learned, moments, zero, element_bytes=width))
        state = state.plus(frozen_state(on_rank(frozen), zero, element_bytes=width))
        state = state.plus(frozen_state(on_rank(counts.blocks.stored), zero, element_bytes=1))
        if config.reference == "model":
            state = state.plus(frozen_state(on_rank(counts.held), zero, element_bytes=width))
    return state


class Rows(NamedTuple):
    """Elements on a rank of parameters that learn: with padding, without it, and with an even share of all rows.

    `gathered` are those of whole parameters with padding, by domain; `kept` is the part of them that the rank keeps for
    its neighbours (hpZ).
    """

    padded: int
    own: int
    even: float
    gathered: tuple[int, int]
    kept: int = 0

    @classmethod
    def of(
        cls, parameters: Iterable[StageParameter], ranks: Mapping[str, DataRanks], places: Mapping[str, int]
    ) -> "Rows":
        """Of these parameters, on the rank at these places among those that shard each domain, the first by default."""
        padded, own, even, gathered, kept = 0, 0, 0.0, [0, 0], 0
        for parameter in parameters:
            shard, _, secondary = ranks[parameter.domain]
            whole = rounded_up(parameter.rows, shard)
            kept += whole * parameter.columns // secondary if secondary > 1 else 0
            gathered[parameter.domain == "experts"] += whole * parameter.columns
            if parameter.learns:
                part = whole // shard
                padded += part * parameter.columns
                own += parameter.own_rows(shard, places.get(parameter.domain, 0)) * parameter.columns
                even += parameter.size / shard
        return cls(padded, own, even, (gathered[0], gathered[1]), kept)

    @property
    def part_kept(self) -> float:
        """Part of what is gathered that the rank keeps for its neighbours."""
        return self.kept / max(1, sum(self.gathered))

    def times(self, number: int) -> "Rows":
        """Of so many layers that are alike."""
        padded, own, even, (dense, experts), kept = self
        return Rows(number * padded, number * own, number * even, (number * dense, number * experts), number * kept)


def with_padding(memory: Memory, rows: Sequence[Rows]) -> Memory:
    """What ZeRO-3 holds, of `memory` with even shares in fp32."""
    padded, own, even = (sum(getattr(each, name) for each in rows) for name in ("padded", "own", "even"))
    if not even:
        return memory
    return memory._replace(
        parameters=memory.parameters + round(4 * (padded - even)) if memory.parameters else 0,
        gradients=memory.gradients + round(4 * (own - even)) if memory.gradients else 0,
        optimizer=round(memory.optimizer * own / even),
    )
