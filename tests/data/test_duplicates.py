"""Tests of duplicates: the first in input order stays, whatever tasks, workers, kills and reruns there were."""

import json
import random
from collections.abc import Iterator, Sequence
from itertools import count, pairwise
from pathlib import Path

import numpy as np
import pytest
from task_runs import killed_at

from megatronish.commands.preprocess_tasks import main
from megatronish.core.errors import UserError
from megatronish.data import cleaning, duplicates, phases, signatures
from megatronish.data.duplicates import KEY_RANGE, SignatureFile, SignatureWriter, Signed, joined_groups, matched
from megatronish.data.indexed import IndexedTokens, bin_path, idx_path
from megatronish.data.phases import NOT_SIGNED, DuplicateSearch
from megatronish.data.signatures import Deduplication, normalised, words_of
from megatronish.data.tasks import read_plan, record_of, refuse_changed_inputs, sign_of

KINDS = ("exact", "minhash")
MINHASH = Deduplication("minhash")


def documents_of(seed: int) -> list[str]:
    """Texts short and long, copies of them that differ in white space, and copies with a word or two changed."""
    draw = random.Random(seed)
    words = [f"word{number}" for number in range(500)]
    texts = [" ".join(draw.choices(words, k=draw.choice([0, 2, 40, 120]))) for _ in range(90)]
    for text in draw.choices([text for text in texts if text], k=60):
        parts = text.split()
        kind = draw.random()
        if kind < 0.4:
            parts[draw.randrange(len(parts))] = "changed"
        texts.append(("  \n" if 0.4 < kind < 0.7 else " ").join(parts))
    draw.shuffle(texts)
    return texts


def written(folder: Path, *, lang: bool = False) -> list[str]:
    """Files of documents, among them bad and blank lines, a JSON array and a file without documents; the texts."""
    folder.mkdir()
    texts = documents_of(1)
    lines = [json.dumps({"text": text} | ({"lang": "en"} if lang else {})) for text in texts]
    for place in (3, 30, 31, 70):
        lines.insert(place, "")
        lines.insert(place, '{"txt": 1}')
    (folder / "a.jsonl").write_text("\n".join(lines[:100]))
    (folder / "b.jsonl").write_text("\n")
    (folder / "c.json").write_text(json.dumps([json.loads(line) for line in lines[100:120]]))
    (folder / "d.jsonl").write_text("\r\n".join(lines[120:]))
    return texts


def argv_of(tmp_path: Path, *flags: str) -> list[str]:
    return ["--input", str(tmp_path / "in"), "--tokenizer-type", "bytes", "--append-eod", *flags]


def pair_of(prefix: Path) -> tuple[bytes, bytes]:
    return bin_path(f"{prefix}_text_document").read_bytes(), idx_path(f"{prefix}_text_document").read_bytes()


def texts_in(prefix: Path) -> list[str]:
    pair = IndexedTokens(f"{prefix}_text_document")
    documents = [pair.document(number) for number in range(pair.num_documents)]
    return [bytes(document[:-1].astype(np.uint8)).decode() for document in documents]


@pytest.mark.parametrize(
    ("one", "other", "are_alike"),
    [
        ("a b", "  a\n\tb ", True),
        ("caf\u00e9", "cafe\u0301", True),
        ("a b", "a B", False),
        ("a b", "a b.", False),
        ("", " \n", True),
        ("\ud800", "\ud800 ", True),
    ],
)
def test_equal_texts_are_those_that_differ_in_white_space_and_composition_alone(
    one: str, other: str, are_alike: bool
) -> None:
    exact = Deduplication("exact")
    assert (exact.keys([one]) == exact.keys([other])).all() == are_alike
    assert (MINHASH.keys([one]) == MINHASH.keys([other])).all() | (not are_alike), "what is equal shares all keys"
    assert (exact.keys([one, "c"]) == exact.keys([other, "c"])).all() == are_alike
    assert (exact.keys([one, "c"]) != exact.keys([f"{one} c"])).all(), "texts of two keys are not those of one"


