"""Benchmark of preprocessing against the tokenizer's library alone: as many processes, the same lines, in turns.

The library has the texts in memory, and its clock runs while it makes lists of ids of them: it reads no file, parses no
JSON and writes nothing. Preprocessing is measured from the first batch that comes back to the last, because both start
the same tokenizer; its start is told apart. Every turn is a new process, in another order each round, so that other
load on the machine affects both alike; seconds of the processor are told too, because a third process gets a third
share of cores that are busy. The ids must be as many.

    python benchmarks/tokenizing.py --turns 5 --workers 1 2

Without --tokenizer it trains both kinds on what it reads: Python's own library and the installed packages.
"""

import argparse
import json
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import tokenizers

from megatronish.config.sections.data import DataConfig
from megatronish.data.preprocess import Summary, preprocess
from megatronish.tokenizer.build import build_tokenizer
from megatronish.tokenizer.names import TokenizerType

KINDS: tuple[TokenizerType, ...] = ("huggingface", "sentencepiece")
PROGRAMS = ("library", "preprocess")
TEXTS_AT_ONCE = 64


# The programs, each in a process of its own.


def be_library(corpus: Path, kind: str, model: Path, workers: int) -> dict[str, float]:
    """Encode the texts by the library alone: the slowest process counts."""
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(workers), context.SimpleQueue()
    shares = [
        context.Process(target=_encode_share, args=(corpus, kind, model, (number, workers), barrier, answers))
        for number in range(workers)
    ]
    for process in shares:
        process.start()
    measured = [answers.get() for _ in shares]
    for process in shares:
        process.join()
    tokens, seconds, cpu = (list(values) for values in zip(*measured, strict=True))
    return {"tokens": sum(tokens), "measured_tokens": sum(tokens), "seconds": max(seconds), "cpu": sum(cpu)}


def _encode_share(corpus: Path, kind: str, model: Path, share: tuple[int, int], barrier: Any, answers: Any) -> None:
    number, workers = share
    with corpus.open("rb") as file:
        texts = [json.loads(line)["text"] for place, line in enumerate(file) if place % workers == number]
    batches = [texts[place : place + TEXTS_AT_ONCE] for place in range(0, len(texts), TEXTS_AT_ONCE)]
    if kind == "huggingface":
        fast = tokenizers.Tokenizer.from_file(str(model))
        fast.encode_special_tokens = True

        def ids_of(batch: list[str]) -> list[list[int]]:
            return [encoding.ids for encoding in fast.encode_batch_fast(batch, add_special_tokens=False)]
    else:
        pieces = sentencepiece.SentencePieceProcessor(model_file=str(model))

        def ids_of(batch: list[str]) -> list[list[int]]:
            return [pieces.encode(text) for text in batch]

    ids_of(["A first text, which fills what is built at the first call."])
    barrier.wait()
    tokens, start, start_cpu = 0, time.perf_counter(), time.process_time()
    for batch in batches:
        tokens += sum(map(len, ids_of(batch)))
    answers.put((tokens, time.perf_counter() - start, time.process_time() - start_cpu))


def be_preprocess(corpus: Path, kind: TokenizerType, model: Path, workers: int) -> dict[str, float]:
    """Preprocess the file; measured between the first and the last batch that came back."""
    start, moments = time.perf_counter(), list[tuple[int, float, float]]()

    def hear(summary: Summary, num_bytes: int) -> None:
        if not moments or num_bytes:
            del moments[1:]
            moments.append((summary.tokens, time.perf_counter(), _processor_seconds()))

    with tempfile.TemporaryDirectory() as folder:
        summary = preprocess(
            [str(corpus)],
            f"{folder}/out",
            tokenizer=partial(build_tokenizer, DataConfig(tokenizer_type=kind, tokenizer_model=str(model))),
            workers=workers,
            on_progress=hear,
        )
    (before, first, first_cpu), (after, last, last_cpu) = moments
    return {
        "tokens": summary.tokens,
        "measured_tokens": after - before,
        "seconds": last - first,
        "cpu": last_cpu - first_cpu,
        "start": first - start,
    }


def _processor_seconds() -> float:
    """Seconds of the processor of this process and its workers, which Linux tells; elsewhere of this one alone."""
    seconds = time.process_time()
    for worker in multiprocessing.active_children():
        stat = Path(f"/proc/{worker.pid}/stat")
        if stat.exists():
            ticks = stat.read_text().rpartition(")")[2].split()[11:13]
            seconds += sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    return seconds


