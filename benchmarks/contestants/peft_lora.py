"""transformers' Llama with SDPA and PEFT's LoRA, in a plain loop with torch's fused AdamW.

Chats are padded to the longest of a micro-batch. Packed, they lie behind one another and positions begin anew with each
of them, from which transformers makes the mask.
"""

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.contestants.case import MAX_NORM, WEIGHT_DECAY
from benchmarks.contestants.chats import IGNORED, LEARNING_RATE, ChatJob, Chats, micro_batches_of, padded


class Peft:
    """The model, its adapter and its optimizer, and one step of training."""

    def __init__(self, job: ChatJob, chats: Chats) -> None:
        self.job, self.chats = job, chats
        folder = Path(job.folder)
        base: Any = AutoModelForCausalLM.from_pretrained(
            folder / "base", attn_implementation="sdpa", dtype=torch.float32
        )
        model: Any = PeftModel.from_pretrained(base, str(folder / "adapter"), is_trainable=True)
        self.model = model.train()
        self.learning = [each for each in model.parameters() if each.requires_grad]
        self.num_parameters = sum(each.numel() for each in self.learning)
        self.optimizer = torch.optim.AdamW(self.learning, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)

    def num_places(self, step: int) -> int:
        """Places of all micro-batches of a step."""
        return sum(inputs["input_ids"].numel() for inputs in self._micro_batches(step))

    def step(self, step: int) -> float | None:
        """One update."""
        self.optimizer.zero_grad(set_to_none=True)
        loss, num_trained = 0.0, self.chats.num_trained(step)
        for inputs in self._micro_batches(step):
            part = self.model(**inputs, num_items_in_batch=num_trained, use_cache=False).loss
            part.backward()
            loss += float(part.item())
        torch.nn.utils.clip_grad_norm_(self.learning, MAX_NORM)
        self.optimizer.step()
        return loss

    def _micro_batches(self, step: int) -> list[dict[str, Tensor]]:
        rows = self.chats.rows_of(step, packs=self.job.packs)
        return [self._inputs(each) for each in micro_batches_of(rows, self.job.case.rows)]

    def _inputs(self, rows: list[list[int]]) -> dict[str, Tensor]:
        """Inputs [B, S] of a micro-batch. The label of a chat's first token, which nothing predicts, is left out."""
        tokens, labels, positions = [], [], []
        for row in rows:
            texts = [self.chats.tokens[chat] for chat in row]
            masks = [self.chats.masks[chat].clone() for chat in row]
            for mask in masks:
                mask[0] = False
            tokens.append(torch.cat(texts))
            labels.append(tokens[-1].masked_fill(~torch.cat(masks), IGNORED))
            positions.append(torch.cat([torch.arange(len(text)) for text in texts]))
        found = {"input_ids": padded(tokens, 0), "labels": padded(labels, IGNORED)}
        if self.job.packs:
            return found | {"position_ids": padded(positions, 0)}
        return found | {"attention_mask": padded([torch.ones_like(row) for row in tokens], 0)}


def build(job: ChatJob, chats: Chats) -> Peft:
    """The loop on one process."""
    return Peft(job, chats)
