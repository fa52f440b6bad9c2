"""Rotary position embedding (RoPE; Su et al. 2021, arXiv:2104.09864) and its extensions to longer contexts.

Pairs of channels of every query and key are rotated by an angle that grows with the position, each pair at a frequency
of its own. Scores then depend on the distance of two tokens. Longer contexts are reached by lowering the frequencies:
all alike (linear), the low ones alone (llama3, yarn; to nothing: proportional), or each by a factor of its own
(longrope).
"""

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from megatronish.config.sections.model import ModelConfig
from megatronish.ops.rope import rotate as rotate_pairs

CPU = torch.device("cpu")


class Rotation(NamedTuple):
    """Rotation of every pair of channels: cos and sin of its angle, fp32 [S, 1 or B, 1, pairs]."""

    cos: Tensor
    sin: Tensor


class Rotations(NamedTuple):
    """Rotation in layers that see everything, and in those with a window or pattern."""

    everywhere: Rotation
    windowed: Rotation


class RotaryEmbedding:
    """Rotary position embedding of a model: its frequencies, computed once, and the rotations of given positions.

    Layers with a window or pattern may have a base of their own, and are not stretched then: no two of their tokens are
    far from each other.

    It is no module and its frequencies are no buffer: they are neither saved nor cast, and stay fp32 in a model of any
    precision. The first use on a device copies them there, and they stay.
    """

    def __init__(self, config: ModelConfig) -> None:
        # A model may be built on another device, "meta" included: what is computed here are values.
        with CPU:
            frequencies, self._growths = _frequencies(config), config.rotary_growths
        self._short_context = config.short_context
        self._frequencies = {CPU: frequencies}
        self._windowed: RotaryEmbedding | None = None
        if config.has_window_rotation:
            assert config.window_rotary_base is not None
            base = config.window_rotary_base
            local = replace(config, rotary_base=base, rope_scaling_type="none", window_rotary_base=None)
            self._windowed = RotaryEmbedding(local)

    def __call__(self, position_ids: Tensor, length: int | Tensor = 0) -> Rotations:
        """[B, S] -> the rotations of every position, [S, B, 1, pairs] each.

        `length` is that of all texts, or of each, [B]; LongRoPE alone reads it.
        """
        everywhere = self._rotation(position_ids, length)
        if self._windowed is None:
            return Rotations(everywhere, everywhere)
        return Rotations(everywhere, self._windowed._rotation(position_ids, length))

    def _rotation(self, position_ids: Tensor, length: int | Tensor) -> Rotation:
        frequencies, (in_short, in_long) = self._on(position_ids.device), self._growths
        growth: float | Tensor = in_short
        if self._short_context is not None:
            short, long = frequencies.chunk(2)
            if isinstance(length, int):
                is_long = length > self._short_context
                frequencies, growth = (long, in_long) if is_long else (short, in_short)
            else:
                outgrown = (length > self._short_context)[:, None, None]
                frequencies = torch.where(outgrown, long, short)  # [B, 1, pairs]
                growth = torch.where(outgrown, in_long, in_short)  # [B, 1, 1]
        angles = position_ids.t()[..., None, None].float() * frequencies
        return Rotation(angles.cos() * growth, angles.sin() * growth)

    def _on(self, device: torch.device) -> Tensor:
        """[pairs], of LongRoPE [2 pairs], on this device.

        A copy at every forward would make the host wait for the device.
        """
        if device not in self._frequencies:
            self._frequencies[device] = self._frequencies[CPU].to(device, non_blocking=True)
        return self._frequencies[device]


def rotate(x: Tensor, rotation: Rotation, *, interleaved: bool) -> Tensor:
    """[S, B, n, H] -> [S, B, n, H]: rotate the first 2 * pairs channels of every head, in fp32.

    A pair is channels 2 i and 2 i + 1 where `interleaved`, else i and i + pairs.
    """
    return rotate_pairs(x, *rotation, interleaved=interleaved)


def _frequencies(config: ModelConfig) -> Tensor:
    """Radians a position [pairs].

    Of LongRoPE [2 pairs], those in short texts before those in long ones (Ding et al. 2024, arXiv:2402.13753).
    """
    size = config.rotary_size // 2 * 2
    frequencies = 1.0 / config.rotary_base ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    match config.rope_scaling:
        case "none":
            return frequencies
        case "proportional":  # those of whole heads, of which the lowest are 0 (Gemma 4)
            turned = int(config.rotary_percent * size // 2)
            return torch.cat((frequencies[:turned], torch.zeros(size // 2 - turned)))
        case "linear":
            return frequencies / config.rope_scaling_factor
        case "llama3":
            return _llama3(frequencies, config)
        case "yarn":
            return _yarn(frequencies, config, size)
        case "longrope":
            factors = [torch.tensor(each) for each in (config.rope_short_factor, config.rope_long_factor)]
            return torch.cat([frequencies / each for each in factors])


def _llama3(frequencies: Tensor, config: ModelConfig) -> Tensor:
    """Scaling of Llama 3.1: low frequencies are divided by the factor, high ones kept, those between blended."""
    turns = frequencies * config.rope_original_max_positions / (2 * math.pi)  # over the original context
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * kept + frequencies / config.rope_scaling_factor * (1 - kept)


def _yarn(frequencies: Tensor, config: ModelConfig, size: int) -> Tensor:
    """Scaling of YaRN (Peng et al. 2023, arXiv:2309.00071), "NTK-by-parts": [pairs] -> [pairs].

    High frequencies are kept, low ones divided by the factor, with a blend between that is linear in the pair's index.
    """

    def pair_with_turns(turns: float) -> float:
        # Pair i makes L * base^(-2 i / size) / (2 pi) turns over the original context of L positions. Solved for i:
        wavelength = config.rope_original_max_positions / (turns * 2 * math.pi)
        return size * math.log(wavelength) / (2 * math.log(config.rotary_base))

    # Pairs up to `low` make at least beta_fast turns: the model has seen every angle of them, so they are kept. Pairs
    # from `high` on make at most beta_slow turns: a longer context would bring unseen angles, so they are stretched.
    low, high = pair_with_turns(config.rope_beta_fast), pair_with_turns(config.rope_beta_slow)
    if config.yarn_correction_range_round_to_int:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    stretched = ((torch.arange(size // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return frequencies / config.rope_scaling_factor * stretched + frequencies * (1 - stretched)
