"""Rules on data: files and their split, the tokenizer, and chats."""

import datetime

from megatronish.config.config import Config
from megatronish.config.fields import FIELDS, fields_of
from megatronish.config.rules.rule import ConfigRule
from megatronish.config.sections.data import (
    ChatConfig,
    FimConfig,
    parse_blend,
    parse_blend_schedule,
    parse_split,
    template_variables,
)
from megatronish.core.errors import UserError
from megatronish.tokenizer.names import WORDPIECE


def _data(config: Config) -> str | None:
    data = config.data
    if data.needs_path and not (data.data_path or data.train_data_path):
        what = "PREFIX (of PREFIX.bin and PREFIX.idx)" if data.dataset_type == "pretrain" else "PATH"
        return f"no data is given; add --data-path {what}, or --mock-data"
    if data.multiple_validation_sets and not (data.valid_data_path or data.data_path or data.mock_data):
        return "multiple_validation_sets needs several prefixes; add --valid-data-path, or leave it out"
    return None


def _blends(config: Config) -> str | None:
    data = config.data
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        try:
            parse_blend(getattr(data, name))
        except ValueError as error:
            return f"{name}={error}"
    return None


def _blend_schedule(config: Config) -> str | None:
    data = config.data
    if data.blend_schedule is None:
        return None
    if data.mock_data or data.has_chats:
        kind = "mock_data" if data.mock_data else "dataset_type=chat"
        what = "reads no files" if data.mock_data else "mixes chats before they are packed into samples"
        return f"blend_schedule changes from which prefix a sample comes, and {kind} {what}; leave it out"
    name = "data_path" if data.data_path else "train_data_path"
    try:
        prefixes = parse_blend(getattr(data, name))
    except ValueError:  # the rule above says so
        return None
    if name == "train_data_path" and any(weight is not None for weight, _ in prefixes):
        return "blend_schedule has the weights of train_data_path already; leave the weights between its prefixes out"
    try:
        parse_blend_schedule(data.blend_schedule, num_prefixes=len(prefixes))
    except ValueError as error:
        return f"blend_schedule={error}"
    return None


def _split(config: Config) -> str | None:
    try:
        train, _, _ = parse_split(config.data.split)
    except ValueError as error:
        return f"split={error}"
    if config.data.data_path and train == 0:
        return f"split={config.data.split!r} leaves nothing to train on; for example --split 969,30,1"
    return None


def _tokenizer(config: Config) -> str | None:
    data = config.data
    if data.mock_data:
        return None
    if data.tokenizer_type == "null" and data.vocab_size is None:
        return "tokenizer_type=null needs a vocabulary; add --vocab-size"
    if data.tokenizer_type == "sentencepiece" and data.tokenizer_model is None and config.checkpoint.load_hf:
        return (
            f"--load-hf {config.checkpoint.load_hf} holds no tokenizer that is known here (tokenizer.json, or "
            "tokenizer.model); let transformers save it again, or name one with --tokenizer-model"
        )
    if data.tokenizer_type == "sentencepiece" and data.tokenizer_model is None:
        return (
            "tokenizer_type=sentencepiece needs its file; add --tokenizer-model FILE.model, or --tokenizer-type bytes, "
            "which needs none"
        )
    if data.tokenizer_type in WORDPIECE and data.tokenizer_model is None and data.vocab_file is None:
        return f"tokenizer_type={data.tokenizer_type} needs its file; add --vocab-file vocab.txt"
    if data.tokenizer_type == "tiktoken" and data.tokenizer_model is None:
        return "tokenizer_type=tiktoken needs its file; add --tokenizer-model FILE.json, or FILE.tiktoken"
    if data.tokenizer_type == "huggingface" and data.tokenizer_model is None:
        if (data.vocab_file is None) != (data.merge_file is None):
            return "vocab_file and merge_file belong together; add the other, or use --tokenizer-model tokenizer.json"
        if data.vocab_file is None:
            return (
                "tokenizer_type=huggingface needs its files; add --tokenizer-model tokenizer.json, or --vocab-file and "
                "--merge-file"
            )
    return None


def _packing(config: Config) -> str | None:
    data, model_type = config.data, config.model.model_type
    if data.packing == "concatenate":
        return None
    if data.mock_data or data.dataset_type != "pretrain":
        kind = "mock_data" if data.mock_data else f"dataset_type={data.dataset_type}"
        return f"packing={data.packing} packs documents of .bin/.idx pairs, and {kind} reads none; leave it out"
    if model_type != "gpt":
        return f"packing={data.packing} is for GPTs, and model_type={model_type} takes text end to end; leave it out"
    return None


_FIM_FIELDS = tuple(fields_of(FimConfig, "fim"))


def _fim(config: Config) -> str | None:
    data, model_type = config.data, config.model.model_type
    if not config.fim.fim_data:
        given = [name for name in _FIM_FIELDS if getattr(config.fim, name) != FIELDS[name].default]
        if not given:
            return None
        return f"{given[0]}={getattr(config.fim, given[0])} says nothing without --fim-data; add it, or leave this out"
    if data.mock_data or data.dataset_type != "pretrain":
        kind = "mock_data" if data.mock_data else f"dataset_type={data.dataset_type}"
        return f"fim_data cuts documents of .bin/.idx pairs, and {kind} reads none; leave it out"
    if model_type != "gpt":
        return f"fim_data is for GPTs, and model_type={model_type} has other objectives; leave it out"
    if config.fim.fim_fragment_rate is not None and config.fim.fim_split_sample is None:
        return (
            f"fim_fragment_rate={config.fim.fim_fragment_rate} is for fragments; add --fim-split-sample TOKEN, which "
            "is between them, or leave it out"
        )
    return None


DATA_RULES = (
    ConfigRule(
        (
            "data_path",
            "train_data_path",
            "valid_data_path",
            "multiple_validation_sets",
            "mock_data",
            "dataset_type",
        ),
        _data,
    ),
    ConfigRule(("data_path", "train_data_path", "valid_data_path", "test_data_path"), _blends),
    ConfigRule(("blend_schedule", "data_path", "train_data_path", "mock_data", "dataset_type"), _blend_schedule),
    ConfigRule(("split", "data_path"), _split),
    ConfigRule(("packing", "mock_data", "dataset_type", "model_type"), _packing),
    ConfigRule((*_FIM_FIELDS, "mock_data", "dataset_type", "model_type"), _fim),
    ConfigRule(
        ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "vocab_size", "mock_data", "load_hf"),
        _tokenizer,
    ),
)

_FIELDS = tuple(fields_of(ChatConfig, "chat"))


def _date(config: Config) -> str | None:
    try:
        datetime.date.fromisoformat(config.chat.chat_date)
    except ValueError:
        return f"chat_date={config.chat.chat_date} is no date; write it as 2024-07-26"
    return None


def _variables(config: Config) -> str | None:
    try:
        template_variables(config.chat)
    except UserError as error:
        return str(error)
    return None


def _unread(config: Config) -> str | None:
    given = [name for name in _FIELDS if getattr(config.chat, name) != FIELDS[name].default]
    if not given or config.data.dataset_type == "chat":
        return None
    name = given[0]
    return f"{name}={getattr(config.chat, name)} is read for chats alone; add --dataset-type chat, or leave it out"


CHAT_RULES = (
    ConfigRule(("chat_date",), _date),
    ConfigRule(("chat_template_kwargs",), _variables),
    ConfigRule((*_FIELDS, "dataset_type"), _unread),
)
