"""Transformer layer: self-attention and an MLP, each on a normalised copy of the residual stream (pre-norm)."""

import math
from collections.abc import Callable
from functools import partial
from typing import Protocol

from torch import Tensor, nn

from megatronish.config.sections.model import ModelConfig
from megatronish.core.names import BLOCK_NAMES, options_of
from megatronish.layers.norm import Norm
from megatronish.model.attention import Attention, CoreAttention
from megatronish.model.context import Context
from megatronish.model.experts import MixtureOfExperts
from megatronish.model.mlp import MLP
from megatronish.parallel.mesh import TensorParallel
from megatronish.specs.layers import ExpertsSpec, layer_specs


class MakeBlock(Protocol):
    """Constructor of layer number `layer` of the whole model: a module (x [S, B, D], Context) -> x."""

    def __call__(self, config: ModelConfig, /, *, layer: int, tp: TensorParallel, core: CoreAttention) -> nn.Module: ...


class TransformerBlock(nn.Module):
    """Layer number `layer` of the whole model, as its spec says.

    [S, B, D] -> [S, B, D] (sequence parallel: [S/tp, B, D]).
    """

    def __init__(self, config: ModelConfig, *, layer: int, tp: TensorParallel, core: CoreAttention) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        spec = layer_specs(config)[layer]
        make_norm = partial(
            Norm,
            config.hidden_size,
            kind=config.normalization,
            epsilon=config.norm_epsilon,
            partial=tp.cuts_sequence,
            one_plus=config.apply_layernorm_1p,
        )
        # Residual outputs start smaller, so that their sum over the depth does not grow (Radford et al. 2019).
        output_std = config.init_method_std / math.sqrt(2 * config.num_layers)
        self.attention_norm = make_norm()
        self.attention = Attention(config, spec.attention, layer=layer, tp=tp, core=core, output_std=output_std)
        self.mlp_norm = make_norm()
        self.mlp: MLP | MixtureOfExperts
        if isinstance(spec.mlp, ExpertsSpec):
            self.mlp = MixtureOfExperts(config, spec.mlp, layer=layer, tp=tp, output_std=output_std)
        else:
            self.mlp = MLP(config, spec.mlp, tp=tp, output_std=output_std)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """x + attention(norm(x)), then x + MLP(norm(x)), each sublayer's output with dropout."""
        rate = self.config.hidden_dropout
        attended = self.attention(self.attention_norm(x), context)
        if context.dropout is None or rate == 0.0:
            normalised, x = self.mlp_norm.of_sum(x, attended)
        else:
            x = context.drop(attended, site="attention_output", rate=rate, residual=x)
            normalised = self.mlp_norm(x)
        return context.drop(self.mlp(normalised, context), site="mlp_output", rate=rate, residual=x)


BLOCKS: dict[str, Callable[..., nn.Module]] = {"transformer": TransformerBlock}
"""The blocks of --block, each a `MakeBlock`; `LAYERS` of specs/layers.py has their specs, under the same names."""


def make_block_of(config: ModelConfig) -> MakeBlock:
    """The maker of the block that a config names, with its options."""
    return partial(BLOCKS[config.block], **options_of(BLOCK_NAMES, config.block, config.block_args))
