"""Readers of input files: each yields batches of documents as lines of JSON, whatever the format of the file.

JSON lines come as they are; of a JSON array each element becomes a line, and of a Parquet file each row. Nothing is
read whole: memory does not grow with the input.
"""

import codecs
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from megatronish.core.errors import UserError
from megatronish.core.foreign import json_value
from megatronish.core.remote import Location, location
from megatronish.data.inputs import (
    ARRAY_OF_OBJECTS,
    BOM,
    HEAD_BYTES,
    OpenInput,
    is_parquet,
    open_input,
    optional_library,
    unpacking,
)
from megatronish.data.pieces import InputPiece
from megatronish.data.stores import open_binary, size_of

BATCH_BYTES = 1 << 18
BATCH_ROWS, ROWS_AT_ONCE = 256, 16
LINE_BITS = 40
"""Bits of the number of a line in the position of a document."""
LONGEST_LINE = 1 << 28  # bytes
LONGEST_ELEMENT = 1 << 28  # characters of an element of a JSON array

_BLANK = re.compile(r"[ \t\r\n]*")


class Batch(NamedTuple):
    """Lines that are sent to a worker together; `num_bytes` of the file were read for them.

    `first_line` counts from 1: lines of a file from its byte `origin` on, elements of an array, rows of a table.
    `piece` is the number of the piece of input in a plan.
    """

    path: str
    first_line: int
    lines: list[bytes]
    num_bytes: int
    origin: int = 0
    piece: int = 0
    duplicates: Mapping[int, int] = {}
    """Lines that are left out because their texts are those of others, and the positions of these others."""

    def position(self, line: int) -> int:
        """A number of a line that rises with the order of the input."""
        return (self.piece << LINE_BITS) + line


def read_batches(path: Location, json_keys: Sequence[str], piece: InputPiece | None = None) -> Iterator[Batch]:
    """Batches of a file, about 256 KiB each, or of a piece of it. UserError if it is another format, or broken.

    Of a table the columns of `json_keys` are read, without a key all.
    """
    piece = piece or InputPiece(str(path))
    if is_parquet(path):
        yield from _rows(path, json_keys, piece)
        return
    done = 0

    def where() -> str:
        return f"after line {done}" if done else "near its beginning"

    with unpacking(path, where), open_input(path) as file:
        head = file.text.peek(HEAD_BYTES).removeprefix(BOM)  # type: ignore[attr-defined]
        batches = _elements(path, file) if ARRAY_OF_OBJECTS.match(head) else _lines(path, file, piece)
        for batch in batches:
            yield batch
            done = batch.first_line + len(batch.lines) - 1


def batches_of(pieces: Sequence[InputPiece], columns: Sequence[str], *, first_piece: int = 0) -> Iterator[Batch]:
    """Batches of pieces, in their order; `first_piece` is the number of the first among those of all tasks."""
    for number, piece in enumerate(pieces, first_piece):
        for batch in read_batches(location(piece.path), columns, piece):
            yield batch._replace(piece=number)


def _lines(path: Location, file: OpenInput, piece: InputPiece) -> Iterator[Batch]:
    if piece.start:
        file.raw.seek(piece.start)
    line, position, begun = 1, piece.start, bytearray()
    while block := file.text.read(_room(file, piece)):
        head, newline, rest = block.rpartition(b"\n")
        if not newline:
            begun += block
            if len(begun) > LONGEST_LINE:
                raise UserError(
                    f"--input {path}: line {line} has more than {LONGEST_LINE:,} bytes, more than any document; write "
                    "one object a line"
                )
            continue
        if not begun and not head.strip():  # no line of it has a document
            line, begun = line + head.count(b"\n") + 1, bytearray(rest)
            continue
        lines = bytes(begun + head).split(b"\n")
        yield Batch(str(path), line, lines, file.raw.tell() - position, piece.start)
        line, position, begun = line + len(lines), file.raw.tell(), bytearray(rest)
    if piece.end is not None and file.raw.tell() < piece.end:
        raise UserError(
            f"--input {path} ends at byte {file.raw.tell():,}, before its piece does: it was cut; plan again"
        )
    if begun or file.raw.tell() > position:  # also of blank lines alone: what was read counts as done
        yield Batch(str(path), line, [bytes(begun)], file.raw.tell() - position, piece.start)


def _room(file: OpenInput, piece: InputPiece) -> int:
    """Bytes that are read next: a piece that ends in the middle of a file is of a file without compression."""
    return BATCH_BYTES if piece.end is None else min(BATCH_BYTES, piece.end - file.raw.tell())


