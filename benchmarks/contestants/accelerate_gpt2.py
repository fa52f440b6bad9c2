"""transformers' GPT2LMHeadModel with SDPA under accelerate, with torch's fused AdamW."""

from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.contestants.case import MAX_NORM, Case, Job, State, count, fused_adamw

NAMES = {
    "embedding.tokens.": "transformer.wte.",
    "embedding.positions.": "transformer.wpe.",
    "final_norm.": "transformer.ln_f.",
    "attention_norm.": "ln_1.",
    "mlp_norm.": "ln_2.",
    "attention.qkv.": "attn.c_attn.",
    "attention.out.": "attn.c_proj.",
    "mlp.fc1.": "mlp.c_fc.",
    "mlp.fc2.": "mlp.c_proj.",
    "layers.": "transformer.h.",
}


def their_model(case: Case, state: State) -> Any:
    """The model with the given weights; its linear layers keep them transposed."""
    sizes = case.sizes
    config = GPT2Config(
        vocab_size=sizes.vocab_size,
        n_positions=sizes.seq_length,
        n_embd=sizes.hidden_size,
        n_layer=sizes.num_layers,
        n_head=sizes.num_heads,
        activation_function="gelu",
        resid_pdrop=case.dropout,
        embd_pdrop=case.dropout,
        attn_pdrop=case.dropout,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = GPT2LMHeadModel(config).train()
    theirs = dict(model.named_parameters())
    with torch.no_grad():
        for name, values in state.items():
            for old, new in NAMES.items():
                name = name.replace(old, new)
            is_conv = ".c_" in name and values.dim() == 2
            theirs[name].copy_(values.T if is_conv else values)
    return model


class Accelerated:
    """The model and its optimizer, prepared by accelerate, and one step of training."""

    def __init__(self, job: Job, state: State) -> None:
        self.job = job
        self.accelerator: Any = Accelerator(cpu=True, mixed_precision="bf16" if job.case.numbers == "bf16" else "no")
        model = their_model(job.case, state)
        self.num_parameters = count(model)
        self.model, self.optimizer = self.accelerator.prepare(model, fused_adamw(model))

    def step(self, tokens: Tensor, labels: Tensor) -> float | None:
        """One update."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model(input_ids=tokens, labels=labels, shift_labels=labels).loss
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        return float(loss.item())


def build(job: Job, state: State) -> Accelerated:
    """The loop on one process."""
    return Accelerated(job, state)
