"""Queue of texts: programs ask for them from other threads, and one thread, which has the model, writes one by one."""

import asyncio
import queue
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from megatronish.inference.session import Continuation, Session
from megatronish.inference.text_stream import TextStream

SECONDS_BETWEEN_LOOKS = 0.2


class TextPiece(NamedTuple):
    """New part of a text; the last one has the reason of the end. `num_tokens` were generated so far."""

    text: str
    num_tokens: int
    reason: Literal["stop", "length"] | None = None


@dataclass
class WantedText:
    """Text that a program waits for in an event loop; its pieces arrive there."""

    order: Continuation
    stop_strings: Sequence[str] = ()
    is_cancelled: bool = False
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop, init=False)
    _arrived: "asyncio.Queue[TextPiece]" = field(default_factory=asyncio.Queue, init=False)

    def put(self, piece: TextPiece) -> None:
        """Hand a piece over, from any thread."""
        self._loop.call_soon_threadsafe(self._arrived.put_nowait, piece)

    async def pieces(self, has_left: Callable[[], Awaitable[bool]]) -> AsyncIterator[TextPiece]:
        """Pieces as they are written. A reader that stops reading, or `has_left`, ends the text."""
        try:
            while not await has_left():
                try:
                    piece = await asyncio.wait_for(self._arrived.get(), SECONDS_BETWEEN_LOOKS)
                except TimeoutError:
                    continue
                yield piece
                if piece.reason is not None:
                    return
        finally:
            self.is_cancelled = True


class TextQueue:
    """Texts that are wanted from a session, written in the order in which they were asked for."""

    def __init__(self, session: Session, decode: Callable[[Sequence[int]], str], *, most: int = 64) -> None:
        self._session, self._decode = session, decode
        self._wanted: queue.Queue[WantedText] = queue.Queue(most)

    def add(self, wanted: WantedText) -> bool:
        """Put a text at the end of the queue; False if as many wait as may."""
        try:
            self._wanted.put_nowait(wanted)
        except queue.Full:
            return False
        return True

    def work(self, is_over: Callable[[], bool]) -> None:
        """Write texts until `is_over`, on the main rank, by the thread that uses the model."""
        while not is_over():
            try:
                wanted = self._wanted.get(timeout=SECONDS_BETWEEN_LOOKS)
            except queue.Empty:
                continue
            if not wanted.is_cancelled:
                self._write(wanted, is_over)

    def _write(self, wanted: WantedText, is_over: Callable[[], bool]) -> None:
        stream = TextStream(self._decode, stop_strings=wanted.stop_strings)

        def ends(_number: int) -> bool:
            return stream.has_stopped or wanted.is_cancelled or is_over()

        for _, token in self._session.generate(wanted.order, ends=ends):
            if token is not None and not stream.has_stopped and (text := stream.add(token)):
                wanted.put(TextPiece(text, len(stream.tokens)))
        text, count = stream.finish(), len(stream.tokens)
        is_cut = count == wanted.order.num_tokens and not stream.has_stopped
        wanted.put(TextPiece(text, count, "length" if is_cut else "stop"))
