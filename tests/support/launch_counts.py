"""Launches of kernels by one micro-batch of 8,192 tokens, forward and backward, as the dry run counts them.

MEGATRONISH_KERNELS=assumed python tests/support/launch_counts.py

With `triton` in its place the kernels in Triton are there, and the library that nvcc builds is not; with 0 none is.

A layer's are the difference of models of two and of one layer; the rest are embedding, head and loss. Every block and
piece runs, of which a dry run takes a few.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from unittest.mock import patch

from megatronish.dry_run.fake_cuda import load_fake_cuda

fake_cuda = load_fake_cuda()  # before torch is imported

from megatronish.ops import library as operators  # noqa: E402

if os.environ["MEGATRONISH_KERNELS"] == "triton":
    os.environ["MEGATRONISH_KERNELS"] = operators.ASSUMED
    operators.load_kernels = lambda: "the kernels are not built"  # type: ignore[assignment]

from megatronish.commands.configuration import read_config  # noqa: E402
from megatronish.dry_run import gpu, rank  # noqa: E402

GATED = "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
GATED += "--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --group-query-attention "
LLAMA = GATED + "--hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --num-query-groups 8 "
LLAMA += "--seq-length 8192 --micro-batch-size 1 --vocab-size 128256 "
MODELS = {
    "GPT 1.3B with dropout": "--hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --micro-batch-size 4 "
    "--vocab-size 50257 --hidden-dropout 0.1 --attention-dropout 0.1",
    "Llama 8B": LLAMA,
    "QLoRA 8B": LLAMA + "--load never-read --adapter-type lora --quantize-base nf4",
    "Qwen3-30B-A3B": GATED + "--hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 --kv-channels 128 "
    "--num-query-groups 4 --qk-layernorm --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 "
    "--seq-length 4096 --micro-batch-size 2 --vocab-size 151936",
}


class Launches(NamedTuple):
    """Those of a layer, and of all that is not in one."""

    layer: int
    rest: int


@contextmanager
def whole() -> Iterator[None]:
    """Meanwhile every block of attention and every piece of a matrix runs."""
    with (
        patch.object(gpu, "_few_blocks", gpu.all_blocks),
        patch.object(rank, "_largest_piece", rank.all_pieces),
    ):
        yield


def launches_of(flags: str, num_layers: int) -> int:
    """Launches of a model's first micro-batch."""
    common = f"--num-layers {num_layers} --bf16 --mock-data --train-iters 10 --lr 1e-3 --global-batch-size 64"
    config = read_config([*flags.split(), *common.split()]).config
    assert config.data.vocab_size is not None
    counted: list[int] = []

    def count(_engine: object, _batches: object, recorder: rank.StepRecorder) -> None:
        counted.append(recorder.parts[rank.FIRST].launches)

    with whole():
        rank.run_rank(rank.PlannedRun(config, config.data.vocab_size, "cuda"), 0, then=count)
    return counted[0]


if __name__ == "__main__":
    fake_cuda.install_fake_cuda()
    for name, flags in MODELS.items():
        one, two = (launches_of(flags, layers) for layers in (1, 2))
        print(json.dumps([name, Launches(two - one, 2 * one - two)]), flush=True)
