"""How many bytes will a device hold? An estimate before any is allocated.

Model state is exact: in fp32 a parameter takes 4 bytes, its gradient 4 and Adam 8, 16 in all; with bf16 it takes 2,
a gradient in fp32 4, master weight and Adam 12, 18 in all. Activations follow Korthikanti et al. 2022
(arXiv:2205.05198, section 4), with flash attention: 34 s b h bytes a layer for a GPT in bf16, of which tensor
parallelism splits 24 and sequence parallelism the rest. Not counted: buffers of communication, what one operation
needs while it runs, and what the allocator and the device's own libraries keep (on CUDA, 1 to 2 GiB).
"""

from typing import Literal, NamedTuple

from megatronish.config.model import ModelConfig
from megatronish.flops import Parameters, parameters_of_stage
from megatronish.mesh.layout import Layout


class Memory(NamedTuple):
    """Bytes on one device."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)


def expected_memory(
    model: ModelConfig,
    *,
    vocab_size: int,
    seq_length: int,
    micro_batch_size: int,
    num_microbatches: int,
    layout: Layout,
    sequence_parallel: bool = False,
    bf16: bool = False,
    optimizer: Literal["adam", "sgd"] = "adam",
    schedule: Literal["gpipe", "1f1b"] = "1f1b",
) -> list[Memory]:
    """Bytes on a device of each pipeline stage. `num_microbatches` is that of one rank's step."""
    num_layers = model.num_layers // layout.pp
    padded_vocab_size = model.padded_vocab_size(vocab_size, layout.tp)
    tokens = seq_length * micro_batch_size // layout.cp
    element_bytes = 2 if bf16 else 4
    whole_parts = layout.tp if sequence_parallel else 1
    layer_bytes = activation_bytes_per_token(
        model, seq_length=seq_length, element_bytes=element_bytes, tp=layout.tp, sequence_parallel=sequence_parallel
    )
    expected = []
    for stage in range(layout.pp):
        is_first, is_last = stage == 0, stage == layout.pp - 1
        held = parameters_of_stage(
            model,
            vocab_size=padded_vocab_size,
            seq_length=seq_length,
            num_layers=num_layers,
            is_first=is_first,
            is_last=is_last,
        )
        live = num_microbatches if schedule == "gpipe" else min(layout.pp - stage, num_microbatches)
        # The loss keeps exponentials in fp32, in place of the logits; bf16 logits stand beside them for a moment.
        logits = (4 * live + (2 if bf16 else 0)) * padded_vocab_size // layout.tp if is_last else 0
        # Inputs of the final norm and of the output layer.
        head = 2 * model.hidden_size * element_bytes // whole_parts if is_last else 0
        expected.append(
            _model_state(held, tp=layout.tp, bf16=bf16, optimizer=optimizer)._replace(
                activations=tokens * live * (num_layers * layer_bytes + head), logits=tokens * logits
            )
        )
    return expected


def activation_bytes_per_token(
    model: ModelConfig, *, seq_length: int, element_bytes: int, tp: int, sequence_parallel: bool
) -> int:
    """What one layer keeps of each token for its backward."""
    hidden, heads, kv_heads, size = model.hidden_size, model.num_attention_heads, model.num_kv_heads, model.head_size
    # Inputs of two norms and two linear layers; two dropout masks of a byte an element.
    whole = 4 * hidden * element_bytes + (2 * hidden if model.hidden_dropout else 0)
    # Queries, keys, values and attention's output; then the MLP's features before and after the nonlinearity, and,
    # where it is gated, gate, activated gate, up and their product.
    split = (2 * heads + 2 * kv_heads) * size * element_bytes
    split += model.ffn_size * (4 if model.swiglu else 2) * element_bytes
    if model.qk_layernorm:
        split += (heads + kv_heads) * size * element_bytes
    if model.attention_dropout:  # probabilities in fp32, their mask, and what is left of them
        split += heads * seq_length * (4 + 1 + element_bytes)
    return split // tp + whole // (tp if sequence_parallel else 1)


def _model_state(held: Parameters, *, tp: int, bf16: bool, optimizer: Literal["adam", "sgd"]) -> Memory:
    """Parameters, gradients and optimizer of one rank."""
    count = held.per_rank(tp)
    moments = 8 if optimizer == "adam" else 4
    return Memory(
        parameters=count * (2 if bf16 else 4),
        gradients=count * 4,
        optimizer=count * (moments + (4 if bf16 else 0)),
        activations=0,
        logits=0,
    )


def format_bytes(size: float) -> str:
    """1536 -> `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.{0 if unit == 'B' else 1}f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def memory_table(stages: list[Memory]) -> str:
    """A row for each stage, a column for each kind of bytes."""
    header = ["", *Memory._fields, "total"]
    rows = [[f"stage {i}", *map(format_bytes, memory), format_bytes(memory.total)] for i, memory in enumerate(stages)]
    return "\n".join("".join(f"{cell:>12}" for cell in row).rstrip() for row in [header, *rows])
