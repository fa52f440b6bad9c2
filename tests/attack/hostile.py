"""Hostile inputs by kind: files and flags that a stranger wrote to end, fill or stop the process that reads them."""

import gzip
import json
import pickle
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chat_tokenizers import byte_level
from forked import Command
from hostile_values import with_odd_value
from inputs import Good, Input, pretrain
from template_bombs import DEEP, ENDLESS, FILLING

EXPRESSIONS = (
    *("(a+)+$", "(a|aa)+$", r"(\w+\s?)+$", "(.*)*$", "((a*)*)*$", "(?=(a+)+$)", "a{1000}{1000}", "(", "[", "\\", ""),
    *(r"(\s+)+\S$", "(é+)+$", "(?:a?){50}a{50}", r"\p{Nothing}", "(?<!a+)b"),
)
NUMBERS: tuple[Any, ...] = (
    *(-1, 0, 2**31, 2**32, 4_000_000_000, 2**63, 2**64, 10**30, 1.5, 1e308, None, "a", [], {}, True),
)
TIMES = ("0", "1e-300", "1e300", "1e12", "-1", "nan", "inf", "1e-9", "9" * 5000)
COUNTS = ("1", "2", "3", "1000", "99999", "100000", "1000000000", "0", "-1", "9" * 5000, "99999999999999999999")


def templates(good: Good, folder: Path, numbers: random.Random) -> Input:
    """Chat templates that fill the memory, do not end, or are nested too deep."""
    name, source = numbers.choice([*FILLING.items(), *ENDLESS.items(), *DEEP.items()])
    where = numbers.choice(("begin", "end", "answer", "late"))
    plain = (good.folder / "template.jinja").read_text()
    if where == "late":
        source = "{% if messages | length > 2 %}" + source + "{% endif %}"
    text = plain + source if where == "end" else source + plain
    (folder / "template.jinja").write_text(text, errors="surrogatepass")
    argv = ("audit", "--data-path", str(good.folder / "chats.jsonl"), "--tokenizer-model", str(good.folder / "model"))
    more = ("--seq-length", "128", "--chat-template", str(folder / "template.jinja"))
    return Input(f"template {name}, {where}", Command((*argv, *more, "--data-cache-path", str(folder)), folder))


def tokenizer_files(good: Good, folder: Path, numbers: random.Random) -> Input:
    """A tokenizer.json with parts that its library cannot bear."""
    content: dict[str, Any] = json.loads(byte_level().to_str())
    what, changed = numbers.choice(_tokenizer_parts(numbers))
    content |= changed
    if numbers.random() < 0.3:
        token = numbers.choice(content["added_tokens"])
        token[numbers.choice(("id", "content", "special"))] = numbers.choice(NUMBERS)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    flags = ("--tokenizer-type", "huggingface", "--tokenizer-model", str(folder))
    argv = ("preprocess", "--input", str(good.folder / "lines.jsonl"), "--output-prefix", str(folder / "out"), *flags)
    return Input(what, Command(argv, folder, (("XDG_CACHE_HOME", str(folder / "cache")),)))


