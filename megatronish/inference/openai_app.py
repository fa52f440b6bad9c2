"""Application of OpenAI's interface, in FastAPI: models, chat completions and completions, streamed or whole.

A request is checked, and becomes prompts and orders for the model. One that is small enough to arrive may still cost
much: a million values that pydantic complains about one by one, a text that is tokenized only to be too long, a stop
string that is looked for after each token. So lists are read with any content and checked here, where the first wrong
value is the last that is looked at, and all that takes time has a bound that follows from what the model sees.
"""

import asyncio
import json
import reprlib
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from megatronish.core.errors import UserError, shown, without_passwords
from megatronish.core.foreign import refuse_deep, size_of
from megatronish.data.chat.conversation import checked_message
from megatronish.inference.chat import ChatPrompts
from megatronish.inference.generate import Sampling
from megatronish.inference.session import Continuation
from megatronish.inference.text_queue import TextPiece, TextQueue, WantedText
from megatronish.tokenizer.tokenizer import Tokenizer, encode_prompt

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
        stops = self.stop_strings
        if len(stops) > MOST_STOPS:
            told = f"stop has {len(stops)} strings, and {MOST_STOPS} is the limit; leave some out"
            raise ApiError(told, param="stop")
        for number, each in enumerate(stops):
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
    chat_template_kwargs: dict[str, Any] | None = None

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


BASE = "base"
"""Name of the model without an adapter."""
LARGEST_SEED = 2**63


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

    def of_chat(self, request: ChatRequest) -> Continuation:
        """The order of the answer that a request asks for; ApiError for one that cannot be answered."""
        self._refuse(request)
        if self.prompts is None:
            raise ApiError(self.why, param="messages")
        request.refuse_long(request.messages, seq_length=self.seq_length)
        try:
            messages = [checked_message(number, each) for number, each in enumerate(request.messages, 1)]
            request.refuse_long(messages, seq_length=self.seq_length)  # arguments of calls may be JSON inside of JSON
            variables = request.chat_template_kwargs or {}
            request.refuse_long([variables], seq_length=self.seq_length)
            tokens = self.prompts.encoder.prompt(messages, variables=variables)
        except ValueError as error:
            raise ApiError(str(error), param="messages") from error
        return self._order(request, tokens, stops=self.prompts.stops, derived=self.seq_length)

    def of_text(self, request: TextCompletionRequest) -> Continuation:
        """The order of the continuation that a request asks for; ApiError for one that cannot be made."""
        self._refuse(request)
        prompt = request.one_prompt(vocab_size=self.tokenizer.vocab_size, seq_length=self.seq_length)
        if isinstance(prompt, str):
            prompt = encode_prompt(self.tokenizer, prompt, add_special_tokens=True)
        return self._order(request, prompt, stops=self.stops, derived=16)

    def _refuse(self, request: TextRequest) -> None:
        """ApiError for what is wrong with a request, before its prompt is looked at."""
        request.refuse_unsupported()
        request.refuse_stops()
        if request.model not in self.names:
            raise ApiError(
                f"model {reprlib.repr(request.model)} is not served; there are {', '.join(self.names)}",
                param="model",
                code="model_not_found",
                status=404,
            )

    def _order(
        self, request: TextRequest, tokens: Sequence[int], *, stops: frozenset[int], derived: int
    ) -> Continuation:
        """Order of a text after these tokens, at most as long as the model sees."""
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
        return Continuation((tuple(tokens),), most, stops, _sampling(request), adapter)


def _sampling(request: TextRequest) -> Sampling:
    """How to sample: without a seed, another text each time."""
    seed = secrets.randbelow(LARGEST_SEED) if request.seed is None else request.seed
    temperature, top_p = (1.0 if each is None else each for each in (request.temperature, request.top_p))
    return Sampling(temperature, 0, top_p, seed)


CHAT, TEXT = "chat.completion", "text_completion"


