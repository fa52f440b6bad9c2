"""Questions of a judged comparison: JSON lines as MT-bench has them, and the temperature of each category.

A line is an object with `question_id`, `category`, `turns` (texts of the user, one after another) and, if there is one,
`reference` (a solution of each turn): Zheng et al. 2023 (arXiv:2306.05685, section 2.2).
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatronish.core.errors import UserError
from megatronish.core.files import ordinary

PACKAGE = Path(__file__).parents[1]
SHIPPED = (PACKAGE / "configs" / "judge_questions.jsonl", PACKAGE.parent / "examples" / "judge_questions.jsonl")
"""Where an installed package has its questions, and where a checkout has them."""

TEMPERATURES = {
    "writing": 0.7,
    "roleplay": 0.7,
    "extraction": 0.0,
    "math": 0.0,
    "coding": 0.0,
    "reasoning": 0.0,
    "stem": 0.1,
    "humanities": 0.1,
}
"""Of each category of MT-bench, as FastChat samples the answers."""
OTHER_TEMPERATURE = 0.7  # of categories that are not in the table
NO_CATEGORY = "general"
MOST_BYTES = 1 << 26  # of a file of questions
MOST_TOLD = 10  # problems of a file that are named


@dataclass(frozen=True)
class Question:
    """A question with its turns. `references` has a solution for each of the first turns, or None in its place."""

    identity: int | str
    category: str
    turns: tuple[str, ...]
    references: tuple[str | None, ...] = ()
    own_temperature: float | None = None

    @property
    def temperature(self) -> float:
        """Its own, or that of its category."""
        if self.own_temperature is not None:
            return self.own_temperature
        return TEMPERATURES.get(self.category.lower(), OTHER_TEMPERATURE)

    def reference(self, turn: int) -> str | None:
        """Solution of a turn, counted from 0."""
        return self.references[turn] if turn < len(self.references) else None


def shipped_questions() -> Path:
    """The questions that come with megatronish. UserError if they are not there."""
    file = next((path for path in SHIPPED if path.is_file()), None)
    if file is None:
        raise UserError("--questions is not given, and the questions of megatronish are not installed; name a file")
    return file


def read_questions(path: Path, *, limit: int | None = None) -> list[Question]:
    """The questions of a file, or the first `limit` ones. UserError with the lines that are wrong."""
    try:
        with ordinary(path).open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise UserError(f"--questions {path} cannot be read: {error.strerror}; name a file of JSON lines") from error
    if len(content) > MOST_BYTES:
        raise UserError(f"--questions {path} has more than {MOST_BYTES:,} bytes, too much for questions; cut it")
    questions: list[Question] = []
    lines: dict[str, int] = {}
    problems = []
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        question_or_problems = _read_line(line)
        if isinstance(question_or_problems, Question):
            first = lines.setdefault(str(question_or_problems.identity), number)
            if first == number:
                questions.append(question_or_problems)
                continue
            question_or_problems = [
                f"question_id {question_or_problems.identity} is that of line {first}, too; give each question its own"
            ]
        problems += [f"--questions {path}, line {number}: {problem}" for problem in question_or_problems]
    if problems:
        more = [f"and {len(problems) - MOST_TOLD} more"] * (len(problems) > MOST_TOLD)
        raise UserError("\n".join([*problems[:MOST_TOLD], *more]))
    if not questions:
        raise UserError(f"--questions {path} has no question; write one object a line, as MT-bench's question.jsonl")
    return questions[:limit]


def _read_line(line: bytes) -> Question | Sequence[str]:
    """The question of a line, or what is wrong with it."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        return [f"it is no JSON ({error}); write one object a line"]
    if not isinstance(record, dict):
        return ['it is no object; write {"question_id": 1, "category": "writing", "turns": ["..."]}']
    if problems := [*_problems(record)]:
        return problems
    reference = record.get("reference") or ()
    temperature = _temperature(record)
    return Question(
        identity=record["question_id"],
        category=record.get("category") or NO_CATEGORY,
        turns=tuple(record["turns"]),
        references=(reference,) if isinstance(reference, str) else tuple(each or None for each in reference),
        own_temperature=None if temperature is None else float(temperature),
    )


def _temperature(found: dict[str, Any]) -> Any:
    """A question's own temperature; `required_temperature` is FastChat's name for it."""
    return found.get("temperature", found.get("required_temperature"))


def _problems(found: dict[str, Any]) -> Iterator[str]:
    """What is wrong with the fields of a question."""
    identity, category, turns = found.get("question_id"), found.get("category"), found.get("turns")
    if isinstance(identity, bool) or not isinstance(identity, int | str) or not _is_text(str(identity)):
        yield "question_id must be a number or a text"
    if category is not None and not _is_text(category):
        yield "category must be a text; or leave it out"
    if not isinstance(turns, list) or not turns or not all(map(_is_text, turns)):
        yield 'turns must be a list of texts, none of them empty: ["first question", "next one"]'
    reference = found.get("reference")
    entries = reference if isinstance(reference, list) else [reference]
    if not all(each is None or each == "" or _is_text(each) for each in entries):
        yield "reference must be a list of texts, one for each turn; or leave it out"
    elif isinstance(turns, list) and len(entries) > max(1, len(turns)):
        yield f"reference has {len(entries)} texts for {len(turns)} turns; leave the others out"
    temperature = _temperature(found)
    is_number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    if temperature is not None and not (is_number and math.isfinite(temperature) and temperature >= 0):
        yield "temperature must be a number, 0 or more; or leave it out"


def _is_text(found: Any) -> bool:
    """Whether it is a text with words in it, and one that can be written: half of a surrogate pair cannot."""
    return (
        isinstance(found, str) and bool(found.strip()) and not any("\ud800" <= letter <= "\udfff" for letter in found)
    )