def _tokenizer_parts(numbers: random.Random) -> list[tuple[str, dict[str, Any]]]:
    pattern = numbers.choice(EXPRESSIONS)
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    grows = {"type": "Replace", "pattern": {"String": numbers.choice(("a", "", "e"))}, "content": "e" * 90}
    charsmap = numbers.choice(("AAAA/w==", "////fwAAAAA=", "", "AQAAAA==", "!"))
    kind, number = numbers.choice(("BPE", "WordPiece", "WordLevel", "Unigram")), numbers.choice(NUMBERS)
    return [
        (f"split {pattern}", {"pre_tokenizer": split}),
        ("replace", {"normalizer": {"type": "Sequence", "normalizers": [grows] * numbers.choice((1, 5, 12))}}),
        ("charsmap", {"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap}}),
        (f"length {number}", {"pre_tokenizer": {"type": "FixedLength", "length": number}}),
        (f"ids of {number}", {"model": {"type": kind, "vocab": {"a": number, "</s>": 1}, "merges": []}}),
        ("pairs", {"model": {"type": "Unigram", "vocab": [["a", number]], "unk_id": number}}),
        ("truncation", {"truncation": {"max_length": number, "stride": number, "strategy": "LongestFirst"}}),
        ("padding", {"padding": {"strategy": {"Fixed": number}, "pad_id": number, "pad_token": "a"}}),
    ]


class _Named:
    """An object that a pickle makes by a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call


def pickles(good: Good, folder: Path, numbers: random.Random) -> Input:
    """A Megatron-LM checkpoint whose pickle has what no tensor has."""
    import argparse

    import torch
    from torch._utils import _rebuild_tensor_v2

    nested: Any = ()
    for _ in range(60):
        nested = (nested, nested)
    odd = numbers.choice((*NUMBERS, nested, (nested,), (2, None), "x" * 1_000_000, [[]]))
    args = {"num_layers": 2, "hidden_size": 24, "num_attention_heads": 4, "seq_length": 16, "padded_vocab_size": 128}
    args[numbers.choice(list(args))] = numbers.choice((*NUMBERS, odd))
    storage = torch.UntypedStorage(8)
    shape, strides, offset = numbers.choice(((odd, (1,), 0), ((2,), odd, 0), ((2,), (1,), odd)))
    tensor = _Named(_rebuild_tensor_v2, storage, offset, shape, strides, False, {})
    content = {
        "args": argparse.Namespace(**args),
        "model": {"decoder.layers.0.a": tensor},
        "checkpoint_version": odd if numbers.random() < 0.1 else 3.0,
    }
    path = folder / "iter_0000001" / "mp_rank_00" / "model_optim_rng.pt"
    path.parent.mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("1")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", _pickled(content, storage))
        archive.writestr("a/data/0", bytes(8))
    argv = ("convert", "--from", "megatron", "--to", "hf", "--load", str(folder), "--save", str(folder / "out"))
    return Input(
        f"pickle with {str(odd)[:40] if odd is not nested and odd != (nested,) else 'nested'}", Command(argv, folder)
    )


def _pickled(content: Any, storage: Any) -> bytes:
    import io

    import torch

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return ("storage", torch.FloatStorage, "0", "cpu", 2) if obj is storage else None

    stream = io.BytesIO()
    Pickler(stream, protocol=2).dump(content)
    return stream.getvalue()


def long_lines(good: Good, folder: Path, numbers: random.Random) -> Input:
    """Packed lines of gigabytes, nested lines, and chats of thousands of turns."""
    kind = numbers.choice(("line", "array", "deep", "turns", "digits", "keys"))
    path = folder / numbers.choice(("long.jsonl.gz", "long.jsonl.gz", "long.jsonl"))
    texts = {
        "line": [b'{"text": "', *[b"a" * (1 << 20)] * numbers.choice((10, 600))],
        "array": [b'[{"text": "', *[b"a" * (1 << 20)] * numbers.choice((10, 600))],
        "deep": [b'{"text": ', b"[" * 100_000],
        "digits": [b'{"text": ', b"9" * 100_000, b"}\n"],
        "keys": [b'{"', b"k" * 1_000_000, b'": 1}\n'],
        "turns": [json.dumps({"messages": _turns(numbers.choice((500, 3000)))}).encode()],
    }[kind]
    with gzip.open(path, "wb", compresslevel=1) if path.suffix == ".gz" else path.open("wb") as file:
        for text in texts:
            file.write(text)
    audit = ("audit", "--data-path", str(path), "--tokenizer-model", str(good.folder / "model"), "--seq-length", "128")
    preprocess = (
        "preprocess",
        "--input",
        str(path),
        "--output-prefix",
        str(folder / "out"),
        "--tokenizer-type",
        "bytes",
    )
    return Input(
        f"{kind} in {path.name}", Command(audit if kind == "turns" else numbers.choice((audit, preprocess)), folder)
    )


def _turns(number: int) -> list[dict[str, str]]:
    return [{"role": "assistant" if each % 2 else "user", "content": f"t {each}"} for each in range(number)]


def headers(good: Good, folder: Path, numbers: random.Random) -> Input:
    """Headers of safetensors with very many, or impossible, tensors."""
    (model,) = good.copy("model", to=folder)
    many = numbers.choice((10, 100_000, 400_000))
    entry = {"dtype": "F32", "shape": numbers.choice(([0], [2**62, 4], [-1], None, 5, [[]])), "data_offsets": [0, 0]}
    text = json.dumps({f"t{number}": entry for number in range(many)}).encode()
    (model / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    argv = ("convert", "--from", "hf", "--to", "megatronish", "--load", str(model), "--save", str(folder / "out"))
    return Input(f"header of {many} x {entry['shape']}", Command(argv, folder))


def drawings(_good: Good, folder: Path, numbers: random.Random) -> Input:
    """Schedules too large to be drawn."""
    argv = ["draw", "--schedule", numbers.choice(("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v"))]
    for flag in ("--stages", "--microbatches", *numbers.choice(((), ("--chunks",)))):
        argv += [flag, numbers.choice(COUNTS)]
    argv += [numbers.choice(("--forward", "--backward", "--weight", "--transfer")), numbers.choice(TIMES)]
    return Input(" ".join(argv)[:100], Command(tuple(argv), folder))


def paths_and_digits(_good: Good, folder: Path, numbers: random.Random) -> Input:
    """Paths that are none, and numbers of thousands of digits."""
    paths = ("--data-path", "--train-data-path", "--load", "--save", "--tokenizer-model", "--config")
    numeric = ("--step-batch-size-schedule", "--num-layers", "--lr", "--split", "--rampup-batch-size")
    flag = numbers.choice((*paths, *numeric))
    odd = ("", ".", "/", "..", "x" * 5000, "a/" * 2500, "/dev/null", "/dev/zero", "\x1b[2J", "x" * 100_000)
    digits = ("9" * 5000, f"0:{'9' * 5000}", "1e999999", "-" + "9" * 5000, "0:4 1e400:8")
    value = numbers.choice((*odd, *digits))
    data = (
        f"--tokenizer-type null {flag} {value}"
        if flag.endswith("data-path") and value.split() == [value]
        else "--mock-data"
    )
    argv = pretrain(folder, "--dry-run", data=data)
    return Input(f"{flag} {value[:40]!r}", Command(argv if data != "--mock-data" else (*argv, flag, value), folder))


def inspections(good: Good, folder: Path, numbers: random.Random) -> Input:
    """Pairs and manifests for `inspect`, with odd headers and values; parts, places and numbers that are none."""
    text, index = folder / "text", bytearray((good.folder / "text.idx").read_bytes())
    how, flags = numbers.choice(("header", "values", "manifest", "part", "number", "histogram")), list[str]()
    prefix, odd = str(text), ""
    if how in ("header", "values"):
        first, end = (9, 34) if how == "header" else (34, len(index) - 8)
        place, odd = numbers.randrange(first, end - 8), numbers.choice(("ff" * 8, "00" * 8, "ffffffffffffff7f"))
        index[place : place + 8] = bytes.fromhex(odd)
        odd = f"{odd} at {place}"
    elif how == "manifest":
        prefix += ".shards.json"
        bins = [{"path": "text.bin", "bytes": (good.folder / "text.bin").stat().st_size, "sha256": None}]
        manifest = {"format": "megatronish shards 1", "index": {"path": "text.idx", "sha256": None}, "bins": bins}
        content, odd = with_odd_value(json.dumps(manifest), numbers)
        Path(prefix).write_text(content, errors="surrogatepass")
    elif how == "part":
        odd = numbers.choice(
            ("[nan:inf]", "[0:9e99]", "[1:0]", "[:]", "[", "[0:1][0:1]", f"[0:{'9' * 5000}]", "\x1b[2J")
        )
        prefix += odd
    elif how == "number":
        flag = numbers.choice(("document", "sample", "near-duplicates", "seq-length", "seed", "vocab-size"))
        flags = [f"--{flag}", odd := numbers.choice(COUNTS)]
    else:
        flags = [
            "--histogram",
            odd := numbers.choice(("/dev/null/x.png", "/proc/x.png", f"{text}.bin", "x" * 5000, "", "\udcff")),
        ]
    good.copy("text.bin", to=folder)
    (folder / "text.idx").write_bytes(index)
    return Input(f"{how} {odd[:60]}", Command(("inspect", prefix, *flags), folder))


HOSTILE: dict[str, Callable[[Good, Path, random.Random], Input]] = {
    each.__name__: each
    for each in (templates, tokenizer_files, pickles, long_lines, headers, drawings, paths_and_digits, inspections)
}
