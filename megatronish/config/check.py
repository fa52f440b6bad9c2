"""Check of a whole config whose values have their types (read.py): what is missing, ranges, rules over several fields.

The range of a field stands on the field (`marks.py`), the rules of a section in a file of `rules/`.
Whether files exist that it names is asked last: their content is checked by their readers.
"""

import math
from collections.abc import Collection, Iterator
from pathlib import Path

from megatronish.config.config import Config
from megatronish.config.fields import FIELDS, Field, read_fields
from megatronish.config.marks import REQUIRED
from megatronish.config.rules import (
    bert,
    block,
    data,
    experts,
    finetuning,
    latent,
    model,
    optimizer,
    parallel,
    pipeline,
    plugins,
    run,
    t5,
    training,
    width,
)
from megatronish.config.sections.data import MANIFEST, DataConfig, parse_blend, split_part
from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.training import parse_batch_sizes
from megatronish.config.shipped import HOW_TO_MAKE
from megatronish.core.remote import is_url
from megatronish.parallel.schedules.simulate import refuse_schedule
from megatronish.parallel.schedules.table import SCHEDULES

# The check of a config's pipeline plan by the simulator, before any rank starts.


def refuse_unrunnable_plans(config: Config) -> None:
    """UserError, with its picture, for a plan that would hang: of the full batch, or of a smaller one."""
    parallel, training = config.parallel, config.training
    ramp, steps = training.rampup_batch_size, training.step_batch_size_schedule
    sizes = {config.global_batch_size, *(ramp[:1] if ramp else ())}
    sizes |= {size for _, size in parse_batch_sizes(steps, seq_length=training.seq_length)} if steps else set()
    for batch_size in sizes:
        refuse_schedule(
            SCHEDULES[parallel.schedule],
            num_stages=parallel.pipeline_model_parallel_size,
            num_microbatches=batch_size // (training.micro_batch_size * config.layout.dp),
            num_chunks=parallel.num_chunks(config.model.num_layers),
        )


LONGEST, LONGEST_NAME = 4000, 240
"""Characters of a path and of a name in it: Linux takes 4096 and 255, and an ending comes after them."""
MOST_ELEMENTS = 2**48  # of a tensor; torch counts bytes in 64 bits, and no model comes near

# In the order in which their complaints are printed.
RULES = (
    *bert.RULES,
    *t5.RULES,
    *parallel.CUT_RULES,
    *pipeline.STAGE_RULES,
    *training.RECOMPUTE_RULES,
    *pipeline.MICROBATCH_RULES,
    *parallel.BACKEND_RULES,
    *parallel.ZERO_RULES,
    *model.RULES,
    *block.RULES,
    *width.RULES,
    *latent.RULES,
    *model.PREDICTION_RULES,
    *experts.RULES,
    *training.BATCH_RULES,
    *optimizer.LENGTH_RULES,
    *run.RECORD_RULES,
    *optimizer.RATE_RULES,
    *optimizer.CLIP_RULES,
    *training.PRECISION_RULES,
    *training.CUDA_GRAPH_RULES,
    *optimizer.WEIGHT_DECAY_RULES,
    *data.DATA_RULES,
    *data.CHAT_RULES,
    *run.CHECKPOINT_RULES,
    *finetuning.ADAPTER_RULES,
    *finetuning.PREFERENCE_RULES,
    *plugins.RULES,
)


def problems(config: Config, *, invalid: Collection[str] = ()) -> list[str]:
    """Complaints about a config, a sentence each.

    Fields in `invalid` have a complaint already, or are not given and not needed: they are skipped here, with the rules
    that read them.
    """
    missing = _missing(config, invalid=invalid)
    complaint_by_field = missing | _out_of_range(config, invalid={*invalid, *missing})
    without = {*invalid, *complaint_by_field}
    complaints = (rule.complaint(config) for rule in RULES if without.isdisjoint(rule.fields))
    return [*complaint_by_field.values(), *filter(None, complaints)]


def absurd_size(model: ModelConfig, *, vocab_size: int, seq_length: int) -> str | None:
    """Size beyond every maximum in a model that a file describes, asked for before its tensors are made."""
    values = {**vars(model), "ffn_hidden_size": model.ffn_size, "kv_channels": model.head_size}
    values |= {"vocab_size": vocab_size, "seq_length": seq_length}
    for name, value in values.items():
        for bound in FIELDS[name].ranges:
            if value is not None and bound.is_maximum and not bound.holds(value):
                return f"{name}={value} {bound.rule}"
    qkv_rows = (model.num_attention_heads + 2 * model.num_kv_heads) * model.head_size
    rows = max(vocab_size, model.max_position_embeddings or seq_length, qkv_rows, 2 * model.ffn_size)
    if rows * model.hidden_size > MOST_ELEMENTS:
        return f"its largest tensor would have {rows * model.hidden_size} elements, and {MOST_ELEMENTS} is the limit"
    return None


