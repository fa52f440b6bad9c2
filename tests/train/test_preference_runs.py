"""Runs that learn from preferences: what they print, log, store and refuse, and their continuation in other layouts."""

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from chat_tokenizers import said, write_lines
from jobs import call_main, steps_of, tiny, train_on_ranks
from preference_runs import answered, asked, write_preferences
from sweeps import some_of
from test_bad_input import assert_told

from megatronish.report.plot import read_lines

LORA = "--adapter-type lora --lora-rank 2"
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = write_preferences(tmp_path_factory.mktemp("preferences"))
    write_lines(found / "chats.jsonl", [said("question", "answer")] * 8)
    return found


def data(folder: Path, name: str, more: str = "") -> str:
    return (
        f"--data-path {folder / name}.jsonl --dataset-type chat --split 1 --tokenizer-model {folder / 'tokenizer'} "
        f"--vocab-size 264 --seq-length 128 {NO_DROPOUT} --position-embedding-type rope {more}"
    )


@pytest.fixture(scope="module")
def base(folder: Path) -> Path:
    train_on_ranks(tiny(folder / "base", "--train-iters 2", data=data(folder, "chats")))
    return folder / "base"


def preferred(run: Path, folder: Path, base: Path, more: str, *, name: str = "pairs", world_size: int = 1) -> str:
    flags = f"--finetune --load {base} --train-iters 4 {more}"
    return train_on_ranks(tiny(run, flags, data=data(folder, name)), world_size=world_size)


def test_the_first_loss_is_that_of_no_difference_and_rewards_are_logged(
    folder: Path, base: Path, tmp_path: Path
) -> None:
    output = preferred(tmp_path / "run", folder, base, f"--objective dpo {LORA}")
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert lines[0]["loss"] == pytest.approx(0.693147, rel=1e-5)  # log 2: adapters begin with no change
    assert lines[0]["rewards/margins"] == pytest.approx(0.0, abs=1e-5)
    assert lines[3]["loss"] < lines[0]["loss"] and lines[3]["rewards/margins"] > 0
    assert {"rewards/accuracies", "rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected"} <= set(
        lines[3]
    )
    assert lines[0]["logps/chosen"] < 0
    assert "pairs: 12 lines, format pairs, chat template of " in output
    assert "  pairs            12\n" in output and "rewards/margins: " in output
    assert "sample 1 of pairs.jsonl, chosen" in output and "sample 2 of pairs.jsonl, rejected" in output


@pytest.mark.parametrize("kind", some_of(["stored", "model"], ["stored"]))
def test_the_reference_is_the_step_that_the_run_starts_from(folder: Path, tmp_path: Path, kind: str) -> None:
    train_on_ranks(tiny(tmp_path / "base", "--train-iters 2 --save-interval 1 --lr 0.1", data=data(folder, "chats")))
    preferred(
        tmp_path / "run", folder, tmp_path / "base", f"--objective dpo --reference {kind} --ckpt-step 1 --train-iters 1"
    )
    assert read_lines(tmp_path / "run" / "metrics.jsonl")[0]["loss"] == pytest.approx(0.693147, rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "objective"),
    some_of(product(("stored", "model"), ("dpo", "kto")), [("stored", "kto")]),
)
def test_all_references_give_the_same_numbers_in_any_layout(
    folder: Path, base: Path, tmp_path: Path, kind: str, objective: str
) -> None:
    name = "labelled" if objective == "kto" else "pairs"
    flags = f"--objective {objective} {LORA} --optimizer sgd --lr 0.01"  # Adam would multiply rounding
    preferred(tmp_path / "off", folder, base, flags, name=name)
    cache = f"--data-cache-path {tmp_path / 'cache'}"
    more = f"{flags} --reference {kind} --dp 2 --pp 2 {cache}"
    preferred(tmp_path / "run", folder, base, more, name=name, world_size=4)
    assert len(list((tmp_path / "cache").glob("*.reference.npy"))) == (kind == "stored")
    for step, expected in steps_of(tmp_path / "off").items():
        assert steps_of(tmp_path / "run")[step] == pytest.approx(expected, rel=1e-5), step


