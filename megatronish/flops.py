"""How many parameters has a model, how many FLOPs does a token cost, and how many can a device do?

FLOPs are those of matrix products, two for each multiply-add: what everybody counts. A backward is twice a forward.
*Model* FLOPs are what the mathematics asks for, whatever the device does: true vocabulary, nothing computed twice.
MFU is model FLOPs over the peak. *Hardware* FLOPs are what the device carries out: the padded vocabulary, and the
attention scores once more in the backward, because flash attention does not keep them.

Attention is counted for what a causal mask lets through, half of the square (`"causal"`, as the throughput that
Megatron-LM prints), or for the whole square (`"full"`, as the formula of arXiv:2104.04473). A window cuts either.
"""

import re
from typing import Literal, NamedTuple

from megatronish.config.model import ModelConfig

Attention = Literal["causal", "full"]


class ForwardFlops(NamedTuple):
    """FLOPs of one token's forward pass through all layers."""

    linear: int
    """Projections and MLPs."""
    scores: float
    """Queries times keys; probabilities times values are as many."""
    logits: int

    @property
    def total(self) -> float:
        """Of the whole forward pass."""
        return self.linear + 2 * self.scores + self.logits


def forward_flops(
    model: ModelConfig, *, vocab_size: int, seq_length: int, attention: Attention = "causal"
) -> ForwardFlops:
    """FLOPs of the average token of a sequence, forward."""
    hidden, queries = model.hidden_size, model.num_attention_heads * model.head_size
    visible = min(model.window_size or seq_length, seq_length)
    keys = float(visible) if attention == "full" else visible - visible**2 / (2 * seq_length)
    return ForwardFlops(
        linear=2 * model.num_layers * matrices_of_layer(model),
        scores=2 * model.num_layers * queries * keys,
        logits=2 * hidden * vocab_size,
    )


def model_flops_per_token(
    model: ModelConfig, *, vocab_size: int, seq_length: int, attention: Attention = "causal"
) -> float:
    """Forward and backward of one token, for MFU."""
    return 3 * forward_flops(model, vocab_size=vocab_size, seq_length=seq_length, attention=attention).total


def hardware_flops_per_token(
    model: ModelConfig, *, padded_vocab_size: int, seq_length: int, attention: Attention = "causal"
) -> float:
    """Forward and backward of one token as the device carries them out."""
    forward = forward_flops(model, vocab_size=padded_vocab_size, seq_length=seq_length, attention=attention)
    return 3 * forward.total + forward.scores


class Parameters(NamedTuple):
    """A number of parameters, apart for those that tensor parallelism splits and those that every rank holds."""

    split: int = 0
    whole: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.split + self.whole

    def per_rank(self, tp: int) -> int:
        """Held by one of tp ranks."""
        return self.split // tp + self.whole


def num_parameters(model: ModelConfig, *, vocab_size: int, seq_length: int) -> int:
    """Of the whole model, with its true vocabulary."""
    shape = {"vocab_size": vocab_size, "seq_length": seq_length, "num_layers": model.num_layers}
    return parameters_of_stage(model, **shape, is_first=True, is_last=True).total


def parameters_of_stage(
    model: ModelConfig, *, vocab_size: int, seq_length: int, num_layers: int, is_first: bool, is_last: bool
) -> Parameters:
    """Held by a stage of `num_layers` layers. Tied embeddings are held by the last stage, too.

    `vocab_size` is the true or the padded one, as the caller wants to count.
    """
    layer, table = _parameters_of_layer(model), vocab_size * model.hidden_size
    split, whole = num_layers * layer.split, num_layers * layer.whole
    if is_first:
        split += table
        if model.position_embedding_type == "learned_absolute":
            whole += (model.max_position_embeddings or seq_length) * model.hidden_size
    if is_last:
        whole += _norm(model, model.hidden_size)
        if not (is_first and model.tied):
            split += table
    return Parameters(split, whole)


def matrices_of_layer(model: ModelConfig) -> int:
    """Weights of a layer that tokens are multiplied by."""
    return _attention_matrices(model) + _mlp_matrices(model)


