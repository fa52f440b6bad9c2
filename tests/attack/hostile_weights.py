"""Hostile files of weights and tokens: pickles that run code, and headers and indices that lie."""

import hashlib
import io
import json
import os
import pickle
import random
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from forked import Command
from hostile_values import CANARY, DEEP, with_odd_value
from inputs import TEXT, Good, Input, pretrain
from saved_runs import sealed

from megatronish.checkpoint.checksums import Checksums, Span
from megatronish.checkpoint.foreign import BytesPlace, ListedTensor, Rectangle, read_listing, write_listing

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


def distributed_pickles(good: Good, folder: Path, numbers: random.Random) -> Input:
    """Bombs in .metadata, common.pt and rectangles of Megatron-LM's torch_dist, and listings that lie."""
    (load,) = good.copy("megatron-dist", to=folder)
    (iteration,) = (folder for folder in load.iterdir() if folder.is_dir())
    what, data = numbers.choice(list(pickled_bombs(folder / CANARY).items()))
    place, target, is_read = numbers.choice((".metadata", "common.pt", "rectangle", "listing")), "hf", True
    if place == ".metadata":
        (iteration / place).write_bytes(data)
    elif place == "common.pt":
        what += _in_archive(iteration / place, data, numbers)
    else:
        listing = read_listing(iteration)
        # Nothing reads a second copy of weights in fp32, and no model of Hugging Face has moments.
        name = numbers.choice(sorted(name for name in listing.tensors if "param." not in name))
        target = "megatronish" if ".state." in name else "hf"
        shape, dtype, (rectangle,) = listing.tensors[name]
        if place == "rectangle":
            what += _in_archive(iteration / "__9_0.distcp", data, numbers)
            lie = BytesPlace("__9_0.distcp", 0, (iteration / "__9_0.distcp").stat().st_size)
            forged = ListedTensor(shape, dtype, (rectangle._replace(place=lie),))
        else:
            what, forged = numbers.choice(list(_lies(listing.tensors[name]).items()))
        write_listing(iteration, listing.tensors | {name: forged}, listing.objects)
        is_read = target == "hf" or forged.shape == shape  # moments in another shape than their weight are left out
    argv = ("convert", "--from", "megatron", "--to", target, "--load", str(load), "--save", str(folder / "out"))
    return Input(f"torch_dist {place}: {what}", Command(argv, folder), must_fail=is_read)


def _lies(tensor: ListedTensor) -> dict[str, ListedTensor]:
    """A tensor as a listing may describe it wrongly."""
    shape, dtype, (rectangle,) = tensor
    file, start, length = rectangle.place
    huge = (*shape[:-1], 2**40)
    empty = (0,) * len(shape)
    return {
        "huge": ListedTensor(huge, dtype, (rectangle._replace(sizes=huge),)),
        "none": ListedTensor(shape, dtype, ()),
        "empty": ListedTensor(empty, dtype, (rectangle._replace(sizes=empty),)),
        "short": ListedTensor(shape, dtype, (rectangle._replace(place=BytesPlace(file, start, length // 2)),)),
        "elsewhere": ListedTensor(shape, dtype, (rectangle._replace(place=BytesPlace(file, start + 7, length)),)),
        "far away": ListedTensor(shape, dtype, (rectangle._replace(place=BytesPlace(file, 2**61, 2**61)),)),
        "no bytes": ListedTensor(shape, dtype, (rectangle._replace(place=BytesPlace(file, start, 0)),)),
        "another type": ListedTensor(shape, torch.float64, (rectangle,)),
        "a number": ListedTensor((), dtype, (Rectangle((), (), rectangle.place),)),
    }


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
