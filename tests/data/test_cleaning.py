"""Tests of cleaning: what is left out and why, which no number of tasks or workers changes."""

import json
from pathlib import Path

import pytest

from megatronish.commands.preprocess_tasks import main
from megatronish.core.errors import UserError
from megatronish.data.cleaning import Cleaning
from megatronish.data.conditions import Condition
from megatronish.data.indexed import IndexedTokens, bin_path, idx_path
from megatronish.data.tasks import read_plan, record_of

RULES = ["--filter", "lang == en", "meta.score >= 0.5", "--min-characters", "7", "--max-tokens", "30"]


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("lang == en", True),
        ('lang == "en"', True),
        ("lang != en", False),
        ("lang != 3", True),
        ("meta.score >= 0.5", True),
        ("meta.score>=1", False),
        ("meta.score < many", False),
        ("count == 3.0", True),
        ("count == true", False),
        ("fine == true", True),
        ("fine == 1", False),
        ("nothing == null", True),
        ("nothing < null", False),
        ("missing != 1", False),
        ("lang < eo", True),
    ],
)
def test_a_condition_compares_a_field(text: str, holds: bool) -> None:
    record = {"lang": "en", "meta": {"score": 0.7}, "count": 3, "fine": True, "nothing": None}
    assert Condition.of(text).holds(record) is holds


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"filter": ["lang"]},
            "--filter 'lang' must be a key, one of == != <= >= < > and a value; for example 'lang == e",
        ),
        ({"filter": ["lang == [1]"]}, "must compare with a number, a text, true, false or null"),
        ({"filter": ["__import__('os') == 1 or"]}, None),
        ({"min_characters": 5, "max_characters": 4}, "--min-characters 5 and --max-characters 4 must be at least 0"),
        ({"min_tokens": -1}, "--min-tokens -1 and --max-tokens None must be at least 0"),
        ({"keep_fraction": 0.0}, "--keep-fraction 0.0 must be more than 0 and at most 1; for example 0.1"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(settings: dict[str, object], told: str | None) -> None:
    if told is None:  # a key like any other: nothing is run
        assert Cleaning.of(settings).reason({}, ["text"]) is not None
        return
    with pytest.raises(UserError) as caught:
        Cleaning.of(settings)
    assert told in str(caught.value)


def written(path: Path, count: int = 400) -> None:
    lines = []
    for number in range(count):
        record = {
            "text": "x" * (number % 40),
            "lang": ["en", "de"][number % 7 == 0],
            "meta": {"score": number % 10 / 9},
        }
        lines.append("{" if number % 50 == 0 else json.dumps(record))
    path.write_text("\n".join(lines))


def test_the_result_is_the_same_for_any_number_of_tasks_and_each_rule_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path / "a.jsonl")
    written(tmp_path / "b.jsonl", 30)
    names, reports = [], []
    rules = ["--tokenizer-type", "bytes", "--append-eod", *RULES, "--keep-fraction", "0.5", "--sampling-seed", "3"]
    argv = ["--input", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"), *rules]
    assert main([*argv, "--output-prefix", str(tmp_path / "one")]) == 0
    capsys.readouterr()
    for num_tasks in (1, 3, 8):
        prefix = tmp_path / f"p{num_tasks}"
        assert main(["plan", *argv, "--output-prefix", str(prefix), "--tasks", str(num_tasks)]) == 0
        plan = ["--plan", f"{prefix}.plan.json"]
        assert main(["run", *plan, "--task", "0::1"]) == 0
        capsys.readouterr()
        assert main(["merge", *plan, "--show-removed"]) == 0
        reports.append(capsys.readouterr().err)
        names.append(f"{prefix}_text_document")
    for name in names:
        for path in (bin_path, idx_path):
            assert path(name).read_bytes() == path(f"{tmp_path}/one_text_document").read_bytes()
    assert reports[0] == reports[1] == reports[2]
    lines = reports[0].splitlines()
    counted = {line.partition(" by ")[2]: int(line.split()[0]) for line in lines if " were left out by " in line}
    reasons = ["--filter lang == en", "--filter meta.score >= 0.5", "--keep-fraction 0.5", "--max-tokens 30"]
    assert sorted(counted) == [*reasons, "--min-characters 7"]
    assert sum(line.startswith("    ") for line in lines) == sum(min(count, 10) for count in counted.values())
    assert f"    {tmp_path}/a.jsonl:8: " + "x" * 7 in lines
    pair, bad = IndexedTokens(names[0]), 8 + 1
    assert pair.num_documents + sum(counted.values()) + bad == 430
    assert all(8 <= len(pair.document(number)) <= 31 for number in range(pair.num_documents))


def test_equal_texts_stay_together_and_about_the_fraction_stays(tmp_path: Path) -> None:
    cleaning, other = (Cleaning.of({"keep_fraction": 0.3, "sampling_seed": seed}) for seed in (0, 1))
    kept = [cleaning.reason({}, [str(number)]) is None for number in range(4000)]
    assert sum(kept) == pytest.approx(1200, abs=120)
    assert kept == [cleaning.reason({"any": 1}, [str(number)]) is None for number in range(4000)]
    assert kept != [other.reason({}, [str(number)]) is None for number in range(4000)]


def test_columns_of_rules_are_read_from_parquet(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="needs pyarrow, of the extra parquet")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"text": ["one", "two", "six"], "lang": ["en", "de", "en"]})
    parquet.write_table(table, tmp_path / "x.parquet")
    argv = ["--input", str(tmp_path / "x.parquet"), "--tokenizer-type", "bytes", "--output-prefix", str(tmp_path / "p")]
    assert main(["plan", *argv, "--tasks", "1", "--filter", "lang == en"]) == 0
    assert main(["run", "--plan", str(tmp_path / "p.plan.json"), "--task", "0"]) == 0
    record = record_of(read_plan(tmp_path / "p.plan.json"), 0)
    assert record is not None
    assert (record.documents, record.removed) == (2, {"--filter lang == en": 1})
    assert record.removed_examples == {"--filter lang == en": [[str(tmp_path / "x.parquet"), 2, "two"]]}


def test_rules_that_leave_nothing_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path / "a.jsonl")
    argv = ["--input", str(tmp_path / "a.jsonl"), "--tokenizer-type", "bytes", "--output-prefix", str(tmp_path / "p")]
    assert main([*argv, "--filter", "lang == fr"]) == 2
    assert "cleaning leaves no document (392 documents were left out by --filter lang == fr)" in capsys.readouterr().err
