"""Perplexity behind `megatronish evaluate`: the text, its windows and the model on all ranks, and the results."""

import json
import math
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megatronish.commands.bad_lines import BadLines
from megatronish.commands.inference_flags import EvaluateArguments
from megatronish.commands.model_loading import refuse_encoder
from megatronish.config.config import Config
from megatronish.config.defaults import smallest_dp
from megatronish.config.plugins import PluginsConfig, import_plugins
from megatronish.config.sections.parallel import ParallelConfig
from megatronish.config.sections.training import TrainingConfig
from megatronish.core.errors import UserError
from megatronish.core.files import refuse_input_as_output
from megatronish.data.loader import Collator
from megatronish.data.text import TokenizedText, Windows, read_text
from megatronish.data.token_files import TokenFiles
from megatronish.inference.load import SavedModel, find_trained, load_engine
from megatronish.inference.scoring import Perplexity, measure
from megatronish.launch.local import launch
from megatronish.launch.place import Place
from megatronish.parallel.mesh import leave
from megatronish.tokenizer.build import build_tokenizer
from megatronish.train.start import start_mesh

MAX_DERIVED_SEQ_LENGTH = 4096  # windows of 131072 tokens, as some models allow, cost much memory and time
OF_TASKS = ("include_path", "num_fewshot", "limit", "apply_chat_template", "chat_template", "log_samples")


@dataclass(frozen=True)
class Evaluation:
    """Checked input of every rank: the checkpoint, its config in the new layout, the text and its windows."""

    arguments: EvaluateArguments
    found: SavedModel
    config: Config
    text: TokenizedText
    windows: Windows


