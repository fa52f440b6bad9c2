"""Client of an OpenAI-compatible server: its models, and chats with retries. Its errors are sentences without keys.

A request that a busy or broken server has not answered (429, 5xx, a timeout, a lost connection, a body that is no JSON)
is sent again, each wait twice as long as the one before. Redirects are not followed: they would take the key to another
host.
"""

import difflib
import email.message
import hashlib
import http.client
import json
import random
import re
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit, urlunsplit

from megatronish.core.errors import STARS, RunError, UserError

RETRIED = frozenset({408, 425, 429})
"""Statuses, in addition to 5xx, after which the same request may succeed."""
REFUSED = frozenset({400, 413, 422})
"""Statuses of a request that this server never answers: a conversation that is too long, for example."""
LONGEST_WAIT = 60.0  # seconds between two attempts, also where a server's Retry-After is longer
MOST_BYTES = 1 << 26  # of a body
MOST_SAID = 300  # characters of a server's own message in ours
MOST_NAMED = 20  # models of a server in a sentence
LOOPBACK = ("localhost", "127.0.0.1", "::1")

Message = dict[str, str]
"""A message of a chat: {"role": ..., "content": ...}."""
Read = TypeVar("Read")


class RequestRefusedError(UserError):
    """A request that the server will not answer however often it is sent: another one may still be answered."""


class AbandonedError(Exception):
    """End of a request that is waiting to be sent again when the command ends."""


@dataclass(frozen=True)
class Endpoint:
    """A model on a server, as `NAME=URL#MODEL` of a flag gives it; its key is in no text."""

    flag: str
    name: str
    url: str
    model: str
    key: str = field(default="", repr=False)

    def __str__(self) -> str:
        return f"{self.flag} {self.name}={self.url}"


def read_endpoint(flag: str, given: str) -> Endpoint:
    """Endpoint without its key of `NAME=URL` or `NAME=URL#MODEL`. UserError if it is neither.

    A URL without a path gets `/v1`; without `#MODEL` the server knows the model as NAME.
    """
    name, equals, address = given.partition("=")
    name = name.strip()
    if not equals or not name or "://" in name:
        raise UserError(
            f"{flag} {given} must be NAME=URL, for example base=http://127.0.0.1:8000, or NAME=URL#MODEL where the "
            "server calls the model otherwise"
        )
    try:
        parts = urlsplit(address.strip())
        has_host = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        has_host = False
    if not has_host or parts.scheme not in ("http", "https"):
        raise UserError(
            f"{flag} {given}: a URL begins with http:// or https://, then its host, as http://127.0.0.1:8000"
        )
    if "@" in parts.netloc or parts.query:
        raise UserError(
            f"{flag} {name}={parts.scheme}://{parts.netloc.rpartition('@')[2]}: a URL has no password and no query "
            "here; put a key into the environment and name its variable with --key-variable"
        )
    if not address.isascii() or any(letter.isspace() for letter in parts.netloc + parts.path):
        raise UserError(f"{flag} {given}: a URL has no spaces and only ASCII; write others as %20 and the like")
    path = parts.path.rstrip("/") or "/v1"
    url = urlunsplit((parts.scheme, parts.netloc, path.removesuffix("/chat/completions"), "", ""))
    return Endpoint(flag, name, url, parts.fragment or name)


@dataclass(frozen=True)
class RemoteChat:
    """What a server is asked: the messages so far, and how the next one is sampled. None: the server's own choice."""

    messages: tuple[Message, ...]
    max_tokens: int
    temperature: float | None = None
    seed: int | None = None

    def digest(self, endpoint: Endpoint, *purpose: object) -> str:
        """Digest of this request to this model, for a purpose of its own if one is given: 32 hexadecimal digits."""
        content = [endpoint.url, endpoint.model, self.messages, self.max_tokens, self.temperature, self.seed, purpose]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


class ChatAnswer(NamedTuple):
    """Text of an answer, and whether it was cut at `max_tokens`."""

    text: str
    is_cut: bool


@dataclass(frozen=True)
class Patience:
    """Bounds of waiting for a server. `ended` is set when the command ends: no request is sent again then."""

    retries: int
    first_wait: float  # seconds
    timeout: float  # seconds without a byte of an answer
    ended: threading.Event = field(default_factory=threading.Event)