def _missing(config: Config, *, invalid: Collection[str]) -> dict[str, str]:
    """{field: complaint} of required fields that are not given."""
    values, keep = read_fields(config), config.checkpoint
    complaint_by_field = {}
    for name, field in FIELDS.items():
        if REQUIRED not in field.marks or name in invalid or values[name] not in (None, field.default):
            continue
        remedy = f"set it in [{field.section}] of the config file, or add {field.flag}"
        if config.model.has_encoder and name in t5.SIDES:
            remedy = f"of a T5 add {' and '.join(FIELDS[side].flag for side in t5.SIDES[name])}"
        if keep.load is not None and not keep.use_checkpoint_args and name in (*vars(config.model), "seq_length"):
            remedy = f"add --use-checkpoint-args, which takes it from --load {keep.load}, or {field.flag}"
        complaint_by_field[name] = f"{name} is not given; {remedy}"
    return complaint_by_field


def _out_of_range(config: Config, *, invalid: Collection[str]) -> dict[str, str]:
    """{field: complaint} of given numbers outside their range; of two complaints about one number the last."""
    return {
        name: complaint
        for name, value in read_fields(config).items()
        if name not in invalid and value is not None
        for complaint in _range_complaints(FIELDS[name], value)
    }


def _range_complaints(field: Field, value: float) -> Iterator[str]:
    for bound in field.ranges:
        if not (bound.holds(value) and value != math.inf):
            remedy = f"the default is {field.default}" if field.default else f"change {field.flag}"
            rule = "must be finite" if value != value or abs(value) == math.inf else bound.rule
            yield f"{field.name}={value} {rule}; {remedy}"


def missing_files(data: DataConfig) -> list[str]:
    """Complaints about data prefixes and tokenizer files that do not exist; none with --mock-data."""
    if data.mock_data:
        return []
    return [*_missing_data(data), *_missing_tokenizer(data)]


def _missing_data(data: DataConfig) -> Iterator[str]:
    if data.dataset_type != "pretrain":  # what a path of another kind means, that kind knows alone
        return
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        try:
            prefixes = [split_part(path)[0] for _, path in parse_blend(getattr(data, name))]
        except ValueError:  # the rules say so
            continue
        for prefix in prefixes:
            if is_url(prefix):  # its store is asked once, when it is opened
                continue
            # Asked first: the system calls below raise ValueError or OSError for what can be no path.
            if complaint := _no_path(prefix):
                yield f"{name}={prefix[:60]!r}: {complaint}"
                continue
            files = [prefix] if prefix.endswith(MANIFEST) else [f"{prefix}{end}" for end in (".bin", ".idx")]
            missing = [path for path in files if not Path(path).is_file()]
            # What exists and is no ordinary file has another remedy: a pipe would block its reader.
            odd = [path for path in missing if Path(path).exists()]
            if odd:
                yield f"{name}={prefix}: {odd[0]} is no file but a folder, a pipe or a device; name the prefix of files"
            elif missing:
                are = "does not exist" if len(missing) == 1 else "do not exist"
                yield f"{name}={prefix}: {' and '.join(missing)} {are}; {_data_remedy(prefix)}"


def _no_path(text: str) -> str | None:
    """What is wrong with a text that can be no path of files; None if nothing is."""
    if not Path(text).name:
        return "it names no file; name the prefix of files, what stands before .bin and .idx"
    if "\0" in text:
        return "a path has no NUL; correct it"
    if len(text) > LONGEST or max(map(len, Path(text).parts)) > LONGEST_NAME:
        return f"a path of {len(text)} characters is too long; name files elsewhere"
    return None


def _data_remedy(prefix: str) -> str:
    # From the most likely mistake to the least: an ending too much, Megatron-LM's ending left out, files of a shipped
    # config that are not made yet, texts that are no tokens.
    for end in (".bin", ".idx"):
        if prefix.endswith(end) and Path(prefix).is_file():
            return f"leave {end} off: use {prefix.removesuffix(end)}"
    if Path(f"{prefix}_text_document.idx").is_file():
        return f"use {prefix}_text_document"
    if prefix in HOW_TO_MAKE:
        return f"make them in this folder with: {HOW_TO_MAKE[prefix]}; or use --mock-data"
    if Path(prefix).is_file():
        return "chats are read as they are with dataset_type=chat; of other texts make them with megatronish preprocess"
    return "make them with megatronish preprocess, or use --mock-data"


def _missing_tokenizer(data: DataConfig) -> Iterator[str]:
    if data.tokenizer_type not in ("sentencepiece", "huggingface", "tiktoken"):
        return
    for name in ("tokenizer_model", "vocab_file", "merge_file"):
        path = getattr(data, name)
        if path is not None and Path(path).is_dir() and data.tokenizer_type == "sentencepiece":
            yield f"{name}={path} is a folder; name the SentencePiece file in it, or use --tokenizer-type huggingface"
        if path is not None and not Path(path).exists():
            remedy = "correct the path, or use --tokenizer-type bytes, which needs no file"
            if path in HOW_TO_MAKE:
                remedy = f"make it in this folder with: {HOW_TO_MAKE[path]}"
            yield f"{name}={path} does not exist; {remedy}"
