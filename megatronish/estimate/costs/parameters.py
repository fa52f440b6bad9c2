"""Numbers of parameters: of a model, of a pipeline stage by how tensor parallelism cuts them, and of adapters.

And bytes of a quantised base (layers/nf4.py, layers/int8.py). Layouts that would cut blocks of codes are refused.
"""

from collections.abc import Sequence
from math import gcd, prod
from typing import NamedTuple

from megatronish.config.config import Config
from megatronish.config.sections.finetuning import AdapterConfig
from megatronish.config.sections.model import ModelConfig
from megatronish.core.errors import UserError
from megatronish.core.layout import ExpertLayout
from megatronish.specs.adapter_targets import (
    LinearSection,
    all_patterns,
    is_target,
    linear_sections,
    sections_of_layer,
)
from megatronish.specs.costs import Count, sum_counts
from megatronish.specs.ends import ends_of
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
    """Parameters of a stage with these layers. Some models embed at both ends: the last stage has the table, too.

    `vocab_size` is the true or the padded one, as the caller wants to count.
    """
    held, table = (
        sum_counts(layer.cost(model).parameters for layer in layers),
        Count(split=vocab_size * model.hidden_size),
    )
    ends = ends_of(model, seq_length=seq_length)
    held += ends.of_stage
    if is_first:
        held += table + ends.of_embedding(model)
    if is_last:
        held += ends.of_head(vocab_size)
        held += table * (not model.tied) + table * (model.embeds_at_end and not is_first)
    return held


def parameters_of_adapter(section: LinearSection, config: AdapterConfig) -> Count:
    """Parameters of the adapter of a section, by how they are cut."""
    if config.adapter_type == "ia3":
        size = section.in_features if section.section == "down" else section.out_features
        count = Count(whole=size) if section.section == "o" else Count(split=size)
    else:
        a, b = config.lora_rank * section.in_features, config.lora_rank * section.out_features
        counts = {"row": Count(split=a, whole=b), "column": Count(split=b, whole=a), "none": Count(whole=a + b)}
        count = counts[section.cut]
    if section.copies == 1:
        return count
    return Count(experts=section.copies * count.split, by_expert=section.copies * count.whole)


def adapter_parameters(model: ModelConfig, layers: Sequence[int], config: AdapterConfig) -> Count:
    """Parameters of the adapters in these layers; zero without adapters."""
    if not config.is_used:
        return Count()
    specs, patterns = layer_specs(model), all_patterns(config)
    sections = (section for layer in layers for section in sections_of_layer(model, layer, specs[layer]))
    return sum_counts(
        parameters_of_adapter(section, config) for section in sections if is_target(section.name, patterns)
    )


BLOCKS = {"nf4": 64, "int8": 1}
"""Elements of a row that are stored together, in each form of --quantize-base."""
BLOCKS_PER_SCALE, CODES = 256, 32  # of NF4


