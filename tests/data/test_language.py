"""Tests of the filter by language: with stand-ins for the libraries, and with these where they are installed."""

import json
import random
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from test_duplicates import argv_of, failing, pair_of, run_phases, texts_in

from megatronish.commands.preprocess_tasks import main
from megatronish.core.errors import UserError
from megatronish.data import cleaning
from megatronish.data.cleaning import JUDGED, LanguageFilter
from megatronish.data.tasks import read_plan, record_of

TEXTS = {
    "en": "This is a sentence about the weather, and nothing else is said in it.",
    "de": "Dieser Satz handelt vom Wetter, und sonst wird darin nichts gesagt.",
    "fr": "Cette phrase parle du temps qu'il fait, et de rien d'autre.",
}
NEEDS_LIBRARIES = pytest.mark.skipif(
    find_spec("py3langid") is None or find_spec("fasttext") is None, reason="needs py3langid and fasttext-predict"
)


def judged(text: str) -> tuple[str, float]:
    """What the stand-ins say: by the first word of a text."""
    return next((code for code, of_code in TEXTS.items() if text.startswith(of_code.split()[0])), "zz"), len(text) / 100


class StandInModel:
    """Stand-in for a model of fastText, which takes one line at a time."""

    is_old = False

    def predict(self, text: str) -> tuple[tuple[str, ...], tuple[float, ...]]:
        if self.is_old:
            raise ValueError("Unable to avoid copy while creating an array as requested.")
        if "\n" in text:
            raise ValueError("predict processes one line at a time")
        text.encode()
        code, score = judged(text)
        return (f"__label__{code}",), (score,)


def load_model(path: str) -> StandInModel:
    if Path(path).read_bytes() != b"model":
        raise ValueError(f"{path} has wrong file format!")
    return StandInModel()


class StandInIdentifier:
    """Stand-in for py3langid's identifier of languages."""

    labels = ("fr", "en", "de")

    @classmethod
    def from_model_file(cls, _path: str, *, norm_probs: bool) -> "StandInIdentifier":
        assert norm_probs, "scores are from 0 to 1"
        return cls()

    def classify(self, text: str) -> tuple[str, float]:
        return judged(text)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    attributes: dict[str, dict[str, Any]] = {
        "fasttext": {"load_model": load_model},
        "py3langid": {},
        "py3langid.langid": {"LanguageIdentifier": StandInIdentifier, "MODEL_FILE": "model"},
    }
    for name, values in attributes.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(cleaning, "version", lambda _name: "1.0")


