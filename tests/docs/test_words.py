"""Tests of the house style: plain words in documents, messages and docstrings, names, and sizes of what is written."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache

from paths import ROOT

PACKAGE = ROOT / "megatronish"
FILES = sorted(path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*.py") if path.read_text().strip())

FEWEST_WORDS = 4
LONGEST_FUNCTION = 60  # lines, from `def` to the last one
MOST_PARAMETERS = 7
FEW_PARAMETERS_IN = ("engine", "train", "model", "parallel/data_parallel", "attention")
LONGEST_ENGINE = 150  # lines of engine/engine.py

PLAIN_WORDS = {
    r"mend(s|ed|ing)?": "correct, fix",
    r"dear(er|est)?": "expensive",
    r"ow(e|es|ed)": "still to do",
    r"(go|goes|going|went|gone) on": "resume, continue",
    r"(is|are|was|were|be|been|being) told": "is reported, knows",
    r"as it counted": "resolved",
    r"(predictions?|step) that counts?": "loss tokens, unmasked predictions",
    r"anew": "again, from the beginning",
    r"hence|thereby|whence|hitherto": "so, therefore",
    r"shall": "must",
    r"(stands?|stood|standing) still": "pauses, is blocked",
    r"in silence": "silently",
    r"to the bit": "bitwise, bit for bit",
    r"without a word": "without a message",
    r"at hand": "available",
    r"but for": "except for",
    r"all but": "all except, almost",
    r"(take|takes|took|taken)( it| them)? away": "remove",
    r"(falls?|fell) due": "is due",
    r"speaks? of": "describe, name",
    r"strays?": "differ",
    r"held against": "compared with",
    r"nobody|somebody|anybody": "no rank, a process, a user",
    r"carr(y|ies|ied) out": "execute",
    r"beside": "next to, in addition to, in the background",
    r"under way": "in progress",
    r"travels?": "is sent",
}
"""Old or figurative words, as patterns, with plain ones. Readers' first language may not be English."""

OTHER_WORDS = re.compile(rf"\b({'|'.join(PLAIN_WORDS)})\b", re.IGNORECASE)

DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/*.md", "kernels/**/*.md")
    for path in ROOT.glob(pattern)
)
SCRIPTS = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.py", "tools/*.py", "examples/*.py")
    for path in ROOT.glob(pattern)
)

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@cache
def tree_of(file: str) -> ast.Module:
    """The syntax tree of a file of the package."""
    return ast.parse((ROOT / file).read_text())


def documented(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Name and docstring of the module and of every class and function that has a docstring."""
    for node in ast.walk(tree):
        if isinstance(node, Documented) and (text := ast.get_docstring(node)) is not None:
            yield getattr(node, "name", "the module"), text


def old_words(file: str) -> list[str]:
    """The words of `OTHER_WORDS`, with their places, in a document or in the strings of a Python file."""
    if file.endswith(".py"):
        strings = [node for node in ast.walk(tree_of(file)) if isinstance(node, ast.Constant)]
        texts = [(node.lineno, node.value) for node in strings if isinstance(node.value, str)]
    else:
        texts = list(enumerate((ROOT / file).read_text(encoding="utf-8").splitlines(), start=1))
    return [f"{file}:{line}: {found.group()!r}" for line, text in texts for found in OTHER_WORDS.finditer(text)]


def num_parameters(definition: ast.ClassDef) -> int:
    """Parameters of a class's constructor: of `__init__`, or the fields of a dataclass or NamedTuple."""
    for node in definition.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            given = node.args
            return len(given.posonlyargs) + len(given.args) - 1 + len(given.kwonlyargs)
    is_record = any("dataclass" in ast.unparse(each) for each in definition.decorator_list)
    is_record |= any(ast.unparse(base) == "NamedTuple" for base in definition.bases)
    fields = [ast.unparse(node) for node in definition.body if isinstance(node, ast.AnnAssign)]
    return sum("ClassVar[" not in field and "init=False" not in field for field in fields) if is_record else 0


def test_a_module_docstring_says_what_the_module_is_and_asks_nothing() -> None:
    first_lines = {file: (ast.get_docstring(tree_of(file)) or "").partition("\n")[0] for file in FILES}
    assert [file for file, line in first_lines.items() if not line] == [], "say in a line what each of these modules is"
    assert [file for file, line in first_lines.items() if "?" in line] == [], "say what the module is, do not ask"


def test_a_docstring_says_something() -> None:
    texts = [(f"{file}, {name}: {text!r}", text) for file in FILES for name, text in documented(tree_of(file))]
    few = [where for where, text in texts if len(text.split()) < FEWEST_WORDS]
    assert few == [], "these say nothing; write a sentence or leave them out"
    assert [where for where, text in texts if "See the class" in text] == [], "these say nothing; leave them out"


def test_a_function_fits_on_a_screen() -> None:
    long = []
    for file in FILES:
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                long += [f"{file}, {node.name}: {length} lines"] * (length > LONGEST_FUNCTION)
    assert long == [], f"a function has at most {LONGEST_FUNCTION} lines"


def test_a_constructor_has_few_parameters() -> None:
    many = []
    for file in FILES:
        if not file.startswith(tuple(f"megatronish/{folder}/" for folder in FEW_PARAMETERS_IN)):
            continue
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.ClassDef) and (count := num_parameters(node)) > MOST_PARAMETERS:
                many.append(f"{file}, {node.name}: {count}")
    assert many == [], f"a constructor takes at most {MOST_PARAMETERS} parameters; group those that belong"


def test_words_are_plain() -> None:
    found = [place for file in [*DOCUMENTS, *FILES, *SCRIPTS] for place in old_words(file)]
    assert found == [], "use words of PLAIN_WORDS"


def test_no_two_classes_share_a_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for file in FILES:
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(file)
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_the_engine_is_the_step_and_no_more() -> None:
    length = len((PACKAGE / "engine" / "engine.py").read_text().splitlines())
    assert length <= LONGEST_ENGINE, f"engine/engine.py has {length} lines; at most {LONGEST_ENGINE}"
