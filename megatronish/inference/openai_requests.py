"""Requests of OpenAI's interface: what they may hold, and the prompts and orders that they become."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from megatronish.data.chat.conversation import checked_message
from megatronish.inference.chat import ChatPrompts
from megatronish.inference.generate import Sampling
from megatronish.inference.session import Continuation
from megatronish.inference.text_queue import WantedText
from megatronish.tokenizer.tokenizer import Tokenizer, encode_prompt

BASE = "base"
"""Name of the model without an adapter."""
LARGEST_SEED = 2**63
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
    stop: str | list[str] | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stream: bool | None = False
    stream_options: StreamOptions | None = None

    @property
    def sampling(self) -> Sampling:
        """How to sample: without a seed, another text each time."""
        seed = secrets.randbelow(LARGEST_SEED) if self.seed is None else self.seed
        temperature, top_p = (1.0 if each is None else each for each in (self.temperature, self.top_p))
        return Sampling(temperature, 0, top_p, seed)

    @property
    def stop_strings(self) -> list[str]:
        """Texts that end the answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def refuse_unsupported(self) -> None:
        """ApiError for a parameter that would change the answer and is not supported."""
        for name, value in (self.model_extra or {}).items():
            harmless = [
                each for each in HARMLESS.get(name, (value,)) if isinstance(each, bool) == isinstance(value, bool)
            ]
            if value is not None and value not in harmless:
                raise ApiError(f"{name}={value!r} is not supported; leave it out", param=name)


class ChatRequest(TextRequest):
    """Request of /v1/chat/completions, in which messages are objects with role and content."""

    messages: list[dict[str, Any]] = Field(min_length=1)


class TextCompletionRequest(TextRequest):
    """Request of /v1/completions, whose prompt is a text or its tokens."""

    prompt: str | list[int] | list[str]


@dataclass(frozen=True)
class ServedModel:
    """What requests are checked against. `prompts` is None for a model that cannot chat, for the reason `why`."""

    tokenizer: Tokenizer
    stops: frozenset[int]
    seq_length: int
    adapters: Sequence[str]
    prompts: ChatPrompts | None
    why: str = ""

    @property
    def names(self) -> list[str]:
        """Names that a request may give as its model."""
        return [BASE, *self.adapters]

    def of_chat(self, request: ChatRequest) -> WantedText:
        """The answer that a request asks for; ApiError for one that cannot be answered."""
        if self.prompts is None:
            raise ApiError(self.why, param="messages")
        try:
            messages = [checked_message(number, each) for number, each in enumerate(request.messages, 1)]
            tokens = self.prompts.encoder.prompt(messages)
        except ValueError as error:
            raise ApiError(str(error), param="messages") from error
        return self._wanted(request, tokens, stops=self.prompts.stops, derived=self.seq_length)

    def of_text(self, request: TextCompletionRequest) -> WantedText:
        """The continuation that a request asks for; ApiError for one that cannot be made."""
        prompt = request.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
            prompt = prompt[0]
        if isinstance(prompt, str):
            tokens = encode_prompt(self.tokenizer, prompt, add_special_tokens=True)
        else:
            tokens = [each for each in prompt if isinstance(each, int) and 0 <= each < self.tokenizer.vocab_size]
            if len(tokens) != len(prompt) or not tokens:
                raise ApiError(
                    f"prompt must be one text or a list of tokens below {self.tokenizer.vocab_size}; send several "
                    "prompts one by one",
                    param="prompt",
                )
        return self._wanted(request, tokens, stops=self.stops, derived=16)

    def _wanted(
        self, request: TextRequest, tokens: Sequence[int], *, stops: frozenset[int], derived: int
    ) -> WantedText:
        """Order of a text after these tokens, at most as long as the model sees."""
        request.refuse_unsupported()
        if request.model not in self.names:
            raise ApiError(
                f"model {request.model!r} is not served; there are {', '.join(self.names)}",
                param="model",
                code="model_not_found",
                status=404,
            )
        room = self.seq_length - len(tokens)
        if room < 1:
            raise ApiError(
                f"the prompt has {len(tokens)} tokens, and the model sees {self.seq_length} with its answer; shorten "
                "it",
                param="prompt" if isinstance(request, TextCompletionRequest) else "messages",
                code="context_length_exceeded",
            )
        most = min(request.max_completion_tokens or request.max_tokens or derived, room)
        adapter = None if request.model == BASE else request.model
        order = Continuation((tuple(tokens),), most, stops, request.sampling, adapter)
        return WantedText(order, request.stop_strings)
