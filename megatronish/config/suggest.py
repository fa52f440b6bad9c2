"""Complaints about unknown flags and keys, with the known name that was meant where it is close."""

import difflib
from collections.abc import Iterable

from megatronish.compat.megatron_flags.table import KNOWN
from megatronish.config.fields import ALIASES, FIELDS

CLOSE = 0.8  # of difflib's ratio; at 0.6, its default, num-experts is close to num-layers


SYNONYMS = {
    name: ours
    for ours, names in {
        "min-lr": "min-learning-rate lr-min",
        "micro-batch-size": "train-micro-batch-size-per-gpu per-gpu-batch-size device-batch-size",
        "global-batch-size": "train-batch-size total-batch-size",
        "train-iters": "num-steps steps max-iters iterations num-iters train-steps total-steps",
        "num-epochs": "epochs",
        "lr-warmup-iters": "warmup-iters num-warmup-steps lr-warmup-steps",
        "lr-decay-style": "lr-scheduler-type lr-scheduler scheduler",
        "clip-grad": "grad-clip gradient-clipping",
        "optimizer": "optim",
        "run-dir": "out-dir output",
        "log-interval": "log-every log-steps",
        "save-interval": "save-every",
        "eval-interval": "eval-every",
        "seq-length": "max-seq-length max-seq-len seq-len sequence-length context-length block-size max-length",
        "num-layers": "n-layer n-layers layers num-hidden-layers",
        "num-attention-heads": "n-head n-heads num-heads heads",
        "num-query-groups": "num-kv-heads n-kv-heads",
        "hidden-size": "n-embd d-model dim",
        "ffn-hidden-size": "intermediate-size d-ff",
        "hidden-dropout": "dropout",
        "rotary-base": "rope-theta",
        "load-hf": "model model-name pretrained-model-name-or-path base-model model-path",
        "load": "resume resume-from-checkpoint resume-from checkpoint ckpt",
        "tokenizer-model": "tokenizer tokenizer-path tokenizer-name",
        "data-path": "data dataset-path train-file data-files",
        "lora-rank": "lora-r",
        "adapter-targets": "lora-target-modules target-modules",
        "zero-stage": "zero",
        "tensor-model-parallel-size": "tensor-parallel-size",
        "pipeline-model-parallel-size": "pipeline-parallel-size pp-size",
        "bf16": "bfloat16 mixed-precision-bf16",
        "fp16": "half float16",
    }.items()
    for name in names.split()
}
"""{flag of other programs: ours}, of one meaning; those that Megatron-LM has are in the tables of its flags."""


def unknown(name: str, *, spelled: str, typed: bool) -> str:
    """Complaint about a flag, or a key, that is unknown."""
    positive = FIELDS.get(name.removeprefix("no-").replace("-", "_"))
    if typed and positive is not None and name.startswith("no-"):
        return f"{spelled.split()[0]} is not a flag: {positive.flag} is {positive.wants}, and has no off; leave it out"
    nearest = nearest_name(name)
    if typed:
        remedy = f"did you mean --{nearest}?" if nearest else "see --help"
        return f"{spelled.split()[0]} is not a flag; {remedy}"
    remedy = f"did you mean {nearest.replace('-', '_')}?" if nearest else "docs/FLAGS.md lists all"
    return f"{spelled.split(' = ')[0]} is not a key; {remedy}"


def nearest_name(name: str) -> str | None:
    """Known name that `name` is a misspelling of; None if none is close, or its words are others."""
    names = [*ALIASES, *(field.replace("_", "-") for field in FIELDS), *KNOWN, "config", "help"]
    if (synonym := SYNONYMS.get(name.lower())) in names:
        return synonym
    close = difflib.get_close_matches(name, names, n=3, cutoff=CLOSE)
    return next((other for other in close if _same_family(name, other)), None)


def _same_family(name: str, other: str) -> bool:
    """Whether each word of the shorter name is a word of the other, or nearly one."""
    short, long = sorted((name.split("-"), other.split("-")), key=len)
    return all(difflib.get_close_matches(word, long, n=1, cutoff=0.6) for word in short)


def is_meant_as_config(name: str) -> bool:
    """Whether an unknown flag is a misspelling of --config."""
    return name not in KNOWN and name.replace("-", "_") not in FIELDS and nearest_name(name) == "config"


def nearest_section(section: str, sections: Iterable[str]) -> str | None:
    """Section of a TOML file that a name is a misspelling of; None if none is close."""
    return next(iter(difflib.get_close_matches(section, list(sections), n=1)), None)


def one_of_sections(section: str, sections: Iterable[str]) -> str:
    """Complaint about a section of a TOML file that does not exist."""
    nearest = nearest_section(section, sections)
    remedy = f"did you mean [{nearest}]?" if nearest else f"there are {', '.join(sections)}"
    return f"[{section}] is not a section; {remedy}"
