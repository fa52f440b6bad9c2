"""Section [model] of a config: the architecture, under Megatron-LM's flag names. Derived sizes are properties.

Which layers have experts or a window is a pattern in Megatron-LM's notation: a number N, or a list such as "[1]*3+[0]".
"""

import ast
import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Annotated, Literal

import tyro

from megatronish.config.marks import REQUIRED, TRAINING_ONLY, NamedIn, at_least, at_most, fraction, greater_than
from megatronish.config.sections.block import BlockOptions, NormPlacement
from megatronish.config.sections.latent import LatentOptions
from megatronish.config.sections.pattern import PatternOptions
from megatronish.core.errors import UserError
from megatronish.core.names import BLOCK_NAMES, in_braces

MOST_LAYERS = 1_000_000
UNIT_ROUNDING = 1e-12
"""What a power of a size and the inverse power leave of 1 in float64."""
LOAD_BALANCING = ("none", "seq_aux_loss", "global_aux_loss")


@dataclass(frozen=True)
class ExpertOptions:
    """Experts in the place of MLPs: how many, how wide, in which layers, and how tokens choose them."""

    num_experts: Annotated[int | None, at_least(1), at_most(32_767)] = None
    """Routed experts E of a layer. Without it all layers are dense."""
    moe_router_topk: Annotated[int, at_least(1), at_most(32_767)] = 2
    """Experts K that each token chooses."""
    moe_ffn_hidden_size: Annotated[int | None, at_least(1), at_most(2**31 - 1)] = None
    """Inner width of one expert. Derived: --ffn-hidden-size."""
    moe_layer_freq: str = "1"
    """Which layers have experts: N, every Nth from the first on; or a list such as ([0]*3+[1]*58), 1 for experts."""
    moe_shared_expert_intermediate_size: Annotated[int | None, at_least(1), at_most(2**31 - 1)] = None
    """Inner width, in all, of experts that every token passes."""
    moe_add_bias_linear: bool = False
    """Biases on the router and on both products of each routed expert, also with --disable-bias-linear (gpt-oss)."""
    moe_shared_expert_gate: bool = False
    """The output of the shared experts is multiplied by a gate, one number a token (Qwen2-MoE)."""
    moe_router_score_function: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    """Scores of the experts from the router's logits. sparsemixer: each among its rivals alone (Phi-3.5-MoE)."""
    moe_sparsemixer_eps: Annotated[float, at_least(0), at_most(1)] = 0.01
    """sparsemixer: rivals of an expert are at most twice this below it, relative to the larger logit."""
    moe_router_pre_softmax: bool = False
    """Softmax over all experts before the choice, instead of over the chosen ones."""
    moe_router_norm_topk_prob: bool = False
    """With --moe-router-pre-softmax: the weights of the chosen experts are divided by their sum (norm_topk_prob)."""
    moe_router_num_groups: Annotated[int | None, at_least(1), at_most(32_767)] = None
    """Groups of experts, of which a token may choose from --moe-router-group-topk."""
    moe_router_group_topk: Annotated[int | None, at_least(1), at_most(32_767)] = None
    """Groups that a token chooses from."""
    moe_router_scores_per_group: Annotated[int | None, at_least(1), at_most(32_767)] = None
    """Best scores of a group that add up to the group's. Derived: --moe-router-topk over --moe-router-group-topk."""
    moe_router_topk_scaling_factor: Annotated[float | None, greater_than(0)] = None
    """Factor of the weights of the chosen experts."""
    moe_apply_probs_on_input: bool = False
    """The weight of a token's one expert multiplies what the expert is given, not what it makes of it (Llama 4)."""
    moe_input_jitter_eps: Annotated[float, at_least(0), at_most(1), TRAINING_ONLY] = 0.0
    """The input of routers is multiplied by random values of 1 - eps to 1 + eps in training; 0: it is not."""
    moe_router_force_load_balancing: Annotated[bool, TRAINING_ONLY] = False
    """For benchmarks alone: tokens go to random experts in training, with the router's weights."""
    moe_expert_capacity_factor: Annotated[float | None, greater_than(0)] = None
    """Most tokens of a sequence that an expert takes, times the mean; later ones are dropped. Derived: no limit."""
    moe_router_enable_expert_bias: bool = False
    """A bias of each expert's score, for the choice alone, which every step moves towards balance (no loss)."""
    moe_router_bias_update_rate: Annotated[float, at_least(0), TRAINING_ONLY] = 1e-3
    """By how much a step moves that bias."""
    moe_router_load_balancing_type: Annotated[Literal["none", "seq_aux_loss", "global_aux_loss"], TRAINING_ONLY] = (
        "seq_aux_loss"
    )
    """Loss that balances the load: of each sequence, or of the whole batch with the choices of the step before."""
    moe_aux_loss_coeff: Annotated[float, at_least(0), TRAINING_ONLY] = 0.0
    """Coefficient of that loss."""
    moe_z_loss_coeff: Annotated[float, at_least(0), TRAINING_ONLY] = 0.0
    """Coefficient of the z-loss, which keeps the router's logits small."""


