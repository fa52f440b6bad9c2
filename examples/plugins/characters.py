"""A tokenizer of characters: the alphabet is a text file, one token for each character in it.

    python tools/preprocess_data.py --plugin examples/plugins/characters.py --tokenizer-type characters \
        --tokenizer-model ALPHABET.txt --input FILE.jsonl --output-prefix data/text
    python pretrain_gpt.py --plugin examples/plugins/characters.py --tokenizer-type characters \
        --tokenizer-model ALPHABET.txt --data-path data/text_text_document ...
"""

from collections.abc import Sequence
from pathlib import Path

from megatronish.config.sections.data import DataConfig
from megatronish.core.errors import UserError
from megatronish.plugins import register_tokenizer
from megatronish.tokenizer.tokenizer import Tokenizer


class CharacterTokenizer(Tokenizer):
    """Ids are places in the alphabet. Two more follow: a character that is not in it, and the end of a document."""

    def __init__(self, alphabet: str) -> None:
        self.characters = sorted(set(alphabet))
        self.ids = {character: number for number, character in enumerate(self.characters)}
        self.unknown = len(self.characters)
        self.eod = self.unknown + 1
        self.vocab_size = self.eod + 1

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without special tokens."""
        return [self.ids.get(character, self.unknown) for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        return "".join(self.characters[token] for token in ids if token < self.unknown)


def character_tokenizer(data: DataConfig) -> CharacterTokenizer:
    """The tokenizer of a config's [data] section."""
    try:
        return CharacterTokenizer(Path(data.tokenizer_model or "").read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"--tokenizer-model {data.tokenizer_model} cannot be read: {error.strerror}; name the file of the alphabet"
        ) from error


register_tokenizer("characters", character_tokenizer)
