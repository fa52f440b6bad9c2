#!/usr/bin/env python
"""Write text with a trained model: one process, from a checkpoint of any layout."""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from megatronish.errors import UserError
from megatronish.tokenizer import build_tokenizer
from megatronish.train.generate import encode_prompt, generate, load_model


@dataclass(frozen=True)
class Arguments:
    """What to load and how to write."""

    load: Path
    """A run folder, its checkpoints folder or one step's folder."""
    prompt: str = "\n"
    """Text to go on from; nothing begins a document."""
    num_tokens: int = 200
    """Tokens to write at most; an end of document ends earlier."""
    temperature: float = 0.8
    """0 takes the likeliest token every time."""
    top_k: int = 0
    """Choose among the k likeliest tokens; 0 for all."""
    top_p: float = 0.95
    """Choose among the likeliest tokens that make up this probability."""
    seed: int = 0
    """The same seed writes the same text."""
    ckpt_step: int | None = None
    """Load this step instead of the newest."""


def main(arguments: Arguments) -> int:
    """Print the prompt and what follows."""
    if not 0 <= arguments.temperature < math.inf:
        raise UserError(f"--temperature {arguments.temperature} must be a number from 0 on; for example 0.8")
    if not 0 < arguments.top_p <= 1:
        raise UserError(f"--top-p {arguments.top_p} must be above 0 and at most 1; for example 0.95")
    if arguments.top_k < 0 or arguments.num_tokens < 0:
        raise UserError(
            f"--top-k {arguments.top_k} and --num-tokens {arguments.num_tokens} must not be negative; use 0 or more"
        )
    trained = load_model(arguments.load, step=arguments.ckpt_step)
    tokenizer = build_tokenizer(trained.data)
    tokens = encode_prompt(tokenizer, arguments.prompt)
    following = generate(
        trained.model,
        tokens,
        num_tokens=arguments.num_tokens,
        seq_length=trained.seq_length,
        eod=tokenizer.eod,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
    )
    print(tokenizer.decode([*tokens, *following]))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Arguments)))
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
