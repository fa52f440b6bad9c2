"""Comparison of a run's tokenizer with that of the model it starts from: chats in other tokens would teach nonsense.

Vocabularies of one size, or one that is smaller, raise no error anywhere else: every token is a row of the embedding,
but another text's row. Tokens that a tokenizer has in addition (control tokens of chats, say) make no difference here.
"""

from dataclasses import replace

from megatronish.config.config import Config
from megatronish.config.model_source import TOKENIZER_FIELDS
from megatronish.config.sections.data import DataConfig
from megatronish.core.errors import UserError
from megatronish.formats.start import read_start
from megatronish.tokenizer.tokenizer import Tokenizer, build_tokenizer

PROBE = "The quick brown fox, 1234567 times: x = [i**2 for i in range(10)]\n\tÜber naïve 漢字 ½ don't STOP."
"""Text of words, numbers, code and other scripts, which different vocabularies cut differently."""

OF_TEXT = ("sentencepiece", "huggingface", "tiktoken")
"""Kinds that a model was trained with on text; data of the others may have been made by any tokenizer."""


def refuse_other_tokenizer(config: Config, tokenizer: Tokenizer) -> None:
    """UserError if chats are read with another tokenizer than that of the model to start from.

    A model without a tokenizer, or whose tokenizer's files have gone, has nothing to compare with.
    """
    if config.data.dataset_type != "chat":
        return
    start = read_start(config.checkpoint)
    if start is None or not start.tokenizer:
        return
    fields = {name: getattr(DataConfig(), name) for name in TOKENIZER_FIELDS} | start.tokenizer
    own = replace(config.data, **fields)
    if own == config.data or own.tokenizer_type not in OF_TEXT:
        return
    try:
        expected = build_tokenizer(own).encode(PROBE)
    except (UserError, OSError):
        return
    if tokenizer.encode(PROBE) != expected:
        named = config.data.tokenizer_model or config.data.vocab_file or config.data.tokenizer_type
        theirs = own.tokenizer_model or own.vocab_file or own.tokenizer_type
        raise UserError(
            f"the tokenizer {named} writes text in other tokens than {theirs}, that of the model to start from "
            f"({start.source}); leave --tokenizer-model and --tokenizer-type out"
        )
