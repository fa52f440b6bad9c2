"""Errors that end a program with a sentence and an exit status, without a traceback; and texts without passwords.

A URL may hold a password, and a token may stand in a query or an option. What is printed or written, other than to the
server that it is for, shows *** there: every error, every line of a rank, every file that describes a run.
"""

import errno
import re
import signal
from typing import Any, TextIO

STARS = "***"
_SECRET = (
    r"pass(?:word|wd|phrase)?|pwd|secret|token|api_?key|access_?key|account_?key|signature|sig|credential|auth|sas"
)
_IN_URL = (
    # scheme://user:PASSWORD@host, also where the password has a slash; and what may be a token alone, of HTTP.
    # A path of Python has one stroke where the URL has two.
    (re.compile(r"(\b[A-Za-z][\w+.-]*:/{1,3}[^\s/:@'\"]*:)(?!\*\*\*@)[^\s/'\"]+(?=@)"), rf"\1{STARS}"),
    (re.compile(r"(\b[A-Za-z][\w+.-]*:/{1,3}[^\s/:@'\"]*:)(?!\*\*\*@|\d+(?:/|$))[^\s'\"]+(?=@)"), rf"\1{STARS}"),
    (re.compile(r"(\bhttps?:/{1,3})(?!\*\*\*@)[^\s/:@'\"]+(?=@)"), rf"\1{STARS}"),
    (re.compile(rf"([?&;#][\w.%-]*(?:{_SECRET})[\w.%-]*=)[^\s&;#'\"]+", re.IGNORECASE), rf"\1{STARS}"),
)
_ELSEWHERE = (
    (re.compile(r"\b((?:\w+[_-])?(?:password|passwd|passphrase|secret|api_?key|access_?key|auth_?token|access_?token)"
                r"(?:[_-]\w+)?=)(?!\*\*\*)[^\s,;&#'\"]+", re.IGNORECASE), rf"\1{STARS}"),
    (re.compile(r"(\bBearer )[\w.~+/-]{8,}=*"), rf"\1{STARS}"),
    # Tokens by their makers' beginnings: no words between strokes, which a path like hf_wikipedia_english_text has.
    (re.compile(r"\b(hf_|gh[pousr]_|sk-)[A-Za-z0-9]{20,}(?![\w-])"), rf"\1{STARS}"),
    (re.compile(r"\b(github_pat_|glpat-|sk-proj-|sk-ant-)[\w-]{20,}"), rf"\1{STARS}"),
    (re.compile(r"\b(AKIA|ASIA)[A-Z0-9]{16}(?!\w)"), rf"\1{STARS}"),
)  # fmt: skip


def without_passwords(text: str) -> str:
    """The text with *** for passwords in URLs, for tokens in queries and options, and for what looks like a token."""
    if ":/" in text:
        for pattern, hidden in _IN_URL:
            text = pattern.sub(hidden, text)
    for pattern, hidden in _ELSEWHERE:
        text = pattern.sub(hidden, text)
    return text


class StarredStream:
    """A text stream in every respect, that is shown no password, also in warnings and tracebacks of libraries."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the text with *** for its passwords."""
        self._stream.write(without_passwords(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


LONGEST_LINE, MOST_LINES = 2_000, 400
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def shown(text: str, *, longest: int = LONGEST_LINE) -> str:
    """The text as a terminal may show it: control characters spelled out, and a long line without its middle.

    What a user gave stands in sentences, and that may be a file of a stranger: it moves no cursor, and fills no screen.
    """
    text = spelled(text)
    if len(text) <= longest:
        return text
    lines = [_shortened(line, longest) for line in text.split("\n")]
    if len(lines) > MOST_LINES:
        half = MOST_LINES // 2
        lines[half:-half] = [f"[{len(lines) - 2 * half:,} lines]"]
    return "\n".join(lines)


def spelled(text: str) -> str:
    """The text with its control characters as escapes; ends of lines and tabs stay."""
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def _shortened(line: str, longest: int) -> str:
    if len(line) <= longest:
        return line
    head, tail = longest // 2, longest // 4
    return f"{line[:head]}[{len(line) - head - tail:,} characters]{line[-tail:]}"


MISPLACED = frozenset(
    (
        *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EACCES, errno.EPERM, errno.ELOOP),
        *(errno.ENAMETOOLONG, errno.EINVAL, errno.EROFS, errno.ENXIO, errno.ENODEV, errno.ENOTEMPTY),
    )
)


def is_misplaced(error: BaseException) -> bool:
    """Whether the system refused a path that the user can correct, rather than failed: trying again does not help."""
    return isinstance(error, OSError) and error.filename is not None and error.errno in MISPLACED


class UserError(ValueError):
    """Mistake that the user can correct: the sentence has the value, the rule and the remedy. Exit status 2."""

    def __str__(self) -> str:
        return shown(without_passwords(super().__str__()))


class RunError(RuntimeError):
    """Failure of the machine that ended a run: the sentence says what happened and what to do. Exit status 1."""

    def __str__(self) -> str:
        return shown(without_passwords(super().__str__()))


class WholeRunError(RunError):
    """RunError about the run as a whole, which all of its ranks raise: the sentence itself names those at fault."""


def signal_name(number: int) -> str:
    """Name of a signal, SIGKILL; of most real-time signals, which have none, the number: signal 40."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
