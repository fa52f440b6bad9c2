"""Training of a transformer block of your own on four local ranks, dp 2 x tp 2, with megatronish as a library.

    python examples/custom_model.py

The block is GPT-J's: attention and MLP read the same norm, and both are added to the residual stream. It knows nothing
of ranks: it hands `tp` and `core` to the layers that it is built of. Other sizes in `PARALLEL` train the same model.
Next to the block is its cost, from which parameters, FLOPs and memory are computed.

What follows is all that a training run is made of: a block, a config, a mesh, an engine, micro-batches, steps. The same
block as a plug-in of pretrain_gpt.py, with checkpoints, logs and all the rest: examples/plugins/parallel_block.py.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from megatronish.config.config import Config
from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.optimizer import OptimizerConfig
from megatronish.config.sections.parallel import ParallelConfig
from megatronish.config.sections.training import TrainingConfig
from megatronish.data.loader import BatchShare, Collator, micro_batches
from megatronish.data.mock import MockSamples
from megatronish.engine.build import build_engine
from megatronish.estimate.costs.memory import expected_memory
from megatronish.estimate.costs.memory_table import format_bytes
from megatronish.estimate.costs.parameters import num_parameters
from megatronish.launch.local import launch
from megatronish.launch.place import Place
from megatronish.layers.linear import ColumnParallelLinear, RowParallelLinear
from megatronish.layers.norm import Norm
from megatronish.model.attention import Attention, CoreAttention
from megatronish.model.context import Context
from megatronish.parallel.mesh import Mesh, TensorParallel, leave
from megatronish.parallel.stages import Stages
from megatronish.plugins import register_block
from megatronish.specs.costs import Count, LayerCost, LinearShape, NormShape
from megatronish.specs.flops import model_flops_per_token
from megatronish.specs.layers import LayerSpec

# The config, by sections, whose fields are those of the flags: how many ranks, which model, how large a batch is.
PARALLEL = ParallelConfig(data_parallel_size=2, tensor_model_parallel_size=2)
MODEL = ModelConfig(
    block="gpt-j",
    num_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
TRAINING = TrainingConfig(seq_length=64, micro_batch_size=8)
CONFIG = Config(model=MODEL, parallel=PARALLEL, training=TRAINING, optimizer=OptimizerConfig())
VOCAB_SIZE, GLOBAL_BATCH_SIZE, NUM_STEPS = 128, 16, 50


class ParallelBlock(nn.Module):
    """[S, B, D] -> [S, B, D]: x + attention(norm(x)) + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, *, layer: int, tp: TensorParallel, core: CoreAttention) -> None:
        """Layers of the library cut their weights over `tp` and state themselves how (`shardings()`)."""
        super().__init__()
        width, std = config.hidden_size, config.init_method_std
        self.norm = Norm(width, kind="RMSNorm", epsilon=config.norm_epsilon, partial=tp.cuts_sequence)
        spec = LayerSpec.of(config).attention
        self.attention = Attention(config, spec, layer=layer, tp=tp, core=core, output_std=std)
        # A pair: the first is cut by its outputs, the second by its inputs, so that one reduction completes the sums.
        linear: dict[str, Any] = {"tp": tp, "bias": False, "init_std": std}
        self.up = ColumnParallelLinear(width, 4 * width, **linear)
        self.down = RowParallelLinear(4 * width, width, **linear)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """[S, B, D] -> [S, B, D]; `context` has what all layers of a forward share: positions, masks, dropout."""
        y = self.norm(x)
        return x + self.attention(y, context) + self.down(F.relu(self.up(y)).square())


@dataclass(frozen=True)
class ParallelSpec(LayerSpec):
    """The same layer as data: what it computes with, as a list of shapes."""

    def cost(self, model: ModelConfig) -> LayerCost:
        """The norm, and an MLP without biases, in addition to attention; what squared ReLU keeps is its input."""
        width = model.hidden_size
        mlp = (LinearShape(width, 4 * width, "column"), LinearShape(4 * width, width, "row"))
        norm = NormShape("RMSNorm", width)
        return LayerCost(linears=mlp, norms=(norm,), kept=Count(split=4 * width)) + self.attention.cost(model)


def parallel_layers(model: ModelConfig) -> Sequence[LayerSpec]:
    """The spec of every layer."""
    layer = LayerSpec.of(model)
    return (ParallelSpec(layer.attention, layer.mlp),) * model.num_layers


register_block("gpt-j", ParallelBlock, layers=parallel_layers)


def costs() -> str:
    """Parameters, FLOPs of a token and memory, from the specs alone."""
    sizes: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "seq_length": TRAINING.seq_length}
    loads = Stages.of(PARALLEL, MODEL, **sizes).loads(1)
    (memory,) = expected_memory(CONFIG, loads, vocab_size=VOCAB_SIZE, device="cpu")
    return (
        f"{num_parameters(MODEL, **sizes):,} parameters, {model_flops_per_token(MODEL, **sizes):,.0f} FLOPs a token, "
        f"{format_bytes(memory.total)} expected on a device"
    )


def train(place: Place) -> int:
    """Training on the rank at `place`; every rank runs this function. Returns its exit status."""
    # The mesh makes the process groups; the engine has this rank's part of model, gradients and optimizer.
    mesh = Mesh.of(PARALLEL, place)
    if mesh.is_main:
        print(costs(), flush=True)
    engine = build_engine(CONFIG, mesh, vocab_size=VOCAB_SIZE)
    # Made-up tokens that can be learned. Sample i is the same on every rank that asks for it.
    data = MockSamples(name="training", seq_length=TRAINING.seq_length, seed=1, vocab_size=VOCAB_SIZE, eod=0)
    for num_steps_done in range(NUM_STEPS):
        # The part of the global batch that belongs to this data rank, in micro-batches.
        batches = micro_batches(
            data,
            consumed_samples=num_steps_done * GLOBAL_BATCH_SIZE,
            global_batch_size=GLOBAL_BATCH_SIZE,
            share=BatchShare(mesh.dp.rank, mesh.dp.size, TRAINING.micro_batch_size),
            collate=Collator(eod=0),
        )
        # Forward, backward, reduction, clipping, update. The result is the same on every rank.
        result = engine.step(batches, num_steps_done=num_steps_done, learning_rate=3e-3, weight_decay=0.01)
        step = num_steps_done + 1
        if mesh.is_main and (step == 1 or step % 10 == 0):
            print(f"step {step:3} | loss {result.loss:.4f} | grad norm {result.grad_norm:.3f}", flush=True)
    leave()
    return 0


if __name__ == "__main__":
    sys.exit(launch(train, world_size=PARALLEL.layout.world_size))
