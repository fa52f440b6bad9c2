"""A kind of data sets: windows of a plain text file, as bytes, at random places.

    python pretrain_gpt.py --plugin examples/plugins/text_file.py --dataset-type text_file --data-path FILE.txt \
        --tokenizer-type bytes ...

Splits (--split), blends of several files and resuming work as for every kind.
"""

import hashlib
from pathlib import Path

import numpy as np

from megatronish.core.errors import UserError
from megatronish.data.sample import DatasetSettings, DatasetSource, Sample
from megatronish.data.samples import TooSmallError
from megatronish.parallel.streams import numpy_stream
from megatronish.plugins import register_dataset


class TextFile:
    """Samples by number: each is a function of its number alone, as ranks ask for different ones in any order."""

    num_samples: int | None = None  # they never repeat

    def __init__(self, source: DatasetSource, settings: DatasetSettings) -> None:
        try:
            text = np.frombuffer(Path(source.path).read_bytes(), np.uint8)
        except OSError as error:
            raise UserError(f"--data-path {source.path} cannot be read: {error.strerror}; name a text file") from error
        begin, end = (round(len(text) * part) for part in source.part)  # what --split gives training, validation, test
        self.name, self.text = source.name, text[begin:end]
        self.length, self.seed = settings.seq_length + 1, settings.seed
        if len(self.text) < self.length:
            raise TooSmallError(f"{source.path} has {len(self.text)} bytes for {source.name}, fewer than a sample")
        # A run resumes only with data of the same identity.
        facts = f"text_file {source.name} {self.length} {self.seed} ".encode()
        self.identity = hashlib.sha256(facts + self.text.tobytes()).hexdigest()

    def sample(self, index: int, /) -> Sample:
        """S + 1 tokens. A sample may also say which of them are trained on, and where documents begin."""
        stream = numpy_stream(self.seed, "text_file", self.name, index)
        start = int(stream.integers(0, len(self.text) - self.length + 1))
        return Sample(self.text[start : start + self.length].astype(np.int64))


register_dataset("text_file", TextFile)
