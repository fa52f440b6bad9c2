"""Memory of random layouts: the expected peak against the dry run's, of one rank each.

`python -m benchmarks.random_dry_runs --number 100 --seed 1`; `--json FILE` writes a line for each. Layouts are those
that a search may find: small shapes of four families on 2 to 64 GPUs, with every recomputation, schedule and stage of
ZeRO, and what else a run may have.
"""

import argparse
import json
import random
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatronish.dry_run.fake_cuda import load_fake_cuda

library = load_fake_cuda()  # before torch is imported

from megatronish.config.config import Config  # noqa: E402
from megatronish.config.read import read_config  # noqa: E402
from megatronish.dry_run.rank import PlannedRun, run_rank  # noqa: E402
from megatronish.dry_run.run import with_expected  # noqa: E402
from megatronish.estimate.costs.candidate import UNASKED, complaints, config_of, without_layout  # noqa: E402
from megatronish.estimate.planner.devices import find_device  # noqa: E402
from megatronish.estimate.planner.search import Search  # noqa: E402
from megatronish.estimate.planner.workload import Workload  # noqa: E402

ROOT = Path(__file__).parents[1]
FAMILIES = {
    "gpt2-124m-1gpu": "--num-layers 8",
    "llama-1b-1gpu": "--num-layers 8",
    "llama-8b-8gpu": "--num-layers 8 --seq-length 2048",
    "qwen3-30b-a3b": "--num-layers 4 --seq-length 2048 --num-experts 16",
}
MORE = ("", "", "", "--optimizer muon", "--adapter-type lora --load x", "--adapter-type ia3 --load x")
GPUS = (2, 4, 8, 16, 32, 64)
VOCAB_SIZE = 32_000
MOST_SAMPLES = 4  # of a micro-batch


def random_configs(seed: int) -> Iterator[tuple[str, Config]]:
    """Configs of random layouts, with a text."""
    dice = random.Random(seed)
    while True:
        family, gpus, more = dice.choice(list(FAMILIES)), dice.choice(GPUS), dice.choice(MORE)
        batch = gpus * dice.choice((1, 2, 4, 8))
        argv = ["--config", str(ROOT / "configs" / f"{family}.toml"), "--mock-data", "--vocab-size", str(VOCAB_SIZE)]
        argv += [*FAMILIES[family].split(), *more.split(), "--global-batch-size", str(batch)]
        config = read_config(argv, unasked=UNASKED, settle_layout=without_layout).config
        search = Search(config, Workload.of(config, VOCAB_SIZE), find_device("h100-sxm"), gpus, zero3_in_pipelines=True)
        meshes = list(search.meshes())
        families = list(search.families(dice.choice(meshes))) if meshes else []
        found = [(each, zeros) for each, zeros in families if zeros and each.micro_batch <= MOST_SAMPLES]
        if not found:
            continue
        candidate, zeros = dice.choice(found)
        candidate = candidate._replace(zero=dice.choice(zeros))
        laid_out = config_of(config, candidate)
        if not complaints(laid_out):
            yield f"{family} {more} {candidate.mesh_text}, {candidate.choices_text}, batch {batch}", laid_out


def compared(name: str, config: Config, rank: int) -> dict[str, Any]:
    """Peak of a rank as expected and by the dry run, and the seconds that the latter took."""
    start, planned = time.monotonic(), PlannedRun(config, VOCAB_SIZE, "cuda")
    found = with_expected(planned, run_rank(planned, rank))
    peak, expected = found.record.peak, found.memory.total
    seconds = round(time.monotonic() - start, 1)
    off = round(peak / expected - 1, 4)
    return {"name": name, "rank": rank, "peak": peak, "expected": expected, "off": off, "seconds": seconds}


def main(argv: Sequence[str] | None = None) -> None:
    """Compare, and print how many are how near."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--number", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(argv)
    library.install_fake_cuda()
    dice, rows = random.Random(given.seed), list[dict[str, Any]]()
    for name, config in random_configs(given.seed):
        try:
            row = compared(name, config, dice.randrange(config.layout.world_size))
        except Exception:
            row = {"name": name, "error": traceback.format_exc()}
        rows.append(row)
        print(json.dumps(row), flush=True)
        if given.json is not None:
            given.json.write_text("".join(f"{json.dumps(each)}\n" for each in rows), encoding="utf-8")
        if len(rows) == given.number:
            break
    sizes = sorted(abs(row["off"]) for row in rows if "off" in row)
    near = {part: sum(size <= part for size in sizes) for part in (0.01, 0.05, 0.10)}
    print(f"{len(sizes)} of {len(rows)} ran; within 1 %: {near[0.01]}, 5 %: {near[0.05]}, 10 %: {near[0.10]}")


if __name__ == "__main__":
    main()
