"""Tests of examples/launch: the files are well-formed, and the command in each is one that runs with its ranks."""

import os
import re
import shlex
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

from megatronish.config.read import read_config
from megatronish.launch.place import ENV, LAUNCHERS, Place, place_from_environment

FOLDER = ROOT / "examples" / "launch"
NUM_RANKS = {
    **{"torchrun.sh": 16, "slurm.sbatch": 16, "mpirun.sh": 16, "hostfile.sh": 16},
    **{"trainjob.yaml": 16, "pytorchjob.yaml": 8, "volcano.yaml": 8, "skypilot.yaml": 16},
}
PROBE = "alive.sh"
SCRIPTS = [name for name in NUM_RANKS if not name.endswith(".yaml")] + [PROBE]
YAML = [name for name in NUM_RANKS if name.endswith(".yaml")]
DOCUMENT = (ROOT / "docs" / "MANY_MACHINES.md").read_text(encoding="utf-8")


def text_of(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def arguments_of(name: str) -> list[str]:
    """What pretrain_gpt.py is given."""
    if "args: [" in text_of(name):
        (listed,) = re.findall(r"args: \[(.*?)\]", text_of(name), re.DOTALL)
        return re.findall(r'"([^"]*)"', listed)
    (line,) = [line for line in text_of(name).replace("\\\n", " ").splitlines() if "pretrain_gpt.py" in line]
    return shlex.split(line.partition("pretrain_gpt.py")[2].rstrip("& "))


def test_every_example_is_tested_and_in_the_document() -> None:
    names = {path.name for path in FOLDER.iterdir()}
    assert names == {*NUM_RANKS, PROBE}
    assert names == {Path(path).name for path in re.findall(r"\(\.\./examples/launch/([^)]+)\)", DOCUMENT)}


@pytest.mark.parametrize("name", NUM_RANKS)
def test_the_flags_of_an_example_are_right_for_its_ranks(name: str) -> None:
    argv = arguments_of(name)
    config = ROOT / argv[argv.index("--config") + 1]
    assert read_config([*argv, "--config", str(config), "--mock-data"][2:], world_size=NUM_RANKS[name]).config.layout


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_well_formed(name: str) -> None:
    subprocess.run(["bash", "-n", str(FOLDER / name)], check=True)


@pytest.mark.parametrize("name", YAML)
def test_a_manifest_is_well_formed(name: str) -> None:
    text = text_of(name)
    assert "\t" not in text
    for opening, closing in ("[]", "{}"):
        assert text.count(opening) == text.count(closing)
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        assert indent % 2 == 0 or line.lstrip().startswith('"'), line
    yaml = pytest.importorskip("yaml", reason="a full check needs PyYAML, which no requirement brings")
    manifest = yaml.safe_load(text)
    if name == "skypilot.yaml":
        assert {"name", "num_nodes", "resources", "workdir", "setup", "run"} == manifest.keys()
        return
    assert {"apiVersion", "kind", "metadata", "spec"} == manifest.keys()
    for probe in found(manifest, "livenessProbe"):
        bash, script, file, seconds = probe["exec"]["command"]
        assert bash == "bash" and (ROOT / script) == FOLDER / PROBE and seconds.isdecimal()
        argv = arguments_of(name)
        assert file == argv[argv.index("--run-dir") + 1] + "/health.json"


def found(manifest: Any, name: str) -> Iterator[Any]:
    """Values of the fields of that name, however deep."""
    for key, value in manifest.items() if isinstance(manifest, dict) else enumerate(manifest):
        if key == name:
            yield value
        elif isinstance(value, (dict, list)):
            yield from found(value, name)


def test_the_policies_of_volcano_are_the_contract() -> None:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML")
    policies = yaml.safe_load(text_of("volcano.yaml"))["spec"]["policies"]
    actions = {each.get("exitCode", each.get("event")): each["action"] for each in policies}
    stopped = int(arguments_of("volcano.yaml")[-1])
    assert actions == {"PodEvicted": "RestartJob", 2: "AbortJob", **dict.fromkeys((1, 137, stopped), "RestartJob")}


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        # Volcano's pytorch plugin and PyTorchJob: one process a pod
        (
            {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "gpt2-124m-master-0", "MASTER_PORT": "29500"},
            Place(3, 8, 0, 1, "env://", may_see_own_device=True),
        ),
        # torchrun, also below SkyPilot and the PET_ variables of Kubeflow, which its ranks inherit
        (
            {
                **{"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"},
                **{"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none"},
                **{"PET_NNODES": "2", "PET_NPROC_PER_NODE": "8", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"},
            },
            Place(9, 16, 1, 8, "env://"),
        ),
    ],
)
def test_the_variables_of_a_launcher_give_a_place(environ: dict[str, str], place: Place) -> None:
    assert place_from_environment(environ) == place


# ---- scripts, with commands that only say how they were called


