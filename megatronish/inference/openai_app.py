"""Application of OpenAI's interface, in FastAPI: models, chat completions and completions, streamed or whole."""

import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

from megatronish.core.errors import UserError
from megatronish.inference.openai_requests import ApiError, ChatRequest, ServedModel, TextCompletionRequest, TextRequest
from megatronish.inference.text_queue import TextPiece, TextQueue, WantedText

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
    began = int(time.time())

    def described(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": began, "owned_by": "megatronish"}

    @app.get("/v1/models")
    async def models() -> Any:
        return {"object": "list", "data": [described(name) for name in model.names]}

    @app.get("/v1/models/{name}")
    async def one_model(name: str) -> Any:
        if name not in model.names:
            raise ApiError(f"model {name!r} is not served", param="model", code="model_not_found", status=404)
        return described(name)

    @app.post("/v1/chat/completions")
    async def chat(request: ChatRequest, http: Request) -> Any:
        return await respond(Answer(request, model.of_chat(request)), http)

    @app.post("/v1/completions")
    async def complete(request: TextCompletionRequest, http: Request) -> Any:
        return await respond(Answer(request, model.of_text(request)), http)

    async def respond(answer: Answer, http: Request) -> Any:
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
        error = {"message": message, "type": kind, "param": param, "code": code}
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