# The parent.


def write_corpus(path: Path, *, num_bytes: int) -> None:
    """JSON lines of the sources and documents of this Python's library and packages, shuffled."""
    roots = {sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")}
    endings = (".py", ".md", ".rst", ".txt", ".h")
    files = sorted({file for root in roots for ending in endings for file in Path(root).rglob(f"*{ending}")})
    random.Random(0).shuffle(files)
    left = num_bytes
    with path.open("w") as output:
        for file in files:
            if left > 0 and 200 < file.stat().st_size < 200_000:
                text = file.read_text(encoding="utf-8", errors="replace")
                output.write(json.dumps({"text": text}) + "\n")
                left -= len(text)


def train(kind: str, corpus: Path, folder: Path, *, vocab_size: int) -> Path:
    """A tokenizer of a kind, trained on the first texts: byte-level BPE as GPT-2's, or BPE with bytes as Llama 2's."""
    with corpus.open("rb") as file:
        texts = [json.loads(line)["text"] for line in file][:1000]
    if kind == "huggingface":
        model, path = tokenizers.Tokenizer(tokenizers.models.BPE()), folder / "tokenizer.json"
        model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=["<|endoftext|>"],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        model.train_from_iterator(texts, trainer)
        model.save(str(path))
        return path
    lines = (line[:4000] for text in texts for line in text.splitlines() if line)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=vocab_size,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return folder / "tokenizer.model"


def measure(corpus: Path, kind: str, model: Path, workers: int, turns: int) -> dict[str, list[dict[str, float]]]:
    """What each program measured, a turn after another."""
    measured: dict[str, list[dict[str, float]]] = {program: [] for program in PROGRAMS}
    for turn in range(turns):
        for program in PROGRAMS if turn % 2 == 0 else reversed(PROGRAMS):
            command = [sys.executable, __file__, "--be", program, "--input", str(corpus), "--workers", str(workers)]
            answer = subprocess.run(
                [*command, "--tokenizer", str(model), "--kind", kind],
                env=os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                check=True,
            )
            measured[program].append(json.loads(answer.stdout))
    tokens = {answer["tokens"] for answers in measured.values() for answer in answers}
    assert len(tokens) == 1, f"the programs made different numbers of tokens: {tokens}"
    return measured


def row(kind: str, workers: int, measured: dict[str, list[dict[str, float]]]) -> str:
    """A row of the table: speeds, and their ratio, of which each is of two neighbours in time."""
    library, ours = measured["library"], measured["preprocess"]
    cells = [f"{kind}, {workers}"]
    for answers in (library, ours):
        cells.append(f"{statistics.median(one['measured_tokens'] / one['seconds'] for one in answers):,.0f}")
    for clock in ("seconds", "cpu"):
        speeds = [[one["measured_tokens"] / one[clock] for one in answers] for answers in (library, ours)]
        ratios = [mine / theirs for theirs, mine in zip(*speeds, strict=True)]
        low, middle, high = np.percentile(ratios, [25, 50, 75])
        cells.append(f"**{middle:.2f}**, {low:.2f} to {high:.2f}")
    cells.append(f"{statistics.median(one['start'] for one in ours):.1f} s")
    return f"| {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--input", type=Path, help="JSON lines with a text each; default: Python's own sources")
    parser.add_argument("--max-bytes", type=int, default=20_000_000, help="size of the default texts")
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--tokenizer", type=Path, help="the file of a tokenizer of --kind")
    parser.add_argument("--be", choices=PROGRAMS, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.be:
        program = be_library if arguments.be == "library" else be_preprocess
        print(json.dumps(program(arguments.input, arguments.kind[0], arguments.tokenizer, arguments.workers[0])))
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = arguments.input or folder / "corpus.jsonl"
        if not arguments.input:
            write_corpus(corpus, num_bytes=arguments.max_bytes)
        print(f"{corpus.stat().st_size:,} bytes of JSON lines, {arguments.turns} turns, load {os.getloadavg()}")
        print("| tokenizer, workers | library, tokens/s | preprocess, tokens/s | ratio | ratio by CPU | start |")
        print("| --- | ---: | ---: | ---: | ---: | ---: |")
        for kind in arguments.kind:
            model = arguments.tokenizer or train(kind, corpus, folder, vocab_size=32_000)
            for workers in arguments.workers:
                print(row(kind, workers, measure(corpus, kind, model, workers, arguments.turns)), flush=True)
        print(f"load at the end {os.getloadavg()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
