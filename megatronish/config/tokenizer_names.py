"""What does Megatron-LM call our tokenizers?"""

from typing import Literal, get_args

from megatronish.errors import UserError

TokenizerType = Literal["sentencepiece", "huggingface", "bytes", "null"]

MEGATRON_TOKENIZERS: dict[str, TokenizerType] = {
    "SentencePieceTokenizer": "sentencepiece",
    "GPTSentencePieceTokenizer": "sentencepiece",
    "Llama2Tokenizer": "sentencepiece",
    "HuggingFaceTokenizer": "huggingface",
    "GPT2BPETokenizer": "huggingface",
    "NullTokenizer": "null",
}


def tokenizer_type(name: str) -> TokenizerType:
    """Our name of the tokenizer that `name`, ours or Megatron's, means. UserError if there is none."""
    ours: tuple[TokenizerType, ...] = get_args(TokenizerType)
    known = {kind: kind for kind in ours} | MEGATRON_TOKENIZERS
    if name not in known:
        raise UserError(
            f"--tokenizer-type {name} is not known; use one of {', '.join(ours)}, "
            f"or Megatron's {', '.join(MEGATRON_TOKENIZERS)}"
        )
    return known[name]
