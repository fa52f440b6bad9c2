"""Numbers of parameters: of a whole model, and of a pipeline stage by how tensor parallelism cuts them."""

from collections.abc import Sequence

from megatronish.config.sections.model import ModelConfig
from megatronish.specs.costs import Count, NormShape, sum_counts
from megatronish.specs.layers import LayerSpec, layer_specs


def num_parameters(model: ModelConfig, *, vocab_size: int, seq_length: int) -> int:
    """Parameters of the whole model, with its true vocabulary."""
    sizes = {"vocab_size": vocab_size, "seq_length": seq_length}
    return parameters_of_stage(model, layer_specs(model), **sizes, is_first=True, is_last=True).total


def num_active_parameters(model: ModelConfig, *, vocab_size: int, seq_length: int) -> int:
    """Parameters that one token passes: of experts the chosen ones alone, embedding and head whole."""
    costs = [layer.cost(model) for layer in layer_specs(model)]
    idle = sum(cost.parameters.total - cost.active_parameters for cost in costs)
    return num_parameters(model, vocab_size=vocab_size, seq_length=seq_length) - idle


def parameters_of_stage(
    model: ModelConfig,
    layers: Sequence[LayerSpec],
    *,
    vocab_size: int,
    seq_length: int,
    is_first: bool,
    is_last: bool,
) -> Count:
    """Parameters of a stage with these layers. Tied embeddings are held by the last stage, too.

    `vocab_size` is the true or the padded one, as the caller wants to count.
    """
    held, table = (
        sum_counts(layer.cost(model).parameters for layer in layers),
        Count(split=vocab_size * model.hidden_size),
    )
    if is_first:
        held += table
        if model.embed_layernorm:
            held += NormShape(model.normalization, model.hidden_size).parameters
        if model.position_embedding_type == "learned_absolute":
            held += Count(whole=(model.max_position_embeddings or seq_length) * model.hidden_size)
    if is_last:
        held += NormShape(model.normalization, model.hidden_size).parameters
        if not (is_first and model.tied):
            held += table
    return held
