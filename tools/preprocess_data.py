"""Preprocessing of JSON lines into the .bin/.idx files that training reads: python tools/preprocess_data.py --help

Exit status: 0 done, 1 a failure (a worker was killed, the disk is full), 2 something in the input or the flags to mend.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tqdm import tqdm

from megatronish.config.data import DataConfig
from megatronish.config.plugins import import_plugins
from megatronish.config.tokenizer_names import tokenizer_type
from megatronish.data.preprocess import Summary, preprocess
from megatronish.errors import RunError, UserError
from megatronish.tokenizer import build_tokenizer

MAX_BAD_LINES_TOLD = 20


@dataclass(frozen=True)
class Arguments:
    """Tokenize JSON lines into PREFIX_KEY_document.bin/.idx, Megatron's format."""

    input: tuple[str, ...]
    """JSON lines files, plain or .gz; every line an object."""
    output_prefix: str
    """PREFIX of the files written."""
    plugin: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """A plug-in (my.module or FILE.py) to import, which runs its code; several are allowed. See docs/PLUGINS.md."""
    tokenizer_type: str = "sentencepiece"
    """sentencepiece, huggingface, bytes or null; Megatron's names are accepted too."""
    tokenizer_model: str | None = None
    """The tokenizer's file (sentencepiece .model, Hugging Face tokenizer.json or its folder)."""
    vocab_file: str | None = None
    """vocab.json of a GPT-2 tokenizer, with --merge-file."""
    merge_file: str | None = None
    """merges.txt of a GPT-2 tokenizer, with --vocab-file."""
    vocab_size: int | None = None
    """Of the null tokenizer; others know theirs."""
    json_keys: tuple[str, ...] = ("text",)
    """Keys of an object that hold text; each makes files of its own."""
    append_eod: bool = False
    """End every document with the end-of-document token."""
    workers: int = 1
    """Processes that tokenize."""
    strict: bool = False
    """A bad line is an error instead of being skipped and counted."""
    log_interval: int = 100_000
    """Documents between lines of progress where there is no terminal for a bar."""


class Progress:
    """A bar over the bytes read on a terminal, else a line every so many documents."""

    def __init__(self, *, num_bytes: int, log_interval: int) -> None:
        self._bar = tqdm(total=num_bytes, unit="B", unit_scale=True, desc="tokenizing", disable=None)
        self._log_interval = log_interval
        self._bad_lines = 0
        self._told = 0

    def bad_line(self, message: str) -> None:
        """Tell the first few."""
        self._bad_lines += 1
        if self._bad_lines <= MAX_BAD_LINES_TOLD:
            tqdm.write(f"bad line {message}", file=sys.stderr)
        elif self._bad_lines == MAX_BAD_LINES_TOLD + 1:
            tqdm.write("more bad lines are counted without telling", file=sys.stderr)

    def advance(self, summary: Summary, num_bytes: int) -> None:
        """Show the progress after each batch of documents."""
        self._bar.update(num_bytes)
        if self._bar.disable and summary.documents >= self._told + self._log_interval:
            self._told = summary.documents
            print(summary, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the progress bar as it is."""
        self._bar.close()


def main(arguments: Arguments) -> None:
    """Run the tool; the exit status."""
    import_plugins(arguments.plugin)
    tokenizer = build_tokenizer(
        DataConfig(
            tokenizer_type=tokenizer_type(arguments.tokenizer_type),
            tokenizer_model=arguments.tokenizer_model,
            vocab_file=arguments.vocab_file,
            merge_file=arguments.merge_file,
            vocab_size=arguments.vocab_size,
        )
    )
    num_bytes = sum(Path(path).stat().st_size for path in arguments.input if Path(path).is_file())
    progress = Progress(num_bytes=num_bytes, log_interval=arguments.log_interval)
    try:
        summary = preprocess(
            arguments.input,
            arguments.output_prefix,
            tokenizer=tokenizer,
            json_keys=arguments.json_keys,
            append_eod=arguments.append_eod,
            workers=arguments.workers,
            strict=arguments.strict,
            on_bad_line=progress.bad_line,
            on_progress=progress.advance,
        )
    finally:
        progress.close()
    print(summary)
    print(" ".join(f"{arguments.output_prefix}_{key}_document" for key in arguments.json_keys))


if __name__ == "__main__":
    try:
        main(tyro.cli(Arguments))
    except UserError as error:
        sys.exit(print(f"error: {error}", file=sys.stderr) or 2)
    except (RunError, OSError) as error:
        sys.exit(f"error: {error}")