def prepare(arguments: EvaluateArguments, place: Place | None) -> Evaluation:
    """The evaluation of these arguments; every user error is raised here, before any rank starts."""
    check(arguments)
    if arguments.data_path is None:
        raise UserError("nothing to evaluate; name a text with --data-path, or --tasks of the harness")
    if (given := next((name for name in OF_TASKS if getattr(arguments, name)), None)) is not None:
        raise UserError(f"--{given.replace('_', '-')} is for tasks; name some with --tasks, or leave it out")
    import_plugins(arguments.plugin)
    adapters = {} if arguments.adapter is None else {"adapter": arguments.adapter}
    saved_model = find_trained(
        arguments.load, step=arguments.ckpt_step, tokenizer=arguments.tokenizer_model, adapters=adapters
    )
    refuse_encoder(saved_model)
    refuse_input_as_output("--output", arguments.output, [saved_model.checkpoint, *saved_model.adapters.values()])
    config = saved_model.config(*sections(arguments, saved_model, place))
    seq_length = config.training.seq_length
    stride = seq_length if arguments.stride is None else arguments.stride
    if not 1 <= stride <= seq_length:
        raise UserError(f"--stride {stride} must be at least 1 and at most --seq-length {seq_length}; or leave it out")
    text = read_text(
        arguments.data_path,
        tokenizer=partial(build_tokenizer, saved_model.description.data),
        json_key=arguments.json_key,
        vocab_size=saved_model.description.vocab_size,
        eod=saved_model.description.eod,
        files=TokenFiles(arguments.data_store_cache_path, arguments.data_store_cache_size),
    )
    starts = text.starts if arguments.per_document else text.starts[[0, -1]]
    windows = Windows(text.tokens, starts, seq_length=seq_length, stride=stride)
    if windows.num_predictions == 0:
        raise UserError(
            f"--data-path {arguments.data_path} has no document of two tokens, of which the second could be predicted; "
            "leave --per-document out"
        )
    windows = windows.narrowed(
        multiple_of=sequence_pieces(config.parallel, has_experts=config.model.num_experts is not None)
    )
    training = replace(
        config.training,
        seq_length=windows.seq_length,
        micro_batch_size=min(arguments.micro_batch_size, -(-len(windows) // config.layout.dp)),
    )
    config = replace(config, training=training, plugins=PluginsConfig(arguments.plugin))
    return Evaluation(arguments, saved_model, config, text, windows)


def check(arguments: EvaluateArguments) -> None:
    """UserError for numbers out of range and for an --output that cannot be written."""
    if arguments.seq_length is not None and arguments.seq_length < 1:
        raise UserError(f"--seq-length {arguments.seq_length} must be at least 1; or leave it out")
    if arguments.micro_batch_size < 1:
        raise UserError(f"--micro-batch-size {arguments.micro_batch_size} must be at least 1; or leave it out")
    if arguments.output is None:
        return
    refuse_input_as_output("--output", arguments.output, [arguments.data_path, arguments.tokenizer_model])
    is_new = not arguments.output.exists()
    try:
        arguments.output.open("a").close()
    except OSError as error:
        raise unwritable(arguments.output, error) from error
    if is_new:
        arguments.output.unlink(missing_ok=True)


def unwritable(path: Path, error: OSError) -> UserError:
    """The error for an --output that cannot be written."""
    return UserError(f"--output {path} cannot be written: {error.strerror}; choose another")


def sequence_pieces(parallel: ParallelConfig, *, has_experts: bool) -> int:
    """Divisor of the window length in a layout: cp cuts windows into 2 cp chunks, sequence parallelism over tp.

    The tokens of a router are cut over tp, too.
    """
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    return math.lcm(2 * cp if cp > 1 else 1, cp * tp if parallel.sequence_parallel or has_experts else 1)


def sections(
    arguments: EvaluateArguments, found: SavedModel, place: Place | None
) -> tuple[ParallelConfig, TrainingConfig]:
    """Config sections of these arguments: the layout, and the shape and precision of a micro-batch."""
    parallel = ParallelConfig(
        tensor_model_parallel_size=arguments.tensor_model_parallel_size,
        pipeline_model_parallel_size=arguments.pipeline_model_parallel_size,
        context_parallel_size=arguments.context_parallel_size,
        data_parallel_size=arguments.data_parallel_size,
        expert_model_parallel_size=arguments.expert_model_parallel_size,
        expert_tensor_parallel_size=arguments.expert_tensor_parallel_size,
        sequence_parallel=arguments.sequence_parallel,
        zero_stage=arguments.zero_stage,
        device=arguments.device,
    )
    if parallel.data_parallel_size is None:
        fewest = smallest_dp(Config(model=found.description.model, parallel=parallel))
        copies = fewest if place is None else max(1, place.world_size // parallel.model_parallel_size)
        parallel = replace(parallel, data_parallel_size=copies)
    seq_length = arguments.seq_length or min(found.description.seq_length, MAX_DERIVED_SEQ_LENGTH)
    training = TrainingConfig(seq_length=seq_length, micro_batch_size=arguments.micro_batch_size, bf16=arguments.bf16)
    return parallel, training


def be_rank(task: Evaluation, place: Place) -> int:
    """Evaluation on one rank, and its exit status."""
    mesh = start_mesh(task.config, place)
    engine = load_engine(task.found, task.config, mesh)
    start = time.perf_counter()
    with tqdm(total=len(task.windows), unit=" windows", disable=None if mesh.is_main else True) as bar:
        measurement = measure(
            engine,
            task.windows,
            collate=Collator.of(task.found.description.data, eod=task.text.eod),
            micro_batch_size=task.config.training.micro_batch_size,
            num_bytes=task.text.num_bytes,
            on_progress=bar.update,
        )
    if mesh.is_main:
        tell(task, measurement, seconds=time.perf_counter() - start)
    leave()
    return 0


def tell(task: Evaluation, found: Perplexity, *, seconds: float) -> None:
    """Print the results, and write them to --output."""
    arguments, windows, bits = task.arguments, task.windows, found.bits_per_byte
    bad = f" and {len(task.text.bad_lines):,} bad lines" if task.text.bad_lines else ""
    documents = len(task.text.starts) - 1
    print(
        f"{arguments.data_path}: {documents:,} documents{bad}, {found.num_predictions:,} tokens predicted in "
        f"{len(windows):,} windows of {windows.seq_length:,}, stride {windows.stride:,}\n"
        f"step {task.found.step} | loss {found.loss:.6f} nats/token | perplexity {found.perplexity:.6g} | "
        f"{'' if bits is None else f'{bits:.6f} bits/byte | '}"
        f"{seconds:.1f} s | {found.num_predictions / seconds:,.0f} tokens/s",
        flush=True,
    )
    if arguments.output is None:
        return
    numbers: dict[str, Any] = {
        "checkpoint": str(task.found.checkpoint),
        "step": task.found.step,
        "data_path": arguments.data_path,
        "per_document": arguments.per_document,
        "seq_length": windows.seq_length,
        "stride": windows.stride,
        "documents": documents,
        "bad_lines": len(task.text.bad_lines),
        "tokens": found.num_predictions,
        "text_bytes": found.num_bytes,
        "loss": finite(found.loss),
        "perplexity": finite(found.perplexity),
        "bits_per_byte": None if bits is None else finite(bits),
        "seconds": seconds,
        "tokens_per_second": found.num_predictions / seconds,
    }
    try:
        arguments.output.write_text(json.dumps(numbers, indent=1) + "\n")
    except OSError as error:
        raise unwritable(arguments.output, error) from error


def tell_of_short_windows(task: Evaluation) -> None:
    """Message about windows shorter than the model's length in training, where only MAX_DERIVED_SEQ_LENGTH is why."""
    shown, trained = task.windows.seq_length, task.found.description.seq_length
    if task.arguments.seq_length is None and shown == MAX_DERIVED_SEQ_LENGTH < trained:
        print(
            f"windows show {shown:,} tokens, though the model was trained with {trained:,}: --seq-length {trained} "
            "shows so many, for more memory and time",
            file=sys.stderr,
        )


def finite(number: float) -> float | None:
    """The number, or None for infinity and NaN, which JSON does not have."""
    return number if math.isfinite(number) else None


def run(arguments: EvaluateArguments, place: Place | None = None) -> int:
    """Evaluation on all ranks, and the exit status."""
    task = prepare(arguments, place)
    if place is None or place.rank == 0:
        bad_lines = BadLines(partial(print, file=sys.stderr))
        for message in task.text.bad_lines:
            bad_lines.tell(message)
        tell_of_short_windows(task)
    return launch(partial(be_rank, task), world_size=task.config.layout.world_size)
