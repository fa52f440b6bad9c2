"""Hostile data and tokenizers, odd places in every flag that names a file, and the table of all kinds of files."""

import bz2
import gzip
import json
import lzma
import os
import random
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from forked import Command
from hostile_configs import importer_files, json_files, lists_of_data, records_of_runs, toml_files
from hostile_values import DEEP, PASSWORD, with_odd_value
from hostile_weights import checkpoint_pickles, distributed_pickles, foreign_pickles, index_files, safetensors_files
from inputs import CHATS, TEXT, TOML, Good, Input, pretrain


def packed_files(good: Good, folder: Path, numbers: random.Random) -> Input:
    """Bombs of every compression, and tables of Parquet."""
    kind = numbers.choice(("gz", "bz2", "xz", "zst", "parquet", "parquet", "gz of gz"))
    path = folder / f"long.jsonl.{kind[:3].strip()}" if kind != "parquet" else folder / "table.parquet"
    texts = {
        "line": b'{"text": "' + b"a" * (350 << 20),
        "blank": b"\n" * (100 << 20),
        "deep": b'{"text": ' + b"[" * 1_000_000,
        "zeros": bytes(300 << 20),
    }
    what, text = numbers.choice(list(texts.items()))
    if kind == "parquet":
        what = _write_table(path, numbers)
    elif kind == "zst":
        what = _write_zstandard(path, text, what)
    elif kind == "gz of gz":
        path.write_bytes(gzip.compress(gzip.compress(text, 1), 1) + numbers.choice((b"", b"junk", bytes(99_999))))
    else:
        text = text[: 30 << 20] if kind != "gz" else text
        packed = {"gz": partial(gzip.compress, compresslevel=1), "bz2": partial(bz2.compress, compresslevel=1)}
        path.write_bytes(packed.get(kind, partial(lzma.compress, preset=0))(text))
        if numbers.random() < 0.3:
            os.truncate(path, path.stat().st_size // 2)
    preprocess = ("preprocess", "--input", str(path), "--output-prefix", "out", "--tokenizer-type", "bytes")
    audit = ("audit", "--data-path", str(path), "--tokenizer-model", str(good.folder / "model"), "--seq-length", "128")
    train = ("train-tokenizer", "--input", str(path), "--output", "out.model", "--vocab-size", "300")
    return Input(f"{kind}: {what}", Command(numbers.choice((preprocess, preprocess, audit, train)), folder))


def _write_zstandard(path: Path, text: bytes, what: str) -> str:
    try:
        import zstandard
    except ImportError:
        path.write_bytes(b"\x28\xb5\x2f\xfd\xa4" + struct.pack("<I", 2**31 - 1) + b"\x00" * 64)
        return "a lying frame"
    path.write_bytes(zstandard.ZstdCompressor(level=3).compress(text))
    return what


def _write_table(path: Path, numbers: random.Random) -> str:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        path.write_bytes(
            b"PAR1" + b"\x15\x02" * 99 + struct.pack("<I", numbers.choice((4, 2**31, 2**32 - 1))) + b"PAR1"
        )
        return "a lying footer"
    what = numbers.choice(("repeated", "nested", "footer", "columns", "one", "binary", "times"))
    if what == "repeated":  # a value of 64 KiB is there once, and used 300 times
        values = pyarrow.DictionaryArray.from_arrays(
            pyarrow.array([0] * 300, "int32"), pyarrow.array(["a" * (1 << 16)])
        )
        table = pyarrow.table({"text": values})
    elif what == "one":
        table = pyarrow.table({"text": ["a" * (300 << 20)]})
    elif what == "nested":
        value: Any = "a"
        for _ in range(80):
            value = [value]
        table = pyarrow.table({"text": [value], "messages": [value]})
    elif what == "columns":
        table = pyarrow.table({f"text{number}": ["a"] for number in range(3000)} | {"text": ["a"]})
    elif what == "binary":
        table = pyarrow.table({"text": [b"\xff\xfe", None, b""], "messages": [b"\xff", b"[", None]})
    else:
        table = pyarrow.table({"text": pyarrow.array([2**40], pyarrow.timestamp("s")), "messages": pyarrow.array([1])})
    parquet.write_table(table, path, compression="zstd")
    if what == "footer":
        data = bytearray(path.read_bytes())
        for _ in range(numbers.choice((1, 4, 40))):
            data[-numbers.randrange(9, min(len(data), 600))] ^= 1 << numbers.randrange(8)
        data[-8:-4] = numbers.choice((data[-8:-4], struct.pack("<I", 2**31), struct.pack("<I", 4)))
        path.write_bytes(data)
    return what


# Lines.


def lines(good: Good, folder: Path, numbers: random.Random) -> Input:
    """JSON lines with odd values, for everything that reads lines."""
    chats = numbers.random() < 0.5
    name = "chats.jsonl" if chats else "lines.jsonl"
    (path,) = good.copy(name, to=folder)
    texts = path.read_text().splitlines()
    whats = []
    for at in numbers.sample(range(len(texts)), numbers.choice((1, 1, 3, len(texts) - 1))):
        texts[at], what = with_odd_value(texts[at], numbers)
        whats.append(what)
    path.write_text(numbers.choice(("\n", "\n", "\r\n", "\r", "\0\n", "\u2028")).join(texts), errors="surrogatepass")
    model = str(good.folder / "model")
    prompts = ("generate", "--load", model, "--prompts-file", str(path), "--num-tokens", "1", "--device", "cpu")
    evaluate = ("evaluate", "--load", model, "--data-path", str(path), "--device", "cpu")
    audit = ("audit", "--data-path", str(path), "--tokenizer-model", model, "--seq-length", "128")
    train = pretrain(folder, CHATS, data=f"--data-path {path} --tokenizer-model {model}")
    preprocess = ("preprocess", "--input", str(path), "--output-prefix", "out", "--tokenizer-type", "bytes")
    tokenizer = ("train-tokenizer", "--input", str(path), "--output", "out.model", "--vocab-size", "300")
    argv = numbers.choice((audit, train, prompts) if chats else (preprocess, evaluate, prompts, tokenizer))
    return Input(f"{argv[0]}: {'; '.join(whats[:3])}", Command(argv, folder))


# Flags.


PLACES = ("", ".", "/", "..", "folder", "file", "fifo", "circle", "below", "nothing", "/dev/null", "/dev/zero")
WORDS = ("x" * 300, "x" * 5000, "a/" * 2500, "\x1b[2J", "\udcff", " ", "-", "~", "file:///x", "a\nb", "/proc/self/mem")


def path_flags(good: Good, folder: Path, numbers: random.Random) -> Input:
    """Every flag of every command that names a file or a folder, with something else there."""
    run, model, text = (str(good.folder / name) for name in ("run", "model", "text"))
    json_lines, chats, config = (str(good.folder / name) for name in ("lines.jsonl", "chats.jsonl", "config.toml"))
    generate = ("generate", "--load", model, "--prompt", "a", "--num-tokens", "1", "--device", "cpu")
    plan = ("plan", "--config", config, "--gpus", "2")
    audit = ("audit", "--data-path", chats, "--tokenizer-model", model, "--seq-length", "128")
    preprocess = ("preprocess", "--input", json_lines, "--output-prefix", "out", "--tokenizer-type", "bytes")
    evaluate = ("evaluate", "--load", model, "--data-path", json_lines, "--device", "cpu")
    convert = ("convert", "--from", "hf", "--to", "megatronish", "--load", model, "--save", "out")
    train = (*pretrain(folder), "--save-interval", "1")
    commands: dict[tuple[str, ...], str] = {
        generate: "--load --adapter --tokenizer-model --prompts-file --output --plugin --chat-template",
        plan: "--config --device --write --calibrate --write-device --load-hf",
        audit: "--data-path --tokenizer-model --chat-template --data-cache-path --html --plugin",
        preprocess: "--input --output-prefix --tokenizer-model --vocab-file --merge-file",
        (*preprocess[:-1], "huggingface"): "--tokenizer-model --vocab-file --merge-file",
        (*preprocess[:-1], "sentencepiece"): "--tokenizer-model",
        (*preprocess[:-1], "tiktoken"): "--tokenizer-model",
        evaluate: "--load --data-path --adapter --tokenizer-model --output --chat-template --include-path",
        convert: "--load --save --adapter",
        ("convert", "--from", "megatron", "--to", "hf", "--load", run, "--save", "out"): "--load --save",
        ("convert", "--from", "megatronish", "--to", "hf", "--load", run, "--save", "out"): "--load --save",
        ("merge", "--input", text, "--output-prefix", "out"): "--input --output-prefix",
        ("draw",): "--recorded --png",
        ("train-tokenizer", "--input", json_lines, "--output", "o.model", "--vocab-size", "300"): "--input --output",
        ("from-axolotl", str(good.folder / "axolotl.yml")): "--output",
        ("from-deepspeed", str(good.folder / "ds_config.json")): "--output",
        ("from-axolotl",): "PATH",
        ("from-deepspeed",): "PATH",
        ("from-accelerate",): "PATH",
        train: "--config --load --save --load-hf --run-dir --tensorboard-dir --data-cache-path --kill-switch-path "
        "--local-save --plugin --hook --memory-snapshot-path --wandb-save-dir --data-args-path",
        (*train, "--dry-run"): "--dry-run-report --forecast-device --config --load-hf --run-dir --plugin",
    }
    argv = numbers.choice([argv for argv, flags in commands.items() for _ in flags.split()])
    flag, place = numbers.choice(commands[argv].split()), numbers.choice((*PLACES, *PLACES, *WORDS))
    value = str(folder / place) if place.isalpha() and place in PLACES else place
    (folder / "folder").mkdir()
    (folder / "file").write_text("x\n")
    os.mkfifo(folder / "fifo")
    (folder / "circle").symlink_to("circle")
    if place == "below":
        value = str(folder / "file" / "below")
    words = (value,) if flag == "PATH" else (flag, value)
    return Input(f"{argv[0]} {flag} {place[:40]!r}", Command((*argv, *words), folder))


def unreadable(good: Good, folder: Path, numbers: random.Random) -> Input:
    """Files, or their folders, that their reader has no right to: a mistake, so that no launcher tries again."""
    model, adapter, run, pieces = good.copy("model", "adapter", "run", "pieces.model", to=folder)
    chats, lines, config, axolotl = good.copy("chats.jsonl", "lines.jsonl", "config.toml", "axolotl.yml", to=folder)
    good.copy("text.bin", "text.idx", to=folder)
    text, template = folder / "text", folder / "template.jinja"
    template.write_text((good.folder / "template.jinja").read_text())
    generate = ("generate", "--load", str(model), "--prompt", "a", "--num-tokens", "1", "--device", "cpu")
    of_run = ("generate", "--load", str(run), "--prompt", "a", "--num-tokens", "1", "--device", "cpu")
    audit = ("audit", "--data-path", str(chats), "--tokenizer-model", str(model), "--seq-length", "128")
    save = ("--save", str(folder / "out"))
    convert = ("convert", "--from", "hf", "--to", "hf", "--load", str(model), *save)
    preprocess = ("preprocess", "--input", str(lines), "--output-prefix", "out", "--tokenizer-type")
    step = run / "checkpoints" / "step_00000002"
    data = pretrain(folder / "new", numbers.choice(("", "--max-restarts 2")), data=f"{TEXT} {text}")
    resumed = pretrain(folder, numbers.choice(("--train-iters 3", "--train-iters 3 --max-restarts 2")))
    path, argv = numbers.choice(
        [
            (text.with_suffix(".bin"), data),
            (text.with_suffix(".idx"), data),
            (text.with_suffix(".bin"), ("merge", "--input", str(text), "--output-prefix", str(folder / "merged"))),
            (text.with_suffix(".idx"), ("evaluate", "--load", str(run), "--data-path", str(text), "--device", "cpu")),
            (lines, (*preprocess, "bytes")),
            (lines, ("train-tokenizer", "--input", str(lines), "--output", "o.model", "--vocab-size", "300")),
            (lines, (*generate, "--prompts-file", str(lines))),
            (pieces, (*preprocess, "sentencepiece", "--tokenizer-model", str(pieces))),
            (model / "tokenizer.json", (*preprocess, "huggingface", "--tokenizer-model", str(model))),
            (chats, audit),
            (chats, pretrain(folder / "new", CHATS, data=f"--data-path {chats} --tokenizer-model {model}")),
            (template, (*audit, "--chat-template", str(template))),
            (config, ("pretrain", "--config", str(config), "--dry-run")),
            (config, ("plan", "--config", str(config), "--gpus", "2")),
            (axolotl, ("from-axolotl", str(axolotl))),
            (model / "config.json", generate),
            (model / "model.safetensors", generate),
            (model, generate),
            (adapter / "adapter_config.json", (*generate, "--adapter", str(adapter))),
            (adapter / "adapter_model.safetensors", (*convert, "--adapter", str(adapter))),
            (adapter, (*convert, "--adapter", str(adapter))),
            (step / ".metadata", of_run),
            (step / "state.json", of_run),
            (step / "checksums.json", resumed),
            (step / "__0_0.distcp", resumed),
            (step, of_run),
            (run / "checkpoints", resumed),
            (run, of_run),
        ]
    )
    path.chmod(0)
    return Input(f"{path.name}: {argv[0]}", Command(argv, folder, without_rights=True), must_fail=True)


SIZES = (
    *("num-layers", "hidden-size", "num-attention-heads", "ffn-hidden-size", "seq-length", "micro-batch-size"),
    *("global-batch-size", "train-iters", "vocab-size", "num-experts", "kv-channels", "tp", "pp", "dp", "cp", "ep"),
    *("num-layers-per-virtual-pipeline-stage", "make-vocab-size-divisible-by", "num-query-groups", "window-size"),
    *("rampup-batch-size", "step-batch-size-schedule", "lr-warmup-iters", "eval-iters", "moe-router-topk", "seed"),
    *("split", "block-args", "window-attn-skip-freq", "moe-layer-freq", "no-rope-freq", "pipeline-layout", "adam-eps"),
)
AMOUNTS = (
    *("1", "3", "97", "1000", "100000", "1000000", "1000000000", "2147483647", "2147483648", "9223372036854775807"),
    *("9" * 30, "9" * 5000, "1e9", "0", "-1", "", "nan", "([1]*9999999999)", "[1]*99999999999", "1,2,3", "10**10"),
    *("[" * 50_000, "(" * 50_000, "(([1]*9999)*9999)*9999", "0x" + "f" * 5000, "0:4 " + "9" * 99 + ":8"),
)


def sizes(good: Good, folder: Path, numbers: random.Random) -> Input:
    """Runs, dry runs and plans of any size."""
    words: list[str] = []
    for name in numbers.sample(SIZES, numbers.choice((1, 1, 2, 3))):
        words += [f"--{name}", numbers.choice(AMOUNTS)]
    plan = ("plan", "--config", str(good.folder / "config.toml"), "--gpus", numbers.choice(("8", "1024", *AMOUNTS)))
    argv = numbers.choice(((*pretrain(folder), "--dry-run"), (*pretrain(folder), "--dry-run"), plan))
    at_times = (
        ("--layouts", "--explain", "--gpus-per-node", "--network"),
        (*AMOUNTS, "tp=2,pp=" + "9" * 5000, "1GB/s"),
    )
    if argv is plan and numbers.random() < 0.4:
        words = [numbers.choice(at_times[0]), numbers.choice(at_times[1])]
    return Input(f"{argv[0]} {' '.join(words)}"[:120], Command((*argv, *words), folder))


def passwords(good: Good, folder: Path, numbers: random.Random) -> Input:
    """Passwords in what is refused, or is written down."""
    url = numbers.choice(
        (
            f"ftp://user:{PASSWORD}@127.0.0.1:9/x",
            f"s3://key:{PASSWORD}@bucket/x",
            f"http://127.0.0.1:9/x?token={PASSWORD}",
            f"https://{PASSWORD}@127.0.0.1:9/x",
            f"sftp://user:{PASSWORD}@127.0.0.1:9/a/b",
            f"memory://user:{PASSWORD}@x/y",
        )
    )
    flag = numbers.choice(
        (
            *(
                "--save",
                "--load",
                "--load-hf",
                "--data-path",
                "--tokenizer-model",
                "--mlflow-tracking-uri",
                "--run-dir",
            ),
            *("--kill-switch-path", "--tensorboard-dir", "--no-such-flag", "--num-layers", "--config", "--plugin"),
            "--hook",
        )
    )
    dry = numbers.choice(((), ("--dry-run",)))
    if numbers.random() < 0.3:
        path = folder / "config.toml"
        field = flag.removeprefix("--").replace("-", "_")
        path.write_text(f'{TOML}\n[run]\n{field} = "{url}"\n')
        argv: tuple[str, ...] = ("pretrain", "--config", str(path), "--run-dir", str(folder / "run"), *dry)
        flag = f"config: {flag}"
    elif numbers.random() < 0.3:
        argv = numbers.choice(
            (
                ("generate", "--load", url, "--prompt", "a"),
                ("convert", "--from", "hf", "--to", "megatronish", "--load", url, "--save", "out"),
                ("evaluate", "--load", str(good.folder / "model"), "--data-path", url, "--device", "cpu"),
                ("preprocess", "--input", url, "--output-prefix", "out", "--tokenizer-type", "bytes"),
                ("draw", "--recorded", url),
                ("from-axolotl", url),
                ("merge", "--input", url, "--output-prefix", "out"),
                (url,),
            )
        )
        flag = argv[0][:20]
    else:
        argv = (*pretrain(folder), *dry, flag, url)
    return Input(f"{flag} {url}", Command(argv, folder, (("HF_HUB_OFFLINE", "1"),)))


def tokenizer_models(good: Good, folder: Path, numbers: random.Random) -> Input:
    """SentencePiece and tiktoken files that are too large, or lie."""
    kind = numbers.choice(("sentencepiece", "tiktoken", "vocab"))
    path = folder / {"sentencepiece": "odd.model", "tiktoken": "odd.tiktoken", "vocab": "vocab.json"}[kind]
    flags: tuple[str, ...] = ("--tokenizer-type", kind, "--tokenizer-model", str(path))
    if kind == "sentencepiece":
        data = bytearray((good.folder / "pieces.model").read_bytes())
        what = numbers.choice(("lengths", "field", "repeated", "normalizer", "flipped"))
        if what == "lengths":
            at = numbers.randrange(len(data) - 10)
            data[at : at + 6] = b"\x0a\xff\xff\xff\xff\x7f"
        elif what == "field":
            data += numbers.choice(
                (b"\x12\xff\xff\xff\xff\x0f", b"\xff" * 100, b"\x0a\x00" * 100_000, b"\x0b" * 10_000)
            )
        elif what == "repeated":
            data *= numbers.choice((2, 300))
        elif what == "normalizer":
            charsmap = numbers.choice((b"\xff\xff\xff\x7f", b"\x04\0\0\0aaaa", bytes(4), b"\0\0\0\x40" + b"\xff" * 64))
            inner = b"\x12" + bytes([len(charsmap)]) + charsmap
            data += b"\x1a" + bytes([len(inner)]) + inner
        else:
            for _ in range(50):
                data[numbers.randrange(len(data))] ^= 1 << numbers.randrange(8)
        path.write_bytes(data)
    elif kind == "tiktoken":
        what, text = numbers.choice(
            list(
                {
                    "ranks": "YQ== " + "9" * 5000 + "\n",
                    "rank": "YQ== 4000000000\n",
                    "gaps": "".join(f"YQ== {number}\n" for number in (0, 2**31, 5)),
                    "same": "YQ== 0\n" * 1000,
                    "long": "YWFh" * 3_000_000 + " 0\n",
                    "no base64": "*** 0\n",
                    "negative": "YQ== -1\n",
                    "words": "YQ== 0 0 0\n",
                    "empty": " 0\n",
                    "deep": "[" * DEEP,
                    "bytes": "\udcff\udcfe 0\n",
                }.items()
            )
        )
        path.write_text(text, errors="surrogateescape")
    else:
        vocabulary = {chr(33 + number): number for number in range(90)}
        text, what = with_odd_value(json.dumps(vocabulary), numbers)
        path.write_text(text)
        merges = numbers.choice(("a b\n", "#version\na b c d\n", "a " * 99_999, "\0", "\n" * 99_999, "a b\n" * 99_999))
        (folder / "merges.txt").write_text(merges)
        flags = (
            "--tokenizer-type",
            "huggingface",
            "--vocab-file",
            str(path),
            "--merge-file",
            str(folder / "merges.txt"),
        )
    preprocess = ("preprocess", "--input", str(good.folder / "lines.jsonl"), "--output-prefix", "out", *flags)
    good.copy("text.bin", "text.idx", to=folder)
    data_flags = f"{' '.join(flags)} --split 1,0,0 --data-path {folder / 'text'}"
    train = pretrain(folder, data=data_flags)
    argv = numbers.choice((preprocess, preprocess, train))
    return Input(f"{kind}: {what}", Command(argv, folder, (("XDG_CACHE_HOME", str(folder / "cache")),)))


HOSTILE_FILES: dict[str, Callable[[Good, Path, random.Random], Input]] = {
    each.__name__: each
    for each in (
        *(
            foreign_pickles,
            distributed_pickles,
            checkpoint_pickles,
            safetensors_files,
            index_files,
            packed_files,
            lines,
        ),
        importer_files,
        *(toml_files, lists_of_data, json_files, records_of_runs, path_flags, unreadable, sizes, passwords),
        tokenizer_models,
    )
}
