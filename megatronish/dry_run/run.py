"""Dry run of a config: the ranks that were asked for, one after the other, in this process."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from megatronish.config.config import Config
from megatronish.config.rules.run import ALL_STAGES
from megatronish.dry_run.rank import PlannedRun, run_rank
from megatronish.dry_run.report import json_of, text_of, with_expected, write_json
from megatronish.ops.library import load_kernels
from megatronish.tokenizer.tokenizer import build_tokenizer


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
        why_not = load_kernels()
        notes.append(
            f"fused operators as their {'kernels run' if why_not is None else 'references, because ' + why_not}"
        )
        notes += mask_notes(config)
    print(
        f"dry run of {config.layout.world_size} ranks: {config.layout}", *(f"note: {note}" for note in notes), sep="\n"
    )
    found = []
    for rank in ranks_of(config):
        found.append(with_expected(planned, run_rank(planned, rank)))
        print(text_of(planned, found[-1]), flush=True)
    if len(found) > 1:
        fullest = max(found, key=lambda each: each.record.peak)
        print(f"fullest: stage {fullest.record.stage}; all in {time.perf_counter() - start:.1f} s")
    if config.log.dry_run_report is not None:
        write_json(Path(config.log.dry_run_report), json_of(planned, found, notes=notes))
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
    return notes


def mask_notes(config: Config) -> list[str]:
    """What takes the place of FlexAttention, where the model's masks need it on a GPU."""
    model = config.model
    is_masked = model.window_size is not None or model.position_embedding_type == "alibi" or config.data.packs_documents
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
