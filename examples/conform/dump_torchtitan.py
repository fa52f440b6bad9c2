"""Dump of one step of torchtitan, in any layout of DTensors, for `megatronish conform`.

    dump(trainer.model_parts, "dump", adapter=sd_adapter, config="assets/hf/config.json", tokens=tokens, labels=labels)

All ranks call it after the backward and before clipping. `adapter` is the model's StateDictAdapter, which gives
Hugging Face's names; `config` is the config.json of the model there.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def dump(
    parts: Sequence[nn.Module],
    folder: str | Path,
    *,
    adapter: Any,
    config: str | Path,
    tokens: Tensor,
    labels: Tensor,
    loss: float | None = None,
    layout: str = "",
) -> None:
    """Write the batch, and a folder of Hugging Face in which the place of each weight has its gradient."""
    gradients = {}
    for part in parts:
        for name, parameter in part.named_parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient  # a collective
            gradients[name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")] = whole
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    folder = Path(folder)
    (folder / "gradients").mkdir(parents=True, exist_ok=True)
    rows = {"tokens": tokens, "labels": labels}
    save_file({name: row.cpu().contiguous() for name, row in rows.items()}, folder / "batch.safetensors")
    named = {name: each.cpu().contiguous() for name, each in adapter.to_hf(gradients).items()}
    save_file(named, folder / "gradients" / "model.safetensors")
    shutil.copy(config, folder / "gradients" / "config.json")
    about = {"trainer": "torchtitan", "layout": layout}
    (folder / "dump.json").write_text(json.dumps(about if loss is None else {**about, "loss": float(loss)}))
