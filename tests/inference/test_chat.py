"""Tests of chats on the terminal and of sessions: adapters by name, layouts, what ends an answer, what is dropped."""

import json
import os
import signal
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from chat_models import IM, write_adapter, write_chat_model
from chat_tokenizers import said
from jobs import Finished, tiny, train_on_ranks
from ranks import run_ranks, wait_until
from scripts import open_pipe, run_script, started_script
from sweeps import further, some_of

from megatronish.commands.main import COMMANDS
from megatronish.core.layout import Layout
from megatronish.inference.chat import ChatPrompts
from megatronish.inference.generate import Sampling
from megatronish.inference.load import find_trained, load_found, load_model
from megatronish.inference.session import Continuation, Session
from megatronish.launch.place import Place
from megatronish.parallel.mesh import Mesh
from megatronish.tokenizer.build import build_tokenizer

chat = COMMANDS["chat"].main()
generate = COMMANDS["generate"].main()

PROMPTS = ((5, 6, 7), (8, 9))
END = 259
GREEDY = "--num-tokens 12 --temperature 0 --device cpu"


class Models(NamedTuple):
    """Folders of a model and of two adapters of it."""

    base: Path
    adapters: dict[str, Path]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    adapters = {name: write_adapter(folder / name, seed=seed) for seed, name in enumerate("ab", 1)}
    return Models(write_chat_model(folder / "base"), adapters)


def prompts_of(folder: Path, *, seq_length: int = 2048, template: str | None = None) -> ChatPrompts:
    found = find_trained(folder)
    return ChatPrompts.of(found, build_tokenizer(found.description.data), template=template, seq_length=seq_length)


def texts_with(session: Session, adapter: str | None) -> list[list[int]]:
    texts = [list[int]() for _ in PROMPTS]
    for number, token in session.generate(Continuation(PROMPTS, 6, adapter=adapter, sampling=Sampling(0.0))):
        if token is not None:
            texts[number].append(token)
    return texts


def in_one_session(place: Place, models: Models, layout: Layout) -> dict[str | None, list[list[int]]]:
    """Texts with each adapter, switched in one process; on ranks other than the main one, nothing."""
    mesh = Mesh.start(layout, rank=place.rank, init_method=place.rendezvous)
    found = find_trained(models.base, adapters=models.adapters)
    session = Session(load_found(found, mesh, dtype=torch.float32), mesh, 64)
    if not mesh.is_main:
        session.follow()
        return {}
    texts = {name: texts_with(session, name) for name in ("a", None, "b", "a")}
    session.close()
    return texts


@pytest.mark.parametrize("layout", [further(Layout()), further(Layout(tp=2)), Layout(tp=2, pp=2)], ids=str)
def test_adapters_that_are_switched_write_what_each_writes_alone(models: Models, layout: Layout) -> None:
    texts = run_ranks(layout.world_size, in_one_session, models, layout)[0]
    folders: dict[str | None, Path | None] = {None: None, **models.adapters}
    mesh = Mesh.start()
    for name, folder in folders.items():
        alone = Session(load_model(models.base, adapter=folder), mesh, 64)
        assert texts_with(alone, "adapter" if folder else None) == texts[name], name
    assert len({str(each) for each in texts.values()}) == 3


def test_a_shared_base_is_in_memory_once(models: Models) -> None:
    found = find_trained(models.base, adapters=models.adapters)
    both = load_found(found, Mesh.start(), dtype=torch.float32).model
    alone = load_model(models.base).model
    extra = sum(p.numel() for p in both.parameters()) - sum(p.numel() for p in alone.parameters())
    of_one = sum(
        p.numel()
        for name, p in load_model(models.base, adapter=models.adapters["a"]).model.named_parameters()
        if ".adapters." in name
    )
    assert extra == 2 * of_one


@pytest.mark.long
def test_generation_applies_the_adapter_of_this_name(models: Models, capsys: pytest.CaptureFixture[str]) -> None:
    def written(flags: str) -> str:
        assert generate([*f"--load {models.base} {GREEDY} --prompt x".split(), *flags.split()]) == 0
        return capsys.readouterr().out

    both = f"--adapter {models.adapters['a']} --adapter second={models.adapters['b']}"
    first, second, none = (written(f"--adapter {each}") for each in models.adapters.values()), written(""), ""
    a, b = first
    assert (written(both), written(f"{both} --use-adapter second")) == (a, b)
    assert written(f"{both} --use-adapter none") == second
    assert len({a, b, second, none}) == 4


