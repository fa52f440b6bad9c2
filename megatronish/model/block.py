"""Layers of a model, each built as its spec says: norms, attention, MLP or experts; and those that predict ahead.

A new kind of attention is a line in `ATTENTIONS` and one in `attention_kind` (specs/layers.py), a new kind of layer one
in `BLOCKS`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megatronish.config.sections.model import ModelConfig
from megatronish.core.names import BLOCK_NAMES, options_of
from megatronish.layers.linear import WholeLinear
from megatronish.layers.norm import Norm, residual_norm
from megatronish.layers.recompute import HasParts, recompute_module, restoring
from megatronish.model.attention import Attention, CoreAttention, SelfAttention
from megatronish.model.context import Context
from megatronish.model.experts import MixtureOfExperts
from megatronish.model.latent_attention import LatentAttention
from megatronish.model.mlp import MLP
from megatronish.parallel.mesh import TensorParallel
from megatronish.specs.attention import AttentionSpec
from megatronish.specs.layers import layer_specs


class MakeBlock(Protocol):
    """Constructor of layer number `layer` of the whole model: a module (x [S, B, D], Context) -> x."""

    def __call__(self, config: ModelConfig, /, *, layer: int, tp: TensorParallel, core: CoreAttention) -> nn.Module: ...


class MakeAttention(Protocol):
    """Constructor of self-attention of one kind, from the spec of this kind."""

    def __call__(
        self,
        config: ModelConfig,
        spec: Any,
        /,
        *,
        layer: int,
        tp: TensorParallel,
        core: CoreAttention,
        output_std: float,
    ) -> SelfAttention: ...


ATTENTIONS: dict[str, MakeAttention] = {"heads": Attention, "latent": LatentAttention}
"""Modules of self-attention, by the kind that a spec says."""


def make_attention(
    config: ModelConfig,
    spec: AttentionSpec,
    *,
    layer: int,
    tp: TensorParallel,
    core: CoreAttention,
    output_std: float,
) -> SelfAttention:
    """Self-attention of the kind that its spec is of."""
    make = ATTENTIONS[spec.kind]
    return make(config, spec, layer=layer, tp=tp, core=core, output_std=output_std)


class TransformerBlock(HasParts):
    """Layer number `layer` of the whole model, as its spec says.

    [S, B, D] -> [S, B, D] (sequence parallel: [S/tp, B, D]).
    """

    def __init__(self, config: ModelConfig, *, layer: int, tp: TensorParallel, core: CoreAttention) -> None:
        super().__init__()
        self.config, self.layer, self.placement = config, layer, config.placement
        spec = layer_specs(config)[layer]
        placement = self.placement
        output_std = config.output_std
        make_norm = partial(residual_norm, config, tp=tp)
        self.attention_norm = make_norm() if placement != "output" else None
        self.attention = make_attention(config, spec.attention, layer=layer, tp=tp, core=core, output_std=output_std)
        self.attention_output_norm = make_norm() if placement in ("output", "sandwich") else None
        self.mlp_norm = make_norm() if placement not in ("output", "parallel") else None
        self.mlp: MLP | MixtureOfExperts
        if spec.mlp.kind == "experts":
            self.mlp = MixtureOfExperts(config, spec.mlp, layer=layer, tp=tp, output_std=output_std)
        else:
            self.mlp = MLP(config, spec.mlp, tp=tp, output_std=output_std)
        self.mlp_output_norm = make_norm() if placement in ("output", "sandwich") else None

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """x + attention(norm(x)), then x + MLP(norm(x)), each sublayer's output with dropout.

        Other placements of norms are `norm_placement` of config/sections/block.py, and "post" is BERT's.
        """
        match self.placement:
            case "post":
                return self._normalised_after(x, context)
            case "parallel" | "parallel_norms":
                return self._side_by_side(x, context)
        rate = self.config.hidden_dropout
        with restoring_norm(self, normalised := _normalised(self.attention_norm, x), self.attention_norm, x):
            attended = self.attention(normalised, context)
        attended = self._added(attended, self.attention_output_norm)
        if self.mlp_norm is not None and (context.dropout is None or rate == 0.0):
            normalised, x = self.mlp_norm.of_sum(x, attended)
        else:
            x = context.drop(attended, site="attention_output", rate=rate, residual=x)
            normalised = _normalised(self.mlp_norm, x)
        with restoring_norm(self, normalised, self.mlp_norm, x):
            y = self._added(self._through_mlp(normalised, context), self.mlp_output_norm)
        return context.drop(y, site="mlp_output", rate=rate, residual=x)

    def _through_mlp(self, x: Tensor, context: Context) -> Tensor:
        """The MLP of [S, B, D], as a whole computed again if --recompute-modules says so."""
        if ("moe" if isinstance(self.mlp, MixtureOfExperts) else "mlp") not in self.recomputed:
            return self.mlp(x, context)
        return recompute_module(self.mlp, x, context)

    def _added(self, y: Tensor, norm: Norm | None) -> Tensor:
        """What a sublayer's output adds to the residual stream: normalised, if it has a norm, and times a factor."""
        y, factor = _normalised(norm, y), self.config.residual_multiplier
        return y if factor == 1.0 else y * factor

    def _side_by_side(self, x: Tensor, context: Context) -> Tensor:
        """x + attention(norm(x)) + MLP(norm(x)), with one norm or two; each output has dropout of its own."""
        rate = self.config.hidden_dropout
        normalised, before = _normalised(self.attention_norm, x), x
        with restoring_norm(self, normalised, self.attention_norm, before):
            attended = self._added(self.attention(normalised, context), None)
            x = context.drop(attended, site="attention_output", rate=rate, residual=x)
            if self.mlp_norm is None:
                y = self._through_mlp(normalised, context)
        if self.mlp_norm is not None:
            with restoring_norm(self, normalised := self.mlp_norm(before), self.mlp_norm, before):
                y = self._through_mlp(normalised, context)
        return context.drop(self._added(y, None), site="mlp_output", rate=rate, residual=x)

    def _normalised_after(self, x: Tensor, context: Context) -> Tensor:
        assert self.attention_norm is not None and self.mlp_norm is not None
        sublayers = (
            (self.attention, self.attention_norm, "attention_output"),
            (self.mlp, self.mlp_norm, "mlp_output"),
        )
        rate = self.config.hidden_dropout
        for sublayer, norm, site in sublayers:
            y = self._through_mlp(x, context) if sublayer is self.mlp else sublayer(x, context)
            if context.dropout is None or rate == 0.0:
                x, _ = norm.of_sum(x, y)
            else:
                x = norm(context.drop(y, site=site, rate=rate, residual=x))
        return x


