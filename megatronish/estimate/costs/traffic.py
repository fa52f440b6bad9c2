"""Bytes that a rank exchanges in a step, by axis and collective, from the config alone.

Bytes of a call are those of its largest tensor: the tensor of an all-reduce, the whole of an all-gather or a
reduce-scatter, all that a rank sends in an all-to-all, a message. With H = S B D / cp elements of hidden states:

    tp         layers: 4 all-reduces of H, two forward and two backward (Shoeybi et al. 2019); with sequence parallelism
               6 all-gathers and 4 reduce-scatters of H (Korthikanti et al. 2022, with inputs gathered again)
    cp         a ring: keys and values cp - 1 times forward and backward, their gradients in fp32 cp times; all-to-all:
               queries, keys and values, and the output, forward and backward
    F, B       activations and their gradients between stages, H / tp each
    shard      ZeRO-1: gradients reduce-scattered and parameters gathered once a step; ZeRO-2: gradients once a
               micro-batch; ZeRO-3: parameters gathered twice a micro-batch, too
    ep, etp    rows of tokens to their experts and back, where the load is even

What is computed again exchanges again what its forward did (layer_traffic.py). Padding of buckets and rows is counted
(state_traffic.py). Left out are evaluation, and what hooks of a run send.
"""

from collections.abc import Mapping

from megatronish.config.config import Config
from megatronish.core.names import OBJECTIVE_NAMES
from megatronish.estimate.costs.layer_traffic import LayerTraffic
from megatronish.estimate.costs.state_traffic import StateTraffic
from megatronish.estimate.costs.step_traffic import SCALAR, StepTraffic, TrafficKey
from megatronish.parallel.schedules.live_activations import StageLoad
from megatronish.parallel.schedules.plan import StageChunk, routes
from megatronish.parallel.schedules.table import SCHEDULES


def expected_traffic(
    config: Config, load: StageLoad, stage: int, *, vocab_size: int, shard_ranks: Mapping[str, int] | None = None
) -> dict[TrafficKey, int]:
    """Bytes of one step on a rank of this stage, whose layers `load` has.

    `shard_ranks` are its places among the ranks that shard each domain; by default it is the first.
    """
    layers = LayerTraffic(config, load, stage, vocab_size)
    layers.layers()
    layers.ends()
    state = StateTraffic(config, load, stage, vocab_size, shard_ranks=shard_ranks or {})
    state.state()
    others = StepTraffic(config, load, stage, vocab_size)
    _transfers(others)
    _numbers(others)
    found = layers.sent + state.sent + others.sent
    return {key: size for key, size in found.items() if size}


def by_axis(sent: Mapping[TrafficKey, int]) -> dict[str, dict[str, int]]:
    """{axis: {collective: bytes}}, in the order of names."""
    found: dict[str, dict[str, int]] = {}
    for (axis, collective), size in sorted(sent.items()):
        if size:
            found.setdefault(axis, {})[collective] = size
    return found


def why_no_traffic(config: Config) -> str | None:
    """Reason why the formulas do not cover a run; None if they do."""
    if OBJECTIVE_NAMES[config.training.objective].learns_from != "text":
        return "completions differ in length, and a second model may run"
    if config.model.block != "transformer":
        return f"layers of block={config.model.block} send what its plug-in says"
    if config.adapter.quantize_base is not None and config.parallel.zero == 3:
        return "ZeRO-3 gathers quantised weights as they are stored"
    return None


def _transfers(traffic: StepTraffic) -> None:
    """Activations and gradients from and to other stages."""
    parallel, layout = traffic.config.parallel, traffic.config.layout
    schedule, chunks = SCHEDULES[parallel.schedule], len(traffic.load.layers)
    found = routes(schedule.place(num_stages=layout.pp, num_chunks=chunks))
    size = traffic.num_microbatches * traffic.hidden // layout.tp
    for chunk in range(chunks):
        for kind in ("F", "B"):
            route = found[kind, StageChunk(traffic.stage, chunk)]
            if route.target is not None and route.target.stage != traffic.stage:
                traffic.add(f"{kind} {'up' if route.target.stage > traffic.stage else 'down'}", "send", size)
            if route.source is not None and route.source.stage != traffic.stage:
                traffic.add(f"{kind} {'up' if traffic.stage > route.source.stage else 'down'}", "receive", size)
                if not traffic.cuts_sequence:
                    traffic.add("tp", "all-gather", size * layout.tp)


def _numbers(traffic: StepTraffic) -> None:
    """Scalars of the whole step: the count of tokens, the norm, and the sums of the objective and of routers."""
    model = traffic.config.model
    traffic.add("dp", "all-reduce", SCALAR)
    for axis in ("tp", "pp", "ep", "etp"):
        traffic.add(axis, "all-reduce", SCALAR)
    sums = 1
    if traffic.has_experts:
        assert model.num_experts is not None
        rows = model.num_experts + 1  # choices, and what is not finite
        losses = model.moe_aux_loss_coeff if model.moe_router_load_balancing_type != "none" else 0
        rows += bool(losses) + bool(model.moe_z_loss_coeff) + (model.moe_expert_capacity_factor is not None)
        sums += model.num_layers * rows
    if traffic.config.layout.world_size > 1:
        traffic.add("world", "all-reduce", SCALAR * sums)