@pytest.mark.parametrize("kind", some_of(["stored", "model"], ["model"]))
def test_a_run_of_all_weights_resumes_with_the_reference_it_began_with(
    folder: Path, base: Path, tmp_path: Path, kind: str
) -> None:
    flags = f"--objective dpo --reference {kind} --optimizer sgd --lr 0.01"
    preferred(tmp_path / "whole", folder, base, flags)
    preferred(tmp_path / "parted", folder, base, f"{flags} --exit-interval 2")
    output = preferred(tmp_path / "parted", folder, base, f"{flags} --tp 2", world_size=2)
    assert "continuing from" in output
    for step, expected in steps_of(tmp_path / "whole").items():
        assert steps_of(tmp_path / "parted")[step] == pytest.approx(expected, rel=1e-5), step
    other = folder / "other"
    if not other.exists():
        train_on_ranks(tiny(other, "--train-iters 3", data=data(folder, "chats")))
    seen = call_main(
        tiny(tmp_path / "parted", f"--finetune --load {other} {flags} --train-iters 6", data=data(folder, "pairs"))
    )
    assert_told(seen, "is compared with", str(base), "name that model with --load-hf or --load")


def test_numbers_that_are_stored_in_part_are_completed(folder: Path, base: Path, tmp_path: Path) -> None:
    flags = f"--objective dpo {LORA} --reference stored --data-cache-path {tmp_path / 'cache'}"
    preferred(tmp_path / "one", folder, base, flags)
    (path,) = (tmp_path / "cache").glob("*.reference.npy")
    whole = np.load(path)
    np.save(path, np.where(np.arange(12)[:, None] < 5, whole, np.nan).astype(np.float32))
    output = preferred(tmp_path / "two", folder, base, flags)
    assert "5 of 12 pairs are stored" in output
    assert np.load(path) == pytest.approx(whole, rel=1e-6)
    assert "pairs are stored" not in preferred(tmp_path / "three", folder, base, flags)


def test_validation_is_measured_on_pairs(folder: Path, base: Path, tmp_path: Path) -> None:
    flags = (
        f"--objective dpo {LORA} --split 70,30,0 --eval-iters 1 --eval-interval 2 --finetune --load {base} "
        "--train-iters 2 --optimizer sgd"
    )
    lines = []
    for run, more, ranks in (("one", "", 1), ("two", "--dp 2 --pp 2", 4)):
        given = data(folder, "pairs", more).replace("--split 1 ", "")
        output = train_on_ranks(tiny(tmp_path / run, flags, data=given), world_size=ranks)
        assert "rewards/accuracies: " in next(
            line for line in output.splitlines() if " valid" in line and "PPL" in line
        )
        lines.append(read_lines(tmp_path / run / "evaluations.jsonl")[0])
    one, two = ({name: each for name, each in line.items() if name != "name"} for line in lines)
    assert {"rewards/accuracies", "rewards/margins", "rewards/chosen", "logps/rejected"} <= one.keys()
    assert one["rewards/margins"] == pytest.approx(one["rewards/chosen"] - one["rewards/rejected"], abs=1e-6)
    assert one["loss"] > 0 and two == pytest.approx(one, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "flags", "words"),
    [
        ("pairs", "--objective causal_lm", ("has pairs of chosen and rejected", "objective=causal_lm", "dpo, ipo")),
        ("chats", f"--objective dpo {LORA}", ("has texts or chats", "objective=dpo learns from pairs")),
        ("pairs", f"--objective kto {LORA}", ("has pairs of chosen and rejected", "add --chat-format labelled")),
        ("labelled", "--objective orpo", ("has completions with a label", "--objective kto")),
        ("pairs", "--objective simpo --reference model", ("reference=model is not read by objective=simpo",)),
        ("pairs", f"--objective dpo {LORA} --beta 0", ("beta=0.0 must be greater than 0",)),
        ("pairs", f"--objective dpo {LORA} --dpo-beta -1", ("beta=-1.0 must be greater than 0",)),
        ("pairs", "--objective dpo --reference adapters-off", ("reference=adapters-off is for a run with adapters",)),
        ("pairs", f"--objective dpo {LORA} --seq-length 8", ("which has to hold both completions of a pair",)),
        ("pairs", f"--objective dpo {LORA} --simpo-gamma 1", ("simpo_gamma=1.0 is not read", "--objective simpo")),
        (
            "pairs",
            f"--objective dpo {LORA} --label-smoothing 0.5",
            ("label_smoothing=0.5 must be at least 0 and less",),
        ),
        (
            "pairs",
            f"--objective dpo {LORA} --dpo-loss-type hinge --label-smoothing 0.1",
            ("is not read by dpo_loss_type=hinge",),
        ),
        ("pairs", "--objective orpo --train-on all", ("train_on=all is not read by objective=orpo",)),
        (
            "pairs",
            "--objective orpo --dataset-type pretrain",
            ("learns from pairs of completions", "--dataset-type chat"),
        ),
    ],
)
def test_what_a_user_does_wrong_is_one_sentence(
    folder: Path, base: Path, tmp_path: Path, name: str, flags: str, words: tuple[str, ...]
) -> None:
    given = data(folder, name)
    for flag in ("--seq-length 128 ", "--dataset-type chat "):
        if flag.split()[0] in flags:
            given = given.replace(flag, "")
    assert_told(call_main(tiny(tmp_path / "run", f"--finetune --load {base} {flags}", data=given)), *words)


