"""Generation in a dry run: prefill and decode of a rank's share of a model, on fake CUDA tensors."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from dry_cases import MODELS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from megatronish.commands.configuration import read_config
from megatronish.dry_run.gpu import answered_for, attention_of_a_gpu
from megatronish.dry_run.rank import _mesh, own_tables, references
from megatronish.dry_run.recorder import StepRecorder
from megatronish.inference import generate
from megatronish.parallel.pipeline.stage import build_stage
from megatronish.parallel.stages import Stages

PROMPTS = ([1, 2, 3, 4, 5], [6, 7, 8, 9, 1, 2, 3, 4, 5], [1] * 30)
NUM_TOKENS, SEQ_LENGTH, VOCABULARY = 13, 40, 512
"""After the tenth token the KV cache is full, and each token is a prefill."""
ENDS = 2
"""Tokens after which the second text ends."""


class GenerationCase(NamedTuple):
    """A model, and the ranks that share a copy of it; `rank` is run."""

    name: str
    model: str
    layout: str
    rank: int
    num_expert_layers: int = 0

    @property
    def argv(self) -> list[str]:
        """Its command line."""
        sizes = "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --bf16 --lr 1e-3 --train-iters 1"
        batch = f"--seq-length {SEQ_LENGTH} --micro-batch-size 1 --global-batch-size 4 --vocab-size {VOCABULARY}"
        return f"--mock-data {sizes} {batch} {self.layout} {self.model}".split()


GENERATIONS = [
    GenerationCase("a window", f"{MODELS['llama']} --window-size 8", "--tp 2 --pp 2", 3),
    GenerationCase("ALiBi", f"{MODELS['gpt']} --position-embedding-type alibi", "--tp 2", 1),
    GenerationCase("experts", MODELS["experts"], "--tp 1 --pp 2 --dp 2 --ep 2", 1, num_expert_layers=2),
]


def generation_of(case: GenerationCase) -> dict[str, Any]:
    """Waits of the host by site, and for each call of SDPA its queries, keys and whether cuDNN's was among backends."""
    config = read_config(case.argv).config
    recorder = StepRecorder("cuda", number=0, references=references())  # rows of an expert differ
    calls: list[tuple[int, int, bool]] = []
    with ExitStack() as stack:
        stack.enter_context(answered_for("cuda", recorder.wait))
        mesh = stack.enter_context(_mesh(config, case.rank, "cuda"))
        for each in (FakeTensorMode(allow_non_fake_inputs=True), recorder.watching(), attention_of_a_gpu()):
            stack.enter_context(each)
        stack.enter_context(own_tables())
        stages = Stages.of(config.parallel, config.model, vocab_size=VOCABULARY, seq_length=SEQ_LENGTH)
        torch.set_default_dtype(torch.bfloat16)  # tensors without memory are not converted in place
        stack.callback(torch.set_default_dtype, torch.float32)
        built = build_stage(config.model, stages, mesh, vocab_size=VOCABULARY, num_positions=SEQ_LENGTH)
        torch.set_default_dtype(torch.float32)
        model = built.model.requires_grad_(False).eval()
        recorder.begin_part("generation")
        stack.enter_context(patch.object(generate, "_sample", EndsOne()))
        stack.enter_context(CallsOfSDPA(calls))
        found = list(
            generate.generate(model, PROMPTS, num_tokens=NUM_TOKENS, seq_length=SEQ_LENGTH, mesh=mesh, batch_size=3)
        )
    numbers = [each.number for each in found if each.token is not None]
    return {
        "tokens": [numbers.count(number) for number in range(len(PROMPTS))],
        "waits": dict(recorder.parts["generation"].waits),
        "calls": calls,
    }


class EndsOne:
    """Sampling, after which the second text ends once it has its tokens: values of tokens are unknown."""

    def __init__(self) -> None:
        self.sample, self.num_calls = generate._sample, 0

    def __call__(self, logits: Any, batches: Sequence[Any], *more: Any) -> list[int | None]:
        chosen: list[int | None] = [*self.sample(logits, batches, *more)]
        self.num_calls += 1
        if self.num_calls == ENDS + 1:
            chosen[1] = None
        return chosen


class CallsOfSDPA(TorchFunctionMode):
    """Queries and keys of each call, and whether cuDNN's backend may be taken."""

    def __init__(self, calls: list[tuple[int, int, bool]]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.calls.append((args[0].shape[2], args[1].shape[2], torch.backends.cuda.cudnn_sdp_enabled()))
        return func(*args, **kwargs or {})
