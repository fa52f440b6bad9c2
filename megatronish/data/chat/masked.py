"""Masked tokens: a .bin/.idx pair with `<prefix>.mask`, whether each token is trained, and `<prefix>.json`, the counts.

`.mask` is, little endian: 8 bytes magic "MSHMASK1", 32 bytes SHA-256 of the .idx, uint32 CRC-32 of the rest, and a byte
for each token, 1 where it is trained. The .json is written last: where it is, the others are whole. A sample is a
document.

The counts say what became samples, and what was dropped and why.
"""

import json
import re
import struct
import zlib
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatronish.core.errors import UserError, shown
from megatronish.core.files import AtomicFile, ordinary
from megatronish.data.indexed import IndexedTokens, IndexedWriter, MappedArray

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


MAGIC = b"MSHMASK1"
HEADER = struct.Struct("<8s32sI")


def mask_path(prefix: Path) -> Path:
    """Path of the mask next to a pair."""
    return Path(f"{prefix}.mask")


def counts_path(prefix: Path) -> Path:
    """Path of the counts next to a pair, the file that is written last."""
    return Path(f"{prefix}.json")


class MaskedTokens:
    """Memory-mapped tokens and their mask. UserError if a file is missing, damaged or of another pair."""

    def __init__(self, prefix: Path) -> None:
        self.file = IndexedTokens(prefix)
        path = mask_path(prefix)
        head = path.read_bytes()[: HEADER.size] if path.is_file() else b""
        if len(head) < HEADER.size or path.stat().st_size != HEADER.size + self.file.num_tokens:
            raise UserError(f"{path} is missing or truncated; remove {prefix}.* so that it is made again")
        magic, identity, checksum = HEADER.unpack(head)
        self._mapped = MappedArray(path, np.uint8, offset=HEADER.size)
        mask = self._mapped.values
        if magic != MAGIC or identity.hex() != self.file.identity or zlib.crc32(mask.data) != checksum:
            raise UserError(f"{path} is damaged or of another .idx; remove {prefix}.* so that it is made again")
        self._mask = mask
        self._starts = self.file.document_starts()
        self.checksum = checksum
        self.counts = _read_counts(counts_path(prefix))

    @property
    def identity(self) -> tuple[str, str, int]:
        """Hashes of lengths, tokens and mask."""
        return self.file.identity, self.file.content, self.checksum

    def check_ids(self, vocab_size: int) -> None:
        """UserError if a token is outside of the vocabulary, for which it was made: the .bin is damaged."""
        tokens = np.asarray(self.file.tokens)
        if len(tokens) and not (int(tokens.min()) >= 0 and int(tokens.max()) < vocab_size):
            raise UserError(
                f"{self.file.prefix}.bin holds a token id outside of the vocabulary of {vocab_size} and is damaged; "
                f"remove {self.file.prefix}.* so that it is made again"
            )

    def __len__(self) -> int:
        return self.file.num_documents

    def tokens(self, document: int) -> NDArray[Any]:
        """Tokens of one sample, a view of the file."""
        self.file.check_size()
        return self.file.document(document)

    def mask(self, document: int) -> NDArray[np.bool_]:
        """Whether each token of the sample is trained, a view of the file."""
        self._mapped.check()
        return self._mask[self._starts[document] : self._starts[document + 1]].view(np.bool_)


def _read_counts(path: Path) -> ChatCounts:
    """Content of the .json; UserError if it is damaged."""
    try:
        counts = json.loads(ordinary(path).read_text())
        if not isinstance(counts, dict):
            raise ValueError("it is no JSON object")
        return ChatCounts.of_json(counts)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error}); remove it, so that all is made again") from error


class MaskedWriter:
    """Writer of masked tokens, as a context: finished at the end, or nothing is left after an exception."""

    def __init__(self, prefix: Path, *, dtype: np.dtype[Any]) -> None:
        self.prefix = prefix
        self._mask = AtomicFile(mask_path(prefix))
        self._checksum = 0
        try:
            self._pair = IndexedWriter(prefix, dtype=dtype)
            self._mask.file.write(bytes(HEADER.size))
        except BaseException:
            self._mask.discard()
            raise

    def add(self, tokens: NDArray[Any], mask: NDArray[np.bool_]) -> None:
        """Add one sample with its mask."""
        self._pair.add_document(tokens)
        data = mask.astype(np.uint8).tobytes()
        self._mask.file.write(data)
        self._checksum = zlib.crc32(data, self._checksum)

    def finish(self, counts: dict[str, Any]) -> None:
        """Give the files their names, that of the counts last."""
        self._pair.finalize()
        identity = bytes.fromhex(IndexedTokens(self.prefix).identity)
        self._mask.file.seek(0)
        self._mask.file.write(HEADER.pack(MAGIC, identity, self._checksum))
        self._mask.commit()
        with AtomicFile(counts_path(self.prefix)) as file:
            file.file.write((json.dumps(counts, indent=1) + "\n").encode())

    def __enter__(self) -> "MaskedWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pair.discard()
        self._mask.discard()