def _normalised(norm: Norm | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


def restoring_norm(block: HasParts, normalised: Tensor, norm: Norm | None, x: Tensor) -> AbstractContextManager[None]:
    """Context of what reads norm(x), which a block that recomputes `layernorm` does not keep."""
    if norm is None or "layernorm" not in block.recomputed:
        return nullcontext()
    return restoring((normalised,), lambda: (norm(x),))


class PredictionBlock(TransformerBlock):
    """Layer of multi-token prediction: a layer over D features of a hidden state and of the embedding of a later token.

    [S, B, D] twice -> [S, B, D] (sequence parallel: [S/tp, B, D]): both have been normalised, and so is what comes out.
    """

    def __init__(self, config: ModelConfig, *, layer: int, tp: TensorParallel, core: CoreAttention) -> None:
        super().__init__(config, layer=layer, tp=tp, core=core)
        hidden, std = config.hidden_size, config.hidden_std
        self.projection = WholeLinear(
            2 * hidden, hidden, tp=tp, init_std=std, bias=False, role="matrix", section="projection"
        )
        self.embedding_norm = residual_norm(config, tp=tp)
        self.hidden_norm = residual_norm(config, tp=tp)
        self.final_norm = residual_norm(config, tp=tp)

    def forward(self, hidden: Tensor, embedded: Tensor, context: Context) -> Tensor:  # type: ignore[override]
        """norm(layer(W [norm(embedded) ; norm(hidden)]))."""
        both = torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), dim=-1)
        return self.final_norm(super().forward(self.projection(both, drop=context), context))


BLOCKS: dict[str, Callable[..., nn.Module]] = {"transformer": TransformerBlock}
"""The blocks of --block, each a `MakeBlock`; `LAYERS` of specs/layers.py has their specs, under the same names."""


def make_block_of(config: ModelConfig) -> MakeBlock:
    """The maker of the block that a config names, with its options."""
    return partial(BLOCKS[config.block], **options_of(BLOCK_NAMES, config.block, config.block_args))
