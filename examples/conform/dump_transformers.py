"""Dump of one step of a transformers model, for `megatronish conform`.

    loss = model(**batch).loss
    loss.backward()
    dump(model, "dump", tokens=batch["input_ids"], labels=shifted_labels, loss=loss)

`labels` are what each position predicts (so shifted by one against transformers' own), -100 where the loss does not
count; without them each token predicts the next one. Call it before the optimizer's step and before clipping.
"""

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor


def dump(
    model: transformers.PreTrainedModel,
    folder: str | Path,
    *,
    tokens: Tensor,
    labels: Tensor | None = None,
    loss: Tensor | None = None,
    layout: str = "one process",
) -> None:
    """Write the batch, and a checkpoint in which the place of each weight has its gradient."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rows = {"tokens": tokens} if labels is None else {"tokens": tokens, "labels": labels}
    save_file({name: row.cpu().contiguous() for name, row in rows.items()}, folder / "batch.safetensors")
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        model.save_pretrained(folder / "gradients")  # its own names, whatever the version
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            parameter.copy_(weight)
    about = {"trainer": f"transformers {transformers.__version__}", "layout": layout}
    (folder / "dump.json").write_text(json.dumps(about if loss is None else {**about, "loss": float(loss)}))
