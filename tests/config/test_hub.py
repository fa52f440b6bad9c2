"""Tests of names of Hugging Face's hub, against a server of this machine that answers as the hub does."""

import hashlib
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import pytest
from chat_tokenizers import said, save_tokenizer, write_lines
from jobs import Finished, call_main, started
from safetensors.torch import save_file
from test_load_hf import LLAMA, llama_tensors

from megatronish.commands.main import ended, run
from megatronish.config.hub import data_files, hub_name, local_model, name_of

COMMIT = "0123456789abcdef0123456789abcdef01234567"
RUNS_CODE = {"pytorch_model.bin": b"a pickle", "modeling_evil.py": b"code", "original/model.safetensors": b"other"}


class Hub(NamedTuple):
    """A hub with a model and a data set; `asked` are the paths that it was asked for."""

    url: str
    asked: list[str]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder, ["<|im_start|>", "<|im_end|>"])
    (folder / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": 300}))
    tensors = llama_tensors()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name].new_ones(300, tensors[name].shape[1])
    save_file(tensors, folder / "model.safetensors")
    write_lines(folder / "train.jsonl", [said("Hi?", "Well.")] * 80)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    data = {"data/train.jsonl": files.pop("train.jsonl"), "data/test.jsonl": b"{}\n", "README.md": b"read me"}
    save_file(dict(list(tensors.items())[:3]), folder / "model-00001-of-00002.safetensors")
    save_file(dict(list(tensors.items())[3:]), folder / "model-00002-of-00002.safetensors")
    shards = [f"model-0000{1 if number < 3 else 2}-of-00002.safetensors" for number in range(len(tensors))]
    index = {"metadata": {}, "weight_map": dict(zip(tensors, shards, strict=True))}
    sharded = {name: (folder / name).read_bytes() for name in set(shards)} | {name: files[name] for name in files}
    del sharded["model.safetensors"]
    sharded["model.safetensors.index.json"] = json.dumps(index).encode()
    repositories = {
        "models/org/sharded": sharded,
        "models/org/tiny": files | RUNS_CODE,
        "datasets/org/chats": data,
        "models/org/pickled": RUNS_CODE,
    }
    with serving(repositories) as found:
        yield found


