"""Samples and data sets: the record that every data set returns, and the protocol that makes a class a data set.

A new kind of data set is one file with a class that has the members of `Dataset` and a function that opens it
(`OpenDataset`), and one line in the table `DATASETS` of data/datasets.py; or a plug-in (docs/PLUGINS.md).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from megatronish.config.sections.data import Packing
from megatronish.core.errors import UserError
from megatronish.data.chat.setup import ChatSetup
from megatronish.data.token_files import TokenFiles
from megatronish.tokenizer.control_tokens import MaskTokens


@dataclass(frozen=True)
class Sample:
    """S + 1 tokens: the model sees `tokens[:-1]` and predicts `tokens[1:]`. All arrays have one entry a token.

    `loss_mask[i]` refers to token i as a label: whether its prediction (made at position i - 1) counts in the loss.
    Token 0 is no label, so `loss_mask[0]` is not read. None: every prediction counts, except those made from an
    end-of-document token with --eod-mask-loss.

    `document_ids[i]` is the document of token i; ids do not fall along the sample. A token attends to its own document
    alone, position ids start at 0 in each, and the first token of a document is never predicted. None: documents are
    what end-of-document tokens end, and --reset-attention-mask, --reset-position-ids say what that changes.

    `dataset_ids[i]` is the number of the data set that token i is from, where a sample mixes several whose losses are
    reported one by one.

    `pair_labels` are those of P pairs of completions, where an objective compares them: the sample's documents 2 p and
    2 p + 1 are pair p, and other documents follow. `pair_reference` are log-probabilities by a reference model.

    `token_types[i]` is the sentence of token i, 0 or 1, of a pair of sentences; `is_swapped` tells that the first one
    came after the second.

    The last `num_filler` tokens only make the sample as long as others: no loss reads them, no other token sees them.
    """

    tokens: NDArray[np.int64]  # [S + 1]
    loss_mask: NDArray[np.bool_] | None = None  # [S + 1]
    document_ids: NDArray[np.int64] | None = None  # [S + 1]
    dataset_ids: NDArray[np.int64] | None = None  # [S + 1]
    pair_labels: NDArray[np.bool_] | None = None  # [P]
    pair_reference: NDArray[np.float32] | None = None  # [P, 2]
    num_filler: int = 0
    token_types: NDArray[np.int64] | None = None  # [S + 1]
    is_swapped: bool = False

    def __post_init__(self) -> None:
        shape = self.tokens.shape
        assert len(shape) == 1, f"tokens of a sample are one row, not {shape}"
        assert self.loss_mask is None or self.loss_mask.shape == shape, f"{self.loss_mask.shape} is not {shape}"
        assert self.dataset_ids is None or self.dataset_ids.shape == shape, f"{self.dataset_ids.shape} is not {shape}"
        if self.document_ids is not None:
            assert self.document_ids.shape == shape, f"{self.document_ids.shape} is not {shape}"
            assert (np.diff(self.document_ids) >= 0).all(), "document ids fall along a sample"

    def until(self, length: int) -> "Sample":
        """The first `length` tokens; those that are left out must be filler."""
        assert length >= len(self.tokens) - self.num_filler, "tokens that are read are not left out"
        names = ("tokens", "loss_mask", "document_ids", "dataset_ids", "token_types")
        cut = {name: array[:length] for name in names if (array := getattr(self, name)) is not None}
        return replace(self, **cut, num_filler=max(0, length - len(self.tokens) + self.num_filler))


class Dataset(Protocol):
    """Numbered samples: all of the same S, without end."""

    name: str
    identity: str
    """Hash of all that determines the samples: equal for equal samples. A run may continue on equal data alone."""

    @property
    def num_samples(self) -> int | None:
        """Samples until they repeat; None if they never do."""

    def sample(self, index: int, /) -> Sample:
        """Sample of any index >= 0, a function of the index alone: ranks read in different orders."""


@runtime_checkable
class MixingDataset(Protocol):
    """A data set that mixes itself with others of its kind, other than by whole samples: before they are packed."""

    def mixed(self, members: Sequence[Dataset], weights: Sequence[float | None], /, *, name: str) -> Dataset:
        """Data set of all members, this one first; a weight of None is the size of a member."""


@runtime_checkable
class ReadAheadDataset(Protocol):
    """A data set that may be on object storage, where samples that are asked for together are fetched together."""

    def read_ahead(self, indices: Sequence[int], /) -> None:
        """Fetch what these samples are read from; of data on a disk nothing."""


def read_ahead(dataset: Dataset, indices: Sequence[int]) -> None:
    """Fetch what these samples are read from, if the data set knows how."""
    if isinstance(dataset, ReadAheadDataset):
        dataset.read_ahead(indices)


@runtime_checkable
class KeptDataset(Protocol):
    """A data set whose epochs have indices in files of a cache."""

    def build_indices(self, num_samples: int, /) -> None:
        """Build the indices of the first so many samples that are not kept yet. RunError if one cannot be kept."""


def build_indices(dataset: Dataset, num_samples: int) -> None:
    """Build the indices of the first so many samples, if the data set keeps any."""
    if isinstance(dataset, KeptDataset):
        dataset.build_indices(num_samples)


@runtime_checkable
class PackedDataset(Protocol):
    """A data set whose epochs have different numbers of samples, because each is packed for itself."""

    def samples_until(self, num_epochs: float, /) -> int:
        """Samples of so many epochs from the start; of a part of an epoch rounded up."""


def samples_of_epochs(dataset: Dataset, num_epochs: float) -> int:
    """Samples of so many passes over a data set, rounded up; UserError for data that have no end."""
    if isinstance(dataset, PackedDataset):
        return dataset.samples_until(num_epochs)
    if dataset.num_samples is None:
        raise UserError(
            f"num_epochs={num_epochs:g} counts passes over the data, and the {dataset.name} data have no end; use "
            "--train-iters or --train-samples"
        )
    return ceil(Fraction(num_epochs) * dataset.num_samples)


@dataclass(frozen=True)
class DatasetSettings:
    """Settings that all data sets of a run share."""

    seq_length: int
    seed: int
    vocab_size: int
    eod: int
    cache_path: str | None = None
    chats: ChatSetup | None = None
    masks: MaskTokens | None = None
    short_seq_prob: float = 0.0
    packing: Packing = "concatenate"
    files: TokenFiles = field(default_factory=TokenFiles, compare=False, repr=False)

    def index_folder(self, path: str) -> Path:
        """Folder in which sample indices of a data set are kept."""
        return self.files.index_folder(path, cache_path=self.cache_path)


class DatasetSource(NamedTuple):
    """Place that one data set is read from: from which fraction of the documents of `path` up to which other one."""

    name: str
    path: str = ""
    part: tuple[float, float] = (0.0, 1.0)


OpenDataset = Callable[[DatasetSource, DatasetSettings], Dataset]
"""Function that opens a data set; UserError with a remedy for what cannot be read."""
