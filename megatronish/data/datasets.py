"""Which data sets does a config ask for? Training, validation, test; each a file, a blend of files, or mock data."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from megatronish.config.data import DataConfig, parse_blend, parse_split
from megatronish.data.blend import Blend, Dataset
from megatronish.data.indexed import IndexedTokens
from megatronish.data.mock import MockSamples
from megatronish.data.samples import GPTSamples, TooSmallError
from megatronish.errors import UserError

logger = logging.getLogger(__name__)

T = TypeVar("T")
WHOLE = (0.0, 1.0)


@dataclass(frozen=True)
class Datasets:
    """What a run reads. `valid` is empty and `test` None where the config gives them nothing."""

    train: Dataset
    valid: dict[str, Dataset]
    test: Dataset | None


@dataclass(frozen=True)
class _Maker:
    """Makes data sets that differ in files and ranges alone."""

    seq_length: int
    seed: int
    vocab_size: int
    cache_path: str | None

    def one(self, prefix: str, *, name: str, part: tuple[float, float]) -> Dataset:
        """The documents of one file from a fraction of them up to another."""
        file = IndexedTokens(prefix)
        first, end = (round(fraction * file.num_documents) for fraction in part)
        return GPTSamples(
            file,
            name=name,
            first_document=first,
            end_document=end,
            seq_length=self.seq_length,
            seed=self.seed,
            vocab_size=self.vocab_size,
            cache_folder=Path(self.cache_path) if self.cache_path else Path(prefix).parent / "cache",
        )

    def blend(self, paths: Sequence[str], *, name: str, part: tuple[float, float] = WHOLE) -> Dataset:
        """Several files by weight; without weights in proportion to their samples."""
        pairs = [(weight, prefix) for weight, prefix in parse_blend(paths) if weight != 0]
        members = [self.one(prefix, name=name, part=part) for _, prefix in pairs]
        weights = [
            float(member.num_samples or 0) if weight is None else weight
            for member, (weight, _) in zip(members, pairs, strict=True)
        ]
        return members[0] if len(members) == 1 else Blend(members, weights, name=name)

    def each(self, paths: Sequence[str], *, part: tuple[float, float] = WHOLE) -> dict[str, Dataset]:
        """Each file by itself, under its name, or under its whole prefix where two files have one name."""
        prefixes = [prefix for _, prefix in parse_blend(paths)]
        names = [Path(prefix).name for prefix in prefixes]
        names = [name if names.count(name) == 1 else prefix for name, prefix in zip(names, prefixes, strict=True)]
        return {name: self.one(prefix, name=name, part=part) for name, prefix in zip(names, prefixes, strict=True)}

    def valid(self, paths: Sequence[str], *, multiple: bool, part: tuple[float, float] = WHOLE) -> dict[str, Dataset]:
        """One set called "validation", or one for each file."""
        if multiple:
            return self.each(paths, part=part)
        return {"validation": self.blend(paths, name="validation", part=part)}


def build_datasets(data: DataConfig, *, seq_length: int, seed: int, vocab_size: int, eod: int) -> Datasets:
    """Open, or find in the cache, all that `data` asks for. UserError with a remedy for what cannot be read."""
    if data.mock_data:
        return _mock(seq_length=seq_length, seed=seed, vocab_size=vocab_size, eod=eod)
    make = _Maker(seq_length=seq_length, seed=seed, vocab_size=vocab_size, cache_path=data.data_cache_path)
    multiple = data.multiple_validation_sets
    if data.data_path:
        train, valid, test = parse_split(data.split)
        paths, until = data.data_path, train + valid
        if train == 0:
            raise UserError(f"--split {data.split} leaves nothing to train on; for example 969,30,1")
        return Datasets(
            train=make.blend(paths, name="training", part=(0.0, train)),
            valid=_part(lambda: make.valid(paths, multiple=multiple, part=(train, until)), data) or {} if valid else {},
            test=_part(lambda: make.blend(paths, name="test", part=(until, 1.0)), data) if test else None,
        )
    if not data.train_data_path:
        raise UserError("there is no data to train on; give --data-path or --train-data-path, or use --mock-data")
    return Datasets(
        train=make.blend(data.train_data_path, name="training"),
        valid=make.valid(data.valid_data_path, multiple=multiple) if data.valid_data_path else {},
        test=make.blend(data.test_data_path, name="test") if data.test_data_path else None,
    )


def _part(make: Callable[[], T], data: DataConfig) -> T | None:
    """What the user did not ask for, by writing a split, may be left out where it is too small for one sample."""
    try:
        return make()
    except TooSmallError as error:
        if data.split != DataConfig.split:
            raise
        logger.warning("left out: %s", error)
        return None


def _mock(*, seq_length: int, seed: int, vocab_size: int, eod: int) -> Datasets:
    def make(name: str) -> MockSamples:
        return MockSamples(name=name, seq_length=seq_length, seed=seed, vocab_size=vocab_size, eod=eod)

    return Datasets(train=make("training"), valid={"validation": make("validation")}, test=make("test"))
