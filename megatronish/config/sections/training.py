"""Sections [training] and [recompute] of a config: batch, length of the run, precision, attention, recomputation."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal, TypeVar

import tyro

from megatronish.config.marks import REQUIRED, NamedIn, at_least, at_most, greater_than
from megatronish.core.names import OBJECTIVE_NAMES, in_braces

Layer = TypeVar("Layer")
LOSS_SCALE_LIMIT = at_most(2.0**120, "2^120, as fp32 ends at 2^128")

AttentionBackend = Literal["auto", "flash", "fused_softmax", "unfused"]
EXPLICIT: tuple[AttentionBackend, ...] = ("fused_softmax", "unfused")
"""Backends that have the probabilities of all queries and keys in memory."""


@dataclass(frozen=True)
class TrainingConfig:
    """Batch, length of the run, seed, precision and attention backend."""

    seq_length: Annotated[int, REQUIRED, at_least(1), at_most(2**31 - 1)] = 0
    """Tokens S of one sample."""
    micro_batch_size: Annotated[int, REQUIRED, at_least(1), at_most(2**31 - 1)] = 0
    """Samples B in one forward pass."""
    global_batch_size: Annotated[int | None, at_least(1), at_most(2**31 - 1)] = None
    """Samples in one step, over all ranks. Derived: micro_batch_size * dp."""
    rampup_batch_size: tuple[int, int, int] | None = None
    """START INCREMENT SAMPLES: grow the global batch from START in steps of INCREMENT over SAMPLES samples."""
    step_batch_size_schedule: tuple[str, ...] = ()
    """TOKENS:BATCH_SIZE ...: each global batch size, from a number of consumed tokens (K, M, B, T) on."""
    train_iters: Annotated[int | None, at_least(1), at_most(2**63 - 1)] = None
    """Steps to train for."""
    train_samples: Annotated[int | None, at_least(1), at_most(2**63 - 1)] = None
    """Samples to train for, instead of --train-iters."""
    num_epochs: Annotated[float | None, greater_than(0), at_most(10_000)] = None
    """Passes over the training data, instead of --train-iters: the last step is filled up from the next pass."""
    train_tokens: Annotated[int | None, at_least(1), at_most(2**63 - 1)] = None
    """Tokens to train for, instead of --train-iters: --train-samples of --seq-length tokens each."""
    exit_interval: Annotated[int | None, at_least(1), at_most(2**63 - 1)] = None
    """Save and leave after every so many steps."""
    exit_duration_in_mins: Annotated[float | None, greater_than(0)] = None
    """Save and leave after so many minutes."""
    exit_signal: Literal["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"] = "SIGTERM"
    """Save and leave on this signal too; SIGTERM always does."""
    exit_status_if_stopped: Annotated[int, at_least(0), at_most(255)] = 0
    """Exit status of a run that saved and left before its last step, for launchers that take 0 for finished."""
    kill_switch_path: str | None = None
    """Save and leave once this file exists."""
    eval_interval: Annotated[int, at_least(1), at_most(2**63 - 1)] = 1000
    """Steps between evaluations."""
    eval_iters: Annotated[int, at_least(0), at_most(2**63 - 1)] = 100
    """Global batches of one evaluation; 0 for none."""
    eval_global_batch_size: Annotated[int | None, at_least(1), at_most(2**31 - 1)] = None
    """Samples in one batch of an evaluation. Derived: the global batch size."""
    seed: Annotated[int, at_least(0), at_most(2**63 - 1)] = 1234
    """Of initial weights, dropout and data order."""
    bf16: bool = False
    """Compute in bf16; master weights, gradients and their reduction stay in fp32."""
    fp16: bool = False
    """Compute in fp16, with a loss scale; master weights, gradients and their reduction stay in fp32."""
    loss_scale: Annotated[float | None, at_least(0), LOSS_SCALE_LIMIT] = None
    """fp16: a loss scale that stays the same. Without it, or with 0, the scale follows overflows."""
    initial_loss_scale: Annotated[float, greater_than(0), LOSS_SCALE_LIMIT] = 2.0**32
    """fp16: where the loss scale starts."""
    min_loss_scale: Annotated[float, greater_than(0), LOSS_SCALE_LIMIT] = 1.0
    """fp16: the loss scale is never halved below this."""
    loss_scale_window: Annotated[int, at_least(1), at_most(2**63 - 1)] = 1000
    """fp16: steps in a row without an overflow after which the loss scale is doubled."""
    hysteresis: Annotated[int, at_least(1), at_most(2**63 - 1)] = 2
    """fp16: the loss scale is halved after this many overflows since its last doubling, and after each further one."""
    objective: Annotated[str, NamedIn(OBJECTIVE_NAMES), tyro.conf.arg(metavar=in_braces(OBJECTIVE_NAMES))] = "causal_lm"
    """What is minimised: causal_lm is the loss of the next token, others learn from preferences; or a plug-in's."""
    objective_args: tuple[str, ...] = ()
    """Options of a plug-in's objective: option=value ..."""
    attention_backend: AttentionBackend = "auto"
    """auto, flash: SDPA, and with dropout attention block by block; fused_softmax, unfused: explicit probabilities."""
    compile: bool = False
    """torch.compile of the layers: the first step waits for a compiler, the others are faster (docs/RUNNING.md)."""
    cuda_graph: bool = False
    """Replay micro-batches from one CUDA graph, where nothing is sent in them: less work for the host."""
    deterministic_mode: bool = False
    """Deterministic kernels alone: two runs on the same devices give the same bits. On a CPU they do in any case."""
    disable_bf16_reduced_precision_matmul: bool = False
    """On CUDA: partial sums of a bf16 matrix product are added in fp32, never in bf16."""
    check_for_nan_in_loss_and_grad: bool = True
    """Stop when the loss or the gradient norm is not finite."""

    @property
    def precision(self) -> Literal["fp32", "bf16", "fp16"]:
        """Precision of the forward and the backward."""
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "fp32"


