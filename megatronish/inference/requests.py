"""Requests of OpenAI's interface, as pydantic reads them, and how much one of them may ask for.

A request that is small enough to arrive may still cost much: a million values that pydantic complains about one by one,
a text that is tokenized only to be too long, a stop string that is looked for after each token. So lists are read with
any content and checked here, where the first wrong value is the last that is looked at, and all that takes time has a
bound that follows from what the model sees.
"""

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from megatronish.core.foreign import refuse_deep, size_of

MOST_STOPS, LONGEST_STOP = 16, 500
"""Stop strings of a request, and characters of one: after each token all are looked for. OpenAI takes four."""
LONGEST_TOKEN = 64
"""Characters of a token, of many: a prompt of more for each token that the model sees is too long, without a look."""
HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "top_k": (0, -1),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "tools": ([],),
    "functions": ([],),
    "response_format": ({"type": "text"},),
}
"""Parameters that are not supported, with the values that ask for nothing. Others that are unknown are ignored.

0 is not False: `logprobs` of 0 asks for those of the chosen tokens.
"""


class ApiError(Exception):
    """Error of a request: a sentence, and the fields of OpenAI's errors."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message, self.param, self.code, self.status = message, param, code, status


class StreamOptions(BaseModel):
    """Options of a streamed answer: whether its last chunk has the usage."""

    include_usage: bool = False


class TextRequest(BaseModel):
    """Fields of both kinds of requests, by OpenAI's names."""

    model_config = ConfigDict(extra="allow")

    model: str
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = None
    stop: str | list[Any] | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stream: bool | None = False
    stream_options: StreamOptions | None = None

    @property
    def stop_strings(self) -> list[str]:
        """Texts that end the answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def refuse_stops(self) -> None:
        """ApiError for too many stop strings, for too long ones, and for what is none."""
        found = self.stop_strings
        if len(found) > MOST_STOPS:
            told = f"stop has {len(found)} strings, and {MOST_STOPS} is the limit; leave some out"
            raise ApiError(told, param="stop")
        for number, each in enumerate(found):
            if not isinstance(each, str):
                raise ApiError(f"stop.{number} is {type(each).__name__} and no string; correct it", param="stop")
            if len(each) > LONGEST_STOP:
                told = f"stop.{number} has {len(each)} characters, and {LONGEST_STOP} is the limit; shorten it"
                raise ApiError(told, param="stop")

    def refuse_unsupported(self) -> None:
        """ApiError for a parameter that would change the answer and is not supported."""
        for name, value in (self.model_extra or {}).items():
            harmless = [
                each for each in HARMLESS.get(name, (value,)) if isinstance(each, bool) == isinstance(value, bool)
            ]
            if value is not None and value not in harmless:
                raise ApiError(f"{name}={reprlib.repr(value)} is not supported; leave it out", param=name)


class ChatRequest(TextRequest):
    """Request of /v1/chat/completions, in which messages are objects with role and content."""

    messages: list[Any] = Field(min_length=1)

    def refuse_long(self, messages: Sequence[Any], *, seq_length: int) -> None:
        """ApiError for messages that no template could write as so few tokens, or whose values are too deep."""
        if len(messages) > seq_length:
            raise _too_long(f"{len(messages)} messages", "messages", seq_length)
        try:
            refuse_deep(messages)
        except ValueError as error:
            raise ApiError(f"messages cannot be read: {error}; make them flatter", param="messages") from error
        if (size := size_of(messages)) > seq_length * LONGEST_TOKEN:
            raise _too_long(f"{size} characters", "messages", seq_length)


class TextCompletionRequest(TextRequest):
    """Request of /v1/completions, whose prompt is a text or its tokens."""

    prompt: str | list[Any]

    def one_prompt(self, *, vocab_size: int, seq_length: int) -> str | list[int]:
        """The text or the tokens; ApiError for several, for what is neither, and for what is plainly too long."""
        prompt = self.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
            prompt = prompt[0]
        if isinstance(prompt, str):
            if len(prompt) > seq_length * LONGEST_TOKEN:
                raise _too_long(f"{len(prompt)} characters", "prompt", seq_length)
            return prompt
        if len(prompt) > seq_length and isinstance(prompt[0], int):
            raise _too_long(f"{len(prompt)} tokens", "prompt", seq_length)
        if not prompt or not all(_is_token(each, vocab_size) for each in prompt):
            raise ApiError(
                f"prompt must be one text or a list of tokens below {vocab_size}; send several prompts one by one",
                param="prompt",
            )
        return prompt


def _is_token(value: Any, vocab_size: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab_size


def _too_long(what: str, param: str, seq_length: int) -> ApiError:
    return ApiError(
        f"the prompt has {what}, more than fit into the {seq_length} tokens that the model sees with its answer; "
        "shorten it",
        param=param,
        code="context_length_exceeded",
    )
