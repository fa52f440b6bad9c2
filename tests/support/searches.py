"""Searches of the planner for tests: three large ones, each made once a session, by whichever worker needs it first."""

import cProfile
import os
import pickle
from functools import cache
from pathlib import Path
from typing import NamedTuple

from paths import ROOT

from megatronish.config.read import read_config
from megatronish.estimate.costs.candidate import UNASKED, without_layout
from megatronish.estimate.planner.devices import find_device
from megatronish.estimate.planner.search import Search, SearchResult
from megatronish.estimate.planner.workload import Workload

CASES = {
    "gpt3-175b": (1024, "a100-sxm", 50257),
    "llama-70b": (512, "h100-sxm", 128256),
    "qwen3-30b-a3b": (64, "h100-sxm", 151936),
}
COUNTED = ("gpt3-175b", "llama-70b")
"""The searches whose calls are counted, which makes them longer."""
run = Search.run  # which tests replace


class Searched(NamedTuple):
    """Result of a search, and how many calls of functions it took, if they were counted."""

    result: SearchResult
    calls: int | None


def search_of(name: str, *flags: str, gpus: int | None = None) -> Search:
    """A search that has not begun."""
    number, device, vocab_size = CASES[name]
    argv = ["--config", str(ROOT / f"configs/{name}.toml"), "--vocab-size", str(vocab_size), *flags]
    config = read_config(argv, unasked=UNASKED, settle_layout=without_layout).config
    return Search(config, Workload.of(config, vocab_size), find_device(device), gpus or number)


@cache
def searched(name: str, folder: Path) -> Searched:
    """The search of a case; in this folder workers leave what they have found."""
    path = folder / f"search_{name}.pickle"
    if not path.exists():
        search, profile = search_of(name), cProfile.Profile()
        result = profile.runcall(run, search) if name in COUNTED else run(search)
        calls = sum(each.callcount for each in profile.getstats()) if name in COUNTED else None
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(pickle.dumps(Searched(result, calls)))
        unfinished.replace(path)
    found: Searched = pickle.loads(path.read_bytes())
    return found
