"""Preprocessing of JSON lines, JSON arrays and Parquet into the .bin/.idx files that training reads.

Exit status: 0 done, 1 a failure (a worker was killed, the disk is full), 2 an error in the input or the flags, 128 + n
ended by signal n.

Flags of Megatron-LM's preprocess_data.py that this tool does not have are idle or refused, each with the reason.
"""

import difflib
import re
import signal
import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from types import FrameType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from tqdm import tqdm

from megatronish.commands.bad_lines import BadLines
from megatronish.commands.exit_status import exit_status
from megatronish.config.arguments import PluginNames, read_arguments
from megatronish.config.hub import local_tokenizer
from megatronish.config.marks import at_least, at_most
from megatronish.config.model_source import implied_tokenizer
from megatronish.config.plugins import import_plugins
from megatronish.config.sections.data import DataConfig
from megatronish.core.errors import UserError
from megatronish.core.remote import Location
from megatronish.data.cleaning import Cleaning, RemovedCounts
from megatronish.data.encoding import Encoder
from megatronish.data.inputs import input_files, listed, same_names
from megatronish.data.preprocess import Summary, output_name, preprocess, refuse_no_name
from megatronish.data.stores import size_of
from megatronish.tokenizer.build import build_tokenizer
from megatronish.tokenizer.faster import faster
from megatronish.tokenizer.names import tokenizer_type
from megatronish.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class TokenizingArguments:
    """Settings on which the bytes of the result depend."""

    input: tuple[str, ...]
    """Files, folders, patterns or URLs: JSON lines (also .gz, .bz2, .xz, .zst), a JSON array, or .parquet."""
    output_prefix: str
    """PREFIX of the files written."""
    tokenizer_type: str | None = None
    """sentencepiece, huggingface, tiktoken, bytes or null, or Megatron's names. Derived from the files."""
    tokenizer_model: str | None = None
    """The tokenizer's file (sentencepiece .model, Hugging Face tokenizer.json or its folder, a tiktoken file)."""
    vocab_file: str | None = None
    """vocab.json of a GPT-2 tokenizer, with --merge-file; or vocab.txt of a BERT."""
    merge_file: str | None = None
    """merges.txt of a GPT-2 tokenizer, with --vocab-file."""
    tiktoken_pattern: Literal["v1", "v2", "gpt2", "cl100k", "kimi"] = "v2"
    """How a tiktoken tokenizer splits text into words."""
    tiktoken_num_special_tokens: int = 1000
    """Special tokens that come first in a tiktoken vocabulary of JSON."""
    tiktoken_special_tokens: tuple[str, ...] = ()
    """Names of a tiktoken tokenizer's special tokens."""
    vocab_size: int | None = None
    """Of the null tokenizer; others know theirs."""
    plugin: PluginNames = ()
    """A plug-in (my.module or FILE.py) to import, which runs its code; several are allowed. See docs/PLUGINS.md."""
    json_keys: tuple[str, ...] = ("text",)
    """Keys of an object (meta.body: inside of meta), or columns, that hold text; each makes files of its own."""
    append_eod: bool = False
    """End every document with the end-of-document token."""
    split_sentences: bool = False
    """A sequence for each sentence, for BERT; the files are PREFIX_KEY_sentence."""
    filter: tuple[str, ...] = ()
    """Documents to keep, by a field: 'lang == en', 'meta.score >= 0.5'. Several must all hold."""
    min_characters: int = 0
    """Leave shorter documents out."""
    max_characters: int | None = None
    """Leave longer documents out."""
    min_tokens: int = 0
    """Leave documents of fewer tokens out, the end-of-document token not counted."""
    max_tokens: int | None = None
    """Leave documents of more tokens out."""
    keep_fraction: float = 1.0
    """Keep this part of the documents, by a hash of their text, so that equal texts stay together."""
    sampling_seed: int = 0
    """Which documents --keep-fraction keeps, and --sample-weights copies."""
    sample_weights: tuple[str, ...] = ()
    """How often documents are written, by a field or by the input's path: source=wiki:2 'books/*:0.5'."""
    deduplicate: Literal["none", "exact", "minhash"] = "none"
    """Keep the first of documents that are alike: with equal texts, or with most of their runs of words in common."""
    minhash_ngram: int = 5
    """Words of a run."""
    minhash_bands: int = 14
    """Bands of minima; texts that are equal in one of them are alike."""
    minhash_rows: int = 8
    """Minima of a band. With 14 bands of 8 texts are alike from about 72 % of common runs on."""
    filter_language: tuple[str, ...] = ()
    """Languages to keep, such as en de, judged by --language-model, else by the package py3langid."""
    language_model: str | None = None
    """A model of fastText that names languages, such as lid.176.bin."""
    min_language_score: float = 0.65
    """Leave documents out whose language is less sure than this."""
    decontaminate: tuple[str, ...] = ()
    """Files of JSON or Parquet with texts, such as a benchmark's: leave documents out that share a run of words."""
    decontaminate_ngram: int = 13
    """Words of such a run, without case and punctuation."""
    strict: bool = False
    """A bad line is an error instead of being skipped and counted."""
    max_bad_fraction: float = 0.5
    """With a larger part of bad lines, the key or the format is wrong: nothing is written, and the status is 2."""


