"""Command `megatronish inspect`: what a .bin/.idx pair holds, and whether it is whole."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from megatronish.commands.exit_status import exit_status
from megatronish.config.arguments import PluginNames, read_arguments
from megatronish.config.hub import local_tokenizer
from megatronish.config.marks import at_least, at_most
from megatronish.config.model_source import implied_tokenizer
from megatronish.config.plugins import import_plugins
from megatronish.config.sections.data import MANIFEST, DataConfig, FimConfig, Packing, StoreCacheSize, split_part
from megatronish.core.errors import UserError, spelled
from megatronish.core.figures import no_matplotlib
from megatronish.core.files import refuse_input_as_output, unwritten
from megatronish.tokenizer.names import tokenizer_type

if TYPE_CHECKING:  # they import torch, for which --help need not wait
    from megatronish.data.indexed import IndexedTokens
    from megatronish.data.inspection import NearDuplicates, PairCheck, ShownRun
    from megatronish.data.sample import DatasetSource, Sample
    from megatronish.data.token_files import TokenFiles
    from megatronish.tokenizer.tokenizer import Tokenizer

LONGEST_TEXT = 1500  # characters of a document or of a run that are shown
NUM_PAIRS = 10
COLOURS = ("\033[36m", "\033[33m", "\033[35m")  # of documents, in turn
FAINT, PLAIN = "\033[2m", "\033[0m"
NEAR = ("tokenizer.json", "tokenizer.model")


@dataclass(frozen=True)
class InspectArguments:
    """Print what a .bin/.idx pair, or a manifest of shards, holds; --check tells whether it is whole."""

    prefix: tyro.conf.Positional[str]
    """PREFIX of PREFIX.bin and PREFIX.idx, or a .shards.json, which may be on object storage (s3://bucket/PREFIX).
    PREFIX[0:0.9] shows a sample of 90 % of it."""
    check: bool = False
    """Check sizes, index, ids and checksums instead; status 1 if something is wrong."""
    json: bool = False
    """Print one JSON object, for scripts."""
    histogram: Path | None = None
    """FILE.png of the lengths of documents."""
    document: Annotated[int, at_least(0), at_most(2**63 - 1)] = 0
    """Number of the document whose text is printed."""
    sample: Annotated[int, at_least(0), at_most(2**63 - 1)] = 0
    """Number of the sample that is printed."""
    near_duplicates: Annotated[int, at_least(0), at_most(1_000_000)] = 2000
    """Documents that are compared with each other; 0 compares none."""
    seq_length: Annotated[int, at_least(1), at_most(2**31 - 1)] = 512
    """Tokens of the sample; as --packing, --seed and so on like those of the run."""
    packing: Packing = "concatenate"
    """How documents become samples."""
    seed: int = 1234
    """Seed of the order."""
    data_cache_path: str | None = None
    """Where sample indices are kept, for training too. Derived: a folder `cache` next to the prefix."""
    data_store_cache_path: str | None = None
    """Folder of this machine for what is read of a prefix on object storage. Derived: one in the user's cache."""
    data_store_cache_size: StoreCacheSize = DataConfig.data_store_cache_size
    """Gigabytes that its blocks may have together."""
    reset_position_ids: bool = False
    """Positions start from 0 at each document of the sample."""
    eod_mask_loss: bool = False
    """Predictions made from an end-of-document token do not count."""
    fim_data: bool = False
    """Show the sample with middles that come last, as --fim-data trains on."""
    fim_rate: Annotated[float, at_least(0), at_most(1)] = FimConfig.fim_rate
    """Part of the documents whose middle comes last."""
    fim_spm_rate: Annotated[float, at_least(0), at_most(1)] = FimConfig.fim_spm_rate
    """Part of these whose end comes first."""
    tokenizer_type: str | None = None
    """Kind of the tokenizer. Derived from its files."""
    tokenizer_model: str | None = None
    """The tokenizer's file or folder. Derived: tokenizer.json or a .model that lies next to the prefix."""
    vocab_file: str | None = None
    """vocab.json of a GPT-2 tokenizer, with --merge-file; or vocab.txt of a BERT."""
    merge_file: str | None = None
    """merges.txt of a GPT-2 tokenizer, with --vocab-file."""
    vocab_size: int | None = None
    """The vocabulary, which ids must be below. Derived from the tokenizer."""
    plugin: PluginNames = ()
    """A plug-in (my.module or FILE.py) to import, which runs its code; several are allowed. See docs/PLUGINS.md."""

    def token_files(self) -> "TokenFiles":
        """What opens the prefix."""
        from megatronish.data.token_files import TokenFiles

        return TokenFiles(self.data_store_cache_path, self.data_store_cache_size)


def main(argv: Sequence[str], *, program: str = "megatronish inspect") -> int:
    """Run the command; the exit status."""
    return exit_status(lambda: run(read_arguments(InspectArguments, argv, program=program)), prefix="error: ")


def run(arguments: InspectArguments) -> int:
    """Print the report, or the checks; the exit status."""
    import_plugins(arguments.plugin)
    try:
        prefix, part = split_part(arguments.prefix)
    except ValueError as error:
        raise UserError(str(error)) from error
    files = [prefix] if prefix.endswith(MANIFEST) else [f"{prefix}.bin", f"{prefix}.idx"]
    refuse_input_as_output("--histogram", arguments.histogram, files)
    tokenizer = tokenizer_of(arguments, prefix)
    if arguments.check:
        return _check(arguments, prefix, tokenizer)
    inspection = Inspection.of(arguments, prefix, part, tokenizer)
    if arguments.histogram is not None:
        _draw(inspection, arguments.histogram)
    print(json.dumps(inspection.facts) if arguments.json else inspection.text(colour=_has_colours()))
    return 0


def _has_colours() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")


def _check(arguments: InspectArguments, prefix: str, tokenizer: "Tokenizer | None") -> int:
    from megatronish.data.inspection import check_pair

    vocab_size = arguments.vocab_size if tokenizer is None else tokenizer.vocab_size
    seen: list[PairCheck] = []
    eod = None if tokenizer is None else tokenizer.eod
    for check in check_pair(prefix, vocab_size=vocab_size, eod=eod, files=arguments.token_files()):
        seen.append(check)
        if not arguments.json:
            print(f"{'right' if check.is_right else 'WRONG'}  {check.name}: {check.sentence}")
    is_whole = all(check.is_right for check in seen)
    if arguments.json:
        print(json.dumps({"prefix": prefix, "is_whole": is_whole, "checks": [check._asdict() for check in seen]}))
    return 0 if is_whole else 1


def tokenizer_of(arguments: InspectArguments, prefix: str) -> "Tokenizer | None":
    """The tokenizer that flags name, or that lies next to the prefix; None if there is none."""
    from megatronish.tokenizer.build import build_tokenizer

    names = ("vocab_file", "merge_file", "vocab_size")
    given: dict[str, Any] = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    if arguments.tokenizer_type is not None:
        given["tokenizer_type"] = tokenizer_type(arguments.tokenizer_type)
    if arguments.tokenizer_model is not None:
        given["tokenizer_model"] = str(local_tokenizer(arguments.tokenizer_model))
    if given.keys() <= {"vocab_size"}:
        folder = Path(prefix).parent
        paths = [*(folder / name for name in NEAR), *sorted(folder.glob("*.model"))]
        path = next((path for path in paths if path.is_file()), None)
        if path is None:
            return None
        given["tokenizer_model"] = str(path)
    return build_tokenizer(DataConfig(**given | implied_tokenizer(given)))


def _draw(inspection: "Inspection", path: Path) -> None:
    try:
        from megatronish.report.documents import plot_lengths
    except ImportError as error:
        raise UserError(f"--histogram {path}: {no_matplotlib(error)}") from error
    from megatronish.data.inspection import lengths_of

    try:
        plot_lengths(lengths_of(inspection.file), path, title=Path(inspection.file.prefix).name)
    except OSError as error:
        raise unwritten(f"--histogram {path}", path, error) from error


@dataclass(frozen=True)
class Inspection:
    """What is known of a data set: `facts` for scripts, and texts for a reader."""

    arguments: InspectArguments
    file: "IndexedTokens"
    tokenizer: "Tokenizer | None"
    facts: dict[str, Any]
    duplicates: "NearDuplicates"
    sample: "Sample | None" = None
    runs: list["ShownRun"] = field(default_factory=list)
    no_sample: str = ""

    @classmethod
    def of(
        cls, arguments: InspectArguments, prefix: str, part: tuple[float, float], tokenizer: "Tokenizer | None"
    ) -> "Inspection":
        """Read all of the data once, and a part of it for near-duplicates."""
        from megatronish.data.inspection import near_duplicates, runs_of_sample
        from megatronish.data.loader import Collator
        from megatronish.data.sample import DatasetSource

        files = arguments.token_files()
        file = files.open(prefix)
        if not arguments.document < max(1, file.num_documents):
            raise UserError(f"--document {arguments.document} must be below the {file.num_documents} of {prefix}")
        duplicates = near_duplicates(file, most=arguments.near_duplicates)
        facts = _facts(file, tokenizer) | {
            "compared_documents": duplicates.compared,
            "near_duplicates": len(duplicates.pairs),
            "near_duplicate_examples": [pair._asdict() for pair in duplicates.pairs[:NUM_PAIRS]],
        }
        if tokenizer is None:
            why = "name a tokenizer (--tokenizer-model, or --tokenizer-type) to see it as the model does"
            return cls(arguments, file, tokenizer, facts, duplicates, no_sample=why)
        try:
            sample = _sample(arguments, DatasetSource("training", prefix, part), tokenizer, files)
        except UserError as error:
            return cls(arguments, file, tokenizer, facts, duplicates, no_sample=str(error))
        collate = Collator(tokenizer.eod, arguments.reset_position_ids, eod_mask_loss=arguments.eod_mask_loss)
        runs = list(runs_of_sample(sample, collate))
        facts["sample"] = {
            "number": arguments.sample,
            "tokens": sample.tokens.tolist(),
            "num_filler": sample.num_filler,
            "trained": sum(len(run.tokens) for run in runs if run.is_trained),
            "documents": len({run.document for run in runs}),
        }
        return cls(arguments, file, tokenizer, facts, duplicates, sample, runs)

    def text(self, *, colour: bool) -> str:
        """The report; documents of the sample in colours, or with a line before each."""
        return "\n".join([*self._numbers(), *self._duplicates(), *self._document(), *self._sample(colour=colour)])

    def _numbers(self) -> Iterator[str]:
        facts = self.facts
        yield f"{self.file.prefix}: {facts['documents']:,} documents, {facts['tokens']:,} tokens ({facts['dtype']})"
        lengths = facts["lengths"]
        yield "  tokens of a document  " + ", ".join(f"{name} {value:,}" for name, value in lengths.items())
        yield f"  empty documents       {facts['empty_documents']:,}"
        size = "" if facts["vocab_size"] is None else f", of a vocabulary of {facts['vocab_size']:,}"
        yield f"  ids                   {facts['smallest_id']} to {facts['largest_id']}{size}"
        if facts["documents_without_end"] is not None:
            yield f"  without an end token  {facts['documents_without_end']:,} documents"
        counts = ", ".join(f"{spelled(name)} {count:,}" for name, count in facts["special_tokens"].items())
        yield f"  special tokens        {counts or 'none'}"

    def _duplicates(self) -> Iterator[str]:
        pairs, compared = self.duplicates.pairs, self.duplicates.compared
        if not self.arguments.near_duplicates:
            return
        part = len(pairs) / max(compared, 1)
        yield f"near-duplicates: {len(pairs):,} of {compared:,} documents that were compared ({part:.1%})"
        for pair in pairs[:NUM_PAIRS]:
            shared = f"about {pair.similarity:.0%} of their runs of five tokens"
            yield f"  document {pair.second} is like {pair.first}: {shared}"

    def _document(self) -> Iterator[str]:
        if not self.file.num_documents:
            return
        number = self.arguments.document
        tokens = self.file.document(number)
        yield f"--- document {number}, {len(tokens):,} tokens:"
        yield self._short(tokens.tolist())

    def _sample(self, *, colour: bool) -> Iterator[str]:
        number = self.arguments.sample
        if self.sample is None:
            yield f"--- sample {number} is not shown: {self.no_sample}"
            return
        shown = self.facts["sample"]
        places, filler = len(self.sample.tokens), self.sample.num_filler
        counts = f"{places:,} places, {shown['documents']:,} documents, {shown['trained']:,} tokens count in the loss"
        marks = "faint ones do not" if colour else "those in \u27e6\u27e7 do not"
        yield f"--- sample {number}: {counts}, {marks}; {filler:,} filler"
        texts: dict[int, list[str]] = {}
        for run in self.runs:
            text = self._short(run.tokens)
            if run.document not in texts:
                texts[run.document] = [f"[document {len(texts) + 1}, from position {run.position}] "]
            if colour:
                text = f"{COLOURS[len(texts) % 3]}{'' if run.is_trained else FAINT}{text}{PLAIN}"
            texts[run.document].append(text if run.is_trained or colour else f"\u27e6{text}\u27e7")
        yield from ("".join(parts) for parts in texts.values())

    def _short(self, tokens: Sequence[int]) -> str:
        from megatronish.data.inspection import text_of

        special = {} if self.tokenizer is None else self.tokenizer.special_tokens()
        text = spelled(text_of(tokens, self.tokenizer, special))
        half = LONGEST_TEXT // 2
        if len(text) <= LONGEST_TEXT:
            return text
        return f"{text[:half]}[{len(text) - 2 * half:,} characters]{text[-half:]}"


def _facts(file: "IndexedTokens", tokenizer: "Tokenizer | None") -> dict[str, Any]:
    """Numbers of all documents and tokens."""
    import numpy as np

    from megatronish.data.inspection import count_tokens, digest_of, lengths_of

    special = {} if tokenizer is None else tokenizer.special_tokens()
    eod = None if tokenizer is None else tokenizer.eod
    counts, lengths = count_tokens(file, special, eod=eod), lengths_of(file)
    percentiles = np.percentile(lengths, [0, 5, 50, 95, 100]).round().astype(int).tolist() if len(lengths) else [0] * 5
    occurring = sorted(((name, count) for name, count in counts.special.items() if count), key=lambda item: -item[1])
    return {
        "prefix": file.prefix,
        "documents": file.num_documents,
        "tokens": file.num_tokens,
        "dtype": str(file.dtype),
        "identity": digest_of(file),
        "lengths": dict(zip(("shortest", "5 %", "median", "95 %", "longest"), percentiles, strict=True))
        | {"mean": round(float(lengths.mean()), 1) if len(lengths) else 0},
        "empty_documents": int((lengths == 0).sum()),
        "smallest_id": counts.smallest,
        "largest_id": counts.largest,
        "vocab_size": None if tokenizer is None else tokenizer.vocab_size,
        "documents_without_end": counts.without_end,
        "special_tokens": dict(occurring),
    }


def _sample(
    arguments: InspectArguments, source: "DatasetSource", tokenizer: "Tokenizer", files: "TokenFiles"
) -> "Sample":
    """The sample of training on this data alone; UserError if there is none."""
    from megatronish.data.fill_in_middle import FilledMiddle, MiddleRule
    from megatronish.data.packed import open_pretraining
    from megatronish.data.sample import Dataset, DatasetSettings

    settings = DatasetSettings(
        seq_length=arguments.seq_length,
        seed=arguments.seed,
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
        cache_path=arguments.data_cache_path,
        packing=arguments.packing,
        files=files,
    )
    dataset: Dataset = open_pretraining(source, settings)
    if arguments.fim_data:
        config = FimConfig(fim_data=True, fim_rate=arguments.fim_rate, fim_spm_rate=arguments.fim_spm_rate)
        dataset = FilledMiddle(dataset, MiddleRule.of(config, tokenizer), seed=arguments.seed)
    return dataset.sample(arguments.sample)
