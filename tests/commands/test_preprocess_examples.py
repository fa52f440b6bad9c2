"""Tests of examples/preprocess: the command in each file is one that runs with the variables of its scheduler."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from paths import ROOT

from megatronish.commands.preprocess_tasks import RunArguments, task_numbers
from megatronish.config.arguments import read_arguments

FOLDER = ROOT / "examples" / "preprocess"
DOCUMENT = (ROOT / "docs" / "DATA_AT_SCALE.md").read_text(encoding="utf-8")


def test_every_example_is_in_the_document() -> None:
    names = {path.name for path in FOLDER.iterdir()}
    assert names == {Path(path).name for path in re.findall(r"\(\.\./examples/preprocess/([^)]+)\)", DOCUMENT)}


@pytest.mark.parametrize(("statuses", "expected"), [([0], 0), ([2], 2), ([1, 137, 0], 0), ([1, 1, 1], 1)])
def test_the_array_of_slurm_runs_its_task_and_tries_again_what_may_help(
    tmp_path: Path, statuses: list[int], expected: int
) -> None:
    for number, status in enumerate(statuses):
        (tmp_path / f"status{number}").write_text(str(status))
    stand_in = tmp_path / "megatronish"
    stand_in.write_text(
        '#!/bin/bash\necho "$@" >> called\nexit "$(cat "status$(($(wc -l < called) - 1))")"\n', encoding="utf-8"
    )
    stand_in.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_ARRAY_TASK_ID": "7", "SLURM_CPUS_PER_TASK": "16"}
    done = subprocess.run(
        ["bash", str(FOLDER / "array.sbatch")], cwd=tmp_path, env=environment, capture_output=True, check=False
    )
    called = (tmp_path / "called").read_text().splitlines()
    assert (done.returncode, len(called)) == (expected, len(statuses))
    verbs, argv = called[0].split()[:2], called[0].split()[2:]
    arguments = read_arguments(RunArguments, argv, program="run")
    assert (verbs, arguments.workers) == (["preprocess", "run"], 16)
    assert [*task_numbers(arguments.task, num_tasks=64, environment=environment)] == [7]
    assert "#SBATCH --array=0-63\n" in (FOLDER / "array.sbatch").read_text(encoding="utf-8")


def test_the_job_of_kubernetes_runs_a_task_a_pod() -> None:
    text = (FOLDER / "indexed-job.yaml").read_text(encoding="utf-8")
    (listed,) = re.findall(r"args: \[(.*?)\]", text)
    verbs, argv = re.findall(r'"([^"]*)"', listed)[:2], re.findall(r'"([^"]*)"', listed)[2:]
    arguments = read_arguments(RunArguments, argv, program="run")
    assert (verbs, arguments.plan) == (["preprocess", "run"], Path("/shared/data/my.plan.json"))
    assert [*task_numbers(arguments.task, num_tasks=64, environment={"JOB_COMPLETION_INDEX": "63"})] == [63]
    assert "completionMode: Indexed\n  completions: 64\n" in text
    yaml = pytest.importorskip("yaml", reason="a full check needs PyYAML, which no requirement brings")
    assert yaml.safe_load(text)["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [2]