def conversation(folder: Path, models: Models, lines: str, flags: str = "") -> Finished:
    """`tools/chat.py` with lines through a pipe."""
    words = ["tools/chat.py", "--load", models.base, *GREEDY.split()]
    for name, path in models.adapters.items():
        words += ["--adapter", f"{name}={path}"]
    return run_script([*words, *flags.split()], folder, text=lines)


def test_a_chat_through_pipes_is_the_same_in_every_layout(tmp_path: Path, models: Models) -> None:
    lines = "héllo\n\n/adapter b\nagain\n/adapter none\n/reset\nhéllo\n/adapter c\n/help\n"
    one = conversation(tmp_path, models, lines)
    assert one.status == 0, one.errors
    told = one.errors.splitlines()
    # Two notes come first: adapters in PEFT's format do not record their base's weights.
    first = "with the adapter a; /reset forgets the chat, /adapter NAME (or none) changes the adapter, /quit ends"
    assert any(line.endswith(first) for line in told[:3]), told
    assert "adapter c is not loaded; there are a, b and none" in told
    assert any(line.startswith("/help is no command") for line in told)
    four = conversation(tmp_path, models, f"{lines}/quit\nnot read\n", "--tp 2 --pp 2")
    assert (four.status, four.output) == (0, one.output), four.errors


@pytest.mark.parametrize("layout", some_of(["", "--tp 2"], ["--tp 2"]))
def test_ctrl_c_stops_the_answer_and_not_the_chat(tmp_path: Path, models: Models, layout: str) -> None:
    words = ["tools/chat.py", "--load", models.base, "--num-tokens", 2000, "--device", "cpu", *layout.split()]
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with started_script(words, tmp_path, pipe=pipe) as chat, open_pipe(pipe, chat) as lines:
        print("hello", file=lines, flush=True)
        assert wait_until(lambda: chat.output != "", timeout=60), "the answer has not begun"
        assert chat.process.pid is not None
        os.killpg(chat.process.pid, signal.SIGINT)  # as a terminal does: the launcher and all ranks
        assert wait_until(lambda: chat.errors.count("\n") == 2, timeout=60)
        first, second = chat.errors.splitlines()
        assert "/quit ends" in first and second == "stopped"
        time.sleep(0.2)
        os.killpg(chat.process.pid, signal.SIGINT)  # at the prompt
        assert wait_until(lambda: chat.errors.count("\n") == 4, timeout=60)
        third, fourth = chat.errors.splitlines()[2:]
        assert third == "" and fourth.startswith("/quit, or the end of the input (Ctrl-D), ends")
        print("/reset", file=lines)
        lines.close()
        assert chat.wait() == 0
        assert chat.errors.splitlines()[4:] == ["the chat begins again"]


def test_an_answer_ends_where_the_template_or_the_model_says(tmp_path: Path, models: Models) -> None:
    assert prompts_of(models.base).stops == {257, END}
    other = write_chat_model(tmp_path / "other")
    (other / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 257]}))
    assert prompts_of(other).stops == {7, 257, END}


def test_a_prompt_is_the_template_s_and_control_tokens_in_messages_are_text(models: Models) -> None:
    prompts = prompts_of(models.base)
    tokenizer = build_tokenizer(find_trained(models.base).description.data)
    messages = said("a", "b", f"c{IM[1]}", system="s")["messages"]
    text = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    expected = tokenizer.encode_marked(text) + tokenizer.encode_marked("<|im_start|>user\nc")
    expected += tokenizer.encode(IM[1]) + tokenizer.encode_marked("<|im_end|>\n<|im_start|>assistant\n")
    assert prompts.encode(messages) == expected


def test_the_oldest_turns_are_dropped_and_the_system_stays(models: Models) -> None:
    messages = said("a" * 50, "b" * 50, "c" * 50, "d" * 50, "e", system="s")["messages"]
    whole = len(prompts_of(models.base).encode(messages))
    for seq_length, left in ((whole + 20, "sabcde"), (whole + 19, "scde"), (120, "se")):
        prompt = prompts_of(models.base, seq_length=seq_length).fitted(messages, num_tokens=20)
        assert "".join(message["content"][0] for message in prompt.messages) == left
        assert len(prompt.tokens) <= seq_length - 20
    with pytest.raises(
        ValueError, match=r"the messages have .* tokens, and the model sees 30 with its answer; shorten"
    ):
        prompts_of(models.base, seq_length=30).fitted(messages, num_tokens=20)


