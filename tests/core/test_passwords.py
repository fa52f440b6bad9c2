"""Tests of each place at which the text of an error leaves a run, with a password in it: *** stands for that there."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jobs import run_job, tiny
from paths import ROOT

from megatronish.compat.importers.imported import Imported
from megatronish.config.config import Config
from megatronish.config.read import read_config
from megatronish.core.remote import _told_as_os_error
from megatronish.engine.engine import Engine
from megatronish.launch.elastic import report_to_torchrun
from megatronish.launch.os_errors import mishap
from megatronish.launch.rank import _describe, _leave
from megatronish.launch.terminal import say
from megatronish.report.trackers.table import TRACKERS
from megatronish.report.trackers.tracker import RunDescription, RunSummary, Tracker, Trackers
from megatronish.report.trackers.wandb import WeightsAndBiases
from megatronish.train.hooks.health import failed, say_health
from megatronish.train.preflight import _opened
from megatronish.train.start import watchdog_of
from megatronish.train.trainer import Aside
from megatronish.watch.heartbeat import bare_beat
from megatronish.watch.record import RankRecord

PW = "PeW0rd"
URL, STARRED = f"ftp://user:{PW}@host/x", "ftp://user:***@host/x"
BROKEN = OSError(f"cannot read {URL}")


def fail_with_a_url() -> None:
    """Planted in a job: an error of a library with a URL in its text, and a tracker that writes its summary down."""

    class Writing(Tracker):
        title = "Writing"

        def begin(self, run: RunDescription) -> None:
            self.path = run.folder / "summary.txt"

        def end(self, summary: RunSummary) -> None:
            self.path.write_text(summary.ending)

    def step(self: Engine, *_arguments: Any, **_options: Any) -> Any:
        raise OSError(f"cannot read {URL}")

    TRACKERS["writing"] = lambda *_: Writing()
    Engine.step = step  # type: ignore[assignment]


def test_an_error_of_a_library_in_the_loop_tells_no_password_to_files_and_trackers(tmp_path: Path) -> None:
    ended = run_job(tiny(tmp_path / "run"), tmp_path, plant=fail_with_a_url)
    assert ended.status == 1 and STARRED in ended.errors and PW not in ended.errors + ended.output
    assert (tmp_path / "run" / "summary.txt").read_text() == f"failed: cannot read {STARRED}"
    assert json.loads((tmp_path / "run" / "health.json").read_text())["phase"] == f"failed: cannot read {STARRED}"
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and PW.encode() in path.read_bytes()]


def test_the_last_word_of_a_run_has_no_password_nor_half_of_one(tmp_path: Path) -> None:
    assert failed(BROKEN) == f"failed: cannot read {STARRED}"
    assert PW not in failed(OSError("x" * 275 + URL))  # cut before the @, it is no URL any more
    assert say_health(tmp_path, step=1, phase=f"hangs: {URL}")
    assert json.loads((tmp_path / "health.json").read_text())["phase"] == f"hangs: {STARRED}"


def test_trackers_are_sent_and_tell_no_password(capsys: pytest.CaptureFixture[str]) -> None:
    class Failing(Tracker):
        title, summary = "Failing", ""

        def begin(self, run: RunDescription) -> str:
            return f"at {URL}"

        def end(self, summary: RunSummary) -> None:
            self.summary = summary.ending
            raise OSError("x" * 275 + URL)

    tracker = Failing()
    with pytest.raises(OSError, match="cannot read"), Trackers([tracker], RunDescription("", Path(), 0, {}, "", "")):
        raise BROKEN
    assert tracker.summary == f"failed: cannot read {STARRED}"
    written = capsys.readouterr()
    assert STARRED in written.out and "Failing is off" in written.err and PW not in written.out + written.err


def test_wandb_sees_no_password_in_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps the command line with a run; a stand-in says what it would have kept."""
    seen: list[str] = []

    def init(**_options: Any) -> Any:
        seen.extend(sys.argv)
        return SimpleNamespace(disabled=True, offline=True)

    def setup() -> Any:
        raise OSError(f"no answer of {URL}")

    library = SimpleNamespace(init=init, setup=setup, Settings=dict)
    monkeypatch.setitem(sys.modules, "wandb", library)  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "argv", ["pretrain", "--save", URL])
    WeightsAndBiases(Config().with_fields(wandb_project="p").log).begin(RunDescription("n", tmp_path, 0, {}, "", ""))
    assert seen == ["pretrain", "--save", STARRED]


