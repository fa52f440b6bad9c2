"""Tests of the `megatronish` command: its list, its names in --help, its errors and its scripts in a checkout."""

import ast
import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from paths import ROOT

from megatronish import __version__
from megatronish.commands import main as command_line
from megatronish.commands.main import COMMANDS, run
from megatronish.core.errors import RunError, UserError
from megatronish.launch.os_errors import is_lost_rank, mishap
from megatronish.launch.terminal import NARROWEST

SCRIPTS = [
    ROOT / "pretrain_gpt.py",
    ROOT / "pretrain_bert.py",
    ROOT / "pretrain_t5.py",
    ROOT / "finetune_gpt.py",
    *sorted((ROOT / "tools").glob("*.py")),
]


def megatronish(*words: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatronish", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]], ids=str)
def test_the_command_alone_lists_all_commands_in_groups(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, command in COMMANDS.items():
        (place,) = (number for number, line in enumerate(lines) if line.split() == [name, *command.help.split()])
        assert [line for line in lines[:place] if line.endswith(":")][-1] == f"{command.group}:"
    assert all(len(line) <= 100 for line in lines)


def test_the_list_loads_no_library(tmp_path: Path) -> None:
    code = "from megatronish.commands.main import run; import sys; run([]); sys.stderr.write(' '.join(sys.modules))"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "tyro", "tqdm"} & set(done.stderr.split())


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_the_version_is_that_of_the_package(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([flag]) == 0
    assert capsys.readouterr().out == f"megatronish {__version__}\n"


@pytest.mark.long
@pytest.mark.parametrize("words", [*([name, "--help"] for name in COMMANDS), ["help", "merge"]], ids=" ".join)
def test_the_help_of_a_command_names_the_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(words)
    (name,) = COMMANDS.keys() & set(words)
    assert ended.value.code == 0
    assert f"usage: megatronish {name} " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["preproces"], "preproces is not a command; did you mean megatronish preprocess?"),
        (["train_tokenizer"], "train_tokenizer is not a command; did you mean megatronish train-tokenizer?"),
        (["xyzzy"], "xyzzy is not a command; megatronish --help lists the commands"),
        (["--config", "demo"], "--config is not a command; the command comes first: megatronish pretrain --config ..."),
        (["summary", "--lr", "1"], "summary is not a command; "),
    ],
)
def test_an_unknown_command_is_refused_in_a_sentence(words: list[str], sentence: str) -> None:
    with pytest.raises(UserError) as error:
        run(words)
    assert str(error.value).startswith(sentence)


def test_exit_statuses_are_those_of_the_commands() -> None:
    refused = megatronish("summary")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.count("\n") == 1
    assert megatronish("draw", "--stages", "0").returncode == 2
    drawn = megatronish("draw", "--stages", "2", "--microbatches", "2")
    assert (drawn.returncode, drawn.stderr) == (0, "")
    assert drawn.stdout.startswith("stage 0:")


def test_ctrl_c_and_a_reader_that_has_left_end_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_argv: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, "run", interrupted)
    assert command_line.main() == 128 + signal.SIGINT
    assert capsys.readouterr().err == "interrupted\n"
    code = (
        "from megatronish.commands.main import main; import sys; sys.argv[1:] = []; sys.stdin.read(); sys.exit(main())"
    )
    assert without_reader([sys.executable, "-c", code]) == (128 + signal.SIGPIPE, "")


def without_reader(command: list[str]) -> tuple[int, str]:
    """Exit status and errors of a command that begins when the reader of its output has left."""
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stdin.close()
        return process.wait(60), process.stderr.read()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_of_the_checkout_is_a_call_of_a_function_of_the_package(script: Path) -> None:
    tree = ast.parse(script.read_text())
    assert not [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    assert "megatronish.commands.main" in [node.module for node in tree.body if isinstance(node, ast.ImportFrom)]
    for name in COMMANDS:
        if f'run_script("{name}"' in script.read_text():
            assert f"`megatronish {name}`" in (ast.get_docstring(tree) or "")


@pytest.mark.parametrize("script", ["pretrain_gpt.py", "tools/plan.py", "tools/from_axolotl.py"])
def test_a_script_whose_reader_has_left_ends_without_a_traceback(script: str) -> None:
    code = (
        "import sys, runpy; sys.stdin.read(); sys.argv = [sys.argv[1], '--help']; "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    status, errors = without_reader([sys.executable, "-c", code, script])
    assert (status, errors) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize("words", ["draw", "--version", "convert --help"])
def test_a_full_disk_of_standard_output_is_a_sentence(words: str) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "megatronish", *words.split()]
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    reason = "No space left on device; free space there, or send it elsewhere"
    assert (done.returncode, done.stderr) == (1, f"standard output cannot be written: {reason}\n")


def test_help_is_laid_out_for_more_than_a_few_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "2")
    done = megatronish("draw", "--help")
    boxes = [line for line in done.stdout.splitlines() if line.startswith(("╭", "│", "╰"))]
    assert done.returncode == 0 and {*map(len, boxes)} == {NARROWEST}


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_program_whose_streams_are_closed_runs(closed: str, tmp_path: Path) -> None:
    """Also with the file that it writes, which must not become its standard output."""
    words = f"draw --schedule zb-h1 --png {tmp_path / 'x.png'}"
    done = subprocess.run(
        f"{sys.executable} -m megatronish {words} {closed}", shell=True, cwd=ROOT, capture_output=True, check=False
    )
    assert done.returncode == 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_every_command_has_a_script_in_a_checkout() -> None:
    text = "".join(script.read_text() for script in SCRIPTS)
    assert not [name for name in COMMANDS if f'run_script("{name}"' not in text]


