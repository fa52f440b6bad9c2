"""Bytes that a rank exchanges in a step, by axis and collective, from the config alone.

Bytes of a call are those of its largest tensor: the tensor of an all-reduce, the whole of an all-gather or a
reduce-scatter, all that a rank sends in an all-to-all, a message. With H = S B D / cp elements of hidden states:

    tp         layers: 4 all-reduces of H, two forward and two backward (Shoeybi et al. 2019); with sequence parallelism
               6 all-gathers and 4 reduce-scatters of H (Korthikanti et al. 2022, with inputs gathered again)
    cp         a ring: keys and values cp - 1 times forward and backward, their gradients in fp32 cp times; all-to-all:
               queries, keys and values, and the output, forward and backward
    F, B       activations and their gradients between stages, H / tp each
    shard      ZeRO-1: gradients reduce-scattered and parameters gathered once a step; ZeRO-2: gradients once a
               micro-batch; ZeRO-3: parameters gathered twice a micro-batch, too
    ep, etp    rows of tokens to their experts and back, where the load is even

What is computed again exchanges again what its forward did. Left out: adapters, evaluation, and the padding of buckets,
of which there is none where sizes are multiples of 16 bytes times the ranks that share them.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from megatronish.config.config import Config
from megatronish.costs.activations import StageLoad
from megatronish.costs.parameters import parameters_of_stage
from megatronish.layer_costs import Count
from megatronish.layer_specs import ExpertsSpec, LayerSpec, layer_specs
from megatronish.schedule.plan import StageChunk, routes
from megatronish.schedule.schedules import SCHEDULES

SCALAR = 8  # bytes of a number in fp64, or an integer


class TrafficKey(NamedTuple):
    """Name of the group of ranks, and of the collective."""

    axis: str
    collective: str


def expected_traffic(config: Config, load: StageLoad, stage: int, *, vocab_size: int) -> dict[TrafficKey, int]:
    """Bytes of one step on a rank of this stage, whose layers `load` has."""
    found = _StageTraffic(config, load, stage, vocab_size)
    found.layers()
    found.ends()
    found.transfers()
    found.data_ranks()
    found.numbers()
    return {key: size for key, size in found.sent.items() if size}


@dataclass
class _StageTraffic:
    """Bytes of a rank's step, added up by kind of traffic."""

    config: Config
    load: StageLoad
    stage: int
    vocab_size: int
    sent: Counter[TrafficKey] = field(default_factory=Counter)

    def add(self, axis: str, collective: str, size: float) -> None:
        """Bytes of a whole step on an axis, if it has more than one rank."""
        if self.sizes.get(axis, 2) > 1:
            self.sent[TrafficKey(axis, collective)] += round(size)

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Ranks of the axes that may be of one."""
        layout, experts = self.config.layout, self.config.parallel.expert_layout
        has_experts = self.config.model.num_experts is not None
        ep, etp = experts if has_experts else (1, 1)
        return {"tp": layout.tp, "cp": layout.cp, "pp": layout.pp, "dp": layout.dp, "ep": ep, "etp": etp}

    @cached_property
    def num_microbatches(self) -> int:
        """Micro-batches of a step."""
        return self.config.global_batch_size // (self.config.training.micro_batch_size * self.config.layout.dp)

    @property
    def width(self) -> int:
        """Bytes of an element of activations."""
        return 4 if self.config.training.precision == "fp32" else 2

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on a cp rank."""
        training = self.config.training
        return training.seq_length * training.micro_batch_size // self.config.layout.cp

    @property
    def hidden(self) -> int:
        """Bytes of the hidden states of a micro-batch, H."""
        return self.tokens * self.config.model.hidden_size * self.width

    @property
    def cuts_sequence(self) -> bool:
        """Whether there is sequence parallelism."""
        return self.config.parallel.sequence_parallel and self.config.layout.tp > 1

    @cached_property
    def specs(self) -> list[LayerSpec]:
        """Layers of the stage."""
        specs = layer_specs(self.config.model)
        return [specs[layer] for layer in self.load.all_layers]

    def forwards(self, spec_index: int) -> int:
        """How often a layer of the stage runs forward for one micro-batch."""
        recompute, place = self.config.recompute, spec_index
        if recompute.recompute_granularity != "full":
            return 1
        if recompute.recompute_method == "uniform":
            return 2
        for layers in self.load.layers:
            if place < len(layers):
                return 2 if place < recompute.recompute_num_layers else 1
            place -= len(layers)
        raise AssertionError("the layer is in no chunk")

    def layers(self) -> None:
        """Tensor, context and expert parallelism inside of layers."""
        for index, spec in enumerate(self.specs):
            forwards = self.forwards(index)
            is_dense = not isinstance(spec.mlp, ExpertsSpec)
            self._products(sublayers=2 if is_dense else 1, forwards=forwards)
            cores = forwards + (self.config.recompute.recompute_granularity == "selective")
            self._cores(spec, cores)
            if not is_dense:
                self._experts(spec.mlp, forwards)  # type: ignore[arg-type]
        if self.config.recompute.distribute_saved_activations:
            size = self.config.recompute.recompute_num_layers
            groups = sum(
                min(size, len(layers)) if self.config.recompute.recompute_method == "block" else -(-len(layers) // size)
                for layers in self.load.layers
            )
            self.add("tp", "all-gather", self.num_microbatches * groups * self.hidden)

    def _products(self, *, sublayers: int, forwards: int) -> None:
        """A column-parallel and a row-parallel product in each sublayer."""
        size = self.num_microbatches * sublayers * self.hidden
        if self.cuts_sequence:
            self.add("tp", "all-gather", (forwards + 2) * size)
            self.add("tp", "reduce-scatter", (forwards + 1) * size)
        else:
            self.add("tp", "all-reduce", (forwards + 1) * size)

    def _cores(self, spec: LayerSpec, forwards: int) -> None:
        layout, attention = self.config.layout, spec.attention
        if layout.cp == 1:
            return
        tokens = self.num_microbatches * self.tokens * attention.head_size // layout.tp
        if self.config.parallel.cp_comm_type == "p2p":
            block = 2 * tokens * attention.num_kv_heads
            size = (forwards + 1) * (layout.cp - 1) * block * self.width + layout.cp * block * 4
            self.add("cp", "send", size)
            self.add("cp", "receive", size)
        else:
            group, kv_heads = attention.num_heads // attention.num_kv_heads, attention.num_kv_heads // layout.tp
            copies = next(n for n in range(1, group + 1) if group % n == 0 and kv_heads * n % layout.cp == 0)
            heads = 2 * attention.num_heads + 2 * copies * attention.num_kv_heads
            self.add("cp", "all-to-all", (forwards + 1) * tokens * heads * self.width)

    def _experts(self, spec: ExpertsSpec, forwards: int) -> None:
        """Rows to the experts and back, a count of them, and what ranks with parts of the same experts share."""
        layout, etp, times = self.config.layout, self.sizes["etp"], self.num_microbatches
        own = self.tokens // layout.tp * etp
        rows = own * spec.num_chosen // spec.num_experts * spec.num_experts
        hidden = self.config.model.hidden_size * self.width
        if layout.tp > 1 and not self.cuts_sequence:  # each rank of tp takes a part of the tokens
            self.add("tp", "all-gather", times * (forwards + 1) * self.hidden)
        self.add("ep", "all-to-all", times * (2 * (forwards + 1) * rows * hidden + spec.num_experts * SCALAR))
        weights = own * spec.num_chosen * 4
        self.add("etp", "all-gather", times * forwards * (own * hidden + weights + own * spec.num_chosen * SCALAR))
        self.add("etp", "all-gather", times * own * hidden)
        self.add("etp", "reduce-scatter", times * (own * hidden * (forwards + 1) + weights))
        model = self.config.model
        if model.moe_router_load_balancing_type == "seq_aux_loss" and model.moe_aux_loss_coeff:
            counts = self.config.training.micro_batch_size * spec.num_experts * SCALAR
            for axis in ("tp", "cp"):
                self.add(axis, "all-reduce", times * forwards * counts)

    def ends(self) -> None:
        """Embedding, output layer and loss."""
        size = self.num_microbatches * self.hidden
        if self.load.is_first:
            if self.cuts_sequence:
                self.add("tp", "reduce-scatter", size)
                self.add("tp", "all-gather", size)
            else:
                self.add("tp", "all-reduce", size)
        if self.load.is_last:
            if self.cuts_sequence:
                self.add("tp", "all-gather", 2 * size)
                self.add("tp", "reduce-scatter", size)
            else:
                self.add("tp", "all-reduce", size)
            self.add("tp", "all-reduce", self.num_microbatches * self.tokens * (4 + 2 * 4))

    def transfers(self) -> None:
        """Activations and gradients from and to other stages."""
        parallel, layout = self.config.parallel, self.config.layout
        schedule, chunks = SCHEDULES[parallel.schedule], len(self.load.layers)
        found = routes(schedule.place(num_stages=layout.pp, num_chunks=chunks))
        size = self.num_microbatches * self.hidden // layout.tp
        for chunk in range(chunks):
            for kind in ("F", "B"):
                route = found[kind, StageChunk(self.stage, chunk)]
                if route.target is not None and route.target.stage != self.stage:
                    self.add(f"{kind} {'up' if route.target.stage > self.stage else 'down'}", "send", size)
                if route.source is not None and route.source.stage != self.stage:
                    self.add(f"{kind} {'up' if self.stage > route.source.stage else 'down'}", "receive", size)
                    if not self.cuts_sequence:
                        self.add("tp", "all-gather", size * layout.tp)

    def data_ranks(self) -> None:
        """Gradients and parameters over the ranks that share or copy them, and gradients that tp or stages share."""
        parallel, layout = self.config.parallel, self.config.layout
        held = self._held
        data = layout.dp * layout.cp
        copies = parallel.num_distributed_optimizer_instances if parallel.zero else data
        dense = held.without_experts.per_rank(layout.tp)
        # What is left of the stage around its layers is gathered for every chunk.
        costs = [spec.cost(self.config.model).parameters for spec in self.specs]
        rest = dense - sum(cost.without_experts.per_rank(layout.tp) for cost in costs)
        again = rest * (len(self.load.layers) - 1)
        self._domain(dense, copies=copies, shard=data // copies, again=again)
        shard = data // copies
        if held.experts:
            grid = self.sizes["ep"] * self.sizes["etp"]
            ranks = data * layout.tp // grid
            copies = parallel.num_distributed_optimizer_instances if parallel.zero else ranks
            self._domain(held.experts // grid, copies=copies, shard=ranks // copies)
        self.add("tp", "all-reduce", 4 * self._partial_over_tp // shard)
        model, ends = self.config.model, self.load.is_first != self.load.is_last
        if model.tied and ends and layout.pp > 1:
            self.add("embedding", "all-reduce", 4 * self._table // layout.tp // shard)

    def _domain(self, count: int, *, copies: int, shard: int, again: int = 0) -> None:
        zero, times = self.config.parallel.zero, self.num_microbatches
        gradient = count * (2 if self.config.parallel.grad_reduce_in_bf16 else 4)
        gathered = 2 * times * (count + again) if zero == 3 else count
        if shard > 1:
            self.add("shard", "reduce-scatter", gradient * (times if zero > 1 else 1))
            self.add("shard", "all-gather", gathered * self.width)
            self.add("shard", "all-reduce", SCALAR)  # of the gradient's norm
        if copies > 1:
            self.add("replicate", "all-reduce", gradient // shard)

    def numbers(self) -> None:
        """Scalars of the whole step: the count of tokens, the norm, and the sums of the objective and of routers."""
        model = self.config.model
        self.add("dp", "all-reduce", SCALAR)
        for axis in ("tp", "pp", "ep", "etp"):
            self.add(axis, "all-reduce", SCALAR)
        sums = 1
        if model.num_experts is not None:
            rows = model.num_experts + 1  # choices, and what is not finite
            losses = model.moe_aux_loss_coeff if model.moe_router_load_balancing_type != "none" else 0
            rows += bool(losses) + bool(model.moe_z_loss_coeff) + (model.moe_expert_capacity_factor is not None)
            sums += model.num_layers * rows
        if self.config.layout.world_size > 1:
            self.add("world", "all-reduce", SCALAR * sums)

    @cached_property
    def _table(self) -> int:
        model = self.config.model
        return model.padded_vocab_size(self.vocab_size, self.config.layout.tp) * model.hidden_size

    @cached_property
    def _held(self) -> Count:
        model = self.config.model
        return parameters_of_stage(
            model,
            self.specs,
            vocab_size=model.padded_vocab_size(self.vocab_size, self.config.layout.tp),
            seq_length=self.config.training.seq_length,
            is_first=self.load.is_first,
            is_last=self.load.is_last,
        )

    @cached_property
    def _partial_over_tp(self) -> int:
        """Elements whose gradient each rank of tp has a part of: what is whole, where ranks see parts of the tokens."""
        if self.cuts_sequence:
            return self._held.whole
        partial = 0
        for spec in self.specs:
            attention = spec.attention
            if attention.qk_norm and not attention.norm_across_heads:
                partial += 2 * attention.head_size * (2 if self.config.model.normalization == "LayerNorm" else 1)
            if isinstance(spec.mlp, ExpertsSpec):
                partial += self.config.model.hidden_size * spec.mlp.num_experts
        return partial
