"""Sections [data], [fim] and [chat] of a config: data files, their split, the tokenizer, and how samples are made."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple

import tyro

from megatronish.config.marks import NamedIn, at_least, at_most, fraction
from megatronish.core import foreign
from megatronish.core.errors import UserError
from megatronish.core.names import DATASET_NAMES, in_braces
from megatronish.tokenizer.names import TOKENIZER_NAMES

MANIFEST = ".shards.json"
"""Ending of a manifest of shards, which takes the place of a prefix."""
MOCK_VOCAB_SIZE = 4096  # tokens of the made-up data of --mock-data


Packing = Literal["concatenate", "best-fit"]
StoreCacheSize = Annotated[float, at_least(0.001), at_most(1e9)]
"""Gigabytes of a cache of what is on object storage."""


@dataclass(frozen=True)
class DataConfig:
    """Data files, splits and the tokenizer."""

    data_path: tuple[str, ...] = ()
    """PREFIX ..., or WEIGHT PREFIX ...: .bin/.idx pairs, or .shards.json, cut by --split. PREFIX[0:0.9]: 90 % of it.
    They may be on object storage (s3://bucket/PREFIX)."""
    train_data_path: tuple[str, ...] = ()
    """Like --data-path, for training alone."""
    valid_data_path: tuple[str, ...] = ()
    """Like --data-path, for validation alone."""
    test_data_path: tuple[str, ...] = ()
    """Like --data-path, for the test at the end alone."""
    blend_schedule: str | None = None
    """Weights of the training data by step: "0: 0.7 0.3; 1000: 0.5 0.5", one weight a prefix; 0 leaves one out."""
    multiple_validation_sets: bool = False
    """Evaluate each prefix of --valid-data-path by itself instead of blending them."""
    split: str = "969,30,1"
    """Parts of --data-path for training, validation, test. At the default, the last two are left out if too small."""
    mock_data: bool = False
    """Train on made-up tokens that can be learned; needs no file and no tokenizer."""
    dataset_type: Annotated[str, NamedIn(DATASET_NAMES), tyro.conf.arg(metavar=in_braces(DATASET_NAMES))] = "pretrain"
    """What the data paths hold: pretrain and sentences read .bin/.idx pairs, chat JSON lines; a plug-in's kind what it
    likes."""
    dataset_args: tuple[str, ...] = ()
    """Options of a plug-in's kind of data sets: option=value ..."""
    data_cache_path: str | None = None
    """Where sample indices are kept. Derived: a folder `cache` next to each prefix."""
    data_store_cache_path: str | None = None
    """Folder of this machine for what is read of data paths on object storage. Derived: one in the user's cache."""
    data_store_cache_size: StoreCacheSize = 100.0
    """Gigabytes that its blocks may have together; those that were not used for the longest time are removed."""
    packing: Packing = "concatenate"
    """Documents end to end, cut into samples; or best-fit, where only longer ones are cut, and none sees another."""
    reset_position_ids: bool = False
    """Positions start from 0 at each document of a sample."""
    reset_attention_mask: bool = False
    """Documents packed into one sample do not see each other."""
    eod_mask_loss: bool = False
    """Predictions made from an end-of-document token do not count."""
    mask_prob: Annotated[float, fraction(excluding=0)] = 0.15
    """bert: part of the tokens that is chosen: 80 % masked, 10 % replaced, 10 % kept. t5: part that is hidden."""
    mean_span_length: Annotated[float, at_least(1)] = 3.0
    """t5: mean length of a span of hidden tokens."""
    short_seq_prob: Annotated[float, at_least(0), at_most(1)] = 0.1
    """bert: part of the pairs of sentences that are shorter than --seq-length allows."""
    num_workers: Annotated[int, at_least(0), at_most(2**31 - 1)] = 2
    """Batches prepared ahead by a background thread; 0 prepares them in the loop."""
    tokenizer_type: Annotated[str, NamedIn(TOKENIZER_NAMES), tyro.conf.arg(metavar=in_braces(TOKENIZER_NAMES))] = (
        "sentencepiece"
    )
    """Megatron's names (GPTSentencePieceTokenizer, HuggingFaceTokenizer, ...) are accepted too."""
    tokenizer_model: str | None = None
    """The tokenizer's file (sentencepiece .model, Hugging Face tokenizer.json or its folder, a tiktoken file)."""
    vocab_file: str | None = None
    """vocab.json of a GPT-2 tokenizer, with --merge-file; or vocab.txt of a BERT."""
    merge_file: str | None = None
    """merges.txt of a GPT-2 tokenizer, with --vocab-file."""
    tiktoken_pattern: Literal["v1", "v2", "gpt2", "cl100k", "kimi"] = "v2"
    """How a tiktoken tokenizer splits text into words: two ways of Megatron-LM, those of GPT-2, Llama 3 and Kimi K2."""
    tiktoken_num_special_tokens: Annotated[int, at_least(1), at_most(2**31 - 1)] = 1000
    """Special tokens that come first in a tiktoken vocabulary of JSON."""
    tiktoken_special_tokens: tuple[str, ...] = ()
    """Names of a tiktoken tokenizer's special tokens. Derived: <unk> <s> </s> ..., or <|endoftext|> for a text file."""
    vocab_extra_ids: Annotated[int, at_least(0), at_most(1_000_000)] = 0
    """t5: sentinels of hidden spans, added to the vocabulary of a tokenizer that has none called <extra_id_0>."""
    vocab_size: Annotated[int | None, at_least(1), at_most(2**31 - 1)] = None
    """True vocabulary. Derived from the tokenizer."""

    @property
    def needs_path(self) -> bool:
        """Whether its kind of data sets reads the data paths in any case."""
        return not self.mock_data and DATASET_NAMES[self.dataset_type].needs_path

    @property
    def packs_documents(self) -> bool:
        """Whether samples hold documents that do not see each other, or filler that no token sees."""
        pads = DATASET_NAMES[self.dataset_type].has_sentences or self.has_chats
        pads = pads or (self.packing == "best-fit" and not self.mock_data)
        return self.reset_attention_mask or pads

    @property
    def has_chats(self) -> bool:
        """Whether the data paths hold chats, or pairs of texts."""
        return self.dataset_type == "chat" and not self.mock_data


def parse_blend(values: Sequence[str]) -> list[tuple[float | None, str]]:
    """PREFIX ... or WEIGHT PREFIX WEIGHT PREFIX ... -> [(weight, prefix), ...].

    Without weights each weight is None: every prefix counts in proportion to its size. A prefix that reads as a number
    is written ./12. ValueError where weights and prefixes do not alternate, or the weights make no sense.
    """
    numbers = [_as_number(value) for value in values]
    for value in values:
        split_part(value)
    if all(number is None for number in numbers):
        return [(None, value) for value in values]
    pairs = list(zip(numbers[::2], values[1::2], strict=False))
    text = " ".join(values)
    alternating = all(number is not None for number in numbers[::2]) and all(number is None for number in numbers[1::2])
    if len(values) % 2 or not alternating:
        raise ValueError(
            f"{text!r}: weights and prefixes must alternate; write WEIGHT PREFIX WEIGHT PREFIX, or no weight"
        )
    weights = [number for number in numbers[::2] if number is not None]
    if not all(weight >= 0 for weight in weights) or not 0 < sum(weights) < math.inf:
        raise ValueError(
            f"{text!r}: weights must not be negative, one must be positive, and their sum finite; for example "
            "0.3 A 0.7 B"
        )
    return pairs


class BlendPhase(NamedTuple):
    """Weights of the prefixes from a start on, a step in a config, a sample in a data set."""

    start: int
    weights: tuple[float, ...]


def parse_blend_schedule(text: str, *, num_prefixes: int) -> list[BlendPhase]:
    """ "0: 0.7 0.3; 1000: 0.5 0.5" -> phases by step. ValueError with rule and remedy for what is no schedule."""
    example = '; for example "0: 0.7 0.3; 1000: 0.5 0.5"'
    phases = []
    for part in text.strip().removesuffix(";").split(";"):
        start, colon, values = part.partition(":")
        weights = [_as_number(value) for value in values.split()]
        known = [weight for weight in weights if weight is not None and math.isfinite(weight) and weight >= 0]
        if not colon or not re.fullmatch(r"\d{1,12}", start.strip(), re.ASCII) or len(known) != len(weights):
            raise ValueError(f"{text!r}: {part.strip()!r} must be STEP: WEIGHT WEIGHT ..., none negative{example}")
        if not 0 < sum(known) < math.inf:
            raise ValueError(
                f"{text!r}: of the weights of step {start.strip()} one must be positive, and their sum finite{example}"
            )
        if len(known) != num_prefixes:
            raise ValueError(
                f"{text!r}: step {start.strip()} has {len(known)} weights for {num_prefixes} prefixes of the training "
                "data; give one weight a prefix, 0 to leave one out"
            )
        phases.append(BlendPhase(int(start), tuple(known)))
    starts = [phase.start for phase in phases]
    if starts[0] != 0 or any(later <= earlier for earlier, later in pairwise(starts)):
        raise ValueError(f"{text!r}: steps must begin with 0 and rise{example}")
    return phases


def split_part(path: str) -> tuple[str, tuple[float, float]]:
    """PREFIX[0.2:0.9] -> (PREFIX, (0.2, 0.9)), the documents from a fifth up to nine tenths; without it all of them.

    ValueError for a part that is empty, or outside 0 to 1.
    """
    match = re.fullmatch(r"(.+)\[([^:\[\]]*):([^:\[\]]*)\]", path)
    if match is None:
        return path, (0.0, 1.0)
    start, end = _as_number(match[2]), _as_number(match[3])
    if start is None or end is None or not 0 <= start < end <= 1:
        raise ValueError(f"{path!r} must have a part between 0 and 1, as in {match[1]}[0:0.9]")
    return match[1], (start, end)


def parse_split(split: str) -> tuple[float, float, float]:
    """ "969,30,1" -> parts for training, validation and test, which sum to 1; missing parts are 0. ValueError."""
    parts = [_as_number(part.strip()) for part in split.replace("/", ",").split(",")]
    sizes = [part for part in parts if part is not None and math.isfinite(part) and part >= 0]
    if len(sizes) != len(parts) or len(sizes) > 3 or not 0 < sum(sizes) < math.inf:
        raise ValueError(
            f"{split!r} must be up to three parts, none negative, with a positive, finite sum; for example 969,30,1"
        )
    train, valid, test = (size / sum(sizes) for size in [*sizes, 0.0, 0.0][:3])
    return train, valid, test


def _as_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


@dataclass(frozen=True)
class FimConfig:
    """Fill in the middle: texts whose middle comes last, so that a model learns to write between two texts."""

    fim_data: bool = False
    """Give documents, or their parts in a sample, a beginning, an end and then a middle; Bavarian et al. 2022."""
    fim_rate: Annotated[float, at_least(0), at_most(1)] = 0.5
    """Part of the documents that become so; others stay as they are."""
    fim_spm_rate: Annotated[float, at_least(0), at_most(1)] = 0.5
    """Part of these whose end comes first (SPM); of the others the beginning does (PSM)."""
    fim_split_sample: str | None = None
    """A token at which documents are split into fragments, such as the files of a repository."""
    fim_fragment_rate: Annotated[float | None, at_least(0), at_most(1)] = None
    """Part of the fragments that become so, of documents that --fim-rate has chosen. Derived: --fim-rate."""
    fim_no_prefix: str | None = None
    """A document or fragment that begins with this text stays as it is."""
    fim_prefix_token: str | None = None
    """Name of the token before a beginning. Derived: as StarCoder, Qwen, DeepSeek or Code Llama call it."""
    fim_middle_token: str | None = None
    """Name of the token before a middle. Derived as that before a beginning."""
    fim_suffix_token: str | None = None
    """Name of the token before an end. Derived as that before a beginning."""
    fim_pad_token: str | None = None
    """Name of the token that fills up a sample. Derived: the tokenizer's own, or the one that ends a document."""
    fim_eod_token: str | None = None
    """Name of the token at which documents end. Derived: the tokenizer's own."""


ChatFormat = Literal[
    "auto", "openai", "sharegpt", "alpaca", "prompt_completion", "input_target", "text", "pairs", "labelled"
]
TrainOn = Literal["assistant", "last", "all"]


@dataclass(frozen=True)
class ChatConfig:
    """Chats: their format, the template that writes them as text, the tokens that are trained, and packing."""

    chat_format: ChatFormat = "auto"
    """Format of the files; `auto` takes that of the first good line of each file. `labelled` reads pairs, too: as a
    wanted and an unwanted completion."""
    chat_template: str | None = None
    """A template of the package (chatml, llama3, ...), a .jinja file, or a named one of the model. Derived: its own."""
    chat_template_kwargs: str | None = None
    """Variables of the template, as JSON: '{"enable_thinking": false}' for Qwen 3."""
    chat_date: str = "2024-07-26"
    """Date (YYYY-MM-DD) for templates that write the date of today, so that tokens do not change overnight."""
    train_on: TrainOn = "assistant"
    """Tokens of the loss: of all answers, of the last one, or all. A message with "train": false never counts."""
    pack_samples: bool = True
    """Several chats in a row of --seq-length tokens, which do not see each other; else one a row, as t5 always has."""


def template_variables(chat: ChatConfig) -> dict[str, Any]:
    """Variables that a config gives to its chat template; UserError for what is no JSON object."""
    if (written := chat.chat_template_kwargs) is None:
        return {}
    try:
        variables = foreign.parse_json(written)
    except ValueError as error:
        raise UserError(f"chat_template_kwargs={foreign.shown(written)} is no JSON ({error}); correct it") from error
    if not isinstance(variables, dict):
        raise UserError(
            f"chat_template_kwargs={foreign.shown(written)} is no JSON object; write it as "
            """'{"enable_thinking": false}'"""
        )
    return variables
