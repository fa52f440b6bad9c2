"""Audit of chat data: what is trained on, in numbers and in three samples with the trained tokens marked.

It is printed before the first step and kept in the run's folder, because what goes wrong with chats raises no error: a
loss on the prompt, answers cut before their end, lines that are dropped.
"""

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from megatronish.core.errors import spelled
from megatronish.data.chat.dataset import ChatDataset
from megatronish.data.chat.file import ChatFile
from megatronish.data.chat.masked import MOST_TOLD
from megatronish.data.chat.setup import ChatSetup
from megatronish.tokenizer.control_tokens import ControlEncoder
from megatronish.tokenizer.tokenizer import Tokenizer

NUM_SHOWN = 3
LONGEST_SHOWN = 600  # characters of a run of tokens in a terminal
TOKENS_BEFORE = 16  # that a run is decoded with
GREEN, PLAIN = "\033[32m", "\033[0m"
STYLE = "body{font-family:sans-serif;margin:2em}pre{white-space:pre-wrap;border:1px solid #ccc;padding:1em}"
STYLE += "mark{background:#b7f0b1}"


@dataclass(frozen=True)
class Run:
    """Text of neighbouring tokens that are all trained, or all not."""

    text: str
    is_trained: bool


@dataclass(frozen=True)
class ShownSample:
    """A sample for a reader: where it is from, and its text in runs."""

    source: str
    runs: list[Run]


@dataclass(frozen=True)
class Audit:
    """Numbers as lines of text, bad lines, and samples."""

    lines: list[str]
    bad_lines: list[str]
    samples: list[ShownSample]

    @classmethod
    def of(cls, data: ChatDataset, setup: ChatSetup) -> "Audit":
        """The audit of a data set that was opened with this setup."""
        lines = [
            line
            for name, file in zip(data.names, data.files, strict=True)
            for line in _file_lines(name, file, train_on=setup.config.train_on)
        ]
        length = data.settings.seq_length
        what = "pair of completions" if data.is_paired else "chat"
        kind = "packed" if data.settings.pack else f"one {what} a row"
        lines.append(f"rows: {data.num_samples:,} of {length:,} tokens, {100 * data.filled:.1f} % filled ({kind})")
        bad = [each for file in data.files for each in file.counts.told]
        shown = _shown(data.files, setup.tokenizer, setup.controls)
        return cls(lines, bad[:MOST_TOLD], shown)

    def text(self, *, colour: bool = False, whole: bool = True) -> str:
        """The audit as text: trained tokens in green, or between two brackets; long runs shortened unless `whole`."""
        begin, end = (GREEN, PLAIN) if colour else ("\u27e6", "\u27e7")
        parts = ["chat data:", *self.lines]
        if self.bad_lines:
            parts += ["bad lines, the first:", *(f"  {each}" for each in self.bad_lines)]
        marked = "in green" if colour else f"between {begin} and {end}"
        for number, sample in enumerate(self.samples, 1):
            text = "".join(
                f"{begin}{_short(run.text, whole)}{end}" if run.is_trained else _short(run.text, whole)
                for run in sample.runs
            )
            parts += [f"--- sample {number} of {sample.source}, trained tokens {marked}:", text]
        return "\n".join([*parts, "---"])

    def html(self) -> str:
        """The audit as a page."""
        samples = [
            f"<h2>sample {number} of {html.escape(sample.source)}</h2>\n<pre>{_marked(sample.runs)}</pre>"
            for number, sample in enumerate(self.samples, 1)
        ]
        numbers = html.escape("\n".join([*self.lines, *self.bad_lines]))
        return (
            f'<!doctype html>\n<meta charset="utf-8">\n<title>chat data</title>\n<style>{STYLE}</style>\n'
            f"<h1>Chat data</h1>\n<pre>{numbers}</pre>\n<p><mark>Marked</mark> tokens are trained.</p>\n"
            + "\n".join(samples)
            + "\n"
        )


