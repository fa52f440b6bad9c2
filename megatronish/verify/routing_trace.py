"""Trace of routing: the experts that every token chose, their margins, and the replay of choices in another layout.

Rounding differs between layouts, so a token whose scores are nearly equal may choose another expert there. A run in a
layout is therefore given the choices of the one process, by step, layer, sample and position. What the layout would
have chosen is compared with them, and each difference is recorded with the margin of the choice.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatronish.layers.router import Router
from megatronish.model.context import Context
from megatronish.model.experts import MixtureOfExperts
from megatronish.model.gpt import GPT


class Choices(NamedTuple):
    """Choices of the tokens of a sample in a layer, [S, K], and the margin of each token, [S] (`Router.margins`)."""

    experts: list[list[int]]
    margins: list[float]


class Rerouted(NamedTuple):
    """A token that would have chosen other experts than in the run that was replayed, where its margin was `margin`."""

    step: int
    layer: int
    sample: int
    position: int
    margin: float


class RoutingRecorder:
    """Records the choices of this rank's tokens or, where there are some of another run, replays them.

    It hooks into routers. A recomputation, which has its choices, is left alone.
    """

    def __init__(self, model: GPT, replayed: dict[str, Choices]) -> None:
        self.replayed, self.step = replayed, 0
        self.choices, self.rerouted = dict[str, Choices](), list[Rerouted]()
        self._context: Context | None = None
        for module in model.modules():
            if isinstance(module, MixtureOfExperts):
                module.register_forward_pre_hook(self._begin)
                module.router.register_forward_pre_hook(partial(self._route, module))

    def _begin(self, _module: nn.Module, arguments: tuple[Any, ...]) -> None:
        self._context = arguments[-1]

    @torch.no_grad()
    def _route(self, module: MixtureOfExperts, router: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Arguments of a router, with the choices that are replayed."""
        tokens, chosen = arguments
        assert isinstance(router, Router) and self._context is not None
        if chosen is not None:
            return None
        positions, samples = module.own_positions(self._context), self._context.batch.sample_ids.tolist()
        scores = router.compared(router.logits(tokens))
        shape = (len(positions), len(samples))
        experts, margins = router.choose(scores).unflatten(0, shape), router.margins(scores).unflatten(0, shape)
        keys = [f"{self.step}/{module.layer}/{sample}" for sample in samples]
        if not self.replayed:
            for i, key in enumerate(keys):
                self.choices[key] = Choices(experts[:, i].tolist(), margins[:, i].tolist())
            return None
        theirs = torch.stack([self._replay(key, positions) for key in keys], dim=1).to(tokens.device)  # [s, B, K]
        differs = (experts.sort(-1).values != theirs.sort(-1).values).any(-1)
        for place, i in differs.nonzero().tolist():
            position = int(positions[place])
            margin = self.replayed[keys[i]].margins[position]
            self.rerouted.append(Rerouted(self.step, module.layer, samples[i], position, margin))
        return tokens, theirs.flatten(0, 1)

    def _replay(self, key: str, positions: Tensor) -> Tensor:
        """[s, K], the choices of a sample's tokens at `positions`."""
        return torch.tensor(self.replayed[key].experts)[positions.cpu()]
