"""Tests of the documents: their commands, links, tables and drawings are current."""

import os
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal

import pytest
from paths import ROOT
from plugged import EXAMPLES, forgotten
from scripts import run_script

from megatronish.commands.finetune import with_start
from megatronish.commands.main import COMMANDS as COMMANDS_OF_MEGATRONISH
from megatronish.commands.main import run as run_command
from megatronish.commands.preprocess_tasks import VERBS
from megatronish.commands.pretrain_bert import with_bert
from megatronish.commands.pretrain_t5 import with_t5
from megatronish.config.config import Config
from megatronish.config.fields import FIELDS
from megatronish.config.read import ConfigError, read_config
from megatronish.config.settings import HELP_ALL
from megatronish.estimate.costs.memory import expected_memory
from megatronish.estimate.costs.memory_table import format_bytes
from megatronish.estimate.costs.parameters import num_parameters
from megatronish.formats.hf.families import FAMILIES
from megatronish.formats.start import read_start
from megatronish.parallel.stages import Stages

DOCUMENTS = sorted([*ROOT.glob("*.md"), ROOT / "llms.txt", *(ROOT / "docs").glob("*.md")])
README = (ROOT / "README.md").read_text(encoding="utf-8")
RECIPES = (ROOT / "docs" / "RECIPES.md").read_text(encoding="utf-8")
CONVERT = (ROOT / "docs" / "CONVERT.md").read_text(encoding="utf-8")

VOCABULARIES = {
    "quick": 257,
    "demo": 4096,
    "demo-moe": 4096,
    "gpt2-124m-1gpu": 50257,
    "llama-1b-1gpu": 128256,
    "llama-8b-8gpu": 128256,
    "qwen3-30b-a3b": 151936,
    "llama-70b": 128256,
    "gpt3-175b": 50257,
}
"""The configs of the table of docs/RECIPES.md with the vocabularies of their tokenizers."""


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command in the `sh` blocks of a document."""
    for block in re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                yield words


COMMANDS = [words for document in DOCUMENTS for words in commands(document.read_text(encoding="utf-8"))]


def test_every_family_of_hugging_face_has_a_row() -> None:
    supported, refused = CONVERT.split("### Families that are refused")
    rows = [line.split("|")[2] for line in supported.splitlines() if line.startswith("| ")]
    named = {name for row in rows for name in re.findall(r"`([a-z0-9_]+)`", row)}
    assert named >= FAMILIES.keys()
    others = [line.split("|")[1] for line in refused.split("## Which tensor")[0].splitlines() if line.startswith("| `")]
    alone = {name for row in others if " with " not in row for name in re.findall(r"`([a-z0-9_]+)`", row)}
    assert not alone & FAMILIES.keys()


def of_script(start: str) -> list[list[str]]:
    """The commands in which a Python script of this name is run, each from the script's name on."""
    found = []
    for words in COMMANDS:
        places = [i for i, word in enumerate(words) if word.endswith(".py")]
        found += [words[place:] for place in places[:1] if words[place].startswith(start)]
    return found


def of_command() -> list[list[str]]:
    """The commands in which the installed `megatronish` runs, each from its subcommand on, under a launcher too."""
    found = []
    for words in COMMANDS:
        before = ["", *words]  # `--from megatronish` is the value of a flag, `-m megatronish` the program
        places = [
            i
            for i, word in enumerate(words)
            if word == "megatronish" and not before[i].startswith("--") and words[i + 1 :]
        ]
        found += [words[place + 1 :] for place in places[:1]]
    return found


def run(words: list[str], folder: Path) -> str:
    """What a script prints."""
    done = run_script(words, folder)
    assert done.status == 0, done.errors
    return done.output


def world_size(words: list[str]) -> int | None:
    """The processes that a launcher in front of the script starts."""
    if words[0] == "torchrun":
        return int(words[words.index("--nnodes") + 1]) * int(words[words.index("--nproc-per-node") + 1])
    return int(words[words.index("--ntasks") + 1]) if words[0] == "srun" else None


def test_every_command_is_of_a_kind_that_is_checked_here() -> None:
    known = ("make", "python", "torchrun", "srun", "megatronish", "pip", "MEGATRONISH_BUILD_KERNELS=1", "awk")
    assert len(COMMANDS) > 10
    assert not [words for words in COMMANDS if words[0] not in known]
    # tests/docs/test_tutorial.py runs awk
    scripts = [words for words in COMMANDS if words[0] not in ("make", "awk") and "pip" not in words[:2]]
    training_scripts = of_script("pretrain_") + of_script("finetune_gpt")
    checked = training_scripts + of_script("tools/") + of_script("examples/") + of_command()
    builds = of_script("setup")  # tests/kernels/test_kernels_build.py
    assert len(scripts) == len(checked + builds)
    assert not [words for words in of_command() if words[0] not in {*COMMANDS_OF_MEGATRONISH, "--version"}]


