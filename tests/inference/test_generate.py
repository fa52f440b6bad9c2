"""Tests of generation from a checkpoint of any layout: KV cache and batching do not change the text."""

import json
import math
import shutil
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from conversions import to_ours
from jobs import call_main, run_job, tiny, train_on_ranks, write_tokens
from paths import GOLDEN
from plain_model import VARIANTS, VOCABULARY, S, model_of
from ranks import run_ranks
from sweeps import some_of
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor

from megatronish.attention.cached import KeyValueCache
from megatronish.commands.generate import prepare, run
from megatronish.commands.inference_flags import GenerateArguments as Arguments
from megatronish.commands.main import COMMANDS
from megatronish.config.sections.training import AttentionBackend
from megatronish.core.errors import UserError
from megatronish.core.layout import Layout
from megatronish.inference import generate as module
from megatronish.inference.generate import Sampling, choose, generate
from megatronish.inference.load import load_model
from megatronish.inference.text_stream import TextStream
from megatronish.launch.place import Place
from megatronish.model.batch import MicroBatch
from megatronish.model.gpt import GPT
from megatronish.parallel.mesh import Mesh
from megatronish.parallel.pipeline.executor import Executor
from megatronish.tokenizer.plain import BytesTokenizer

HF = GOLDEN / "hf"
PROMPT = "def "
FLAGS = "--vocab-size 300 --exit-interval 3"  # more than bytes have: such tokens are left out of text
GREEDY = Sampling(temperature=0.0)
LLAMA = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --qk-layernorm "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 4 --window-size 6"
)
LATENT = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --qk-layernorm "
    "--multi-latent-attention --q-lora-rank 12 --kv-lora-rank 10 --qk-head-dim 6 --qk-pos-emb-head-dim 4 --v-head-dim 6"
)
MODELS = {
    "llama": LLAMA,
    "shared heads": f"{LLAMA.replace('--num-query-groups 4', '--num-query-groups 1')} --kv-channels 4",
    "latent": LATENT,
}


