"""Formats that preprocessing does not read: known by the first bytes of a file, with what makes JSON lines of them."""

import json
from pathlib import Path

_UTF16 = "UTF-16 text; turn it into UTF-8: iconv -f UTF-16 -t UTF-8"
FOREIGN = (
    (0, b"PK\x03\x04", "a zip archive; unpack it and name the files in it"),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive; unpack it and name the files in it"),
    (257, b"ustar", "a tar archive; unpack it and name the files in it"),
    (0, b"\x04\x22\x4d\x18", "compressed by lz4; unpack it (lz4 -d) or compress it by gzip or zstd"),
    (0, b"\x89HDF\r\n\x1a\n", "HDF5; write its texts as JSON lines, for example with h5py and json"),
    (0, b"ARROW1", "an Arrow file; write it as Parquet with pyarrow, or as JSON lines"),
    (0, b"\xff\xff\xff\xff", "an Arrow stream, as the data sets of Hugging Face are cached; use Dataset.to_parquet"),
    (0, b"FEA1", "a Feather file; write it as Parquet with pyarrow, or as JSON lines"),
    (0, b"ORC", "ORC; write it as Parquet with pyarrow"),
    (0, b"Obj\x01", "Avro; write its texts as JSON lines"),
    (0, b"SQLite format 3", "a SQLite database; write its texts as JSON lines"),
    (0, b"\x93NUMPY", "a numpy array; write its texts as JSON lines"),
    (0, b"\x80\x04\x95", "a pickle of Python; write its texts as JSON lines"),
    (0, b"\x80\x05\x95", "a pickle of Python; write its texts as JSON lines"),
    (0, b"\x89PNG", "a picture; name files of text"),
    (0, b"\xff\xd8\xff", "a picture; name files of text"),
    (0, b"%PDF", "a PDF document; extract its text and write it as JSON lines"),
    (0, b"MMIDIDX", "an index that is tokenized already; give its prefix to pretrain_gpt.py --data-path"),
    (0, b"\xff\xfe", _UTF16),
    (0, b"\xfe\xff", _UTF16),
)
_MARKUP = "XML or HTML; extract its text and write it as JSON lines"
_TABLE = "a table of {}; write each row as a JSON object on a line, for example with csv.DictReader and json of Python"
ENDINGS = {".csv": _TABLE.format("CSV"), ".tsv": _TABLE.format("TSV"), ".xml": _MARKUP, ".html": _MARKUP}


def foreign_format(path: Path, head: bytes) -> str | None:
    """What a file is that begins with `head`, and what to do with it; None if it may be JSON."""
    for offset, magic, what in FOREIGN:
        if head[offset : offset + len(magic)] == magic:
            return what
    if head[1:2] == b"\0" and head[3:4] == b"\0":
        return _UTF16.replace("16", "16LE")
    if head[0:1] == b"\0" and head[2:3] == b"\0" and head[1:2] in (b"{", b"["):
        return _UTF16.replace("16", "16BE")
    start = head.lstrip()
    if start[:5].lower() in (b"<?xml", b"<!doc", b"<html"):
        return _MARKUP
    ending = next((suffix for suffix in path.suffixes if suffix in ENDINGS), None)
    return ENDINGS[ending] if ending is not None and start[:1] not in b"{[" else None


def text_format(head: bytes) -> str | None:
    """What a file without any good line seems to be, by its first bytes, and what to do with it; None if JSON lines."""
    start = head.lstrip()
    line = start.partition(b"\n")[0].decode("utf-8", "replace").strip()
    if not start or (line.startswith("{") and _is_json(line)):
        return None
    if b"\0" in head or line.count("\ufffd") > len(line) // 10:
        return "binary data, and no text"
    if line.startswith("{"):
        return "JSON objects that go over several lines; write one object a line, as jq -c . does"
    if line.startswith(('"', "[")):
        return 'JSON without keys; write each text as a line {"text": "..."}'
    return 'plain text; write each document as a line {"text": "..."}'


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True