def run_script(text: str, folder: Path, *, stubs: dict[str, str], environ: dict[str, str]) -> tuple[int, list[str]]:
    """Exit status of a script, and the calls of the commands that stand in for those of a cluster."""
    calls = folder / "calls"
    calls.touch()
    for name, body in stubs.items():
        (folder / name).write_text(f'#!/bin/bash\necho "{name} $*" >> {calls}\n{body}\n')
        (folder / name).chmod(0o755)
    environ = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"} | environ
    done = subprocess.run(["bash", "-c", text], env=environ, cwd=folder, capture_output=True, timeout=30, check=False)
    return done.returncode, calls.read_text().splitlines()


def test_skypilots_variables_become_those_of_torchrun(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML")
    said = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    environ = said | {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    script = yaml.safe_load(text_of("skypilot.yaml"))["run"]
    status, (call,) = run_script(script, tmp_path, stubs={"torchrun": ""}, environ=environ)
    assert status == 0
    started = "torchrun --nnodes 2 --node-rank 1 --nproc-per-node 8 --master-addr 10.0.0.1 --master-port 29500 "
    assert call.startswith(started + "pretrain_gpt.py --config configs/llama-8b-8gpu.toml ")


@pytest.mark.parametrize(
    ("statuses", "num_starts", "status"), [((0,), 1, 0), ((1, 137, 0), 3, 0), ((2,), 1, 2), ((1,) * 9, 5, 1)]
)
def test_slurms_script_tries_again_as_the_status_says(
    tmp_path: Path, statuses: tuple[int, ...], num_starts: int, status: int
) -> None:
    srun = f"set -- {' '.join(map(str, statuses))}; shift $(($(grep -c ^srun {tmp_path}/calls) - 1)); exit $1"
    ended, calls = run_script(text_of("slurm.sbatch"), tmp_path, stubs={"srun": srun}, environ={"SLURM_JOB_ID": "7"})
    assert (len(calls), ended) == (num_starts, status)


def test_slurms_script_saves_and_queues_itself_again_before_its_time_is_over(tmp_path: Path) -> None:
    """SLURM sends SIGTERM to the script alone; scancel hands it to the ranks, which save and leave with 0."""
    stubs = {
        "srun": f"kill -TERM $PPID; while [ ! -e {tmp_path}/asked ]; do sleep 0.02; done; exit 0",
        "scancel": f"touch {tmp_path}/asked",
        "scontrol": "",
    }
    status, calls = run_script(text_of("slurm.sbatch"), tmp_path, stubs=stubs, environ={"SLURM_JOB_ID": "7"})
    assert status == 0
    assert [call.partition(" python")[0] for call in calls] == [
        "srun --kill-on-bad-exit=1",
        "scancel --signal=TERM 7",
        "scontrol requeue 7",
    ]


@pytest.mark.parametrize(
    ("age", "up", "status"),
    [(5, 500, 0), (200, 500, 1), (200, 20, 0), (None, 500, 0)],  # seconds; a file that an earlier pod has left; no file
)
def test_a_pod_is_alive_while_steps_end(tmp_path: Path, age: int | None, up: int, status: int) -> None:
    now, health = time.time(), tmp_path / "health.json"
    if age is not None:
        health.touch()
        os.utime(health, (now - age, now - age))
    # The machine began a day ago, process 1 `up` seconds ago, whenever its entry in /proc was made.
    ticks = round((86400 - up) * os.sysconf("SC_CLK_TCK"))
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "stat").write_text(f"1 (a (b) c) S {' '.join('0' * 18)} {ticks} 0 0\n")
    (tmp_path / "stat").write_text(f"cpu 1 2 3\nbtime {round(now - 86400)}\n")
    probe = ["bash", str(FOLDER / PROBE), str(health), "60"]
    assert subprocess.run(probe, env=os.environ | {"PROC": str(tmp_path)}, check=False).returncode == status


@pytest.mark.skipif(not Path("/proc/1/stat").exists(), reason="there is no /proc")
def test_a_probe_reads_when_process_1_began(tmp_path: Path) -> None:
    health = tmp_path / "health.json"
    health.touch()
    os.utime(health, (1, 1))
    with Path("/proc/1/stat").open() as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    up = float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    for limit, status in ((up + 60, 0), (up - 60, 1)):
        probe = ["bash", str(FOLDER / PROBE), str(health), str(round(limit))]
        assert subprocess.run(probe, check=False).returncode == status


def test_the_document_has_every_variable_in_the_order_in_which_they_are_read() -> None:
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|(.*)$", DOCUMENT, re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(range(1, len(LAUNCHERS) + 2))
    assert [name for _, name, _ in rows[1:]] == [launcher.name for launcher in LAUNCHERS]
    for (_, _, variables), launcher in zip(rows[1:], LAUNCHERS, strict=True):
        named = {*launcher.rank, *launcher.size, *launcher.local_rank, *launcher.local_size, launcher.machines}
        assert named - {None} <= set(re.findall(r"`(\w+)`", variables))
    assert all(f"`{name}`" in DOCUMENT for name in ENV)
