"""A transformer block of your own: attention and MLP side by side, with a scale that is learned.

    python pretrain_gpt.py --plugin examples/plugins/parallel_block.py --block parallel --block-args scale=0.5 ...

Attention and MLP read the same norm, as in GPT-J and PaLM (arXiv:2204.02311), and their sum is multiplied by a vector
before it is added to the residual stream (LayerScale, arXiv:2103.17239). The layers of the library cut their weights
over tp and say so themselves; the block says it of its own parameter.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatronish.config.sections.model import ModelConfig
from megatronish.layers.norm import Norm
from megatronish.model.attention import Attention, CoreAttention
from megatronish.model.context import Context
from megatronish.model.mlp import MLP
from megatronish.parallel.mesh import TensorParallel
from megatronish.parallel.sharding import Init, Sharding
from megatronish.plugins import register_block
from megatronish.specs.costs import Count, LayerCost, NormShape
from megatronish.specs.layers import LayerSpec, MLPSpec


class ParallelBlock(nn.Module):
    """[S, B, D] -> [S, B, D] (sequence parallel: [S/tp, B, D]): x + scale * (attention(norm(x)) + MLP(norm(x)))."""

    def __init__(
        self, config: ModelConfig, *, layer: int, tp: TensorParallel, core: CoreAttention, scale: float
    ) -> None:
        super().__init__()
        self.config, self.layer, self.tp, self.initial_scale = config, layer, tp, scale
        spec, std = LayerSpec.of(config), config.init_method_std
        self.norm = Norm(
            config.hidden_size, kind=config.normalization, epsilon=config.norm_epsilon, partial=tp.cuts_sequence
        )
        self.attention = Attention(config, spec.attention, layer=layer, tp=tp, core=core, output_std=std)
        self.mlp = MLP(config, MLPSpec.of(config), tp=tp, output_std=std)
        self.scale = nn.Parameter(torch.empty(config.hidden_size))

    def shardings(self) -> dict[str, Sharding]:
        """The whole vector on every rank. Where tp cuts the sequence, each rank has a part of its gradient's sum."""
        partial_over = frozenset({"tp"} if self.tp.cuts_sequence else ())
        shape = (self.config.hidden_size,)
        return {"scale": Sharding(shape, partial_over=partial_over, role="vector", init=Init(value=self.initial_scale))}

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """`context` has what all layers of a forward share: positions, masks, dropout, the KV cache."""
        y = self.norm(x)
        y = self.scale * (self.attention(y, context) + self.mlp(y))
        return context.drop(y, site="output", rate=self.config.hidden_dropout, residual=x)


@dataclass(frozen=True)
class ParallelSpec(LayerSpec):
    """The same layer as data, without torch: FLOPs, memory, MFU and --pipeline-split auto read its cost."""

    def cost(self, model: ModelConfig) -> LayerCost:
        """One norm and the scale, in addition to attention and MLP.

        What waits for the backward is right as it is: the scale keeps its input, D elements a token, and attention and
        MLP, whose rows count an input of D elements each, keep the same one.
        """
        width = model.hidden_size
        own = LayerCost(
            norms=(NormShape(model.normalization, width),),
            vectors=Count(whole=width),
        )
        return own + self.attention.cost(model) + self.mlp.cost(model)


def parallel_layers(model: ModelConfig, **_options: float) -> Sequence[LayerSpec]:
    """The spec of every layer; here they are all alike."""
    layer = LayerSpec.of(model)
    return (ParallelSpec(layer.attention, layer.mlp),) * model.num_layers


register_block("parallel", ParallelBlock, layers=parallel_layers, options={"scale": 1.0})
