"""Which tokens are trained on, and how are they cut into samples?"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class DataConfig:
    """Data files, splits and the tokenizer."""

    data_path: tuple[str, ...] = ()
    """PREFIX, or WEIGHT PREFIX WEIGHT PREFIX ...: .bin/.idx pairs, cut by --split."""
    train_data_path: tuple[str, ...] = ()
    """Like --data-path, for training alone."""
    valid_data_path: tuple[str, ...] = ()
    """Like --data-path, for validation alone."""
    test_data_path: tuple[str, ...] = ()
    """Like --data-path, for the test at the end alone."""
    multiple_validation_sets: bool = False
    """Evaluate each prefix of --valid-data-path by itself instead of blending them."""
    split: str = "969,30,1"
    """Parts of --data-path for training, validation and test."""
    mock_data: bool = False
    """Train on made-up tokens that can be learned; needs no file and no tokenizer."""
    data_cache_path: str | None = None
    """Where sample indices are kept. Derived: a folder `cache` beside each prefix."""
    reset_position_ids: bool = False
    """Positions start anew at each document of a sample."""
    reset_attention_mask: bool = False
    """Documents packed into one sample do not see each other."""
    eod_mask_loss: bool = False
    """Predictions made from an end-of-document token do not count."""
    num_workers: int = 2
    """Batches prepared ahead by a background thread; 0 prepares them in the loop."""
    tokenizer_type: Literal["sentencepiece", "huggingface", "bytes", "null"] = "sentencepiece"
    """Megatron's names (GPTSentencePieceTokenizer, HuggingFaceTokenizer, ...) are accepted too."""
    tokenizer_model: str | None = None
    """The tokenizer's file (sentencepiece .model, Hugging Face tokenizer.json or its folder)."""
    vocab_file: str | None = None
    """vocab.json of a GPT-2 tokenizer, with --merge-file."""
    merge_file: str | None = None
    """merges.txt of a GPT-2 tokenizer, with --vocab-file."""
    vocab_size: int | None = None
    """True vocabulary. Derived from the tokenizer."""
