"""Demonstration of a model of bytes: how many bits a byte takes, against compressors on texts that it has not seen.

    make bytes

Texts of Python's standard library are cut into pieces where a function or a class begins. The pieces of every
twentieth text are held out; the model learns the others. Then both sides are asked for the same held-out bytes, each
piece by itself: deflate compresses it, the model's bits are those that an arithmetic coder would write with its
predictions. Deflate has seen nothing before, so it is asked again with learned text as its dictionary, and gzip and xz
for all pieces in one file, where they learn from those before.
"""

import argparse
import gzip
import json
import lzma
import os
import re
import shlex
import subprocess
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HELD_OUT_OF = 20
BEGINNING = re.compile(r"^(?=(?: {4})?(?:async )?(?:def|class) )", re.MULTILINE)
WINDOW = 2**15
"""Bytes that deflate looks back, and so the longest dictionary."""
STRIDE = "128"
"""Bytes of a long piece that are predicted at once; each sees at least the rest of a window before it."""


def divided(corpus: Path, folder: Path) -> tuple[Path, Path]:
    """The files of the pieces that are learned and of those that are held out, written to the folder."""
    learned, held_out = folder / "bytes.jsonl", folder / "held_out.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    with learned.open("w", encoding="utf-8") as to_learn, held_out.open("w", encoding="utf-8") as to_hold:
        for number, line in enumerate(corpus.read_text(encoding="utf-8").splitlines()):
            for piece in filter(None, BEGINNING.split(json.loads(line)["text"])):
                (to_learn if number % HELD_OUT_OF else to_hold).write(json.dumps({"text": piece}) + "\n")
    return learned, held_out


def pieces_of(path: Path) -> list[bytes]:
    """Texts of a file of JSON lines."""
    return [json.loads(line)["text"].encode() for line in path.read_text(encoding="utf-8").splitlines()]


def deflated(text: bytes, dictionary: bytes) -> int:
    """Bytes of a text in deflate alone, without the header and the checksum of gzip."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_DEFAULT_STRATEGY, dictionary)
    return len(packer.compress(text)) + len(packer.flush())


def compressed(learned: Path, held_out: Path) -> dict[str, float]:
    """Bits per byte of the held-out pieces, of each way to compress them."""
    pieces = pieces_of(held_out)
    text, dictionary = b"".join(pieces), b"".join(pieces_of(learned))[-WINDOW:]
    sizes = {
        "deflate, each piece by itself": sum(deflated(piece, b"") for piece in pieces),
        "deflate, each after 32 KiB of learned text": sum(deflated(piece, dictionary) for piece in pieces),
        "gzip -9, all pieces in one file": len(gzip.compress(text, 9)),
        "xz, all pieces in one file": len(lzma.compress(text)),
    }
    return {name: 8 * size / len(text) for name, size in sizes.items()}


def bits_of_model(results: Path, held_out: Path) -> float:
    """Bits per byte of the model: those of its losses, the ends of pieces included, and 8 for each first byte."""
    pieces = pieces_of(held_out)
    first_bytes = 8 * len(pieces) / sum(map(len, pieces))
    return float(json.loads(results.read_text(encoding="utf-8"))["bits_per_byte"]) + first_bytes


def python(*words: str | Path) -> None:
    """Print a command and run it; if it fails, its exit status is that of the demonstration."""
    said = [str(word) for word in words]
    print(f"$ python {shlex.join(said)}", flush=True)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    if status := subprocess.run([sys.executable, *said], cwd=ROOT, env=environment, check=False).returncode:
        sys.exit(status)


def compare(corpus: Path, folder: Path, run_dir: Path, flags: Sequence[str]) -> dict[str, float]:
    """Bits per byte of the compressors and of the model, which is trained unless the run has ended already."""
    learned, held_out = divided(corpus, folder)
    prefix = folder / "bytes"
    tokenized = ("--output-prefix", prefix, "--tokenizer-type", "bytes", "--append-eod")
    python("tools/preprocess_data.py", "--input", learned, *tokenized)
    data = ("--data-path", f"{prefix}_text_document", "--run-dir", run_dir)
    python("pretrain_gpt.py", "--config", "examples/byte_model.toml", *data, *flags)
    results = folder / "bits.json"
    read = ("--load", run_dir, "--data-path", held_out, "--per-document", "--stride", STRIDE)
    python("tools/evaluate.py", *read, "--output", results)
    return {**compressed(learned, held_out), "the model, each piece by itself": bits_of_model(results, held_out)}


def main(argv: Sequence[str]) -> None:
    """Read the flags, run the comparison, print it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--corpus", type=Path, default=ROOT / "demo" / "python.jsonl", help="JSON lines with texts")
    parser.add_argument("--folder", type=Path, default=ROOT / "demo", help="where the divided texts go")
    parser.add_argument("--run-dir", type=Path, default=ROOT / "runs" / "bytes", help="the run of the model")
    parser.add_argument("flags", nargs="*", help="flags of the run, after --")
    arguments = parser.parse_args(argv)
    for name, bits in compare(arguments.corpus, arguments.folder, arguments.run_dir, arguments.flags).items():
        print(f"{name:42} {bits:.3f} bits per byte")


if __name__ == "__main__":
    main(sys.argv[1:])
