"""Options that every layer has, and those of embedding and head, in section [model]. Derived sizes are properties."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Literal

import tyro

from megatronish.config.layer_pattern import read_marks
from megatronish.config.marks import REQUIRED, TRAINING_ONLY, NamedIn, at_least, at_most, fraction, greater_than
from megatronish.core.names import BLOCK_NAMES, in_braces

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