RecomputeModule = Literal["core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts", "mla_up_proj"]

CORE: frozenset[RecomputeModule] = frozenset(("core_attn",))
"""What selective recomputation is of, where nothing else is named."""


@dataclass(frozen=True)
class RecomputeConfig:
    """Recomputation of activations, which trades time for memory."""

    recompute_granularity: Literal["selective", "full"] | None = None
    """selective: parts of layers are computed again (--recompute-modules); full: whole layers are."""
    recompute_method: Literal["uniform", "block"] = "uniform"
    """Of full. uniform: all layers, in groups that keep one input each; block: the first layers of each chunk."""
    recompute_num_layers: Annotated[int, at_least(1), at_most(100_000)] = 1
    """Layers of a group (uniform), or computed again in each chunk (block)."""
    recompute_modules: tuple[RecomputeModule, ...] = ()
    """Of selective: the parts of a layer that are computed again; moe is an MLP with experts. Derived: core_attn."""
    distribute_saved_activations: bool = False
    """The kept inputs of full recomputation are shared by the ranks of tp."""
    offload_saved_activations: bool = False
    """The kept inputs of full recomputation wait in the CPU's memory."""

    @property
    def recomputed(self) -> frozenset[RecomputeModule]:
        """Parts of a layer that are computed again by themselves."""
        return self.named_modules if self.recompute_granularity == "selective" else frozenset()

    @property
    def named_modules(self) -> frozenset[RecomputeModule]:
        """Parts of a layer that selective recomputation is of."""
        return frozenset(self.recompute_modules) or CORE

    @property
    def is_uniform(self) -> bool:
        """Whether every layer is computed again, of multi-token prediction too."""
        return self.recompute_granularity == "full" and self.recompute_method == "uniform"

    def groups(self, layers: Sequence[Layer], ahead: Sequence[Layer] = ()) -> list[tuple[Sequence[Layer], bool]]:
        """Groups of a chunk's layers, in order: computed again as one (True), or with activations that stay (False).

        Layers of multi-token prediction, `ahead`, follow those of the model, each by itself.
        """
        size = self.recompute_num_layers
        if self.is_uniform:
            groups = [layers[first : first + size] for first in range(0, len(layers), size)]
            return [(group, True) for group in (*groups, *([layer] for layer in ahead))]
        again = size if self.recompute_granularity == "full" else 0
        return [*(([layer], True) for layer in layers[:again]), ([*layers[again:], *ahead], False)]


SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
LONGEST = 40  # digits of a number
_EXAMPLE = "for example 0:384 200B:768 400B:1152"


def parse_batch_sizes(words: Sequence[str], *, seq_length: int) -> tuple[tuple[int, int], ...]:
    """TOKENS:BATCH_SIZE ... -> ((samples, batch size from there on), ...); ValueError, a sentence.

    As Megatron-LM reads it: thresholds in tokens, with K, M, B or T, rounded down to whole samples. The words may be
    one text, and commas stand for spaces.
    """
    text = " ".join(words)
    steps = []
    for word in text.replace(",", " ").split():
        tokens, _, size = word.partition(":")
        steps.append((_count(tokens, text) // seq_length, _count(size, text)))
    if not steps or steps[0][0] != 0:
        raise ValueError(f"{text!r} must begin with 0:BATCH_SIZE; {_EXAMPLE}")
    for (before, _), (after, _) in pairwise(steps):
        if after <= before:
            raise ValueError(
                f"{text!r} must have thresholds that grow by a sample of {seq_length} tokens or more; {_EXAMPLE}"
            )
    if not all(size >= 1 for _, size in steps):
        raise ValueError(f"{text!r} must have batch sizes of at least 1; {_EXAMPLE}")
    return tuple(steps)


def _count(word: str, text: str) -> int:
    """Number of a word with a suffix, "2.4B" -> 2400000000."""
    match = re.fullmatch(r"(\d+(?:_\d+)*(?:\.\d+)?)([KMBT]?)", word.upper())
    if match is None:
        raise ValueError(f"{text!r} must be TOKENS:BATCH_SIZE ..., tokens with K, M, B or T; {_EXAMPLE}")
    if len(match[1]) > LONGEST:
        raise ValueError(f"{text[:80]!r}... has a number of {len(match[1]):,} digits; {_EXAMPLE}")
    return round(float(match[1]) * SUFFIXES[match[2]])