def _attention_matrices(model: ModelConfig) -> int:
    """Weights of a layer's projections."""
    return 2 * model.hidden_size * (model.num_attention_heads + model.num_kv_heads) * model.head_size


def _mlp_matrices(model: ModelConfig) -> int:
    """Weights of a layer's MLP: up and down, and the gate."""
    return model.hidden_size * model.ffn_size * (3 if model.swiglu else 2)


def _norm(model: ModelConfig, size: int) -> int:
    """Weight, and LayerNorm's bias."""
    return size * (2 if model.normalization == "LayerNorm" else 1)


def _parameters_of_layer(model: ModelConfig) -> Parameters:
    split = matrices_of_layer(model)
    whole = 2 * _norm(model, model.hidden_size)
    if model.qkv_bias:
        split += (model.num_attention_heads + 2 * model.num_kv_heads) * model.head_size
    if model.linear_bias:
        split += model.ffn_size * (2 if model.swiglu else 1)
        whole += 2 * model.hidden_size
    if model.qk_layernorm:
        whole += 2 * _norm(model, model.head_size)
    return Parameters(split, whole)


class Peak(NamedTuple):
    """Dense TFLOP/s of a device, from its maker's data sheet. `bf16` None: the device has no bf16 units."""

    bf16: float | None
    fp16: float
    fp32: float


# Words of a device's name -> its peak; the first row whose words are all in the name counts, so variants come first.
# Data sheets that print sparse numbers are halved. fp32 is without TF32, which torch does not use unless told.
PEAKS: tuple[tuple[str, Peak | None], ...] = (
    ("laptop", None),  # anything between a third and all of the desktop card
    ("gb200", Peak(2500, 2500, 80)),
    ("b200", Peak(2250, 2250, 75)),
    ("h200 nvl", Peak(835, 835, 60)),
    ("h200", Peak(989, 989, 67)),
    ("gh200", Peak(989, 989, 67)),
    ("h100 pcie", Peak(756, 756, 51)),
    ("h100 nvl", Peak(835, 835, 60)),
    ("h100", Peak(989, 989, 67)),
    ("h800 pcie", Peak(756, 756, 51)),
    ("h800", Peak(989, 989, 67)),
    ("h20", Peak(148, 148, 44)),
    ("a100", Peak(312, 312, 19.5)),
    ("a800", Peak(312, 312, 19.5)),
    ("a40", Peak(149.7, 149.7, 37.4)),
    ("a30", Peak(165, 165, 10.3)),
    ("a10g", Peak(70, 70, 35)),
    ("a10", Peak(125, 125, 31.2)),
    ("a6000", Peak(154.8, 154.8, 38.7)),
    ("6000 ada", Peak(364.2, 364.2, 91.1)),
    ("l40s", Peak(362, 362, 91.6)),
    ("l40", Peak(181, 181, 90.5)),
    ("l4", Peak(121, 121, 30.3)),
    ("5090", Peak(209.5, 209.5, 104.8)),
    ("4090", Peak(165.2, 165.2, 82.6)),
    ("3090 ti", Peak(80, 80, 40)),
    ("3090", Peak(71, 71, 35.6)),
    ("v100 pcie", Peak(None, 112, 14)),
    ("v100", Peak(None, 125, 15.7)),
    ("t4", Peak(None, 65, 8.1)),
    ("mi325x", Peak(1307, 1307, 163.4)),
    ("mi300x", Peak(1307, 1307, 163.4)),
    ("mi250x", Peak(191.5, 191.5, 23.9)),  # of one of its two dies, which is one device to torch
)


def peak_tflops(device_name: str, dtype: Literal["bf16", "fp16", "fp32"]) -> float | None:
    """Peak of a device by the name that torch gives it; None where it is not known."""
    words = set(re.split(r"[^a-z0-9]+", device_name.lower()))
    for name, peak in PEAKS:
        if words.issuperset(name.split()):
            return peak and getattr(peak, dtype)
    return None