@contextmanager
def serving(repositories: dict[str, dict[str, bytes]]) -> Iterator[Hub]:
    """The hub with these repositories, {kind/org/name: {file: content}}, on a free port."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(self.path.partition("?")[0])
            asked.append(f"{self.command} {path}")
            status, content, headers = answered(repositories, path)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Hub(f"http://127.0.0.1:{server.server_port}", asked)
    server.shutdown()
    server.server_close()


def answered(repositories: dict[str, dict[str, bytes]], path: str) -> tuple[int, bytes, dict[str, str]]:
    """Status, content and headers of an answer of the hub."""
    parts = path.strip("/").split("/")
    if parts[0] == "api":
        if parts[1] not in ("models", "datasets"):
            return 404, b"", {}
        kind, org, name, *rest = parts[1:]
        files = repositories.get(f"{kind}/{org}/{name}")
        if name in ("private", "gated"):
            return (401 if name == "private" else 403), b"{}", {"X-Error-Code": "GatedRepo" if name == "gated" else ""}
        if files is None:
            return 404, b"{}", {"X-Error-Code": "RepoNotFound"}
        if rest[1:] not in ([], ["main"], [COMMIT]):
            return 404, b"{}", {"X-Error-Code": "RevisionNotFound"}
        siblings = [{"rfilename": file} for file in files]
        return 200, json.dumps({"id": f"{org}/{name}", "sha": COMMIT, "siblings": siblings}).encode(), {}
    kind = "models"
    if parts[0] == "datasets":
        kind, *parts = parts
    org, name, _resolve, _revision, *file = parts
    content = repositories[f"{kind}/{org}/{name}"].get("/".join(file))
    if content is None:
        return 404, b"", {"X-Error-Code": "EntryNotFound"}
    return 200, content, {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT}


def called(url: str, home: Path, *words: str | Path, **environ: str) -> Finished:
    """`megatronish WORDS` with its hub there and its cache in `home`."""
    environ = {"HF_ENDPOINT": url, "HF_HOME": str(home / "hf"), "HF_HUB_DISABLE_XET": "1", **environ}
    return call_main([str(word) for word in words], main=main_of_command, **environ)


def main_of_command(argv: list[str]) -> int:
    return ended(lambda: run(argv))


def test_a_run_starts_from_a_model_and_chats_of_the_hub_and_resumes_without_it(hub: Hub, tmp_path: Path) -> None:
    from_hub = "--load-hf org/tiny --dataset-type chat --train-data-path org/chats --chat-template chatml"
    argv = ["--train-iters", "1", "--lr", "0.1", "--micro-batch-size", "1", "--seq-length", "64", "--device", "cpu"]
    found = called(hub.url, tmp_path, "finetune", *argv, *from_hub.split(), "--run-dir", tmp_path / "run")
    assert found.status == 0, found
    assert f"load_hf: org/tiny@{COMMIT}" in found.output
    assert not [path for path in hub.asked if any(name in path for name in RUNS_CODE)]
    text = (tmp_path / "run" / "config.toml").read_text()
    assert f'load_hf = "org/tiny@{COMMIT}"' in text
    assert f'train_data_path = ["org/chats@{COMMIT}:data/train.jsonl"]' in text
    assert 'tokenizer_model = "{here}/tokenizer"' in text
    again = ["pretrain", "--config", tmp_path / "run" / "config.toml", "--train-iters", "2"]
    number = len(hub.asked)
    found = called("http://127.0.0.1:9", tmp_path, *again)
    assert found.status == 0 and len(hub.asked) == number, found
    assert "continuing from" in found.output and "changed since: training.train_iters 1 -> 2\n" in found.output


def test_a_run_starts_from_a_model_whose_weights_are_in_several_files(hub: Hub, tmp_path: Path) -> None:
    argv = (
        "--load-hf org/sharded --mock-data --train-iters 1 --lr 0.1 --micro-batch-size 1 --seq-length 64 --device cpu"
    )
    found = called(hub.url, tmp_path, "pretrain", *argv.split(), "--run-dir", tmp_path / "run")
    assert found.status == 0, found


def test_a_dry_run_fetches_no_weights(hub: Hub, tmp_path: Path) -> None:
    number, argv = len(hub.asked), ["--train-iters", "1", "--lr", "0.1", "--micro-batch-size", "1", "--device", "cpu"]
    found = called(hub.url, tmp_path, "pretrain", "--load-hf", "org/tiny", "--mock-data", "--dry-run", *argv)
    assert found.status == 0, found
    assert hub.asked[number:] and not [path for path in hub.asked[number:] if "model.safetensors" in path]


def test_a_model_of_the_hub_is_converted_and_generates(hub: Hub, tmp_path: Path) -> None:
    save = tmp_path / "ours"
    found = called(
        hub.url, tmp_path, "convert", "--from", "hf", "--to", "megatronish", "--load", "org/tiny@main", "--save", save
    )
    assert found.status == 0, found
    assert (save / "step_00000000" / "tokenizer" / "tokenizer.json").is_file()
    found = called(hub.url, tmp_path, "generate", "--load", "org/tiny", "--prompt", "a", "--num-tokens", "1")
    assert found.status == 0, found


def test_a_tokenizer_of_the_hub_makes_tokens_trains_on_them_and_generates(hub: Hub, tmp_path: Path) -> None:
    write_lines(tmp_path / "lines.jsonl", [{"text": "a text of some words"}] * 30)
    number, tokenizer = len(hub.asked), ["--tokenizer-model", "org/tiny"]
    written = ["--input", tmp_path / "lines.jsonl", "--output-prefix", tmp_path / "mine"]
    found = called(hub.url, tmp_path, "preprocess", *written, *tokenizer)
    assert found.status == 0 and (tmp_path / "mine_text_document.bin").is_file(), found
    argv = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 1 --lr 0.1"
    data = ["--train-iters", "1", "--device", "cpu", "--data-path", tmp_path / "mine_text_document", *tokenizer]
    found = called(hub.url, tmp_path, "pretrain", *argv.split(), *data, "--run-dir", tmp_path / "run")
    assert found.status == 0 and f"tokenizer_model: org/tiny@{COMMIT}" in found.output, found
    # The run folder has a copy of its own, and no weights of the repository were fetched for its tokenizer.
    assert 'tokenizer_model = "{here}/tokenizer"' in (tmp_path / "run" / "config.toml").read_text()
    assert (tmp_path / "run" / "tokenizer" / "tokenizer.json").is_file()
    files = [path.rpartition("/")[2] for path in hub.asked[number:]]
    assert "tokenizer.json" in files and "model.safetensors" not in files and "config.json" not in files
    told = ["--load", tmp_path / "run", "--prompt", "a", "--num-tokens", "1", *tokenizer]
    found = called(hub.url, tmp_path, "generate", *told)
    assert found.status == 0, found


def test_a_tokenizer_that_the_hub_does_not_have_is_told_in_a_sentence(hub: Hub, tmp_path: Path) -> None:
    found = called(hub.url, tmp_path, "pretrain", "--tokenizer-model", "org/gone", "--data-path", "text", "--lr", "1")
    assert found.status == 2 and "Traceback" not in found.errors, found
    assert "--tokenizer-model org/gone does not exist here and is no model of" in found.errors


def test_made_up_data_ask_for_no_tokenizer(hub: Hub, tmp_path: Path) -> None:
    number, argv = len(hub.asked), ["--mock-data", "--vocab-size", "64", "--dry-run", "--device", "cpu"]
    words = ["--config", "quick", "--tokenizer-type", "huggingface", "--tokenizer-model", "org/tiny", *argv]
    found = called(hub.url, tmp_path, "pretrain", *words)
    assert found.status == 0, found
    assert hub.asked[number:] == []


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("org/gone", "does not exist here and is no model of"),
        ("org/tiny@other", "org/tiny has no revision other"),
        ("org/private", "set HF_TOKEN to a token that may read it"),
        ("org/gated", "without its owner's consent"),
        ("org/pickled", "has no model.safetensors, and weights of other forms"),
    ],
)
def test_what_the_hub_does_not_give_is_told_in_a_sentence(hub: Hub, tmp_path: Path, name: str, told: str) -> None:
    found = called(hub.url, tmp_path, "pretrain", "--load-hf", name, "--mock-data", "--lr", "1", "--train-iters", "1")
    assert found.status == 2 and told in found.errors and "Traceback" not in found.errors, found


@pytest.mark.parametrize("environ", [{}, {"HF_HUB_OFFLINE": "1"}], ids=["no network", "offline"])
def test_without_a_network_the_command_that_downloads_is_named(tmp_path: Path, environ: dict[str, str]) -> None:
    found = called("http://127.0.0.1:9", tmp_path, "generate", "--load", "org/tiny@v1", "--prompt", "a", **environ)
    assert found.status == 2 and "Traceback" not in found.errors
    assert "hf download org/tiny --revision v1 --local-dir tiny" in found.errors


def test_without_the_library_the_command_that_downloads_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match="pip install huggingface_hub, or hf download org/chats --local-dir chats"):
        data_files("org/chats", "data_path", is_alone=True)


def set_environ(environ: dict[str, str]) -> None:
    os.environ.update(environ)


def print_folder(argv: list[str]) -> int:
    print(local_model(argv[0], flag="--load"))
    return 0


def test_ranks_of_one_machine_ask_once(hub: Hub, tmp_path: Path) -> None:
    environ = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1", "MASTER_PORT": "1"}
    number = len(hub.asked)
    with ExitStack() as stack:
        jobs = [
            stack.enter_context(
                started(["org/tiny"], tmp_path, main=print_folder, plant=set_environ, plant_args=(rank,))
            )
            for rank in ({**environ, "RANK": "0"}, {**environ, "RANK": "1"})
        ]
        assert [job.wait() for job in jobs] == [0, 0], jobs[0].told + jobs[1].told
        assert jobs[0].output == jobs[1].output
    asked = hub.asked[number:]
    assert len([path for path in asked if "/api/models/org/tiny" in path]) == 1
    assert len([path for path in asked if path.startswith("GET") and path.endswith("model.safetensors")]) == 1


@pytest.mark.parametrize("target", ["precious", "missing"])
def test_a_link_of_another_user_in_a_cache_of_both_costs_no_file(hub: Hub, tmp_path: Path, target: str) -> None:
    cache, home = tmp_path / "hf" / "hub", tmp_path / "home"
    for folder in (cache, home):
        folder.mkdir(parents=True)
    (home / "precious").write_text('{"": "precious"}')
    for ending in ("json", f"{os.getuid()}.json", f"{os.getuid()}.lock", f"{os.getuid()}.new"):
        (cache / f".megatronish-model--org--tiny.{ending}").symlink_to(home / target)
    number = len(hub.asked)
    found = called(hub.url, tmp_path, "generate", "--load", "org/tiny", "--prompt", "a", "--num-tokens", "1")
    assert found.status == 0 and len(hub.asked) > number, found
    assert (home / "precious").read_text() == '{"": "precious"}' and [*home.iterdir()] == [home / "precious"]
    record = cache / f".megatronish-model--org--tiny.{os.getuid()}.json"
    assert not record.is_symlink() and json.loads(record.read_text())[""]["commit"] == COMMIT


@pytest.mark.parametrize(
    "content", [b"[]", b"null", b"\xff", b"[" * 100_000, b"{"], ids=["a list", "nothing", "no text", "deep", "half"]
)
def test_a_record_that_is_none_costs_one_question(hub: Hub, tmp_path: Path, content: bytes) -> None:
    record = tmp_path / "hf" / "hub" / f".megatronish-model--org--tiny.{os.getuid()}.json"
    record.parent.mkdir(parents=True)
    record.write_bytes(content)
    found = called(hub.url, tmp_path, "generate", "--load", "org/tiny", "--prompt", "a", "--num-tokens", "1")
    assert found.status == 0, found
    assert json.loads(record.read_text())[""]["commit"] == COMMIT


@pytest.mark.skipif(os.getuid() != 0, reason="a file of another user needs root to be made")
def test_a_record_of_another_user_decides_nothing(hub: Hub, tmp_path: Path) -> None:
    record = tmp_path / "hf" / "hub" / f".megatronish-model--org--tiny.{os.getuid()}.json"
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps({COMMIT: {"commit": "f" * 40, "files": ["config.json"], "start": []}}))
    os.chown(record, 12345, 12345)
    found = called(hub.url, tmp_path, "generate", "--load", f"org/tiny@{COMMIT}", "--prompt", "a", "--num-tokens", "1")
    assert found.status == 0 and record.stat().st_uid == 0, found


def test_a_path_is_no_name_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for path in ("runs/typo", "model", "a/b/c", "/a/b", "./a", "../a", "data/my.model", "data/chats.jsonl", "s3://a/b"):
        assert hub_name(path) is None, path
    assert hub_name("org/name@refs/pr/1") == ("org/name", "refs/pr/1", None)
    assert hub_name("org/name-0.5B:a/b.jsonl") == ("org/name-0.5B", None, "a/b.jsonl")


def test_what_lies_in_the_cache_has_a_name() -> None:
    folder = f"/home/me/.cache/huggingface/hub/models--org--name/snapshots/{COMMIT}"
    assert name_of(folder) == f"org/name@{COMMIT}"
    assert hub_name(name_of(folder.replace("models", "datasets") + "/a/b.jsonl")) == ("org/name", COMMIT, "a/b.jsonl")
    assert name_of("/home/me/models/x") == "/home/me/models/x"
