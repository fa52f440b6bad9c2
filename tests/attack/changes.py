"""Changes that make a file malformed: flipped bits, other kinds of files, odd values in its text."""

import os
import random
import re
from collections.abc import Callable
from pathlib import Path

Change = Callable[[Path, random.Random], None]

ODD_WORDS = (
    *(
        "",
        " ",
        "-",
        "--",
        "0",
        "-1",
        "1.5",
        "1e400",
        "-1e400",
        "nan",
        "inf",
        "None",
        "null",
        "true",
        "[]",
        "{}",
        "0x10",
    ),
    *(
        "1_000",
        "٣",
        "９",
        "99999999999999999999",
        "9" * 5000,
        "x" * 5000,
        "a/" * 2500,
        "\udc80",
        "\udcff\udcfe",
        "\x01",
    ),
    *(
        "é",
        "日本",
        "\u202e",
        "a b",
        "a\nb",
        "a\tb",
        "%s",
        "{0}",
        "$HOME",
        "~",
        "/",
        ".",
        "..",
        "/dev/zero",
        "/dev/full",
    ),
    *(
        "/dev/null",
        "/proc/self/mem",
        "/proc/self/environ",
        "/sys/kernel",
        "http://127.0.0.1:9/x",
        "s3://a/b",
        "file:///x",
    ),
    *("1,2,3", "1,-1", ",", ":", "a:b:c", "[0:1]", "[1:0]", "x[0:0.5]", "1e-400", "+5", "5 ", "１.５", "--help-me"),
)
ODD_VALUES = (
    *("null", "true", "-1", "0", "1.5", "1e999", "-1e999", "NaN", "[]", "{}", '""', '"x"', '"\\ud800"', "[[]]"),
    *(
        "99999999999999999999999",
        "1" * 5000,
        '{"a": 1}',
        '["a"]',
        "2147483648",
        "9223372036854775808",
        "0.0000001",
        '"a\\u0000b"',
    ),
)
TEXTS = (
    *(
        b"",
        b"\n",
        b"{}",
        b"[]",
        b"null",
        b"0",
        b'"x"',
        b"{",
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b"\0" * 64,
        b"\xff\xfe\xfd",
    ),
    *(b"\xef\xbb\xbf{}", b"\x1f\x8b\x08\0broken", b"PK\x03\x04broken", b"\x80\x04\x95broken.", b"\x89PNG\r\n\x1a\n"),
    *(
        b"PAR1broken",
        b"\x28\xb5\x2f\xfdbroken",
        b"BZh9broken",
        b"version https://git-lfs.github.com/spec/v1\n",
        b"x" * 3_000_000,
    ),
)


def flip_bits(path: Path, numbers: random.Random) -> None:
    """One to three bits."""
    data = bytearray(path.read_bytes())
    for _ in range(numbers.randint(1, 3)):
        if data:
            data[numbers.randrange(len(data))] ^= 1 << numbers.randrange(8)
    path.write_bytes(data)


def flip_in_head(path: Path, numbers: random.Random) -> None:
    """One bit of the first 64 bytes, where formats have their lengths."""
    data = bytearray(path.read_bytes())
    if data:
        data[numbers.randrange(min(64, len(data)))] ^= 1 << numbers.randrange(8)
    path.write_bytes(data)


def cut(path: Path, numbers: random.Random) -> None:
    """Shorter by some bytes."""
    size = path.stat().st_size
    os.truncate(path, numbers.choice((0, 1, size // 2, max(size - 1, 0), numbers.randrange(size + 1))))


def lengthen(path: Path, numbers: random.Random) -> None:
    """Longer by some bytes."""
    with path.open("ab") as file:
        file.write(numbers.choice((b"\0", b"\n", b"}", numbers.randbytes(100))))


def replace_part(path: Path, numbers: random.Random) -> None:
    """Some bytes in the middle are others."""
    data = bytearray(path.read_bytes())
    if data:
        start = numbers.randrange(len(data))
        data[start : start + 8] = numbers.choice((b"\0" * 8, b"\xff" * 8, numbers.randbytes(8)))
    path.write_bytes(data)


def replace_all(path: Path, numbers: random.Random) -> None:
    """Another file under its name."""
    path.write_bytes(numbers.choice(TEXTS))


def remove(path: Path, _numbers: random.Random) -> None:
    """No file."""
    path.unlink()


def be_folder(path: Path, _numbers: random.Random) -> None:
    """A folder in its place."""
    path.unlink()
    path.mkdir()


def be_pipe(path: Path, _numbers: random.Random) -> None:
    """A pipe in its place, which no process writes."""
    path.unlink()
    os.mkfifo(path)


def be_device(path: Path, numbers: random.Random) -> None:
    """A device in its place, endless or empty."""
    path.unlink()
    path.symlink_to(numbers.choice(("/dev/zero", "/dev/full", "/dev/null", "/dev/random")))


def be_link(path: Path, numbers: random.Random) -> None:
    """A link to nothing, or to itself."""
    path.unlink()
    path.symlink_to(numbers.choice(("/nowhere", path.name)))


def forbid(path: Path, _numbers: random.Random) -> None:
    """No permission to read; cases with it run as another user."""
    path.chmod(0)


def change_number(path: Path, numbers: random.Random) -> None:
    """A number of a text is an odd value."""
    _replace_match(path, r"(?<![\w.])-?\d+(\.\d+)?", numbers.choice(ODD_VALUES), numbers)


def change_string(path: Path, numbers: random.Random) -> None:
    """A string of a text is an odd value."""
    _replace_match(path, r'"[^"\n]*"', numbers.choice(ODD_VALUES), numbers)


def change_letter(path: Path, numbers: random.Random) -> None:
    """A character of a text is missing, doubled, or another."""
    text = path.read_text(errors="surrogateescape")
    if text:
        at = numbers.randrange(len(text))
        other = numbers.choice(
            ("", text[at] * 2, "\0", "\x01", '"', "{", "]", "\\", "\udcff", "é", "\r", "#", ":", "=", ",")
        )
        text = text[:at] + other + text[at + 1 :]
    path.write_bytes(text.encode(errors="surrogateescape"))


def repeat_line(path: Path, numbers: random.Random) -> None:
    """A line of a text is there twice, or is missing."""
    lines = path.read_bytes().splitlines(keepends=True)
    if lines:
        at = numbers.randrange(len(lines))
        lines[at : at + 1] = [lines[at]] * numbers.choice((0, 2))
    path.write_bytes(b"".join(lines))


def _replace_match(path: Path, pattern: str, other: str, numbers: random.Random) -> None:
    text = path.read_text(errors="surrogateescape")
    if matches := list(re.finditer(pattern, text)):
        match = numbers.choice(matches)
        text = text[: match.start()] + other + text[match.end() :]
    path.write_bytes(text.encode(errors="surrogateescape"))


KINDS: tuple[Change, ...] = (be_folder, be_pipe, be_device, be_link, forbid, remove)
BYTES: tuple[Change, ...] = (flip_bits, flip_in_head, cut, lengthen, replace_part, replace_all)
LETTERS: tuple[Change, ...] = (change_number, change_string, change_letter, repeat_line)


def any_change(path: Path, numbers: random.Random, *, is_text: bool) -> Change:
    """Change the file in one of these ways; returns which."""
    groups = [BYTES, KINDS, LETTERS] if is_text else [BYTES, KINDS]
    change = numbers.choice(numbers.choices(groups, (3, 1, 4)[: len(groups)])[0])
    change(path, numbers)
    return change
