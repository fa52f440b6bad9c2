"""Section [model] of a config: the architecture, under Megatron-LM's flag names. Derived sizes are properties.

Which layers have experts or a window is a pattern in Megatron-LM's notation (layer_pattern.py).
"""

import math
from dataclasses import dataclass, replace
from typing import Annotated, Any

from megatronish.config.layer_pattern import has_experts, read_marks
from megatronish.config.marks import TRAINING_ONLY, at_least, at_most
from megatronish.config.sections.block import BlockOptions, NormPlacement
from megatronish.config.sections.dense import DenseOptions
from megatronish.config.sections.experts import ExpertOptions
from megatronish.config.sections.latent import LatentOptions
from megatronish.config.sections.pattern import PatternOptions
from megatronish.config.sections.width import WidthOptions

UNIT_ROUNDING = 1e-12
"""What a power of a size and the inverse power leave of 1 in float64."""


@dataclass(frozen=True)
class PredictionOptions:
    """Multi-token prediction (MTP) of DeepSeek-V3 (arXiv:2412.19437, section 2.2), in training alone."""

    mtp_num_layers: Annotated[int | None, at_least(0), at_most(100), TRAINING_ONLY] = None
    """Layers after the last that predict further tokens in training, layer d the token d + 1 places ahead."""
    mtp_loss_scaling_factor: Annotated[float, at_least(0), TRAINING_ONLY] = 0.1
    """Weight of the mean of their losses in what is trained on."""

    @property
    def num_depths(self) -> int:
        """Layers of multi-token prediction."""
        return self.mtp_num_layers or 0


