"""litgpt's GPT under Lightning Fabric with torch's fused AdamW, compiled as its own `pretrain` compiles it.

It has rotary embeddings alone, so those are given no channels, and its token embedding adds learned positions.
"""

from typing import Any

import lightning
import torch
from litgpt.config import Config
from litgpt.model import GPT
from litgpt.utils import chunked_cross_entropy
from torch import Tensor, nn

from benchmarks.contestants.case import MAX_NORM, Case, Job, State, UnavailableError, count, fused_adamw

NAMES = {
    "embedding.tokens.weight": "lm_head.weight",
    "embedding.positions.": "transformer.wte.positions.",
    "final_norm.": "transformer.ln_f.",
    "attention_norm.": "norm_1.",
    "mlp_norm.": "norm_2.",
    "attention.qkv.": "attn.qkv.",
    "attention.out.": "attn.proj.",
    "mlp.fc1.": "mlp.fc.",
    "mlp.fc2.": "mlp.proj.",
    "layers.": "transformer.h.",
}


class TokensAndPositions(nn.Module):
    """The two embeddings of a GPT-2; the first is the head's weight."""

    def __init__(self, case: Case, head: nn.Linear) -> None:
        super().__init__()
        self.weight = head.weight
        self.positions = nn.Embedding(case.sizes.seq_length, case.sizes.hidden_size)

    def forward(self, tokens: Tensor) -> Tensor:
        x = nn.functional.embedding(tokens, self.weight)
        return x + self.positions.weight[: tokens.shape[1]]


def their_model(case: Case, state: State) -> Any:
    """The model with the given weights."""
    sizes = case.sizes
    config = Config(
        block_size=sizes.seq_length,
        n_layer=sizes.num_layers,
        n_embd=sizes.hidden_size,
        n_head=sizes.num_heads,
        vocab_size=sizes.vocab_size,
        padded_vocab_size=sizes.vocab_size,
        parallel_residual=False,
        rotary_percentage=0.0,
    )
    model: Any = GPT(config)
    model.transformer.wte = TokensAndPositions(case, model.lm_head)
    theirs = dict(model.named_parameters())
    with torch.no_grad():
        for name, values in state.items():
            for old, new in NAMES.items():
                name = name.replace(old, new)
            theirs[name].copy_(values)
    return model


class LitgptLoop:
    """The model and its optimizer, set up by Fabric, and one step of training."""

    def __init__(self, job: Job, state: State) -> None:
        precision = "bf16-mixed" if job.case.numbers == "bf16" else "32-true"
        self.fabric: Any = lightning.Fabric(accelerator="cpu", devices=1, precision=precision)
        model = their_model(job.case, state)
        self.num_parameters = count(model)
        optimizer = fused_adamw(model)
        self.model = self.fabric.setup(torch.compile(model))
        self.optimizer = self.fabric.setup_optimizers(optimizer)

    def step(self, tokens: Tensor, labels: Tensor) -> float | None:
        """One update."""
        loss = chunked_cross_entropy(self.model(tokens), labels, chunk_size=0)
        self.fabric.backward(loss)
        self.fabric.clip_gradients(self.model, self.optimizer, max_norm=MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.item())


def build(job: Job, state: State) -> LitgptLoop:
    """The loop on one process."""
    if job.case.dropout:
        raise UnavailableError("litgpt has no dropout")
    return LitgptLoop(job, state)
