"""Tests of weights: how often documents are written and where, which no number of tasks or workers changes."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from test_duplicates import argv_of, failing, pair_of, run_phases, texts_in

from megatronish.commands.preprocess_tasks import main
from megatronish.core.errors import UserError
from megatronish.data.cleaning import Cleaning
from megatronish.data.indexed import IndexedTokens
from megatronish.data.tasks import read_plan, record_of
from megatronish.data.token_files import TokenFiles
from megatronish.data.weights import SampleWeights

WEIGHTS = ["source=wiki:2.5", "source=ads:0", "source=3:1.0", "*/b.jsonl:0.4"]
SOURCES = ["wiki", "ads", "web", 3]


def written(folder: Path) -> None:
    """Two files of documents of four sources, with bad lines."""
    (folder / "in").mkdir()
    draw = random.Random(4)
    for name in ("a", "b"):
        lines = []
        for number in range(60):
            record = {"text": f"{name} {number} " * draw.randrange(4), "title": f"t{number}"}
            record |= {"source": draw.choice(SOURCES)} if draw.random() < 0.9 else {}
            lines += ["{"] * (number % 20 == 7) + [json.dumps(record)]
        (folder / "in" / f"{name}.jsonl").write_text("\n".join(lines))


@pytest.mark.parametrize(
    ("source", "path", "mean"),
    [
        ("wiki", "x/b.jsonl", 2.5),
        ("ads", "a", 0),
        (3, "a", 1),
        ("web", "x/b.jsonl", 0.4),
        ("web", "a", 1),
        (None, "a", 1),
    ],
)
def test_the_first_weight_that_fits_counts(source: object, path: str, mean: float) -> None:
    weights = SampleWeights.of({"sample_weights": WEIGHTS})
    record = {} if source is None else {"source": source}
    numbers = [weights.copies(record, path, [str(number)]).number for number in range(2000)]
    assert np.mean(numbers) == pytest.approx(mean, abs=0.05)
    assert set(numbers) <= {int(mean), int(mean) + (mean % 1 > 0)}
    assert numbers == [weights.copies(record, path, [str(number)]).number for number in range(2000)]
    other = SampleWeights.of({"sample_weights": WEIGHTS, "sampling_seed": 1})
    assert (numbers != [other.copies(record, path, [str(number)]).number for number in range(2000)]) == (mean % 1 > 0)


def test_a_weight_is_another_draw_than_the_fraction_that_is_kept() -> None:
    settings = {"sample_weights": ["*:0.5"], "keep_fraction": 0.5}
    cleaning = Cleaning.of(settings)
    kept = [[str(number)] for number in range(2000) if cleaning.reason({}, [str(number)]) is None]
    assert sum(cleaning.weights.copies({}, "a", texts).number for texts in kept) == pytest.approx(500, abs=70)


def test_copies_come_after_all_documents_in_any_number_of_tasks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path)
    argv = argv_of(tmp_path, *(word for weight in WEIGHTS for word in ("--sample-weights", weight)))
    assert main([*argv, "--output-prefix", str(tmp_path / "one")]) == 0
    told = capsys.readouterr().err
    assert not list(tmp_path.glob("one.*")), "no folder is left"
    weights = SampleWeights.of({"sample_weights": WEIGHTS})
    rounds, counts = [list[str]() for _ in range(3)], dict[str, list[int]]()
    for text, source, path in documents_in(tmp_path):
        number, rule = weights.copies({} if source is None else {"source": source}, path, [text])
        for of_round in rounds[:number]:
            of_round.append(text)
        left_out, added = counts.setdefault(rule, [0, 0])
        counts[rule] = [left_out + (number == 0), added + max(number - 1, 0)]
    assert texts_in(tmp_path / "one") == [text for of_round in rounds for text in of_round]
    for rule in ("source=wiki:2.5", "source=ads:0", "*/b.jsonl:0.4"):
        left_out, added = counts[f"--sample-weights {rule}"]
        assert left_out + added > 0
        assert (f"{left_out} documents were left out by --sample-weights {rule}\n" in told) == (left_out > 0)
        assert (f"{added} copies were added by --sample-weights {rule}\n" in told) == (added > 0)
    assert f"6 of {120 + 6} lines were bad" in told
    for num_tasks in (1, 3, 7):
        prefix = tmp_path / f"p{num_tasks}"
        assert main(["plan", *argv, "--output-prefix", str(prefix), "--tasks", str(num_tasks)]) == 0
        assert main(["run", "--plan", f"{prefix}.plan.json", "--task", "0::1"]) == 0
        capsys.readouterr()
        assert main(["merge", "--plan", f"{prefix}.plan.json", "--show-removed"]) == 0
        said = capsys.readouterr()
        assert pair_of(prefix) == pair_of(tmp_path / "one")
        of_one = [line for line in told.splitlines() if "by --sample" in line or "were bad" in line]
        assert [line for line in said.err.splitlines() if not line.startswith("    ")] == of_one
        assert said.err.count(f"    {tmp_path}/in/") >= 30
        assert main(["status", "--plan", f"{prefix}.plan.json", "--show-removed"]) == 0
        of_status = capsys.readouterr().out.splitlines()[1:-1]
        assert of_status == [line for line in said.err.splitlines() if "were bad" not in line]
        assert main(["merge", "--plan", f"{prefix}.plan.json", "--manifest"]) == 0
        notes = json.loads(Path(f"{prefix}_text_document.shards.json").read_text())
        for kind, place in (("removed", 0), ("copied", 1)):
            of_kind = {rule: count[place] for rule, count in counts.items() if count[place]}
            assert notes[kind]["counts"] == of_kind
            assert {rule: len(shown) for rule, shown in notes[kind]["examples"].items()} == {
                rule: min(count, 10) for rule, count in of_kind.items()
            }
        manifest = TokenFiles().open(f"{prefix}_text_document.shards.json")
        merged = IndexedTokens(f"{prefix}_text_document")
        assert manifest.num_documents == merged.num_documents
        assert (np.asarray(manifest.tokens[:]) == np.asarray(merged.tokens[:])).all()


def documents_in(folder: Path) -> list[tuple[str, object, str]]:
    """Text, source and file of the documents, read back."""
    documents = []
    for path in sorted((folder / "in").iterdir()):
        records = [json.loads(line) for line in path.read_text().splitlines() if line != "{"]
        documents += [(record["text"], record.get("source"), str(path)) for record in records]
    return documents


def test_all_rules_at_once_give_the_same_result_in_any_number_of_tasks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path)
    (tmp_path / "benchmark.jsonl").write_text(json.dumps({"q": "b 7 " * 3}))
    rules = ["--filter", "source != web", "--min-characters", "2", "--max-tokens", "40", "--keep-fraction", "0.9"]
    rules += ["--decontaminate", f"{tmp_path}/benchmark.jsonl", "--decontaminate-ngram", "2"]
    argv = argv_of(tmp_path, *rules, "--deduplicate", "minhash", "--minhash-ngram", "1", "--sample-weights", *WEIGHTS)
    reports = set[str]()
    assert main([*argv, "--output-prefix", str(tmp_path / "one"), "--show-removed"]) == 0
    reports.add(of_cleaning(capsys.readouterr().err))
    for num_tasks in (1, 3, 7):
        prefix = tmp_path / f"p{num_tasks}"
        assert main(["plan", *argv, "--output-prefix", str(prefix), "--tasks", str(num_tasks)]) == 0
        run_phases(prefix, random.Random(num_tasks))
        reports.add(of_cleaning(capsys.readouterr().err))
        assert pair_of(prefix) == pair_of(tmp_path / "one")
    (report,) = reports
    rules_told = {line.partition(" by --")[2].split()[0] for line in report.splitlines() if " by --" in line}
    assert rules_told == {
        *("filter", "min-characters", "keep-fraction", "decontaminate", "deduplicate", "sample-weights"),
    }


def of_cleaning(report: str) -> str:
    """The lines of a report about what cleaning took, and the examples."""
    return "\n".join(line for line in report.splitlines() if line.startswith("    ") or " by --" in line)


@pytest.mark.processes
@pytest.mark.parametrize("flags", [["--json-keys", "title", "text"], ["--split-sentences"]])
def test_keys_sentences_and_workers_make_no_difference(tmp_path: Path, flags: list[str]) -> None:
    written(tmp_path)
    argv = argv_of(tmp_path, "--sample-weights", *WEIGHTS, *flags)
    for workers in ("1", "2"):
        assert main([*argv, "--output-prefix", f"{tmp_path}/w{workers}", "--workers", workers]) == 0
    assert main(["plan", *argv, "--output-prefix", f"{tmp_path}/p", "--tasks", "2"]) == 0
    assert main(["run", "--plan", f"{tmp_path}/p.plan.json", "--task", "0::1"]) == 0
    assert main(["merge", "--plan", f"{tmp_path}/p.plan.json"]) == 0
    names = {path.name.removeprefix("w1_"): path.read_bytes() for path in tmp_path.glob("w1_*")}
    assert len(names) == (4 if "title" in flags else 2)
    for name, content in names.items():
        assert (tmp_path / f"w2_{name}").read_bytes() == content
        assert (tmp_path / f"p_{name}").read_bytes() == content
    if "title" in flags:
        pairs = [IndexedTokens(f"{tmp_path}/w1_{key}_document") for key in ("title", "text")]
        assert pairs[0].num_documents == pairs[1].num_documents


def test_documents_are_compared_before_they_are_weighed(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    records = [{"text": "a", "s": 0}, {"text": "a", "s": 2}, {"text": "b", "s": 2}, {"text": "b", "s": 1}]
    (tmp_path / "in" / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    argv = argv_of(tmp_path, "--sample-weights", "s=0:0", "s=2:2", "--deduplicate", "exact")
    assert main([*argv, "--output-prefix", str(tmp_path / "one")]) == 0
    assert texts_in(tmp_path / "one") == ["b", "b"]
    assert main(["plan", *argv, "--output-prefix", str(tmp_path / "p"), "--tasks", "3"]) == 0
    run_phases(tmp_path / "p", random.Random(1))
    assert pair_of(tmp_path / "p") == pair_of(tmp_path / "one")
    plan = read_plan(tmp_path / "p.plan.json")
    copied = [record.copied for task in range(3) if (record := record_of(plan, task)) is not None]
    assert sorted(copied, key=len) == [{}, {}, {"--sample-weights s=2:2": 1}]


def test_fields_of_weights_are_read_from_parquet(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="needs pyarrow, of the extra parquet")
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "in").mkdir()
    table = arrow.table({"text": ["one", "two"], "meta": [{"source": "wiki"}, {"source": "web"}]})
    parquet.write_table(table, tmp_path / "in" / "x.parquet")
    flags = ["--sample-weights", "meta.source=wiki:2"]
    assert main([*argv_of(tmp_path, *flags), "--output-prefix", str(tmp_path / "p")]) == 0
    assert texts_in(tmp_path / "p") == ["one", "two", "one"]


@pytest.mark.parametrize("weight", ["source=wiki", "source=wiki:-1", "source=wiki:many", ":2", "a=b:nan", "a=b:101"])
def test_a_weight_that_makes_no_sense_is_refused(weight: str) -> None:
    with pytest.raises(UserError) as caught:
        SampleWeights.of({"sample_weights": [weight]})
    assert f"--sample-weights {weight!r} must be KEY=VALUE:WEIGHT or PATTERN:WEIGHT, with a weight of" in str(
        caught.value
    )


def test_a_pattern_that_fits_no_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path)
    argv = [*argv_of(tmp_path), "--output-prefix", str(tmp_path / "p"), "--sample-weights", "c/*:2", "=3:1"]
    assert "--sample-weights '=3:1' has no key before the sign" in failing(argv, capsys)
    sentence = f"--sample-weights 'c/*:2' fits no file of --input; files are named as {tmp_path}/in/a.jsonl"
    assert sentence in failing(argv[:-1], capsys)
    assert sentence in failing(["plan", *argv[:-1], "--tasks", "1"], capsys)


def test_a_lost_round_is_written_again(tmp_path: Path) -> None:
    written(tmp_path)
    argv = argv_of(tmp_path, "--sample-weights", *WEIGHTS, "--output-prefix", str(tmp_path / "p"), "--tasks", "2")
    assert main(["plan", *argv]) == 0
    plan = ["--plan", str(tmp_path / "p.plan.json")]
    assert main(["run", *plan, "--task", "0::1"]) == 0
    path = tmp_path / "p.shards" / "task-00001-3_text_document.bin"
    whole = path.read_bytes()
    assert whole
    path.unlink()
    assert main(["status", *plan]) == 1
    assert main(["run", *plan, "--task", "0::1"]) == 0
    assert path.read_bytes() == whole
    assert main(["status", *plan, "--check"]) == 0