STARTS = {
    "finetune": with_start,
    "finetune_gpt.py": with_start,
    "pretrain-bert": with_bert,
    "pretrain_bert.py": with_bert,
    "pretrain-t5": with_t5,
    "pretrain_t5.py": with_t5,
}
"""Commands that put flags of their own in front of those that are given."""
TRAINING = ("pretrain_gpt.py", "pretrain", *STARTS)


def training() -> list[list[str]]:
    """The commands that train, by a script or by `megatronish pretrain`, `pretrain-bert` or `finetune`."""
    return [words for words in COMMANDS if {*TRAINING} & set(words) and words[0] != "make"]


@pytest.mark.parametrize("words", training(), ids=" ".join)
def test_every_training_command_is_a_sound_config(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    problems: list[str] = []
    place = next(number for number, word in enumerate(words) if word in TRAINING)
    flags = STARTS.get(words[place], list)(words[place + 1 :])
    try:
        with forgotten():
            read_config(flags, world_size=world_size(words), read_start=read_start)
    except ConfigError as error:
        problems = error.problems
    # The reader's own files are not here, nor are the runs that commands of a page have left for later ones.
    assert not [each for each in problems if "not exist" not in each and "holds no checkpoint" not in each]


def test_every_tool_knows_the_flags_it_is_shown_with(tmp_path: Path) -> None:
    shown = of_script("tools/")
    pages = {script: run([script, "--help"], tmp_path) for script in {words[0] for words in shown}}
    pages |= {script: run([script, HELP_ALL], tmp_path) for script, page in pages.items() if HELP_ALL in page}
    known = {script: {*re.findall(r"--[\w-]+", page)} for script, page in pages.items()}
    unknown = {
        " ".join(words): {word for word in words[1:] if word.startswith("--")} - known[words[0]] for words in shown
    }
    assert not {command: flags for command, flags in unknown.items() if flags}


@pytest.mark.parametrize(
    "words", [words for words in of_command() if words[0] in COMMANDS_OF_MEGATRONISH], ids=" ".join
)
def test_every_command_knows_the_flags_it_is_shown_with(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    verb = [word for word in words[1:2] if words[0] == "preprocess" and word in VERBS]
    with pytest.raises(SystemExit):
        run_command([words[0], *verb, "--help"])
    page = capsys.readouterr().out
    if HELP_ALL in page:
        with pytest.raises(SystemExit):
            run_command([words[0], *verb, HELP_ALL])
        page += capsys.readouterr().out
    known = set(re.findall(r"--[\w-]+", page))
    own = words[1 : words.index("--")] if words[0] == "launch" else words[1:]  # what follows is another command
    assert not {word for word in own if word.startswith("--")} - known


def test_the_table_of_commands_is_current() -> None:
    page = (ROOT / "docs" / "RUNNING.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `megatronish ([\w-]+)` \| `([\w/.]+)` \|", page, re.MULTILINE))
    assert list(rows) == list(COMMANDS_OF_MEGATRONISH)
    for name, script in rows.items():
        assert f"`megatronish {name}`" in (ROOT / script).read_text()


def test_every_extra_is_explained() -> None:
    page = (ROOT / "docs" / "INSTALL.md").read_text(encoding="utf-8")
    extras = re.search(r"extras_require=\{(.*?)\},\n", (ROOT / "setup.py").read_text(), re.DOTALL)
    assert extras is not None
    assert not [name for name in re.findall(r'"([\w-]+)": \[', extras[1]) if f'pip install ".[{name}]"' not in page]


def test_every_make_target_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {words[1] for words in COMMANDS if words[0] == "make"}
    for document in DOCUMENTS:
        named |= set(re.findall(r"`make ([a-z-]+)", document.read_text(encoding="utf-8")))
    assert named <= targets


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text(encoding="utf-8"))
    assert not [link for link in links if "://" not in link and not (document.parent / link).exists()]


LAUNCHERS = {"array", "nproc-per-node", "nnodes", "ntasks", "gpus-per-node", "gpus-per-task", "signal", "rdzv-endpoint"}
OTHER_PROGRAMS = {
    f"--{name}"
    for name in LAUNCHERS
    | {"shm-size", "logdir", "index-url", "inplace", "pid", "editable", "local-dir", "no-deps", "channel"}
}
"""Flags of launchers, pip and the like."""

OTHER_FLAGS_IN = ("COMING_FROM.md", "CONVERT.md", "DESIGN.md", "FLAGS.md", "GLOSSARY.md", "BENCHMARKS.md", "LOG.md")
"""Documents that name flags of other frameworks, or of earlier versions."""