class _ArrayText:
    """Text of a file that holds one JSON array, from which elements are taken one after another."""

    def __init__(self, path: Location, file: OpenInput) -> None:
        self._path, self._file = path, file
        self._decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self._text, self._at = "", 0
        self.taken = 0

    def _read_more(self) -> bool:
        """Add to the text as much again as is left of it; whether there was any."""
        left = len(self._text) - self._at
        if left > LONGEST_ELEMENT:
            raise self.broken(f"it does not end within {LONGEST_ELEMENT:,} characters")
        packed = self._file.text.read(max(BATCH_BYTES, left))
        try:
            self._text, self._at = self._text[self._at :] + self._decode(packed, not packed), 0
        except UnicodeDecodeError as error:
            raise self.broken(str(error)) from error
        return bool(packed)

    def mark(self) -> str:
        """The next character that is not blank; "" at the end of the file."""
        while True:
            match = _BLANK.match(self._text, self._at)
            assert match is not None
            self._at = match.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read_more():
                return ""

    def skip(self) -> None:
        """Pass over the character that `mark` returned."""
        self._at += 1

    def element(self) -> bytes:
        """The next element, as it is written in the file."""
        while True:
            try:
                _, end = json.JSONDecoder().raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if self._read_more():
                    continue
                raise self.broken(error.msg) from error
            except RecursionError as error:
                raise self.broken("it is nested too deep") from error
            if end == len(self._text) and self._read_more():
                continue  # a number may go on
            element, self._at = self._text[self._at : end], end
            self.taken += 1
            return element.encode("utf-8", "surrogatepass")

    def broken(self, why: str) -> UserError:
        """The error of an element that cannot be read."""
        return UserError(
            f"--input {self._path} is a JSON array whose element {self.taken + 1} cannot be read: {why}; correct it, "
            "or write one object a line"
        )


def _elements(path: Location, file: OpenInput) -> Iterator[Batch]:
    """Elements of a JSON array."""
    array = _ArrayText(path, file)
    lines: list[bytes] = []
    position = num_bytes = 0
    assert array.mark() == "["
    array.skip()
    while array.mark() != "]":
        if array.taken:
            if (mark := array.mark()) != ",":
                raise array.broken("there is no comma before it" if mark else "the file ends before it")
            array.skip()
            array.mark()
        lines.append(array.element())
        num_bytes += len(lines[-1])
        if num_bytes >= BATCH_BYTES:
            yield Batch(str(path), array.taken - len(lines) + 1, lines, file.raw.tell() - position)
            lines, position, num_bytes = [], file.raw.tell(), 0
    array.skip()
    if array.mark():
        raise UserError(f"--input {path} continues after its JSON array; write one object a line, or one array a file")
    if lines or file.raw.tell() > position:
        yield Batch(str(path), array.taken - len(lines) + 1, lines, file.raw.tell() - position)


def _rows(path: Location, json_keys: Sequence[str], piece: InputPiece) -> Iterator[Batch]:
    """Rows of the row groups of a piece of a Parquet file, each an object of the columns that `json_keys` name."""
    parquet = optional_library("pyarrow.parquet", extra="parquet", what="Parquet files")
    arrow = optional_library("pyarrow", extra="parquet", what="Parquet files")
    row = 1
    try:
        with open_binary(path) as opened, parquet.ParquetFile(opened) as file:
            groups = list(range(file.num_row_groups)[piece.start : piece.end])
            names = file.schema_arrow.names
            columns = {key if key in names else key.partition(".")[0] for key in json_keys} or set(names)
            if missing := sorted(columns - set(names)):
                raise UserError(
                    f"--input {path} has no column {missing[0]}; --json-keys names one or more of {', '.join(names)}"
                )
            num_rows, size = max(file.metadata.num_rows, 1), size_of(path)
            row += sum(file.metadata.row_group(group).num_rows for group in range(piece.start))
            lines, length = list[bytes](), 0
            # A value that is there once may be that of many rows: few of them are unpacked at a time.
            tables = file.iter_batches(batch_size=ROWS_AT_ONCE, row_groups=groups, columns=sorted(columns))
            for table in tables if groups else ():
                for record in table.to_pylist():
                    lines.append(_as_line(record))
                    length += len(lines[-1])
                    if length >= BATCH_BYTES or len(lines) == BATCH_ROWS:
                        yield Batch(str(path), row, lines, size * len(lines) // num_rows)
                        row, lines, length = row + len(lines), [], 0
            if lines:
                yield Batch(str(path), row, lines, size * len(lines) // num_rows)
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"--input {path} cannot be read after row {row - 1}: {error}; copy it again") from error


def _as_line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, default=_as_json, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _as_json(value: Any) -> str | None:
    """Text of bytes that are UTF-8; None, which is not a text, for what JSON does not have."""
    try:
        return value.decode() if isinstance(value, bytes) else None
    except UnicodeDecodeError:
        return None


def read_record(line: bytes) -> dict[str, Any]:
    """The object of a JSON line; ValueError if it has none."""
    record = json_value(line.decode("utf-8-sig"))
    if not isinstance(record, dict):
        raise ValueError(f"a line must be a JSON object, not {type(record).__name__}")
    return record


def value_under(record: Mapping[str, Any], key: str) -> Any:
    """What an object has under a key; ValueError if it has none. `meta.body` is a key inside of `meta`."""
    if key in record:
        return record[key]
    outer, dot, inner = key.partition(".")
    if not dot or not isinstance(record.get(outer), dict):
        raise ValueError(f"key {key!r} is missing")
    try:
        return value_under(record[outer], inner)
    except ValueError:
        raise ValueError(f"key {key!r} is missing") from None
