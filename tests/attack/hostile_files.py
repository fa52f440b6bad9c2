"""Hostile files of every format that a command reads, and odd places in every flag that names one.

A pickle or a config that runs code leaves CANARY in the input's folder; no word that is written may have PASSWORD.
"""

import bz2
import gzip
import hashlib
import io
import json
import lzma
import os
import pickle
import random
import struct
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from forked import Command, Ended
from inputs import CHATS, DEEPSPEED, TEXT, TOML, Good, Input, pretrain
from saved_runs import sealed
from test_importers import AXOLOTL

from megatronish.checkpoint.checksums import Checksums, Span

CANARY, PASSWORD = "canary", "pw-kept-out-of-logs"
DEEP = 100_000
JSON_VALUES = (
    *("null", "true", "-1", "0", "1.5", "1e999", "NaN", "Infinity", "9" * 4000, "9" * 5000, "[]", "{}", '""', "-0.0"),
    *('"\\ud800"', '"\\u0000"', '"a\\nb"', "[[[]]]", '{"a": {}}', "2147483648", "9223372036854775808", "[null]"),
    *("[" * DEEP, "[" * 900 + "]" * 900, '{"a":' * DEEP, '"' + "x" * 3_000_000 + '"', "1e-320", '"\\u001b[2J"'),
    *("[" + "1," * 300_000 + "1]", "{" + ",".join(f'"k{i}":1' for i in range(60_000)) + "}", '"' + "9" * 5000 + '"'),
    *('"../../etc/passwd"', '"/dev/zero"', '"a\\u0000b"', '"{0.__class__}"', '"%n%s"', "[1, [2, [3]], {}]"),
)
"""Values of JSON that no file should have there."""


def _path_in(value: Any, numbers: random.Random) -> list[Any]:
    """Keys that lead to some value inside of a JSON value."""
    path = []
    while isinstance(value, dict | list) and value and (not path or numbers.random() < 0.75):
        path.append(
            numbers.choice(sorted(value, key=str)) if isinstance(value, dict) else numbers.randrange(len(value))
        )
        value = value[path[-1]]
    return path


def with_odd_value(text: str, numbers: random.Random) -> tuple[str, str]:
    """A JSON text with an odd value, or an odd key, in one place; and what it is."""
    content = json.loads(text)
    path, odd = _path_in(content, numbers), numbers.choice(JSON_VALUES)
    if not path or numbers.random() < 0.1:
        return odd, f"all is {odd[:30]}"
    place = content
    for key in path[:-1]:
        place = place[key]
    if isinstance(place, dict) and numbers.random() < 0.1:
        place[numbers.choice(("", "\0", "a" * 100_000, "__class__", "a.b", "\n[plugins]\n#"))] = "ODD VALUE"
    else:
        place[path[-1]] = "ODD VALUE"
    return json.dumps(content).replace('"ODD VALUE"', odd, 1), f"{path} is {odd[:30]}"


# Pickles.


