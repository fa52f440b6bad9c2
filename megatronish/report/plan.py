"""Texts of a plan: the short list with times and memory, and the explanation of one layout."""

from collections.abc import Sequence

from megatronish.config.config import Config
from megatronish.estimate.costs.candidate import config_of
from megatronish.estimate.costs.memory_table import format_bytes
from megatronish.estimate.costs.node_traffic import node_traffic
from megatronish.estimate.costs.parameters import num_active_parameters, num_parameters
from megatronish.estimate.costs.traffic import why_no_traffic
from megatronish.estimate.planner.choose import ShortList
from megatronish.estimate.planner.device_speed import UNCONFIRMED, reservations, unconfirmed
from megatronish.estimate.planner.exact import Planned
from megatronish.estimate.planner.layer_time import Parts
from megatronish.estimate.planner.search import FILLED, Search
from megatronish.parallel.stages import Stages
from megatronish.specs.flops import model_flops_per_token

GIB = 2**30
DAY = 86_400.0
OWNERS = ("weights", "gradients", "optimizer", "activations", "in flight", "logits", "temporaries")
PART_NAMES = {
    "products": "matrix products",
    "attention": "attention",
    "pointwise": "pointwise operations",
    "tensor": "collectives over tp",
    "context": "keys and values over cp",
    "experts": "tokens to experts and back",
    "host": "waiting for the host",
}


def num_tokens(config: Config) -> int | None:
    """Tokens of the whole run; None where its length is not given."""
    training = config.training
    samples = training.train_samples or (training.train_iters or 0) * config.global_batch_size
    return samples * training.seq_length or None


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns, the second one and texts to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if number in (1, 2) else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def mfu(search: Search, seconds: float) -> float:
    """Model FLOPs over the peak of all devices."""
    work = search.work
    flops = work.tokens * model_flops_per_token(
        work.model,
        vocab_size=work.vocab_size,
        seq_length=work.seq_length,
        is_frozen=work.adapter.is_used,
    )
    return flops / (seconds * search.gpus * search.device.peak(work.precision))


def heading(search: Search) -> str:
    """Model, devices and what is known of them."""
    work, device = search.work, search.device
    sizes = {"vocab_size": work.vocab_size, "seq_length": work.seq_length}
    total, active = num_parameters(work.model, **sizes), num_active_parameters(work.model, **sizes)
    experts = f", of which a token passes {in_words(active)}" if active != total else ""
    calibrated = (
        f"calibrated: {device.calibrated}"
        if device.calibrated
        else "not calibrated: figures of data sheets (megatronish plan --probe measures this machine's)"
    )
    return "\n".join(
        [
            f"model: {in_words(total)} parameters{experts}; a step: {work.global_batch} samples of "
            f"{work.seq_length}, {work.tokens:,} tokens, {work.precision}",
            f"devices: {search.gpus} {device.name}, {device.gpus_per_node} a node, {device.node_gb_s:g} GB/s inside, "
            f"{device.network_gb_s:g} GB/s a device to other nodes; {calibrated}",
        ]
    )


def short_report(search: Search, chosen: ShortList) -> str:
    """The short list: times, MFU, length of the run; then memory by owner on the fullest stage."""
    tokens = num_tokens(search.config)
    times = [["", "mesh", "choices", "s/step", "MFU %", "days", "GPU-hours"]]
    fullest = max(planned.fullest.memory.total for planned in chosen.planned)
    unit, size = ("GiB", GIB) if fullest >= GIB else ("MiB", 2**20)
    memory = [["", "mesh", "stage", *OWNERS, f"total {unit}"]]
    for number, planned in enumerate(chosen.planned):
        mesh, (low, high) = planned.candidate.mesh_text, search.interval(planned.step, planned.candidate)
        mark = f"{number + 1}{'*' if number == chosen.conventional else ' '}"
        seconds = [tokens / search.work.tokens * each for each in (low, high)] if tokens else []
        times.append(
            [
                mark,
                mesh,
                planned.candidate.choices_text,
                between(low, high),
                between(100 * mfu(search, high), 100 * mfu(search, low)),
                between(*(each / DAY for each in seconds)) if seconds else "-",
                between(*(each / 3600 * search.gpus for each in seconds)) if seconds else "-",
            ]
        )
        owners = planned.fullest.owners
        memory.append(
            [
                mark,
                mesh,
                str(planned.fullest.stage),
                *(f"{owners[name] / size:.1f}" for name in OWNERS),
                f"{planned.fullest.memory.total / size:.1f}",
            ]
        )
    length = f" for {in_words(tokens)} tokens" if tokens else ""
    notes = reservations(search.config)
    return "\n".join(
        [
            heading(search),
            f"layouts: {chosen.legal:,} are tried, about {chosen.fitting:,} fit into {search.limit / GIB:.1f} GiB "
            f"({FILLED:.0%} of a device); the best of each mesh, ranked by the worse end of the interval",
            "",
            f"time{length}: from all that may overlap hidden to nothing hidden, and {_error(search, chosen.planned)}",
            "(* is a conventional layout)",
            *notes,
            table(times),
            "",
            f"memory of the fullest stage in {unit}{_even(search)}; the allocator, the context and libraries take 2 to "
            "4 GiB more",
            table(memory),
        ]
    )


ATTENTION = {
    "flash": "flash attention",
    "fused_softmax": "attention with scores in memory",
    "unfused": "attention with scores in memory and an unfused softmax",
    "blocks": "attention block by block, for dropout",
}


