"""Tests of blends whose weights change: proportions, continuation, their place in a run, and errors."""

import signal
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from command_lines import problems, small
from jobs import run_job, steps_of, tiny, train_on_ranks, write_tokens
from planted_kills import kill_all_in_step

from megatronish.commands.configuration import read_config
from megatronish.config.sections.data import BlendPhase, DataConfig, parse_blend_schedule
from megatronish.data.blend import PERIOD, Blend, ScheduledBlend, blend_notes
from megatronish.data.datasets import build_datasets
from megatronish.data.indexed import IndexedWriter
from megatronish.data.loader import BatchShare
from megatronish.data.mock import MockSamples
from megatronish.train.setup import blend_phases

PHASES = (BlendPhase(0, (0.7, 0.3, 0)), BlendPhase(1000, (0.5, 0.25, 0.25)), BlendPhase(1010, (0, 0, 1)))


def members() -> list[MockSamples]:
    return [MockSamples(name=name, seq_length=4, seed=seed, vocab_size=9, eod=8) for seed, name in enumerate("abc")]


def scheduled(phases: tuple[BlendPhase, ...] = PHASES) -> ScheduledBlend:
    return ScheduledBlend(members(), phases, name="training")


def test_each_phase_has_its_proportions_and_each_data_set_continues_where_it_was() -> None:
    blend = scheduled()
    places = [blend.place(index) for index in range(1100)]
    chosen = [Counter(dataset for dataset, _ in places[a:b]) for a, b in ((0, 1000), (1000, 1010), (1010, 1100))]
    assert chosen[0] == {0: 700, 1: 300}
    assert chosen[1][0] == 5 and abs(chosen[1][1] - 2.5) < 1
    assert chosen[2] == {2: 90}
    for dataset in range(3):  # no sample twice, none left out
        numbers = [number for member, number in places if member == dataset]
        assert numbers == list(range(len(numbers)))
    for number in (0, 1, 999, 1000, 1001, 1010, 1100):
        assert blend.counts(number) == [sum(member == each for member, _ in places[:number]) for each in range(3)]


def test_a_phase_has_the_order_of_a_blend_of_its_weights() -> None:
    plain, blend = Blend(members(), (0.5, 0.25, 0.25), name="x"), scheduled()
    assert [blend.place(1000 + k)[0] for k in range(10)] == [plain.place(k)[0] for k in range(10)]


def test_a_phase_may_be_longer_than_the_period_of_its_order() -> None:
    start = 3 * PERIOD + 7
    blend = scheduled((BlendPhase(0, (0.7, 0.2, 0.1)), BlendPhase(start, (0, 1, 0))))
    before = sum(blend.place(index)[0] == 1 for index in range(3 * PERIOD, start)) + 3 * PERIOD // 5
    assert blend.place(start) == (1, before)


def test_identity_tells_schedules_apart_and_that_of_a_plain_blend_stays() -> None:
    others = [
        (BlendPhase(0, (0.7, 0.3, 0)),),
        (*PHASES[:2], BlendPhase(1011, (0, 0, 1))),
        (*PHASES[:2], BlendPhase(1010, (0, 1, 1))),
    ]
    assert len({scheduled().identity, *(scheduled(other).identity for other in others)}) == 4
    assert scheduled().identity == scheduled().identity
    assert blend_notes(scheduled()) == [
        "blend of the training data: from sample 0 0.7 0.3 0; from sample 1,000 0.5 0.25 0.25; from sample 1,010 0 0 1"
    ]


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_every_layout_and_every_resumed_run_sees_the_same_samples(dp_size: int) -> None:
    """Step k of any number of data ranks, from any start, holds the samples of step k of one rank."""
    blend = scheduled()
    for step in (249, 250, 251, 252, 253, 300):  # around the borders, at samples 1,000 and 1,010
        shares = [BatchShare(rank, dp_size, micro_batch_size=1) for rank in range(dp_size)]
        parts = [share.sample_ids(consumed_samples=4 * step, global_batch_size=4) for share in shares]
        numbers = sorted(index for part in parts for micro in part for index in micro)
        assert [blend.place(index) for index in numbers] == [blend.place(4 * step + k) for k in range(4)]


