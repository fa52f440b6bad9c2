"""Dry run of a config: the ranks that were asked for, one after the other, in this process."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatronish.config.config import Config
from megatronish.config.rules.run import ALL_STAGES
from megatronish.dry_run.rank import DryRank, PlannedRun, run_rank
from megatronish.estimate.costs.memory import expected_memory
from megatronish.estimate.costs.memory_table import Memory, format_bytes
from megatronish.estimate.costs.step_traffic import TrafficKey
from megatronish.estimate.costs.traffic import expected_traffic
from megatronish.ops.library import fuses_dropout
from megatronish.ops.report import kernels_line
from megatronish.tokenizer.build import build_tokenizer

# Report of a dry run: what was found for each rank, as text and as JSON.


GIB = 2**30


class Expected(NamedTuple):
    """A rank's record, with the memory and the bytes by axis that costs/ expects of its stage."""

    record: DryRank
    memory: Memory
    sent: dict[TrafficKey, int]

    @property
    def expected_only(self) -> dict[TrafficKey, int]:
        """Bytes that costs/ expects of what is never called."""
        return {key: size for key, size in self.sent.items() if not self.record.counts.calls[key]}


def with_expected(planned: PlannedRun, record: DryRank) -> Expected:
    """The record, and what estimate/costs expects of its rank."""
    loads = planned.stages.loads(planned.num_microbatches)
    load, kernels = loads[record.stage], fuses_dropout("cuda")
    config, vocab_size = planned.config, planned.vocab_size
    memory = expected_memory(config, [load], vocab_size=vocab_size, kernels=kernels, shard_ranks=record.shard_ranks)[0]
    sent = expected_traffic(config, load, record.stage, vocab_size=vocab_size, shard_ranks=record.shard_ranks)
    return Expected(record, memory, sent)


def text_of(planned: PlannedRun, found: Expected) -> str:
    """Lines about one rank."""
    record, memory = found.record, found.memory
    counts, layout = record.counts, planned.config.layout
    run = f"{record.num_run} micro-batches" if record.num_run > 1 else "1 micro-batch"
    more = planned.num_microbatches - record.num_run
    lines = [
        f"rank {record.rank} of {layout.world_size} (stage {record.stage}): {record.num_layers} layers, "
        f"{record.num_parameters:,} parameters; {run} run" + (f", {more} more counted" if more else ""),
        f"  peak memory {format_bytes(record.peak)} in the {record.phase}; expected {format_bytes(memory.total)} "
        f"({100 * (record.peak / memory.total - 1):+.1f} %); while it is built {format_bytes(record.build_peak)}"
        + (", MORE THAN IN THE STEP: this is what the device must have" if record.build_peak > record.peak else ""),
        "    " + ", ".join(f"{owner} {format_bytes(size)}" for owner, size in record.owners.items() if size),
        "    largest besides model state:",
    ]
    for group, number, size in record.largest:
        lines.append(f"      {format_bytes(size):>10}  {number:>5} x {group.shape} {group.owner}: {group.made_by}")
    lines.append("  bytes a step, by axis and collective:")
    for traffic, calls in sorted(counts.calls.items()):
        sent, expected = counts.sent[traffic], found.sent.get(traffic, 0)
        differs = "" if sent == expected else f", expected {format_bytes(expected)}"
        lines.append(f"    {traffic.axis:<14}{traffic.collective:<16}{calls:>8} calls{format_bytes(sent):>14}{differs}")
    for traffic, expected in sorted(found.expected_only.items()):
        none = f"{0:>8} calls{format_bytes(0):>14}, expected {format_bytes(expected)}"
        lines.append(f"    {traffic.axis:<14}{traffic.collective:<16}{none}")
    total = sum(counts.flops.values())
    flops = ", ".join(f"{name.strip('_')} {value:.3g}" for name, value in counts.flops.most_common())
    squares = "; flash attention as the whole square, of which a causal mask needs half"
    lines.append(f"  FLOPs a step: {total:.4g} ({flops}{squares if _has_flash(counts.flops) else ''})")
    if counts.uncounted:
        products = ", ".join(f"{number} of {name}" for name, number in counts.uncounted.most_common())
        lines.append(f"  not among these FLOPs, as no formula counts them, are products: {products}")
    waits = "; ".join(f"{number} in {site}" for site, number in counts.waits.items())
    lines.append(f"  the host waits for the device {sum(counts.waits.values())} times a step: {waits}")
    mesh, build, step = record.seconds
    lines.append(
        f"  {record.num_operators:,} operators in {mesh + build + step:.1f} s (mesh {mesh:.1f}, build {build:.1f}, "
        f"step {step:.1f})"
    )
    return "\n".join(lines)