# Without the environment


def test_every_script_says_how_to_get_what_is_not_installed() -> None:
    """Python without its site-packages (-S) has none of the libraries, and no installed megatronish."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    started = [
        subprocess.Popen([sys.executable, "-S", str(path)], env=environment, stderr=subprocess.PIPE, text=True)
        for path in SCRIPTS
    ]
    for path, process in zip(SCRIPTS, started, strict=True):
        told = process.communicate(timeout=60)[1]
        assert process.returncode == 2 and "Traceback" not in told, (path, told)
        assert told.startswith("torch, numpy, ") and "tyro are not installed" in told and "make venv" in told, path


def test_an_older_python_is_told_in_a_sentence() -> None:
    for path in (ROOT / "megatronish/__init__.py", *SCRIPTS):
        ast.parse(path.read_text(), feature_version=(3, 6))
    code = (
        f"import sys; sys.version_info = (3, 8, 1); sys.path.insert(0, {str(ROOT)!r}); import megatronish.commands.main"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith("megatronish needs Python 3.11 or newer")
    assert "Traceback" not in done.stderr


def test_finetune_asks_for_the_model_first(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("[training]\ntrain_iters = 3\n")
    for words in (["--lr", "1"], ["--config", str(tmp_path / "mine.toml")], []):
        assert run(["finetune", *words]) == 2
        told = capsys.readouterr().err
        assert told.startswith("finetune has no model to start from; name one with --load RUN"), told


@pytest.mark.parametrize(("number", "status"), [(errno.EROFS, 2), (errno.ENOSPC, 1)])
def test_what_another_start_would_meet_again_ends_every_command_with_2(
    number: int, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it ends a run: a place that refuses, and not a disk that is full now."""

    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number), "/data/there")

    monkeypatch.setattr(command_line, "run", refuse)
    for name in ("open_streams", "name_output", "widen"):
        monkeypatch.setattr(command_line, name, lambda: None)
    assert command_line.main() == status
    assert "/data/there" in capsys.readouterr().err


def test_a_sentence_of_a_full_disk_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has words that would be taken for those of a library, and a machine may have no folder for temporary files."""
    sentence = "--output g.toml cannot be written: No space left on device; free space there, or choose another"

    def refuse(*_: object) -> int:
        raise RunError(sentence)

    monkeypatch.setattr(command_line, "run", refuse)
    monkeypatch.setattr(tempfile, "gettempdir", refuse)
    for name in ("open_streams", "name_output", "widen"):
        monkeypatch.setattr(command_line, name, lambda: None)
    assert command_line.main() == 1
    assert capsys.readouterr().err.strip() == sentence
    error = RunError("the store: Connection refused")
    assert mishap(error) == str(error) and not is_lost_rank(error)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: (_ for _ in ()).throw(FileNotFoundError("none")))
    assert (mishap(RuntimeError("No space left on device")) or "").startswith("No space left on device; ")


def test_a_command_does_not_replace_the_file_that_it_reads(tmp_path: Path) -> None:
    config, text = tmp_path / "e.json", tmp_path / "t.txt"
    config.write_text("{}")
    text.write_text("some text\n" * 300)
    with pytest.raises(UserError, match="is a file that is read; choose another"):
        run(["from-deepspeed", str(config), "--output", str(config)])
    assert run(["train-tokenizer", "--input", str(text), "--output", str(text), "--vocab-size", "300"]) == 2
    assert config.read_text() == "{}" and text.read_text().startswith("some text")


def test_a_plan_or_an_audit_is_not_written_over_what_it_reads(tmp_path: Path) -> None:
    """Nor are measurements added to a file of something else."""
    chats, config = tmp_path / "chats.jsonl", tmp_path / "mine.toml"
    chats.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
    shutil.copy(ROOT / "configs" / "quick.toml", config)
    planned = ["plan", "--config", str(config), "--device", "h100-sxm"]
    audited = ["audit", "--data-path", str(chats), "--tokenizer-type", "bytes"]
    before = chats.read_text(), config.read_text()
    assert run([*planned, "--gpus", "8", "--write", str(config)]) == 2
    assert run([*planned, "--calibrate", str(chats), "--write-device", str(chats)]) == 2
    assert run([*planned, "--probe", str(config)]) == 2
    assert run([*planned, "--probe", str(chats)]) == 2
    both = str(tmp_path / "new.toml")
    assert run([*planned, "--gpus", "8", "--write", both, "--write-device", both]) == 2
    assert run([*audited, "--html", str(chats)]) == 2
    assert (chats.read_text(), config.read_text()) == before
