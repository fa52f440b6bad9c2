"""Tests of --num-epochs: passes over texts, chats and pairs become steps, in every layout, and over resumes."""

from math import ceil
from pathlib import Path

import pytest
from chat_models import write_chat_model
from chat_tokenizers import said, write_lines
from jobs import steps_of, tiny, train_on_ranks, write_tokens
from ranks import RankError

from megatronish.data.sample import DatasetSettings, DatasetSource, samples_of_epochs
from megatronish.data.samples import GPTSamples, open_gpt_samples
from megatronish.optim.schedules import BatchSizeSchedule

TEXT = "--tokenizer-type null --split 1,0,0 --attention-dropout 0 --hidden-dropout 0 --log-interval 1"


def epochs(run_dir: Path, flags: str, *, data: str) -> list[str]:
    """A tiny run whose length is given in epochs alone."""
    words = tiny(run_dir, flags, data=data)
    at = words.index("--train-iters")
    return words[:at] + words[at + 2 :]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("text") / "text")


def samples(prefix: Path) -> GPTSamples:
    settings = DatasetSettings(seq_length=16, seed=1234, vocab_size=101, eod=100)
    return open_gpt_samples(DatasetSource("training", str(prefix)), settings)


def test_epochs_of_text_are_steps_of_which_the_last_is_filled_up_in_every_layout(text: Path, tmp_path: Path) -> None:
    count = samples(text).num_samples
    total, batch = ceil(0.25 * count), 8
    steps = ceil(total / batch)
    assert total % batch
    flags = f"--num-epochs 0.25 --global-batch-size {batch} --micro-batch-size 4"
    flags += " --lr-decay-style cosine --lr-warmup-fraction 0.2"
    runs = {}
    for name, layout, ranks in (("1", "", 1), ("dp", "--dp 2", 2), ("tp", "--tp 2 --sequence-parallel", 2)):
        said_by = train_on_ranks(
            epochs(tmp_path / name, f"{flags} {layout}", data=f"{TEXT} --data-path {text}"), world_size=ranks
        )
        line = (
            f"num_epochs=0.25 of {count:,} samples: {total:,} samples in {steps:,} steps, the last one filled up with"
        )
        assert f"{line} {steps * batch - total} of the next epoch" in said_by
        runs[name] = steps_of(tmp_path / name)
    assert list(runs["1"]) == list(range(1, steps + 1))
    for name in ("dp", "tp"):
        assert [seen.loss for seen in runs[name].values()] == pytest.approx(
            [seen.loss for seen in runs["1"].values()], rel=1e-5
        )


def test_a_resumed_run_keeps_its_epochs(text: Path, tmp_path: Path) -> None:
    count = samples(text).num_samples
    flags = "--num-epochs 0.2 --global-batch-size 4 --micro-batch-size 2 --save-interval 2"
    data = f"{TEXT} --data-path {text}"
    whole = train_on_ranks(epochs(tmp_path / "whole", flags, data=data))
    steps = ceil(ceil(0.2 * count) / 4)
    assert f"in {steps} steps" in whole
    train_on_ranks(epochs(tmp_path / "parts", f"{flags} --exit-interval 2", data=data))
    assert max(steps_of(tmp_path / "parts")) == 2
    assert "num_epochs = 0.2" in (tmp_path / "parts" / "config.toml").read_text()
    assert "train_samples" not in (tmp_path / "parts" / "config.toml").read_text()
    again = train_on_ranks(epochs(tmp_path / "parts", flags, data=data))
    assert "changed since: training.exit_interval" in again and "train_samples" not in again
    assert steps_of(tmp_path / "parts") == steps_of(tmp_path / "whole")
    finished = train_on_ranks(epochs(tmp_path / "parts", flags, data=data))
    assert f"finished already: {steps} steps of {steps} are done" in finished
    longer = train_on_ranks(epochs(tmp_path / "parts", flags.replace("0.2", "0.3"), data=data))
    assert "training.num_epochs 0.2 -> 0.3" in longer and max(steps_of(tmp_path / "parts")) > steps


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chats")
    write_chat_model(folder / "model")
    write_lines(folder / "chats.jsonl", [said("a" * (1 + number), "b" * (number % 9 + 1)) for number in range(21)])
    pairs = [{"prompt": "a" * (number + 1), "chosen": "yes", "rejected": "no"} for number in range(10)]
    write_lines(folder / "pairs.jsonl", pairs)
    return folder


@pytest.mark.parametrize(
    ("flags", "file", "ranks"),
    [
        ("--dp 2", "chats", 2),
        ("--no-pack-samples", "chats", 1),
        ("--objective dpo --adapter-type lora --lora-rank 2 --pp 2", "pairs", 2),
    ],
)
def test_epochs_of_chats_and_pairs_count_their_packed_rows(
    flags: str, file: str, ranks: int, chats: Path, tmp_path: Path
) -> None:
    words = f"--dataset-type chat --split 1,0,0 --data-path {chats / file}.jsonl --load-hf {chats / 'model'}"
    more = (
        f"--num-epochs 2 --global-batch-size 2 --micro-batch-size 1 --seq-length 128 --lr 1e-3 --eval-iters 0 {flags}"
    )
    run = ["--run-dir", str(tmp_path / "run"), "--device", "cpu", *words.split(), *more.split()]
    output = train_on_ranks(run, world_size=ranks)
    (line,) = (each for each in output.splitlines() if each.startswith("num_epochs=2 of "))
    rows = int(line.partition(" samples in")[0].rpartition(" ")[2])
    assert max(steps_of(tmp_path / "run")) == ceil(rows / 2)
    if "--no-pack-samples" in flags:
        assert rows == 2 * 21


def test_packed_rows_of_epochs_are_counted_one_by_one(chats: Path) -> None:
    class Packed:
        name, identity, num_samples = "training", "", 5

        def sample(self, _index: int) -> None: ...

        def samples_until(self, num_epochs: float) -> int:
            return int(100 * num_epochs)

    assert samples_of_epochs(Packed(), 1.5) == 150


def test_epochs_of_made_up_data_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="num_epochs=2 counts passes over the data, and the training data have no end"):
        train_on_ranks(epochs(tmp_path / "run", "--num-epochs 2", data="--mock-data"))


@pytest.mark.parametrize("ramp", [None, (2, 2, 12)])
def test_the_fewest_steps_that_reach_a_number_of_samples(ramp: tuple[int, int, int] | None) -> None:
    sizes = BatchSizeSchedule.of(ramp, global_batch_size=8)
    for samples in range(1, 60):
        steps = sizes.num_steps_to(0, samples)
        assert sizes.consumed_samples(steps) >= samples > sizes.consumed_samples(steps - 1)
        for done in range(steps):
            assert done + sizes.num_steps_to(sizes.consumed_samples(done), samples) == steps
    assert sizes.num_steps_to(64, 60) == 0
