"""Texts of many prompts, each until a stop string, over ranks of tp, pp and dp."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from megatronish.inference.generate import Sampling, generate
from megatronish.inference.scoring import over_replicas
from megatronish.inference.session import Session
from megatronish.inference.text_stream import TextStream


@dataclass(frozen=True)
class Writing:
    """Order of texts of at most `num_tokens` tokens, which one of `stops` or of `stop_strings` ends before."""

    prompts: Sequence[Sequence[int]]
    num_tokens: int
    stops: frozenset[int]
    stop_strings: Sequence[str]
    sampling: Sampling

    def __call__(self, session: Session) -> list[str]:
        """Each replica of the model writes a part of the texts."""
        return over_replicas(session.mesh, len(self.prompts), partial(self._write, session))

    def _write(self, session: Session, numbers: Sequence[int]) -> dict[int, str]:
        """Texts of these prompts, the longest first: a batch has prompts of about one length."""
        order = sorted(numbers, key=lambda number: -len(self.prompts[number]))
        streams = [TextStream(session.decode, stop_strings=self.stop_strings) for _ in order]
        written = generate(
            session.trained.model,
            [self.prompts[number] for number in order],
            num_tokens=self.num_tokens,
            seq_length=session.seq_length,
            stops=self.stops,
            sampling=self.sampling,
            batch_size=session.batch_size,
            mesh=session.mesh,
            ends=lambda place: streams[place].has_stopped,
        )
        for place, token in written:
            if token is None:
                streams[place].finish()
            else:
                streams[place].add(token)
        return {number: stream.text for number, stream in zip(order, streams, strict=True)}