def test_keys_are_the_same_on_every_machine() -> None:
    assert words_of(normalised(["Über 3 Cafe\u0301s: 東京 12"])) == ["über", "3", "cafés", "東", "京", "12"]
    words = ["i\u0307ki", "हिन्दी", "की", "का", "ภาษาไทย", "שָׁלוֹם", "مُحَمَّد"]
    assert words_of("İki हिन्दी की, का. ภาษาไทย שָׁלוֹם مُحَمَّد ❤️") == words, "letters have their marks"
    assert words_of("\U0001e900\U0001e945a \u0301b") == ["\U0001e922\U0001e945a", "b"]
    assert Deduplication("exact").keys(["some text"]).tolist() == [[16532154006803973620, 5286144270691107879]]
    keys = MINHASH.keys(["one two three four five six seven"])
    assert keys.shape == (14, 2)
    assert keys[[0, -1], 0].tolist() == [16415238183503392248, 11719140798739101209]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["a b c", "d e f g"], ["a b c d", "e f g"]),
        (["a b", ""], ["", "a b"]),
        (["a b", ""], ["a b"]),
        (["one", "two"], ["two", "one"]),
        (["?", "!"], ["!", "?"]),
        (["a\x1fb", "c"], ["a", "b\x1fc"]),
    ],
)
def test_texts_of_several_keys_are_one_document_and_no_run_of_words_is_of_two_texts_as_of_one(
    one: list[str], other: list[str]
) -> None:
    for rule in (MINHASH, Deduplication("exact")):
        assert not set(rule.keys(one)[:, 0].tolist()) & set(rule.keys(other)[:, 0].tolist())
        assert (rule.keys(one) == rule.keys([f"  {text}\n" for text in one])).all()


def test_documents_of_several_keys_are_alike_by_all_of_them_together(tmp_path: Path) -> None:
    words = [f"w{number}" for number in range(400)]
    question, answer, changed = " ".join(words[:200]), " ".join(words[200:]), " ".join([*words[:50], *words[51:200]])
    # Half of their runs are the same where one of both texts is: too few.
    pairs = [(question, answer), (changed, answer), (question, "other"), (question, answer), ("other", answer)]
    (tmp_path / "in.jsonl").write_text("\n".join(json.dumps({"q": one, "a": two}) for one, two in pairs))
    flags = ["--json-keys", "q", "a", "--tokenizer-type", "bytes", "--deduplicate", "minhash"]
    argv = ["--input", str(tmp_path / "in.jsonl"), *flags]
    assert main([*argv, "--output-prefix", str(tmp_path / "one")]) == 0
    assert main(["plan", *argv, "--output-prefix", str(tmp_path / "many"), "--tasks", "3"]) == 0
    for phase in ("sign", "match", "run"):
        assert main([phase, "--plan", str(tmp_path / "many.plan.json"), "--task", "0::1"]) == 0
    assert main(["merge", "--plan", str(tmp_path / "many.plan.json")]) == 0
    for key, place in (("q", 0), ("a", 1)):
        pair = IndexedTokens(f"{tmp_path}/one_{key}_document")
        kept = [bytes(pair.document(number).astype(np.uint8)).decode() for number in range(pair.num_documents)]
        assert kept == [pairs[number][place] for number in (0, 2, 4)]
        for path in (bin_path, idx_path):
            names = [f"{tmp_path}/{prefix}_{key}_document" for prefix in ("one", "many")]
            assert path(names[0]).read_bytes() == path(names[1]).read_bytes()


def test_keys_of_a_long_text_are_those_of_all_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    text = " ".join(f"w{number}" for number in range(50))
    keys = MINHASH.keys([text])
    monkeypatch.setattr(signatures, "RUNS_AT_ONCE", 7)
    assert (MINHASH.keys([text]) == keys).all()


def test_as_many_alike_texts_share_a_key_as_the_formula_says() -> None:
    draw, words = random.Random(3), [f"w{number}" for number in range(100_000)]
    shared, expected, measured = {0.5: 0, 0.72: 0, 0.9: 0}, {}, {}
    for likeness in shared:
        common = round(400 * 2 * likeness / (1 + likeness))
        for _ in range(60):
            one, other = draw.choices(words, k=400), draw.choices(words, k=400)
            other[: common + 4] = one[: common + 4]
            keys = [MINHASH.keys([" ".join(text)])[:, 0] for text in (one, other)]
            shared[likeness] += bool((keys[0] == keys[1]).any())
        true_likeness = common / (2 * 396 - common)
        expected[likeness] = 1 - (1 - true_likeness**8) ** 14
        measured[likeness] = shared[likeness] / 60
    assert measured == pytest.approx(expected, abs=0.2)
    assert measured[0.9] == 1
    assert MINHASH.likeness == pytest.approx(0.719, abs=0.001)


