"""Bytes that a rank exchanges with other islands in an outer step (DiLoCo): over slow links, once in many steps."""

from collections import Counter
from collections.abc import Mapping

from megatronish.config.config import Config
from megatronish.estimate.costs.state_traffic import StateTraffic
from megatronish.estimate.costs.step_traffic import TrafficKey
from megatronish.parallel.bucketing import bytes_of_block, moves_together, num_code_blocks, offsets
from megatronish.parallel.schedules.live_activations import StageLoad

FP32 = 4


def outer_traffic(
    config: Config, load: StageLoad, stage: int, *, vocab_size: int, shard_ranks: Mapping[str, int] | None = None
) -> dict[TrafficKey, int]:
    """Bytes of one outer step on a rank of this stage, whose layers `load` has; nothing without islands.

    `shard_ranks` are its places among the ranks that shard each domain; by default it is the first.
    """
    islands, dtype = config.parallel.num_islands, config.parallel.outer_move_dtype
    sent = Counter[TrafficKey]()
    if islands == 1:
        return sent
    state = StateTraffic(config, vocab_size, load, stage, shard_ranks=shard_ranks or {})
    for domain in state.data_ranks:
        sizes = _kept(state, domain)
        tied = [each.name for each in state.parameters if each.tied]
        for parts in moves_together(sizes, tied, config.parallel.ddp_bucket_size):
            together = [part.size for part in parts]
            if dtype == "fp32":
                sent[TrafficKey("islands", "all-reduce")] += FP32 * sum(together)
                continue
            size = num_code_blocks(together, islands=islands) * bytes_of_block(dtype)
            sent[TrafficKey("islands", "all-to-all")] += size
            sent[TrafficKey("islands", "all-gather")] += size
    return sent


def bytes_to_islands(config: Config, load: StageLoad, stage: int, *, vocab_size: int) -> int:
    """Bytes that the first rank of a stage sends in one outer step: of what is gathered all except its own part."""
    sent = outer_traffic(config, load, stage, vocab_size=vocab_size)
    islands = config.parallel.num_islands
    times = {"all-reduce": 2, "all-to-all": 1, "all-gather": 1}
    return sum(times[key.collective] * size * (islands - 1) // islands for key, size in sent.items())


def _kept(state: StateTraffic, domain: str) -> dict[str, int]:
    """Elements of each parameter of a domain that this rank keeps and that learns, in the order of the model."""
    place, sizes = state.shard_ranks.get(domain, 0), dict[str, int]()
    if state.config.parallel.zero == 3:
        for each in state.parameters:
            if each.learns and each.domain == domain:
                sizes[each.name] = each.own_rows(state.data_ranks[domain].shard, place) * each.columns
    else:
        whole = {each.name: each.size for each in state.parameters}
        for bucket in state.buckets():
            share = bucket.size // state.data_ranks[domain].shard
            begins = offsets([whole[name] for name in bucket.names], 16 // state.element)
            for name, begin in zip(bucket.names, begins, strict=False) if bucket.domain == domain else ():
                low, high = max(begin, place * share), min(begin + whole[name], (place + 1) * share)
                sizes[name] = max(0, high - low)
    return {each.name: sizes[each.name] for each in state.parameters if sizes.get(each.name)}