class ChatServer:
    """A model that answers chats. Threads may share it."""

    def __init__(self, endpoint: Endpoint, patience: Patience) -> None:
        self.endpoint, self._patience = endpoint, patience
        self._token_limit = "max_tokens"
        # urllib would ask a proxy for this machine itself, too.
        is_here = urlsplit(endpoint.url).hostname in LOOPBACK
        proxies = urllib.request.ProxyHandler({} if is_here else None)
        self._opener = urllib.request.build_opener(_NoRedirect, proxies)

    def check(self) -> None:
        """UserError if the server does not answer now, is of another kind, or does not know the model."""
        try:
            known = self._reply("/models", None, _names, waits_for_server=False)
        except _NoListError:
            return  # some servers have chats alone: the first of them will tell
        model = self.endpoint.model
        if known and model not in known:
            near = difflib.get_close_matches(model, known, n=3) if len(known) > MOST_NAMED else known
            there = f"it has {', '.join(near)}" if near else f"none of its {len(known)} models has a name like it"
            example = near[0] if near else "MODEL"
            raise UserError(
                f"{self.endpoint}: the server has no model {model}; {there}; name one behind the URL: "
                f"{self.endpoint.flag} {self.endpoint.name}={self.endpoint.url}#{example}"
            )

    def answer(self, request: RemoteChat) -> ChatAnswer:
        """The next message of a chat. RequestRefusedError if it never comes, RunError if the server is lost."""
        limit = self._token_limit
        body: dict[str, Any] = {"model": self.endpoint.model, "messages": request.messages, limit: request.max_tokens}
        body |= {} if request.temperature is None else {"temperature": request.temperature}
        body |= {} if request.seed is None else {"seed": request.seed}
        try:
            return self._reply("/chat/completions", json.dumps(body).encode(), _first_choice)
        except RequestRefusedError as refusal:
            # The name of the same limit for OpenAI's newer models.
            if limit != "max_tokens" or "max_completion_tokens" not in str(refusal):
                raise
            self._token_limit = "max_completion_tokens"
            return self.answer(request)

    def _reply(
        self, path: str, body: bytes | None, read: Callable[[Any], Read], *, waits_for_server: bool = True
    ) -> Read:
        """What `read` finds in the JSON of a reply, after as many attempts as the patience allows."""
        patience, why, asked = self._patience, "", None
        for attempt in range(patience.retries + 1):
            if attempt and patience.ended.wait(_pause(patience.first_wait, attempt, asked)):
                raise AbandonedError
            asked = None
            try:
                status, headers, text = self._exchange(path, body)
            except (OSError, http.client.HTTPException) as error:
                why = f"does not answer: {_reason(error, patience.timeout)}"
                if not waits_for_server or isinstance(_cause(error), ssl.SSLCertVerificationError):
                    raise UserError(f"{self.endpoint} {why}; start its server, or correct the URL") from error
                continue
            if status == HTTPStatus.OK:
                try:
                    return read(_parsed(text))
                except ValueError as error:
                    why = f"answers with {error}"
                    if not waits_for_server:
                        raise UserError(
                            f"{self.endpoint} {why}; is it the URL of an OpenAI-compatible server?"
                        ) from None
                    continue
            why, asked = f"answers with status {status}: {_said(text)}", headers.get("Retry-After")
            if status not in RETRIED and status < HTTPStatus.INTERNAL_SERVER_ERROR:
                raise self._refusal(path, status, text, headers)
        times = "" if patience.retries == 0 else f" ({patience.retries + 1} attempts)"
        raise RunError(
            f"{self.endpoint} {why}{times}; what was answered before is kept: start the same command again when the "
            "server answers, or raise --retries"
        )

    def _exchange(self, path: str, body: bytes | None) -> tuple[int, email.message.Message, str]:
        """Status, headers and text of one request; OSError or HTTPException if none arrives."""
        headers = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "megatronish"}
        if self.endpoint.key:
            headers["Authorization"] = f"Bearer {self.endpoint.key}"
        request = urllib.request.Request(self.endpoint.url + path, data=body, headers=headers)
        try:
            with self._opener.open(request, timeout=self._patience.timeout) as response:
                return response.status, response.headers, self._text(response.read(MOST_BYTES + 1))
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.headers, self._text(error.read(MOST_BYTES))

    def _text(self, body: bytes) -> str:
        """The body as text, in which a server that repeats the key does not show it."""
        if len(body) > MOST_BYTES:
            return ""
        text = body.decode(errors="replace")
        return text.replace(self.endpoint.key, STARS) if self.endpoint.key else text

    def _refusal(self, path: str, status: int, text: str, headers: email.message.Message) -> Exception:
        """What to raise for a status that another attempt would meet again."""
        where, said = str(self.endpoint), _said(text)
        if status in REFUSED and path != "/models":
            return RequestRefusedError(f"{where} refuses a request with status {status}: {said}")
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            remedy = "is the key in it right" if self.endpoint.key else "it may want a key"
            return UserError(
                f"{where} answers with status {status}: {said}; {remedy}? The key belongs into a variable of the "
                f"environment, which --key-variable {self.endpoint.name}=VARIABLE names"
            )
        if HTTPStatus.MULTIPLE_CHOICES <= status < HTTPStatus.BAD_REQUEST:
            return UserError(f"{where} leads to another place, {headers.get('Location', '?')}; name that URL instead")
        if path == "/models" and not _is_page(text):
            return _NoListError()
        return UserError(
            f"{where} answers with status {status}: {said}; is it the URL of an OpenAI-compatible server, up to /v1?"
        )


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