class Quantised(NamedTuple):
    """What is quantised of some layers: how many parameters, and the bytes that hold them."""

    parameters: Count
    stored: Count

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes of a quantised parameter."""
        return self.stored.total / self.parameters.total


def quantised(model: ModelConfig, layers: Sequence[int], config: AdapterConfig) -> Quantised:
    """Weights that --quantize-base holds in few bits; nothing without it."""
    if config.quantize_base is None:
        return Quantised(Count(), Count())
    specs = layer_specs(model)
    sections = [section for layer in layers for section in sections_of_layer(model, layer, specs[layer])]
    parameters = sum_counts(
        _cut(section, section.copies * section.in_features * section.out_features) for section in sections
    )
    return Quantised(parameters, sum_counts(_stored(section, config) for section in sections))


def _cut(section: LinearSection, size: int) -> Count:
    if section.copies > 1:
        return Count(experts=size)
    return Count(whole=size) if section.cut == "none" else Count(split=size)


def _stored(section: LinearSection, config: AdapterConfig) -> Count:
    """Bytes that the layers' axes cut as they cut the weight, and the scales, which tp leaves whole."""
    blocks = section.in_features // BLOCKS["nf4"] * section.out_features
    if config.quantize_base == "int8":
        size, scales = section.in_features * section.out_features, section.out_features
    elif config.double_quantization:
        size, scales = blocks * (CODES + 1), -(-blocks // BLOCKS_PER_SCALE) + 1
    else:
        size, scales = blocks * (CODES + 4), 0
    whole = Count(whole=4 * scales) if section.copies == 1 else Count(by_expert=section.copies * 4 * scales)
    return _cut(section, section.copies * size) + whole


def frozen_bytes(held: Count, in_blocks: Quantised, *, tp: int, experts: ExpertLayout, element_bytes: int) -> int:
    """Bytes of frozen parameters on a rank; tp cuts a layer, and its `experts` are cut by expert and by feature."""
    others, grid = held + in_blocks.parameters * -1, prod(experts)
    stored = in_blocks.stored.per_rank(tp, experts=grid, etp=experts.etp)
    return element_bytes * others.per_rank(tp, experts=grid) + stored


def largest_dequantised(model: ModelConfig, layers: Sequence[int], *, tp: int, etp: int) -> int:
    """Elements of the largest weight that a rank dequantises at once: of a layer, or of one expert."""
    specs, sizes = layer_specs(model), dict[str, int]()
    for number in layers:
        for section in sections_of_layer(model, number, specs[number]):
            layer = section.name.rpartition(".")[0]
            ranks = 1 if section.cut == "none" else tp if section.copies == 1 else etp
            size = section.in_features * section.out_features // ranks
            sizes[layer] = sizes.get(layer, 0) + size
    return max(sizes.values(), default=0)


def refuse_cut_blocks(config: Config) -> None:
    """UserError if a rank would hold a part of a block: results would depend on the layout."""
    if config.adapter.quantize_base is not None:
        _refuse_cut_base(config, BLOCKS[config.adapter.quantize_base])
    if config.parallel.zero_quantized_weights is not None:
        _refuse_cut_weights(config, config.parallel.zero_quantized_weights_block)


def _ranks_of_rows(config: Config, section: LinearSection) -> int:
    """Ranks that cut the inputs of a linear layer, which are the rows of its weight."""
    if section.cut != "row":
        return 1
    return config.parallel.expert_layout.etp if section.copies > 1 else config.layout.tp


def _refuse_cut_weights(config: Config, block: int) -> None:
    """UserError if --zero-quantized-weights would cut a block of codes."""
    sections = linear_sections(config.model)
    widths = {section: section.in_features // _ranks_of_rows(config, section) for section in sections}
    for section, width in widths.items():
        if width % block:
            most = gcd(*widths.values())
            fitting = [size for size in range(8, min(most, 128) + 1, 8) if most % size == 0]
            remedy = f"use --zero-quantized-weights-block {fitting[-1]}, or leave" if fitting else "leave"
            ranks = _ranks_of_rows(config, section)
            given = f" on each of {ranks} ranks" if ranks > 1 else ""
            raise UserError(
                f"zero_quantized_weights_block={block} must divide every row of a matrix, and {section.name} has rows "
                f"of {width}{given}; {remedy} --zero-quantized-weights out"
            )


def _refuse_cut_base(config: Config, block: int) -> None:
    """UserError if --quantize-base would cut a block."""
    for section in linear_sections(config.model):
        is_expert, ranks = section.copies > 1, _ranks_of_rows(config, section)
        if section.in_features % (block * ranks):
            flag = "--expert-tensor-parallel-size" if is_expert else "--tensor-model-parallel-size"
            fitting = [n for n in range(1, ranks) if ranks % n == 0 and section.in_features % (block * n) == 0]
            remedy = f"use {flag} {fitting[-1]}, or leave" if fitting else "leave"
            given = f" on each of {ranks} ranks" if ranks > 1 else ""
            raise UserError(
                f"quantize_base={config.adapter.quantize_base} needs whole blocks of {block} inputs{given}, and "
                f"{section.name} has {section.in_features}; {remedy} --quantize-base out"
            )