def test_data_sets_of_a_config_follow_the_schedule_in_training_alone(tmp_path: Path) -> None:
    for first, name in enumerate("ab"):
        with IndexedWriter(tmp_path / name, dtype=np.dtype("<u2")) as writer:
            for _ in range(40):
                writer.add_document([first] * 50)
    data = DataConfig(data_path=(str(tmp_path / "a"), str(tmp_path / "b")), split="80,20,0")
    phases = [BlendPhase(0, (1, 0)), BlendPhase(8, (0, 1))]
    datasets = build_datasets(data, seq_length=16, seed=1, vocab_size=10, eod=9, phases=phases)
    assert [int(datasets.train.sample(index).tokens[0]) for index in range(16)] == [0] * 8 + [1] * 8
    assert {int(datasets.valid["validation"].sample(index).tokens[0]) for index in range(8)} == {0, 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be STEP: WEIGHT WEIGHT"),
        ("0 0.5 0.5", "must be STEP: WEIGHT WEIGHT"),
        ("0: 0.5 -1", "none negative"),
        ("0: 0.5 nan", "none negative"),
        ("0: 0 0", "one must be positive"),
        ("0: 1e308 1e308", "their sum finite"),
        ("0: 1 1; 5: 1", "step 5 has 1 weights for 2 prefixes"),
        ("1: 1 1", "must begin with 0 and rise"),
        ("0: 1 1; 9: 1 1; 9: 1 2", "must begin with 0 and rise"),
    ],
)
def test_what_is_no_schedule_is_told(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_blend_schedule(text, num_prefixes=2)


def test_a_schedule_may_be_written_on_several_lines() -> None:
    lines = "\n0: 1 0;\n 10: 1 1;\n"
    assert parse_blend_schedule(lines, num_prefixes=2) == parse_blend_schedule("0: 1 0; 10: 1 1", num_prefixes=2)


def test_steps_become_samples_by_the_batch_sizes_of_the_run(tmp_path: Path) -> None:
    flags = "--blend-schedule|0: 1 0; 10: 1 1; 30: 0 1|--rampup-batch-size|4|4|80|--global-batch-size|8"
    words = [*flags.split("|"), "--data-path", *prefixes(tmp_path), *SHAPE.split()]
    assert [phase.start for phase in blend_phases(read_config(small(*words)).config)] == [0, 40, 80 + 10 * 8]


def prefixes(folder: Path) -> list[str]:
    names = [str(folder / name) for name in "ab"]
    for name in names:
        IndexedWriter(name, dtype=np.dtype("<u2")).finalize()
    return names


SHAPE = "--tokenizer-type bytes --micro-batch-size 1 --train-iters 50"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--mock-data", "blend_schedule changes from which prefix a sample comes, and mock_data reads no files; leave"),
        ("--data-path {0}", "blend_schedule='0: 1 1': step 0 has 2 weights for 1 prefixes"),
        ("--train-data-path 0.5 {0} 0.5 {1}", "blend_schedule has the weights of train_data_path already; leave"),
    ],
)
def test_a_schedule_that_does_not_fit_the_data_is_told(tmp_path: Path, flags: str, sentence: str) -> None:
    words = flags.format(*prefixes(tmp_path)).split()
    (problem,) = problems(small(*words, *SHAPE.split(), "--blend-schedule", "0: 1 1"))
    assert sentence in problem


def scheduled_run(folder: Path, name: str, flags: str = "", *, schedule: str = "0: 1 0; 3: 1 3; 5: 0 1") -> list[str]:
    """The command line of seven steps on two texts; borders are after steps 3 and 5, and checkpoints every two."""
    data = f"--tokenizer-type null --split 1,0,0 --data-path {folder / 'a'} {folder / 'b'}"
    argv = tiny(folder / name, f"--train-iters 7 --save-interval 2 {flags}", data=data)
    return [*argv, "--blend-schedule", schedule]


def test_a_run_killed_behind_a_border_resumes_before_it_in_another_layout(tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        write_tokens(tmp_path / name, seed=seed)
    train_on_ranks(scheduled_run(tmp_path, "whole"))
    killed = run_job(scheduled_run(tmp_path, "cut", "--dp 2 --tp 2"), tmp_path, plant=kill_all_in_step, plant_args=(4,))
    assert killed.status == -signal.SIGKILL
    assert "step_00000002" in train_on_ranks(scheduled_run(tmp_path, "cut", "--dp 2 --pp 2"), world_size=4)
    whole, cut = steps_of(tmp_path / "whole"), steps_of(tmp_path / "cut")
    assert cut.keys() == whole.keys() == set(range(1, 8))
    for step, seen in whole.items():
        assert cut[step] == pytest.approx(seen, rel=1e-5), step
    # The border is one: without it the steps behind it are others.
    train_on_ranks(scheduled_run(tmp_path, "plain", schedule="0: 1 0"))
    plain = steps_of(tmp_path / "plain")
    assert [plain[step] == whole[step] for step in range(1, 8)] == [True] * 3 + [False] * 4
