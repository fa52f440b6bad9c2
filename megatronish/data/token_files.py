"""Token files of a run: pairs and manifests, on a disk or on object storage, each opened once.

Tokens on object storage are read through a block cache: the same data sets as from a disk, with the same identities.
An index is fetched whole and mapped, tokens in blocks (data/block_cache.py). Which samples come next is known, so a
step's blocks are fetched together before its samples are made, while steps before it train (`read_ahead`).
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatronish.config.sections.data import MANIFEST, DataConfig
from megatronish.core.errors import UserError
from megatronish.core.files import refuse_url
from megatronish.core.remote import RemotePath, is_url
from megatronish.data.block_cache import Block, BlockCache, StoredObject, blocks_of, cache_place
from megatronish.data.indexed import IndexedTokens, JoinedTokens, TokenArray
from megatronish.data.shards import Manifest, ShardedTokens, named_by

REMEDY = "copy the files to the store again, or run megatronish preprocess again"


class StreamedArray:
    """Values of an object: a slice is read from blocks of a cache."""

    def __init__(self, stored: StoredObject, dtype: np.dtype[Any], cache: BlockCache) -> None:
        self.stored, self.dtype, self._cache = stored, dtype, cache

    def __len__(self) -> int:
        return self.stored.size // self.dtype.itemsize

    def __getitem__(self, part: slice) -> NDArray[Any]:
        return np.frombuffer(self._cache.read(self.stored, *self._bytes_of(part)), self.dtype)

    def fetched(self, part: slice) -> NDArray[Any]:
        """A slice that is read from the store itself, without the rest of its blocks."""
        return np.frombuffer(self._cache.fetch(self.stored, *self._bytes_of(part)), self.dtype)

    def blocks(self, part: slice) -> Iterator[Block]:
        """Blocks that a slice is read from."""
        return blocks_of(self.stored, *self._bytes_of(part))

    def _bytes_of(self, part: slice) -> tuple[int, int]:
        start, end, step = part.indices(len(self))
        assert step == 1, "tokens are read in their order"
        return start * self.dtype.itemsize, end * self.dtype.itemsize


class _Names(NamedTuple):
    """Objects of a data set: its index, and its .bin or those of its shards, with the bytes that a manifest says."""

    index_path: RemotePath
    bins: list[tuple[RemotePath, int | None]]

    @classmethod
    def of(cls, prefix: str, cache: BlockCache) -> "_Names":
        """Those of a prefix, or of a manifest, which is read."""
        if not prefix.endswith(MANIFEST):
            return cls(RemotePath(f"{prefix}.idx"), [(RemotePath(f"{prefix}.bin"), None)])
        path = RemotePath(prefix)
        try:
            manifest = Manifest.of(cache.text(path))
        except UserError:
            raise
        except ValueError as error:
            raise UserError(f"{path} is not a manifest of shards ({error}); {REMEDY}, or name a prefix") from error
        return cls(named_by(path, manifest.index_name), [(named_by(path, name), size) for name, size in manifest.bins])


class StreamedTokens(IndexedTokens):
    """A .bin/.idx pair, or the shards of a manifest, on object storage.

    UserError or RunError, as data/stores.py has them, for what cannot be read, here and in every slice.
    """

    def __init__(self, prefix: str, cache: BlockCache) -> None:
        self._cache, self._arrays = cache, list[StreamedArray]()
        shown = str(RemotePath(prefix))
        if shown != prefix:
            raise UserError(
                f"the data {shown} have a password or a key in their URL, which would be written into the run folder; "
                "give it to the store's library by its variables or files, such as AWS_SECRET_ACCESS_KEY"
            )
        if prefix.endswith((".bin", ".idx")):
            raise UserError(f"the data {prefix} are named by an ending too much; use {prefix[:-4]}")
        names = _Names.of(prefix, cache)
        self._expected = [num_bytes for _, num_bytes in names.bins]
        self._index_object, *self._objects = cache.objects([names.index_path, *(path for path, _ in names.bins)])
        super().__init__(prefix)

    def _files(self) -> list[Path]:
        """The index alone, fetched; tokens are read where they are asked for."""
        return [self._cache.whole(self._index_object)]

    @property
    def where(self) -> str:
        """What holds the tokens, for messages."""
        return f"a shard of {self.prefix}" if self.prefix.endswith(MANIFEST) else f"{self.prefix}.bin"

    @property
    def index_name(self) -> str:
        """The index, for messages."""
        return str(self._index_object.path)

    def _map_tokens(self, bins: Sequence[Path]) -> TokenArray:
        for stored, expected in zip(self._objects, self._expected, strict=True):
            if stored.size != (expected := self._num_bytes() if expected is None else expected):
                says = "its .idx" if self._expected == [None] else self.prefix
                raise UserError(f"{stored.path} has {stored.size} bytes but {says} says {expected}; {REMEDY}")
        total = sum(stored.size for stored in self._objects)
        if total != self._num_bytes():
            raise UserError(f"{self.prefix} names {total} bytes but its index says {self._num_bytes()}; {REMEDY}")
        self._arrays = [StreamedArray(stored, self.dtype, self._cache) for stored in self._objects if stored.size]
        return JoinedTokens(self._arrays, self.dtype)

    def read_ahead(self, spans: Iterable[tuple[int, int]]) -> None:
        """Fetch the blocks of tokens [start, end) that are not kept, several at a time."""
        blocks = (block for number, part in self._parts(spans) for block in self._arrays[number].blocks(part))
        self._cache.read_ahead(dict.fromkeys(blocks))

    def _pieces(self, spans: Sequence[tuple[int, int]]) -> Iterable[NDArray[Any]]:
        parts = [list(self._parts([span])) for span in spans]
        return self._cache.in_threads(
            lambda of_span: np.concatenate([self._arrays[number].fetched(part) for number, part in of_span]), parts
        )

    def _parts(self, spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, slice]]:
        assert isinstance(self.tokens, JoinedTokens)
        for start, end in spans:
            yield from self.tokens.parts(start, end)

    @cached_property
    def _content_digest(self) -> str:
        # Hundreds of requests, which one process of a machine makes.
        name = hashlib.sha256("".join(stored.key for stored in self._objects).encode()).hexdigest()[:32]
        path = self._cache.kept(f"{name}.content", lambda file: file.write(self._digest_of_content().encode()), size=64)
        return path.read_text()


class TokenFiles:
    """Tokens that a run has opened, by path: training, validation and test share what they are parts of.

    What is on object storage is kept in a cache in `store_folder`, of so many `gigabytes`.
    """

    def __init__(self, store_folder: str | None = None, gigabytes: float = DataConfig.data_store_cache_size) -> None:
        self._opened: dict[str, IndexedTokens] = {}
        self._store_folder, self._gigabytes = store_folder, gigabytes

    @cached_property
    def _cache(self) -> BlockCache:
        return BlockCache.open(self._store_folder, self._gigabytes)

    def open(self, path: str) -> IndexedTokens:
        """Tokens of the pair of this prefix, or of the shards of this manifest. UserError for what cannot be read."""
        if path not in self._opened:
            if is_url(path):
                self._opened[path] = StreamedTokens(path, self._cache)
            else:
                self._opened[path] = ShardedTokens(path) if path.endswith(MANIFEST) else IndexedTokens(path)
        return self._opened[path]

    def index_folder(self, path: str, *, cache_path: str | None) -> Path:
        """Folder in which the sample indices of a data set are kept, next to it or, of one on a store, in the cache."""
        if cache_path:
            refuse_url("--data-cache-path", Path(cache_path))
            return Path(cache_path)
        return cache_place(self._store_folder) / "samples" if is_url(path) else Path(path).parent / "cache"
