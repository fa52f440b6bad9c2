"""Tests of `megatronish evaluate --tasks` against the harness's own model of transformers, on local tasks."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from chat_models import write_adapter, write_chat_model
from paths import ROOT

from megatronish.commands.main import COMMANDS

evaluate = COMMANDS["evaluate"].main()

pytestmark = pytest.mark.peers("lm_eval")
lm_eval: Any = pytest.importorskip("lm_eval", reason="lm_eval is not installed here; see `make test-peers`")
transformers: Any = pytest.importorskip(
    "transformers", reason="transformers is not installed here; see `make test-peers`", exc_type=ImportError
)

NAMES = ("choices", "rolling", "written")
SEEN = 64  # tokens; the texts of `rolling` are longer
QUESTIONS = [
    {"question": f"{'ab' * n} {n}:", "choices": [" x", " yy", f" z{n}"], "answer": n % 3, "text": f"tëxt {n}. " * 12}
    for n in range(7)
]
OUTPUTS: dict[str, dict[str, Any]] = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "written": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["\n", "a"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, tasks and an empty cache of data sets."""
    found = tmp_path_factory.mktemp("harness")
    write_chat_model(found / "base")
    path = found / "base" / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_class": "PreTrainedTokenizerFast"}))
    lines = found / "questions.jsonl"
    lines.write_text("".join(f"{json.dumps(each)}\n" for each in QUESTIONS))
    (found / "tasks").mkdir()
    for name, output in OUTPUTS.items():
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(lines)}}, "test_split": "test"}
        (found / "tasks" / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **data, **output}))
    return found


@pytest.fixture(scope="module", autouse=True)
def offline(folder: Path) -> Any:
    """Data sets from local files alone, in a cache of the test's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(folder / "cache"))
        patch.setenv("HF_DATASETS_CACHE", str(folder / "cache" / "datasets"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("DISABLE_MULTIPROC", "1")
        yield


def theirs(folder: Path, **options: Any) -> dict[str, Any]:
    """What the harness finds with transformers."""
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "base").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "base")
    return lm_eval.simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2, max_length=SEEN, device="cpu"),
        tasks=list(NAMES),
        task_manager=TaskManager(include_path=str(folder / "tasks"), include_defaults=False),
        bootstrap_iters=10,
        **options,
    )


def ours(folder: Path, output: Path, flags: str = "") -> dict[str, Any]:
    """What `tools/evaluate.py` writes."""
    words = f"--load {folder / 'base'} --tasks {','.join(NAMES)} --include-path {folder / 'tasks'} --log-samples"
    words += f" --seq-length {SEEN} --micro-batch-size 2 --device cpu --output {output} {flags}"
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "evaluate.py"), *words.split()],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert "|choices" in done.stdout and f"wrote {output}" in done.stdout
    return json.loads(output.read_text())


def responses(found: dict[str, Any], task: str) -> list[Any]:
    """The model's responses to a task's questions, in their order."""
    samples = sorted(found["samples"][task], key=lambda each: each["doc_id"])
    return json.loads(json.dumps([each["resps"] for each in samples], default=str))


def assert_equal(mine: dict[str, Any], others: dict[str, Any]) -> None:
    """Equal numbers, log-likelihoods and texts."""
    for task in NAMES:
        numbers = {name: value for name, value in others["results"][task].items() if isinstance(value, float)}
        assert numbers
        for name, value in numbers.items():
            if "stderr" not in name:
                assert mine["results"][task][name] == pytest.approx(value, rel=1e-4, abs=1e-4), (task, name)
        assert len(mine["samples"][task]) == len(others["samples"][task]) > 0
        for one, other in zip(responses(mine, task), responses(others, task), strict=True):
            assert_responses_equal(one, other)


def assert_responses_equal(one: Any, other: Any) -> None:
    if isinstance(other, list):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_responses_equal(mine, theirs)
    elif isinstance(other, float) or (isinstance(other, str) and other.lstrip("-").replace(".", "", 1).isdigit()):
        assert float(one) == pytest.approx(float(other), rel=1e-4, abs=1e-4)
    else:
        assert one == other


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Any]:
    return theirs(folder)


@pytest.mark.parametrize("layout", ["", "--tp 2", "--pp 2 --dp 2"])
def test_tasks_find_what_transformers_finds(
    folder: Path, tmp_path: Path, expected: dict[str, Any], layout: str
) -> None:
    assert_equal(ours(folder, tmp_path / "found.json", layout), expected)


def test_chats_shots_and_a_limit_are_those_of_the_harness(folder: Path, tmp_path: Path) -> None:
    options = {"apply_chat_template": True, "num_fewshot": 1, "limit": 3}
    mine = ours(folder, tmp_path / "found.json", "--apply-chat-template --num-fewshot 1 --limit 3")
    assert_equal(mine, theirs(folder, **options))


def test_an_adapter_changes_what_is_found(folder: Path, tmp_path: Path, expected: dict[str, Any]) -> None:
    adapter = write_adapter(tmp_path / "a", seed=1)
    found = ours(folder, tmp_path / "found.json", f"--adapter {adapter}")
    assert responses(found, "choices") != responses(expected, "choices")


def test_what_a_user_does_wrong_is_one_sentence(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = f"--load {folder / 'base'} --device cpu"
    own = f"{load} --include-path {folder / 'tasks'}"
    without = write_chat_model(tmp_path / "without", template=None)
    for flags, words in (
        (f"{own} --tasks choice", "--tasks choice is no task of the harness; did you mean choices?"),
        (f"{own} --tasks choices --data-path x", "--data-path x and --tasks are two evaluations; run them one by one"),
        (f"{own} --tasks choices --cp 2", "--context-parallel-size is for perplexity (--data-path); leave it out"),
        (f"{own} --tasks choices --limit 0", "--limit 0 must be at least 1; or leave it out"),
        (f"{load} --tasks choices --include-path {tmp_path / 'no'}", "no is no folder; name one with task files"),
        (
            f"--load {without} --include-path {folder / 'tasks'} --tasks choices --apply-chat-template",
            "has no chat template; name one with --chat-template",
        ),
        (load, "nothing to evaluate; name a text with --data-path, or --tasks of the harness"),
        (f"{load} --data-path x --limit 3", "--limit is for tasks; name some with --tasks, or leave it out"),
    ):
        assert evaluate(flags.split()) == 2, flags
        error = capsys.readouterr().err
        assert words in error, error
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    assert evaluate(f"{own} --tasks choices".split()) == 2
    assert capsys.readouterr().err == "lm_eval is not installed; pip install 'megatronish[eval]'\n"
