"""Tests of trackers: W&B and MLflow with the real libraries, and that no tracker ends or holds up a run."""

import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from jobs import call_main, run_job, steps_of, tiny
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatronish.report.trackers import tracker as tracker_module
from megatronish.report.trackers.table import TRACKERS
from megatronish.report.trackers.tracker import Points, RunDescription, RunSummary, Tracker, Trackers

RUN = RunDescription("run", Path("run"), 0, {}, "", "")

HAS_WANDB = importlib.util.find_spec("wandb") is not None
HAS_MLFLOW = all(importlib.util.find_spec(name) is not None for name in ("mlflow", "sqlalchemy", "alembic"))
needs_wandb = pytest.mark.skipif(not HAS_WANDB, reason="needs the library of the extra wandb, 62 MB")
needs_mlflow = pytest.mark.skipif(not HAS_MLFLOW, reason="needs the libraries of the extra mlflow, 130 MB")


class Recorder(Tracker):
    """A tracker that keeps what it is given, and fails or waits where it is asked to."""

    title = "Recorder"

    def __init__(self, *, fails_in: str = "", waits_in: str = "") -> None:
        self.fails_in, self.waits_in, self.go_on = fails_in, waits_in, threading.Event()
        self.begun: RunDescription | None = None
        self.points: list[Points] = []
        self.summary: RunSummary | None = None

    def _at(self, place: str) -> None:
        if place == self.waits_in:
            self.go_on.wait(20)
        if place == self.fails_in:
            raise SystemExit("the network\nis away")

    def begin(self, run: RunDescription) -> str:
        self._at("begin")
        self.begun = run
        return "Recorder: records"

    def add(self, points: Sequence[Points]) -> None:
        self._at("add")
        self.points += points

    def end(self, summary: RunSummary) -> None:
        self._at("end")
        self.summary = summary


def test_a_tracker_gets_the_description_every_point_in_order_and_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    one, two = Recorder(), Recorder(waits_in="begin")
    with Trackers([one, two], RUN) as trackers:
        for step in range(1, 101):
            trackers.add({"lm loss": 1 / step}, step=step, samples=4 * step)
        trackers.add({"lm loss valid": 0.5}, step=100, samples=400)
        two.go_on.set()
        trackers.ending = "finished"
    for each in (one, two):
        assert each.begun == RUN
        assert [points.step for points in each.points] == [*range(1, 101), 100]
        assert each.points[9] == Points({"lm loss": 0.1}, 10, 40)
        assert each.summary == RunSummary({"lm loss": 0.01, "lm loss valid": 0.5}, "finished", has_failed=False)
    assert capsys.readouterr().out == " Recorder: records\n" * 2


@pytest.mark.parametrize("place", ["begin", "add", "end"])
def test_a_tracker_that_fails_is_told_once_and_the_others_go_on(capsys: pytest.CaptureFixture[str], place: str) -> None:
    good, bad = Recorder(), Recorder(fails_in=place)
    with Trackers([bad, good], RUN) as trackers:
        for step in range(100):
            trackers.add({"lm loss": 1.0}, step=step, samples=step)
    assert capsys.readouterr().err == "Recorder is off, and the run continues without it: the network is away\n"
    assert len(good.points) == 100 and good.summary is not None


def test_a_tracker_that_answers_never_holds_up_no_step_and_no_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker_module, "LONGEST_WAIT", 0.1)
    stuck, good = Recorder(waits_in="add"), Recorder()
    with Trackers([stuck, good], RUN) as trackers:
        for step in range(1000):
            trackers.add({"lm loss": 1.0}, step=step, samples=step)
    assert capsys.readouterr().err == "Recorder did not finish in 0.1 s and may lack the end of this run\n"
    assert len(good.points) == 1000 and good.summary is not None
    stuck.go_on.set()


def test_a_run_that_fails_tells_its_trackers(capsys: pytest.CaptureFixture[str]) -> None:
    tracker = Recorder()
    with pytest.raises(ValueError, match="broken"), Trackers([tracker], RUN):
        raise ValueError("broken")
    assert tracker.summary == RunSummary({}, "failed: broken", has_failed=True)


