"""Outer optimizer: islands of ranks train alone, and every few steps Nesterov SGD steps by their mean move (DiLoCo).

Douillard et al. 2023 (arXiv:2311.08105), for links between the islands that are too slow for a sum of gradients in
every step. The outer parameters are those of the model: what is evaluated, saved under the names of the model and
exported. All islands start a round from them:

    theta_i = H steps of the inner optimizer on the data of island i, from theta
    move    = mean over i of (theta - theta_i)
    momentum = mu momentum + move
    theta   = theta - lr (move + mu momentum)

Each rank keeps the outer parameters and their momentum, in fp32, of the masters that it keeps: so every layout of an
island, and every stage of ZeRO, has this step without code of its own. Ranks in the same place of each island exchange
the moves of what they keep (`Domain.islands`); nothing is sent within an island.

Moves are sent as fp32 (an all-reduce), or as codes of 8 or 4 bits, in blocks that begin and end with a parameter's
elements: an all-to-all brings the codes of a part of the blocks from every island to one rank, which sends the codes of
their mean back to all. So all islands step by the same bits, and an element of the mean is off by at most

    (mean over i of largest_i + largest of the mean) / (2 q)        q = 127 or 7

where the largest are those of the absolute values in its block.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megatronish.config.sections.parallel import ParallelConfig
from megatronish.parallel import comm
from megatronish.parallel.block_codes import decoded, encoded
from megatronish.parallel.bucketing import CODE_BLOCK, MovedPart, moves_together, num_code_blocks, rounded_up
from megatronish.parallel.disk import copy_between, in_chunks, zeros_beside
from megatronish.parallel.mesh import Axis, Domain
from megatronish.parallel.sharding import Sharding

MoveDtype = Literal["fp32", "int8", "int4"]


@dataclass(frozen=True)
class OuterSettings:
    """What a config says of the outer step. `bucket_size` counts elements that are exchanged together."""

    interval: int
    learning_rate: float
    momentum: float
    move_dtype: MoveDtype = "fp32"
    bucket_size: int = 8_000_000

    @classmethod
    def of(cls, parallel: ParallelConfig) -> "OuterSettings | None":
        """As the flags say; None without an outer optimizer."""
        if parallel.outer_optimizer is None:
            return None
        return cls(
            parallel.outer_interval,
            parallel.outer_lr,
            parallel.outer_momentum,
            parallel.outer_move_dtype,
            parallel.ddp_bucket_size,
        )


class OuterState(NamedTuple):
    """Of one parameter, in the shape of the master that this rank keeps."""

    parameter: Tensor
    momentum: Tensor


class OuterOptimizer:
    """Outer parameters and momentum of the masters that learn. `state` has them by name, where the masters are.

    The outer parameters begin as the masters are.
    """

    def __init__(
        self,
        masters: Mapping[str, Tensor],
        shardings: Mapping[str, Sharding],
        domains: Mapping[str, Domain],
        settings: OuterSettings,
        *,
        device: torch.device,
    ) -> None:
        """`masters` are those that this rank keeps and that learn; islands exchange moves from `device` to device."""
        self.settings, self._device = settings, device
        self.masters = {name: master.detach() for name, master in masters.items()}
        self._axes = {name: domains[shardings[name].domain].islands for name in masters}
        self._buckets = list[list[MovedPart]]()
        for domain in domains:
            own = {name: each.numel() for name, each in self.masters.items() if shardings[name].domain == domain}
            tied = [name for name in own if shardings[name].tied]
            self._buckets += moves_together(own, tied, settings.bucket_size)
        kept = list(self.masters.values())
        outer, momenta = zeros_beside(kept), zeros_beside(kept)
        self.state = {name: OuterState(*both) for name, *both in zip(self.masters, outer, momenta, strict=True)}
        copy_between(list(zip(outer, kept, strict=True)))

    def is_due(self, step: int, *, is_last: bool) -> bool:
        """Whether an outer step follows this step, counted from 1; one follows the last of a run in any case."""
        return is_last or step % self.settings.interval == 0

    def step_if_due(self, step: int, *, is_last: bool) -> bool:
        """Make the outer step that follows this step, and return whether there is one."""
        if self.is_due(step, is_last=is_last):
            self.step()
            return True
        return False

    @torch.no_grad()
    def step(self) -> None:
        """Step by the mean move, and let all islands start from the result. Collective over all islands.

        It changes masters alone: who calls it brings them into the model.
        """
        for parts in self._buckets:
            groups = [(*self._of(part), move) for part, move in zip(parts, self._mean_moves(parts), strict=True)]
            for chunk in in_chunks(groups, num_written=3):
                for _, (outer, momentum, master, move) in chunk:
                    momentum.mul_(self.settings.momentum).add_(move)
                    move.add_(momentum, alpha=self.settings.momentum)
                    outer.sub_(move, alpha=self.settings.learning_rate)
                    master.copy_(outer)

    def _of(self, part: MovedPart) -> tuple[Tensor, Tensor, Tensor]:
        """Outer parameters, momentum and masters of a part."""
        outer, momentum = self.state[part.name]
        every = outer, momentum, self.masters[part.name]
        return tuple(each.view(-1)[part.begin : part.end] for each in every)  # type: ignore[return-value]

    def _mean_moves(self, parts: Sequence[MovedPart]) -> list[Tensor]:
        """What the islands have moved in the mean since the last outer step, [n] each, where the masters are."""
        sizes, axis = [part.size for part in parts], self._axes[parts[0].name]
        quantised = axis.size > 1 and self.settings.move_dtype != "fp32"
        padded, total = sizes, sum(sizes)
        if quantised:
            padded = [rounded_up(size, CODE_BLOCK) for size in sizes]
            total = num_code_blocks(sizes, islands=axis.size) * CODE_BLOCK
        flat = torch.zeros(total, device=self.masters[parts[0].name].device)
        moves = [move[:size] for move, size in zip(flat[: sum(padded)].split(padded), sizes, strict=True)]
        groups = [(move, *self._of(part)) for move, part in zip(moves, parts, strict=True)]
        for chunk in in_chunks([(move, outer, master) for move, outer, _, master in groups], num_written=0):
            for _, (move, outer, master) in chunk:
                torch.sub(outer, master, out=move)
        sent = flat.to(self._device)
        if quantised:
            mean = mean_by_codes(sent.view(-1, CODE_BLOCK), axis, self.settings.move_dtype).view(-1)
        else:
            mean = comm.all_reduce(sent, axis).div_(axis.size)
        flat.copy_(mean)
        return moves

    @torch.no_grad()
    def restart(self) -> None:
        """Let this island start from the outer parameters."""
        copy_between([(self.masters[name], outer) for name, (outer, _) in self.state.items()])

    @torch.no_grad()
    def exchange(self) -> None:
        """Put the outer parameters in the place of the masters, and these in theirs; a second call undoes it."""
        groups = [(master, self.state[name].parameter) for name, master in self.masters.items()]
        for chunk in in_chunks(groups, num_written=2):
            for _, (master, outer) in chunk:
                kept = master.clone()
                master.copy_(outer)
                outer.copy_(kept)


def mean_by_codes(blocks: Tensor, axis: Axis, dtype: str) -> Tensor:
    """[n, CODE_BLOCK] -> [n, CODE_BLOCK]: the mean over the axis, of whose size n is a multiple, by codes both ways."""
    rows = [len(blocks) // axis.size] * axis.size
    arrived = comm.start_all_to_all_rows(encoded(blocks, dtype), axis, sent=rows, received=rows).wait()
    mean = decoded(arrived, dtype).view(axis.size, -1, CODE_BLOCK).mean(0)
    return decoded(comm.start_all_gather(encoded(mean, dtype), axis).wait(), dtype)