def test_a_chat_says_what_it_forgets(tmp_path: Path, models: Models) -> None:
    lines = "".join(f"{'x' * 40} {number}\n" for number in range(3)) + "y" * 300 + "\nz\n"
    done = conversation(tmp_path, models, lines, "--seq-length 200 --system s")
    told = done.errors
    assert done.status == 0
    assert "the oldest 2 messages were dropped: the model sees 200 tokens with its answer" in told
    assert "and the model sees 200 with its answer; shorten them" in told
    assert done.output.count("\n") >= 4


def test_a_run_chats_with_the_template_that_it_was_trained_with(tmp_path: Path, models: Models) -> None:
    plain = write_chat_model(tmp_path / "plain", template=None)
    (tmp_path / "chats.jsonl").write_text(json.dumps(said("a", "b")) + "\n")
    flags = (
        f"--load-hf {plain} --dataset-type chat --data-path {tmp_path / 'chats.jsonl'} --chat-template chatml "
        "--split 1,0,0 --seq-length 64 --micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1e-3 "
        f"--eval-iters 0 --device cpu --adapter-type lora --lora-rank 2 --run-dir {tmp_path / 'run'}"
    )
    train_on_ranks(flags.split())
    with_adapter = find_trained(plain, adapters={"run": tmp_path / "run"})
    tokenizer = build_tokenizer(with_adapter.description.data)
    own = ChatPrompts.of(with_adapter, tokenizer, template=None, seq_length=64)
    assert own.encode(said("x")["messages"]) == prompts_of(models.base).encode(said("x")["messages"])


def test_mistakes_are_one_sentence(tmp_path: Path, models: Models, capsys: pytest.CaptureFixture[str]) -> None:
    without = write_chat_model(tmp_path / "without", template=None)
    lost = write_chat_model(tmp_path / "lost")
    (lost / "tokenizer.json").unlink()
    wide = write_adapter(tmp_path / "wide", seed=1, hidden=32)
    a = models.adapters["a"]
    train_on_ranks(tiny(tmp_path / "numbers", "--train-iters 1"))
    for flags, words in (
        (f"--load {without}", f"the tokenizer in {without} has no chat template; name one with --chat-template"),
        (f"--load {lost}", f"{lost} has no tokenizer.json and no tokenizer.model; copy the model's there"),
        (f"--load {tmp_path / 'numbers'}", "a tokenizer of the kind NullTokenizer has no control tokens for chats"),
        (f"--load {models.base} --chat-template nope", "--chat-template nope is not known; name one of"),
        (f"--load {models.base} --adapter {wide}", "wide"),
        (f"--load {models.base} --adapter x={tmp_path / 'none'}", "none does not exist; name the folder of a run"),
        (f"--load {models.base} --adapter {a} --adapter {a}", "has the name a again; give each one its own"),
        (f"--load {models.base} --adapter none={a}", "has the name 'none'; give it one without spaces"),
        (f"--load {models.base} --num-tokens 0", "--num-tokens 0 must be at least 1; for example 512"),
        (f"--load {models.base} --top-p 2", "--top-p 2.0 must be above 0 and at most 1"),
    ):
        assert chat([*flags.split(), "--device", "cpu"]) == 2, flags
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1, error


def test_an_adapter_of_another_base_is_refused(
    tmp_path: Path, models: Models, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (
        f"--load-hf {models.base} --mock-data --seq-length 32 --micro-batch-size 1 --global-batch-size 1 --lr 1e-3 "
        f"--train-iters 1 --eval-iters 0 --device cpu --adapter-type lora --lora-rank 2 --run-dir {tmp_path / 'run'}"
    )
    train_on_ranks(flags.split())
    other = write_chat_model(tmp_path / "other", seed=5)
    assert chat(f"--load {other} --adapter {tmp_path / 'run'} --device cpu".split()) == 2
    error = capsys.readouterr().err
    assert "was trained with the weights" in error and "name the model that it was trained with" in error
    assert chat(f"--load {tmp_path / 'run'} --device cpu".split()) == 2
    assert "holds the adapters of" in capsys.readouterr().err
