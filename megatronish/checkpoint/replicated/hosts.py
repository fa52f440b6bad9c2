"""Hosts of a run, and who keeps copies for whom: each rank's neighbour is a rank of the next host.

A host is the ranks that share one local folder. The neighbour of the i-th rank of a host is the i-th rank of the host
after it, and the last host's is on the first: with equal hosts, rank + local_world_size modulo world_size. So a copy of
everything is left after any one host is lost, or any number of hosts of which no two follow each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Hosts:
    """Ranks by host, in the order of their first ranks, and this process's rank."""

    ranks: tuple[tuple[int, ...], ...]
    rank: int

    @classmethod
    def of(cls, names: Sequence[str], *, rank: int) -> "Hosts":
        """Hosts of ranks whose local folders have these names, one for each rank."""
        by_name: dict[str, list[int]] = {}
        for number, name in enumerate(names):
            by_name.setdefault(name, []).append(number)
        return cls(tuple(map(tuple, by_name.values())), rank)

    @property
    def own(self) -> tuple[int, ...]:
        """Ranks of this rank's host."""
        return self.ranks[self.number_of(self.rank)]

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for its host."""
        return self.own[0] == self.rank

    def number_of(self, rank: int) -> int:
        """Number of a rank's host."""
        return next(number for number, ranks in enumerate(self.ranks) if rank in ranks)

    def keeper_of(self, rank: int) -> int | None:
        """Rank of the next host that keeps a copy for `rank`; None where there is one host alone."""
        number = self.number_of(rank)
        keepers = self.ranks[(number + 1) % len(self.ranks)]
        return None if rank in keepers else keepers[self.ranks[number].index(rank) % len(keepers)]
