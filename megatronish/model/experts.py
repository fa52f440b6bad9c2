"""Mixture of experts in the place of an MLP: router, experts, and shared experts that every token passes.

Tokens are routed where they are distinct. Under sequence parallelism every tp rank holds its own; without it the tp
ranks hold the same tokens, so each takes its part of them and the results are gathered. Routing is recorded in the
context of the forward: a second forward (recomputation) replays the choices, it never chooses again, and a step's
counts and losses are recorded once.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatronish import comm
from megatronish.config.model import ModelConfig
from megatronish.layer_specs import ExpertsSpec
from megatronish.layers.dispatch import make_route
from megatronish.layers.experts import Experts
from megatronish.layers.router import Router, attach_loss, sequence_loss, z_loss
from megatronish.mesh import TensorParallel
from megatronish.model.context import Context
from megatronish.model.mlp import MLP
from megatronish.sharding import Init, Sharding


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


class MixtureOfExperts(nn.Module):
    """Router, experts and shared experts of one layer, [S, B, D] -> [S, B, D] (sequence parallel: [S/tp, B, D])."""

    def __init__(
        self, config: ModelConfig, spec: ExpertsSpec, *, layer: int, tp: TensorParallel, output_std: float
    ) -> None:
        super().__init__()
        self.spec, self.layer, self.tp, std = spec, layer, tp, config.init_method_std
        self.router = Router(config.hidden_size, spec.router, init_std=std)
        self.experts = Experts(
            spec.router.num_experts,
            config.hidden_size,
            spec.ffn_size,
            activation=spec.activation,
            parallel=tp.experts,
            init_std=std,
            output_std=output_std,
        )
        self.shared = None if spec.shared is None else MLP(config, spec.shared, tp=tp, output_std=output_std)
        self.shared_gate = SharedGate(config.hidden_size, tp=tp, init_std=std) if spec.shared_gate else None

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """[S, B, D] -> [S, B, D]: the chosen experts of each token, weighted, plus the shared experts."""
        # 1. This tp rank's own tokens, [s, B, D].
        splits = not self.tp.cuts_sequence and x.shape[0] % self.tp.size == 0
        assert splits or self.tp.cuts_sequence or not torch.is_grad_enabled(), "tp must divide the sequence"
        own = comm.split_sequence(x, self.tp.axis) if splits else x
        tokens = own.flatten(0, 1)

        # 2. Choices: new ones, or those of the first forward where this is a recomputation.
        recorded = context.routings.get(self.layer)
        routing = self.router(tokens, None if recorded is None else recorded.choices.long())
        parallel, num_experts = self.tp.experts, self.spec.router.num_experts
        choices = comm.start_all_gather(routing.choices, parallel.etp).wait()
        sizes = None if recorded is None else recorded.sizes
        route = make_route(choices, num_experts=num_experts, ep=parallel.ep, sizes=sizes)
        if recorded is None:
            context.record(self.layer, routing, route)

        # 3. Balancing losses: their gradients start here, in the forward that has a graph.
        weights = routing.weights
        if context.balance is not None:
            balance = context.balance
            if balance.sequence_coefficient:
                loss = sequence_loss(
                    routing,
                    num_sequences=x.shape[1],
                    num_chosen=self.spec.router.num_chosen,
                    seq_length=balance.seq_length,
                    over=context.sequence_axes,
                )
                gradient = balance.gradient * balance.sequence_coefficient
                weights = attach_loss(weights, loss, gradient=gradient)
                context.add("load_balancing_loss", self.layer, loss, is_first=recorded is None)
            if balance.z_coefficient:
                loss = z_loss(routing)
                gradient = balance.gradient * balance.z_coefficient / balance.seq_length
                weights = attach_loss(weights, loss, gradient=gradient)
                context.add("z_loss", self.layer, loss, is_first=recorded is None)

        # 4. The experts, and the shared experts as a dense MLP beside them.
        y = self.experts(tokens, weights, route).view_as(own)
        if splits:
            y = comm.gather_whole_sequence(y, self.tp.axis, sums=False)
        if self.shared is not None:
            shared = self.shared(x)
            y = y + (shared if self.shared_gate is None else self.shared_gate(x) * shared)
        return y
