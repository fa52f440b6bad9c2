"""Questions and answers that every machine has: what functions, classes and modules of Python's standard library do.

    python examples/python_questions.py --output demo/questions.jsonl

A question names a function, a class, a module or a topic of the documentation, and the answer is the first sentence of
its text. Lines are chats in OpenAI's format, in an order that the questions alone decide. Nothing is imported: source
is read as text.
"""

import argparse
import ast
import hashlib
import json
import re
import sys
import sysconfig
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics

MOST_CHARACTERS = 90
"""Of an answer: short ones are a style that a small model learns in a minute."""
HELD_OUT = "What does shutil.copyfile do?"
"""Question that is never written, to be asked before and after training."""


def first_sentence(text: str | None) -> str | None:
    """First sentence of a documentation, if it is one and is short."""
    paragraph = " ".join((text or "").strip().split("\n\n")[0].split())
    found = re.match(r"[A-Z][a-z][^`*|<>{}]*?\.(?= |$)", paragraph)
    return found[0] if found and " " in found[0] and len(found[0]) <= MOST_CHARACTERS else None


def modules(root: Path) -> Iterator[tuple[str, ast.Module]]:
    """Public modules of the library by name."""
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        words = parts[:-1] if parts[-1] == "__init__" else parts
        if not words or any(word.startswith("_") or word in ("test", "tests", "site-packages") for word in words):
            continue
        try:
            with tokenize.open(path) as file:
                yield ".".join(words), ast.parse(file.read())
        except (SyntaxError, UnicodeDecodeError):  # a file of another encoding, made to test the parser
            continue


def documented(name: str, node: ast.Module | ast.ClassDef) -> Iterator[tuple[str, str | None]]:
    """(question, documentation) of a module or class and of all public parts of it."""
    kind = "the module " if isinstance(node, ast.Module) else ""
    yield f"What is {kind}{name}?", ast.get_docstring(node)
    for each in node.body:
        if isinstance(each, ast.ClassDef) and not each.name.startswith("_"):
            yield from documented(f"{name}.{each.name}", each)
        elif isinstance(each, ast.FunctionDef) and not each.name.startswith("_"):
            yield f"What does {name}.{each.name} do?", ast.get_docstring(each)


def pairs() -> dict[str, str]:
    """Every question with its answer."""
    found: dict[str, str] = {}
    for name, module in modules(Path(sysconfig.get_path("stdlib"))):
        for question, text in documented(name, module):
            if (answer := first_sentence(text)) is not None and question != HELD_OUT:
                found[question] = answer
    for topic, text in topics.items():
        sentences = filter(None, map(first_sentence, text.split("\n\n")))
        if answer := next((each for each in sentences if not each.startswith("New in")), None):
            found[f"What is the topic {topic}?"] = answer
    return dict(sorted(found.items(), key=lambda pair: hashlib.sha256(pair[0].encode()).digest()))


def main(argv: Sequence[str]) -> int:
    """Write the questions and answers; the exit status."""
    parser = argparse.ArgumentParser(description="Questions and answers from Python's own documentation.")
    parser.add_argument("--output", type=Path, required=True, help="JSON lines file to write")
    parser.add_argument("--most", type=int, default=3000, help="of questions")
    arguments = parser.parse_args(argv)
    chosen = list(pairs().items())[: arguments.most]
    lines = []
    for question, answer in chosen:
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": messages}) + "\n")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text("".join(lines), encoding="utf-8")
    print(f"{arguments.output}: {len(lines):,} questions, for example:\n  {chosen[0][0]}\n  {chosen[0][1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
