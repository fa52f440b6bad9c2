"""Model configs for tests: published models, and small ones with each option."""

from dataclasses import replace

from megatronish.config.config import Config
from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.training import AttentionBackend, TrainingConfig
from megatronish.estimate.costs.layer_memory import LayerMemory

GPT2 = ModelConfig(num_layers=12, hidden_size=768, num_attention_heads=12)
LLAMA3_8B = ModelConfig(
    num_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    group_query_attention=True,
    num_query_groups=8,
    ffn_hidden_size=14336,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    disable_bias_linear=True,
    untie_embeddings_and_output_weights=True,
    attention_dropout=0.0,
    hidden_dropout=0.0,
)
SMALL = ModelConfig(num_layers=4, hidden_size=32, num_attention_heads=4, make_vocab_size_divisible_by=1)
TWO_LAYERS = ModelConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=4,
    position_embedding_type="rope",
    attention_dropout=0.0,
    hidden_dropout=0.0,
    init_method_std=0.2,
    make_vocab_size_divisible_by=4,
)
"""A model of planted mistakes, small, with weights so large that each mistake shows."""
VARIANTS = {
    "gpt2": SMALL,
    "llama": replace(
        SMALL,
        position_embedding_type="rope",
        normalization="RMSNorm",
        swiglu=True,
        disable_bias_linear=True,
        untie_embeddings_and_output_weights=True,
        num_query_groups=2,
    ),
    "llama with biases of attention": replace(
        SMALL, normalization="RMSNorm", disable_bias_linear=True, add_attention_bias=True, swiglu=True
    ),
    "qwen2": replace(SMALL, normalization="RMSNorm", disable_bias_linear=True, add_qkv_bias=True, swiglu=True),
    "qwen3": replace(SMALL, normalization="RMSNorm", disable_bias_linear=True, qk_layernorm=True, kv_channels=16),
    "swiglu with biases": replace(SMALL, swiglu=True, qk_layernorm=True, ffn_hidden_size=40),
    "more positions": replace(SMALL, max_position_embeddings=64, apply_layernorm_1p=True),
    "no positions": replace(SMALL, position_embedding_type="none", group_query_attention=True),
}


def bytes_per_score(model: ModelConfig, backend: AttentionBackend, element_bytes: int) -> int:
    """What attention of such a model keeps of each query with each key."""
    training = TrainingConfig(bf16=element_bytes == 2, attention_backend=backend)
    memory = LayerMemory(Config(model=model, training=training), vocab_size=64)
    return memory.usual_attention.bytes_per_score(memory.run(0))
