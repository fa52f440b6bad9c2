"""Options of a transformer layer in section [model]: where it has norms, what they learn, and factors and caps.

They are what models since 2021 differ in: Gemma, OLMo, GPT-NeoX, Phi, Cohere, Granite and others.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from megatronish.config.marks import at_least, at_most, greater_than

NormPlacement = Literal["pre", "post", "output", "sandwich", "parallel", "parallel_norms"]
"""Where a layer has norms, with the sublayers A (attention) and M (MLP):

pre: x += A(norm(x)), then x += M(norm(x)). post, of a BERT: x = norm(x + A(x)), then x = norm(x + M(x)). output (OLMo
2): x += norm(A(x)), then x += norm(M(x)). sandwich (Gemma 2): x += norm(A(norm(x))), then x += norm(M(norm(x))).
parallel (GPT-J): x += A(norm(x)) + M(norm(x)) with one norm. parallel_norms (GPT-NeoX): the same with a norm for each.
"""
NormParameters = Literal["all", "weight", "none"]


@dataclass(frozen=True)
class BlockOptions:
    """Norms of a layer, and numbers by which it differs from a GPT-2 or a Llama."""

    norm_placement: Literal["pre", "output", "sandwich", "parallel", "parallel_norms"] = "pre"
    """Norms of a layer: before each sublayer, after it, both, or attention and MLP side by side on one norm or two."""
    norm_parameters: NormParameters = "all"
    """What norms learn. all: a weight, and LayerNorm a bias; weight: no bias (Cohere); none: nothing (OLMo 1)."""
    embedding_multiplier: Annotated[float, greater_than(0)] = 1.0
    """Factor of the tokens' embeddings, rounded to their type (Gemma: the root of the hidden size; Granite)."""
    residual_multiplier: Annotated[float, greater_than(0)] = 1.0
    """Factor of each sublayer's output before it is added (Granite)."""
    softmax_scale: Annotated[float | None, greater_than(0)] = None
    """Factor of the scores of attention (Granite, Gemma 2). Derived: 1 / the root of the size of a head."""
    logits_multiplier: Annotated[float, greater_than(0)] = 1.0
    """Factor of the logits, before a bias and a cap (Cohere; Granite has its inverse)."""
    attn_logit_softcapping: Annotated[float | None, greater_than(0)] = None
    """Soft cap c of the scores of attention: c tanh(score / c) (Gemma 2). Their softmax is the unfused one."""
    final_logit_softcapping: Annotated[float | None, greater_than(0)] = None
    """Soft cap c of the logits: c tanh(logit / c) (Gemma 2)."""
    add_output_bias: bool = False
    """A bias on the output layer (GPT-J, Phi)."""
    qk_layernorm_by_head: bool = False
    """--qk-layernorm has a weight of its own for each head, and no bias (StableLM, Cohere)."""
    qk_layernorm_1p: bool = False
    """--qk-layernorm stores its weights as w - 1 (Gemma 3)."""
    qk_layernorm_after_rope: bool = False
    """--qk-layernorm normalises queries and keys that RoPE has turned (Hunyuan)."""
    qk_l2_norm: bool = False
    """Queries and keys of layers with RoPE are divided by the root of the mean of their squares (Llama 4)."""
    attn_temperature_scale: Annotated[float | None, greater_than(0)] = None
    """Layers without RoPE: queries at position p times 1 + this ln(1 + floor((p + 1) / the floor)) (Llama 4)."""
    attn_temperature_floor: Annotated[int, at_least(1), at_most(2**31 - 1)] = 8192
    """That floor: positions up to which --attn-temperature-scale changes nothing."""
    position_offset: Annotated[int, at_least(0), at_most(2**31 - 1)] = 0
    """Rows of the learned position table before that of the first position (OPT: 2)."""
