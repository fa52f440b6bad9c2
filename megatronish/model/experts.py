"""Mixture of experts in the place of an MLP: router, experts, and shared experts that every token passes.

Tokens are routed where they are distinct. Under sequence parallelism every tp rank holds its own; without it the tp
ranks hold the same tokens, so each takes its part of them and the results are gathered. Routing is recorded in the
context of the forward: a second forward (recomputation) replays the choices, it never chooses again, and a step's
counts and losses are recorded once.

Shared experts need no rows of other ranks: they are computed while rows are on their way to the experts, and their
backward while the gradients of these rows are on their way back.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from megatronish.config.sections.model import ModelConfig
from megatronish.layers.deep_dispatch import DeepRoute
from megatronish.layers.dispatch import Capacity, ExpertRoute, kept_choices, make_route
from megatronish.layers.experts import Experts
from megatronish.layers.recompute import HasParts, recompute_module
from megatronish.layers.router import (
    Router,
    RouterSettings,
    Routing,
    attach_loss,
    choices_of_sequences,
    global_loss,
    sequence_loss,
    z_loss,
)
from megatronish.model.context import Context
from megatronish.model.mlp import MLP, activated
from megatronish.model.routing import RecordedRouting, Tally
from megatronish.parallel import comm
from megatronish.parallel.mesh import TensorParallel
from megatronish.parallel.sharding import Init, Sharding
from megatronish.specs.layers import ExpertsSpec


class SharedGate(nn.Module):
    """Gate of the shared experts: their output times sigmoid(x w), one number a token (Qwen2-MoE)."""

    def __init__(self, hidden_size: int, *, tp: TensorParallel, init_std: float) -> None:
        super().__init__()
        self.hidden_size, self.tp, self.init_std = hidden_size, tp, init_std
        self.weight = nn.Parameter(torch.empty(1, hidden_size))

    def shardings(self) -> dict[str, Sharding]:
        """Whole on every rank; under sequence parallelism each sees a part of the tokens."""
        shape = (1, self.hidden_size)
        return {"weight": Sharding(shape, partial_over=self.tp.partial_over, role="router", init=Init(self.init_std))}

    def forward(self, x: Tensor) -> Tensor:
        """[S, B, D] -> [S, B, 1]."""
        return (x @ self.weight.t()).sigmoid()


def router_settings(config: ModelConfig, spec: ExpertsSpec) -> RouterSettings:
    """How the router of a layer scores and chooses, as the options of the config say."""
    return RouterSettings(
        spec.num_experts,
        spec.num_chosen,
        score_function=config.moe_router_score_function,
        before_choice=config.moe_router_pre_softmax,
        normalised=config.moe_router_norm_topk_prob,
        num_groups=config.moe_router_num_groups,
        group_topk=config.moe_router_group_topk,
        scores_per_group=config.scores_per_group,
        scaling_factor=config.moe_router_topk_scaling_factor or 1.0,
        has_bias=config.moe_router_enable_expert_bias,
        logit_bias=spec.expert.bias,
        rival_epsilon=config.moe_sparsemixer_eps,
        bias_rate=config.moe_router_bias_update_rate,
        counts_before="global_aux_loss" in config.moe_router_load_balancing_type,
    )


class MixtureOfExperts(HasParts):
    """Router, experts and shared experts of one layer, [S, B, D] -> [S, B, D] (sequence parallel: [S/tp, B, D])."""

    def __init__(
        self, config: ModelConfig, spec: ExpertsSpec, *, layer: int, tp: TensorParallel, output_std: float
    ) -> None:
        super().__init__()
        self.spec, self.layer, self.tp, std = spec, layer, tp, config.hidden_std
        self.capacity_factor = config.moe_expert_capacity_factor
        self.jitter, self.is_forced = config.moe_input_jitter_eps, config.moe_router_force_load_balancing
        self.router = Router(config.hidden_size, router_settings(config, spec), init_std=std)
        self.experts = Experts(
            spec.num_experts,
            config.hidden_size,
            spec.expert.ffn_size,
            sections=tuple(spec.expert.sections),
            activate=partial(activated, bias=None, spec=spec.expert),
            parallel=tp.experts,
            init_std=std,
            output_std=output_std,
            bias=spec.expert.bias,
        )
        self.shared = None if spec.shared is None else MLP(config, spec.shared, tp=tp, output_std=output_std)
        self.shared_gate = SharedGate(config.hidden_size, tp=tp, init_std=std) if spec.shared_gate else None

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """[S, B, D] -> [S, B, D]: the chosen experts of each token, weighted, plus the shared experts."""
        # A node of its own, in which the gradients of router, experts and shared experts meet before that of any other
        # reader of x (a residual connection without a norm): the same order of sums as where all this is recomputed.
        x = x.view_as(x)
        # 1. This tp rank's own tokens, [s, B, D].
        splits = not self.tp.cuts_sequence and x.shape[0] % self.tp.size == 0
        assert splits or self.tp.cuts_sequence or not torch.is_grad_enabled(), "tp must divide the sequence"
        own = comm.split_sequence(x, self.tp.axis) if splits else x
        tokens = own.flatten(0, 1)

        # 2. Choices: new ones, or those of the first forward where this is a recomputation.
        recorded, parallel = context.routing.routings.get(self.layer), self.tp.experts
        routing = self.routing(own, context, None if recorded is None else recorded.choices.long())
        kept = self.kept(routing, context) if recorded is None else recorded.kept
        choices = routing.choices if kept is None else routing.choices.masked_fill(~kept, self.spec.num_experts)
        choices = comm.start_all_gather(choices, parallel.etp).wait()
        route = self.route(choices, recorded, context, num_sequences=x.shape[1], drops=kept is not None)

        # 3. Balancing losses: their gradients start here, in the forward that has a graph.
        weights = routing.weights
        if context.routing.tally is not None:
            weights = self.balanced(routing, context.routing.tally, num_sequences=x.shape[1], is_first=recorded is None)
            if kept is not None and recorded is None:
                context.routing.tally.add("dropped_choices", self.layer, (~kept).sum())
            if route.lost is not None and recorded is None:
                context.routing.tally.add("rows_without_room", self.layer, route.lost)
        if kept is not None:
            weights = weights * kept  # after normalising: what is dropped is lost, and not given to others

        # 4. The experts, and the shared experts as a dense MLP: while rows travel to other ranks, where they do.
        shared: list[Tensor] = []
        compute_shared = partial(self._add_shared, shared, x, context)
        hides = self.shared is not None and parallel.ep.size > 1
        y = self._through_experts(tokens, weights, route, compute_shared if hides else None).view_as(own)
        if recorded is None:
            context.routing.routings[self.layer] = RecordedRouting(routing.choices.to(torch.int16), kept, route.sizes)
        if splits:
            y = comm.gather_whole_sequence(y, self.tp.axis, sums=False)
        if self.shared is not None:
            if not hides:
                compute_shared()
            y = y + shared.pop()
        return y

    def route(
        self, choices: Tensor, recorded: RecordedRouting | None, context: Context, *, num_sequences: int, drops: bool
    ) -> ExpertRoute:
        """Route of choices [T, K] of tokens that are routed together, as it was `recorded` in a recomputation."""
        parallel, num_experts = self.tp.experts, self.spec.num_experts
        sizes = None if recorded is None else recorded.sizes
        if parallel.exchange is not None:
            return DeepRoute(parallel.exchange, choices, num_experts=num_experts, drops=drops, sent=sizes)
        room = self.room(len(choices), num_sequences, context)
        return make_route(choices, num_experts=num_experts, ep=parallel.ep, drops=drops, room=room, sizes=sizes)

    def _through_experts(
        self, tokens: Tensor, weights: Tensor, route: ExpertRoute, meanwhile: Callable[[], None] | None
    ) -> Tensor:
        """[T, D] -> [T, D]: the chosen experts of each token, weighted."""
        restores = "moe_act" in self.recomputed
        if self.spec.weighs_input:  # of one expert a token
            return self.experts(tokens * weights.to(tokens.dtype), None, route, restores=restores, meanwhile=meanwhile)
        return self.experts(tokens, weights, route, restores=restores, meanwhile=meanwhile)

    def _add_shared(self, outputs: list[Tensor], x: Tensor, context: Context) -> None:
        """Put what the shared experts make of every token, [S, B, D], into `outputs`."""
        assert self.shared is not None
        again = "shared_experts" in self.recomputed
        y = recompute_module(self.shared, x, context) if again else self.shared(x, context)
        outputs.append(y if self.shared_gate is None else self.shared_gate(x) * y)

    def own_positions(self, context: Context) -> Tensor:
        """[s], the positions along the whole sequence of the tokens that this rank routes."""
        return context.positions if self.tp.cuts_sequence else comm.piece_of(context.positions, self.tp.axis)

    def routing(self, own: Tensor, context: Context, chosen: Tensor | None) -> Routing:
        """Routing of this rank's own tokens [s, B, D]; `chosen` [T, K] replays choices.

        What is random in training (the jitter of the input, forced choices) is a function of the step, the layer and
        the token.
        """
        if context.dropout is not None and (self.jitter or self.is_forced):
            draw = partial(context.dropout.of_router, positions=self.own_positions(context))
            if self.jitter:
                own = own.float() * (1 + self.jitter * draw(site="jitter", num_columns=own.shape[-1]))
            if self.is_forced and chosen is None:
                order = draw(site="forced choice", num_columns=self.spec.num_experts)
                chosen = order.flatten(0, 1).topk(self.spec.num_chosen, dim=-1).indices
        return self.router(own.flatten(0, 1), chosen)

    def kept(self, routing: Routing, context: Context) -> Tensor | None:
        """bool [T, K], whether each choice is within the capacity of its expert; None without a limit.

        There is none in generation: a text's end is not known, and what came before is not in the forward.
        """
        if self.capacity_factor is None or context.cache is not None:
            return None
        positions, capacity = self.own_positions(context), self.capacity(context)
        choices = routing.choices.unflatten(0, (len(positions), -1))
        return kept_choices(choices, positions, capacity, num_experts=self.spec.num_experts).flatten(0, 1)

    def capacity(self, context: Context) -> Capacity:
        """How many choices of a sequence an expert takes."""
        assert self.capacity_factor is not None
        return Capacity.of(
            self.capacity_factor,
            num_chosen=self.spec.num_chosen,
            num_experts=self.spec.num_experts,
            seq_length=context.causal_mask.seq_length,
            cp=context.routing.cp,
            tp=self.tp.axis,
        )

    def room(self, num_tokens: int, num_sequences: int, context: Context) -> int | None:
        """Rows that this rank sends each other one, of tokens that are routed together; None: as many as there are.

        In training alone, whose steps tell if there was room for all.
        """
        tally, parallel, of_expert = context.routing.tally, self.tp.experts, None
        if tally is None or not tally.balance.pads:
            return None
        if self.capacity_factor is not None:  # of each sequence at most all tokens that are here
            limit = self.capacity(context).limit
            of_expert = num_sequences * min(limit, num_tokens // num_sequences)
        return parallel.room.rows(
            num_tokens,
            num_chosen=self.spec.num_chosen,
            num_experts=self.spec.num_experts,
            ep=parallel.ep.size,
            capacity=of_expert,
        )

    def balanced(self, routing: Routing, tally: Tally, *, num_sequences: int, is_first: bool) -> Tensor:
        """The weights [T, K], to which the balancing losses are attached; the first forward counts them."""
        balance, weights = tally.balance, routing.weights
        counts = choices_of_sequences(routing, num_sequences)
        if is_first:
            tally.add("tokens_per_expert", self.layer, counts.sum(0))
            tally.add("tokens_not_finite", self.layer, (~routing.logits.isfinite()).any(-1).sum())
        losses: dict[str, tuple[Tensor, float]] = {}
        if balance.sequence_coefficient:
            for axis in tally.axes:
                counts = comm.all_reduce(counts, axis)
            loss = sequence_loss(routing, counts, seq_length=balance.seq_length)
            losses["load_balancing_loss"] = loss, balance.sequence_coefficient
        if balance.global_coefficient:
            loss = global_loss(routing, self.router.on_device("load", weights.device), seq_length=balance.seq_length)
            losses["global_load_balancing_loss"] = loss, balance.global_coefficient
        if balance.z_coefficient:
            losses["router_z_loss"] = z_loss(routing) / balance.seq_length, balance.z_coefficient
        for name, (loss, coefficient) in losses.items():
            weights = attach_loss(weights, loss, gradient=balance.gradient * coefficient)
            if is_first:
                tally.add(name, self.layer, loss)
        return weights