@dataclass(frozen=True)
class PreprocessArguments(TokenizingArguments):
    """Tokenize JSON lines into PREFIX_KEY_document.bin/.idx, Megatron's format.

    On many machines: preprocess plan, preprocess run, preprocess status, preprocess merge; each has its --help.
    The sample indices of a run, ahead of it: preprocess cache, with the run's flags.
    """

    workers: int = 1
    """Processes that tokenize."""
    log_interval: Annotated[int, at_least(1), at_most(2**63 - 1)] = 100_000
    """Documents between lines of progress where there is no terminal for a bar."""
    show_removed: bool = False
    """Show ten documents of each reason for which cleaning left documents out, or added copies."""


Arguments = TypeVar("Arguments", bound=TokenizingArguments)


class PreprocessProgress:
    """A bar over the bytes read on a terminal, else a line every so many documents."""

    def __init__(self, *, num_bytes: int, log_interval: int) -> None:
        self._bar = tqdm(total=num_bytes, unit="B", unit_scale=True, desc="tokenizing", disable=None)
        self._log_interval = log_interval
        self._told = 0

    def advance(self, summary: Summary, num_bytes: int) -> None:
        """Show the progress after each batch of documents."""
        self._bar.update(num_bytes)
        if self._bar.disable and summary.documents >= self._told + self._log_interval:
            self._told = summary.documents
            print(summary, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the progress bar as it is."""
        self._bar.close()


def main(argv: Sequence[str], *, program: str = "megatronish preprocess") -> int:
    """Run the command; the exit status."""

    def work() -> int:
        arguments = read_tokenizing(PreprocessArguments, argv, program=program)
        with ended_by_signals():
            return run(arguments)

    return exit_status(work, prefix="error: ")


def read_tokenizing(kind: type[Arguments], argv: Sequence[str], *, program: str) -> Arguments:
    """Arguments of class `kind`; Megatron-LM's flags are taken out, with a note of each on stderr."""
    own = {"help", *(field.name.replace("_", "-") for field in fields(kind))}
    flags = without_megatron_flags(argv, own)
    arguments = read_arguments(kind, flags.argv, program=program)
    for note in flags.notes:
        print(f"note: {note}", file=sys.stderr)
    return arguments


def run(arguments: PreprocessArguments) -> int:
    """Write the files, and report what was done; the exit status."""
    import_plugins(arguments.plugin)
    refuse_no_name(arguments.output_prefix)
    files = input_files(arguments.input)
    tell_files(files)
    num_bytes, cleaning = sum(map(size_of, files)), Cleaning.of(vars(arguments))
    if cleaning.deduplication.is_wanted:  # all is read twice
        num_bytes *= 2
    cleaning.weights.refuse_unused([str(path) for path in files])
    tell_references(cleaning)
    progress = PreprocessProgress(num_bytes=num_bytes, log_interval=arguments.log_interval)
    try:
        summary = preprocess(
            files,
            arguments.output_prefix,
            tokenizer=partial(writing_tokenizer, arguments.plugin, tokenizer_settings(arguments)),
            json_keys=arguments.json_keys,
            append_eod=arguments.append_eod,
            split_sentences=arguments.split_sentences,
            cleaning=cleaning,
            workers=arguments.workers,
            strict=arguments.strict,
            max_bad_fraction=arguments.max_bad_fraction,
            on_bad_line=BadLines(partial(tqdm.write, file=sys.stderr)).tell,
            on_progress=progress.advance,
        )
    finally:
        progress.close()
    print(summary)
    prefix, splits = arguments.output_prefix, arguments.split_sentences
    print(" ".join(output_name(prefix, key, split_sentences=splits) for key in arguments.json_keys), flush=True)
    for line in cleaning_lines(summary.removed, summary.copied, examples=arguments.show_removed):
        print(line, file=sys.stderr)
    if summary.bad_lines:
        print(f"{summary.bad_lines:,} of {summary.lines:,} lines were bad and were left out", file=sys.stderr)
    return 0


def tell_files(files: Sequence[Location]) -> None:
    """Print which files are read where there are several, and which of them may hold the same texts."""
    if len(files) > 1:
        print(f"reading {len(files):,} files: {listed(files)}", file=sys.stderr)
    pairs = same_names(files)
    if pairs:
        first, second = pairs[0]
        which = f"{second} is named twice" if first == second else f"{first} and {second} differ in their endings alone"
        others = f", as in {len(pairs) - 1:,} other cases" if len(pairs) > 1 else ""
        print(
            f"warning: {which}, and both are read{others}; name one of them if they hold the same texts",
            file=sys.stderr,
        )


def cleaning_lines(removed: RemovedCounts, copied: RemovedCounts, *, examples: bool) -> list[str]:
    """A line of each rule of cleaning about the documents that it took or copied, and of each example of them."""
    return [*removed.lines(examples=examples), *copied.lines(examples=examples, what="copies were added")]


def tell_references(cleaning: Cleaning) -> None:
    """Print what decontamination looks for. UserError for files and libraries of the rules that cannot be read."""
    if (references := cleaning.opened().references) is not None:
        print(f"decontamination: {references}", file=sys.stderr)


def plugged_tokenizer(plugins: Sequence[str], settings: DataConfig) -> Tokenizer:
    """The tokenizer in any process: a worker is a new process, which has not imported the plug-in yet."""
    import_plugins(plugins)
    return build_tokenizer(settings)


def writing_tokenizer(plugins: Sequence[str], settings: DataConfig) -> Encoder:
    """The tokenizer of a process that writes texts, with a faster library where there is one."""
    return faster(plugged_tokenizer(plugins, settings))


def tokenizer_settings(arguments: TokenizingArguments) -> DataConfig:
    """The fields that describe a tokenizer. Its kind follows from the files where it is not given."""
    given = {
        name: value
        for name in ("tokenizer_model", "vocab_file", "merge_file")
        if (value := getattr(arguments, name)) is not None
    }
    if "tokenizer_model" in given:
        given["tokenizer_model"] = str(local_tokenizer(given["tokenizer_model"]))
    if arguments.tokenizer_type is not None:
        given["tokenizer_type"] = tokenizer_type(arguments.tokenizer_type)
    settings: dict[str, Any] = {
        "tiktoken_pattern": arguments.tiktoken_pattern,
        "tiktoken_num_special_tokens": arguments.tiktoken_num_special_tokens,
        "tiktoken_special_tokens": arguments.tiktoken_special_tokens,
        "vocab_size": arguments.vocab_size,
    }
    return DataConfig(**settings | given | implied_tokenizer(given))


@contextmanager
def ended_by_signals(left: str = "nothing was written") -> Iterator[None]:
    """SIGTERM and SIGHUP end the command as an error does, so that no temporary file is left. Status 128 + number."""
    heard = [signum for signum in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(signum) is signal.SIG_DFL]

    def end(signum: int, _frame: FrameType | None) -> None:
        for each in heard:
            signal.signal(each, signal.SIG_IGN)  # cleaning up is not interrupted
        print(f"stopped by {signal.Signals(signum).name}; {left}", file=sys.stderr, flush=True)
        raise SystemExit(128 + signum)

    if threading.current_thread() is not threading.main_thread():
        heard = []
    for signum in heard:
        signal.signal(signum, end)
    try:
        yield
    finally:
        for signum in heard:
            signal.signal(signum, signal.SIG_DFL)


MANY = -1  # values up to the next flag


class MegatronFlag(NamedTuple):
    """A flag of Megatron-LM's tool, the number of its values, and what becomes of it. `harmless` values are idle."""

    status: Literal["idle", "refused"]
    text: str
    num_values: int = 1
    harmless: tuple[str, ...] = ()


def _idle(text: str, num_values: int = 1) -> MegatronFlag:
    return MegatronFlag("idle", text, num_values)


def _refused(text: str, num_values: int = 1, harmless: tuple[str, ...] = ()) -> MegatronFlag:
    return MegatronFlag("refused", text, num_values, harmless)


_SENTENCES = "--split-sentences has one set of rules for all languages"
_MODEL = "the vocabulary is padded when the model is trained"
_TUNING = "it belongs to --find-optimal-num-workers"

MEGATRON_FLAGS: dict[str, MegatronFlag] = {
    "dataset-impl": _refused("the only format is that of mmap; leave it out", harmless=("mmap", "infer")),
    "partitions": _idle("--workers share one input evenly, and the files do not depend on how many they are"),
    "keep-sequential-samples": _idle("documents always keep the order of the input", 0),
    "keep-newlines": _idle(
        "a text is taken as it is, and --split-sentences leaves white space between sentences out", 0
    ),
    "lang": _idle(_SENTENCES),
    "find-optimal-num-workers": _refused("give --workers as many as there are CPU cores", 0),
    "workers-to-check": _idle(_TUNING, MANY),
    "max-documents": _idle(_TUNING),
    "performance-dir": _idle(_TUNING),
    "make-vocab-size-divisible-by": _idle(_MODEL),
    "tensor-model-parallel-size": _idle(_MODEL),
    "vocab-extra-ids": _refused("it is for T5; leave it out", harmless=("0",)),
    "padded-vocab-size": _idle(_MODEL),
    "legacy-tokenizer": _idle("there is one way to build a tokenizer", 0),
    "trust-remote-code": _idle("a tokenizer is read from a file, and no code is run", 0),
    "tokenizer-hf-use-fast": _idle("tokenizer.json is read by the fast library", 0),
}


class OwnFlags(NamedTuple):
    """The words of a command line that are this tool's own, and a note for each idle flag."""

    argv: list[str]
    notes: list[str]


LISTS = (
    "--input",
    "--json-keys",
    "--filter",
    "--filter-language",
    "--decontaminate",
    "--sample-weights",
    "--tiktoken-special-tokens",
)
"""Flags of several values: given several times, their values add up, in the order given."""


def with_lists_joined(argv: Sequence[str]) -> list[str]:
    """`argv` with one occurrence, the first, of each flag of `LISTS`, which has all its values."""
    group: list[str] = []  # the flag that is being read, with its values
    groups, lists = [group], dict[str, list[str]]()
    for word in argv:
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if not word.startswith("--"):
            group.append(word)
        elif name not in LISTS:
            groups.append(group := [word])
        else:
            if name not in lists:
                groups.append(lists.setdefault(name, [name]))
            group = lists[name]
            group += [value] if equals else []
    return [word for group in groups for word in group]


def without_megatron_flags(argv: Sequence[str], own: Collection[str]) -> OwnFlags:
    """Take Megatron-LM's flags out; `own` are the names of this tool's flags, with dashes.

    UserError with all problems together: flags that are refused, and those that are unknown.
    """
    own_flags, problems = OwnFlags([], []), []
    words = with_lists_joined(argv)
    while words:
        word = words.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        name = name.replace("_", "-")
        if not re.match(r"--[A-Za-z]", word) or name.removeprefix("no-") in own:
            own_flags.argv.append(word)
        elif name in MEGATRON_FLAGS:
            flag = MEGATRON_FLAGS[name]
            values = [value] if equals else []
            while (
                words and not words[0].startswith("--") and (flag.num_values == MANY or len(values) < flag.num_values)
            ):
                values.append(words.pop(0))
            spelled = " ".join([f"--{name}", *values])
            if flag.status == "idle" or (values and set(values) <= set(flag.harmless)):
                why = flag.text if flag.status == "idle" else "it asks for what is done anyway"
                own_flags.notes.append(f"{spelled} is idle: {why}")
            else:
                problems.append(f"{spelled} is refused: {flag.text}")
        else:
            nearest = difflib.get_close_matches(name, own, n=1, cutoff=0.7)
            problems.append(f"--{name} is not a flag; {f'did you mean --{nearest[0]}?' if nearest else 'see --help'}")
            while words and not words[0].startswith("--"):
                words.pop(0)
    if problems:
        raise UserError("\n".join(problems))
    return own_flags