@dataclass(frozen=True)
class ModelConfig(
    PredictionOptions, ExpertOptions, WidthOptions, PatternOptions, LatentOptions, BlockOptions, DenseOptions
):
    """Architecture of a model: options of every layer, then those of latent and sparse attention, and of experts.

    Layers of multi-token prediction come last, and have the numbers after those of `num_layers`.
    """

    @property
    def num_all_layers(self) -> int:
        """Layers with those of multi-token prediction."""
        return self.num_layers + self.num_depths

    @property
    def embeds_at_end(self) -> bool:
        """Whether the stage that ends the model has a copy of the table of words, to multiply by or to look up in."""
        return self.tied or self.num_depths > 0

    @property
    def head_size(self) -> int:
        """Size H of one head; of latent attention, of its query and its key."""
        if self.multi_latent_attention:
            return self.qk_head_dim + self.qk_pos_emb_head_dim
        return super().head_size

    @property
    def rotary_size(self) -> int:
        """Features of a head that RoPE turns, in pairs."""
        if self.multi_latent_attention:
            return self.qk_pos_emb_head_dim
        return self.head_size if self.rope_scaling == "proportional" else int(self.head_size * self.rotary_percent)

    @property
    def latent_epsilon(self) -> float:
        """Added under the root in the norms of latents."""
        return self.norm_epsilon if self.latent_norm_epsilon is None else self.latent_norm_epsilon

    def yarn_growth(self, mscale: float) -> float:
        """0.1 mscale ln(factor) + 1, by which YaRN makes up for scores of a longer context; 1 for other scalings."""
        factor = self.rope_scaling_factor
        return 0.1 * mscale * math.log(factor) + 1.0 if self.rope_scaling == "yarn" and factor > 1 else 1.0

    @property
    def rotary_growths(self) -> tuple[float, float]:
        """Factors of cos and sin in the original context and in longer texts: one of YaRN, and those of LongRoPE.

        LongRoPE's are the root of 1 + ln(factor) / ln(original context) where they are not given.
        """
        factor, original = self.rope_scaling_factor, self.rope_original_max_positions
        if self.rope_scaling == "longrope":
            usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 < original else 1.0
            short, long = (usual if each is None else each for each in (self.rope_short_mscale, self.rope_long_mscale))
            return short, long
        return (self.yarn_growth(self.rope_mscale) / self.yarn_growth(self.rope_mscale_all_dim),) * 2

    def has_small_latents(self, tp: int) -> bool:
        """Whether latents of keys and values are smaller than keys and values of the heads of one of tp ranks."""
        keys_values = 2 * self.num_attention_heads * self.head_size // tp
        return self.multi_latent_attention and self.kv_lora_rank + self.qk_pos_emb_head_dim < keys_values

    @property
    def short_context(self) -> int | None:
        """Tokens of the longest text that LongRoPE turns by its short factors; None for another RoPE."""
        return self.rope_original_max_positions if self.rope_scaling == "longrope" else None

    @property
    def placement(self) -> NormPlacement:
        """Where a layer has norms."""
        return "post" if self.model_type == "bert" else self.norm_placement

    @property
    def score_factor(self) -> float | None:
        """Factor of the queries, whose scores are divided by the root of the size of a head; None if it is 1."""
        scale = 1.0 if self.softmax_scale is None else self.softmax_scale * self.head_size**0.5
        factor = scale * self.yarn_growth(self.rope_mscale_all_dim) ** 2
        return None if abs(factor - 1) < UNIT_ROUNDING else factor

    @property
    def width_mult(self) -> float:
        """How many times wider than the base model it is (w of muP); 1 without muP."""
        if not self.use_mup:
            return 1.0
        base = self.mup_base_hidden_size
        return self.mup_width_mult if base is None else self.hidden_size / base

    @property
    def hidden_std(self) -> float:
        """Standard deviation of the initial weights of the matrices in layers."""
        return self.init_method_std / math.sqrt(self.width_mult)

    @property
    def output_std(self) -> float:
        """That of the matrices whose output is added to the residual stream."""
        # They start smaller, so that their sum over the depth does not grow (Radford et al. 2019).
        return self.hidden_std / math.sqrt(2 * self.num_layers)

    @property
    def factors_of_width(self) -> dict[str, float]:
        """Values that muP gives the factors of a GPT, by field; none without muP."""
        if not self.use_mup or self.model_type != "gpt":
            return {}
        of_scores = 1.0 if self.mup_base_head_dim is None else math.sqrt(self.mup_base_head_dim)
        return {
            "embedding_multiplier": self.mup_embedding_mult,
            "logits_multiplier": self.mup_output_mult / self.width_mult,
            "softmax_scale": of_scores / math.pow(self.head_size, self.mup_attn_scale_power),
        }

    @property
    def written_out(self) -> "ModelConfig":
        """The same model with the factors of muP in their fields, where they are not given. Twice is as once."""
        factors: dict[str, Any] = self.factors_of_width
        given = {name for name in factors if getattr(self, name) != getattr(type(self), name)}
        return replace(self, **{name: value for name, value in factors.items() if name not in given})

    @property
    def has_window_rotation(self) -> bool:
        """Whether RoPE turns by other angles in layers with the window or pattern than in those without."""
        base = self.window_rotary_base
        is_other = base is not None and (base != self.rotary_base or self.rope_scaling != "none")
        return is_other and any(map(all, zip(self.windowed_layers, self.rotated_layers, strict=True)))

    @property
    def windowed_layers(self) -> tuple[bool, ...]:
        """Whether each layer has the sliding window, or the pattern; UserError for a skip frequency that is none."""
        has_any = self.window_size is not None or self.attention_pattern != "none"
        if not has_any or self.window_attn_skip_freq is None:
            return (has_any,) * self.num_layers
        return read_marks(
            "window_attn_skip_freq", self.window_attn_skip_freq, num_layers=self.num_layers, every_nth=False
        )

    @property
    def expert_layers(self) -> tuple[bool, ...]:
        """Whether each layer has experts."""
        return tuple(
            self.num_experts is not None and has_experts(self.moe_layer_freq, n) for n in range(self.num_layers)
        )

    @property
    def expert_ffn_size(self) -> int:
        """Inner width of one expert."""
        return self.moe_ffn_hidden_size or self.ffn_size

    @property
    def scores_per_group(self) -> int | None:
        """Best scores of a group of experts that add up to the group's; None without groups."""
        if self.moe_router_num_groups is None or self.moe_router_group_topk is None:
            return None
        return self.moe_router_scores_per_group or self.moe_router_topk // self.moe_router_group_topk