def plant_tracker(folder: str) -> None:
    """Planted in a job: a tracker of the table that writes down what it gets, and the thread it gets it in."""

    class Writing(Recorder):
        def end(self, summary: RunSummary) -> None:
            found = {
                "begun": self.begun and self.begun._replace(folder=str(self.begun.folder)),  # type: ignore[arg-type]
                "points": [[dict(each.values), each.step, each.samples] for each in self.points],
                "ending": summary.ending,
                "pid": os.getpid(),
            }
            Path(folder, f"{os.getpid()}.json").write_text(json.dumps(found))

    TRACKERS["writing"] = lambda *_: Writing()


def test_a_new_tracker_is_one_line_of_the_table_and_only_the_main_rank_has_it(tmp_path: Path) -> None:
    argv = tiny(tmp_path / "run", "--dp 2 --eval-iters 1 --eval-interval 3 --exit-interval 4")
    ended = run_job(argv, tmp_path, plant=plant_tracker, plant_args=(str(tmp_path),))
    assert ended.status == 0, ended
    (file,) = tmp_path.glob("*.json")
    found = json.loads(file.read_text())
    name, folder, first_step, config, text, first_lines = found["begun"]
    assert (name, folder, first_step) == ("run", str(tmp_path / "run"), 0)
    assert config["model"]["num_layers"] == 2 and "num_layers = 2" in text and "megatronish on 2 ranks" in first_lines
    losses = {step: values["lm loss"] for values, step, _ in found["points"] if "lm loss" in values}
    assert losses == {step: seen.loss for step, seen in steps_of(tmp_path / "run").items()}
    assert any("lm loss validation" in values for values, *_ in found["points"])
    assert found["ending"] == "stopped: --exit-interval is reached"


def plant_first(folder: str) -> None:
    """Planted in a job, which has imported no library of a tracker yet: modules of this folder come first."""
    sys.path.insert(0, folder)


def test_a_missing_library_is_one_line_and_ends_no_run(tmp_path: Path) -> None:
    for name in ("wandb", "mlflow"):
        (tmp_path / "missing" / name).mkdir(parents=True)
        (tmp_path / "missing" / name / "__init__.py").write_text("raise ImportError('planted')\n")
    argv = tiny(tmp_path / "run", "--wandb-project p --mlflow-experiment e --train-iters 2")
    done = run_job(argv, tmp_path, plant=plant_first, plant_args=(str(tmp_path / "missing"),))
    assert done.status == 0, done.errors
    for title, extra in (("W&B", "wandb"), ("MLflow", "mlflow")):
        line = f"{title} is off, and the run continues without it: {extra} is not installed; pip install 'megatronish"
        assert done.errors.count(line) == 1, done.errors
    assert len(steps_of(tmp_path / "run")) == 2


def test_tensorboard_has_the_config_and_the_first_lines_as_text(tmp_path: Path) -> None:
    ended = call_main(tiny(tmp_path / "run", "--train-iters 2 --log-world-size-to-tensorboard"))
    assert ended.status == 0
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    (config,) = events.Tensors("config/text_summary")
    assert "    num_layers = 2" in config.tensor_proto.string_val[0].decode()
    (run,) = events.Tensors("run/text_summary")
    assert "    megatronish on 1 rank" in run.tensor_proto.string_val[0].decode()
    assert {"tokens-per-second", "throughput", "data-time", "world-size"} <= set(events.Tags()["scalars"])
    assert [event.value for event in events.Scalars("world-size")] == [1.0, 1.0]


# W&B


def wandb_rows(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows of history and last summary of W&B's offline files (LevelDB's log format), in their order."""
    code = """
import json, sys
from wandb.proto import wandb_internal_pb2 as pb
def records(data):
    place, whole = 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:  # what is left of a block is too short for a header
            place += 32768 - place % 32768
            continue
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        whole += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""
rows, about = [], {}
for path in sorted(sys.argv[1:]):
    for data in records(open(path, "rb").read()):
        record = pb.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "history":
            rows.append({each.key or each.nested_key[0]: json.loads(each.value_json) for each in record.history.item})
        if kind == "run":
            about |= {"id": record.run.run_id, "project": record.run.project, "name": record.run.display_name,
                      "config": {item.key: json.loads(item.value_json) for item in record.run.config.update}}
        if kind == "exit":
            about["exit"] = record.exit.exit_code
        if kind == "summary":
            about.setdefault("summary", {}).update(
                {each.key or each.nested_key[0]: json.loads(each.value_json) for each in record.summary.update}
            )
