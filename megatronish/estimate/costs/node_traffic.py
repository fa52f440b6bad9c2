"""Bytes that leave a node in a step: what the network between nodes has to carry, by axis.

Of each collective of `expected_traffic`, S bytes over n ranks, a rank sends

    all-gather, reduce-scatter   S (n - 1) / n to the next rank of a ring in the order of ranks
    all-reduce                   twice as much
    all-to-all                   S / n to each other rank
    send                         S to the rank that receives it

and what goes to another node counts. So ZeRO-3 over whole nodes sends (2 + 2 + 4) P bytes a step from each node, for P
parameters in 16 bits that are gathered twice and gradients that are reduced in fp32, less one part of n. NCCL's rings
send that; its trees and switches that add up numbers send other amounts.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatronish.config.config import Config
from megatronish.estimate.costs.state_traffic import StateTraffic, data_ranks
from megatronish.estimate.costs.step_traffic import TrafficKey
from megatronish.estimate.costs.traffic import expected_traffic
from megatronish.parallel.schedules.live_activations import StageLoad
from megatronish.parallel.schedules.plan import routes
from megatronish.parallel.schedules.table import SCHEDULES

GroupOf = Mapping[int, Sequence[int]]
"""Ranks of the group that a rank is in."""


class NodeTraffic(NamedTuple):
    """A node that sends the most bytes to others, and these by axis, the most first."""

    node: int
    bytes_by_axis: Mapping[str, float]

    @property
    def total(self) -> float:
        """Bytes of all axes together."""
        return sum(self.bytes_by_axis.values())


def node_traffic(
    config: Config, loads: Sequence[StageLoad], *, vocab_size: int, gpus_per_node: int
) -> NodeTraffic | None:
    """What the busiest node sends in a step; None if there is one node. `loads` are those of the stages."""
    layout = config.layout
    if layout.world_size <= gpus_per_node:
        return None
    by_node: defaultdict[int, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    groups = {domain: groups_of_axes(config, loads, domain) for domain in data_ranks(config)}
    stage_ranks = layout.world_size // layout.pp
    for stage, load in enumerate(loads):
        for domain, sent in _by_domain(config, load, stage, vocab_size).items():
            for (axis, collective), size in sent.items():
                for rank in range(stage * stage_ranks, (stage + 1) * stage_ranks):
                    part = part_outside(collective, groups[domain][axis].get(rank, [rank]), rank, gpus_per_node)
                    by_node[rank // gpus_per_node][axis.split()[0]] += size * part
    node, of_node = max(by_node.items(), key=lambda each: (sum(each[1].values()), -each[0]))
    most_first = sorted(of_node.items(), key=lambda each: -each[1])
    return NodeTraffic(node, {axis: size for axis, size in most_first if size})


def _by_domain(config: Config, load: StageLoad, stage: int, vocab_size: int) -> dict[str, Counter[TrafficKey]]:
    """Bytes of a rank of this stage: those of the experts' state, and all others."""
    sent = {"dense": Counter(expected_traffic(config, load, stage, vocab_size=vocab_size))}
    if config.model.num_experts is not None:
        state = StateTraffic(config, vocab_size, load, stage, only="experts")
        state.state()
        sent["experts"] = state.sent
        sent["dense"].subtract(state.sent)
    return sent


def groups_of_axes(config: Config, loads: Sequence[StageLoad], domain: str) -> dict[str, GroupOf]:
    """The groups of each axis, where `domain` is that of shard, replicate and secondary."""
    layout = config.layout
    groups: dict[str, Sequence[Sequence[int]]] = {axis: layout.groups(axis) for axis in ("tp", "cp", "dp", "pp")}
    groups["world"] = [range(layout.world_size)]
    groups["embedding"] = [[ranks[0], ranks[-1]] for ranks in groups["pp"]]
    data = layout.groups("dp", "cp")
    if config.model.num_experts is not None:
        of_experts = layout.expert_groups(config.parallel.expert_layout)
        groups |= {axis: of_experts[axis] for axis in ("ep", "etp")}
        data = of_experts["edp"] if domain == "experts" else data
    ranks = data_ranks(config)[domain]
    shards = [group[i : i + ranks.shard] for group in data for i in range(0, len(group), ranks.shard)]
    groups["shard"] = shards
    groups["replicate"] = [group[i :: ranks.shard] for group in data for i in range(ranks.shard)]
    groups["secondary"] = [
        group[i : i + ranks.secondary] for group in shards for i in range(0, len(group), ranks.secondary)
    ]
    of_rank: dict[str, GroupOf] = {
        axis: {rank: group for group in parts for rank in group} for axis, parts in groups.items()
    }
    return of_rank | _transfers(config, num_chunks=len(loads[0].layers))


def _transfers(config: Config, *, num_chunks: int) -> dict[str, GroupOf]:
    """Of each line between stages, a rank and the one that it sends to."""
    layout, lines = config.layout, defaultdict[str, dict[int, Sequence[int]]](dict)
    stage_ranks = layout.world_size // layout.pp
    placement = SCHEDULES[config.parallel.schedule].place(num_stages=layout.pp, num_chunks=num_chunks)
    for (kind, place), route in routes(placement).items():
        if route.target is not None and route.target.stage != place.stage:
            further = (route.target.stage - place.stage) * stage_ranks
            line = lines[f"{kind} {'up' if further > 0 else 'down'}"]
            line |= {
                rank: [rank, rank + further]
                for rank in range(stage_ranks * place.stage, stage_ranks * (place.stage + 1))
            }
    return defaultdict(dict, lines)


def part_outside(collective: str, group: Sequence[int], rank: int, gpus_per_node: int) -> float:
    """Part of the bytes of a collective that a rank sends to other nodes."""
    own, number = rank // gpus_per_node, len(group)
    if collective == "all-to-all":
        return sum(other // gpus_per_node != own for other in group) / number
    following = group[(group.index(rank) + 1) % number]
    if following // gpus_per_node == own or collective == "receive":
        return 0.0
    return {"send": 1.0, "all-reduce": 2 * (number - 1) / number}.get(collective, (number - 1) / number)
