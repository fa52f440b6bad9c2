"""Test of preprocessing on a local cluster of Ray: two nodes, one of which is killed, and the bytes of one process."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from paths import ROOT
from ranks import wait_until
from test_tasks import inputs_of

from megatronish.commands.preprocess_tasks import main
from megatronish.data.tasks import read_plan, record_of

SECONDS = 120.0
NEEDS_RAY = pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray: pip install ray")


def merged(prefix: Path) -> bytes:
    assert main(["merge", "--plan", f"{prefix}.plan.json"]) == 0
    return Path(f"{prefix}_text_document.bin").read_bytes() + Path(f"{prefix}_text_document.idx").read_bytes()


@NEEDS_RAY
def test_a_node_that_leaves_changes_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.cluster_utils import Cluster

    own = {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    inputs_of(tmp_path / "in")
    long = "\n".join(json.dumps({"text": f"line {number} " * 200}) for number in range(20_000))
    (tmp_path / "in" / "long.jsonl").write_text(long)
    argv = ["--input", str(tmp_path / "in"), "--tokenizer-type", "bytes", "--append-eod", "--max-bad-fraction", "1"]
    assert main([*argv, "--output-prefix", str(tmp_path / "one")]) == 0
    assert main(["plan", *argv, "--output-prefix", str(tmp_path / "many"), "--tasks", "12"]) == 0
    plan = read_plan(tmp_path / "many.plan.json")
    command = [sys.executable, "-m", "megatronish", "preprocess", "run", "--plan", str(plan.path), "--task", "0::1"]
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
        environ = os.environ | {"RAY_ADDRESS": cluster.address}
        with (tmp_path / "output").open("w") as output:
            driver = subprocess.Popen([*command, "--engine", "ray"], env=environ, stdout=output, stderr=output)
        told = (tmp_path / "output").read_text
        assert wait_until(lambda: any(plan.folder.glob("task-*.json")), timeout=SECONDS), told()
        assert record_of(plan, 11) is None, "it is killed in the middle of the work"
        cluster.remove_node(nodes[0], allow_graceful=False)
        assert driver.wait(SECONDS) == 0, told()
        assert told().count(" documents | ") == 12, told()
        again = subprocess.run([*command, "--engine", "ray"], env=environ, capture_output=True, text=True, check=True)
        assert again.stdout.count("is whole | ") == 12
        (tmp_path / "in" / "long.jsonl").write_text(long + "\n")
        (plan.folder / "task-00011.json").unlink()
        changed = subprocess.run([*command, "--engine", "ray"], env=environ, capture_output=True, text=True)
        assert changed.returncode == 2
        assert "error: task 11 of 12: input " in changed.stderr
        assert "Traceback" not in changed.stderr
        (tmp_path / "in" / "long.jsonl").write_text(long)
        os.utime(tmp_path / "in" / "long.jsonl", ns=(0, plan.inputs[-1].changed_ns))
        subprocess.run([*command, "--engine", "ray"], env=environ, check=True)
    finally:
        cluster.shutdown()
    one = (tmp_path / "one_text_document.bin").read_bytes() + (tmp_path / "one_text_document.idx").read_bytes()
    assert merged(tmp_path / "many") == one


def test_a_missing_ray_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n')
    argv = ["--input", str(tmp_path / "a.jsonl"), "--tokenizer-type", "bytes", "--output-prefix", str(tmp_path / "p")]
    assert main(["plan", *argv, "--tasks", "1"]) == 0
    assert main(["run", "--plan", str(tmp_path / "p.plan.json"), "--task", "0", "--engine", "ray"]) == 2
    assert "--engine ray needs Ray, which is missing" in capsys.readouterr().err