print(json.dumps([rows, about]))
"""
    paths = map(str, folder.glob("wandb/offline-run-*/run-*.wandb"))
    done = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows, about = json.loads(done.stdout)
    return rows, about


@needs_wandb
@pytest.mark.parametrize("mode", ["offline", "unreachable"])
def test_wandb_has_every_step_the_config_and_the_ending_over_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    run_dir = tmp_path / "run"
    environ = {"WANDB_MODE": "offline"} if mode == "offline" else {"WANDB_MODE": "online", "WANDB_API_KEY": ""}
    environ |= {"HOME": str(tmp_path), "WANDB_BASE_URL": "http://127.0.0.1:9"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    flags = "--wandb-project p --wandb-exp-name '' --pp 2 --eval-iters 1 --eval-interval 4".replace("''", "n")
    first = run_job(tiny(run_dir, f"{flags} --exit-interval 4"), tmp_path, plant=set_environment, plant_args=(environ,))
    second = run_job(tiny(run_dir, flags), tmp_path, plant=set_environment, plant_args=(environ,))
    for ended in (first, second):
        assert (ended.status, ended.errors) == (0, ""), ended
        reason = "offline" if mode == "offline" else r"not reached (no API key; `wandb login` keeps one)"
        assert f" W&B: {reason}; this run is kept in {run_dir}/wandb/offline-run-" in ended.output
    rows, about = wandb_rows(run_dir)
    losses = {row["_step"]: row["lm loss"] for row in rows if "lm loss" in row}
    assert losses == pytest.approx({step: seen.loss for step, seen in steps_of(run_dir).items()})
    assert [row["_step"] for row in rows if "lm loss validation" in row] == [4, 6]
    assert rows[0]["consumed samples"] == 4 and rows[0]["tokens-per-second"] > 0
    assert (about["project"], about["name"], about["exit"]) == ("p", "n", 0)
    assert about["config"]["model"]["num_layers"] == 2
    assert about["summary"]["ending"] == "finished"
    assert about["id"] == (run_dir / "wandb_run_id").read_text().strip()
    assert {path.name.rpartition("-")[2] for path in run_dir.glob("wandb/offline-run-*")} == {about["id"]}


def set_environment(environ: dict[str, str]) -> None:
    """Planted in a job: variables of its environment."""
    os.environ.update(environ)


# MLflow


@needs_mlflow
@pytest.mark.parametrize("store", ["runs.db", "mlruns"])
def test_mlflow_has_every_step_the_config_and_the_ending_over_a_resume(tmp_path: Path, store: str) -> None:
    run_dir = tmp_path / "run"
    uri = tmp_path / store
    flags = f"--mlflow-experiment e --mlflow-tracking-uri {uri} --dp 2 --eval-iters 1 --eval-interval 4"
    first = run_job(tiny(run_dir, f"{flags} --exit-interval 4"), tmp_path)
    second = run_job(tiny(run_dir, f"{flags} --log-params-norm"), tmp_path)
    for ended in (first, second):
        assert (ended.status, ended.errors) == (0, ""), ended
        assert " MLflow: run " in ended.output
    code = """
import json, os, sys
os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
import mlflow
client = mlflow.MlflowClient(tracking_uri=sys.argv[1])
(run,) = client.search_runs([client.get_experiment_by_name("e").experiment_id])
history = {
    name: {each.step: each.value for each in client.get_metric_history(run.info.run_id, name)}
    for name in run.data.metrics
}
print(json.dumps([run.info.status, run.info.run_name, run.info.run_id, run.data.params, run.data.tags, history]))
"""
    place = f"sqlite:///{uri}" if store.endswith(".db") else uri.as_uri()
    done = subprocess.run([sys.executable, "-c", code, place], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    status, name, run_id, params, tags, history = json.loads(done.stdout.splitlines()[-1])
    assert (status, name, tags["ending"]) == ("FINISHED", "run", "finished")
    assert run_id == (run_dir / "mlflow_run_id").read_text().strip()
    assert params["model.num_layers"] == "2" and params["log.log_params_norm"] == "False"
    assert tags["log.log_params_norm from step 5"] == "True"
    losses = {int(step): value for step, value in history["lm loss"].items()}
    assert losses == pytest.approx({step: seen.loss for step, seen in steps_of(run_dir).items()})
    assert sorted(map(int, history["lm loss validation"])) == [4, 6]
