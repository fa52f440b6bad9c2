"""Training of a SentencePiece tokenizer on JSON lines, one that reproduces every text exactly.

BPE with byte fallback, and the text left as it is: identity normalisation, no space put in front, runs of spaces and
newlines kept (indentation becomes pieces of its own). "<|endoftext|>" ends a document and is never read out of text.
"""

import io
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import sentencepiece
from tqdm import tqdm

from megatronish.commands.bad_lines import BadLines
from megatronish.commands.exit_status import exit_status
from megatronish.config.arguments import read_arguments
from megatronish.config.marks import at_least, at_most
from megatronish.core.errors import UserError
from megatronish.core.files import AtomicFile, refuse_input_as_output, refuse_unwritable_file
from megatronish.data.encoding import read_line
from megatronish.data.readers import read_batches

EOD = "<|endoftext|>"
RUN_LENGTH = 4000
"""The trainer is fed runs of whole lines of about so many characters."""
LONGEST_LINE = 1 << 20
"""Characters of a line; of longer ones the parts are trained on, as the library leaves out what is very long."""


@dataclass(frozen=True)
class TokenizerArguments:
    """Train a SentencePiece tokenizer: BPE, byte fallback, whitespace and newlines kept."""

    input: tuple[Path, ...]
    """JSON lines files, plain or .gz."""
    output: Path
    """The .model file to write."""
    vocab_size: Annotated[int, at_least(1), at_most(2**24)] = 4096
    """Pieces in all, 256 bytes included."""
    json_key: str = "text"
    """Key of an object that holds text."""
    max_bytes: Annotated[int, at_least(1)] = 20_000_000
    """Train on the first so many bytes of text."""
    threads: Annotated[int, at_least(1), at_most(1024)] = 2
    """Threads that count pairs."""


def texts(arguments: TokenizerArguments, bad: BadLines) -> Iterator[str]:
    """All texts of the files. Bad lines are counted, and the first of them told."""
    for path in arguments.input:
        if not path.is_file():
            raise UserError(f"--input {path} is not a file; check the path")
        for batch in read_batches(path, [arguments.json_key]):
            for number, line in enumerate(batch.lines, batch.first_line):
                if not line.strip():
                    continue
                try:
                    (text,) = read_line(line, [arguments.json_key])
                    text.encode()  # half of a surrogate pair is no character
                except (ValueError, RecursionError) as error:
                    bad.tell(f"{path}:{number}: {error}")
                else:
                    yield text


def runs(text: str) -> Iterator[str]:
    """`text` cut at ends of lines, and lines that are very long into parts."""
    run, lines = "", text.splitlines(keepends=True)
    parts = (line[start : start + LONGEST_LINE] for line in lines for start in range(0, len(line), LONGEST_LINE))
    for line in parts:
        if run and len(run) + len(line) > RUN_LENGTH:
            yield run
            run = ""
        run += line
    yield run


def read_runs(arguments: TokenizerArguments) -> list[str]:
    """What to train on."""
    all_runs: list[str] = []
    total = min(sum(path.stat().st_size for path in arguments.input if path.is_file()), arguments.max_bytes)
    with tqdm(total=total, unit="B", unit_scale=True, desc="reading", disable=None) as bar:
        num_bytes, bad = 0, BadLines(partial(tqdm.write, file=sys.stderr))
        for text in texts(arguments, bad):
            size = len(text.encode())
            num_bytes += size
            if num_bytes > arguments.max_bytes:
                break
            all_runs.extend(runs(text))
            bar.update(size)
    if bad.count:
        print(f"{bad.count:,} lines were bad and were left out", file=sys.stderr)
    if not all_runs:
        raise UserError(
            f"no text under {arguments.json_key!r} within --max-bytes {arguments.max_bytes}; correct --json-key or the "
            "files, or raise --max-bytes"
        )
    return all_runs


def train(sentences: list[str], *, vocab_size: int, threads: int) -> bytes:
    """The .model file's bytes."""
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            # Indentation in a few pieces, so that a small model need not count spaces; short ones, so that it sees each
            # often enough to learn it in minutes.
            allow_whitespace_only_pieces=True,
            max_sentencepiece_length=6,
            max_sentence_length=1 << 24,
            unk_id=0,
            eos_id=1,
            bos_id=-1,
            pad_id=-1,
            eos_piece=EOD,
            num_threads=threads,
            minloglevel=1,
        )
    except (RuntimeError, OSError) as error:
        raise UserError(_refusal(vocab_size, str(error))) from error
    return model.getvalue()


def _refusal(vocab_size: int, said: str) -> str:
    """What the library says of a vocabulary that the text cannot fill, or does not fit into, as a sentence."""
    if match := re.search(r"required_chars\. \d+ vs (\d+)", said):
        least = f"{match[1]} for this text, with 256 bytes, two control tokens and its characters"
        return f"--vocab-size {vocab_size} must be at least {least}; raise it"
    if match := re.search(r"value <= (\d+)", said):
        return f"--vocab-size {vocab_size} must be at most {match[1]} for this text; lower it, or give more text"
    return f"the library refuses this text: {said.rpartition('] ')[2] or said}; give other text"


def main(argv: Sequence[str], *, program: str = "megatronish train-tokenizer") -> int:
    """Run the command; the exit status."""
    return exit_status(
        lambda: write_tokenizer(read_arguments(TokenizerArguments, argv, program=program)), prefix="error: "
    )


def write_tokenizer(arguments: TokenizerArguments) -> int:
    """Train the tokenizer and write it; the exit status."""
    refuse_unwritable_file(arguments.output, flag="--output")
    refuse_input_as_output("--output", arguments.output, arguments.input)
    sentences = read_runs(arguments)
    size = sum(map(len, sentences))
    print(f"learning {arguments.vocab_size} pieces from {size:,} characters, a second or two a million", flush=True)
    model = train(sentences, vocab_size=arguments.vocab_size, threads=arguments.threads)
    with AtomicFile(arguments.output) as output:
        output.file.write(model)
    print(f"{arguments.output}: {arguments.vocab_size} pieces, {EOD} ends a document")
    return 0
