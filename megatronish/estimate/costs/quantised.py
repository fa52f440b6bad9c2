"""Bytes of a base quantised to NF4 (layers/nf4.py), and the layouts in which its blocks are whole."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from megatronish.config.config import Config
from megatronish.config.sections.finetuning import AdapterConfig
from megatronish.config.sections.model import ModelConfig
from megatronish.core.errors import UserError
from megatronish.specs.adapter_targets import LinearSection, linear_sections, sections_of_layer
from megatronish.specs.costs import Count, sum_counts
from megatronish.specs.layers import layer_specs

BLOCK, BLOCKS_PER_SCALE, CODES = 64, 256, 32


class Quantised(NamedTuple):
    """What is quantised of some layers: how many parameters, and the bytes that hold them."""

    parameters: Count
    stored: Count

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes of a quantised parameter."""
        return self.stored.total / self.parameters.total


def quantised(model: ModelConfig, layers: Sequence[int], config: AdapterConfig) -> Quantised:
    """Weights that --quantize-base holds in NF4; nothing without it."""
    if config.quantize_base is None:
        return Quantised(Count(), Count())
    specs = layer_specs(model)
    sections = [each for layer in layers for each in sections_of_layer(model, layer, specs[layer])]
    parameters = sum_counts(_cut(each, each.copies * each.in_features * each.out_features) for each in sections)
    return Quantised(parameters, sum_counts(_stored(each, double=config.double_quantization) for each in sections))


def _cut(section: LinearSection, size: int) -> Count:
    return Count(split=size) if section.copies == 1 else Count(experts=size)


def _stored(section: LinearSection, *, double: bool) -> Count:
    """Codes and absmax of every block; with double quantisation the scales and the mean, which tp leaves whole."""
    blocks = section.in_features // BLOCK * section.out_features
    held = _cut(section, section.copies * blocks * (CODES + (1 if double else 4)))
    if not double:
        return held
    scales = 4 * (-(-blocks // BLOCKS_PER_SCALE) + 1)
    return held + (Count(whole=scales) if section.copies == 1 else Count(experts=section.copies * scales))


def frozen_bytes(held: Count, in_blocks: Quantised, *, cut: tuple[int, int], element_bytes: int) -> int:
    """Bytes of frozen parameters on a rank; `cut` are the ranks that cut a layer (tp) and its experts (ep x etp)."""
    tp, grid = cut
    others = held + in_blocks.parameters * -1
    return element_bytes * others.per_rank(tp, experts=grid) + in_blocks.stored.per_rank(tp, experts=grid)


def gathered_bytes(
    model: ModelConfig, held: Count, layers: Sequence[int], config: AdapterConfig, *, cut: tuple[int, int], width: int
) -> int:
    """Bytes of a frozen stage that ZeRO-3 gathers at once: a layer, the next one, and what is left around the layers.

    `held` are the parameters of the stage, of `width` bytes each where they are not quantised.
    """
    specs = layer_specs(model)
    sizes = [
        frozen_bytes(
            specs[layer].cost(model).parameters, quantised(model, [layer], config), cut=cut, element_bytes=width
        )
        for layer in layers
    ]
    whole = frozen_bytes(held, quantised(model, layers, config), cut=cut, element_bytes=width)
    return whole - sum(sizes) + max((a + b for a, b in pairwise(sizes)), default=sum(sizes))


def largest_dequantised(model: ModelConfig, layers: Sequence[int], *, tp: int, etp: int) -> int:
    """Elements of the largest weight that a rank dequantises at once: of a layer, or of one expert."""
    specs, sizes = layer_specs(model), dict[str, int]()
    for number in layers:
        for each in sections_of_layer(model, number, specs[number]):
            layer = each.name.rpartition(".")[0]
            size = each.in_features * each.out_features // (tp if each.copies == 1 else etp)
            sizes[layer] = sizes.get(layer, 0) + size
    return max(sizes.values(), default=0)


def refuse_cut_blocks(config: Config) -> None:
    """UserError if a rank would hold a part of a block: results would depend on the layout."""
    if config.adapter.quantize_base is None:
        return
    etp = config.parallel.expert_layout.etp
    for section in linear_sections(config.model):
        is_row, is_expert = section.section in ("o", "down"), section.copies > 1
        ranks = 1 if not is_row else etp if is_expert else config.layout.tp
        if section.in_features % (BLOCK * ranks):
            flag = "--expert-tensor-parallel-size" if is_expert else "--tensor-model-parallel-size"
            fitting = [n for n in range(1, ranks) if ranks % n == 0 and section.in_features % (BLOCK * n) == 0]
            remedy = f"use {flag} {fitting[-1]}, or leave" if fitting else "leave"
            given = f" on each of {ranks} ranks" if ranks > 1 else ""
            raise UserError(
                f"quantize_base={config.adapter.quantize_base} needs whole blocks of {BLOCK} inputs{given}, and "
                f"{section.name} has {section.in_features}; {remedy} --quantize-base out"
            )
