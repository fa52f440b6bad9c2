"""Balancing of experts over a step: the factors of its losses, the sums that ranks add up, the state that they move."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatronish.config.sections.model import ModelConfig
from megatronish.layers.router import Balance
from megatronish.model.gpt import GPT
from megatronish.parallel import comm
from megatronish.parallel.mesh import Mesh
from megatronish.specs.layers import layer_specs

TOKENS, DROPPED, NOT_FINITE = "tokens_per_expert", "dropped_choices", "tokens_not_finite"
WITHOUT_ROOM = "rows_without_room"


class ExpertLoad(NamedTuple):
    """Choices of each expert in a step, int64 [num_layers, E]; rows of dense layers are zero."""

    tokens: Tensor
    layers: tuple[int, ...]

    @property
    def rows(self) -> Tensor:
        """int64 [layers with experts, E]."""
        return self.tokens[list(self.layers)]

    @property
    def largest_of_layers(self) -> list[float]:
        """Largest load of an expert over the mean of its layer, for each layer with experts."""
        rows = self.rows.double()
        return (rows.amax(1) / rows.mean(1).clamp(min=1e-9)).tolist()

    @property
    def idle_of_layers(self) -> list[int]:
        """Experts without a token, for each layer with experts."""
        return (self.rows == 0).sum(1).tolist()

    @property
    def largest(self) -> float:
        """Largest load over the mean, of the layer where it is largest."""
        return max(self.largest_of_layers)

    @property
    def num_idle(self) -> int:
        """Experts without a token, over all layers."""
        return sum(self.idle_of_layers)

    def by_layer(self) -> dict[str, list[int]]:
        """{layer: choices of each expert}, as JSON has it."""
        return {str(layer): row for layer, row in zip(self.layers, self.rows.tolist(), strict=True)}


@dataclass
class Balancing:
    """Balancing of the experts of a model, of which this rank holds some layers; of a dense model it does nothing."""

    model: GPT

    def __post_init__(self) -> None:
        config = self.config
        specs = enumerate(layer_specs(config))
        self.layers = tuple(number for number, spec in specs if spec.mlp.num_experts)
        self._without_room = 0.0
        self.losses: dict[str, float] = {}
        if self.layers:
            kind, coefficient = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
            self.losses = {
                "load_balancing_loss": coefficient if kind == "seq_aux_loss" else 0.0,
                "global_load_balancing_loss": coefficient if kind == "global_aux_loss" else 0.0,
                "router_z_loss": config.moe_z_loss_coeff,
            }
        self.losses = {name: value for name, value in self.losses.items() if value}

    @property
    def config(self) -> ModelConfig:
        """Options of the model."""
        return self.model.config

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the sums of a step by name, the same on every rank, whatever layers it holds."""
        if not self.layers:
            return {}
        num_layers, num_experts = self.config.num_all_layers, self.config.num_experts
        assert num_experts is not None
        dropped = [] if self.config.moe_expert_capacity_factor is None else [DROPPED]
        padded = [WITHOUT_ROOM] if self.has_rooms else []
        names = (*self.losses, *dropped, *padded, NOT_FINITE)
        return {TOKENS: (num_layers, num_experts), **dict.fromkeys(names, (num_layers,))}

    @property
    def has_rooms(self) -> bool:
        """Whether ranks send each other as many rows as there is room for."""
        room, ep = self.model.tp.experts.room, self.model.tp.experts.ep.size
        return ep > 1 and (room.factor is not None or room.to_capacity)

    def lacked_room(self, sums: Mapping[str, Tensor]) -> bool:
        """Whether rows of a step found no room, and were left out of its sums and gradients: `metrics` tell of it."""
        if WITHOUT_ROOM not in sums or not len(sums[WITHOUT_ROOM].nonzero()):
            return False
        self._without_room = float(sums[WITHOUT_ROOM].sum())
        return True

    @contextmanager
    def of_step(self, num_sequences: int, *, seq_length: int, loss_scale: float, pads: bool = True) -> Iterator[None]:
        """Let the model balance its experts meanwhile, in a step of so many sequences over all data ranks.

        It `pads` rows where there are rooms for them.
        """
        losses = self.losses
        if self.layers:
            self.model.balance = Balance(
                loss_scale / num_sequences,
                seq_length,
                losses.get("load_balancing_loss", 0.0),
                losses.get("global_load_balancing_loss", 0.0),
                losses.get("router_z_loss", 0.0),
                pads=pads,
            )
        try:
            yield
        finally:
            self.model.balance = None

    def metrics(self, sums: Mapping[str, Tensor], *, num_sequences: int) -> dict[str, float]:
        """Means of the losses over sequences and layers, without their coefficients, and how uneven the load is."""
        if not self.layers:
            return {}
        metrics = {name: float(sums[name].sum()) / num_sequences / len(self.layers) for name in self.losses}
        load = self.load(sums)
        assert load is not None
        if DROPPED in sums:
            metrics["dropped_share"] = float(sums[DROPPED].sum() / sums[TOKENS].sum())
        if self._without_room:
            metrics[WITHOUT_ROOM], self._without_room = self._without_room, 0.0
        return metrics | {"largest_expert_load": load.largest, "num_idle_experts": float(load.num_idle)}

    def not_finite(self, own: Mapping[str, Tensor], sums: Mapping[str, Tensor], mesh: Mesh) -> str | None:
        """Where a router first had logits that are not finite: its layer and the rank; None if nowhere.

        `own` are the sums of this rank, `sums` those of all, which agree whether there is anything to ask.
        """
        layers = sums[NOT_FINITE].nonzero().flatten().tolist() if self.layers else []
        if not layers:
            return None
        is_mine = NOT_FINITE in own and int(own[NOT_FINITE][layers[0]]) > 0
        rank = torch.tensor(-mesh.world.rank if is_mine else -mesh.world.size, device=mesh.device)
        first = -int(comm.all_reduce(rank, mesh.world, "max"))
        return f"the router of layers.{layers[0]} was the first whose logits were not, on rank {first}"

    def load(self, sums: Mapping[str, Tensor]) -> ExpertLoad | None:
        """Choices of each expert; None for a dense model."""
        return ExpertLoad(sums[TOKENS].to(torch.int64), self.layers) if self.layers else None

    def end_step(self, load: ExpertLoad | None) -> None:
        """Let the routers of this rank move their state by the choices of a step that was not skipped."""
        if load is not None:
            for layer, router in self.model.routers().items():
                router.end_step(load.tokens[layer])