class Answer:
    """Answer to one request in OpenAI's form, whole or in chunks."""

    def __init__(self, request: TextRequest, wanted: WantedText) -> None:
        self.request, self.wanted = request, wanted
        self.is_chat = isinstance(request, ChatRequest)
        self._identity = {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": request.model,
        }

    def whole(self, text: str, last: TextPiece) -> dict[str, Any]:
        """The answer as one object."""
        content = {"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": last.reason}
        kind = CHAT if self.is_chat else TEXT
        return {**self._identity, "object": kind, "choices": [choice], "usage": self._usage(last.num_tokens)}

    async def lines(self, pieces: AsyncIterator[TextPiece]) -> AsyncIterator[str]:
        """Server-sent events: chunks, of which the first has the role and the last the reason of the end."""
        if self.is_chat:
            yield self._event({"delta": {"role": "assistant", "content": ""}})
        count = 0
        async for piece in pieces:
            count = piece.num_tokens
            if piece.text:
                yield self._event({"delta": {"content": piece.text}} if self.is_chat else {"text": piece.text})
            if piece.reason:
                yield self._event({"delta": {}} if self.is_chat else {"text": ""}, reason=piece.reason)
        options = self.request.stream_options
        if options is not None and options.include_usage:
            yield self._line([], usage=self._usage(count))
        yield "data: [DONE]\n\n"

    def _event(self, content: dict[str, Any], *, reason: str | None = None) -> str:
        return self._line([{"index": 0, **content, "logprobs": None, "finish_reason": reason}])

    def _line(self, choices: list[Any], **more: Any) -> str:
        kind = f"{CHAT}.chunk" if self.is_chat else TEXT
        return f"data: {json.dumps({**self._identity, 'object': kind, 'choices': choices, **more})}\n\n"

    def _usage(self, num_tokens: int) -> dict[str, int]:
        before = len(self.wanted.order.prompts[0])
        return {"prompt_tokens": before, "completion_tokens": num_tokens, "total_tokens": before + num_tokens}


def make_app(model: ServedModel, texts: TextQueue) -> Any:
    """The application; texts are written by the thread that works on the queue."""
    app = FastAPI(title="megatronish", openapi_url=None)
    _answer_errors(app)
    chat_page = (files("megatronish.inference") / "chat_page.html").read_text(encoding="utf-8")
    began, preparing = int(time.time()), asyncio.Lock()

    def described(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": began, "owned_by": "megatronish"}

    @app.get("/")
    async def page() -> Any:
        return HTMLResponse(chat_page)

    @app.get("/health")
    async def health() -> Any:
        return {"status": "ok", "models": model.names}

    @app.get("/v1/models")
    async def models() -> Any:
        return {"object": "list", "data": [described(name) for name in model.names]}

    @app.get("/v1/models/{name}")
    async def one_model(name: str) -> Any:
        if name not in model.names:
            told = f"model {reprlib.repr(name)} is not served"
            raise ApiError(told, param="model", code="model_not_found", status=404)
        return described(name)

    @app.post("/v1/chat/completions")
    async def chat(request: ChatRequest, http: Request) -> Any:
        return await respond(request, partial(model.of_chat, request), http)

    @app.post("/v1/completions")
    async def complete(request: TextCompletionRequest, http: Request) -> Any:
        return await respond(request, partial(model.of_text, request), http)

    async def respond(request: TextRequest, order: Callable[[], Continuation], http: Request) -> Any:
        # A long prompt takes a while to be tokenized: one at a time, and other requests are heard meanwhile.
        async with preparing:
            wanted = WantedText(await asyncio.to_thread(order), request.stop_strings)
        answer = Answer(request, wanted)
        if not texts.add(answer.wanted):
            raise ApiError("as many requests wait as may (--max-queue); ask again later", status=429)
        pieces = answer.wanted.pieces(http.is_disconnected)
        if answer.request.stream:
            return StreamingResponse(answer.lines(pieces), media_type="text/event-stream")
        all_pieces = [piece async for piece in pieces] or [TextPiece("", 0, "stop")]
        return answer.whole("".join(piece.text for piece in all_pieces), all_pieces[-1])

    return app


def _answer_errors(app: Any) -> None:
    """Errors in OpenAI's form, with the status of each kind."""

    def response(message: str, *, status: int, param: str | None = None, code: str | None = None) -> Any:
        kind = "invalid_request_error" if status < 500 else "server_error"
        error = {"message": shown(without_passwords(message)), "type": kind, "param": param, "code": code}
        return JSONResponse({"error": error}, status_code=status)

    @app.exception_handler(ApiError)
    async def of_request(_request: Request, error: ApiError) -> Any:
        return response(error.message, status=error.status, param=error.param, code=error.code)

    @app.exception_handler(UserError)
    async def of_user(_request: Request, error: UserError) -> Any:
        return response(str(error), status=400)

    @app.exception_handler(RequestValidationError)
    async def of_body(_request: Request, error: RequestValidationError) -> Any:
        first = error.errors()[0]
        param = ".".join(str(each) for each in first["loc"] if each != "body")
        return response(f"{param or 'the body'}: {first['msg']}", status=400, param=param or None)

    @app.exception_handler(HTTPException)
    async def of_path(request: Request, error: HTTPException) -> Any:
        return response(f"{request.method} {request.url.path}: {error.detail}", status=error.status_code)

    @app.exception_handler(Exception)
    async def of_server(_request: Request, error: Exception) -> Any:
        return response(f"{type(error).__name__}: {error}", status=500)