def _kernels(search: Search) -> str:
    """The kernels whose times are taken."""
    work = search.work
    fused = "by a compiler" if work.config.training.compile else "as the kernels of this program do"
    loss = "the loss in two passes" if work.fused_loss else "the loss in fp32"
    return f"by {ATTENTION[work.attention]}, pointwise operations fused {fused}, {loss}, launches {work.launches}"


def _error(search: Search, planned: Sequence[Planned]) -> str:
    """What is known of the error of these layouts' times."""
    candidates = [each.candidate for each in planned]
    names = {each.schedule for each in candidates if unconfirmed(each.schedule, each.mesh.pp)}
    more = f"; {UNCONFIRMED:.0%} longer under {' and '.join(sorted(names))}, of which no step was published"
    return f"{search.error.part:.0%} more either way: {search.error.reason}{more if names else ''}"


def _even(search: Search) -> str:
    """What is assumed of experts."""
    return ", if all experts get as many tokens" if search.config.model.num_experts is not None else ""


def between(low: float, high: float) -> str:
    """Two numbers as `12.1-12.5`, or one where they are the same as printed."""
    first, second = (
        f"{each:,.0f}"
        if high >= 1000
        else f"{each:.1f}"
        if high >= 20
        else f"{each:.2f}"
        if high >= 1
        else f"{each:.3g}"
        for each in (low, high)
    )
    return first if first == second else f"{first}-{second}"


def in_words(number: float) -> str:
    """174600000000 -> `174.6 billion`: four digits and the unit that fits."""
    for unit, size in (("trillion", 1e12), ("billion", 1e9), ("million", 1e6)):
        if number >= size:
            return f"{number / size:.4g} {unit}"
    return f"{number:,.0f}"


def explanation(search: Search, planned: Planned) -> str:
    """Where each second of a step goes, and the memory of the fullest stage."""
    step, candidate = planned.step, planned.candidate
    m = candidate.num_microbatches(search.work.global_batch)
    stages = search.stages(candidate)
    of_stages = (
        search.clock.passes_of(candidate, stage.counts, is_first=stage.is_first, is_last=stage.is_last)
        for stage in stages.numbers
    )
    slowest = max(of_stages, key=lambda passes: passes.total)
    parts = Parts().plus(slowest.forward, m).plus(slowest.backward, m).plus(slowest.weight, m)
    rows = [(PART_NAMES[name], seconds) for name, seconds in parts._asdict().items()]
    rows += [
        ("pipeline bubble", step.pipeline.bubble),
        ("transfers between stages", step.pipeline.transfers),
        ("data-parallel exchange", step.exchange),
        ("optimizer", step.optimizer),
        ("forward passes of the reference, or for KTO", step.others),
        ("fixed time and waiting for the slowest rank", step.fixed),
    ]
    total = sum(seconds for _, seconds in rows)
    lines = [f"{name:<44}{seconds:10.3f} s {seconds / total:7.1%}" for name, seconds in rows if seconds]
    lines.append(f"{'all of it, nothing hidden':<44}{total:10.3f} s {1:7.1%}")
    if step.hidden:
        lines.append(f"{'of that, overlap may hide':<44}{step.hidden:10.3f} s {step.hidden / total:7.1%}")
    if step.uneven:
        lines.append(f"{'an uneven load of experts may add':<44}{step.uneven:10.3f} s {step.uneven / total:7.1%}")
    lines.append(f"{'a step':<44}{between(step.low, step.high):>10} s")
    low, high = search.interval(step, candidate)
    lines.append(f"{'with the error of the model':<44}{between(low, high):>10} s")
    owners, memory = planned.fullest.owners, planned.fullest.memory
    elsewhere = (("in memory of the CPU", memory.host), ("on the disk", memory.disk))
    return "\n".join(
        [
            heading(search),
            f"layout: {candidate.mesh_text}, {candidate.choices_text}; {m} micro-batch{'es' if m > 1 else ''} a step",
            f"MFU {100 * mfu(search, high):.1f} to {100 * mfu(search, low):.1f} %, {_error(search, [planned])}",
            "",
            f"time of a step on the slowest stage, {_kernels(search)}:",
            *reservations(search.config),
            *lines,
            "",
            f"memory of stage {planned.fullest.stage}, the fullest{_even(search)}:",
            *(f"{name:<44}{format_bytes(owners[name]):>14}" for name in OWNERS),
            f"{'in all':<44}{format_bytes(memory.total):>14} of {format_bytes(search.limit)}",
            *(f"{name:<44}{format_bytes(size):>14}" for name, size in elsewhere if size),
            *_between_nodes(search, planned),
        ]
    )


def _between_nodes(search: Search, planned: Planned) -> list[str]:
    """What the node that sends most sends to others in a step, and the rate that this asks of its network."""
    config = config_of(search.config, planned.candidate)
    if why_no_traffic(config) is not None:
        return []
    sizes = {"vocab_size": search.work.vocab_size, "gpus_per_node": search.device.gpus_per_node}
    stages = Stages.of(
        config.parallel, config.model, vocab_size=search.work.vocab_size, seq_length=search.work.seq_length
    )
    m = planned.candidate.num_microbatches(search.work.global_batch)
    sent = node_traffic(config, stages.loads(m), **sizes)
    if sent is None:
        return []
    rate, most = sent.total / planned.step.high, search.device.gpus_per_node * search.device.network_gb_s * 1e9
    return [
        "",
        f"bytes that node {sent.node}, the busiest, sends to others in a step, by axis:",
        *(f"{axis:<44}{format_bytes(size):>14}" for axis, size in sent.bytes_by_axis.items() if size >= 1024),
        f"{'in all':<44}{format_bytes(sent.total):>14}, {rate / 1e9:.3g} GB/s over the step; "
        f"a node's network has {most / 1e9:.4g} GB/s",
    ]