def test_what_a_launcher_says_and_torchrun_repeats_has_no_password(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    say(f"a rank has said {URL}")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    report_to_torchrun(f"a rank has said {URL}")
    assert STARRED in (text := (tmp_path / "error.json").read_text()) and PW not in text
    assert _describe(SystemExit(f"no {URL}")) == (1, f"no {STARRED}")
    read, write = os.pipe()
    monkeypatch.setattr(os, "_exit", lambda _status: None)
    _leave(write, f"the run hangs at {URL}", True)
    assert os.read(read, 1000).decode() == f"the run hangs at {STARRED}\n"
    assert capsys.readouterr().err == f"a rank has said {STARRED}\n"


def test_the_report_of_a_hang_has_no_password(tmp_path: Path) -> None:
    config, place = Config().with_fields(run_dir=str(tmp_path)), SimpleNamespace(rank=0, leave=None)
    (tmp_path / "logs").mkdir()
    watchdog: Any = watchdog_of(config, place, RankRecord())  # type: ignore[arg-type]
    watchdog._on_report(f"the run hangs: a rank reads {URL}", {0: bare_beat(0, {})})
    for path in (tmp_path / "logs" / "hang.json", tmp_path / "health.json"):
        assert STARRED in (text := path.read_text()) and PW not in text


def test_what_is_left_out_is_told_without_passwords(capsys: pytest.CaptureFixture[str]) -> None:
    with Aside("the hook X").guard():
        raise OSError("x" * 275 + URL)
    assert PW[:3] not in capsys.readouterr().err


def test_errors_of_the_system_and_of_stores_are_cut_without_a_part_of_a_password() -> None:
    told = mishap(OSError(errno.EIO, "broken", "/" + "x" * 180 + "/" + URL))
    assert told is not None and PW[:3] not in told
    for error in (OSError("x" * 280 + URL), RuntimeError("x" * 280 + URL)):
        with pytest.raises(OSError, match=r"x{280}") as caught, _told_as_os_error(URL):
            raise error
        assert PW[:3] not in str(caught.value)


def test_notes_about_a_config_have_no_password(tmp_path: Path) -> None:
    flags = tiny(tmp_path / "run", f"--save {URL}", data=f"--mock-data --save {URL}y --one-logger-project {URL}")
    _, notes = read_config(flags)
    assert len([note for note in notes if STARRED in note]) == 2 and PW not in "".join(notes)


def test_a_preflight_shows_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_checkpoint(_place: object) -> None:
        raise BROKEN

    monkeypatch.setattr("megatronish.train.preflight.find_checkpoint", find_checkpoint)
    facts, _ = _opened(Config().with_fields(save=URL), mesh=SimpleNamespace())  # type: ignore[arg-type]
    assert facts == {"data train": f"unreadable (cannot read {STARRED})"}


def test_comments_of_an_imported_config_have_no_password(tmp_path: Path) -> None:
    found = Imported()
    found.leave_out("tracking_uri", f"{URL} is another place")
    found.warn("hub_token", f"as {URL}")
    assert found.to_toml(tmp_path / "x.yml").count(STARRED) == 2 and PW not in found.to_toml(tmp_path / "x.yml")


def test_a_traceback_of_a_command_its_warnings_and_those_of_threads_show_no_password() -> None:
    program = f"""
import sys, threading, warnings
from megatronish.commands.main import ended
def fail(): raise OSError("cannot read {URL}")
def work():
    warnings.warn("no answer of {URL}")
    thread = threading.Thread(target=fail); thread.start(); thread.join()
    fail()
sys.exit(ended(work))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and PW not in done.stderr.replace(program, "")
    assert done.stderr.count(STARRED) == 3 and done.stderr.count("Traceback (most recent call last)") == 2
