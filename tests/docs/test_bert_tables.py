"""Tests of the tables that documents have of BERT: its tensors in both formats, and how its ends are shared."""

import re

from paths import ROOT

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.bert import bert_tensors
from megatronish.model.bert import Bert
from megatronish.parallel.mesh import Axis, TensorParallel
from megatronish.parallel.sharding import collect_shardings

BERT = ModelConfig(model_type="bert", num_layers=1, hidden_size=8, num_attention_heads=2)
BEFORE = r"bert\.embeddings\.|bert\.encoder\.layer\.0\.|cls\.predictions\."


def rows_of(page: str, section: str) -> list[list[str]]:
    """Rows of the first table after this text, by the words in code of each cell."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8").partition(section)[2]
    rows = text[text.index("\n| ") + 1 :].split("\n\n")[0].splitlines()[2:]
    return [row.strip("| ").split(" | ") for row in rows]


def named(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def module_of(name: str) -> str:
    return re.sub(r"\.(weight|bias)$", "", name)


def test_the_table_of_tensors_is_that_of_the_conversion() -> None:
    rules: dict[str, list[str]] = {}
    for rule in bert_tensors(BERT):
        ours = rule.ours if rule.ours == "head.bias" else module_of(rule.ours).replace("layers.0", "layers.N")
        theirs = [re.sub(f"^({BEFORE})", "", name) for name in rule.theirs]
        rules[ours] = [name if ours == "head.bias" else module_of(name) for name in theirs]
    said: dict[str, list[str]] = {}
    for ours, theirs in rows_of("CONVERT.md", "\nBERT, after"):
        here, there = named(re.sub(r"\(.*\)", "", ours)), named(theirs.split(";")[0])
        said |= {here[0]: there} if len(here) == 1 else {a: [b] for a, b in zip(here, there, strict=True)}
    assert said == rules


def test_the_table_of_its_ends_says_how_they_are_shared() -> None:
    axis = Axis("tp", 2, 0)
    found: dict[str, set[tuple[str, bool, bool]]] = {}
    for in_parts in (False, True):
        tp = TensorParallel(axis, sequence=in_parts)
        shardings = collect_shardings(Bert(BERT, vocab_size=16, num_positions=4, tp=tp))
        for name, sharding in shardings.items():
            if not name.startswith("layers."):
                key = name if name == "head.bias" else module_of(name)
                cut = "cut by the vocabulary" if sharding.cut_axes == {"tp"} else "whole"
                found.setdefault(key, set()).add((cut, in_parts, "tp" in sharding.partial_over))
    said = {}
    for names, cut, summed in rows_of("SHARDING.md", "## The ends of a BERT"):
        assert summed in ("none", "with `--sequence-parallel`")
        for name in named(names):
            said[name] = {(cut, False, False), (cut, True, summed != "none")}
    assert said == found
