"""Tests of a language model in three lines: what it writes, what it learns, what it saves, and what it refuses."""

from pathlib import Path

import pytest
from chat_models import write_chat_model
from family_templates import QWEN_3

from megatronish import LanguageModel
from megatronish.commands.language_model import words_of
from megatronish.core.errors import UserError

ANSWER = "the answer is blue"
CHATS = [{"messages": [{"role": "user", "content": "colour"}, {"role": "assistant", "content": ANSWER}]}] * 32


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("base") / "model")


def test_a_model_learns_an_answer_and_takes_it_along(base: Path, tmp_path: Path) -> None:
    given = {"train_iters": 60, "lr": 2e-2, "seq_length": 64, "micro_batch_size": 4, "global_batch_size": 8}
    with LanguageModel.load(base) as model:
        assert repr(model) == f"LanguageModel('{base}')"
        before = model.chat("colour", temperature=0, num_tokens=20)
        tuned = model.finetune(CHATS, run_dir=tmp_path / "run", **given)
        assert model.chat("colour", temperature=0, num_tokens=20) == before != ANSWER
    with tuned:
        assert tuned.chat("colour", temperature=0, num_tokens=20).strip() == ANSWER
        saved = tuned.save(tmp_path / "saved")
    with LanguageModel.load(saved) as again:
        assert again.chat([{"role": "user", "content": "colour"}], temperature=0, num_tokens=20).strip() == ANSWER


@pytest.mark.processes
def test_an_adapter_is_learned_on_two_ranks_and_merged(base: Path, tmp_path: Path) -> None:
    given = {"train_iters": 2, "lr": 2e-2, "seq_length": 64, "micro_batch_size": 4, "global_batch_size": 8}
    model = LanguageModel.load(base)
    with model.finetune(CHATS, run_dir=tmp_path / "run", adapter_type="lora", tp=2, **given) as tuned:
        assert repr(tuned) == f"LanguageModel('{base}', adapter='{tmp_path / 'run'}')"
        adapted = tuned.generate(["one", "two"], temperature=0, num_tokens=6)
        with pytest.raises(UserError, match="a model with an adapter is not taught further"):
            tuned.finetune(CHATS, run_dir=tmp_path / "other")
        saved = tuned.save(tmp_path / "saved")
    with LanguageModel.load(saved) as merged:
        assert merged.generate(["one", "two"], temperature=0, num_tokens=6) == adapted
        assert merged.generate("two", temperature=0, num_tokens=6) == adapted[1]


def test_what_is_no_option_is_refused_by_name(base: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="tensor_model_parallel_size is not an option of a model in one process"):
        LanguageModel.load(base, tensor_model_parallel_size=2)
    with LanguageModel.load(base) as model:
        for wrong, told in (
            ({"temprature": 1}, "temprature is not an option of a text; there are num_tokens, temperature"),
            ({"num_tokens": -1}, "num_tokens=-1 must not be negative"),
            ({"top_p": 0}, "--top-p 0 must be above 0"),
        ):
            with pytest.raises(UserError, match=told):
                model.generate("text", **wrong)
        with pytest.raises(UserError, match="there are no chats to learn from"):
            model.finetune([], run_dir=tmp_path / "run")
        with pytest.raises(UserError, match="--train-itres is not a flag"):
            model.finetune(CHATS, run_dir=tmp_path / "run", train_itres=2)
        with pytest.raises(UserError, match="the messages cannot be answered"):
            model.chat([{"role": "user", "content": "x" * 3000}])


def test_messages_are_read_as_those_of_chats_to_learn_from(tmp_path: Path) -> None:
    """Calls of tools too, whose arguments are a JSON text for OpenAI's clients."""
    with LanguageModel.load(write_chat_model(tmp_path / "model", template=QWEN_3)) as model:
        asked = {"role": "user", "content": "Weather?"}
        written = []
        for arguments in ('{"x": 1}', {"x": 1}):
            call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
            messages = [asked, {"role": "assistant", "content": None, "tool_calls": [call]}, asked]
            written.append(model.chat(messages, temperature=0, num_tokens=8))
        assert written[0] == written[1]
        assert model.chat([{**asked, "tool_calls": None}], temperature=0, num_tokens=8)
        with pytest.raises(UserError, match="the messages cannot be answered: message 1 has the role None"):
            model.chat([{"content": "Weather?"}])


def test_keywords_become_flags() -> None:
    assert words_of({"lr": 1e-4, "bf16": True, "pack_samples": False, "data_path": ["a", "b"], "save": None}) == [
        *("--lr", "0.0001", "--bf16", "--no-pack-samples", "--data-path", "a", "b")
    ]
