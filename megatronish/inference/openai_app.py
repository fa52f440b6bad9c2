"""Application of OpenAI's interface, in FastAPI: models, chat completions and completions, streamed or whole.

A request is checked, and becomes prompts and orders for the model.
"""

import asyncio
import json
import reprlib
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

from megatronish.core.errors import UserError, shown, without_passwords
from megatronish.data.chat.conversation import checked_message
from megatronish.inference.chat import ChatPrompts
from megatronish.inference.generate import Sampling
from megatronish.inference.requests import ApiError, ChatRequest, TextCompletionRequest, TextRequest
from megatronish.inference.session import Continuation
from megatronish.inference.text_queue import TextPiece, TextQueue, WantedText
from megatronish.tokenizer.tokenizer import Tokenizer, encode_prompt

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
            tokens = self.prompts.encoder.prompt(messages)
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
    began, preparing = int(time.time()), asyncio.Lock()

    def described(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": began, "owned_by": "megatronish"}

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
        found = [piece async for piece in pieces] or [TextPiece("", 0, "stop")]
        return answer.whole("".join(piece.text for piece in found), found[-1])

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
