"""Flags of Megatron-LM's preprocess_data.py that this tool does not have: each is idle or refused, with the reason."""

import difflib
import re
from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

from megatronish.core.errors import UserError

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


_SENTENCES = "texts are not split into sentences"
_MODEL = "the vocabulary is padded when the model is trained"
_TUNING = "it belongs to --find-optimal-num-workers"

MEGATRON_FLAGS: dict[str, MegatronFlag] = {
    "dataset-impl": _refused("the only format is that of mmap; leave it out", harmless=("mmap", "infer")),
    "partitions": _idle("--workers share one input evenly, and the files do not depend on how many they are"),
    "keep-sequential-samples": _idle("documents always keep the order of the input", 0),
    "split-sentences": _refused("it is for BERT; leave it out, a text is one document", 0),
    "keep-newlines": _idle("a text is taken as it is", 0),
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


LISTS = ("--input", "--json-keys", "--tiktoken-special-tokens")
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
    found, problems = OwnFlags([], []), []
    words = with_lists_joined(argv)
    while words:
        word = words.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        name = name.replace("_", "-")
        if not re.match(r"--[A-Za-z]", word) or name.removeprefix("no-") in own:
            found.argv.append(word)
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
                found.notes.append(f"{spelled} is idle: {why}")
            else:
                problems.append(f"{spelled} is refused: {flag.text}")
        else:
            nearest = difflib.get_close_matches(name, own, n=1, cutoff=0.7)
            problems.append(f"--{name} is not a flag; {f'did you mean --{nearest[0]}?' if nearest else 'see --help'}")
            while words and not words[0].startswith("--"):
                words.pop(0)
    if problems:
        raise UserError("\n".join(problems))
    return found
