"""Test of preprocessing on a local cluster of Ray: two nodes, one of which is killed, and the bytes of one process."""

import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from paths import ROOT
from ranks import wait_until
from task_runs import inputs_of
from test_chat_tokens import sentencepiece_tokenizer
from trained_bpe import trained

from megatronish.commands.preprocess_tasks import main
from megatronish.data.phases import DuplicateSearch
from megatronish.data.tasks import Phase, Plan, copied_of, read_plan, record_of, removed_of, whole_result

SECONDS = 120.0
NEEDS_RAY = pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray: pip install ray")


def merged(prefix: Path) -> bytes:
    assert main(["merge", "--plan", f"{prefix}.plan.json"]) == 0
    return Path(f"{prefix}_text_document.bin").read_bytes() + Path(f"{prefix}_text_document.idx").read_bytes()


class Nodes:
    """A local cluster of Ray with two nodes of one CPU each, and a head without any."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        self.environ = os.environ | {"RAY_ADDRESS": self._cluster.address}
        self._nodes = [self._cluster.add_node(num_cpus=1) for _ in range(2)]

    def lose_one(self) -> None:
        """Kill a node."""
        self._cluster.remove_node(self._nodes.pop(0), allow_graceful=False)

    def fill_up(self) -> None:
        """Have two nodes again."""
        while len(self._nodes) < 2:
            self._nodes.append(self._cluster.add_node(num_cpus=1))

    def close(self) -> None:
        """End all nodes."""
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def all_nodes() -> Iterator[Nodes]:
    """The cluster of this module."""
    own = {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in own.items():
            patch.setenv(name, value)
        cluster = Nodes()
        yield cluster
        cluster.close()


@pytest.fixture
def nodes(all_nodes: Nodes) -> Nodes:
    """The cluster, with two nodes."""
    all_nodes.fill_up()
    return all_nodes


def command_of(plan: Plan, phase: Phase = "run") -> list[str]:
    """The command that does all tasks of a phase on Ray."""
    words = [sys.executable, "-m", "megatronish", "preprocess", phase, "--plan", str(plan.path), "--task", "0::1"]
    return [*words, "--engine", "ray"]


def run_and_lose_a_node(nodes: Nodes, plan: Plan, phase: Phase, output: Path) -> str:
    """Run a phase, kill a node when its first task has ended and its last has not; what was printed."""
    search, last = DuplicateSearch(plan), len(plan.tasks) - 1

    def is_whole(number: int) -> bool:
        return (record_of(plan, number) if phase == "run" else search.record(phase, number)) is not None

    with output.open("w") as file:
        driver = subprocess.Popen(command_of(plan, phase), env=nodes.environ, stdout=file, stderr=file)
    assert wait_until(lambda: any(map(is_whole, range(last))), timeout=SECONDS), output.read_text()
    assert not is_whole(last), "it is killed in the middle of the work"
    nodes.lose_one()
    assert driver.wait(SECONDS) == 0, output.read_text()
    return output.read_text()


@NEEDS_RAY
def test_a_node_that_leaves_changes_no_byte(tmp_path: Path, nodes: Nodes) -> None:
    inputs_of(tmp_path / "in")
    long = "\n".join(json.dumps({"text": f"line {number} " * 200}) for number in range(20_000))
    (tmp_path / "in" / "long.jsonl").write_text(long)
    argv = ["--input", str(tmp_path / "in"), "--tokenizer-type", "bytes", "--append-eod", "--max-bad-fraction", "1"]
    assert main([*argv, "--output-prefix", str(tmp_path / "one")]) == 0
    assert main(["plan", *argv, "--output-prefix", str(tmp_path / "many"), "--tasks", "12"]) == 0
    plan = read_plan(tmp_path / "many.plan.json")
    told = run_and_lose_a_node(nodes, plan, "run", tmp_path / "output")
    assert told.count(" documents | ") == 12, told

    def run_again() -> "subprocess.CompletedProcess[str]":
        return subprocess.run(command_of(plan), env=nodes.environ, capture_output=True, text=True)

    assert run_again().stdout.count("is whole | ") == 12
    (tmp_path / "in" / "long.jsonl").write_text(long + "\n")
    (plan.folder / "task-00011.json").unlink()
    changed = run_again()
    assert changed.returncode == 2
    assert "error: task 11 of 12: input " in changed.stderr
    assert "Traceback" not in changed.stderr
    (tmp_path / "in" / "long.jsonl").write_text(long)
    os.utime(tmp_path / "in" / "long.jsonl", ns=(0, plan.inputs[-1].changed_ns))
    assert run_again().returncode == 0
    one = (tmp_path / "one_text_document.bin").read_bytes() + (tmp_path / "one_text_document.idx").read_bytes()
    assert merged(tmp_path / "many") == one


def documents_to_clean(folder: Path) -> None:
    """Documents of two texts each for all rules of cleaning: copies, some changed, and runs of a benchmark."""
    folder.mkdir()
    draw, words = random.Random(9), [f"word{number}" for number in range(3000)]
    (folder.parent / "benchmark.jsonl").write_text(json.dumps({"question": " ".join(words[:20])}))
    texts = [" ".join(draw.choices(words, k=draw.choice([2, 40, 300]))) for _ in range(3000)]
    for place in range(6, 3000, 7):
        texts[place] = f" {texts[place - 1]}" if place % 2 else f"changed {texts[place - 1]}"
    texts[3::250] = [f"{text} {' '.join(words[3:18])}" for text in texts[3::250]]
    records = [
        {"text": text, "title": f"title {place // 7}", "lang": "ed"[place // 7 % 3 == 0], "source": place % 5}
        for place, text in enumerate(texts)
    ]
    for number in range(3):
        lines = [*map(json.dumps, records[number::3]), "{"]
        (folder / f"{number}.jsonl").write_text("\n".join(lines))


RULES = (
    *("--filter", "lang == e", "--min-characters", "30", "--max-tokens", "1850", "--keep-fraction", "0.9"),
    *("--sample-weights", "source=1:2.5", "--sample-weights", "source=2:0", "--sample-weights", "*/2.jsonl:1.5"),
)


@NEEDS_RAY
@pytest.mark.parametrize("kind", ["exact", "minhash"])
def test_a_plan_with_every_rule_is_the_same_where_nodes_leave_in_each_phase(
    kind: str, tmp_path: Path, nodes: Nodes
) -> None:
    documents_to_clean(tmp_path / "in")
    tokenizer = ["--tokenizer-model", str(tmp_path / "tokenizer.json"), "--tokenizer-type", "huggingface"]
    if kind == "exact":
        trained().save(tokenizer[1])
    else:
        sentencepiece_tokenizer(tmp_path)
        tokenizer = ["--tokenizer-model", str(tmp_path / "tokenizer.model"), "--tokenizer-type", "sentencepiece"]
    rules = [*RULES, "--deduplicate", kind, "--decontaminate", str(tmp_path / "benchmark.jsonl")]
    argv = ["--input", str(tmp_path / "in"), *tokenizer, *rules, "--json-keys", "text", "title", "--append-eod"]
    assert main([*argv, "--output-prefix", str(tmp_path / "one")]) == 0
    plans = {}
    for name in ("here", "ray"):
        assert main(["plan", *argv, "--output-prefix", str(tmp_path / name), "--tasks", "9"]) == 0
        plans[name] = read_plan(tmp_path / f"{name}.plan.json")
    for phase in ("sign", "match", "run"):
        assert main([phase, "--plan", str(plans["here"].path), "--task", "0::1"]) == 0
        nodes.fill_up()
        told = run_and_lose_a_node(nodes, plans["ray"], phase, tmp_path / phase)
        assert told.count(" of 9: ") == 9, told
    for name in ("here", "ray"):
        assert main(["merge", "--plan", str(plans[name].path)]) == 0
    for key, end in itertools.product(("text", "title"), ("bin", "idx")):
        one, here, ray = ((tmp_path / f"{name}_{key}_document.{end}").read_bytes() for name in ("one", "here", "ray"))
        assert one == here == ray
    removed, copied = (of(whole_result(plans["ray"])) for of in (removed_of, copied_of))
    assert len(removed.counts) == 7, "every rule took a document"
    assert sum(copied.counts.values()) > 100


def test_a_missing_ray_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n')
    argv = ["--input", str(tmp_path / "a.jsonl"), "--tokenizer-type", "bytes", "--output-prefix", str(tmp_path / "p")]
    assert main(["plan", *argv, "--tasks", "1"]) == 0
    assert main(["run", "--plan", str(tmp_path / "p.plan.json"), "--task", "0", "--engine", "ray"]) == 2
    assert "--engine ray needs Ray, which is missing" in capsys.readouterr().err
