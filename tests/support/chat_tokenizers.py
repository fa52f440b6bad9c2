"""Small tokenizers with control tokens for tests of chats, and samples of chats as text with marks."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from megatronish.config.sections.data import TrainOn
from megatronish.data.chat.audit import runs_of
from megatronish.data.chat.encoder import ChatEncoder, EncodedChat
from megatronish.data.chat.prepare import read_record
from megatronish.data.chat.template import ChatTemplate
from megatronish.tokenizer.hugging_face import HuggingFaceTokenizer
from megatronish.tokenizer.tokenizer import Tokenizer

DATE = "2024-07-26"


def byte_level(controls: Sequence[str] = (), *, bos: str = "<s>", eos: str = "</s>") -> tokenizers.Tokenizer:
    """Tokenizer of single bytes with control tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens([bos, eos, *controls])
    return model


def with_controls(controls: Sequence[str] = (), *, eos: str = "</s>") -> HuggingFaceTokenizer:
    model = byte_level(controls, eos=eos)
    return HuggingFaceTokenizer(model, eod=model.token_to_id(eos))


def encoder(
    tokenizer: Tokenizer,
    template: str,
    *,
    train_on: TrainOn = "assistant",
    bos: str = "<s>",
    eos: str = "</s>",
    name: str = "of the test",
) -> ChatEncoder:
    controls = tokenizer.control_encoder()
    variables = {"bos_token": bos, "eos_token": eos}
    made = ChatTemplate(template, name=name, controls=list(controls.names), variables=variables, date=DATE)
    return ChatEncoder(controls, made, train_on=train_on)


def encode(encoder: ChatEncoder, record: dict[str, Any]) -> list[EncodedChat]:
    return encoder.encode(read_record(json.dumps(record).encode(), format_name="auto")[1])


def trained_text(sample: EncodedChat, tokenizer: Tokenizer) -> list[str]:
    """The text of each run of trained tokens."""
    runs = runs_of(sample.tokens.tolist(), sample.mask.tolist(), tokenizer, tokenizer.control_encoder())
    return [run.text for run in runs if run.is_trained]


def whole_text(sample: EncodedChat, tokenizer: Tokenizer) -> str:
    runs = runs_of(sample.tokens.tolist(), sample.mask.tolist(), tokenizer, tokenizer.control_encoder())
    return "".join(run.text for run in runs)


def said(*texts: str, system: str | None = None, **of_last: Any) -> dict[str, Any]:
    """Record of a dialogue of the user and the assistant in turn; the last message has more fields."""
    messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    for number, text in enumerate(texts):
        messages.append({"role": "assistant" if number % 2 else "user", "content": text})
    messages[-1] |= of_last
    return {"messages": messages}


def save_tokenizer(folder: Path, controls: Sequence[str], *, template: str | None = None, **config: Any) -> Path:
    """Folder of a tokenizer as Hugging Face's models have it."""
    folder.mkdir(parents=True, exist_ok=True)
    byte_level(controls).save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", **config}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings if template is None else {**settings, "chat_template": template})
    )
    return folder


def write_lines(path: Path, records: Sequence[object]) -> Path:
    """A file of JSON lines; a record that is text is written as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in records))
    return path
