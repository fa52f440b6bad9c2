"""Counts of the launch scripts that were tried: what becomes of the flags they use. A test counts them again."""

from typing import NamedTuple


class Tried(NamedTuple):
    """Launch script, or a set of configs, with the numbers of its uses of flags."""

    name: str
    counts: tuple[int, ...]  # used, work, idle, done otherwise, refused, unknown
    is_script: bool = True


TRIED = (
    Tried("Megatron-LM GPT-3 175B", (34, 34, 0, 0, 0, 0)),
    Tried("Megatron-LM gpt-oss", (86, 61, 21, 4, 0, 0)),
    Tried("Megatron-LM Llama 3 8B, fp8", (75, 62, 9, 4, 0, 0)),
    Tried("Megatron-LM Llama 3 8B, Megatron-FSDP", (80, 60, 16, 4, 0, 0)),
    Tried("Megatron-LM Mixtral 8x7B", (57, 52, 5, 0, 0, 0)),
    Tried("Megatron-LM GPT 345M (2021)", (29, 28, 1, 0, 0, 0)),
    Tried("Megatron-LM 76B of SC21", (28, 27, 1, 0, 0, 0)),
    Tried("BigScience BLOOM 176B", (56, 46, 9, 1, 0, 0)),
    Tried("Swiss AI Llama 3 8B", (68, 54, 13, 1, 0, 0)),
    Tried("ROCm Llama 3 8B", (61, 53, 8, 0, 0, 0)),
    Tried("Pai Qwen2.5 7B", (70, 59, 10, 1, 0, 0)),
    Tried("Pai Llama 3.1 8B", (65, 54, 10, 1, 0, 0)),
    Tried("121 test configs of Megatron-LM", (6242, 4749, 1436, 3, 54, 0), is_script=False),
)
