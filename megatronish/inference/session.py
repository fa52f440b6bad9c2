"""Session of a trained model: it stays loaded on all ranks, and does what the main rank asks for, one order at a time.

The main rank reads what people and programs want, and hands each order to the other ranks, which wait for the next one
in `follow`. So whatever talks to a model is written for one process.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from megatronish.inference.generate import GeneratedToken, Sampling, generate, never
from megatronish.inference.load import LoadedModel
from megatronish.parallel.all_or_none import from_all
from megatronish.parallel.mesh import Mesh


class Continuation(NamedTuple):
    """Order of a text for each prompt: `num_tokens`, or fewer if one of `stops` comes before.

    `decoder_start` begins the text of a model whose encoder reads the prompt.
    """

    prompts: Sequence[Sequence[int]]
    num_tokens: int
    stops: frozenset[int] = frozenset()
    sampling: Sampling = Sampling()
    adapter: str | None = None
    decoder_start: int | None = None


class Order(Protocol):
    """Work that all ranks do together: a function of the session that can be pickled. Its result is every rank's."""

    def __call__(self, session: "Session", /) -> Any:
        """Do this rank's part."""
        ...


@dataclass
class Session:
    """Loaded model on this rank. `seq_length` tokens are seen at a time, `batch_size` prompts go through together.

    `decode` is its tokenizer's.
    """

    trained: LoadedModel
    mesh: Mesh
    seq_length: int
    batch_size: int = 8
    decode: Callable[[Sequence[int]], str] = str
    _is_open: bool = field(default=True, init=False)

    def generate(self, continuation: Continuation, *, ends: Callable[[int], bool] = never) -> Iterator[GeneratedToken]:
        """Tokens of each prompt's text, on the main rank, which must iterate to the end. `ends` is that of `generate`.

        Other ranks generate the same in `follow`.
        """
        self._announce(continuation)
        return self._continued(continuation, ends)

    def do(self, order: Order) -> Any:
        """Result of an order on the main rank; the other ranks do it in `follow`."""
        self._announce(order)
        return order(self)

    def follow(self) -> None:
        """Do what the main rank asks for until it closes the session: on every other rank."""
        while (order := self._announce(None)) is not None:
            if isinstance(order, Continuation):
                for _ in self._continued(order, never):
                    pass
            else:
                order(self)

    def close(self) -> None:
        """End `follow` on the other ranks; twice does no harm."""
        if self._is_open:
            self._is_open = False
            self._announce(None)

    def _announce(self, order: Order | Continuation | None) -> Any:
        """The main rank's order, on every rank. A collective call, for which ranks wait as long as nothing is asked."""
        return from_all(self.mesh.checkpoint_axis, lambda: order)[0]

    def _continued(self, order: Continuation, ends: Callable[[int], bool]) -> Iterator[GeneratedToken]:
        self.trained.select(order.adapter)
        return generate(
            self.trained.model,
            order.prompts,
            num_tokens=order.num_tokens,
            seq_length=self.seq_length,
            stops=order.stops,
            sampling=order.sampling,
            batch_size=self.batch_size,
            mesh=self.mesh,
            ends=ends,
            decoder_start=order.decoder_start,
        )
