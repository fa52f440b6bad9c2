"""Tests of a run's page and of its picture on a terminal: what they say of files that are whole, cut off or hostile."""

import io
import json
import os
import re
import shutil
import socket
import urllib.error
import urllib.request
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megatronish.commands.main import run
from megatronish.core.errors import UserError
from megatronish.report.live import picture_of, spark
from megatronish.report.page.contents import contents_of, curves_of, lines_of_log
from megatronish.report.page.serve import served
from megatronish.report.page.write import page_of, write_page

HOSTILE = "</script><script>alert(1)</script>{{ title }}"
LOG = f"""megatronish on 4 ranks: dp 2 x tp 1 x pp 2
parameters: 1,000
 [2026-11-27 12:00:44.672999] iteration        1/       3 | lm loss: 8.3 |
 saved runs/x/checkpoints/step_00000001 in 0.2 s
megatronish on 4 ranks: dp 2 x tp 1 x pp 2
parameters: 1,000 again
 [2026-11-27 12:00:45.672999] iteration        2/       3 | lm loss: 8.2 |
 forecast: step 0.191 s (none expected)
 {HOSTILE}
"""


def written(folder: Path) -> Path:
    """A folder with every file that a page reads."""
    (folder / "logs").mkdir(parents=True)
    (folder / "schedule").mkdir()
    lines = [{"step": step, "loss": 9.0 - step, "learning_rate": 1e-3, "tokens": 100 * step} for step in (1, 2, 2, 3)]
    lines[1]["loss"], lines[3]["loss"] = 5.0, float("nan")
    files: dict[str, Any] = {
        "metrics.jsonl": "\n".join(map(json.dumps, lines)) + '\n{"step": 4, "lo',
        "evaluations.jsonl": json.dumps({"step": 3, "name": HOSTILE, "loss": 7.5}) + "\n",
        "config.toml": "[training]\ntrain_iters = 3\n[parallel]\ntensor_model_parallel_size = 1\n"
        "pipeline_model_parallel_size = 2\ndata_parallel_size = 2\ncontext_parallel_size = 1\n",
        "health.json": json.dumps({"step": 3, "time": 1.0, "phase": "finished", "pid": 1}),
        "goodput.json": json.dumps({"seconds": {"training": 9.0, "saving": 1.0}}),
        "experts.jsonl": json.dumps({"step": 3, "tokens_per_expert": {"1": [10, 0, 20, 10]}}) + "\n",
        "ranks.jsonl": json.dumps({"step": 3, "seconds": [0.1, 0.2, 0.1, 0.3]}) + "\n",
        "audit.txt": HOSTILE,
        "logs/rank_0.log": LOG,
        "schedule/step_2.json": json.dumps(
            {"schedule": "1f1b", "stages": [[["F", 0, 0, 1.0, 2.0], ["B", 0, 0, 2.0, 4.0]]]}
        ),
        "schedule/step_2.trace.json": "{}",
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def test_a_page_shows_what_the_files_of_a_run_say(tmp_path: Path) -> None:
    contents = contents_of(written(tmp_path / "run"))
    assert contents["curves"]["loss"] == [[1, 2, 3], [8.0, 7.0, None]]  # the last line of a repeated step, and a gap
    assert contents["layout"] == {"tp": 1, "cp": 1, "dp": 2, "pp": 2}
    assert contents["evaluations"] == {HOSTILE: [[3], [7.5]]}
    assert contents["experts"]["ratio"] == [[1.0, 0.0, 2.0, 1.0]]
    assert contents["schedule"]["step"] == 2
    assert contents["schedule"]["rows"][0] == [["F", 0, 0, 0.0, 1.0], ["B", 0, 0, 1.0, 3.0]]
    assert contents["rank_seconds"] == {"steps": [3], "seconds": [[0.1, 0.2, 0.1, 0.3]]}


def test_events_are_the_lines_of_a_log_that_are_no_iteration(tmp_path: Path) -> None:
    first_lines, events = lines_of_log(written(tmp_path / "run") / "logs" / "rank_0.log")
    assert first_lines == ["megatronish on 4 ranks: dp 2 x tp 1 x pp 2", "parameters: 1,000 again"]
    assert [event["step"] for event in events] == [0, 1, 1, 2, 2]
    assert [event["text"].split()[0] for event in events] == [
        "start:",
        "saved",
        "start:",
        "forecast:",
        HOSTILE.split()[0],
    ]


def test_a_page_is_one_file_in_which_no_text_is_markup(tmp_path: Path) -> None:
    path = write_page([written(tmp_path / "<b>run")], tmp_path / "page.html")
    page = path.read_text()
    assert page.count("<script") == 3 and "alert(1)</script" not in page
    assert "<b>run" not in page.replace("\\u003cb>run", "")
    assert not re.search(r'(src|href)="', page), "a page needs no other file"
    (text,) = re.findall(r'<script id="contents" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert json.loads(text)["runs"][0]["audit"] == HOSTILE


@pytest.mark.parametrize("broken", ["[1, 2]", "{", "\0\xff", '{"seconds": 3, "expected": []}', "x = 1", ""])
def test_files_of_other_programs_are_left_out(tmp_path: Path, broken: str) -> None:
    folder = written(tmp_path / "run")
    for path in folder.rglob("*.*"):
        path.write_bytes(broken.encode("latin-1"))
    page_of([folder])
    picture_of(folder)


HUGE = "1" + "0" * 400  # an integer that no float holds


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("metrics.jsonl", f'{{"step": 1{"0" * 30}, "loss": 1.0}}'),
        ("metrics.jsonl", f'{{"step": 1, "loss": {HUGE}}}'),
        ("metrics.jsonl", '{"step": 1, "\\ud800": 1.0}'),
        ("evaluations.jsonl", f'{{"step": 1, "name": "\\ud800", "loss": {HUGE}}}'),
        ("evaluations.jsonl", '{"step": 1, "name": "\\ud800", "loss": 1.0}'),
        ("ranks.jsonl", '{"step": 1, "seconds": []}'),
        ("ranks.jsonl", f'{{"step": 1, "seconds": [{HUGE}]}}'),
        ("health.json", f'{{"phase": "step", "time": {HUGE}}}'),
        ("health.json", '{"phase": "\\ud800", "time": 1.0}'),
        ("logs/rank_0.log", f"at step {'9' * 5000}"),
    ],
)
def test_values_that_no_run_writes_are_left_out(tmp_path: Path, name: str, text: str) -> None:
    folder = written(tmp_path / "run")
    (folder / name).write_text(text)
    write_page([folder], tmp_path / "page.html")
    Console(file=io.TextIOWrapper(io.BytesIO(), "utf-8"), width=60).print(picture_of(folder, width=60)[0])