def random_rows(draw: random.Random) -> Iterator[Signed]:
    """Batches of keys, few of which differ, also in one half alone, at rising positions."""
    position = 0
    for _ in range(12):
        number = draw.randrange(40)
        halves = [[draw.choice([0, 5, KEY_RANGE // 3, KEY_RANGE - 1]), draw.randrange(9)] for _ in range(number)]
        positions = [position := position + draw.randrange(1, 3) for _ in range(number)]
        yield Signed(np.array(halves, np.uint64).reshape(-1, 2), np.array(positions, np.int64), number, 0)


@pytest.mark.parametrize("rows_at_once", [3, 50, 1000])
def test_links_lead_to_the_first_document_of_a_key_for_any_number_of_files_runs_and_ranges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_at_once: int
) -> None:
    monkeypatch.setattr(duplicates, "ROWS_AT_ONCE", rows_at_once)
    batches = list(random_rows(random.Random(5)))
    firsts, expected = dict[tuple[int, int], int](), set[tuple[int, int]]()
    for batch in batches:
        for key, position in zip(map(tuple, batch.keys.tolist()), batch.positions.tolist(), strict=True):
            if firsts.setdefault(key, position) != position:
                expected.add((position, firsts[key]))
    for num_files in (1, 3):
        files = []
        for number in range(num_files):
            path = tmp_path / f"{number}.bin"
            with path.open("wb") as file:
                writer = SignatureWriter(file)
                for batch in batches[number::num_files]:
                    writer.add(batch)
                writer.finish()
            files.append(SignatureFile(path, writer.runs))
        for num_ranges in (1, 2, 5):
            borders = [KEY_RANGE * number // num_ranges for number in range(num_ranges + 1)]
            links = [matched(files, start, end) for start, end in pairwise(borders)]
            assert {tuple(link) for part in links for link in part.T.tolist()} == expected
            assert all((np.diff(part[0]) >= 0).all() for part in links)


@pytest.mark.parametrize("links_at_once", [1, 1 << 22])
def test_groups_are_what_links_lead_to(monkeypatch: pytest.MonkeyPatch, links_at_once: int) -> None:
    monkeypatch.setattr(duplicates, "LINKS_AT_ONCE", links_at_once)
    draw = random.Random(7)
    for size in (0, 1, 30, 300):
        pairs = [tuple(sorted(draw.sample(range(2 * size + 2), 2), reverse=True)) for _ in range(size)]
        pairs += [(number + 1, number) for number in range(1000, 1000 + size)]  # a chain
        groups = {number: {number} for pair in pairs for number in pair}
        for one, other in pairs:
            merged = groups[one] | groups[other]
            groups |= dict.fromkeys(merged, merged)
        expected = {member: min(group) for member, group in groups.items() if member != min(group)}
        draw.shuffle(pairs)
        parts = [np.array(pairs[start::3], np.int64).reshape(-1, 2).T for start in range(3)]
        found = joined_groups(parts)
        assert dict(zip(*found.tolist(), strict=True)) == expected
        assert found[0].tolist() == sorted(expected)


def run_phases(prefix: Path, order: random.Random) -> None:
    """Do all tasks of all phases in a random order, each in a process of its own as far as memory is concerned."""
    plan = ["--plan", f"{prefix}.plan.json"]
    for phase in ("sign", "match", "run"):
        tasks = list(range(len(read_plan(Path(plan[1])).tasks)))
        order.shuffle(tasks)
        for task in tasks:
            assert main([phase, *plan, "--task", str(task)]) == 0
    assert main(["merge", *plan, "--show-removed"]) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_result_is_the_same_for_any_number_and_order_of_tasks(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duplicates, "ROWS_AT_ONCE", 100)
    texts = written(tmp_path / "in")
    argv, reports = argv_of(tmp_path, "--deduplicate", kind), set[str]()
    assert main([*argv, "--output-prefix", str(tmp_path / "one")]) == 0
    assert not list(tmp_path.glob("one.sig*")), "nothing is left of the search"
    if kind == "exact":
        bare = [" ".join(text.split()) for text in texts]
        assert texts_in(tmp_path / "one") == [text for at, text in enumerate(texts) if bare[at] not in bare[:at]]
    for num_tasks in (1, 3, 7):
        prefix = tmp_path / f"p{num_tasks}"
        assert main(["plan", *argv, "--output-prefix", str(prefix), "--tasks", str(num_tasks)]) == 0
        capsys.readouterr()
        run_phases(prefix, random.Random(num_tasks))
        of_tasks, _, of_merge = capsys.readouterr().err.rpartition("documents were left out by")
        reports.add(of_tasks.splitlines()[-1] + of_merge)
        assert pair_of(prefix) == pair_of(tmp_path / "one")
    (report,) = reports
    left_out = len(texts) - len(texts_in(tmp_path / "one"))
    assert report.startswith(f"{left_out}  --deduplicate {kind}\n")
    assert report.count(" (as ") == 10
    shown = [line for line in report.splitlines() if line.startswith("    ")]
    lines = {str(path): path.read_text().splitlines() for path in (tmp_path / "in").glob("*.jsonl")}
    for line in shown[:5]:  # of a file of lines, where both can be looked up
        path, number, _ = line.strip().split(":", 2)
        of_first, number_of_first = line.rpartition(" (as ")[2].removesuffix(")").split(":")
        both = [json.loads(lines[path][int(number) - 1]), json.loads(lines[of_first][int(number_of_first) - 1])]
        assert len(set(both[0]["text"].split()) ^ set(both[1]["text"].split())) <= 2


def test_rows_of_parquet_are_compared_over_row_groups(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="needs pyarrow, of the extra parquet")
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "in").mkdir()
    texts = [f"text {number % 13}\n" for number in range(40)]
    path = tmp_path / "in" / "x.parquet"
    parquet.write_table(arrow.table({"text": texts}), path, row_group_size=4)
    argv = argv_of(tmp_path, "--deduplicate", "exact")
    assert main(["plan", *argv, "--output-prefix", str(tmp_path / "p"), "--tasks", "5"]) == 0
    run_phases(tmp_path / "p", random.Random(0))
    assert texts_in(tmp_path / "p") == texts[:13]
    records = [record_of(read_plan(tmp_path / "p.plan.json"), task) for task in range(5)]
    shown = [example for record in records for example in record.removed_examples.get("--deduplicate exact", ())]
    assert len(shown) > 20
    for _, row, excerpt in shown:
        assert excerpt == f"{texts[row - 1]} (as {path}:{(row - 1) % 13 + 1})"


@pytest.mark.processes
def test_the_result_is_the_same_for_any_number_of_workers(tmp_path: Path) -> None:
    written(tmp_path / "in")
    argv = argv_of(tmp_path, "--deduplicate", "minhash")
    for workers in ("1", "2"):
        assert main([*argv, "--output-prefix", f"{tmp_path}/w{workers}", "--workers", workers]) == 0
    assert pair_of(tmp_path / "w1") == pair_of(tmp_path / "w2")


@pytest.mark.parametrize("kind", KINDS)
def test_an_input_without_a_document_has_no_duplicate(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text("\n\n")
    argv = argv_of(tmp_path, "--deduplicate", kind, "--output-prefix", f"{tmp_path}/p")
    assert main(argv) == 2
    assert "a.jsonl holds no document (0 bad lines)" in capsys.readouterr().err
    assert main(["plan", *argv, "--tasks", "2"]) == 0
    for verb in ("sign", "match", "run"):
        assert main([verb, "--plan", f"{tmp_path}/p.plan.json", "--task", "0::1"]) == 0
    assert main(["merge", "--plan", f"{tmp_path}/p.plan.json"]) == 2
    assert "no document" in capsys.readouterr().err


def test_near_duplicates_go_and_others_stay(tmp_path: Path) -> None:
    draw, words = random.Random(11), [f"w{number}" for number in range(2000)]
    originals = [" ".join(draw.choices(words, k=200)) for _ in range(40)]
    planted = []
    for text in originals[:20]:
        parts = text.split()
        parts[draw.randrange(200)] = "changed"
        planted.append("The " + ", ".join(parts).upper() + "!")
    half_alike = [" ".join(text.split()[:100] + draw.choices(words, k=100)) for text in originals[20:]]
    (tmp_path / "in").mkdir()
    lines = [json.dumps({"text": text}) for text in (*originals, *half_alike, *planted)]
    (tmp_path / "in" / "a.jsonl").write_text("\n".join(lines))
    assert main([*argv_of(tmp_path, "--deduplicate", "minhash"), "--output-prefix", str(tmp_path / "p")]) == 0
    assert texts_in(tmp_path / "p") == originals + half_alike
    flags = ["--deduplicate", "minhash", "--minhash-bands", "50", "--minhash-rows", "2"]
    assert main([*argv_of(tmp_path, *flags), "--output-prefix", str(tmp_path / "q")]) == 0
    assert texts_in(tmp_path / "q") == originals, "less alike ones go, too"


def test_a_document_that_another_rule_takes_is_not_the_first(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    records = [{"text": "same", "lang": "de"}, {"text": "same", "lang": "en"}, {"text": "same ", "lang": "en"}]
    (tmp_path / "in" / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    flags = ["--deduplicate", "exact", "--filter", "lang == en"]
    assert main(["plan", *argv_of(tmp_path, *flags), "--output-prefix", str(tmp_path / "p"), "--tasks", "2"]) == 0
    run_phases(tmp_path / "p", random.Random(0))
    removed = [record_of(read_plan(tmp_path / "p.plan.json"), task).removed for task in range(2)]
    assert removed == [{"--filter lang == en": 1}, {"--deduplicate exact": 1}]


@pytest.mark.processes
@pytest.mark.parametrize("kind", KINDS)
def test_a_kill_at_any_change_of_files_loses_nothing_that_was_whole(tmp_path: Path, kind: str) -> None:
    written(tmp_path / "in")
    argv = argv_of(tmp_path, "--deduplicate", kind)
    assert main([*argv, "--output-prefix", str(tmp_path / "one")]) == 0
    assert main(["plan", *argv, "--output-prefix", str(tmp_path / "p"), "--tasks", "2"]) == 0
    search, plan = DuplicateSearch(read_plan(tmp_path / "p.plan.json")), ["--plan", f"{tmp_path}/p.plan.json"]
    for phase in search.phases:
        assert main([phase, *plan, "--task", "0"]) == 0
        whole = search.record(phase, 0, sums=True)
        for step in count(1):
            was_killed = killed_at(step, lambda phase=phase: main([phase, *plan, "--task", "1"]))
            assert search.record(phase, 0, sums=True) == whole
            if not was_killed:
                break
            if search.record(phase, 1) is not None and phase == "sign":  # it was killed after its record was there
                (tmp_path / "p.signatures" / f"{phase}-00001.json").unlink()
        assert step > 5, "so many changes of files are there at least"
        assert search.missing(phase) == []
    assert not list((tmp_path / "p.signatures").glob("*.tmp")), "what killed runs had begun is removed"
    assert main(["run", *plan, "--task", "0::1"]) == 0
    assert main(["merge", *plan]) == 0
    assert pair_of(tmp_path / "p") == pair_of(tmp_path / "one")


def failing(argv: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a command that fails says."""
    capsys.readouterr()
    assert main(argv) == 2
    return capsys.readouterr().err


def test_a_phase_before_its_turn_is_refused_with_the_command_and_status_tells_of_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path / "in")
    prefix = str(tmp_path / "p")
    argv = [*argv_of(tmp_path, "--deduplicate", "minhash"), "--output-prefix", prefix, "--tasks", "3"]
    plan, verb = ["--plan", f"{prefix}.plan.json"], "megatronish preprocess"
    assert main(["plan", *argv]) == 0
    out = capsys.readouterr().out
    assert f"first all of: {verb} sign --plan {prefix}.plan.json --task 0, and so on to 2\nfirst all of: " in out
    assert "documents are alike from about 72% of common runs of 5 words on" in out
    sentence = f"3 of 3 tasks of sign, which come before, are not whole: 0-2; run them: {verb} sign {' '.join(plan)}"
    assert f"error: {sentence} --task 0::1" in failing(["run", *plan, "--task", "0"], capsys)
    assert f"error: {sentence}" in failing(["match", *plan, "--task", "0::1"], capsys)
    assert main(["sign", *plan, "--task", "1::2"]) == 0
    capsys.readouterr()
    assert main(["status", *plan]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:3] == ["sign: 1 of 3 tasks are whole", "match: 0 of 3 tasks are whole"]
    assert lines[-1] == "missing, of sign: --array=0,2"
    assert main(["sign", *plan, "--task", "0::1"]) == 0
    assert "task 1 of 3: is whole | " in capsys.readouterr().out
    assert main(["match", *plan, "--task", "0::2"]) == 0
    assert "1 of 3 tasks of match, which come before, are not whole: 1" in failing(
        ["run", *plan, "--task", "0"], capsys
    )
    assert main(["match", *plan, "--task", "1"]) == 0
    assert main(["status", *plan]) == 1
    assert capsys.readouterr().out.endswith("match: 3 of 3 tasks are whole\nnever begun: 0-2\nmissing: --array=0-2\n")
    (tmp_path / "p.signatures" / "groups.json").unlink()
    assert "are not joined to groups yet" in failing(["run", *plan, "--task", "0"], capsys)
    assert main(["match", *plan, "--task", "0"]) == 0
    assert main(["run", *plan, "--task", "0::1"]) == 0
    for path in (tmp_path / "p.signatures").iterdir():
        path.unlink()
    assert main(["run", *plan, "--task", "0::1"]) == 0, "what is whole needs them no longer"
    assert main(["status", *plan]) == 0


def test_what_is_damaged_changed_or_of_another_plan_is_done_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path / "in")
    argv = argv_of(tmp_path, "--output-prefix", str(tmp_path / "p"), "--tasks", "2")
    assert main(["plan", *argv]) == 0
    plan = ["--plan", f"{tmp_path}/p.plan.json"]
    assert "was made without --deduplicate and has no sign" in failing(["sign", *plan, "--task", "0"], capsys)
    assert main(["plan", *argv, "--deduplicate", "exact"]) == 0
    assert main(["sign", *plan, "--task", "0::1"]) == 0
    search = DuplicateSearch(read_plan(Path(plan[1])))
    path = tmp_path / "p.signatures" / "sign-00001.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert search.missing("sign") == []
    assert search.missing("sign", sums=True) == [1]
    assert main(["status", *plan, "--check"]) == 1
    assert "missing, of sign: --array=1\n" in capsys.readouterr().out
    assert main(["sign", *plan, "--task", "0::1"]) == 0
    assert path.read_bytes() == whole
    for flags, missing in (
        (["--min-tokens", "3"], []),
        (["--sample-weights", "*:2"], []),
        (["--min-characters", "3"], [0, 1]),
    ):
        assert main(["plan", *argv, "--deduplicate", "exact", *flags]) == 0
        assert DuplicateSearch(read_plan(Path(plan[1]))).missing("sign") == missing
    (tmp_path / "in" / "a.jsonl").touch()
    told = failing(["sign", *plan, "--task", "0"], capsys)
    assert f"input {tmp_path}/in/a.jsonl was changed since" in told
    sign = sign_of(read_plan(Path(plan[1])), 0, "sign")
    assert sign is not None
    assert sign.failure.startswith("input ")


def test_positions_of_another_plan_are_not_taken(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in "abc":
        (tmp_path / "in" / f"{name}.jsonl").write_text(json.dumps({"text": name * 100}))
    plan = [*argv_of(tmp_path)[2:], "--deduplicate", "exact", "--output-prefix", f"{tmp_path}/p", "--tasks", "2"]
    for inputs, missing in (("ac", [0, 1]), ("abc", [0, 1])):
        assert main(["plan", "--input", *(f"{tmp_path}/in/{name}.jsonl" for name in inputs), *plan]) == 0
        search = DuplicateSearch(read_plan(tmp_path / "p.plan.json"))
        assert search.missing("sign") == missing, "the file c is another piece of input"
        assert search.plan.tasks[1][-1].path == f"{tmp_path}/in/c.jsonl"
        assert main(["sign", "--plan", f"{tmp_path}/p.plan.json", "--task", "0::1"]) == 0


def test_a_file_of_another_plan_has_no_record_of_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "in")
    argv = argv_of(tmp_path, "--deduplicate", "exact", "--output-prefix", str(tmp_path / "p"), "--tasks", "1")
    sign = ["sign", "--plan", f"{tmp_path}/p.plan.json", "--task", "0"]
    assert main(["plan", *argv]) == 0
    assert main(sign) == 0
    assert main(["plan", *argv, "--max-characters", "100000"]) == 0
    with monkeypatch.context() as patched:
        patched.setattr(phases, "write_durably", interrupted)
        assert main(sign) == 130
    assert main(["plan", *argv]) == 0
    assert DuplicateSearch(read_plan(tmp_path / "p.plan.json")).missing("sign") == [0]


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_an_input_that_changes_while_it_is_signed_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "in")
    argv = argv_of(tmp_path, "--deduplicate", "exact", "--output-prefix", str(tmp_path / "p"), "--tasks", "1")
    assert main(["plan", *argv]) == 0
    search = DuplicateSearch(read_plan(tmp_path / "p.plan.json"))
    with pytest.raises(UserError, match="was changed since"):
        search.sign(0, workers=1, on_signed=lambda *_: (tmp_path / "in" / "a.jsonl").touch())
    assert search.missing("sign") == [0]


@pytest.mark.parametrize("rule", [("--deduplicate", "exact"), ("--decontaminate", "in/a.jsonl")])
def test_words_of_another_unicode_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: tuple[str, str]
) -> None:
    written(tmp_path / "in")
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *argv_of(tmp_path, *rule, "--output-prefix", "p", "--tasks", "1")]) == 0
    refuse_changed_inputs(read_plan(Path("p.plan.json")), 0)
    monkeypatch.setattr(cleaning, "unidata_version", "99.0")
    with pytest.raises(UserError, match=r"with Unicode \d+\.\d+.*, and this machine has 99.0, .* take the same Python"):
        refuse_changed_inputs(read_plan(Path("p.plan.json")), 0)


def test_settings_that_no_key_depends_on_are_settings(tmp_path: Path) -> None:
    written(tmp_path / "in")
    argv = argv_of(tmp_path, "--deduplicate", "exact", "--output-prefix", str(tmp_path / "p"), "--tasks", "1")
    assert main(["plan", *argv]) == 0
    assert set(NOT_SIGNED) < set(read_plan(tmp_path / "p.plan.json").settings)


def test_a_task_is_another_if_an_input_of_another_task_is(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name, text in (("a", "one"), ("b", "two")):
        (tmp_path / "in" / f"{name}.jsonl").write_text(json.dumps({"text": text}))
    argv = argv_of(tmp_path, "--deduplicate", "exact", "--output-prefix", str(tmp_path / "p"), "--tasks", "2")
    assert main(["plan", *argv]) == 0
    run_phases(tmp_path / "p", random.Random(0))
    (tmp_path / "in" / "a.jsonl").write_text(json.dumps({"text": "two"}))
    assert main(["plan", *argv]) == 0
    assert record_of(read_plan(tmp_path / "p.plan.json"), 1) is None, "its text is that of a document before it now"
    run_phases(tmp_path / "p", random.Random(1))
    assert texts_in(tmp_path / "p") == ["two"]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"deduplicate": "fuzzy"}, "--deduplicate fuzzy must be none, exact or minhash"),
        ({"minhash_rows": 0}, "--minhash-ngram 5, --minhash-bands 14 and --minhash-rows 0 must be at least 1"),
        (
            {"deduplicate": "exact", "minhash_rows": 4},
            "--minhash-rows 4 says nothing without --deduplicate minhash; add",
        ),
        ({"minhash_bands": 4097, "minhash_rows": 1}, "and bands times rows at most 4,096; for example 5, 14 and 8"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(settings: dict[str, object], told: str) -> None:
    with pytest.raises(UserError) as caught:
        Deduplication.of(settings)
    assert told in str(caught.value)
