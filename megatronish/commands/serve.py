"""Server behind `megatronish serve`: HTTP in a thread of the main rank, the model in its main thread."""

import importlib
import os
import signal
import socket
import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatronish.commands.inference_flags import ServeArguments
from megatronish.commands.model_loading import OpenedModel, open_model
from megatronish.core.errors import UserError
from megatronish.inference.chat import ChatPrompts
from megatronish.inference.session import Session
from megatronish.inference.text_queue import TextQueue
from megatronish.launch.local import launch
from megatronish.launch.place import Place
from megatronish.parallel.mesh import leave

BASE = "base"
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class ServerTask:
    """Checked input of every rank: the model and its chats. Without a chat template, `why` says so."""

    arguments: ServeArguments
    model: OpenedModel
    prompts: ChatPrompts | None
    why: str


def prepare(arguments: ServeArguments) -> ServerTask:
    """The server of these arguments; every user error is raised here, before any rank starts."""
    for name in ("max_request_bytes", "max_request_seconds", "max_connections", "max_queue"):
        if not 0 < getattr(arguments, name) < 2**53:
            raise UserError(f"--{name.replace('_', '-')} {getattr(arguments, name)} must be above 0; or leave it out")
    listen(arguments).close()
    model = open_model(arguments, waits=True)
    for name in ("fastapi", "uvicorn"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise UserError(f"{name} is not installed; pip install 'megatronish[serve]'") from error
    if BASE in model.found.adapters:
        raise UserError(
            f"--adapter has the name {BASE}, which is that of the model itself; give it another: NAME=FOLDER"
        )
    prompts, why = None, ""
    try:
        prompts = ChatPrompts.of(
            model.found,
            model.tokenizer,
            template=arguments.chat_template,
            variables=arguments.chat_template_kwargs,
            seq_length=model.seq_length,
        )
    except UserError as error:
        if arguments.chat_template is not None or arguments.chat_template_kwargs is not None:
            raise
        why = str(error)
    return ServerTask(arguments, model, prompts, why)


def listen(arguments: ServeArguments) -> socket.socket:
    """A socket at the address; UserError where it cannot be had."""
    host, port = arguments.host, arguments.port
    if not 0 <= port < 65536:
        raise UserError(f"--port {port} must be from 0 to 65535; for example 8000")
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else error
        raise UserError(
            f"--host {host} --port {port} cannot be listened at: {why}; choose another --port, or 0 for any"
        ) from error


def serve(task: ServerTask, place: Place) -> int:
    """The server on one rank, and its exit status."""
    listening = listen(task.arguments) if place.rank == 0 else None
    session = task.model.load(place)
    if listening is not None:
        answer_requests(task, session, listening)
        session.close()
    else:
        for signum in SIGNALS:  # the main rank ends the session, after the requests in progress
            signal.signal(signum, signal.SIG_IGN)
        session.follow()
    leave()
    return 0


def answer_requests(task: ServerTask, session: Session, listening: socket.socket) -> None:
    """Serve until a signal asks to end, on the main rank."""
    import uvicorn  # an extra

    from megatronish.inference.limits import Limits, limited, protocol
    from megatronish.inference.openai_app import ServedModel, make_app

    model = task.model
    served = ServedModel(
        model.tokenizer, model.stops, model.seq_length, tuple(model.found.adapters), task.prompts, task.why
    )
    asked = task.arguments
    texts = TextQueue(session, model.tokenizer.decode, most=asked.max_queue)
    limits = Limits(
        asked.host, asked.allowed_hosts, asked.max_request_bytes, asked.max_request_seconds, asked.max_connections
    )
    app = limited(make_app(served, texts), limits)
    options: dict[str, Any] = {"log_level": "warning", "timeout_graceful_shutdown": 3, "ws": "none"}
    server = uvicorn.Server(uvicorn.Config(app, http=protocol(limits), **options))
    thread = threading.Thread(target=partial(server.run, sockets=[listening]), daemon=True)

    def end(*_: Any) -> None:
        server.should_exit = True

    before = {signum: signal.signal(signum, end) for signum in SIGNALS}
    thread.start()
    while thread.is_alive() and not server.started:
        time.sleep(0.01)
    host, port = listening.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    print(f"serving {', '.join(served.names)} at {address}/v1\nto chat in a browser: {address}/", flush=True)
    texts.work(lambda: server.should_exit or not thread.is_alive())
    thread.join()
    for signum, handler in before.items():
        signal.signal(signum, handler)


def run(arguments: ServeArguments, _place: Place | None = None) -> int:
    """The server on all ranks, and the exit status."""
    task = prepare(arguments)
    return launch(partial(serve, task), world_size=task.model.config.layout.world_size, interactive=True)