def test_a_folder_whose_name_is_no_text_has_a_page(tmp_path: Path) -> None:
    folder = written(tmp_path / os.fsdecode(b"r\xffun"))
    write_page([folder], tmp_path / "page.html")
    assert "<title>r?un" in (tmp_path / "page.html").read_text()
    Console(file=io.TextIOWrapper(io.BytesIO(), "utf-8"), width=60).print(picture_of(folder, width=60)[0])


def test_a_folder_of_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"is not a run folder: it has neither metrics\.jsonl nor config\.toml"):
        contents_of(tmp_path)
    assert run(["report", str(tmp_path)]) == 2
    assert run(["report"]) == 2
    assert run(["report", str(written(tmp_path / "run")), "--output", str(tmp_path)]) == 2
    assert run(["watch", str(tmp_path / "run"), "--every", "0"]) == 2
    assert run(["watch", str(tmp_path / "run"), "--port", "65536"]) == 2
    told = capsys.readouterr().err
    assert "no run is named" in told and "is a folder; name a file in it" in told
    assert "--every 0 must be from 0.1" in told and "--port 65536 must be from 0" in told


def test_the_commands_write_a_page_and_show_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(tmp_path / "run")
    assert run(["report", str(folder)]) == 0
    own = (folder / "report.html").read_bytes()
    assert len(own) > 50_000
    assert run(["report", str(folder), str(written(tmp_path / "other"))]) == 0
    assert (folder / "report.html").read_bytes() == own != (folder / "compared.html").read_bytes()
    assert run(["watch", str(folder)]) == 0  # it has finished: one picture, and the end
    told = capsys.readouterr().out
    assert "page: http://127.0.0.1:" in told
    assert "step 3 of 3 (100.0%)" in told and "finished" in told and "0.1 (rank 0) to 0.3 (rank 3)" in told


