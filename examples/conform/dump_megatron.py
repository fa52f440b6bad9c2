"""Dump of one step of Megatron-LM (megatron-core), in any layout, for `megatronish conform --from megatron`.

    dump(model, "dump", args=get_args(), tokens=tokens, labels=labels, loss_mask=loss_mask, loss=loss)

All ranks call it, after `finalize_model_grads` and before the optimizer's step, with the whole global batch: tokens,
labels and loss_mask [B, S]. `model` is this rank's chunk, and `args` those of Megatron's command line.
"""

import json
from argparse import Namespace
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import __version__, dist_checkpointing
from megatron.core.models.gpt import GPTModel
from safetensors.torch import save_file
from torch import Tensor


def dump(
    model: GPTModel,
    folder: str | Path,
    *,
    args: Namespace,
    tokens: Tensor,
    labels: Tensor,
    loss_mask: Tensor,
    loss: float | None = None,
) -> None:
    """Write the batch, and a torch_dist checkpoint in which the place of each weight has its gradient."""
    folder = Path(folder)
    into = folder / "gradients" / "iter_0000001"
    into.mkdir(parents=True, exist_ok=True)
    if dist.get_rank() == 0:
        rows = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask}
        save_file({name: row.cpu().contiguous() for name, row in rows.items()}, folder / "batch.safetensors")
        (folder / "gradients" / "latest_checkpointed_iteration.txt").write_text("1")
        sizes = (args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size)
        about = {"trainer": f"megatron-core {__version__}", "layout": "tp {} pp {} cp {}".format(*sizes)}
        (folder / "dump.json").write_text(json.dumps(about if loss is None else {**about, "loss": float(loss)}))
    dist.barrier()
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            gradient = getattr(parameter, "main_grad", parameter.grad)
            parameter.copy_(torch.zeros_like(parameter) if gradient is None else gradient)
        state = {"args": args, "checkpoint_version": 3.0, "iteration": 1, "model": model.sharded_state_dict()}
        dist_checkpointing.save(state, str(into))
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            parameter.copy_(weight)
