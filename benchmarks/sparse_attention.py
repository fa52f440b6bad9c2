"""Benchmark of block-sparse attention on a CPU, forward and backward: each mask by blocks, and by other ways.

`causal` is SDPA's plain causal attention of the same tensors. The promise of a mask is 1 / density: the scores of a
causal mask over those that it lets through. `dense` is SDPA with a mask of S x S bools, what a window was computed by
before; it is left out where the mask would be larger than --most-dense tokens squared. All take turns, round by round,
and medians are printed with the ratio of causal attention to each, and what part of the promise that is.

    python benchmarks/sparse_attention.py --lengths 4096 16384 --window 512
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megatronish.attention.flash import attend_alone
from megatronish.attention.mask import AttentionMask
from megatronish.specs.block_pattern import BlockPattern
from megatronish.specs.costs import AttentionCore

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def masks_of(length: int, window: int, block: int) -> dict[str, AttentionMask]:
    """A window, and each pattern with as many local keys."""
    local = window // block
    patterns = {
        "sliding": BlockPattern("sliding", block, local),
        "fixed": BlockPattern("fixed", block, local, 1),
        "longformer": BlockPattern("longformer", block, local, 1),
        "bigbird": BlockPattern("bigbird", block, local, 1, 1),
    }
    masks = {f"window {window}": AttentionMask(length, window)}
    return masks | {f"{name} {block}": AttentionMask(length, pattern=pattern) for name, pattern in patterns.items()}


def density(mask: AttentionMask) -> float:
    """Scores that a mask lets through, of those of a causal mask of the same length."""
    keys = AttentionCore(1, 1, 1, mask.window_size, mask.pattern).keys(mask.seq_length, "causal")
    return keys / AttentionCore(1, 1, 1).keys(mask.seq_length, "causal")


def by_sdpa(mask: AttentionMask | None) -> Attend:
    """SDPA with the dense mask, or plain causal."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        dense = None if mask is None else mask.whole
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=dense, is_causal=dense is None)
        return out.permute(2, 0, 1, 3).flatten(2)

    return attend


def by_blocks(mask: AttentionMask) -> Attend:
    """The way of ops/windowed.py or attention/block_sparse.py."""
    return lambda q, k, v: attend_alone(q, k, v, mask=mask)


def seconds_of(attend: Attend, tensors: Sequence[Tensor], dout: Tensor) -> float:
    """Seconds of the processor for a forward and a backward: what else the machine does takes none of them."""
    start = time.process_time()
    torch.autograd.grad(attend(*tensors), tensors, dout)
    return time.process_time() - start


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table for each length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--most-dense", type=int, default=8192, help="longest sequence with a dense mask")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for length in given.lengths:
        generator = torch.Generator().manual_seed(0)
        shape = (length, 1, given.heads, given.head_size)
        tensors = [torch.randn(shape, generator=generator, requires_grad=True) for _ in range(3)]
        dout = torch.randn(length, 1, given.heads * given.head_size, generator=generator)
        masks = masks_of(length, given.window, given.block)
        ways = {"causal": by_sdpa(None)} | {name: by_blocks(mask) for name, mask in masks.items()}
        if length <= given.most_dense:
            ways |= {f"{name}, dense": by_sdpa(mask) for name, mask in list(masks.items())[:1]}
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(given.rounds + 1):
            for name, attend in ways.items():
                spent = seconds_of(attend, tensors, dout)
                if turn:  # the first one is left out
                    seconds[name].append(spent)
        print(f"{length} tokens, {given.heads} heads of {given.head_size}, fp32, one thread")
        causal = statistics.median(seconds["causal"])
        for name, times in seconds.items():
            median = statistics.median(times)
            line = f"  {name:<20}{median * 1e3:9.1f} ms ({min(times) * 1e3:.1f} to {max(times) * 1e3:.1f})"
            line += f", causal / this {causal / median:6.2f}"
            if name in masks:
                promise = 1 / density(masks[name])
                line += f", {causal / median / promise:.0%} of 1 / density {promise:.2f}"
            print(line)


if __name__ == "__main__":
    main()
