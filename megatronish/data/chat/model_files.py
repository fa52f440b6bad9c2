"""Chat templates in the files of a tokenizer: chat_template.jinja, tokenizer_config.json and what they name."""

from pathlib import Path
from typing import Any, NamedTuple

from megatronish.core import foreign
from megatronish.core.errors import UserError
from megatronish.core.files import ordinary

TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class ModelTemplates(NamedTuple):
    """Templates of a model by name, "default" where it has one, and the names of its special tokens."""

    sources: dict[str, str]
    tokens: dict[str, str]


def read_model_templates(folder: Path) -> ModelTemplates:
    """What the files of a tokenizer's folder say; UserError for a file that cannot be read."""
    config = _read_json(folder / "tokenizer_config.json")
    tokens = {name: text for name in TOKENS if (text := _token(config.get(name))) is not None}
    given: Any = config.get("chat_template")
    sources: dict[str, str] = {}
    if isinstance(given, str):
        sources["default"] = given
    elif isinstance(given, list):
        named = [each for each in given if isinstance(each, dict)]
        sources |= {str(each.get("name")): str(each.get("template")) for each in named}
    for path in [*sorted((folder / "additional_chat_templates").glob("*.jinja")), folder / "chat_template.jinja"]:
        if path.is_file():
            sources["default" if path.parent == folder else path.stem] = read_template(path)
    return ModelTemplates(sources, tokens)


def read_template(path: Path) -> str:
    """Text of a file; UserError if it cannot be read."""
    try:
        return ordinary(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"chat template {path} cannot be read ({error}); correct the path or the file") from error


def _token(value: Any) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = foreign.read_json(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); correct or remove it") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} is no JSON object; correct or remove it")
    return found