def test_the_server_answers_this_machine_alone(tmp_path: Path) -> None:
    folder = written(tmp_path / "run")
    with served([folder], port=0, every=5) as address:
        page = urllib.request.urlopen(address, timeout=30).read().decode()
        assert '<html lang="en" data-every="5">' in page
        assert json.load(urllib.request.urlopen(f"{address}contents.json", timeout=30))["runs"][0]["name"] == "run"
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{address}config.toml", timeout=30)
        request = urllib.request.Request(address, headers={"Host": "evil.example:80"})
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(request, timeout=30)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_server_says_what_became_of_the_folder(tmp_path: Path, host: str) -> None:
    folder = written(tmp_path / "日本")
    with served([folder], port=0, every=5) as address:
        request = urllib.request.Request(address, headers={"Host": host})  # as browsers name port 80
        assert urllib.request.urlopen(request, timeout=30).status == 200
        shutil.rmtree(folder)
        with pytest.raises(urllib.error.HTTPError, match="500") as refused:
            urllib.request.urlopen(request, timeout=30)
        with refused.value as answer:
            assert "日本 is not a run folder" in answer.read().decode()


def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"--port {port} cannot be used"), served([tmp_path], port=port, every=1):
            pass


def test_a_run_without_a_step_has_a_picture(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    picture, has_ended = picture_of(tmp_path)
    text = io.StringIO()
    Console(file=text, width=100).print(picture)
    assert not has_ended and "not started" in text.getvalue()


def test_long_curves_keep_their_spikes(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}, "loss": {99 if step == 7777 else 1}}}\n' for step in range(20_000)))
    steps, values = curves_of(tmp_path).read()["loss"]
    assert len(steps) <= 2002 and max(values) == 99


def test_a_further_look_reads_what_is_new(tmp_path: Path) -> None:
    path, curves = tmp_path / "metrics.jsonl", curves_of(tmp_path)
    assert curves.read() == {}
    path.write_text('{"step": 1, "loss": 3}\nno JSON\n{"step": 2, "loss": 2}\n{"step": 3, "lo')
    assert curves.read() == {"loss": [[1, 2], [3.0, 2.0]]}
    with path.open("a") as file:  # the rest of the line, one more metric, and a step that is repeated
        file.write('ss": 1}\n{"step": 4, "loss": 0, "mfu": 0.5}\n{"step": 2, "loss": 7}')
    again = {"loss": [[1, 2, 3, 4], [3.0, 7.0, 1.0, 0.0]], "mfu": [[1, 2, 3, 4], [None, None, None, 0.5]]}
    assert curves.read() == again == curves_of(tmp_path).read()
    with path.open("a") as file:
        file.write("\n")
    assert curves.read() == again
    path.write_text('{"step": 1, "loss": 5}\n')  # of another run
    assert curves.read() == {"loss": [[1], [5.0]]}


def test_a_hurried_look_at_a_long_file_shows_a_sample_and_then_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, number = tmp_path / "metrics.jsonl", 20_000
    path.write_text("".join(f'{{"step": {step}, "loss": {step}}}\n' for step in range(number)) + "{" * 9)
    monkeypatch.setattr("megatronish.report.page.curves.QUICK_BYTES", 1000)
    monkeypatch.setattr("megatronish.report.page.curves.NUM_SAMPLES", 50)
    monkeypatch.setattr("megatronish.report.page.curves.END_OF_SAMPLE", 200)
    curves = curves_of(tmp_path, hurries=True)
    assert curves.is_behind
    steps, values = curves.read()["loss"]
    assert len(steps) <= 60 and values == steps
    assert steps[0] == 0 and steps[-1] == number - 1
    assert max(b - a for a, b in pairwise(steps)) < 2 * number / 50
    curves.catch_up()
    assert not curves.is_behind
    assert curves.read() == curves_of(tmp_path).read()


def test_a_hurried_look_at_a_file_without_lines_of_a_usual_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2}\n' + "x" * 2**20)
    monkeypatch.setattr("megatronish.report.page.curves.QUICK_BYTES", 1000)
    assert curves_of(tmp_path, hurries=True).read() == {"loss": [[1], [2.0]]}


def test_a_spark_is_as_high_as_its_values() -> None:
    assert spark([0.0, 1.0, 2.0, 3.0], 4) == "▁▃▆█"
    assert spark([1.0, 1.0], 8) == "▁▁"
