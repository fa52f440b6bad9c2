"""Bytes that a rank exchanges in a step, by axis and collective, from the config alone.

Bytes of a call are those of its largest tensor: the tensor of an all-reduce, the whole of an all-gather or a
reduce-scatter, all that a rank sends in an all-to-all, a message. With H = S B D / cp elements of hidden states:

    tp         layers: 4 all-reduces of H, two forward and two backward (Shoeybi et al. 2019); with sequence parallelism
               6 all-gathers and 4 reduce-scatters of H (Korthikanti et al. 2022, with inputs gathered again);
               with tp_comm_overlap 4 of these and 2 of those are tp - 1 messages of H / tp
    cp         a ring: keys and values cp - 1 times forward and backward, their gradients in fp32 cp times; all-to-all:
               queries, keys and values, and the output, forward and backward
    tp         keys and values of a head that several ranks share: an all-to-all forward and backward
    F, B       activations and their gradients between stages, H / tp each
    shard      ZeRO-1: gradients reduce-scattered and parameters gathered once a step; ZeRO-2: gradients once a
               micro-batch; ZeRO-3: parameters gathered twice a micro-batch, too; with hpZ once a step
    secondary  hpZ: parameters gathered twice a micro-batch, less that once
               qgZ: an all-to-all of codes in the place of each reduce-scatter of matrices
    islands    DiLoCo: moves, in an outer step alone (outer_traffic.py)
    ep, etp    rows of tokens to their experts and back, where the load is even
    cp, world  QK-clip: keys of the whole sequence gathered in each forward; largest logits of all heads once a step

What is computed again exchanges again what its forward did (`LayerTraffic`). Padding of buckets and rows is counted
(state_traffic.py). Left out are evaluation, and what hooks of a run send.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatronish.config.config import Config
from megatronish.config.sections.training import RecomputeModule
from megatronish.core.names import OBJECTIVE_NAMES
from megatronish.estimate.costs.outer_traffic import outer_traffic
from megatronish.estimate.costs.state_traffic import StateTraffic
from megatronish.estimate.costs.step_traffic import SCALAR, StepTraffic, TrafficKey
from megatronish.parallel.schedules.live_activations import StageLoad
from megatronish.parallel.schedules.plan import StageChunk, routes
from megatronish.parallel.schedules.table import SCHEDULES
from megatronish.specs.adapter_targets import all_patterns, is_target
from megatronish.specs.attention import AttentionSpec
from megatronish.specs.costs import LinearShape
from megatronish.specs.layers import layer_specs


@dataclass
class LayerTraffic(StepTraffic):
    """Traffic of forwards and backwards; `learns_before` says of the layer at work whether something before it does."""

    learns_before: bool = True

    @cached_property
    def recomputed(self) -> frozenset[RecomputeModule]:
        """Parts of layers that are computed again."""
        return self.config.recompute.recomputed

    @cached_property
    def of_ring(self) -> frozenset[str]:
        """Linear layers that ranks of a ring apply to what they receive."""
        return frozenset({"attention.kv_up"} if self.config.sends_latents else ())

    @cached_property
    def groups(self) -> list[tuple[Sequence[int], bool]]:
        """Layers of the stage in groups that are computed again together, or not at all."""
        recompute, number = self.config.recompute, self.config.model.num_layers
        chunks = (
            ([n for n in layers if n < number], [n for n in layers if n >= number]) for layers in self.load.layers
        )
        return [group for own, ahead in chunks for group in recompute.groups(own, ahead)]

    def layers(self) -> None:
        """Tensor, context and expert parallelism inside of layers."""
        self.learns_before = not (self.freezes and self.load.is_first)
        specs = layer_specs(self.config.model)
        for layer, again in ((layer, again) for layers, again in self.groups for layer in layers):
            spec, forwards, name = specs[layer], 1 + again, f"layers.{layer}"
            # What is computed again begins with a copy of its input that has a gradient.
            self.learns_before |= forwards > 1
            for attention in spec.attentions:
                self._attention(name, attention, forwards)
            linears = spec.cost(self.config.model).linears
            parts = {linear.name for linear in linears if spec.computes_again(linear.name, self.recomputed)}
            parts -= self.of_ring
            for experts in [linear for linear in linears if linear.copies > 1 and linear.cut == "column"]:
                self._experts(experts, forwards + (experts.name in parts))
            # Column-parallel products, ways down to latents before them, and the row-parallel ones behind them.
            dense = [linear for linear in linears if linear.copies == 1 and (linear.cut != "none" or linear.sections)]
            before: list[LinearShape] = []
            for linear in dense:
                before.append(linear)
                if linear.cut == "row":
                    self._products(name, before[:-1], linear, forwards, parts)
                    before = []
        if self.config.recompute.distribute_saved_activations:  # a layer of multi-token prediction has two inputs
            own = range(self.config.model.num_layers)
            inputs = sum(1 if layers[0] in own else 2 for layers, again in self.groups if again)
            self.add("tp", "all-gather", self.num_microbatches * inputs * self.hidden)

    def _products(
        self, name: str, columns: Sequence[LinearShape], row: LinearShape, forwards: int, again: Collection[str]
    ) -> None:
        """Column-parallel products and the row-parallel one behind them, and their adapters.

        A way down to a latent sends nothing; the column-parallel product after it has the latent as its input. Those
        whose names are in `again` run forward once more.
        """
        of_row = forwards + (row.name in again)
        if row.name in again and any(self._num_adapted(name, linear) for linear in (*columns, row)):
            self.learns_before = True  # a copy of the input, which has a gradient
        times, learned, gathered, gathered_again, low_again = self.num_microbatches, 0, 0, 0, 0
        element, learns_inside, has_adapter = times * self.tokens * self.element, self.learns_before, False
        adapted = [0, self._num_adapted(name, row)]
        for linear in columns:
            number = self._num_adapted(name, linear)
            learns_inside |= number > 0
            if linear.cut == "none":
                has_adapter = number > 0
                continue
            size = int(element * linear.in_features * linear.share)
            of_column = forwards + (linear.name in again)
            # Forward, and for the weight gradient, where the input was not gathered for good.
            gathered += of_column * size
            gathered_again += (not self.freezes and linear.name not in self.of_ring) * size
            adapted[0], low_again = adapted[0] + number, low_again + of_column * number
            learned += size if self.learns_before or has_adapter else 0
            has_adapter = False
        last = int(element * row.out_features * row.share)
        if self.cuts_sequence:
            # A forward's gathers and reductions, and the backward of the latter; the gather for the weight's gradient.
            self._round(gathered + learns_inside * last, "all-gather")
            self._round(of_row * last, "reduce-scatter")
            self.add("tp", "all-gather", gathered_again)
            self.add("tp", "reduce-scatter", learned)
        else:
            self.add("tp", "all-reduce", of_row * last + learned)
        self.learns_before = learns_inside or adapted[1] > 0
        if self.config.adapter.adapter_type == "lora":
            low = times * self.tokens * self.config.adapter.lora_rank * self.element
            if self.cuts_sequence:
                self.add("tp", "all-gather", low * (low_again + adapted[1]))
                self.add("tp", "reduce-scatter", low * (adapted[0] + of_row * adapted[1]))
            else:
                self.add("tp", "all-reduce", low * (adapted[0] + of_row * adapted[1]))

    def _round(self, size: int, collective: str) -> None:
        """What goes to all tp ranks, or from them: in one collective, or in pieces that go round."""
        if not self.config.multiplies_by_pieces:
            self.add("tp", collective, size)
            return
        for name in ("send", "receive"):
            self.add("tp", name, size * (self.ranks["tp"] - 1) // self.ranks["tp"])

    def _num_adapted(self, name: str, linear: LinearShape) -> int:
        """Sections of a linear layer of the layer of this name that have an adapter."""
        return sum(self._is_adapted(f"{name}.{linear.name}.{section}") for section, _ in linear.sections)

    def _is_adapted(self, section: str) -> bool:
        return self.freezes and is_target(section, all_patterns(self.config.adapter))

    def _attention(self, name: str, attention: AttentionSpec, forwards: int) -> None:
        layout = self.config.layout
        sizes: dict[str, int] = {"width": self.element, "tp": layout.tp, "cp": layout.cp}
        exchanges = attention.exchanges(
            self.tokens,
            **sizes,
            is_ring=self.config.parallel.cp_comm_type == "p2p",
            cuts_sequence=self.cuts_sequence,
            sends_latents=self.config.sends_latents,
        )
        for exchange in exchanges:
            again = exchange.in_core and "core_attn" in self.recomputed
            learns = not exchange.sections or self.learns_before or not self.freezes
            learns = learns or any(self._is_adapted(f"{name}.{section}") for section in exchange.sections)
            learns = learns and not (exchange.of_weights and self.freezes)
            size = (forwards + again) * exchange.forward + learns * exchange.backward
            self.add(exchange.axis, exchange.collective, self.num_microbatches * size)

        if self.config.measures_logits and layout.cp > 1:  # keys of the whole sequence
            keys = attention.heads_over(layout.tp) // layout.tp * attention.head_size * self.element
            self.add("cp", "all-gather", self.num_microbatches * forwards * layout.cp * self.tokens * keys)

    def _experts(self, experts: LinearShape, forwards: int) -> None:
        """Rows to the experts and back, a count of them, and what ranks with parts of the same experts share."""
        model, layout = self.config.model, self.config.layout
        etp, times = self.ranks["etp"], self.num_microbatches
        own = self.tokens // layout.tp * etp
        even, room = self.config.rows_of_experts
        rows = even // experts.copies * experts.copies if even == room else room
        hidden = model.hidden_size * self.element
        if layout.tp > 1 and not self.cuts_sequence:  # each rank of tp takes a part of the tokens
            self.add("tp", "all-gather", times * (forwards + 1) * self.hidden)
        self.add("ep", "all-to-all", times * (2 * (forwards + 1) * rows * hidden + experts.copies * SCALAR))
        weights = 0 if model.moe_apply_probs_on_input else own * experts.used * 4
        self.add("etp", "all-gather", times * forwards * (own * hidden + weights + own * experts.used * SCALAR))
        self.add("etp", "all-gather", times * own * hidden)
        self.add("etp", "reduce-scatter", times * (own * hidden * (forwards + 1) + weights))
        if model.moe_expert_capacity_factor is not None:
            self._capacity(experts.copies)
        if model.moe_router_load_balancing_type == "seq_aux_loss" and model.moe_aux_loss_coeff:
            counts = self.config.training.micro_batch_size * experts.copies * SCALAR
            for axis in ("tp", "cp"):
                self.add(axis, "all-reduce", times * forwards * counts)

    def _capacity(self, num_experts: int) -> None:
        """Choices of each expert, int32, in the blocks of a sequence, and where the blocks begin: of first forwards."""
        layout, parts = self.config.layout, 1
        blocks = 2 if layout.cp > 1 and layout.tp % 2 else 1
        block = 4 * self.config.training.micro_batch_size * num_experts + SCALAR
        for axis, ranks in (("tp", layout.tp), ("cp", layout.cp)):
            parts *= ranks
            self.add(axis, "all-gather", self.num_microbatches * blocks * parts * block)

    def ends(self) -> None:
        """Embedding, output layer and loss."""
        size, learns = self.num_microbatches * self.hidden, not self.freezes
        if self.load.is_first:
            if self.cuts_sequence:
                self.add("tp", "reduce-scatter", size)
                self.add("tp", "all-gather", learns * size)
            else:
                self.add("tp", "all-reduce", size)
        if self.load.is_last:
            predicting, depths = 1 - self.config.model.encoder_share, self.config.model.num_depths
            size, tokens = int(size * predicting), int(self.tokens * predicting)
            # Each depth of multi-token prediction embeds, and uses the output layer and the loss once more.
            if self.cuts_sequence:
                self._round((1 + depths) * size, "all-gather")
                self.add("tp", "all-gather", (1 + depths) * learns * size + depths * learns * size)
                self.add("tp", "reduce-scatter", (1 + 2 * depths) * size)
            else:
                self.add("tp", "all-reduce", (1 + 2 * depths) * size)
            self.add("tp", "all-reduce", (1 + depths) * self.num_microbatches * tokens * (4 + 2 * 4))


def expected_traffic(
    config: Config, load: StageLoad, stage: int, *, vocab_size: int, shard_ranks: Mapping[str, int] | None = None
) -> dict[TrafficKey, int]:
    """Bytes of one step on a rank of this stage, whose layers `load` has.

    `shard_ranks` are its places among the ranks that shard each domain; by default it is the first.
    """
    layers = LayerTraffic(config, vocab_size, load, stage)
    layers.layers()
    layers.ends()
    state = StateTraffic(config, vocab_size, load, stage, shard_ranks=shard_ranks or {})
    state.state()
    others = StepTraffic(config, vocab_size, load, stage)
    _transfers(others)
    _numbers(others)
    sent = layers.sent + state.sent + others.sent
    if config.parallel.outer_interval == 1:  # else few steps have an outer one
        sent += Counter(outer_traffic(config, load, stage, vocab_size=vocab_size, shard_ranks=shard_ranks))
    return {key: size for key, size in sent.items() if size}


def by_axis(sent: Mapping[TrafficKey, int]) -> dict[str, dict[str, int]]:
    """{axis: {collective: bytes}}, in the order of names."""
    bytes_by_axis: dict[str, dict[str, int]] = {}
    for (axis, collective), size in sorted(sent.items()):
        if size:
            bytes_by_axis.setdefault(axis, {})[collective] = size
    return bytes_by_axis


def why_no_traffic(config: Config) -> str | None:
    """Reason why the formulas do not cover a run; None if they do."""
    if OBJECTIVE_NAMES[config.training.objective].learns_from != "text":
        return "completions differ in length, and a second model may run"
    if config.model.block != "transformer":
        return f"layers of block={config.model.block} send what its plug-in says"
    if config.adapter.quantize_base is not None and config.parallel.zero == 3:
        return "ZeRO-3 gathers quantised weights as they are stored"
    return None


def _transfers(traffic: StepTraffic) -> None:
    """Activations and gradients from and to other stages."""
    parallel, layout = traffic.config.parallel, traffic.config.layout
    schedule, chunks = SCHEDULES[parallel.schedule], len(traffic.load.layers)
    route_by_place = routes(schedule.place(num_stages=layout.pp, num_chunks=chunks))
    size = traffic.num_microbatches * traffic.hidden // layout.tp
    for chunk in range(chunks):
        for kind in ("F", "B"):
            route = route_by_place[kind, StageChunk(traffic.stage, chunk)]
            if route.target is not None and route.target.stage != traffic.stage:
                traffic.add(f"{kind} {'up' if route.target.stage > traffic.stage else 'down'}", "send", size)
            if route.source is not None and route.source.stage != traffic.stage:
                traffic.add(f"{kind} {'up' if traffic.stage > route.source.stage else 'down'}", "receive", size)
                if not traffic.cuts_sequence:
                    traffic.add("tp", "all-gather", size * layout.tp)


def _numbers(traffic: StepTraffic) -> None:
    """Scalars of the whole step: the count of tokens, the norm, and the sums of the objective and of routers."""
    model = traffic.config.model
    traffic.add("dp", "all-reduce", SCALAR)
    for axis in ("tp", "pp", "ep", "etp"):
        traffic.add(axis, "all-reduce", SCALAR)
    sums = 1
    if model.has_binary_head:  # masked tokens and pairs of the step; each loss is reported; those of rows, by one rank
        sums += 2
        traffic.add("dp", "all-reduce", 2 * SCALAR)
        if traffic.cuts_sequence and traffic.load.is_last:
            rows = traffic.config.training.micro_batch_size
            traffic.add("tp", "all-reduce", traffic.num_microbatches * rows * 4)
    if depths := model.num_depths:  # predictions of the step, of the model and of each depth; loss and number of each
        sums += 2 * depths
        traffic.add("dp", "all-reduce", (1 + depths) * SCALAR)
    if traffic.has_experts:
        assert model.num_experts is not None
        rows = model.num_experts + 1  # choices, and what is not finite
        losses = model.moe_aux_loss_coeff if model.moe_router_load_balancing_type != "none" else 0
        rows += bool(losses) + bool(model.moe_z_loss_coeff) + (model.moe_expert_capacity_factor is not None)
        rows += traffic.config.parallel.has_rooms  # what found no room
        sums += model.num_all_layers * rows
    if traffic.config.parallel.num_islands > 1:
        sums += 2  # weight and norm of each island
    if traffic.config.measures_logits:  # of all heads in each island, fp32
        heads = model.num_all_layers * model.num_attention_heads
        traffic.add("world", "all-reduce", 4 * traffic.config.parallel.num_islands * heads)
    if traffic.config.layout.world_size > 1:
        traffic.add("world", "all-reduce", SCALAR * sums)
