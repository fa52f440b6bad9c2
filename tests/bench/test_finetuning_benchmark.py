"""Tests of the benchmark of LoRA on chats: a tiny run, and who is thrown out."""

from pathlib import Path

import pytest

from benchmarks import finetuning
from benchmarks.turns import Runner


@pytest.mark.sweep
@pytest.mark.processes
def test_a_quick_run_packs_and_pads_the_same_chats(capsys: pytest.CaptureFixture[str]) -> None:
    assert finetuning.main(["--quick", "--contestants", "megatronish*", "--threads", "1"]) == 0
    printed = capsys.readouterr().out
    rows = [line.split(" | ") for line in printed.splitlines() if line.startswith("| megatronish")]
    assert [row[0] for row in rows] == ["| megatronish --no-pack-samples", "| megatronish"]
    padded, packed = (int(row[4].removesuffix("%")) for row in rows)
    assert packed > 1.3 * padded
    assert all(float(row[5].split()[0]) < 1e-6 for row in rows)
    assert "packing's gain, megatronish against megatronish --no-pack-samples: **" in printed


def trained(name: str, *losses: float, parameters: int = 5) -> Runner:
    return Runner(name, [], parameters=parameters, losses=list(losses))


def test_who_begins_with_another_base_or_adapter_leaves() -> None:
    runners = [
        trained("other base", 2.1, 1.9),
        trained("other adapter", 2.0, 1.901),
        trained("smaller", 2.0, 1.9, parameters=4),
        trained("equal", 2.0, 1.9),
        trained("megatronish", 2.0, 1.9),
    ]
    assert finetuning.leave_if_other(runners) == ["other base", "other adapter", "smaller"]
    assert [runner.failure for runner in runners] == [
        "has loss 2.1 at step 1, megatronish 2.0",
        "has loss 1.901 at step 2, megatronish 1.9",
        "learns 4 parameters, megatronish 5",
        None,
        None,
    ]


def test_a_peer_that_is_not_installed_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("benchmarks.side_by_side.ENVIRONMENTS", tmp_path)
    runner = finetuning.begin(finetuning.TUNINGS[0], finetuning.parse(["--quick"]), tmp_path)
    assert runner.failure == "not installed: make .venv-bench/transformers/.megatronish-requirements"
