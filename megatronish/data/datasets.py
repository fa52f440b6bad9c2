"""Data sets of a config: training, validation and test, each a file, a blend of files, or mock data."""

import errno
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from megatronish.config.sections.data import BlendPhase, DataConfig, parse_blend, parse_split, split_part
from megatronish.core.errors import RunError, UserError
from megatronish.core.names import DATASET_NAMES, options_of
from megatronish.data.blend import PERIOD, Blend, ScheduledBlend
from megatronish.data.chat.dataset import open_chats
from megatronish.data.chat.setup import ChatSetup
from megatronish.data.fill_in_middle import FilledMiddle, MiddleRule
from megatronish.data.mock import open_mock
from megatronish.data.packed import open_pretraining
from megatronish.data.sample import Dataset, DatasetSettings, DatasetSource, MixingDataset, OpenDataset
from megatronish.data.samples import TooSmallError
from megatronish.data.sentences import open_sentences
from megatronish.data.token_files import TokenFiles
from megatronish.tokenizer.control_tokens import MaskTokens

logger = logging.getLogger(__name__)

T = TypeVar("T")
WHOLE = (0.0, 1.0)
UNREADABLE = (errno.EACCES, errno.EPERM, errno.EIO)
DATASETS: dict[str, Callable[..., Dataset]] = {
    "pretrain": open_pretraining,
    "chat": open_chats,
    "sentences": open_sentences,
    "mock": open_mock,
}
"""Functions that open data sets, each an `OpenDataset`: by the names of --dataset-type, and for --mock-data.

Keyword arguments are the options of the name in `DATASET_NAMES`. A new kind is one line in both tables. Files other
than .bin/.idx pairs: `_missing_data` of config/check.py. No files at all: whatever reads `mock_data`.
"""


def kind_of(data: DataConfig) -> str:
    """The kind of data sets that a config asks for: a key of DATASETS."""
    return "mock" if data.mock_data else data.dataset_type


def open_dataset_of(data: DataConfig) -> OpenDataset:
    """The function that opens data sets of the config's kind, with its options."""
    options = {} if data.mock_data else options_of(DATASET_NAMES, data.dataset_type, data.dataset_args)
    return partial(DATASETS[kind_of(data)], **options)


def _source(name: str, path: str, part: tuple[float, float]) -> DatasetSource:
    """Source of a path: `part` of the part that the path itself names, as in PREFIX[0:0.9]."""
    prefix, (start, end) = split_part(path)
    if part == WHOLE:
        return DatasetSource(name, prefix, (start, end))
    first, last = (start + (end - start) * fraction for fraction in part)
    return DatasetSource(name, prefix, (first, last))


@dataclass(frozen=True)
class DatasetSplits:
    """Data sets of a run. `valid` is empty and `test` None where the config gives them nothing."""

    train: Dataset
    valid: dict[str, Dataset]
    test: Dataset | None

    def with_middles(self, rule: MiddleRule, *, seed: int) -> "DatasetSplits":
        """The same data sets with documents whose middle comes last."""
        train, test = FilledMiddle(self.train, rule, seed=seed), self.test
        valid: dict[str, Dataset] = {name: FilledMiddle(each, rule, seed=seed) for name, each in self.valid.items()}
        return replace(
            self, train=train, valid=valid, test=None if test is None else FilledMiddle(test, rule, seed=seed)
        )


