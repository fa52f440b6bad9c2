"""What does Megatron-LM call our tokenizers?"""

TOKENIZER_TYPES = ("sentencepiece", "huggingface", "bytes", "null")

MEGATRON_TOKENIZERS = {
    "SentencePieceTokenizer": "sentencepiece",
    "GPTSentencePieceTokenizer": "sentencepiece",
    "Llama2Tokenizer": "sentencepiece",
    "HuggingFaceTokenizer": "huggingface",
    "GPT2BPETokenizer": "huggingface",
    "NullTokenizer": "null",
}


def tokenizer_type(name: str) -> str:
    """Our name of the tokenizer that `name`, ours or Megatron's, means. ValueError if there is none."""
    found = MEGATRON_TOKENIZERS.get(name, name)
    if found not in TOKENIZER_TYPES:
        raise ValueError(
            f"--tokenizer-type {name} is not known; use one of {', '.join(TOKENIZER_TYPES)}, "
            f"or Megatron's {', '.join(MEGATRON_TOKENIZERS)}"
        )
    return found
