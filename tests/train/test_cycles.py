"""Tests of runs whose learning rate and momentum go through a cycle: layouts, resumes, what is logged."""

import json
from pathlib import Path

import pytest
from jobs import steps_of, tiny, train_on_ranks
from sweeps import some_of

from megatronish.commands.import_config import import_config
from megatronish.report.plot import read_lines

CYCLE = (
    "--lr-warmup-init 1e-3 --min-lr 1e-3 --lr-warmup-iters 3 --lr-decay-iters 6 --lr-tail-decay 0.5 "
    "--lr-warmup-stairs 3 --cycle-min-momentum 0.6 --cycle-max-momentum 0.9 --train-iters 8 --micro-batch-size 2"
)
RATES = [0.001, 0.004, 0.007, 0.01, 0.007, 0.004, 0.001, 0.001 / 1.5]
MOMENTA = [0.9, 0.8, 0.7, 0.6, 0.7, 0.8, 0.9, 0.9]


@pytest.mark.parametrize("optimizer", some_of(["adam", "sgd", "muon"], ["adam"]))
def test_a_cycle_trains_the_same_in_two_layouts_and_goes_on_in_the_middle(tmp_path: Path, optimizer: str) -> None:
    flags = f"{CYCLE} --optimizer {optimizer} --use-distributed-optimizer"
    printed = train_on_ranks(tiny(tmp_path / "alone", flags))
    lines = read_lines(tmp_path / "alone" / "metrics.jsonl")
    assert [line["learning_rate"] for line in lines] == pytest.approx(RATES, rel=1e-12)
    assert [line["momentum"] for line in lines] == pytest.approx(MOMENTA, rel=1e-12)
    assert "| momentum: 0.6000 |" in printed
    # The other layout stops in the middle of the cycle, and goes on in a third one.
    train_on_ranks(tiny(tmp_path / "cut", f"{flags} --dp 2 --tp 2 --exit-interval 4"), world_size=4)
    train_on_ranks(tiny(tmp_path / "cut", f"{flags} --pp 2"), world_size=2)
    again = read_lines(tmp_path / "cut" / "metrics.jsonl")
    assert [line["momentum"] for line in again] == [line["momentum"] for line in lines]
    alone, cut = steps_of(tmp_path / "alone"), steps_of(tmp_path / "cut")
    assert cut.keys() == alone.keys() == set(range(1, 9))
    for step, seen in alone.items():
        assert cut[step] == pytest.approx(seen, rel=1e-5), step


def test_a_momentum_changes_what_is_trained(tmp_path: Path) -> None:
    train_on_ranks(tiny(tmp_path / "cycled", CYCLE))
    train_on_ranks(tiny(tmp_path / "still", CYCLE.partition("--cycle-min")[0] + "--train-iters 8 --micro-batch-size 2"))
    cycled, still = (read_lines(tmp_path / name / "metrics.jsonl") for name in ("cycled", "still"))
    assert "momentum" not in still[0]
    assert [line["learning_rate"] for line in cycled] == [line["learning_rate"] for line in still]
    assert cycled[-1]["loss"] != pytest.approx(still[-1]["loss"], rel=1e-6)


def test_a_ds_config_with_a_one_cycle_trains(tmp_path: Path) -> None:
    halves = {"cycle_first_step_size": 2, "cycle_second_step_size": 3}
    scheduler = {"type": "OneCycle", "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, **halves}}
    adam = {"type": "Adam", "params": {"betas": [0.5, 0.5]}}
    (tmp_path / "ds.json").write_text(json.dumps({"optimizer": adam, "scheduler": scheduler}))
    (tmp_path / "mine.toml").write_text(import_config("deepspeed", tmp_path / "ds.json"))
    words = tiny(tmp_path / "run", f"--config {tmp_path / 'mine.toml'}")
    place = words.index("--lr")
    train_on_ranks([*words[:place], *words[place + 2 :]])
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["learning_rate"] for line in lines] == pytest.approx([1e-4, 5.5e-4, 1e-3, 7e-4, 4e-4, 1e-4])
    assert [line["momentum"] for line in lines] == pytest.approx([0.9, 0.85, 0.8, 0.9 - 0.2 / 3, 0.9 - 0.1 / 3, 0.9])