def written(folder: Path) -> list[str]:
    (folder / "in").mkdir()
    (folder / "lid.bin").write_bytes(b"model")
    texts = [TEXTS["en"], TEXTS["de"], "This is short", TEXTS["en"] + "\nA second line.\ud800", "", TEXTS["fr"]] * 3
    (folder / "in" / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return texts


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("with_model", [True, False])
def test_documents_of_other_languages_and_unsure_ones_are_left_out(
    tmp_path: Path, with_model: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = written(tmp_path)
    model = ["--language-model", str(tmp_path / "lid.bin")] * with_model
    argv = argv_of(
        tmp_path, "--filter-language", "en", "--filter-language", "fr", "--min-language-score", "0.5", *model
    )
    assert main([*argv, "--output-prefix", str(tmp_path / "one")]) == 0
    assert "9 documents were left out by --filter-language en fr\n" in capsys.readouterr().err
    assert texts_in(tmp_path / "one") == [text for text in texts if text in (TEXTS["en"], TEXTS["fr"])]
    for num_tasks, kind in ((1, "none"), (3, "none"), (7, "exact")):
        prefix = tmp_path / f"p{num_tasks}"
        plan = [*argv, "--output-prefix", str(prefix), "--tasks", str(num_tasks), "--deduplicate", kind]
        assert main(["plan", *plan]) == 0
        if kind == "none":
            assert main(["run", "--plan", f"{prefix}.plan.json", "--task", "0::1"]) == 0
            assert main(["merge", "--plan", f"{prefix}.plan.json", "--show-removed"]) == 0
            assert pair_of(prefix) == pair_of(tmp_path / "one")
        else:
            run_phases(prefix, random.Random(0))
            assert texts_in(prefix) == [TEXTS["en"], TEXTS["fr"]]
        told = capsys.readouterr().err
        assert f"a.jsonl:2: [de 0.67] {TEXTS['de']}\n" in told
        assert "a.jsonl:3: [en 0.13] This is short\n" in told


@pytest.mark.usefixtures("stand_ins")
def test_the_beginning_of_a_text_is_judged_in_one_line() -> None:
    heard = list[str]()
    judge = LanguageFilter(("en",)).judge()
    spied = cleaning.LanguageJudge(judge.rule, lambda text: (heard.append(text), judge.judged(text))[1])
    assert spied.refused(["This\nis \ud800", "b" * JUDGED]) is None
    assert heard[0].startswith("This is ? bbb")
    assert len(heard[0]) == JUDGED


@pytest.mark.usefixtures("stand_ins")
def test_another_version_or_model_than_the_plan_s_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path)
    argv = argv_of(tmp_path, "--filter-language", "en", "--output-prefix", str(tmp_path / "p"), "--tasks", "2")
    plan = ["--plan", str(tmp_path / "p.plan.json")]
    assert main(["plan", *argv]) == 0
    assert main(["run", *plan, "--task", "0"]) == 0
    with monkeypatch.context() as patched:
        patched.setattr(cleaning, "version", lambda _name: "1.1")
        told = failing(["run", *plan, "--task", "1"], capsys)
        assert "was made with py3langid 1.0, and this machine has 1.1, which may judge otherwise; pip install" in told
        assert main(["plan", *argv]) == 0
        assert record_of(read_plan(tmp_path / "p.plan.json"), 0) is None
    assert main(["plan", *argv, "--language-model", str(tmp_path / "lid.bin")]) == 0
    (tmp_path / "lid.bin").write_bytes(b"nodel")
    assert f"error: input {tmp_path}/lid.bin was changed since" in failing(["run", *plan, "--task", "1"], capsys)


def test_a_missing_library_or_a_broken_model_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path)
    argv = [*argv_of(tmp_path), "--output-prefix", str(tmp_path / "p"), "--filter-language", "en"]
    model = ["--language-model", str(tmp_path / "in" / "a.jsonl")]
    with monkeypatch.context() as patched:
        for name in ("py3langid", "py3langid.langid", "fasttext"):
            patched.setitem(sys.modules, name, None)
        for flags, package in (([], "py3langid"), (model, "fasttext-predict")):
            for words in ([*argv, *flags], ["plan", *argv, *flags, "--tasks", "1"]):
                told = failing(words, capsys)
                assert (
                    f"error: --filter-language needs {package}, which is not installed; pip install {package}" in told
                )


@pytest.mark.usefixtures("stand_ins")
def test_rules_that_make_no_sense_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path)
    argv = [*argv_of(tmp_path), "--output-prefix", str(tmp_path / "p")]
    model = ["--language-model", str(tmp_path / "in" / "a.jsonl")]
    told = failing([*argv, "--filter-language", "en", *model], capsys)
    assert f"--language-model {tmp_path}/in/a.jsonl cannot be used ({tmp_path}/in/a.jsonl has wrong file form" in told
    told = failing([*argv, "--filter-language", "english"], capsys)
    assert "--filter-language english is no language of py3langid; it knows de en fr" in told
    assert "is of no use without --filter-language; add it, such as en" in failing([*argv, *model], capsys)
    monkeypatch.setattr(StandInModel, "is_old", True)
    with pytest.raises(UserError, match=r"Unable to avoid copy .* pip install fasttext-predict"):
        LanguageFilter(("en",), str(tmp_path / "lid.bin")).judge()
    with pytest.raises(UserError, match=r"--min-language-score 2 must be at least 0 and at most 1; for example 0\.65"):
        LanguageFilter.of({"min_language_score": 2})


@NEEDS_LIBRARIES
def test_the_real_libraries_know_languages(tmp_path: Path) -> None:
    judge = LanguageFilter(("de",)).judge()
    assert {code: judge.refused([text]) is None for code, text in TEXTS.items()} == {
        "en": False,
        "de": True,
        "fr": False,
    }
    (tmp_path / "lid.bin").write_bytes(b"no model")
    with pytest.raises(UserError, match="has wrong file format"):
        LanguageFilter(("de",), str(tmp_path / "lid.bin")).judge()