@cache
def all_code() -> str:
    """The text of all files of Python in which a flag may be declared."""
    places = [path for name in ("tools", "benchmarks", "tests", "megatronish") for path in (ROOT / name).rglob("*.py")]
    return "".join(path.read_text(encoding="utf-8") for path in places if path.name != "test_docs.py")


@pytest.mark.long
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_flag_in_a_text_exists(document: Path) -> None:
    if document.name in OTHER_FLAGS_IN:
        return
    text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    named = {flag for code in re.findall(r"`([^`]+)`", text) for flag in re.findall(r"(?<![\w-])--[a-z][\w-]+", code)}
    fields = {flag for field in FIELDS.values() for flag in (field.flag, *field.aliases)}
    code = all_code()
    declared = {flag for flag in named if f'"{flag}"' in code or f"    {flag[2:].replace('-', '_')}: " in code}
    known = fields | {flag.replace("--", "--no-", 1) for flag in fields} | declared | OTHER_PROGRAMS
    unknown = named - known
    assert not unknown


def headings(document: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub spells them."""
    titles = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_anchor_is_a_heading(document: Path) -> None:
    anchors = re.findall(r"\]\(([\w./-]*\.md)?#([^)\s]+)\)", document.read_text(encoding="utf-8"))
    lost = [
        f"{file}#{anchor}" for file, anchor in anchors if anchor not in headings(document.parent / (file or document))
    ]
    assert not lost


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_file_that_is_named_exists(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    named = set(re.findall(r"\b((?:configs|tools|tests|examples|docs|megatronish)/[\w./-]+\.(?:py|toml|md|png))", text))
    assert not sorted(path for path in named if not (ROOT / path).exists())


@pytest.mark.parametrize("name", VOCABULARIES)
def test_the_table_of_configs_is_current(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    vocab_size = VOCABULARIES[name]
    words = ["--config", f"configs/{name}.toml", "--mock-data", "--vocab-size", str(vocab_size)]
    config = read_config(words).config
    (row,) = [line for line in RECIPES.splitlines() if f"](../configs/{name}.toml) |" in line]
    _, _, parameters, devices, _, layout, memory, _ = (cell.strip() for cell in row.split("|"))
    assert layout == str(config.layout)
    assert memory == fullest_stage(config, vocab_size, device="cpu" if "CPU" in devices else "cuda")
    count = num_parameters(config.model, vocab_size=vocab_size, seq_length=config.training.seq_length)
    size, unit = parameters.split()
    scale = {"M": 1e6, "B": 1e9}[unit]
    assert f"{count / scale:.{len(size.partition('.')[2])}f}" == size


def test_what_the_readme_says_was_measured_stands_in_the_page_that_it_names() -> None:
    table = README.partition("## What was measured\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[2:5] for line in table.splitlines() if "](docs/" in line]
    assert len(rows) > 5
    for mine, others, link in rows:
        page = (ROOT / re.findall(r"\((docs/\w+\.md)", link)[0]).read_text(encoding="utf-8")
        assert not [number for number in re.findall(r"\d+\.\d+", mine + others) if number not in page], mine


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150


def test_the_table_has_every_config() -> None:
    assert sorted(VOCABULARIES) == sorted(path.stem for path in (ROOT / "configs").glob("*.toml"))


def fullest_stage(config: Config, vocab_size: int, *, device: Literal["cpu", "cuda"]) -> str:
    training = config.training
    stages = Stages.of(config.parallel, config.model, vocab_size=vocab_size, seq_length=training.seq_length)
    loads = stages.loads(config.global_batch_size // (training.micro_batch_size * config.layout.dp))
    expected = expected_memory(config, loads, vocab_size=vocab_size, device=device)
    return format_bytes(max(stage.total for stage in expected))


def test_the_drawn_schedule_is_what_the_tool_draws(tmp_path: Path) -> None:
    (words,) = (words for words in of_script("tools/draw_schedule") if "4" in words and "8" in words)
    assert run(words, tmp_path).strip() in (ROOT / "docs" / "GUIDE.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_the_cookbook_shows_every_plug_in_as_it_is(path: Path) -> None:
    page = (ROOT / "docs" / "PLUGINS.md").read_text(encoding="utf-8")
    assert f"({os.path.relpath(path, ROOT / 'docs')})\n\n```python\n{path.read_text(encoding='utf-8')}```\n" in page


def test_the_example_trains(tmp_path: Path) -> None:
    printed = run(["examples/custom_model.py"], tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert len(losses) == 6
    assert losses[-1] < 0.6 * losses[0]


def test_the_site_has_every_page_in_its_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}  # which is its list of all pages
    assert not {page for page in pages if f": {page}\n" not in navigation}
