"""megatron-core's GPTModel with its layers without Transformer Engine, in its own schedules, with torch's fused AdamW.

Its code is unmodified, but names the device "cuda" where it makes some tensors: on a CPU those calls are led to the
CPU. Its own optimizers cannot run without a GPU, so clipping and Adam's step are here.
"""

import math
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from benchmarks.contestants.case import (
    MAX_NORM,
    Case,
    Job,
    State,
    UnavailableError,
    count,
    count_over_ranks,
    fused_adamw,
)

NAMES = {
    "embedding.tokens.": "embedding.word_embeddings.",
    "embedding.positions.": "embedding.position_embeddings.",
    "final_norm.": "decoder.final_layernorm.",
    "attention_norm.": "input_layernorm.",
    "mlp_norm.": "pre_mlp_layernorm.",
    "attention.qkv.": "self_attention.linear_qkv.",
    "attention.out.": "self_attention.linear_proj.",
    "mlp.fc1.": "mlp.linear_fc1.",
    "mlp.fc2.": "mlp.linear_fc2.",
}
COLUMN_PARALLEL, ROW_PARALLEL = ("word_embeddings", "linear_qkv", "linear_fc1"), ("linear_proj.w", "linear_fc2.w")


def make_tensors_on_cpu() -> None:
    """Lead what asks for a CUDA device to the CPU."""

    def on_cpu(make: Callable[..., Tensor], *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        return make(*args, device="cpu" if device == "cuda" else device, **kwargs)

    for name in ("empty", "ones", "tensor", "zeros", "arange"):
        setattr(torch, name, partial(on_cpu, getattr(torch, name)))
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    Tensor.cuda = lambda self, *_args, **_kwargs: self  # type: ignore[method-assign]


def their_model(case: Case, job: Job) -> Any:
    """This rank's part of the model."""
    sizes, parts = case.sizes, job.world_size
    config = TransformerConfig(
        num_layers=sizes.num_layers,
        hidden_size=sizes.hidden_size,
        num_attention_heads=sizes.num_heads,
        hidden_dropout=case.dropout,
        attention_dropout=case.dropout,
        tensor_model_parallel_size=parts if case.layout == "tp2" else 1,
        pipeline_model_parallel_size=parts if case.layout == "pp2" else 1,
        pipeline_dtype=torch.float32,
        batch_p2p_comm=False,  # batched sends wait for CUDA
        bias_activation_fusion=False,  # the fused one is GELU in its tanh form
        bias_dropout_fusion=True,
        use_cpu_initialization=True,
        perform_initialization=False,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=sizes.vocab_size,
        max_sequence_length=sizes.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=True,
    )


@torch.no_grad()
def load(model: Any, case: Case, state: State) -> dict[str, int]:
    """Fill in this rank's part of the given weights. Queries, keys and values are next to each other for each head.

    Returns the elements of every whole tensor that this rank has a part of, those included that nothing was given for.
    """
    tp_rank, tp_size = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    first = case.sizes.num_layers // parallel_state.get_pipeline_model_parallel_world_size()
    first *= parallel_state.get_pipeline_model_parallel_rank()
    theirs = dict(model.named_parameters())
    sizes: dict[str, int] = {}
    for given, values in state.items():
        name = given
        for old, new in NAMES.items():
            name = name.replace(old, new)
        if name.startswith("layers."):
            _, number, rest = name.split(".", 2)
            name = f"decoder.layers.{int(number) - first}.{rest}"
        if name == "embedding.word_embeddings.weight" and not model.pre_process:
            name = "output_layer.weight"
        if name not in theirs:
            continue
        if "linear_qkv" in name:
            values = values.unflatten(0, (3, case.sizes.num_heads, -1)).transpose(0, 1).flatten(0, 2)
        is_cut = any(part in name for part in (*COLUMN_PARALLEL, "output_layer", *ROW_PARALLEL))
        sizes[given] = theirs[name].numel() * (tp_size if is_cut else 1)
        if any(part in name for part in (*COLUMN_PARALLEL, "output_layer")):
            values = values.chunk(tp_size, 0)[tp_rank]
        elif any(part in name for part in ROW_PARALLEL):
            values = values.chunk(tp_size, 1)[tp_rank]
        theirs.pop(name).copy_(values)
    return sizes | {name: each.numel() for name, each in theirs.items()}


class MegatronLoop:
    """This rank's part of the model, its optimizer, and one step of training."""

    def __init__(self, job: Job, state: State) -> None:
        self.job = job
        self.model = their_model(job.case, job)
        sizes = load(self.model, job.case, state)
        self.num_parameters = count(self.model) if job.world_size == 1 else count_over_ranks(sizes)
        self.optimizer = fused_adamw(self.model)
        self.run = get_forward_backward_func()
        self.positions = torch.arange(job.case.sizes.seq_length).expand(job.case.micro_batch_size, -1)

    def step(self, tokens: Tensor, labels: Tensor) -> float | None:
        """One update."""
        self.optimizer.zero_grad(set_to_none=True)
        micro_batches = self.job.micro_batches(tokens, labels)
        results = self.run(
            forward_step_func=self._forward,
            data_iterator=iter(micro_batches),
            model=self.model,
            num_microbatches=len(micro_batches),
            seq_length=self.job.case.sizes.seq_length,
            micro_batch_size=self.job.case.micro_batch_size,
        )
        if self.job.case.layout == "pp2" and self.job.world_size > 1:
            dist.all_reduce(self.model.shared_embedding_or_output_weight().grad)
        self._clip()
        self.optimizer.step()
        return float(torch.stack([each["loss"] for each in results]).mean()) if results else None

    def _forward(self, batches: Iterator[tuple[Tensor, Tensor]], model: Any) -> tuple[Tensor, Any]:
        tokens, labels = next(batches)
        output = model(tokens, self.positions, None, labels=labels)
        return output, self._loss

    @staticmethod
    def _loss(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = losses.float().mean()
        return loss, {"loss": loss.detach().clone()}  # the schedule divides the first in place

    @torch.no_grad()
    def _clip(self) -> None:
        # Every element counts once: what all tp ranks hold on the first, the tied embedding on the first stage.
        is_first = parallel_state.get_tensor_model_parallel_rank() == 0
        counted, gradients = [], []
        for name, parameter in self.model.named_parameters():
            gradients.append(parameter.grad)
            is_cut = any(part in name for part in (*COLUMN_PARALLEL, *ROW_PARALLEL))
            if (is_cut or is_first) and name != "output_layer.weight":
                counted.append(parameter.grad)
        square = torch.stack(torch._foreach_norm(counted)).square().sum()
        if self.job.world_size > 1:
            dist.all_reduce(square)
        factor = MAX_NORM / (math.sqrt(square.item()) + 1e-6)
        if factor < 1:
            torch._foreach_mul_(gradients, factor)


def build(job: Job, state: State) -> MegatronLoop:
    """The loop on this rank."""
    if job.case.numbers == "bf16":
        raise UnavailableError("megatron-core's bf16 optimizer makes its tensors on a GPU")
    if job.world_size == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=job.world_size)
    make_tensors_on_cpu()
    layout = job.case.layout if job.world_size > 1 else "one"
    parallel_state.initialize_model_parallel(2 if layout == "tp2" else 1, 2 if layout == "pp2" else 1)
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    return MegatronLoop(job, state)
