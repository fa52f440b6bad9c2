"""Tests of decontamination: documents that share words with a benchmark are left out, in every number of tasks."""

import json
import random
from pathlib import Path

import pytest
from test_duplicates import argv_of, failing, pair_of, run_phases, texts_in

from megatronish.commands.preprocess_tasks import main
from megatronish.core.errors import UserError
from megatronish.data.cleaning import Decontamination
from megatronish.data.phases import DuplicateSearch
from megatronish.data.tasks import read_plan, record_of

QUESTION = "Natalia sold clips to 48 of her friends in April, and then she sold half as many in May."
SHORT = "How many clips did she sell?"


def written(folder: Path) -> None:
    """A benchmark of two files, and documents that share 13 words with it, or 12, or are none of it."""
    (folder / "in").mkdir()
    record = {"question": [QUESTION, {"hint": SHORT}], "answer": 72, "id": None}
    (folder / "gsm.jsonl").write_text(json.dumps(record) + "\n\n")
    answer = {"text": " ".join(f"answer{number}" for number in range(20))}
    (folder / "other.json").write_text(json.dumps([answer, record]))
    words = QUESTION.split()
    texts = [
        "Before. " + " ".join(words[2:15]).upper().replace(",", " -") + "! After.",
        "Before " + " ".join(words[2:14]) + " after",
        "And " + answer["text"],
        SHORT,
        "",
        "nothing of it",
        "And   " + answer["text"],
    ]
    (folder / "in" / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))


def flags_of(tmp_path: Path) -> list[str]:
    return ["--decontaminate", str(tmp_path / "gsm.jsonl"), "--decontaminate", str(tmp_path / "other.json")]


@pytest.mark.parametrize("deduplicate", ["none", "exact"])
def test_documents_of_a_benchmark_are_left_out_and_named_in_any_number_of_tasks(
    tmp_path: Path, deduplicate: str, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path)
    argv = argv_of(tmp_path, *flags_of(tmp_path), "--deduplicate", deduplicate)
    assert main([*argv, "--output-prefix", str(tmp_path / "one")]) == 0
    told = capsys.readouterr().err
    assert (
        "decontamination: runs of 13 words of 5 texts are looked for, of which 2 are shorter and not looked for" in told
    )
    assert f"1 documents were left out by --decontaminate {tmp_path}/gsm.jsonl\n" in told
    assert f"2 documents were left out by --decontaminate {tmp_path}/other.json\n" in told
    kept = texts_in(tmp_path / "one")
    assert [text.split()[:1] for text in kept] == [["Before"], ["How"], [], ["nothing"]]
    for num_tasks in (1, 3, 7):
        prefix = tmp_path / f"p{num_tasks}"
        assert main(["plan", *argv, "--output-prefix", str(prefix), "--tasks", str(num_tasks)]) == 0
        assert "decontamination: runs of 13 words" in capsys.readouterr().err
        if deduplicate == "exact":
            run_phases(prefix, random.Random(num_tasks))
        else:
            assert main(["run", "--plan", f"{prefix}.plan.json", "--task", "0::1"]) == 0
            assert main(["merge", "--plan", f"{prefix}.plan.json", "--show-removed"]) == 0
        shown = "a.jsonl:1: ... clips to 48 of her friends in april and then she sold half ..."
        assert shown in capsys.readouterr().err
        assert pair_of(prefix) == pair_of(tmp_path / "one")


@pytest.mark.processes
def test_workers_leave_out_the_same_documents(tmp_path: Path) -> None:
    written(tmp_path)
    argv = argv_of(tmp_path, *flags_of(tmp_path))
    for workers in ("1", "2"):
        assert main([*argv, "--output-prefix", f"{tmp_path}/w{workers}", "--workers", workers]) == 0
    assert pair_of(tmp_path / "w1") == pair_of(tmp_path / "w2")


