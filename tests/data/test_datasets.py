"""Tests of the datasets of a config: splits, weighted blends, several validation sets, mock data, and errors."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from megatronish.config.sections.data import DataConfig, parse_blend
from megatronish.data.blend import PERIOD, Blend
from megatronish.data.datasets import DatasetSplits, build_datasets
from megatronish.data.indexed import IndexedWriter
from megatronish.data.mock import MockSamples

S = 16


def write(prefix: Path, *, first: int, documents: int = 40, length: int = 50) -> str:
    """Documents of one token each: first, first + 1, ... so that a token tells its document."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with IndexedWriter(prefix, dtype=np.dtype("<u2")) as writer:
        for token in range(first, first + documents):
            writer.add_document([token] * length)
    return str(prefix)


def build(**options: object) -> DatasetSplits:
    return build_datasets(DataConfig(**options), seq_length=S, seed=1, vocab_size=1000, eod=999)  # type: ignore[arg-type]


def tokens_of(dataset: object, count: int = 200) -> set[int]:
    return set(np.stack([dataset.sample(index).tokens for index in range(count)]).ravel().tolist())  # type: ignore[attr-defined]


def test_the_split_shares_out_documents(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", first=0)
    datasets = build(data_path=(prefix,), split="80,15,5")
    assert datasets.test is not None
    assert tokens_of(datasets.train) == set(range(32))
    assert tokens_of(datasets.valid["validation"]) == set(range(32, 38))
    assert tokens_of(datasets.test) == {38, 39}
    assert (tmp_path / "cache").is_dir()


def test_a_part_of_zero_is_no_data_set(tmp_path: Path) -> None:
    datasets = build(data_path=(write(tmp_path / "a", first=0),), split="1", data_cache_path=str(tmp_path / "kept"))
    assert (datasets.valid, datasets.test) == ({}, None)
    assert tokens_of(datasets.train) == set(range(40))
    assert (tmp_path / "kept").is_dir()
    assert not (tmp_path / "cache").exists()


def test_a_path_may_name_a_part_of_its_documents(tmp_path: Path) -> None:
    """40 documents: the first three quarters to train on, the rest is cut again by --split, or by its own part."""
    a, b = write(tmp_path / "a", first=0), write(tmp_path / "b", first=100)
    built = build(train_data_path=(f"{a}[0:0.75]",), valid_data_path=(f"{a}[0.75:1]", f"{b}[0:0.5]"))
    assert tokens_of(built.train) == set(range(30))
    assert tokens_of(built.valid["validation"]) == {*range(30, 40), *range(100, 120)}
    built = build(data_path=(f"{b}[0.5:1]",), split="50,50,0")
    assert tokens_of(built.train) == set(range(120, 130))
    assert tokens_of(built.valid["validation"]) == set(range(130, 140))
    several = build(train_data_path=(a,), valid_data_path=(f"{a}[0:0.5]", b), multiple_validation_sets=True)
    assert set(several.valid) == {"a", "b"}


@pytest.mark.parametrize("part", ["[0.5:0.5]", "[0:1.1]", "[-0.1:1]", "[x:1]", "[:0.5]", "[nan:1]"])
def test_a_part_that_is_empty_or_outside_is_told(part: str) -> None:
    with pytest.raises(ValueError, match=r"must have a part between 0 and 1, as in a\[0:0.9\]"):
        parse_blend([f"a{part}"])


def test_each_purpose_may_have_paths_of_its_own(tmp_path: Path) -> None:
    a, b, c = (write(tmp_path / name, first=100 * number) for number, name in enumerate("abc"))
    datasets = build(train_data_path=(a,), valid_data_path=(b,), test_data_path=(c,))
    assert datasets.test is not None
    assert tokens_of(datasets.train) == set(range(40))
    assert tokens_of(datasets.valid["validation"]) == set(range(100, 140))
    assert tokens_of(datasets.test) == set(range(200, 240))


def test_several_validation_sets_have_their_names(tmp_path: Path) -> None:
    train, one, two = (write(tmp_path / name, first=100 * number) for number, name in enumerate(("t", "one", "two")))
    twin = write(tmp_path / "other" / "two", first=300)
    paths = (one, two, twin)
    datasets = build(train_data_path=(train,), valid_data_path=paths, multiple_validation_sets=True)
    assert list(datasets.valid) == ["one", two, twin]
    assert tokens_of(datasets.valid[twin]) == set(range(300, 340))
    assert list(build(train_data_path=(train,), valid_data_path=paths).valid) == ["validation"]


def test_a_blend_follows_its_weights(tmp_path: Path) -> None:
    a, b, c = (write(tmp_path / name, first=100 * number) for number, name in enumerate("abc"))
    train = build(data_path=("0.3", a, "0.7", b, "0", c), split="1").train
    counts = Counter(int(train.sample(index).tokens[0]) // 100 for index in range(1000))
    assert counts == {0: 300, 1: 700}


def test_without_weights_each_file_counts_by_its_size(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", first=0, documents=10), write(tmp_path / "b", first=100, documents=30)
    train = build(data_path=(a, b), split="1").train
    counts = Counter(int(train.sample(index).tokens[0]) // 100 for index in range(1000))
    assert counts[1] == pytest.approx(750, abs=5)


def mock(name: str, *, seed: int = 1, vocab_size: int = 1000, eod: int = 999) -> MockSamples:
    return MockSamples(name=name, seq_length=256, seed=seed, vocab_size=vocab_size, eod=eod)


# Many small data sets beside few large ones are the worst that was found: 1.62 behind. The last three are random.
BLENDS: list[tuple[float, ...]] = [
    (1.0,),
    (0.5, 0.5),
    (0.25, 0.7, 0.05),
    (3, 1, 2),
    (1e-9, 1),
    (0.1,) * 9 + (0.01,),
    (0.49, 0.49, *(0.0005,) * 40),
    (45744, 34051, 10528, 5118, 3819, *(5,) * 148),
    *(tuple((np.random.default_rng(size).random(size) ** 4 + 1e-4).tolist()) for size in (3, 4, 20)),
]


@pytest.mark.long
@pytest.mark.parametrize("weights", BLENDS)
def test_a_blend_keeps_the_bounds_it_states(weights: tuple[float, ...]) -> None:
    """Ahead by at most 1 - 1/n, behind by at most 1/2 + ... + 1/n."""
    num = len(weights)
    blend = Blend([mock(str(number)) for number in range(num)], weights, name="blend")
    choices, numbers = np.array([blend.place(index) for index in range(PERIOD)]).T
    places, most_behind = np.arange(1, PERIOD + 1), sum(1 / number for number in range(2, num + 1))
    for dataset, weight in enumerate(weights):
        taken = np.cumsum(choices == dataset)
        assert taken[-1] / PERIOD == pytest.approx(weight / sum(weights), abs=1.01 / PERIOD)
        behind = taken[-1] * places - PERIOD * taken
        assert behind.min() >= PERIOD * (1 / num - 1)
        assert behind.max() <= PERIOD * most_behind + 1e-6
        assert numbers[choices == dataset].tolist() == list(range(taken[-1]))


def test_a_blend_repeats_its_order_with_the_samples_that_follow() -> None:
    blend = Blend([mock(name) for name in "abc"], (3, 1, 2), name="blend")
    for index in range(1000):
        dataset, number = blend.place(index)
        share = blend.place(PERIOD + index)[1] - number
        assert blend.place(PERIOD + index) == (dataset, number + share)
        assert share == pytest.approx(PERIOD * (3, 1, 2)[dataset] / 6, abs=1)


def test_a_share_too_small_for_a_blend_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    a, b = write(tmp_path / "a", first=0), write(tmp_path / "b", first=100)
    build(data_path=("1", a, "0.00002", b), split="1")
    assert not caplog.messages
    build(data_path=("1", a, "0.000001", b), split="1")
    assert caplog.messages == [
        f"{b} has 1e-06 of the weights of the training data, less than one sample in 100,000; it gives one in 100,000"
    ]


def test_a_blend_chooses_as_megatron_does() -> None:
    weights = (0.25, 0.7, 0.05)
    blend = Blend([mock(name) for name in "abc"], weights, name="blend")
    counts = [0, 0, 0]
    percent = [round(weight * 100) for weight in weights]
    for index in range(2000):
        behind = [part * (index + 1) - 100 * count for part, count in zip(percent, counts, strict=True)]
        choice = behind.index(max(behind))
        assert blend.place(index) == (choice, counts[choice])
        counts[choice] += 1


def test_a_place_far_into_a_blend_is_found_at_once() -> None:
    blend = Blend([mock("a"), mock("b")], (0.3, 0.7), name="blend")
    places = [blend.place(index) for index in range(10**12, 10**12 + 10)]
    assert [sum(dataset == which for dataset, _ in places) for which in (0, 1)] == [3, 7]
    assert {number // 10**11 for _, number in places} == {3, 7}


def test_mock_samples_are_a_function_of_seed_and_number() -> None:
    expected = mock("training").sample(7).tokens
    assert np.array_equal(expected, mock("training").sample(7).tokens)
    others = [mock("training").sample(8), mock("validation").sample(7), mock("training", seed=2).sample(7)]
    assert not any(np.array_equal(other.tokens, expected) for other in others)


@pytest.mark.parametrize(("vocab_size", "eod"), [(2, 1), (257, 256), (4096, 0), (50257, 50256)])
def test_mock_samples_stay_in_the_vocabulary_and_end_documents(vocab_size: int, eod: int) -> None:
    dataset = mock("training", vocab_size=vocab_size, eod=eod)
    tokens = np.concatenate([dataset.sample(index).tokens for index in range(50)])
    assert (tokens.dtype, tokens.min() >= 0, tokens.max() < vocab_size) == (np.int64, True, True)
    assert (tokens == eod).mean() == pytest.approx(1 / 64, rel=0.3)


def test_mock_samples_can_be_learned() -> None:
    sample = np.stack([mock("training").sample(index).tokens for index in range(50)])
    steps = np.diff(sample, axis=1)
    assert np.mean(steps[:, 1:] == steps[:, :-1]) > 0.75


def test_mock_data_needs_no_file() -> None:
    datasets = build(mock_data=True)
    assert datasets.test is not None
    assert [datasets.train.num_samples, list(datasets.valid)] == [None, ["validation"]]
    assert datasets.train.sample(3).tokens.shape == (S + 1,)


def test_the_default_split_leaves_out_what_is_too_small(tmp_path: Path) -> None:
    datasets = build(data_path=(write(tmp_path / "a", first=0),))
    assert (list(datasets.valid), datasets.test) == (["validation"], None)
    small = write(tmp_path / "small", first=0, documents=1)
    datasets = build(data_path=(small,))
    assert (datasets.valid, datasets.test) == ({}, None)
    with pytest.raises(ValueError, match=r"the training data of .* is 10 tokens in 1 of its 1 documents"):
        build(data_path=(write(tmp_path / "smaller", first=0, documents=1, length=10),))


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", first=0)
    with pytest.raises(ValueError, match="give --data-path or --train-data-path, or use --mock-data"):
        build()
    with pytest.raises(ValueError, match=r"none\.idx does not exist"):
        build(data_path=(str(tmp_path / "none"),))
    with pytest.raises(ValueError, match="--split 0,1,0 leaves nothing to train on"):
        build(data_path=(prefix,), split="0,1,0")
    with pytest.raises(ValueError, match=r"the test data of .* is 0 tokens in 0 of its 40 documents"):
        build(data_path=(prefix,), split="970,29,1")
