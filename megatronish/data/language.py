"""Language of documents: by a fastText model that is given (lid.176.bin), else by py3langid, which has its own.

Both give one language and a score from 0 to 1 for a text, the same each time. What is judged is the beginning of a
document, with white space made equal.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, NamedTuple

from megatronish.core.errors import UserError

MIN_SCORE = 0.65
JUDGED = 20_000
"""Characters of a document that are judged."""
LABEL = "__label__"


class Judged(NamedTuple):
    """Language of a text, by its code, and how sure it is, from 0 to 1."""

    language: str
    score: float


@dataclass(frozen=True)
class LanguageFilter:
    """Languages whose documents stay, if any are named."""

    languages: tuple[str, ...] = ()
    model: str | None = None
    """A file of fastText; None is py3langid."""
    min_score: float = MIN_SCORE

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "LanguageFilter":
        """From settings under the names of their flags; UserError for those that make no sense."""
        made = cls(
            tuple(settings.get("filter_language", ())),
            settings.get("language_model"),
            settings.get("min_language_score", MIN_SCORE),
        )
        if made.model is not None and not made.languages:
            raise UserError(f"--language-model {made.model} is of no use without --filter-language; add it, such as en")
        if not 0 <= made.min_score <= 1:
            raise UserError(
                f"--min-language-score {made.min_score:g} must be at least 0 and at most 1; for example {MIN_SCORE}"
            )
        return made

    @property
    def rule(self) -> str:
        """Name under which documents are counted that are left out."""
        return f"--filter-language {' '.join(self.languages)}"

    @property
    def libraries(self) -> dict[str, str]:
        """Versions of libraries that have a model of their own. UserError if one is missing."""
        if not self.languages or self.model is not None:
            return {}
        _library("py3langid.langid", "py3langid")
        return {"py3langid": version("py3langid")}

    def judge(self) -> "LanguageJudge":
        """What judges texts in this process. UserError if the library or the model cannot be read."""
        return _with_py3langid(self) if self.model is None else _with_fasttext(self, self.model)


@dataclass(frozen=True)
class LanguageJudge:
    """A filter of languages with its model."""

    rule: LanguageFilter
    judged: Callable[[str], Judged]

    def refused(self, texts: Sequence[str]) -> Judged | None:
        """The language of a document that is none of those that stay, or not surely; None for one that stays."""
        beginning = " ".join(texts)[:JUDGED]
        # A lone surrogate is no text for a library of C++.
        judged = self.judged(" ".join(beginning.encode(errors="replace").decode().split()))
        stays = judged.language in self.rule.languages and judged.score >= self.rule.min_score
        return None if stays else judged


def _with_py3langid(rule: LanguageFilter) -> LanguageJudge:
    library = _library("py3langid.langid", "py3langid")
    identifier = library.LanguageIdentifier.from_model_file(library.MODEL_FILE, norm_probs=True)
    if unknown := sorted(set(rule.languages) - set(identifier.labels)):
        known = " ".join(sorted(identifier.labels))
        raise UserError(f"--filter-language {unknown[0]} is no language of py3langid; it knows {known}")
    return LanguageJudge(rule, lambda text: Judged(*identifier.classify(text)))


def _with_fasttext(rule: LanguageFilter, path: str) -> LanguageJudge:
    library = _library("fasttext", "fasttext-predict")
    try:
        model = library.load_model(path)
        model.predict("a")  # an old fasttext fails with a new numpy only here
    except (ValueError, OSError) as error:
        raise UserError(
            f"--language-model {path} cannot be used ({error}); name a model of fastText, such as lid.176.bin, and if "
            "it is one, pip install fasttext-predict"
        ) from error

    def judged(text: str) -> Judged:
        (label, *_), (score, *_) = model.predict(text)
        return Judged(label.removeprefix(LABEL), float(score))

    return LanguageJudge(rule, judged)


def _library(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"--filter-language needs {package}, which is not installed; pip install {package} (or "
            "megatronish[language])"
        ) from error