class _NoListError(Exception):
    """A server that does not list its models."""


def _parsed(text: str) -> Any:
    """JSON of a body; ValueError that names what it is instead."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        what = "a web page" if _is_page(text) else "what is no JSON" if text else "nothing"
        raise ValueError(what) from None


def _is_page(text: str) -> bool:
    return re.match(r"\s*<(!doctype|html|head|body|\?xml)", text, re.IGNORECASE) is not None


def _names(reply: Any) -> Sequence[str]:
    """Names of the models in a reply of /models; none where it is of another form, as some servers have it."""
    entries = reply.get("data") if isinstance(reply, dict) else None
    names = [each.get("id") for each in entries if isinstance(each, dict)] if isinstance(entries, list) else []
    return [each for each in names if isinstance(each, str)]


def _first_choice(reply: Any) -> ChatAnswer:
    """The answer in a reply of /chat/completions; ValueError if there is none."""
    try:
        choice = reply["choices"][0]
        text, reason = choice["message"].get("content"), choice.get("finish_reason")
    except (KeyError, IndexError, TypeError, AttributeError):
        raise ValueError("JSON without choices[0].message.content") from None
    if text is not None and not isinstance(text, str):
        raise ValueError("JSON whose choices[0].message.content is no text")
    # Half of a surrogate pair, which some servers send, cannot be written.
    return ChatAnswer((text or "").encode("utf-8", "replace").decode(), reason == "length")


def _said(text: str) -> str:
    """A server's own message in the body of an error."""
    if _is_page(text):
        return "a web page"
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        message = text
    for name in ("error", "message", "detail"):
        if isinstance(message, dict) and name in message:
            message = message[name]
    said = message if isinstance(message, str) else json.dumps(message)
    said = " ".join(said.split()) or "without a reason"
    return said if len(said) <= MOST_SAID else f"{said[:MOST_SAID]}..."


def _cause(error: BaseException) -> BaseException:
    """The error itself in that of urllib."""
    reason = getattr(error, "reason", None)
    return reason if isinstance(reason, BaseException) else error


def _reason(error: BaseException, timeout: float) -> str:
    cause = _cause(error)
    if isinstance(cause, TimeoutError):
        return f"nothing came for {timeout:g} seconds (--timeout-seconds)"
    if isinstance(cause, ssl.SSLError):
        return getattr(cause, "verify_message", "") or cause.reason or str(cause)
    return getattr(cause, "strerror", None) or str(cause) or type(cause).__name__


def _pause(first: float, attempt: int, asked: str | None) -> float:
    """Seconds before an attempt: doubled each time, at random by up to a half less, or what the server asks for."""
    if asked is not None and re.fullmatch(r"\d{1,6}(\.\d{1,6})?", asked.strip()):
        return min(float(asked), LONGEST_WAIT)
    return min(first * 2 ** min(attempt - 1, 30), LONGEST_WAIT) * random.uniform(0.5, 1)