@lru_cache(maxsize=10_000)  # a search of layouts asks a hundred thousand times
def has_experts(frequency: str, layer: int) -> bool:
    """Whether the layer has experts by --moe-layer-freq; ValueError for text that is neither a number nor a list.

    A list that is too short, which the rules refuse, has none in the layers after it.
    """
    pattern = parse_frequency(frequency)
    return layer % pattern == 0 if isinstance(pattern, int) else layer < len(pattern) and bool(pattern[layer])


def parse_frequency(text: str) -> int | list[int]:
    """ "2" -> 2, "([0]*1+[1]*3)" -> [0, 1, 1, 1]: numbers, lists, + and * alone; ValueError for anything else."""
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text!r} is neither a number nor a list such as ([0]*3+[1]*58)") from error


def _value(node: ast.AST) -> int | list[int]:
    if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) <= MOST_LAYERS:
        return node.value
    if isinstance(node, ast.List):
        return [_number(element) for element in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = _value(node.left), _value(node.right)
        # Measured before it is made: a product of lists could fill the memory.
        lists = [value for value in (left, right) if isinstance(value, list)]
        times = [value for value in (left, right) if isinstance(value, int)]
        if isinstance(node.op, ast.Mult) and lists and times and len(lists[0]) * times[0] > MOST_LAYERS:
            raise ValueError("more layers than a model has")
        return left + right if isinstance(node.op, ast.Add) else left * right  # type: ignore[operator]
    raise SyntaxError("another expression")


def _number(node: ast.AST) -> int:
    value = _value(node)
    if isinstance(value, list):
        raise TypeError("a list in a list")
    return value


Activation = Literal["gelu", "gelu_tanh", "relu", "swiglu", "geglu", "quick_geglu", "squared_relu", "xielu"]
"""Nonlinearity of an MLP; swiglu, geglu and quick_geglu are gated, gelu_tanh is GELU in its tanh form, as in geglu."""

SoftmaxType = Literal["vanilla", "off-by-one", "learnable"]
"""Softmax of attention: over the keys alone, or with a sink, a logit of each head that is zero or learned."""


@dataclass(frozen=True)
class DenseOptions:
    """Options that every layer has. Sizes of 0 mean "not given"; None means "derived from the others"."""

    model_type: Literal["gpt", "bert", "t5"] = "gpt"
    """What the model is: gpt predicts the next token, bert masked ones from both sides, t5 a text from another one."""
    encoder_num_layers: Annotated[int | None, at_least(1), at_most(100_000)] = None
    """t5: layers of the encoder."""
    decoder_num_layers: Annotated[int | None, at_least(1), at_most(100_000)] = None
    """t5: layers of the decoder."""
    encoder_seq_length: Annotated[int | None, at_least(1), at_most(2**31 - 1), TRAINING_ONLY] = None
    """t5: tokens of one sample that the encoder reads."""
    decoder_seq_length: Annotated[int | None, at_least(1), at_most(2**31 - 1), TRAINING_ONLY] = None
    """t5: tokens of one sample that the decoder reads."""
    relative_attention_num_buckets: Annotated[int, at_least(4), at_most(65_536)] = 32
    """t5: distances that the score bias of attention tells apart, longer ones together."""
    relative_attention_max_distance: Annotated[int, at_least(2), at_most(2**31 - 1)] = 128
    """t5: distance from which on all distances have one score bias."""
    num_token_types: Annotated[int, at_least(1), at_most(2**31 - 1)] = 2
    """bert: rows of the table of token types, which tell the first sentence of a pair from the second."""
    bert_no_binary_head: bool = False
    """bert: no pooler and no head that tells whether two sentences are in order."""
    unscaled_logits: bool = False
    """t5: hidden states are not made smaller before an output layer that is tied (T5 1.1 with one table)."""
    num_layers: Annotated[int, REQUIRED, at_least(1), at_most(100_000)] = 0
    """Transformer layers in all. Derived for t5: those of the encoder and of the decoder."""
    hidden_size: Annotated[int, REQUIRED, at_least(1), at_most(2**31 - 1)] = 0
    """Width D of the residual stream."""
    num_attention_heads: Annotated[int, REQUIRED, at_least(1), at_most(2**31 - 1)] = 0
    """Query heads N."""
    ffn_hidden_size: Annotated[int | None, at_least(1), at_most(2**31 - 1)] = None
    """Inner width F of the MLP. Derived: 4 D, with --swiglu 8/3 D rounded down to a multiple of 64."""
    kv_channels: Annotated[int | None, at_least(1), at_most(2**31 - 1)] = None
    """Size H of one head. Derived: D / N."""
    group_query_attention: bool = False
    """Query heads share key/value heads, --num-query-groups of them."""
    num_query_groups: Annotated[int | None, at_least(1), at_most(2**31 - 1)] = None
    """Key/value heads K. Derived: N, or 1 with --group-query-attention."""
    max_position_embeddings: Annotated[int | None, at_least(1), at_most(2**31 - 1)] = None
    """Rows of the learned position table. Derived: the sequence length."""
    position_embedding_type: Literal["learned_absolute", "rope", "alibi", "relative", "none"] = "learned_absolute"
    """How positions enter the model. alibi: scores fall with distance (BLOOM); relative: a learned bias (T5)."""
    rotary_base: Annotated[float, greater_than(0)] = 10000.0
    """Base of RoPE's wavelengths."""
    rotary_percent: Annotated[float, fraction(excluding=0)] = 1.0
    """Part of each head that RoPE turns."""
    rotary_interleaved: bool = False
    """RoPE turns neighbouring pairs instead of the two halves of a head."""
    rope_scaling_type: Literal["none", "linear", "llama3", "yarn", "longrope", "proportional"] = "none"
    """How RoPE is stretched to longer contexts. Megatron's --use-rope-scaling is llama3. proportional: pairs go through
    the whole head, and those beyond --rotary-percent of them do not turn."""
    rope_scaling_factor: Annotated[float, greater_than(0)] = 8.0
    """How many times longer the stretched context is."""
    rope_original_max_positions: Annotated[int, at_least(1), at_most(2**31 - 1)] = 8192
    """Context length the model had before stretching (llama3, yarn, longrope)."""
    rope_low_freq_factor: Annotated[float, greater_than(0)] = 1.0
    """llama3: wavelengths longer than the original context / this are fully stretched."""
    rope_high_freq_factor: Annotated[float, greater_than(0)] = 4.0
    """llama3: wavelengths shorter than the original context / this are left alone."""
    rope_beta_fast: Annotated[float, greater_than(0)] = 32.0
    """yarn: turns over the original context above which a wavelength is left alone."""
    rope_beta_slow: Annotated[float, greater_than(0)] = 1.0
    """yarn: turns over the original context below which a wavelength is fully stretched."""
    yarn_correction_range_round_to_int: bool = True
    """yarn: the range of pairs between both is rounded to whole pairs (not in gpt-oss)."""
    rope_short_factor: tuple[float, ...] = ()
    """longrope: for each pair of a head that RoPE turns, what divides its frequency in the original context."""
    rope_long_factor: tuple[float, ...] = ()
    """longrope: what divides it in longer texts; training counts --seq-length, generation each text so far."""
    rope_short_mscale: Annotated[float | None, greater_than(0)] = None
    """longrope: factor of cos and sin in the original context (PhiMoE). Derived: from factor and original context."""
    rope_long_mscale: Annotated[float | None, greater_than(0)] = None
    """longrope: the same in longer texts."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Which norm."""
    norm_epsilon: Annotated[float, greater_than(0)] = 1e-5
    """Added to the variance under the root."""
    apply_layernorm_1p: bool = False
    """Norm weights are stored as w - 1 (so that weight decay and zero initialisation pull towards 1)."""
    embed_layernorm: bool = False
    """A norm after the word embedding (BLOOM)."""
    block: Annotated[str, NamedIn(BLOCK_NAMES), tyro.conf.arg(metavar=in_braces(BLOCK_NAMES))] = "transformer"
    """What a layer is: attention and an MLP, each on a normalised copy of the residual stream; or a plug-in's."""
    block_args: tuple[str, ...] = ()
    """Options of a plug-in's block: option=value ..."""
    swiglu: bool = False
    """Gated MLP: silu(gate) * up."""
    geglu: bool = False
    """Gated MLP: gelu(gate) * up, GELU in its tanh form (T5 1.1)."""
    quick_geglu: bool = False
    """Gated MLP: gate * sigmoid(1.702 gate) * up (gpt-oss)."""
    glu_linear_offset: Annotated[float, at_least(0)] = 0.0
    """Gated MLP: added to up (gpt-oss: 1)."""
    activation_func_clamp_value: Annotated[float | None, greater_than(0)] = None
    """Gated MLP: gate is at most this, up between minus this and this (gpt-oss: 7)."""
    relu: bool = False
    """MLP activation relu(x) (the first T5)."""
    squared_relu: bool = False
    """MLP activation relu(x)^2."""
    xielu: bool = False
    """MLP activation xIELU, with two numbers that each layer learns (Apertus)."""
    openai_gelu: bool = False
    """GELU in its tanh form (GPT-2's) instead of the exact one."""
    disable_bias_linear: bool = False
    """Linear layers carry no bias."""
    add_qkv_bias: bool = False
    """A bias on the query/key/value projection even with --disable-bias-linear (Qwen2)."""
    add_attention_bias: bool = False
    """Biases on all linear layers of attention even with --disable-bias-linear (a Llama with attention_bias)."""
    add_mlp_bias: bool = False
    """Biases on the linear layers of the MLP even with --disable-bias-linear (a Llama with mlp_bias)."""
    qk_layernorm: bool = False
    """Normalise each head's queries and keys before attention (Qwen3); of latent attention the latents (DeepSeek)."""
    qk_layernorm_across_heads: bool = False
    """--qk-layernorm takes all heads of a token at once (OLMoE)."""
    clip_qkv: Annotated[float | None, greater_than(0)] = None
    """Queries, keys and values are between minus this and this, after their norm and before RoPE (OLMoE)."""
    window_size: Annotated[int | None, at_least(1), at_most(2**31 - 1)] = None
    """Sliding window: a token sees itself and the window_size - 1 tokens before it (Mistral)."""
    window_attn_skip_freq: str | None = None
    """Layers without the window or pattern: N for every N-th, or a list, 1 for layers with it, as "[1]*3+[0]"."""
    window_rotary_base: Annotated[float | None, greater_than(0)] = None
    """RoPE's base in layers with the window or pattern, where it is not stretched (Gemma 3). Derived: as elsewhere."""
    no_rope_freq: str | None = None
    """Layers without RoPE: N for every N-th, or a list with 1 for no RoPE and 0 for RoPE."""
    softmax_type: SoftmaxType = "vanilla"
    """Softmax of attention. off-by-one adds 1 to its denominator, learnable exp of a parameter of each head."""
    untie_embeddings_and_output_weights: bool = False
    """The output layer has a weight of its own."""
    attention_dropout: Annotated[float, fraction(excluding=1), TRAINING_ONLY] = 0.1
    """Dropout of attention probabilities."""
    hidden_dropout: Annotated[float, fraction(excluding=1), TRAINING_ONLY] = 0.1
    """Dropout of each sublayer's output and of the embedding."""
    init_method_std: Annotated[float, greater_than(0), TRAINING_ONLY] = 0.02
    """Standard deviation of the initial weights; residual outputs get std / sqrt(2 num_layers)."""
    make_vocab_size_divisible_by: Annotated[int, at_least(1), at_most(2**31 - 1), TRAINING_ONLY] = 128
    """The padded vocabulary is a multiple of this times the tensor-parallel size."""

    @property
    def head_size(self) -> int:
        """Size H of one head."""
        return self.kv_channels if self.kv_channels is not None else self.hidden_size // self.num_attention_heads

    @property
    def num_kv_heads(self) -> int:
        """Number K of key/value heads."""
        if self.num_query_groups is not None:
            return self.num_query_groups
        return 1 if self.group_query_attention else self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        """Inner width F of the MLP; of a gated MLP, the width of one of its two halves."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        if self.swiglu:
            return int(4 * self.hidden_size * 2 / 3 / 64) * 64
        return 4 * self.hidden_size

    @property
    def activation(self) -> Activation:
        """Nonlinearity of the MLP, as the flag of one of them says, or --openai-gelu of GELU's form."""
        named: tuple[Activation, ...] = ("swiglu", "geglu", "quick_geglu", "relu", "squared_relu", "xielu")
        for name in named:
            if getattr(self, name):
                return name
        return "gelu_tanh" if self.openai_gelu else "gelu"

    @property
    def is_gated(self) -> bool:
        """Whether the MLP has a gate."""
        return self.swiglu or self.geglu or self.quick_geglu

    @property
    def rotated_layers(self) -> tuple[bool, ...]:
        """Whether each layer has RoPE; UserError for a --no-rope-freq that is no pattern."""
        if self.position_embedding_type != "rope" or self.no_rope_freq is None:
            return (self.position_embedding_type == "rope",) * self.num_layers
        marks = read_marks("no_rope_freq", self.no_rope_freq, num_layers=self.num_layers, every_nth=True)
        return tuple(not without for without in marks)

    @property
    def is_causal(self) -> bool:
        """Whether a token that is predicted sees no token after it."""
        return self.model_type != "bert"

    @property
    def has_encoder(self) -> bool:
        """Whether some layers are an encoder, whose output the others read."""
        return self.model_type == "t5"

    @property
    def encoder_share(self) -> Fraction:
        """Part of a row of tokens that the encoder reads; a half where no lengths are given."""
        encoder, decoder = self.encoder_seq_length, self.decoder_seq_length
        if encoder is None or decoder is None:
            return Fraction(1, 2) if self.has_encoder else Fraction(0)
        return Fraction(encoder, encoder + decoder)

    @property
    def layer_table(self) -> str:
        """The name of the layers in the tables of blocks: --block, but the layers of a T5 are its own."""
        return "t5" if self.has_encoder else self.block

    @property
    def has_binary_head(self) -> bool:
        """Whether the model tells whether two sentences are in order."""
        return self.model_type == "bert" and not self.bert_no_binary_head

    @property
    def linear_bias(self) -> bool:
        """Whether all linear layers carry a bias."""
        return not self.disable_bias_linear

    @property
    def attention_bias(self) -> bool:
        """Whether all linear layers of attention carry a bias, the one after it too."""
        return self.linear_bias or self.add_attention_bias

    @property
    def mlp_bias(self) -> bool:
        """Whether the linear layers of an MLP carry a bias."""
        return self.linear_bias or self.add_mlp_bias

    @property
    def qkv_bias(self) -> bool:
        """Whether the query/key/value projection carries a bias."""
        return self.attention_bias or self.add_qkv_bias

    @property
    def tied(self) -> bool:
        """Whether the output layer shares the embedding's weight."""
        return not self.untie_embeddings_and_output_weights

    @property
    def rope_scaling(self) -> Literal["none", "linear", "llama3", "yarn", "longrope", "proportional"]:
        """Kind of RoPE scaling, "none" without RoPE."""
        return self.rope_scaling_type if self.position_embedding_type == "rope" else "none"

    def padded_vocab_size(self, vocab_size: int, tensor_model_parallel_size: int) -> int:
        """Vocabulary rounded up so that every tensor-parallel rank holds equally many rows."""
        multiple = self.make_vocab_size_divisible_by * tensor_model_parallel_size
        return -(-vocab_size // multiple) * multiple


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
class ModelConfig(PredictionOptions, ExpertOptions, PatternOptions, LatentOptions, BlockOptions, DenseOptions):
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


LONGEST = 100_000
NOTATION = 'a number N for every N-th layer, or a list of 0 and 1 such as "[1]*3+[0]"'


def marked_layers(text: str, *, num_layers: int, every_nth: bool) -> tuple[bool, ...]:
    """Layers that a pattern marks, first layer first; ValueError for a text that is no pattern of so many layers.

    A list marks with 1. A number N marks every N-th layer, or, with `every_nth` false, all layers but those.
    """
    try:
        pattern = _evaluated(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"is no pattern; it must be {NOTATION}") from error
    if isinstance(pattern, int):
        if pattern < 1:
            raise ValueError("must be at least 1")
        return tuple((number % pattern == 0) == every_nth for number in range(1, num_layers + 1))
    if any(mark not in (0, 1) for mark in pattern):
        raise ValueError("must be a list of 0 and 1")
    if len(pattern) != num_layers:
        raise ValueError(f"is a list of {len(pattern)}, and must have one number for each of num_layers={num_layers}")
    return tuple(map(bool, pattern))


def canonical(marks: tuple[bool, ...]) -> str:
    """The list of a pattern, written out."""
    return str([int(mark) for mark in marks])


def read_marks(name: str, text: str, *, num_layers: int, every_nth: bool) -> tuple[bool, ...]:
    """`marked_layers` of the field `name`; UserError for a text that is no pattern."""
    try:
        return marked_layers(text, num_layers=num_layers, every_nth=every_nth)
    except ValueError as error:
        raise UserError(f"{name}={text} {error}") from error


def _evaluated(node: ast.expr) -> int | list[int]:
    """Value of an expression of whole numbers, lists, + and *."""
    match node:
        case ast.Constant(int(value)) if not isinstance(value, bool):
            return value
        case ast.List(items) | ast.Tuple(items):
            values = [_evaluated(item) for item in items]
            if all(isinstance(value, int) for value in values):
                return [value for value in values if isinstance(value, int)]
        case ast.BinOp(left, ast.Add(), right):
            first, second = _evaluated(left), _evaluated(right)
            if isinstance(first, list) and isinstance(second, list):
                return first + second
        case ast.BinOp(left, ast.Mult(), right):
            first, second = _evaluated(left), _evaluated(right)
            if isinstance(first, int):
                first, second = second, first
            if isinstance(first, list) and isinstance(second, int):
                if len(first) * second > LONGEST:
                    raise ValueError(f"is a list of more than {LONGEST}")
                return first * second
    raise ValueError(f"is no pattern; it must be {NOTATION}")
