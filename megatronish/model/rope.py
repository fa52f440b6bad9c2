"""How do rotary embeddings tell attention where a token stands? (Su et al. 2021, arXiv:2104.09864)

Pairs of channels of every query and key are turned by an angle that grows with the position, each pair at a wavelength
of its own. Longer contexts are reached by stretching the wavelengths, in one of the ways of `_inverse_wavelengths`.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from megatronish.config.model import ModelConfig


class Rotation(NamedTuple):
    """cos and sin of every angle, fp32 [S, 1 or B, 1, pairs]."""

    cos: Tensor
    sin: Tensor


def rotation(config: ModelConfig, position_ids: Tensor) -> Rotation:
    """[B, S] -> the angles at these positions."""
    frequencies, factor = _frequencies(config)
    angles = position_ids.t()[..., None, None].float() * frequencies.to(position_ids.device)
    return Rotation(angles.cos() * factor, angles.sin() * factor)


def rotate(x: Tensor, turn: Rotation, *, interleaved: bool) -> Tensor:
    """[S, B, n, H] -> [S, B, n, H]: turns the first 2 * pairs channels of every head, in fp32."""
    cos, sin = turn
    size = 2 * cos.shape[-1]
    turned = x[..., :size].float()
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = turned.chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    turned = turned.to(x.dtype)
    return turned if size == x.shape[-1] else torch.cat((turned, x[..., size:]), dim=-1)


def _frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """[pairs] radians a position, and the factor that yarn puts on cos and sin."""
    size = int(config.head_size * config.rotary_percent) // 2 * 2
    frequencies = 1.0 / config.rotary_base ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    scale = config.rope_scaling_factor
    match config.rope_scaling:
        case "none":
            return frequencies, 1.0
        case "linear":
            return frequencies / scale, 1.0
        case "llama3":
            return _llama3(frequencies, config), 1.0
        case "yarn":
            return _yarn(frequencies, config, size), 0.1 * math.log(scale) + 1.0 if scale > 1 else 1.0


def _llama3(frequencies: Tensor, config: ModelConfig) -> Tensor:
    """Llama 3.1: long wavelengths stretched, short ones kept, a blend between (by turns over the old context)."""
    turns = frequencies * config.rope_original_max_positions / (2 * math.pi)
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * kept + frequencies / config.rope_scaling_factor * (1 - kept)


def _yarn(frequencies: Tensor, config: ModelConfig, size: int) -> Tensor:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): a blend that is linear in the index of the pair."""

    def pair_with_turns(turns: float) -> float:
        wavelength = config.rope_original_max_positions / (turns * 2 * math.pi)
        return size * math.log(wavelength) / (2 * math.log(config.rotary_base))

    low = max(math.floor(pair_with_turns(config.rope_beta_fast)), 0)
    high = min(math.ceil(pair_with_turns(config.rope_beta_slow)), size - 1)
    stretched = ((torch.arange(size // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return frequencies / config.rope_scaling_factor * stretched + frequencies * (1 - stretched)
