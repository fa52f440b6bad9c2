"""Byte-level BPE that is trained on a few texts, as the tokenizers of GPT-2 and later are."""

import tokenizers

from megatronish.tokenizer.hugging_face import HuggingFaceTokenizer

TEXTS = (
    "A text of many words, don't we'LL 12345 67 and many more; the other text has words as well.\n\n",
    "  def f(x):\n\treturn [i ** 2 for i in range(100)]\r\n   # naïve café ½ é e\u0301 ſ 'ſ İ 'S\n",
    "漢字かな한국어 مرحبا नमस्ते Ελλάδα Привет 😀👩\u200d👩",
    "\u00a0\u2003\u0085\u2028 <|endoftext|> \x00\x1c \u180e\ufeff   ",
    "",
)


def trained(pattern: str | None = None) -> tokenizers.Tokenizer:
    """A BPE of 400 tokens; words are those of the expression, or of GPT-2."""
    words, letters = tokenizers.pre_tokenizers, tokenizers.pre_tokenizers.ByteLevel.alphabet()
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    if pattern is None:
        model.pre_tokenizer = words.ByteLevel(add_prefix_space=False)
    else:
        split = words.Split(tokenizers.Regex(pattern), "isolated")
        model.pre_tokenizer = words.Sequence([split, words.ByteLevel(add_prefix_space=False, use_regex=False)])
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=letters, show_progress=False
    )
    model.train_from_iterator(TEXTS * 3, trainer)
    return model


def tokenizer_of(model: tokenizers.Tokenizer) -> HuggingFaceTokenizer:
    """Our tokenizer of a model of the library."""
    return HuggingFaceTokenizer(model, eod=model.token_to_id("<|endoftext|>"))