class _Called:
    """An object that a pickle makes by a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call


def _op(name: bytes, module: str) -> bytes:
    return b"c" + module.encode() + b"\n" + name + b"\n"


GETATTR = _op(b"getattr", "builtins") + _op(b"os", "os") + b"X\x06\0\0\0system\x86R"


def pickled_bombs(canary: Path) -> dict[str, bytes]:
    """Pickles that run code, or that fill the memory, the stack or the time of the process that reads them."""
    touch = f"touch {canary}"
    shared = b"\x80\x02)" + b"".join(b"q\x01h\x01\x86" for _ in range(60))  # (x, x) of (x, x) of ...
    nested = b"\x80\x02)" + b"\x85" * 300_000
    text = b"X" + struct.pack("<I", len(touch)) + touch.encode()
    program = f"open({str(canary)!r}, 'w')".encode()
    run = _op(b"runstring", "numpy.testing._private.utils") + b"X" + struct.pack("<I", len(program)) + program
    return {
        "system": pickle.dumps(_Called(os.system, touch), 2),
        "system by a name": pickle.dumps({"a": _Called(os.system, touch)}, 4),
        "exec": pickle.dumps(_Called(exec, f"open({str(canary)!r}, 'w')"), 2),
        "a method": b"\x80\x02" + _op(b"os.system", "megatronish") + text + b"\x85R.",
        "getattr": b"\x80\x02" + GETATTR + text + b"\x85R.",
        "instance": b"(S'" + touch.encode() + b"'\nios\nsystem\n.",
        "object": b"(" + _op(b"system", "os") + b"S'" + touch.encode() + b"'\no.",
        "torch": b"\x80\x02" + _op(b"_load_global_deps", "torch") + b")R.",
        "numpy": b"\x80\x02" + run + b"}\x86R.",
        "attribute of a dtype": b"\x80\x04\x8c\x05torch\x8c\x12float32.__reduce__\x93)R.",
        "state of a class": b"\x80\x02" + _op(b"OrderedDict", "collections") + b"}X\x01\0\0\0aK\x01sb.",
        "tuples as a key": b"\x80\x02}" + shared[2:] + b"K\x01s.",
        "tuples in a set": b"\x80\x04\x8f(" + shared[2:] + b"\x90.",
        "tuples in a frozen set": b"\x80\x04(" + shared[2:] + b"\x91.",
        "a deep key": b"\x80\x02}" + nested[2:] + b"K\x01s.",
        "a deep tuple": nested + b".",
        "a deep list": b"\x80\x02" + b"](" * 200_000 + b"e" * 200_000 + b".",
        "a list of itself": b"\x80\x02]q\0h\0a.",
        "shared lists": b"\x80\x02]" + b"".join(b"q\x01]h\x01ah\x01a" for _ in range(40)) + b".",
        "a far memo": b"\x80\x02]r\xff\xff\xff\x3f.",
        "a farther memo": b"\x80\x02]r\xff\xff\xff\xff.",
        "a memo in digits": b"]p4000000000\n.",
        "a long text": b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"a.",
        "long bytes": b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b"a.",
        "a long array": b"\x80\x05\x96" + struct.pack("<Q", 2**36) + b"a.",
        "a large number": b"\x80\x02\x8b" + struct.pack("<i", 3_000_000) + b"\x7f" * 3_000_000 + b".",
        "digits": b"I" + b"9" * 100_000 + b"\n.",
        "a frame": b"\x80\x04\x95" + struct.pack("<Q", 2**60) + b"N.",
        "nothing": b"",
        "a protocol": b"\x80\xff.",
        "an extension": b"\x80\x02\x82\x01.",
        "a buffer": b"\x80\x05\x97.",
        "an object of no class": b"\x80\x02K\x01)\x81.",
        "a storage": b"\x80\x02X\x07\0\0\0storageQ.",
        "a storage in digits": b"P12345\n.",
    }  # fmt: skip


def _in_archive(path: Path, data: bytes, numbers: random.Random) -> str:
    """A file of torch.save with this pickle; sometimes a wrong one. What is wrong with it."""
    how = numbers.choice(("", "", "", "packed", "twice", "far away", "short", "many records"))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if how == "packed" else zipfile.ZIP_STORED) as archive:
        archive.writestr("a/data.pkl", data if how != "packed" else data + bytes(50_000_000))
        archive.writestr("a/data/0", bytes(64))
        if how == "twice":
            archive.writestr("b/data.pkl", b"N.")
        for number in range(60_000 if how == "many records" else 0):
            archive.writestr(f"a/data/{number + 1}", b"")
    content = bytearray(path.read_bytes())
    if how == "far away":
        at = content.rindex(b"PK\x01\x02")
        content[at + 20 : at + 28] = struct.pack("<II", 0xFFFFFFF0, 0xFFFFFFF0)
    path.write_bytes(content[: len(content) // 2] if how == "short" else content)
    return how


def foreign_pickles(good: Good, folder: Path, numbers: random.Random) -> Input:
    """Bombs in .pt of Megatron-LM, in pytorch_model.bin and in adapter_model.bin."""
    what, data = numbers.choice(list(pickled_bombs(folder / CANARY).items()))
    target = numbers.choice(("megatron", "megatron", "megatron", "hf", "adapter"))
    save = ("--save", str(folder / "out"))
    if target == "megatron":
        path = folder / "iter_0000001" / "mp_rank_00" / "model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        (folder / "latest_checkpointed_iteration.txt").write_text("1")
        argv: tuple[str, ...] = ("convert", "--from", "megatron", "--to", "hf", "--load", str(folder), *save)
    elif target == "hf":
        (model,) = good.copy("model", to=folder)
        (model / "model.safetensors").unlink()
        path = model / "pytorch_model.bin"
        argv = ("convert", "--from", "hf", "--to", "megatronish", "--load", str(model), *save)
    else:
        (adapter,) = good.copy("adapter", to=folder)
        (adapter / "adapter_model.safetensors").unlink()
        path = adapter / "adapter_model.bin"
        model = good.folder / "model"
        argv = ("convert", "--from", "hf", "--to", "hf", "--load", str(model), *save, "--adapter", str(adapter))
    if numbers.random() < 0.15:
        path.write_bytes(data)
        how = "without an archive"
    else:
        how = _in_archive(path, data, numbers)
    return Input(f"{target}: {what} {how}", Command(argv, folder), must_fail=True)


def checkpoint_pickles(good: Good, folder: Path, numbers: random.Random) -> Input:
    """Bombs in .metadata and .distcp of our checkpoints, whose sums fit."""
    (run,) = good.copy("run", to=folder)
    step = run / "checkpoints" / "step_00000002"
    what, data = numbers.choice(list(pickled_bombs(folder / CANARY).items()))
    name = numbers.choice((".metadata", ".metadata", "distcp"))
    if name == ".metadata":
        sealed(step, lambda step: (step / name).write_bytes(data))
    else:
        path = numbers.choice(sorted(step.glob("*.distcp")))
        _replace_rectangles(step, path, data, numbers)
    argv = numbers.choice(
        (
            pretrain(folder, "--train-iters 3"),
            ("generate", "--load", str(run), "--prompt", "a", "--num-tokens", "1", "--device", "cpu"),
            ("convert", "--from", "megatronish", "--to", "hf", "--load", str(run), "--save", str(folder / "out")),
        )
    )
    return Input(f"{name}: {what}", Command(argv, folder), must_fail=name == ".metadata")


def _replace_rectangles(step: Path, path: Path, data: bytes, numbers: random.Random) -> None:
    """Rectangles of a .distcp become torch files of that pickle where they have the room; all sums fit."""
    files = {name: spans for name, spans in Checksums.read(step).files.items() if name.endswith(".distcp")}
    content, spans = b"", []
    for start, span in _places(files[path.name]):
        piece = path.read_bytes()[start : start + span.length]
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as archive:
            for name, record in {
                "data.pkl": data,
                "data/0": bytes(8),
                "version": b"3\n",
                "byteorder": b"little",
            }.items():
                archive.writestr(f"archive/{name}", record)
        if len(packed.getvalue()) <= span.length and numbers.random() < 0.8:
            with zipfile.ZipFile(packed, "a") as archive:
                archive.comment = bytes(min(span.length - len(packed.getvalue()), 65_535))
            piece = packed.getvalue().ljust(span.length, b"\0")
        content += piece
        spans.append(Span(span.length, hashlib.sha256(piece).hexdigest()))
    path.write_bytes(content)
    Checksums(step, files | {path.name: spans}).with_other_files().write()


def _places(spans: list[Span]) -> Iterator[tuple[int, Span]]:
    start = 0
    for span in spans:
        yield start, span
        start += span.length


# Formats with headers.


def safetensors_files(good: Good, folder: Path, numbers: random.Random) -> Input:
    """Headers and indices of safetensors that lie: of models and of adapters."""
    kind = numbers.choice(("model", "model", "adapter", "index"))
    model, adapter = good.copy("model", "adapter", to=folder)
    save = ("--save", str(folder / "out"))
    convert = ("convert", "--from", "hf", "--to", "megatronish", "--load", str(model), *save)
    if kind == "index":
        name = numbers.choice(
            (
                *("../good/model.safetensors", str(good.folder / "model" / "model.safetensors"), "/dev/zero", "", "."),
                *("\0", "model.safetensors\n", "x" * 5000, "fifo", "config.json", "\x1b[2J"),
            )
        )
        os.mkfifo(model / "fifo")
        text = json.dumps({"metadata": {}, "weight_map": {f"t{i}": name for i in range(numbers.choice((1, 100_000)))}})
        what = name[:40]
        if numbers.random() < 0.4:
            text, what = with_odd_value(text, numbers)
        (model / "model.safetensors.index.json").write_text(text)
        return Input(f"index: {what}", Command(convert, folder), must_fail=True)
    path = model / "model.safetensors" if kind == "model" else adapter / "adapter_model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
    how = numbers.choice(("length", "value", "text", "same bytes", "offsets", "dtype", "types"))
    names = sorted(set(header) - {"__metadata__"})
    name, size = numbers.choice(names), numbers.choice((0, 7, 2**31, 2**62, 2**63, 2**64 - 1, length + 1))
    text = json.dumps(header)
    if how == "value":
        text, what = with_odd_value(text, numbers)
        how = f"{how}: {what}"
    elif how == "text":
        text = numbers.choice(("", "null", "[]", "{", "\0" * 99, "{" + '"a":{},' * 50_000 + '"a":{}}', "[" * DEEP))
    elif how == "same bytes":
        header[name]["data_offsets"] = header[names[0]]["data_offsets"]
        text = json.dumps(header)
    elif how == "offsets":
        header[name]["data_offsets"] = numbers.choice(([0, 2**62], [-8, 0], [8, 0], [0], [2**70, 2**71], [0.0, 8.0]))
        text = json.dumps(header)
    elif how in ("dtype", "types"):
        for each in [name] if how == "dtype" else names:
            header[each]["dtype"] = numbers.choice(("F64", "I8", "BOOL", "U64", "F8_E4M3", "Q", None, 3, "x" * 99_999))
        text = json.dumps(header)
    packed = text.encode(errors="surrogatepass")
    path.write_bytes((size if how == "length" else len(packed)).to_bytes(8, "little") + packed + rest)
    generate = ("generate", "--load", str(model), "--prompt", "a", "--num-tokens", "1", "--device", "cpu")
    to_merge = ("convert", "--from", "hf", "--to", "hf", "--load", str(model), *save, "--adapter", str(adapter))
    argv = numbers.choice((convert, generate)) if kind == "model" else to_merge
    return Input(f"{kind}: {how}", Command(argv, folder))


def index_files(good: Good, folder: Path, numbers: random.Random) -> Input:
    """.idx and .bin that lie about each other."""
    text = folder / "text"
    good.copy("text.bin", "text.idx", to=folder)
    index, huge = bytearray((folder / "text.idx").read_bytes()), numbers.choice((0, 1, 2**31, 2**62, 2**63, 2**64 - 1))
    how = numbers.choice(("code", "sequences", "documents", "length", "pointer", "tokens", "sparse"))
    if how == "code":
        index[17] = numbers.randrange(256)
    elif how in ("sequences", "documents"):
        index[18 + 8 * (how == "documents") :][:8] = b""
        at = 18 + 8 * (how == "documents")
        index[at : at + 8] = struct.pack("<Q", huge)
    elif how in ("length", "pointer"):
        at = 34 + numbers.randrange(len(index) - 50)
        index[at : at + 8] = struct.pack("<Q", huge)
    elif how == "tokens":
        (folder / "text.bin").write_bytes(b"\xff" * (folder / "text.bin").stat().st_size)
    else:
        for end in (".bin", ".idx"):
            os.truncate(f"{text}{end}", numbers.choice((1 << 36, 1 << 40)))
    if how != "sparse":
        (folder / "text.idx").write_bytes(index)
    argv = numbers.choice(
        (
            pretrain(folder, data=f"{TEXT} {text}"),
            ("merge", "--input", str(text), "--output-prefix", str(folder / "merged")),
            ("evaluate", "--load", str(good.folder / "run"), "--data-path", str(text), "--device", "cpu"),
        )
    )
    return Input(f"{how} {huge}", Command(argv, folder))


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


# Configs.


def _check_imported(ended: Ended) -> str:
    """What is wrong with the TOML that an importer wrote."""
    if ended.status != 0:
        return ""
    try:
        tables = tomllib.loads(ended.output)
    except tomllib.TOMLDecodeError as error:
        return f"NO TOML {error}"
    return "PLUGIN" if "plugins" in tables or "plugin" in tables else ""


INJECTIONS = (
    *('a\n[plugins]\nplugin = ["{0}"]\n#', 'a"\n[plugins]\nplugin = ["{0}"]\n', '"""\n[plugins]\nplugin=["{0}"]\n'),
    *("a\r[plugins]\rplugin=['{0}']\r#", "\x85[plugins]", "\u2028[plugins]", "]\n[plugins]\n", "\\", "\\u0000", "\0"),
    *("'''\nplugin = ['{0}']\n", "\x1b[2J", "\udc80", "#", "=", ".inf", "x" * 200_000, "\ud83d"),
)
YAML_BOMBS = {
    "laughs": "a: &a [x,x,x,x,x,x,x,x,x]\n"
    + "".join(f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
    "itself": "base_model: &a [*a]\n",
    "itself as a key": "&a {*a : 1}\n",
    "itself merged": "base_model: &a\n  <<: *a\n",
    "merged": "a: &a {x: 1}\n" + "".join(f"{b}: &{b}\n  <<: [{','.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),  # noqa: E501
    "object": "base_model: !!python/object/apply:os.system ['touch {0}']\n",
    "new object": "base_model: !!python/object/new:os.system ['touch {0}']\n",
    "name": "base_model: !!python/name:os.system\n",
    "module": "base_model: !!python/module:os\n",
    "binary": "base_model: !!binary ////\n",
    "set": "base_model: !!set {{a, b}}\n",
    "omap": "base_model: !!omap [a: 1]\n",
    "tag": "base_model: !evil x\n",
    "deep": "base_model: " + "[" * 30_000 + "\n",
    "deep blocks": "".join(f"{' ' * depth}a:\n" for depth in range(300)),
    "deep lists": "- " * 20_000 + "a\n",
    "digits": "micro_batch_size: " + "9" * 5000 + "\n",
    "sexagesimal": "micro_batch_size: " + "59:" * 5000 + "59\n",
    "hexadecimal": "micro_batch_size: 0x" + "f" * 5000 + "\n",
    "date": "2026-13-45: 2026-99-99\n2026-01-01: 2026-01-01T99:99:99Z\n",
    "keys": "1: a\n1.5: b\nnull: c\ntrue: d\n? [a, b]\n: e\n? {{a: b}}\n: f\n",
    "documents": "---\na: 1\n---\nb: 2\n" * 2000,
    "many anchors": "".join(f"a{number}: &a{number} x\n" for number in range(20_000)),
    "directive": "%YAML 9.9\n%TAG ! tag:x,2000:\n---\na: 1\n",
    "tabs": "a:\n\tb: 1\n",
    "quote": "base_model: \"" + "a" * 100_000 + "\n",
    "infinite": "learning_rate: .inf\nweight_decay: .nan\nval_set_size: -.inf\n",
}  # fmt: skip


def importer_files(_good: Good, folder: Path, numbers: random.Random) -> Input:
    """Configs of DeepSpeed, Axolotl and Accelerate that want to become another TOML, or too much of it."""
    kind = numbers.choice(("axolotl", "axolotl", "accelerate", "deepspeed"))
    plugin = folder / "evil.py"
    plugin.write_text(f"open({str(folder / CANARY)!r}, 'w')\n")
    word = numbers.choice(INJECTIONS).replace("{0}", str(plugin))
    path = folder / ("config.json" if kind == "deepspeed" else "config.yml")
    how = numbers.choice(("key", "value", "odd", "bomb", "bomb"))
    base = DEEPSPEED if kind == "deepspeed" else ACCELERATE if kind == "accelerate" else AXOLOTL_AS_JSON
    content = json.loads(base)
    what = how
    if how in ("key", "value"):
        keys = _path_in(content, numbers)
        place = content
        for key in keys[:-1]:
            place = place[key]
        if how == "key" and isinstance(place, dict):
            place[word] = numbers.choice((1, word, [word], {word: word}))
        else:
            place[keys[-1]] = numbers.choice((word, [word], {word: 1}))
        text, what = json.dumps(content), f"{how} {word[:20]!r}"
    elif how == "odd" or kind == "deepspeed":
        text, what = with_odd_value(base, numbers)
    else:
        what, bomb = numbers.choice(list(YAML_BOMBS.items()))
        text = bomb.replace("{0}", str(folder / CANARY)).replace("{{", "{").replace("}}", "}")
        text += numbers.choice(("", AXOLOTL, "base_model: *i\n", "datasets: *i\n"))
    path.write_text(text, errors="surrogatepass")
    argv = (f"from-{kind}", str(path), *numbers.choice(((), (), ("--output", str(folder / "out.toml")))))
    return Input(f"{kind} {what}", Command(argv, folder), check=_check_imported if "--output" not in argv else None)


AXOLOTL_AS_JSON = json.dumps(
    {
        "base_model": "a/b",
        "datasets": [{"path": "a.jsonl", "type": "chat_template", "ds_type": "json", "field_messages": "m"}],
        "val_set_size": 0.1,
        "sequence_len": 128,
        "adapter": "lora",
        "lora_r": 8,
        "lora_target_modules": ["q_proj"],
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_epochs": 1,
        "optimizer": "adamw_torch",
        "learning_rate": 1e-4,
        "lr_scheduler": "cosine",
        "special_tokens": {"pad_token": "</s>"},
        "output_dir": "./out",
        "rl": "dpo",
        "deepspeed": "zero2.json",
        "fsdp_config": {"offload_params": True},
        "wandb_project": "x",
    }
)
ACCELERATE = json.dumps(
    {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "num_machines": 1,
        "num_processes": 4,
        "machine_rank": 0,
        "main_process_ip": "127.0.0.1",
        "main_process_port": 29500,
        "mixed_precision": "bf16",
        "deepspeed_config": {"zero_stage": 2, "gradient_accumulation_steps": 2, "deepspeed_config_file": "a.json"},
        "fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_offload_params": False, "fsdp_version": 2},
        "parallelism_config": {"parallelism_config_tp_size": 2, "parallelism_config_cp_size": 1},
    }
)


def toml_files(good: Good, folder: Path, numbers: random.Random) -> Input:
    """TOML configs and rows of devices that are too deep, too long or odd."""
    bombs = {
        "deep lists": f"a = {'[' * DEEP}",
        "deep closed lists": f"a = {'[' * 400}{']' * 400}",
        "deep tables": f"a = {'{a=' * 20_000}",
        "dotted key": "a" + ".a" * 50_000 + " = 1",
        "dotted table": "[a" + ".a" * 50_000 + "]",
        "many dotted": "\n".join("a." * 200 + f"b{number} = 1" for number in range(1000)),
        "digits": f"num_layers = {'9' * 5000}",
        "hexadecimal": f"num_layers = 0x{'f' * 5000}",
        "exponent": "lr = 1e99999",
        "long key": f"{'k' * 1_000_000} = 1",
        "long text": f'tokenizer_model = "{"x" * 1_000_000}"',
        "NUL": 'tokenizer_model = "a\\u0000b"',
        "escape": 'tokenizer_model = "\\u001b[2J"',
        "date": "num_layers = 2026-01-01",
        "time": "lr = 07:32:00",
        "infinite": "lr = inf\nmin_lr = nan",
        "lists": "data_path = [[[1]]]",
        "objects": "data_path = [{a = 1}]",
        "many keys": "\n".join(f"k{number} = 1" for number in range(20_000)),
        "bytes": "\udcff\udcfe = 1",
        "control": "a = '\x01'",
        "no text": "\0" * 1000,
        "megabytes": "# " + "x" * (40 << 20),
    }
    what, text = numbers.choice(list(bombs.items()))
    kind = numbers.choice(("config", "config", "plan", "device", "run", "generate"))
    section = numbers.choice(("", "[model]\n", "[data]\n", "[h100]\n"))
    path = folder / "odd.toml"
    written = f"{section}{text}\n" + (TOML if numbers.random() < 0.3 and kind != "device" else "")
    sound = ("plan", "--config", str(good.folder / "config.toml"), "--gpus", "2")
    if kind == "run" or kind == "generate":
        (run,) = good.copy("run", to=folder)
        path = run / "config.toml"
    path.write_text(written, errors="surrogateescape")
    argv = {
        "config": ("pretrain", "--config", str(path), "--dry-run", "--mock-data"),
        "plan": ("plan", "--config", str(path), "--gpus", "2"),
        "device": (*sound, "--device", str(path)),
        "run": pretrain(folder, "--train-iters 3"),
        "generate": (
            "generate",
            "--load",
            str(folder / "run"),
            "--prompt",
            "a",
            "--num-tokens",
            "1",
            "--device",
            "cpu",
        ),
    }[kind]
    return Input(f"{kind}: {what}", Command(argv, folder))


def lists_of_data(good: Good, folder: Path, numbers: random.Random) -> Input:
    """Files and texts that list data sets."""
    flag = numbers.choice(
        ("data-args-path", "per-split-data-args-path", "train-weighted-split-paths", "valid-weighted-split-paths-path")
    )
    text = good.folder / "text"
    if flag == "per-split-data-args-path":
        content, _ = with_odd_value(
            json.dumps({"train": ["1", str(text)], "valid": [str(text)], "test": None}), numbers
        )
    else:
        odd = (
            *("", "\0", "1", "1e999 " + str(text), "nan " + str(text), "-1 " + str(text), "1 " * 50_000, "," * 100_000),
            *("train: " * 20_000, "train: 1 0:9e99 a", "train: 1 a:b c", ": : : :", "x" * 1_000_000, "train: 1 1:0 /"),
            *('"' * 50_000, "train: 0.5 0:1 /dev/zero", "a b c d e", "\x1b[2J", "[0:1]", f"1 {text}[0:0.5]", "\udcff"),
            *(f"{text}[0:{'9' * 5000}]", f"{text}[nan:inf]", f"{'9' * 5000} {text}", "1 /dev/zero", " " * 3_000_000),
        )
        content = numbers.choice(odd)
    value = content
    if flag.endswith("path"):
        value = str(folder / "list")
        (folder / "list").write_text(content, errors="surrogateescape")
    value = value[:100_000].replace("\0", "")
    flags = f"--tokenizer-type null --{flag}"
    argv = (*pretrain(folder, data=flags), "--dry-run")
    at = argv.index(f"--{flag}") + 1
    argv = (*argv[:at], value, *argv[at:], *numbers.choice(((), (), ("--split", "9" * 5000))))
    return Input(f"{flag}: {content[:40]!r}", Command(argv, folder))


def json_files(good: Good, folder: Path, numbers: random.Random) -> Input:
    """Odd values in the JSON files of models, adapters, tokenizers, runs and the planner."""
    model, adapter, run = good.copy("model", "adapter", "run", to=folder)
    save = ("--save", str(folder / "out"))
    step = run / "checkpoints" / "step_00000002"
    hf = ("--load-hf", str(model), "--global-batch-size", "4", "--lr", "1e-3", "--train-iters", "1", "--device", "cpu")
    starts = (*hf, "--mock-data", "--micro-batch-size", "1", "--run-dir", str(folder / "new"))
    of_model = (
        ("convert", "--from", "hf", "--to", "megatronish", "--load", str(model), *save),
        ("pretrain", *starts, "--seq-length", "16", "--dry-run"),
        ("plan", "--config", str(good.folder / "config.toml"), "--load-hf", str(model), "--gpus", "2"),
        ("generate", "--load", str(model), "--prompt", "a", "--num-tokens", "1", "--device", "cpu"),
    )
    of_tokenizer = (
        (
            "audit",
            "--data-path",
            str(good.folder / "chats.jsonl"),
            "--tokenizer-model",
            str(model),
            "--seq-length",
            "64",
        ),
        of_model[3],
    )
    of_adapter = (
        ("convert", "--from", "hf", "--to", "hf", "--load", str(model), *save, "--adapter", str(adapter)),
        (*of_model[3], "--adapter", str(adapter)),
    )
    resumed = pretrain(folder, "--train-iters 3")
    of_run = (
        resumed,
        ("generate", "--load", str(run), "--prompt", "a", "--num-tokens", "1", "--device", "cpu"),
        ("convert", "--from", "megatronish", "--to", "hf", "--load", str(run), *save),
    )
    recorded, measured = folder / "recorded.json", folder / "measured.jsonl"
    recorded.write_text(json.dumps({"schedule": "1f1b", "stages": [[["F", 0, 0, 0.0, 1.0], ["B", 0, 0, 1.0, 2.0]]]}))
    measured.write_text(json.dumps(MEASURED))
    files: list[tuple[Path, tuple[tuple[str, ...], ...]]] = [
        *((model / "config.json", of_model),) * 4,
        *((model / "tokenizer_config.json", of_tokenizer),) * 2,
        (model / "tokenizer.json", of_tokenizer),
        *((adapter / "adapter_config.json", of_adapter),) * 3,
        *((path, (resumed,)) for path in sorted(run.glob("*.json"))),
        (step / "state.json", of_run),
        (step / "checksums.json", of_run),
        *((recorded, (("draw", "--recorded", str(recorded)),)),) * 2,
        *((measured, (("plan", "--config", str(good.folder / "config.toml"), "--calibrate", str(measured)),)),) * 2,
    ]
    path, commands = numbers.choice(files)
    text, what = with_odd_value(path.read_text(), numbers)
    if path.name == "state.json" and numbers.random() < 0.7:
        sealed(step, lambda _: path.write_text(text))
    else:
        path.write_text(text)
    return Input(f"{path.name}: {what}", Command(numbers.choice(commands), folder))


MEASURED = {
    "collective": "all_reduce",
    "ranks": 4,
    "nodes": 1,
    "axis": "tp",
    "device": "cpu",
    "fit": {"accepted": True, "bandwidth_bytes_per_s": 1e10, "alpha_s": 1e-5, "ranks": 4, "nodes": 1},
}


def records_of_runs(good: Good, folder: Path, numbers: random.Random) -> Input:
    """metrics.jsonl, health.json and the other files of a run folder, odd, endless or of another kind."""
    (run,) = good.copy("run", to=folder)
    files = [path for path in sorted(run.rglob("*")) if path.is_file() and "checkpoints" not in str(path)]
    path = numbers.choice([*files, run / "metrics.jsonl", run / "health.json", run / "config.toml"])
    how = numbers.choice(("fifo", "zero", "circle", "folder", "deep", "digits", "odd", "long", "many", "bytes"))
    path.unlink(missing_ok=True)
    if how == "fifo":
        os.mkfifo(path)
    elif how in ("zero", "circle"):
        path.symlink_to("/dev/zero" if how == "zero" else path.name)
    elif how == "folder":
        path.mkdir()
    else:
        row = '{"step": 2, "loss": ODD, "grad_norm": ODD, "lr": ODD, "time": ODD}'
        path.write_bytes(
            {
                "deep": b"[" * DEEP,
                "digits": b'{"step": ' + b"9" * 5000 + b"}\n",
                "odd": (row.replace("ODD", numbers.choice(JSON_VALUES)) + "\n").encode(errors="surrogatepass"),
                "long": b'{"step": 1, "a": "' + b"x" * (64 << 20) + b'"}\n',
                "many": b'{"step": 2}\n' * 300_000,
                "bytes": b"\xff\0\n" * 1000,
            }[how]
        )
    return Input(f"{path.name} {how}", Command(pretrain(folder, "--train-iters 3"), folder))


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
        *(foreign_pickles, checkpoint_pickles, safetensors_files, index_files, packed_files, lines, importer_files),
        *(toml_files, lists_of_data, json_files, records_of_runs, path_flags, unreadable, sizes, passwords),
        tokenizer_models,
    )
}
