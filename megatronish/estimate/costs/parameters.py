"""Numbers of parameters: of a model, of a pipeline stage by how tensor parallelism cuts them, and of adapters."""

from collections.abc import Sequence

from megatronish.config.sections.finetuning import AdapterConfig
from megatronish.config.sections.model import ModelConfig
from megatronish.specs.adapter_targets import (
    LinearSection,
    adapted_sections,
    all_patterns,
    is_target,
    sections_of_layer,
)
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


def parameters_of_adapter(section: LinearSection, config: AdapterConfig) -> Count:
    """Parameters of the adapter of a section, by how they are cut."""
    if config.adapter_type == "ia3":
        size = section.in_features if section.section == "down" else section.out_features
        found = Count(whole=size) if section.section == "o" else Count(split=size)
    else:
        a, b = config.lora_rank * section.in_features, config.lora_rank * section.out_features
        found = Count(split=a, whole=b) if section.section in ("o", "down") else Count(split=b, whole=a)
    return found if section.copies == 1 else Count(experts=section.copies * found.total)


def adapter_parameters(model: ModelConfig, layers: Sequence[int], config: AdapterConfig) -> Count:
    """Parameters of the adapters in these layers; zero without adapters."""
    if not config.is_used:
        return Count()
    specs, patterns = layer_specs(model), all_patterns(config)
    sections = (each for layer in layers for each in sections_of_layer(model, layer, specs[layer]))
    return sum_counts(parameters_of_adapter(each, config) for each in sections if is_target(each.name, patterns))


def adapter_table(model: ModelConfig, config: AdapterConfig, *, num_parameters: int) -> str:
    """What has an adapter, a row for each section, and how many parameters learn of how many."""
    counts: dict[str, tuple[int, int]] = {}
    for section in adapted_sections(model, config):
        kind = f"{section.section} of {section.copies} experts" if section.copies > 1 else section.section
        number, learned = counts.get(kind, (0, 0))
        counts[kind] = number + 1, learned + parameters_of_adapter(section, config).total
    total = sum(learned for _, learned in counts.values())
    rows = [f"  {kind:<20}{number:>8}{learned:>16,}" for kind, (number, learned) in counts.items()]
    head = f"  {'adapters of':<20}{'layers':>8}{'parameters':>16}"
    share = 100 * total / (num_parameters + total)
    return "\n".join([head, *rows, f"  {total:,} parameters learn, {share:.3g} % of {num_parameters + total:,}"])