def _file_lines(name: str, file: ChatFile, *, train_on: str) -> Iterator[str]:
    counts, fit = file.counts, file.fit
    template = f", chat template {counts.template}" if counts.template else ""
    date = f" of the date {counts.date}" if counts.date else ""
    yield f"{name}: {counts.records:,} lines, format {counts.chat_format}{template}{date}, trained on: {train_on}"
    split = f", {counts.split:,} lines gave one for each answer" if counts.split else ""
    part = f", of which {fit.num_samples:,} are in this part" if fit.num_samples != counts.samples else ""
    name = "pairs  " if file.is_paired else "samples"
    yield f"  {name}          {counts.samples:,}{part}{split}"
    yield f"  tokens           {fit.tokens:,}, longest sample {counts.longest:,}"
    yield f"  trained tokens   {fit.trained:,} ({_percent(fit.trained, fit.tokens)})"
    lost = f", {fit.lost_end:,} lost the end of an answer" if fit.cut else ""
    yield f"  cut off          {fit.cut:,} ({_percent(fit.cut, fit.num_samples)}){lost}"
    dropped = fit.dropped + counts.untrained
    yield f"  dropped samples  {dropped:,}: {fit.dropped:,} too long, {counts.untrained:,} without a trained token"
    reasons = "".join(f"; {number:,}: {reason}" for reason, number in sorted(counts.bad.items()))
    yield f"  bad lines        {counts.num_bad:,}{reasons}"
    ends = ", ".join(f"{name} in {number:,} samples" for name, number in sorted(counts.ends.items()))
    yield f"  answers end with {ends or 'no token that is known, as every token is trained'}"
    yield f"  double BOS       {counts.double_bos:,}"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.1f} %"


def _short(text: str, whole: bool) -> str:
    """The text, or its beginning and end with the number of characters that are left out between.

    Control characters are spelled out, as data of strangers may move the cursor.
    """
    text = spelled(text)
    if whole or len(text) <= LONGEST_SHOWN:
        return text
    half = LONGEST_SHOWN // 2
    return f"{text[:half]}[{len(text) - 2 * half:,} characters]{text[-half:]}"


def _marked(runs: Sequence[Run]) -> str:
    texts = [(html.escape(run.text), run.is_trained) for run in runs]
    return "".join(f"<mark>{text}</mark>" if is_trained else text for text, is_trained in texts)


def _shown(files: Sequence[ChatFile], tokenizer: Tokenizer, controls: ControlEncoder) -> list[ShownSample]:
    """Samples from the beginning of the shuffled order, from each file in turn."""
    samples = []
    for number in range(max(NUM_SHOWN, len(files)) if len(files) > 1 else min(NUM_SHOWN, files[0].num_samples)):
        file = files[number % len(files)]
        place = file.take(number // len(files))
        for title, text in zip(_titles(file, place), file.texts(place), strict=True):
            # No token comes before the first one, which could predict it.
            runs = runs_of(text.tokens.tolist(), [False, *text.mask.tolist()[1:]], tokenizer, controls)
            samples.append(ShownSample(file.path.name + title, runs))
    return samples


def _titles(file: ChatFile, place: int) -> list[str]:
    """What the texts of a sample are, for those of a pair."""
    if not file.is_paired:
        return [""]
    if file.counts.chat_format == "pairs":
        return [", chosen", ", rejected"]
    return [", wanted" if file.label(place) else ", not wanted", ", with another record's completion"]


def runs_of(ids: Sequence[int], mask: Sequence[bool], tokenizer: Tokenizer, controls: ControlEncoder) -> list[Run]:
    """Text of tokens in runs; a control token is shown by its name.

    What a tokenizer drops at the beginning of a text, the space before a word, is kept within: a run is what it adds to
    the tokens before it.
    """
    names = {number: name for name, number in controls.names.items()}
    runs: list[Run] = []
    plain: list[int] = []  # the last tokens before the run, without control tokens
    groups = groupby(range(len(ids)), key=lambda place: (bool(mask[place]), names.get(ids[place])))
    for (is_trained, name), members in groups:
        places = list(members)
        if name is not None:
            text = name * len(places)
        else:
            run = [ids[place] for place in places]
            text = tokenizer.decode([*plain, *run])[len(tokenizer.decode(plain)) :]
            plain = [*plain, *run][-TOKENS_BEFORE:]
        if runs and runs[-1].is_trained == is_trained:
            runs[-1] = Run(runs[-1].text + text, is_trained)
        else:
            runs.append(Run(text, is_trained))
    return runs
