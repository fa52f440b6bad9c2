"""What a folder says of its tokenizer besides its vocabulary: tokenizer_config.json and the two older files.

The names of special tokens are in tokenizer_config.json; older folders have them in special_tokens_map.json, which
transformers reads, and prefers, where the first has no `added_tokens_decoder`. Tokens that were added to the vocabulary
are in `added_tokens_decoder`, in older folders in added_tokens.json.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatronish.core import foreign
from megatronish.core.errors import UserError
from megatronish.core.foreign import shown
from megatronish.tokenizer.names import SENTENCEPIECE, TIKTOKEN

TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
"""Keys of the special tokens that have a name."""
MORE_TOKENS = ("additional_special_tokens", "extra_special_tokens")
"""Keys of lists of special tokens without a name, in older and newer files."""
MOST_ADDED = 2**17


class AddedName(NamedTuple):
    """A token that was added to a vocabulary: its name, and whether it is never part of a text."""

    name: str
    is_special: bool


class TokenizerSettings(NamedTuple):
    """Names of special tokens, by their keys; tokens that were added, by their ids; tokens that are put around a text.

    `adds_bos` and `adds_eos` are None where the files do not say. With `one_prefix` (`legacy: false` in the file) a
    SentencePiece model puts a space before the beginning of a text alone, and not after each special token, too.
    """

    tokens: Mapping[str, str]
    added: Mapping[int, AddedName]
    adds_bos: bool | None
    adds_eos: bool | None
    one_prefix: bool = False

    @property
    def eos(self) -> tuple[str, ...]:
        """Name of the token that ends a document; none if the files do not say."""
        return tuple(name for key, name in self.tokens.items() if key == "eos_token")


NO_SETTINGS = TokenizerSettings({}, {}, None, None)


def read_settings(folder: Path) -> TokenizerSettings:
    """Settings in the files of a folder, all of which may be missing; UserError for one that cannot be read."""
    config = read_object(folder / "tokenizer_config.json")
    decoder = config.get("added_tokens_decoder")
    if not isinstance(decoder, dict):
        config = {**config, **read_object(folder / "special_tokens_map.json")}
    tokens = {key: name for key in TOKENS if (name := _name(config.get(key))) is not None}
    listed = (_name(token) for key in MORE_TOKENS for token in _listed(config.get(key)))
    if isinstance(decoder, dict):
        added = {_id(number, folder): _added(token) for number, token in decoder.items()}
    else:
        special = {*tokens.values(), *listed}
        names = read_object(folder / "added_tokens.json")
        added = {_id(number, folder): AddedName(name, name in special) for name, number in names.items()}
    flags = (config.get(key) for key in ("add_bos_token", "add_eos_token"))
    adds_bos, adds_eos = (flag if isinstance(flag, bool) else None for flag in flags)
    return TokenizerSettings(tokens, added, adds_bos, adds_eos, config.get("legacy") is False)


def settings_of(model: Path) -> TokenizerSettings:
    """Settings in the files next to a tokenizer.model or a tiktoken.model; none for a file of another name.

    A folder of such a file may have the files of another tokenizer.
    """
    return read_settings(model.parent) if model.name in (SENTENCEPIECE, TIKTOKEN) else NO_SETTINGS


def stops_of_generation(folder: Path) -> set[int]:
    """Ids of the tokens that end a text by the folder's generation_config.json."""
    path = folder / "generation_config.json"
    stops = read_object(path).get("eos_token_id")
    ids = stops if isinstance(stops, list) else [] if stops is None else [stops]
    if not all(isinstance(token, int) for token in ids):
        raise UserError(f"{path}: eos_token_id={stops!r} must be a token id, or a list of them; correct it")
    return set(ids)


def read_object(path: Path) -> dict[str, Any]:
    """Object of a JSON file, empty if there is none; UserError for any other content."""
    if not path.is_file():
        return {}
    try:
        content = foreign.read_json(path)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a JSON object: {error}; correct or remove it") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON object; correct or remove it")
    return content


def _name(token: Any) -> str | None:
    """Name of a token, which is a text or an object."""
    name = token.get("content") if isinstance(token, dict) else token
    return name if isinstance(name, str) and name else None


def _listed(tokens: Any) -> list[Any]:
    return tokens if isinstance(tokens, list) else list(tokens.values()) if isinstance(tokens, dict) else []


def _added(token: Any) -> AddedName:
    special = token.get("special", False) if isinstance(token, dict) else True
    return AddedName(_name(token) or "", special is True)


def _id(number: Any, folder: Path) -> int:
    try:
        token_id = int(number)
    except (TypeError, ValueError):
        token_id = -1
    if token_id < 0:
        raise UserError(f"{folder} has an added token with the id {shown(number)}, which is none; correct its files")
    return token_id


def behind(settings: TokenizerSettings, size: int, *, source: Path) -> dict[int, AddedName]:
    """Tokens that were added behind a vocabulary of this size; UserError for ids far beyond it."""
    added = {number: token for number, token in sorted(settings.added.items()) if number >= size and token.name}
    if added and max(added) >= size + MOST_ADDED:
        raise UserError(
            f"the files next to {source} add a token with the id {max(added):,}, and its vocabulary has {size:,}; "
            "correct tokenizer_config.json or added_tokens.json"
        )
    return added
