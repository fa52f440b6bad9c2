"""FLOPs of a token: of the model, and of the hardware that trains it.

FLOPs are those of matrix products, two for each multiply-add: what everybody counts. A backward is twice a forward.
*Model* FLOPs are what the mathematics asks for, whatever the device does: true vocabulary, nothing computed twice.
MFU is model FLOPs over the peak. *Hardware* FLOPs are what the device executes: the padded vocabulary, and the
attention scores once more in the backward, because flash attention does not keep them.

Attention is counted for what a causal mask lets through, half of the square (`"causal"`, as the throughput that
Megatron-LM prints), or for the whole square (`"full"`, as the formula of arXiv:2104.04473). A window cuts either;
of BERT, whose mask lets all through, it is the whole square in any case.
"""

from typing import Literal, NamedTuple

from megatronish.config.sections.model import ModelConfig
from megatronish.specs.ends import ends_of
from megatronish.specs.layers import LayerSpec, layer_specs

CountedMask = Literal["causal", "full"]


class ForwardFlops(NamedTuple):
    """FLOPs of one token's forward pass through all layers."""

    linear: int
    """Linear layers: projections of attention and MLPs."""
    scores: float
    """Products of queries and keys."""
    values: float
    """Products of probabilities and values."""
    logits: float
    """The output layer, and dense layers at the end: of every token, and of one token of a sequence."""

    @property
    def total(self) -> float:
        """FLOPs of the whole forward pass."""
        return self.linear + (self.scores + self.values) + self.logits


def layer_flops(model: ModelConfig, layer: LayerSpec, *, seq_length: int, attention: CountedMask = "causal") -> float:
    """FLOPs of the average token of a sequence, forward, through one layer."""
    cost = layer.cost(model)
    return cost.linear_flops + (cost.score_flops(seq_length, attention) + cost.value_flops(seq_length, attention))


def forward_flops(
    model: ModelConfig, *, vocab_size: int, seq_length: int, attention: CountedMask = "causal"
) -> ForwardFlops:
    """FLOPs of the average token of a sequence, forward."""
    costs = [layer.cost(model) for layer in layer_specs(model)]
    return ForwardFlops(
        linear=sum(cost.linear_flops for cost in costs),
        scores=sum(cost.score_flops(seq_length, attention) for cost in costs),
        values=sum(cost.value_flops(seq_length, attention) for cost in costs),
        logits=logits_flops(model, vocab_size, seq_length=seq_length),
    )


def logits_flops(model: ModelConfig, vocab_size: int, *, seq_length: int) -> float:
    """FLOPs of the average token forward in the output layer, and in the dense layers that a model ends with.

    Each layer of multi-token prediction uses the output layer once more. Tokens of an encoder predict nothing.
    """
    ends = ends_of(model, seq_length=seq_length)
    times = 1 + model.num_depths
    of_predicting = 2 * model.hidden_size * vocab_size * times + ends.head.linear_flops
    return of_predicting * float(1 - model.encoder_share) + ends.of_sequence.linear_flops / seq_length


def model_flops_per_token(
    model: ModelConfig,
    *,
    vocab_size: int,
    seq_length: int,
    attention: CountedMask = "causal",
    is_frozen: bool = False,
) -> float:
    """Forward and backward of one token, for MFU. A frozen model has no weight gradients: 4 N in the place of 6 N."""
    forward = forward_flops(model, vocab_size=vocab_size, seq_length=seq_length, attention=attention)
    return 3 * forward.total - (forward.linear + forward.logits if is_frozen else 0)


def hardware_flops_per_token(
    model: ModelConfig, *, padded_vocab_size: int, seq_length: int, attention: CountedMask = "causal"
) -> float:
    """Forward and backward of one token as the device carries them out."""
    forward = forward_flops(model, vocab_size=padded_vocab_size, seq_length=seq_length, attention=attention)
    return 3 * forward.total + forward.scores