def test_a_reference_needs_a_model_to_start_from(folder: Path, tmp_path: Path) -> None:
    seen = call_main(tiny(tmp_path / "run", "--objective dpo", data=data(folder, "pairs")))
    assert_told(seen, "objective=dpo compares with the model that the run starts from", "--load-hf")


@pytest.mark.parametrize(
    ("objective", "record", "words"),
    [
        ("orpo", {"prompt": "a", "chosen": "b"}, "rejected is missing or empty"),
        ("orpo", {"prompt": "a", "rejected": "b"}, "chosen is missing or empty"),
        ("orpo", {"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are the same"),
        ("orpo", {"chosen": "ab", "rejected": "abc"}, "give a prompt"),
        ("orpo", {"prompt": "a", "chosen": "b", "rejected": answered("c")}, "must both be texts"),
        (
            "orpo",
            {"prompt": asked("a"), "chosen": asked("b"), "rejected": answered("c")},
            "no message is the assistant",
        ),
        ("kto", {"prompt": "a", "completion": "b", "label": "yes"}, "label='yes' must be true or false"),
        ("kto", {"prompt": "a", "completion": "b", "label": True}, "the only record of its file"),
    ],
)
def test_a_bad_line_is_named_with_its_file_and_number(
    folder: Path, base: Path, tmp_path: Path, objective: str, record: dict[str, object], words: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(record) + "\n")
    given = data(folder, "pairs").replace(str(folder / "pairs.jsonl"), str(path))
    flags = f"--finetune --load {base} --objective {objective} {LORA if objective == 'kto' else ''}"
    assert_told(call_main(tiny(tmp_path / "run", flags, data=given)), f"{path}:1:", words)


def test_pairs_of_texts_without_a_chat_template_are_told_in_the_first_lines(folder: Path, tmp_path: Path) -> None:
    texts = [{"prompt": "How are you?", "chosen": " Well.", "rejected": " Ill."}] * 12
    told = "are texts, so no chat template is around them"
    for data, count in ((write_lines(tmp_path / "texts.jsonl", texts), 1), (folder / "pairs.jsonl", 0)):
        flags = (
            f"--objective orpo --dataset-type chat --seq-length 64 --vocab-size 300 --train-iters 1 --data-path {data}"
        )
        flags += f" --tokenizer-model {folder / 'tokenizer'} --split 1,0,0"
        output = train_on_ranks(tiny(tmp_path / data.stem, flags, data=""))
        assert output.count(told) == count
