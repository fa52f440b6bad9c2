"""Counts of a file of chats as it was encoded: what became samples, and what was dropped and why."""

import re
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from megatronish.core.errors import shown

MOST_TOLD = 20
LONGEST_REASON = 400


@dataclass
class ChatCounts:
    """Numbers of one file. They do not depend on the sequence length; what that cuts off is in `Fit`."""

    chat_format: str = ""
    template: str = ""
    date: str = ""
    """The date that the template may write; empty if it reads none."""
    records: int = 0
    """Lines that are not blank, good and bad ones."""
    samples: int = 0
    split: int = 0
    """Records that became one sample for each trained answer."""
    tokens: int = 0
    trained: int = 0
    longest: int = 0
    untrained: int = 0
    """Samples without any trained token, which are dropped."""
    double_bos: int = 0
    ends: dict[str, int] = field(default_factory=dict)
    """Tokens that end answers, by name, and how many samples have them."""
    bad: dict[str, int] = field(default_factory=dict)
    """Dropped lines by reason."""
    told: list[str] = field(default_factory=list)
    """A sentence with file and line for each of the first bad lines."""

    @property
    def num_bad(self) -> int:
        """Lines that were dropped because something is wrong with them."""
        return sum(self.bad.values())

    def add_bad(self, where: str, error: Exception) -> None:
        """Count a bad line; reasons are sentences without what differs from line to line."""
        reason = _reason(error)
        self.bad[reason] = self.bad.get(reason, 0) + 1
        if len(self.told) < MOST_TOLD:
            self.told.append(shown(f"{where}: {error}"))

    def add_ends(self, names: list[str]) -> None:
        """Count the tokens that end the answers of a sample."""
        self.ends = dict(Counter(self.ends) + Counter(names))

    def as_json(self) -> dict[str, Any]:
        """Object from which `of_json` makes the counts again."""
        return asdict(self)

    @classmethod
    def of_json(cls, found: dict[str, Any]) -> "ChatCounts":
        """Counts of an object; ValueError if it has other names, or values of other types."""
        empty = asdict(cls())
        for name, value in found.items():
            if name not in empty or type(value) is not type(empty[name]):
                raise ValueError(f"{name[:40]!r} is none of its values, or of another type")
        return cls(**found)


def _reason(error: Exception) -> str:
    """The sentence of an error without its numbers, so that equal reasons are counted together."""
    return shown(re.sub(r"\b\d+\b", "N", str(error)), longest=LONGEST_REASON)