def bytes_in(folder: Path) -> Path:
    """Prefix of a pair of random bytes."""
    return write_tokens(folder / "bytes", vocab_size=257)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Flags that name random bytes."""
    return f"--tokenizer-type bytes --split 1,0,0 --data-path {bytes_in(tmp_path_factory.mktemp('data'))}"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, data: str) -> Path:
    """A run on four ranks, with a padded vocabulary."""
    run_dir = tmp_path_factory.mktemp("four") / "run"
    train_on_ranks(tiny(run_dir, f"{FLAGS} --tp 2 --pp 2 --make-vocab-size-divisible-by 128", data=data), world_size=4)
    return run_dir


class Seen(NamedTuple):
    """What followed each prompt, and [B, V] logits of every token (on ranks that had them)."""

    texts: list[list[int]]
    logits: list[Tensor]


def seen_of(model: GPT, prompts: Sequence[Sequence[int]], **options: Any) -> Seen:
    texts, logits = [list[int]() for _ in prompts], []

    def recorded(found: Tensor, *others: Any) -> Tensor:
        logits.append(found.clone())
        return choose(found, *others)

    with patch.object(module, "choose", recorded):
        for number, token in generate(model, prompts, **{"sampling": GREEDY, **options}):
            if token is not None:
                texts[number].append(token)
    return Seen(texts, logits)


def texts_of(model: GPT, prompts: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
    return seen_of(model, prompts, **options).texts


@torch.no_grad()
def logits_without_cache(model: GPT, tokens: Sequence[int]) -> Tensor:
    """[V], of the token after these, all of which run through the model by themselves."""
    ids = torch.tensor([tokens])
    places = torch.arange(len(tokens))[None]
    batch = MicroBatch(ids, ids, torch.ones_like(ids, dtype=torch.bool), places, torch.zeros(1).long())
    return model.logits(model.hidden(None, batch, step=None))[-1, 0, : model.vocab_size]


def written(capsys: pytest.CaptureFixture[str], load: Path, prompt: str = PROMPT, **arguments: Any) -> str:
    assert run(Arguments(load=load, prompt=(prompt,), **arguments)) == 0
    return capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize("lengths", [(1, 5, 9), (3, 3, 3), (4, S - 2, S + 5)], ids=str)
@pytest.mark.parametrize(
    "variant",
    [
        *("gpt2", "llama", "mistral", "qwen", "no positions", "bloom", "gpt-oss", "off by one", "fixed blocks"),
        *("bigbird", "hunyuan", "rope longrope"),
    ],
)
def test_what_is_kept_of_the_past_changes_no_logit(variant: str, lengths: tuple[int, ...]) -> None:
    model = model_of(VARIANTS[variant])
    numbers = torch.Generator().manual_seed(3)
    prompts = [torch.randint(VOCABULARY, (length,), generator=numbers).tolist() for length in lengths]
    seen = seen_of(model, prompts, num_tokens=8, seq_length=S)
    assert [len(text) for text in seen.texts] == [8, 8, 8]
    for row, (prompt, text) in enumerate(zip(prompts, seen.texts, strict=True)):
        for place, logits in enumerate(seen.logits):
            alone = logits_without_cache(model, [*prompt, *text[:place]][-S:])
            torch.testing.assert_close(logits[row], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["fused_softmax", "unfused"])
@pytest.mark.parametrize("variant", ["llama", "mistral", "alibi in a window", "gpt-oss", "bigbird"])
def test_the_past_is_the_same_for_every_backend_of_attention(variant: str, backend: AttentionBackend) -> None:
    model, prompts = model_of(VARIANTS[variant]), [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3]]
    before = seen_of(model, prompts, num_tokens=8, seq_length=S)
    other = model_of(VARIANTS[variant], attention_backend=backend)
    after = seen_of(other, prompts, num_tokens=8, seq_length=S)
    assert after.texts == before.texts
    for a, b in zip(after.logits, before.logits, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_token_runs_alone_until_all_that_the_model_sees_is_full() -> None:
    model = model_of(VARIANTS["mistral"])
    widths: list[int] = []
    model.embedding.register_forward_hook(lambda _module, inputs, _out: widths.append(inputs[0].batch.tokens.shape[1]))
    texts_of(model, [[1] * 4, [2] * 6], num_tokens=S - 6, seq_length=S)
    assert widths == [6, *[1] * (S - 7)]
    widths.clear()
    texts_of(model, [[1] * (S - 2)], num_tokens=6, seq_length=S)
    assert widths == [S - 2, 1, 1, S, S, S]


def test_a_text_that_outgrows_the_context_of_longrope_runs_once_more() -> None:
    model = model_of(VARIANTS["rope longrope"])
    widths: list[int] = []
    model.embedding.register_forward_hook(lambda _module, inputs, _out: widths.append(inputs[0].batch.tokens.shape[1]))
    texts_of(model, [[1] * 12, [2] * 14], num_tokens=6, seq_length=S)
    assert widths == [14, 1, 1, 17, 1, 19]
    widths.clear()
    texts_of(model, [[1] * 17], num_tokens=3, seq_length=S)
    assert widths == [17, 1, 1]


def test_a_cache_forgets_the_rows_of_texts_that_ended() -> None:
    cache = KeyValueCache(4)
    k, v = torch.randn(2, 3, 1, 5), torch.randn(2, 3, 1, 5)
    cache.extended(k, v, layer=7)
    cache.advance(2)
    cache.keep([0, 2])
    keys, values = cache.extended(k[:1, :2], v[:1, :2], layer=7)
    assert keys.equal(torch.cat((k[:, [0, 2]], k[:1, :2])))
    assert values.equal(torch.cat((v[:, [0, 2]], v[:1, :2])))
    assert not cache.is_full


def test_a_text_depends_on_no_other_prompt_and_ends_by_itself() -> None:
    model = model_of(VARIANTS["mistral"])
    prompts = [[1], [2, 3, 4, 5], [6, 7], [2, 3, 4, 5], [8] * 15]
    options = {"num_tokens": 12, "seq_length": S, "sampling": Sampling(0.9, top_k=30, top_p=0.95, seed=4)}
    whole = texts_of(model, prompts, **options)
    assert whole[1] != whole[3], "the same prompt again is another text"
    eod = whole[2][3]
    ended = [text[: text.index(eod)] if eod in text else text for text in whole]
    assert len(set(map(len, ended))) > 1
    for batch_size in (1, 2, 5):
        assert texts_of(model, prompts, **options, stops={eod}, batch_size=batch_size) == ended
    assert texts_of(model, prompts[::-1], **options, stops={eod})[::-1] != ended  # the two equal ones changed places
    assert [texts_of(model, [prompt], **options, stops={eod})[0] for prompt in prompts[:3]] == ended[:3]
    assert texts_of(model, prompts[:1], **{**options, "sampling": Sampling(0.9, seed=5)}) != whole[:1]


def test_an_end_of_document_that_comes_first_leaves_nothing() -> None:
    model = model_of(VARIANTS["gpt2"])
    (text,) = texts_of(model, [[1, 2]], num_tokens=3, seq_length=S)
    assert texts_of(model, [[1, 2]], num_tokens=3, seq_length=S, stops={text[0]}) == [[]]
    assert texts_of(model, [[1, 2]], num_tokens=0, seq_length=S) == [[]]


@pytest.mark.long
def test_tokens_are_chosen_as_often_as_is_likely() -> None:
    probabilities = torch.tensor([0.1, 0.5, 0.15, 0.25], dtype=torch.float64)
    count = 2**18
    chances = torch.rand(count, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    logits = probabilities.log().repeat(count, 1)

    def shares(**options: Any) -> list[float]:
        counts = torch.bincount(choose(logits, chances, Sampling(**options)), minlength=4)
        return (counts / count).tolist()

    assert shares() == pytest.approx([0.1, 0.5, 0.15, 0.25], abs=2e-3)
    assert shares(top_k=2) == pytest.approx([0, 2 / 3, 0, 1 / 3], abs=2e-3)
    assert shares(top_p=0.76) == pytest.approx([0, 5 / 9, 1.5 / 9, 2.5 / 9], abs=2e-3)
    assert shares(temperature=0.5) == pytest.approx((probabilities**2 / (probabilities**2).sum()).tolist(), abs=2e-3)
    assert (
        shares(temperature=0.0) == shares(top_k=1) == shares(top_p=1e-9) == shares(temperature=1e-300) == [0, 1, 0, 0]
    )
    lucky = torch.tensor([[math.nextafter(1.0, 0.0), 0, math.nextafter(1.0, 0.0), 0]], dtype=torch.float64)
    assert choose(logits[:1], lucky, Sampling(top_k=3)).tolist() == [2]
    assert choose(logits[:1], torch.zeros_like(lucky), Sampling(top_k=1)).tolist() == [1]


def test_logits_that_are_rounded_otherwise_seldom_change_a_choice() -> None:
    numbers = torch.Generator().manual_seed(2)
    logits = torch.randn(20, generator=numbers).repeat_interleave(50).repeat(500, 1)  # 50 tokens of each are as good
    rounded = logits + 1e-6 * torch.randn(logits.shape, generator=numbers)
    chances = torch.rand(logits.shape, dtype=torch.float64, generator=numbers)
    assert choose(logits, chances, Sampling()).equal(choose(rounded, chances, Sampling()))


def rank_of(place: Place, load: Path, layout: Layout, prompts: list[list[int]]) -> Seen:
    mesh = Mesh.start(layout, rank=place.rank, init_method=place.rendezvous)
    trained = load_model(load, mesh=mesh)
    return seen_of(trained.model, prompts, num_tokens=12, seq_length=trained.description.seq_length, mesh=mesh)


@pytest.mark.parametrize("kind", some_of(["gpt2", *MODELS], ["gpt2", "latent"]))
def test_every_layout_writes_what_one_process_writes(trained: Path, data: str, tmp_path: Path, kind: str) -> None:
    load = trained
    if kind != "gpt2":
        load = tmp_path / "run"
        train_on_ranks(tiny(load, f"{FLAGS} {MODELS[kind]}", data=data))
    prompts = [[65], [66, 67, 68], list(range(97, 97 + 14))]  # the last one outgrows the model's 16 tokens
    one = seen_of(load_model(load).model, prompts, num_tokens=12, seq_length=16)
    for layout in (Layout(tp=4) if kind == "shared heads" else Layout(tp=2), Layout(pp=2), Layout(tp=2, pp=2)):
        ranks = run_ranks(layout.world_size, rank_of, load, layout, prompts)
        assert [rank.texts for rank in ranks] == [one.texts] * layout.world_size
        (chooser,) = [rank for rank in ranks if rank.logits]
        torch.testing.assert_close(torch.stack(chooser.logits), torch.stack(one.logits), rtol=1e-5, atol=1e-5)


def batches_of(place: Place, load: Path, prompts: list[list[int]], options: dict[str, Any]) -> tuple[Seen, list[int]]:
    """With two stages: what followed, and how many micro-batches each run of the executor had."""
    mesh = Mesh.start(Layout(pp=2), rank=place.rank, init_method=place.rendezvous)
    run, sizes = Executor.run, list[int]()

    def counted(executor: Executor, actions: Any, micro_batches: Any, **others: Any) -> dict[str, Tensor]:
        sizes.append(len(micro_batches))
        return run(executor, actions, micro_batches, **others)

    with patch.object(Executor, "run", counted):
        return seen_of(load_model(load, mesh=mesh).model, prompts, mesh=mesh, **options), sizes


def test_as_many_batches_as_stages_are_in_the_pipeline_and_an_ended_one_makes_room(trained: Path) -> None:
    prompts = [[65], [66, 67, 68], [69] * 14, [70] * 3, [71, 72]]
    options: dict[str, Any] = {"num_tokens": 12, "seq_length": 16, "sampling": Sampling(0.9, seed=5), "batch_size": 1}
    model = load_model(trained).model
    stop = texts_of(model, prompts, **options)[0][4]  # the first text ends early
    options["stops"] = {stop}
    one = seen_of(model, prompts, **options)
    lengths = [min(len(text) + 1, 12) for text in one.texts]
    assert lengths[0] < 12
    for seen, sizes in run_ranks(2, batches_of, trained, prompts, options):
        assert seen.texts == one.texts
        assert sum(sizes) == sum(lengths)
        # Alone is only what is left when nothing waits.
        assert set(sizes[: sizes.index(1)]) == {2} and set(sizes[sizes.index(1) :]) == {1}


def test_the_same_seed_writes_the_same_text(capsys: pytest.CaptureFixture[str], trained: Path) -> None:
    first = written(capsys, trained, num_tokens=12, seed=3)
    assert first.startswith(PROMPT)
    assert written(capsys, trained / "checkpoints", num_tokens=12, seed=3, ckpt_step=3) == first
    assert written(capsys, trained / "checkpoints" / "step_00000003", num_tokens=12, seed=4) != first


def test_greedy_text_is_what_the_whole_model_finds_likeliest(
    capsys: pytest.CaptureFixture[str], trained: Path, tmp_path: Path, data: str
) -> None:
    model = load_model(trained).model
    prompt = list(PROMPT.encode())
    tokens = list(prompt)
    for _ in range(8):
        tokens.append(int(logits_without_cache(model, tokens).argmax()))
    assert texts_of(model, [prompt], num_tokens=8, seq_length=16) == [tokens[4:]]
    expected = BytesTokenizer().decode(tokens) + "\n"
    assert written(capsys, trained, num_tokens=8, temperature=0.0) == expected
    # As likely is only the likeliest.
    assert written(capsys, trained, num_tokens=8, top_k=1) == expected
    assert written(capsys, trained, num_tokens=8, top_p=1e-6) == expected
    for temperature in (1e-42, 1e-300):
        assert written(capsys, trained, num_tokens=8, temperature=temperature) == expected
    # One process, trained alike, has learned the same.
    train_on_ranks(tiny(tmp_path / "one", FLAGS, data=data))
    assert written(capsys, tmp_path / "one", num_tokens=8, temperature=0.0) == expected


def test_text_can_be_longer_than_what_the_model_sees_and_ends_with_a_document(trained: Path) -> None:
    model = load_model(trained).model
    prompt = list(b"0123456789")
    (long,) = texts_of(model, [prompt], num_tokens=20, seq_length=16)
    assert len(long) == 20
    again = texts_of(model, [[*prompt, *long[:15]]], num_tokens=5, seq_length=16)
    assert again == [long[15:]]  # of what lies before the last 16 tokens nothing is known
    assert texts_of(model, [prompt], num_tokens=20, seq_length=16, stops={long[4]}) == [long[: long.index(long[4])]]


def test_many_prompts_are_answered_in_a_file(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    file.write_text('{"text": "one"}\n\n{"text": "", "other": 1}\n{"text": "a prompt longer than 16 bytes"}\n')
    arguments = Arguments(load=trained, prompt=("zero", "\n"), prompts_file=file, num_tokens=5, batch_size=2)
    assert run(Arguments(**vars(arguments) | {"output": output})) == 0
    told = capsys.readouterr()
    assert not told.out
    assert "of 1 prompts the model sees the last 16 tokens alone" in told.err
    assert "what is beyond 16 tokens is written with the last 16 in view" in told.err
    assert "tokens/s" in told.err
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["prompt"] for line in lines] == ["zero", "\n", "one", "", "a prompt longer than 16 bytes"]
    assert all((line["ended"] == "length") == (line["num_tokens"] == 5) for line in lines)
    # On the terminal they are the same.
    assert run(arguments) == 0
    shown = capsys.readouterr().out
    assert shown == "".join(
        f"--- prompt {number} of 5\n{line['prompt']}{line['text']}\n" for number, line in enumerate(lines, 1)
    )
    # So they are alone, and a text file says the same.
    (tmp_path / "prompts.txt").write_text("one\n")
    assert run(Arguments(load=trained, prompts_file=tmp_path / "prompts.txt", num_tokens=5)) == 0
    assert capsys.readouterr().out == f"one{lines[2]['text']}\n"


def test_the_program_starts_its_own_ranks_and_they_write_the_same(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = written(capsys, trained, num_tokens=6, temperature=0.0)
    argv = f"--load {trained} --num-tokens 6 --temperature 0 --tp 2 --pp 2 --device cpu".split()
    generate = COMMANDS["generate"].main()
    done = run_job([*argv, "--prompt", PROMPT], tmp_path, main=generate)
    assert (done.status, done.output) == (0, expected), done
    assert "6 tokens in" in done.errors
    refused = run_job([*argv, "--tp", "5"], tmp_path, main=generate)
    assert refused.status == 2
    assert refused.errors.startswith("num_attention_heads=12 must be divisible by tensor_model_parallel_size=5; use ")
    unwritable = run_job([*argv, "--output", str(tmp_path / "no" / "out.jsonl")], tmp_path, main=generate)
    assert unwritable.status == 2
    assert "no/out.jsonl cannot be written: No such file or directory" in unwritable.errors


def test_a_character_is_shown_once_it_is_whole() -> None:
    stream = TextStream(BytesTokenizer().decode)
    assert [stream.add(byte) for byte in b"abc\xc3\xa9\xc3"] == ["a", "b", "c", "", "é", ""]
    assert stream.finish() == "\ufffd"
    assert stream.text == "abcé\ufffd"


def test_nothing_of_a_stop_string_is_shown() -> None:
    stream = TextStream(BytesTokenizer().decode, stop_strings=["END", "\n\n"])
    assert [stream.add(byte) for byte in b"xEy\nEN"] == ["x", "", "Ey", "", "\n", ""]
    assert (stream.add(ord("D")), stream.add(ord("z")), stream.finish()) == ("", "", "")
    assert stream.has_stopped and stream.text == "xEy\n"
    other = TextStream(BytesTokenizer().decode, stop_strings=["END"])
    assert "".join([*map(other.add, b"no EN"), other.finish()]) == "no EN" and not other.has_stopped


def test_a_text_ends_where_a_rank_says_so() -> None:
    model, prompts = model_of(VARIANTS["mistral"]), [[1], [2, 3]]
    whole = texts_of(model, prompts, num_tokens=6, seq_length=S)
    seen: list[int] = []

    def ends(number: int) -> bool:
        seen.append(number)
        return number == 1 and seen.count(1) == 3

    assert texts_of(model, prompts, num_tokens=6, seq_length=S, ends=ends) == [whole[0], whole[1][:2]]


def test_bf16_writes_too(capsys: pytest.CaptureFixture[str], trained: Path) -> None:
    assert written(capsys, trained, num_tokens=6, bf16=True).startswith(PROMPT)


def test_mistakes_are_told(tmp_path: Path, trained: Path) -> None:
    bad, empty = tmp_path / "bad.jsonl", tmp_path / "empty.txt"
    bad.write_text('{"text": "good"}\n{"text": 3}\n')
    empty.write_text("\n\n")
    for arguments, sentence in (
        (Arguments(load=tmp_path / "none"), f"{tmp_path}/none holds no checkpoint"),
        (Arguments(load=HF / "llama"), "llama has no tokenizer.json and no tokenizer.model; copy the model's there"),
        (
            Arguments(load=trained, use_adapter="a"),
            "adapter a is not loaded; name its folder with --adapter NAME=FOLDER",
        ),
        (Arguments(load=trained, ckpt_step=4), "ckpt_step=4 is not in .*; the steps there: 3"),
        (Arguments(load=trained, prompt=("\ud800",)), "the prompt '.ud800' cannot be turned into tokens"),
        (Arguments(load=trained, temperature=-1.0), "--temperature -1.0 must be a number from 0 on"),
        (Arguments(load=trained, temperature=math.nan), "--temperature nan must be a number from 0 on"),
        (Arguments(load=trained, temperature=math.inf), "--temperature inf must be a number from 0 on"),
        (Arguments(load=trained, top_p=0.0), "--top-p 0.0 must be above 0"),
        (Arguments(load=trained, top_p=math.nan), "--top-p nan must be above 0"),
        (Arguments(load=trained, top_k=-1), "--top-k -1 must not be negative; use 0 or more"),
        (Arguments(load=trained, batch_size=0), "--batch-size 0 must be at least 1"),
        (Arguments(load=trained, seq_length=17), "seq_length=17 exceeds the 16 positions that the model has learned"),
        (Arguments(load=trained, seq_length=0), "--seq-length 0 must be at least 1; or leave it out"),
        (Arguments(load=trained, pipeline_model_parallel_size=3), "num_layers=2 is less than pipeline.*=3"),
        (Arguments(load=trained, prompts_file=tmp_path / "no"), "--prompts-file .*no cannot be read: No such file"),
        (Arguments(load=trained, prompts_file=empty), "--prompts-file .*empty.txt holds no prompt"),
        (Arguments(load=trained, prompts_file=bad), "bad.jsonl:2 holds no prompt: key 'text' must hold text, not int"),
    ):
        with pytest.raises(UserError, match=sentence):
            run(arguments)


@pytest.mark.parametrize("prompt", [PROMPT, ""])
def test_a_run_ends_with_a_sample(tmp_path: Path, data: str, prompt: str) -> None:
    argv = [*tiny(tmp_path / "run", f"{FLAGS} --sample-tokens 5", data=data), "--sample-prompt", prompt]
    stopped = call_main(argv)
    assert "stopped after step 3" in stopped.output
    assert "a sample after" not in stopped.output
    ended = call_main([*tiny(tmp_path / "run", f"{FLAGS} --sample-tokens 5 --train-iters 3", data=data), *argv[-2:]])
    assert ended.status == 0, ended
    assert f"\na sample after step 3, from {prompt!r}:\n\n{prompt}" in ended.output


def test_made_up_tokens_are_no_text_and_have_no_sample(tmp_path: Path) -> None:
    ended = call_main(tiny(tmp_path / "run", "--sample-prompt hello --exit-interval 1"))
    assert ended.status == 0 and "a sample" not in ended.output


def test_a_checkpoint_without_a_tokenizer_takes_one_of_ones_own(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    train_on_ranks(tiny(tmp_path / "run", "--train-iters 1"))
    words = {f"w{token}": token for token in range(100)} | {"</s>": 100}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="'w1' is not numbers, which the null tokenizer needs"):
        run(Arguments(load=tmp_path / "run", prompt=("w1",)))
    options: dict[str, Any] = {"temperature": 0.0, "num_tokens": 4}
    ids = written(capsys, tmp_path / "run", prompt="1", **options)
    text = written(capsys, tmp_path / "run", prompt="w1", tokenizer_model=tmp_path / "tokenizer.json", **options)
    assert text.split() == [f"w{token}" for token in ids.split()]


def test_a_checkpoint_with_a_tiktoken_file_takes_it_from_another_place(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ranks = [{"rank": byte, "token_bytes": b64encode(bytes([byte])).decode()} for byte in range(256)]
    file = tmp_path / "vocab.json"
    file.write_text(json.dumps(ranks))
    flags = f"--tokenizer-type tiktoken --tokenizer-model {file} --tiktoken-num-special-tokens 8 --split 1,0,0"
    train_on_ranks(
        tiny(tmp_path / "run", "--train-iters 1 --vocab-size 264", data=f"{flags} --data-path {bytes_in(tmp_path)}")
    )
    options: dict[str, Any] = {"temperature": 0.0, "num_tokens": 4}
    text = written(capsys, tmp_path / "run", **options)
    moved = file.rename(tmp_path / "moved.json")
    assert written(capsys, tmp_path / "run", tokenizer_model=moved, **options) == text


def test_a_converted_model_begins_and_ends_as_it_was_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(HF / "llama", tmp_path / "theirs")
    size = json.loads((HF / "llama" / "config.json").read_text())["vocab_size"]
    words = Tokenizer(models.WordLevel({f"w{token}": token for token in range(size - 2)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(["</s>", "<s>"])
    words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", size - 1)])
    words.save(str(tmp_path / "theirs" / "tokenizer.json"))
    to_ours(tmp_path / "theirs", tmp_path / "ours")
    arguments = Arguments(load=tmp_path / "ours", prompt=("w1</s>", ""), num_tokens=6, temperature=0.0)
    plain, marked = (prepare(replace(arguments, add_special_tokens=flag)) for flag in (False, True))
    assert marked.tokens == ([size - 1, 1, size - 2], [size - 1])
    assert plain.tokens == ([0], [size - 2])
    (text,) = texts_of(load_model(tmp_path / "ours").model, [[1]], num_tokens=6, seq_length=S)
    end = next(token for token in text if token != size - 2)
    (tmp_path / "theirs" / "generation_config.json").write_text(json.dumps({"eos_token_id": [size - 2, end]}))
    to_ours(tmp_path / "theirs", tmp_path / "again")
    output = tmp_path / "out.jsonl"
    assert run(replace(arguments, load=tmp_path / "again", prompt=("w1",), output=output)) == 0
    assert json.loads(output.read_text())["ended"] == "eod"
    assert json.loads(output.read_text())["num_tokens"] == text.index(end)
