"""Table of what fine-tuning takes on a GPU.

`python -m benchmarks.finetuning_table` prints that of the docs. Each row is the forecast that a run of
this shape prints before it starts (memory.py), and which GPUs hold it.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from megatronish.config.config import Config
from megatronish.config.sections.finetuning import AdapterConfig
from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.parallel import ParallelConfig
from megatronish.config.sections.training import RecomputeConfig, TrainingConfig
from megatronish.estimate.costs.memory import expected_memory
from megatronish.estimate.costs.memory_table import Memory
from megatronish.parallel.schedules.live_activations import StageLoad, StagePlan

GIB = 2**30
GPU_SIZES = (24, 80)
NOT_COUNTED = 2 * GIB  # of the allocator and the libraries of the device, at most
VOCAB_SIZE = 128_256

_LLAMA = ModelConfig(
    num_attention_heads=32,
    group_query_attention=True,
    num_query_groups=8,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    disable_bias_linear=True,
    attention_dropout=0.0,
    hidden_dropout=0.0,
)
_UNTIED = replace(_LLAMA, untie_embeddings_and_output_weights=True)
SHAPES = {
    "Llama 3.2 1B": replace(_LLAMA, num_layers=16, hidden_size=2048, ffn_hidden_size=8192),
    "Llama 3.1 8B": replace(_UNTIED, num_layers=32, hidden_size=4096, ffn_hidden_size=14336),
    "Llama 3.1 70B": replace(_UNTIED, num_layers=80, hidden_size=8192, ffn_hidden_size=28672, num_attention_heads=64),
}
LORA = AdapterConfig(adapter_type="lora")
WAYS = {
    "all weights": AdapterConfig(),
    "LoRA": LORA,
    "QLoRA": replace(LORA, quantize_base="nf4"),
}
NUM_GPUS = {"all weights": (1, 8, 64), "LoRA": (1, 8), "QLoRA": (1, 8)}


class TableRow(NamedTuple):
    """A model, a way to tune it, GPUs that share it by ZeRO-3 (one shares nothing), and the forecast of each GPU."""

    model: str
    way: str
    num_gpus: int
    memory: Memory

    def fits(self, size: int) -> bool:
        """Whether a GPU of so many GiB holds it, and what the forecast does not count."""
        return self.memory.total + NOT_COUNTED <= size * GIB


def config_of(model: ModelConfig, adapter: AdapterConfig, num_gpus: int) -> Config:
    """bf16, one sequence of 2,048 tokens, AdamW, full recomputation; several GPUs by ZeRO-3."""
    return Config(
        model=model,
        parallel=ParallelConfig(data_parallel_size=num_gpus, zero_stage=3 if num_gpus > 1 else 0),
        recompute=RecomputeConfig("full"),
        training=TrainingConfig(seq_length=2048, micro_batch_size=1, bf16=True),
        adapter=adapter,
    )


def rows() -> Iterator[TableRow]:
    """Every model by every way, on each number of GPUs."""
    for name, model in SHAPES.items():
        plan = StagePlan("1f1b", num_stages=1, num_chunks=1, num_microbatches=1, stage=0)
        whole = StageLoad((range(model.num_layers),), is_first=True, is_last=True, plan=plan)
        for way, adapter in WAYS.items():
            for num_gpus in NUM_GPUS[way]:
                config = config_of(model, adapter, num_gpus)
                (memory,) = expected_memory(config, [whole], vocab_size=VOCAB_SIZE)
                yield TableRow(name, way, num_gpus, memory)


def finetuning_table() -> str:
    """The table in Markdown, in GiB a GPU."""
    head = ("model", "what learns", "GPUs", "weights", "gradients", "optimizer", "activations", "temporary", "total")
    lines = [[*head, "fits in"], ["---"] * (len(head) + 1)]
    for row in rows():
        memory = row.memory
        sizes = (memory.parameters, memory.gradients, memory.optimizer, memory.activations + memory.logits)
        cells = [f"{size / GIB:.1f}" for size in (*sizes, memory.temporary, memory.total)]
        fitting = [f"{size} GB" for size in GPU_SIZES if row.fits(size)]
        lines.append([row.model, row.way, str(row.num_gpus), *cells, fitting[0] if fitting else "neither"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(finetuning_table())
