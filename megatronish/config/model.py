"""Which model is trained? The architecture, under Megatron-LM's flag names; what can be derived is a property."""

from dataclasses import dataclass
from typing import Literal

Activation = Literal["gelu", "gelu_tanh", "swiglu", "squared_relu"]
"""Nonlinearity of an MLP; swiglu is gated, gelu_tanh is GELU in its tanh form."""


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of a GPT. Sizes of 0 mean "not given"; None means "derived from the others"."""

    num_layers: int = 0
    """Transformer layers in all."""
    hidden_size: int = 0
    """Width D of the residual stream."""
    num_attention_heads: int = 0
    """Query heads N."""
    ffn_hidden_size: int | None = None
    """Inner width F of the MLP. Derived: 4 D, with --swiglu 8/3 D rounded down to a multiple of 64."""
    kv_channels: int | None = None
    """Size H of one head. Derived: D / N."""
    group_query_attention: bool = False
    """Query heads share key/value heads, --num-query-groups of them."""
    num_query_groups: int | None = None
    """Key/value heads K. Derived: N, or 1 with --group-query-attention."""
    max_position_embeddings: int | None = None
    """Rows of the learned position table. Derived: the sequence length."""
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "learned_absolute"
    """How positions enter the model."""
    rotary_base: float = 10000.0
    """Base of RoPE's wavelengths."""
    rotary_percent: float = 1.0
    """Part of each head that RoPE turns."""
    rotary_interleaved: bool = False
    """RoPE turns neighbouring pairs instead of the two halves of a head."""
    rope_scaling_type: Literal["none", "linear", "llama3", "yarn"] = "none"
    """How RoPE is stretched to longer contexts. Megatron's --use-rope-scaling is llama3."""
    rope_scaling_factor: float = 8.0
    """How many times longer the stretched context is."""
    rope_original_max_positions: int = 8192
    """Context length the model had before stretching (llama3, yarn)."""
    rope_low_freq_factor: float = 1.0
    """llama3: wavelengths longer than the original context / this are fully stretched."""
    rope_high_freq_factor: float = 4.0
    """llama3: wavelengths shorter than the original context / this are left alone."""
    rope_beta_fast: float = 32.0
    """yarn: turns over the original context above which a wavelength is left alone."""
    rope_beta_slow: float = 1.0
    """yarn: turns over the original context below which a wavelength is fully stretched."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Which norm."""
    norm_epsilon: float = 1e-5
    """Added to the variance under the root."""
    apply_layernorm_1p: bool = False
    """Norm weights are stored as w - 1 (so that weight decay and zero initialisation pull towards 1)."""
    swiglu: bool = False
    """Gated MLP: silu(gate) * up."""
    squared_relu: bool = False
    """MLP activation relu(x)^2."""
    openai_gelu: bool = False
    """GELU in its tanh form (GPT-2's) instead of the exact one."""
    disable_bias_linear: bool = False
    """Linear layers carry no bias."""
    add_qkv_bias: bool = False
    """A bias on the query/key/value projection even with --disable-bias-linear (Qwen2)."""
    qk_layernorm: bool = False
    """Normalise each head's queries and keys before attention (Qwen3)."""
    window_size: int | None = None
    """Sliding window: a token sees itself and the window_size - 1 tokens before it (Mistral)."""
    untie_embeddings_and_output_weights: bool = False
    """The output layer has a weight of its own."""
    attention_dropout: float = 0.1
    """Dropout of attention probabilities."""
    hidden_dropout: float = 0.1
    """Dropout of each sublayer's output and of the embedding."""
    init_method_std: float = 0.02
    """Standard deviation of the initial weights; residual outputs get std / sqrt(2 num_layers)."""
    make_vocab_size_divisible_by: int = 128
    """The padded vocabulary is a multiple of this times the tensor-parallel size."""

    @property
    def head_size(self) -> int:
        """H."""
        return self.kv_channels if self.kv_channels is not None else self.hidden_size // self.num_attention_heads

    @property
    def num_kv_heads(self) -> int:
        """K."""
        if self.num_query_groups is not None:
            return self.num_query_groups
        return 1 if self.group_query_attention else self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        """F, the width of one of the two halves for a gated MLP."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        if self.swiglu:
            return int(4 * self.hidden_size * 2 / 3 / 64) * 64
        return 4 * self.hidden_size

    @property
    def activation(self) -> Activation:
        """Nonlinearity of the MLP, as --swiglu, --squared-relu and --openai-gelu say together."""
        if self.swiglu:
            return "swiglu"
        if self.squared_relu:
            return "squared_relu"
        return "gelu_tanh" if self.openai_gelu else "gelu"

    @property
    def linear_bias(self) -> bool:
        """Whether linear layers carry a bias."""
        return not self.disable_bias_linear

    @property
    def qkv_bias(self) -> bool:
        """Whether the query/key/value projection carries a bias."""
        return self.linear_bias or self.add_qkv_bias

    @property
    def tied(self) -> bool:
        """Whether the output layer shares the embedding's weight."""
        return not self.untie_embeddings_and_output_weights

    @property
    def rope_scaling(self) -> Literal["none", "linear", "llama3", "yarn"]:
        """The scaling variant, "none" where positions are not RoPE."""
        return self.rope_scaling_type if self.position_embedding_type == "rope" else "none"

    def padded_vocab_size(self, vocab_size: int, tensor_model_parallel_size: int) -> int:
        """The true vocabulary rounded up so that every tensor-parallel rank holds equally many rows."""
        multiple = self.make_vocab_size_divisible_by * tensor_model_parallel_size
        return -(-vocab_size // multiple) * multiple