@dataclass(frozen=True)
class _Reader:
    """Data sets of one kind from the paths of a config: a path, a blend of paths, or each path by itself."""

    open: OpenDataset
    settings: DatasetSettings

    def _opened(self, name: str, path: str, part: tuple[float, float]) -> Dataset:
        try:
            return self.open(_source(name, path, part), self.settings)
        except OSError as error:
            if error.errno not in UNREADABLE:
                raise
            what = error.filename or path
            # A disk that fails, or a mount that hiccups, may answer the next start.
            raise (RunError if error.errno == errno.EIO else UserError)(
                f"the data {what} cannot be read: {error.strerror}; let this user read it, or copy it again to a "
                "disk that works"
            ) from error

    def blend(self, paths: Sequence[str], *, name: str, part: tuple[float, float] = WHOLE) -> Dataset:
        """Several files by weight; without weights in proportion to their samples."""
        pairs = [(weight, path) for weight, path in parse_blend(paths) if weight != 0]
        members = [self._opened(name, path, part) for _, path in pairs]
        if len(members) == 1:
            return members[0]
        if isinstance(members[0], MixingDataset):
            return members[0].mixed(members, [weight for weight, _ in pairs], name=name)
        weights = [
            float(member.num_samples or 0) if weight is None else weight
            for member, (weight, _) in zip(members, pairs, strict=True)
        ]
        for (_, path), weight in zip(pairs, weights, strict=True):
            if weight * PERIOD < sum(weights):
                logger.warning(
                    "%s has %.2g of the weights of the %s data, less than one sample in %s; it gives one in %s",
                    path,
                    weight / sum(weights),
                    name,
                    f"{PERIOD:,}",
                    f"{PERIOD:,}",
                )
        return Blend(members, weights, name=name)

    def training(self, paths: Sequence[str], phases: Sequence[BlendPhase], *, part: tuple[float, float]) -> Dataset:
        """The training data: a blend, whose weights change where there are phases."""
        if not phases:
            return self.blend(paths, name="training", part=part)
        members = [self._opened("training", path, part) for _, path in parse_blend(paths)]
        return ScheduledBlend(members, phases, name="training")

    def each(self, paths: Sequence[str], *, part: tuple[float, float] = WHOLE) -> dict[str, Dataset]:
        """Each file by itself, under its name, or under its whole path where two files have one name."""
        paths = [path for _, path in parse_blend(paths)]
        names = [Path(split_part(path)[0]).name for path in paths]
        names = [name if names.count(name) == 1 else path for name, path in zip(names, paths, strict=True)]
        return {name: self._opened(name, path, part) for name, path in zip(names, paths, strict=True)}

    def valid(self, paths: Sequence[str], *, multiple: bool, part: tuple[float, float] = WHOLE) -> dict[str, Dataset]:
        """One set called "validation", or one for each file."""
        if multiple:
            return self.each(paths, part=part)
        return {"validation": self.blend(paths, name="validation", part=part)}


def build_datasets(
    data: DataConfig,
    *,
    seq_length: int,
    seed: int,
    vocab_size: int,
    eod: int,
    chats: ChatSetup | None = None,
    masks: MaskTokens | None = None,
    phases: Sequence[BlendPhase] = (),
) -> DatasetSplits:
    """Open all data sets that `data` asks for; those of the kind chat need `chats`, those of sentences `masks`.

    `phases` are those of `data.blend_schedule`, by sample.
    UserError with a remedy for what cannot be read.
    """
    settings = DatasetSettings(
        seq_length=seq_length,
        seed=seed,
        vocab_size=vocab_size,
        eod=eod,
        cache_path=data.data_cache_path,
        chats=chats,
        masks=masks,
        short_seq_prob=data.short_seq_prob,
        packing=data.packing,
        files=TokenFiles(data.data_store_cache_path, data.data_store_cache_size),
    )
    read = _Reader(open_dataset_of(data), settings)
    if data.mock_data or not (data.needs_path or data.data_path or data.train_data_path):
        return _without_paths(read)
    multiple = data.multiple_validation_sets
    if data.data_path:
        train, valid, test = parse_split(data.split)
        paths, until = data.data_path, train + valid
        if train == 0:
            raise UserError(f"--split {data.split} leaves nothing to train on; for example 969,30,1")
        return DatasetSplits(
            train=read.training(paths, phases, part=(0.0, train)),
            valid=_part(lambda: read.valid(paths, multiple=multiple, part=(train, until)), data) or {} if valid else {},
            test=_part(lambda: read.blend(paths, name="test", part=(until, 1.0)), data) if test else None,
        )
    if not data.train_data_path:
        raise UserError("there is no data to train on; give --data-path or --train-data-path, or use --mock-data")
    return DatasetSplits(
        train=read.training(data.train_data_path, phases, part=WHOLE),
        valid=read.valid(data.valid_data_path, multiple=multiple) if data.valid_data_path else {},
        test=read.blend(data.test_data_path, name="test") if data.test_data_path else None,
    )


def _part(make: Callable[[], T], data: DataConfig) -> T | None:
    """A part of the default split, or None where it is too small for one sample; a split that was given must fit."""
    try:
        return make()
    except TooSmallError as error:
        if data.split != DataConfig.split:
            raise
        logger.warning("left out: %s", error)
        return None


def _without_paths(read: _Reader) -> DatasetSplits:
    """All data sets of a kind that reads no files, which differ in their names."""

    def of(name: str) -> Dataset:
        return read.open(DatasetSource(name), read.settings)

    return DatasetSplits(train=of("training"), valid={"validation": of("validation")}, test=of("test"))