def test_shared_runs_are_those_that_are_in_both_texts(tmp_path: Path) -> None:
    draw = random.Random(2)
    references = [draw.choices("abcd", k=draw.randrange(12)) for _ in range(30)]
    for number in range(2):
        lines = [json.dumps({"t": " ".join(words)}) for words in references[number::2]]
        (tmp_path / f"{number}.jsonl").write_text("\n".join(lines))
    paths = tuple(f"{tmp_path}/{number}.jsonl" for number in range(2))
    opened = Decontamination(paths, 5).references()
    assert (opened.num_texts, opened.num_short) == (30, sum(len(words) < 5 for words in references))
    runs = [
        {tuple(words[start : start + 5]) for words in references[number::2] for start in range(len(words) - 4)}
        for number in range(2)
    ]
    outcomes = set[int | None]()
    for _ in range(300):
        words = draw.choices("abcd", k=draw.randrange(10))
        of_document = [tuple(words[start : start + 5]) for start in range(len(words) - 4)]
        first = next((run for run in of_document if run in runs[0] | runs[1]), None)
        shared = opened.shared(["", " ".join(words)])
        assert (shared and tuple(shared.words.split())) == first
        number = None if first is None else int(first not in runs[0])
        assert (shared and shared.path) == (None if number is None else paths[number])
        outcomes.add(number)
    assert outcomes == {None, 0, 1}


def test_references_may_be_a_table(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="needs pyarrow, of the extra parquet")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(
        arrow.table({"id": [1], "question": [QUESTION], "choices": [["a", SHORT]]}), tmp_path / "x.parquet"
    )
    opened = Decontamination((f"{tmp_path}/x.parquet",)).references()
    assert (opened.num_texts, opened.num_short) == (3, 2)
    assert opened.shared([QUESTION]) is not None


def test_references_that_cannot_be_read_or_have_changed_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path)
    argv = [*argv_of(tmp_path), "--output-prefix", str(tmp_path / "p")]
    missing = ["--decontaminate", str(tmp_path / "missing.jsonl")]
    sentence = (
        f"error: --decontaminate {tmp_path}/missing.jsonl cannot be read: No such file or directory; check the path"
    )
    assert sentence in failing([*argv, *missing], capsys)
    assert sentence in failing(["plan", *argv, "--tasks", "1", *missing], capsys)
    on_store = ["--decontaminate", "memory://missing.jsonl"]
    for told in (failing([*argv, *on_store], capsys), failing(["plan", *argv, "--tasks", "1", *on_store], capsys)):
        assert "error: --decontaminate memory://missing.jsonl cannot be read: there is no such object; check" in told
    (tmp_path / "broken.jsonl").write_text('{"a": "b"}\n["a"]\n')
    told = failing([*argv, "--decontaminate", str(tmp_path / "broken.jsonl")], capsys)
    assert f"--decontaminate {tmp_path}/broken.jsonl:2: a line must be a JSON object, not list; write a JSON" in told
    assert main(["plan", *argv, "--tasks", "2", *flags_of(tmp_path)]) == 0
    plan = ["--plan", str(tmp_path / "p.plan.json")]
    assert main(["run", *plan, "--task", "0"]) == 0
    (tmp_path / "other.json").write_text("[]")
    told = failing(["run", *plan, "--task", "1"], capsys)
    assert f"error: input {tmp_path}/other.json was changed since {tmp_path}/p.plan.json was made (" in told
    assert main(["plan", *argv, "--tasks", "2", *flags_of(tmp_path)]) == 0
    assert record_of(read_plan(tmp_path / "p.plan.json"), 0) is None, "another benchmark leaves other documents out"
    for text, missing in (("[]", [0, 1]), ('[{"a": "b"}]', [0, 1])):  # also before anything is tokenized
        (tmp_path / "other.json").write_text(text)
        assert main(["plan", *argv, "--tasks", "2", "--deduplicate", "exact", *flags_of(tmp_path)]) == 0
        assert DuplicateSearch(read_plan(tmp_path / "p.plan.json")).missing("sign") == missing
        assert main(["sign", *plan, "--task", "0::1"]) == 0
    content = json.loads((tmp_path / "p.plan.json").read_text())
    del content["references"]
    (tmp_path / "p.plan.json").write_text(json.dumps(content))
    assert "is not a plan (its references are not the files of its rules)" in failing(["run", *plan], capsys)


@pytest.mark.parametrize("ngram", [0, 101])
def test_a_run_without_words_makes_no_sense(ngram: int) -> None:
    with pytest.raises(
        UserError, match=rf"--decontaminate-ngram {ngram} must be at least 1 and at most 100; for exampl"
    ):
        Decontamination.of({"decontaminate_ngram": ngram})


def test_a_run_is_of_no_use_without_files() -> None:
    with pytest.raises(UserError, match="--decontaminate-ngram 8 says nothing without --decontaminate; name its files"):
        Decontamination.of({"decontaminate_ngram": 8})
