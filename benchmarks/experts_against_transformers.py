"""Benchmark of an expert layer against the sparse blocks of transformers of one shape: forward and backward.

In one process. All get the same weights and tokens, and must first agree in the output, the gradient of the input and
that of every weight. Then all implementations take turns, each turn in another order, so that whatever else the machine
does falls on all alike; a ratio is that of two neighbours in a turn. On a busy machine `--clock cpu` counts the seconds
of this process alone.

transformers computes its experts in one of several ways (`experts_implementation`): grouped_mm, its default and its
fastest on a CPU, or eager, a loop over experts. batched_mm copies the weights of every choice, gigabytes at these
sizes, and is measured only where it is asked for.

    .venv-peers/bin/python benchmarks/experts_against_transformers.py
"""

import argparse
import importlib
import os
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatronish.attention.mask import AttentionMask
from megatronish.config.sections.model import ModelConfig
from megatronish.model.batch import MicroBatch
from megatronish.model.context import Context
from megatronish.model.experts import MixtureOfExperts
from megatronish.parallel.mesh import TensorParallel
from megatronish.specs.layers import ExpertsSpec, layer_specs

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.2}  # its routers choose by logits in bf16, and some tokens differ
CLOCKS: Mapping[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


class Shape(NamedTuple):
    """Shape of a layer: E experts of F features, of which each of T tokens of width D chooses K; and whose block."""

    family: str
    num_experts: int
    num_chosen: int
    hidden_size: int
    ffn_size: int
    num_tokens: int


SHAPES = {
    "mixtral": Shape("mixtral", 8, 2, 256, 512, 1024),
    "qwen3_moe": Shape("qwen3_moe", 64, 8, 256, 128, 512),
}


Step = tuple[Tensor, ...]
"""What one forward and backward leave behind: the output, and the gradients of input, router and both weights."""
NAMES = ("output", "gradient of the input", "router", "gate and up", "down")


def our_layer(shape: Shape) -> MixtureOfExperts:
    """Our layer, whose weights are not yet set."""
    config = ModelConfig(
        num_layers=1,
        hidden_size=shape.hidden_size,
        num_attention_heads=1,
        swiglu=True,
        disable_bias_linear=True,
        num_experts=shape.num_experts,
        moe_router_topk=shape.num_chosen,
        moe_ffn_hidden_size=shape.ffn_size,
    )
    (spec,) = layer_specs(config)
    assert isinstance(spec.mlp, ExpertsSpec)
    return MixtureOfExperts(config, spec.mlp, layer=0, tp=TensorParallel(), output_std=0.02)


def context(num_tokens: int) -> Context:
    """Context of a forward over one sequence, of which an expert layer reads nothing."""
    tokens = torch.zeros(1, num_tokens, dtype=torch.int64)
    positions = torch.arange(num_tokens)
    batch = MicroBatch(tokens, tokens, tokens.bool(), positions.unsqueeze(0), torch.zeros(1, dtype=torch.int64))
    mask = AttentionMask(num_tokens, device=tokens.device)
    return Context(batch, positions=positions, rotations=None, causal_mask=mask, dropout=None)


def their_block(shape: Shape, implementation: str) -> nn.Module:
    """The sparse block of a family; its options are those of our layer: the weights of the chosen sum to 1."""
    module: Any = importlib.import_module(f"transformers.models.{shape.family}.modeling_{shape.family}")
    transformers: Any = importlib.import_module("transformers")
    sizes = {"hidden_size": shape.hidden_size, "num_experts_per_tok": shape.num_chosen}
    if shape.family == "mixtral":
        config = transformers.MixtralConfig(
            num_local_experts=shape.num_experts, intermediate_size=shape.ffn_size, **sizes
        )
        block: nn.Module = module.MixtralSparseMoeBlock(config)
    else:
        config = transformers.Qwen3MoeConfig(
            num_experts=shape.num_experts, moe_intermediate_size=shape.ffn_size, norm_topk_prob=True, **sizes
        )
        block = module.Qwen3MoeSparseMoeBlock(config)
    config._experts_implementation = implementation
    return block


def implementations(shape: Shape, dtype: torch.dtype, names: list[str]) -> dict[str, Callable[[], Step]]:
    """Forward and backward of each implementation, over the same tokens and weights."""
    torch.manual_seed(0)
    experts, hidden, ffn = shape.num_experts, shape.hidden_size, shape.ffn_size
    sizes = ((experts, hidden), (experts, 2 * ffn, hidden), (experts, hidden, ffn))
    weights = [(0.05 * torch.randn(size)).to(dtype) for size in sizes]
    x, dy = (torch.randn(1, shape.num_tokens, hidden).to(dtype) for _ in range(2))
    x.requires_grad_()

    layer = our_layer(shape).to(dtype)
    ours = [layer.router.weight, layer.experts.gate_up.weight, layer.experts.down.weight]
    set_weights(ours, weights)
    forward = partial(_our_forward, layer, context(shape.num_tokens))
    made: dict[str, Callable[[], Step]] = {"megatronish": partial(take_step, forward, x, dy, ours)}
    for name in names:
        block: Any = their_block(shape, name).to(dtype)
        theirs = [block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj]
        set_weights(theirs, weights)
        made[name] = partial(take_step, block, x, dy, theirs)
    return made


def _our_forward(layer: MixtureOfExperts, context: Context, x: Tensor) -> Tensor:
    return layer(x.transpose(0, 1), context).transpose(0, 1)  # ours are [S, B, D]


def take_step(forward: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor, parameters: list[nn.Parameter]) -> Step:
    """Forward and backward of an implementation, [1, T, D]."""
    for each in (x, *parameters):
        each.grad = None
    y = forward(x)
    y.backward(dy)
    found = [y, *(each.grad for each in (x, *parameters) if each.grad is not None)]
    return tuple(each.detach().flatten() for each in found)


@torch.no_grad()
def set_weights(parameters: list[nn.Parameter], weights: list[Tensor]) -> None:
    """Copy the weights, in the shapes that an implementation has."""
    for parameter, weight in zip(parameters, weights, strict=True):
        parameter.copy_(weight.view_as(parameter))


def check_same(made: Mapping[str, Callable[[], Step]], dtype: torch.dtype) -> None:
    """Check that all agree, the difference of each tensor by its norm."""
    expected = made["megatronish"]()
    for name, take in made.items():
        for what, found, wanted in zip(NAMES, take(), expected, strict=True):
            error = float((found.float() - wanted.float()).norm() / wanted.float().norm())
            assert error <= TOLERANCE[dtype], f"{what} of {name} differs by {error:.1e}"


def take_turns(
    made: Mapping[str, Callable[[], Step]], clock: Callable[[], float], *, num_turns: int, num_steps: int
) -> dict[str, list[float]]:
    """Median seconds of a step in each turn, by implementation; every turn begins with another one."""
    seconds: dict[str, list[float]] = {name: [] for name in made}
    order = list(made)
    for turn in range(num_turns):
        for name in order[turn % len(order) :] + order[: turn % len(order)]:
            steps = []
            for _ in range(num_steps):
                start = clock()
                made[name]()
                steps.append(clock() - start)
            seconds[name].append(statistics.median(steps))
    return seconds


def report(seconds: Mapping[str, list[float]], shape: Shape) -> None:
    """Print the numbers of a row of docs/BENCHMARKS.md."""
    ours = seconds["megatronish"]
    for name, theirs in seconds.items():
        median, quarter = statistics.median(theirs), len(theirs) // 4
        ratios = sorted(there / here for there, here in zip(theirs, ours, strict=True))
        print(
            f"  {name:12} {1e3 * median:8.2f} ms a step, {shape.num_tokens / median:8.0f} tokens/s; ratio of medians "
            f"{median / statistics.median(ours):.2f}; of turns: median {statistics.median(ratios):.2f}, middle half "
            f"{ratios[quarter]:.2f} to {ratios[-1 - quarter]:.2f}"
        )


def main() -> None:
    """Check that all compute the same, measure, and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, action="append", help="default: all")
    parser.add_argument("--implementations", nargs="+", default=["eager", "grouped_mm"], help="of transformers")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--steps", type=int, default=5, help="of each implementation in a turn")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: seconds of this process, with one thread")
    parser.add_argument("--bf16", action="store_true", help="weights and tokens in bf16")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dtype = torch.bfloat16 if arguments.bf16 else torch.float32
    version = importlib.import_module("transformers").__version__
    print(f"torch {torch.__version__}, transformers {version}, {dtype}, {arguments.threads} threads")
    for name in arguments.shape or SHAPES:
        shape = SHAPES[name]
        made = implementations(shape, dtype, arguments.implementations)
        check_same(made, dtype)
        clock = CLOCKS[arguments.clock]
        seconds = take_turns(made, clock, num_turns=arguments.turns, num_steps=arguments.steps)
        print(
            f"{shape}, {arguments.clock} seconds, load {os.getloadavg()[0]:.1f} (ratio above 1: megatronish is faster)"
        )
        report(seconds, shape)


if __name__ == "__main__":
    main()