def _has_flash(flops: Mapping[str, int]) -> bool:
    return any("flash_attention" in name for name in flops)


def json_of(planned: PlannedRun, found: Sequence[Expected], *, notes: Sequence[str]) -> dict[str, Any]:
    """All ranks, with bytes as they are."""
    return {
        "world_size": planned.config.layout.world_size,
        "device": planned.device_type,
        "micro_batches": planned.num_microbatches,
        "notes": list(notes),
        "ranks": [_json_of_rank(each) for each in found],
    }


def _json_of_rank(found: Expected) -> dict[str, Any]:
    record, memory = found.record, found.memory
    counts = record.counts
    return {
        "rank": record.rank,
        "stage": record.stage,
        "layers": record.num_layers,
        "parameters": record.num_parameters,
        "micro_batches_run": record.num_run,
        "peak_bytes": record.peak,
        "peak_phase": record.phase,
        "build_peak_bytes": record.build_peak,
        "owners": record.owners,
        "expected_memory": {**memory._asdict(), "total": memory.total},
        "expected_only": {f"{key.axis} {key.collective}": size for key, size in found.expected_only.items()},
        "largest": [{"bytes": size, "number": number, **group._asdict()} for group, number, size in record.largest],
        "traffic": [
            {**traffic._asdict(), "calls": calls, "bytes": counts.sent[traffic], "expected": found.sent.get(traffic, 0)}
            for traffic, calls in sorted(counts.calls.items())
        ],
        "flops": dict(counts.flops),
        "uncounted_products": dict(counts.uncounted),
        "host_waits": dict(counts.waits),
        "operators": record.num_operators,
        "seconds": dict(zip(("mesh", "build", "step"), record.seconds, strict=True)),
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """The report as a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def dry_run(config: Config, *, device_type: str, notes: Sequence[str]) -> int:
    """Print a report of each rank, and write all of them as JSON where --dry-run-report says so; the exit status."""
    start, notes = time.perf_counter(), list(notes)
    torch.set_num_threads(1)  # there is nothing to compute
    training = config.training
    notes += notes_of_left_out(config)
    config = replace(config, training=replace(training, compile=False, cuda_graph=False))
    vocab_size = config.data.vocab_size or build_tokenizer(config.data).vocab_size
    planned = PlannedRun(config, vocab_size, device_type)
    if device_type == "cuda":
        notes.append(kernels_line(device_type))
        notes += mask_notes(config)
    print(
        f"dry run of {config.layout.world_size} ranks: {config.layout}", *(f"note: {note}" for note in notes), sep="\n"
    )
    reports = []
    for rank in ranks_of(config):
        reports.append(with_expected(planned, run_rank(planned, rank)))
        print(text_of(planned, reports[-1]), flush=True)
    if len(reports) > 1:
        fullest = max(reports, key=lambda each: each.record.peak)
        print(f"fullest: stage {fullest.record.stage}; all in {time.perf_counter() - start:.1f} s")
    if config.log.dry_run_report is not None:
        write_json(Path(config.log.dry_run_report), json_of(planned, reports, notes=notes))
    return 0


def notes_of_left_out(config: Config) -> list[str]:
    """What the config asks for and a dry run leaves out, and what is not that of the run because of it."""
    notes = []
    if config.training.compile:
        notes.append(
            "the config asks for --compile, which is left out: each operator runs by itself, so activations, temporary "
            "bytes and the number of operators are those of a run that is not compiled"
        )
    if config.training.cuda_graph:
        notes.append(
            "the config asks for --cuda-graph, which is left out: gradients are given back between steps, and the "
            "host's waits are those of a run without a graph"
        )
    if config.parallel.wants_deep_ep:
        notes.append(
            "the config asks for --moe-token-dispatcher-type deepep, which is left out: tokens go to experts by "
            "all-to-all, a row for each choice, which is no fewer bytes"
        )
    return notes


def mask_notes(config: Config) -> list[str]:
    """What takes the place of FlexAttention, where the model's masks need it on a GPU."""
    model = config.model
    is_masked = any(model.windowed_layers) or model.position_embedding_type == "alibi" or config.data.packs_documents
    if not is_masked or config.training.attention_backend != "auto" or model.attention_dropout:
        return []
    return ["masks go to FlexAttention, as on a GPU with Triton; a stand-in has its memory and its FLOPs"]


def ranks_of(config: Config) -> list[int]:
    """The ranks that --rank asks for."""
    wanted = config.log.rank
    assert wanted is not None, "a dry run of ranks names them"
    if wanted == ALL_STAGES:
        return [config.layout.rank(pp=stage) for stage in range(config.layout.pp)]
    return [int(wanted)]
