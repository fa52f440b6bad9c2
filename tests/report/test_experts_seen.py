"""What a run shows of its experts: counts, losses, evaluations and the heat map, the same in every layout."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import NO_DROPOUT, in_few_micro_batches, world_size_of
from jobs import tiny, train_on_ranks
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatronish.report.metrics import compact_parts, console_parts
from megatronish.report.plot import plot_experts, read_counts, read_lines

MODEL = (
    f"--num-layers 4 --seq-length 24 --global-batch-size 8 --num-experts 8 --moe-ffn-hidden-size 24 {NO_DROPOUT} "
    "--moe-router-topk 2 --moe-layer-freq [0,1,1,1] --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001 "
    "--moe-expert-capacity-factor 1.0 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--optimizer sgd --lr 1e-2 --train-iters 4"
)
EVALUATES = "--eval-interval 2 --eval-iters 1"
SEEN = ("load_balancing_loss", "router_z_loss", "largest_expert_load", "num_idle_experts", "dropped_share")


def run(folder: Path, flags: str, *, draws: bool = False) -> Path:
    """The folder of a run with these flags."""
    flags = in_few_micro_batches(flags)
    train_on_ranks(tiny(folder, flags), world_size=world_size_of(flags), draws=draws)
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of one process, with evaluations."""
    return run(tmp_path_factory.mktemp("alone") / "run", f"{MODEL} {EVALUATES}", draws=True)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("--dp 2 --ep 2", marks=pytest.mark.sweep),
        "--tp 2 --ep 2 --etp 1 --sequence-parallel",
        pytest.param("--cp 2 --ep 2", marks=pytest.mark.sweep),
        pytest.param("--cp 2 --tp 2 --ep 2 --etp 2", marks=pytest.mark.sweep),
        pytest.param("--pp 2 --dp 2 --ep 2", marks=pytest.mark.sweep),
        pytest.param(
            "--pp 2 --tp 2 --ep 2 --etp 1 --pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 2",
            marks=pytest.mark.sweep,
        ),
        pytest.param("--pp 2 --pipeline-schedule zb-v", marks=pytest.mark.sweep),
        "--dp 2 --ep 2 --zero-stage 3 --recompute-granularity full",
    ],
)
def test_every_layout_shows_and_evaluates_what_one_process_does(alone: Path, tmp_path: Path, layout: str) -> None:
    folder = run(tmp_path / "run", f"{MODEL} {EVALUATES} {layout}")
    assert read_lines(folder / "experts.jsonl") == read_lines(alone / "experts.jsonl")
    for mine, theirs in zip(*(read_lines(each / "metrics.jsonl") for each in (folder, alone)), strict=True):
        assert {name: mine[name] for name in SEEN} == pytest.approx({name: theirs[name] for name in SEEN}, rel=1e-6)
    evaluations = [read_lines(each / "evaluations.jsonl") for each in (folder, alone)]
    for mine, theirs in zip(*evaluations, strict=True):
        assert mine == {
            **theirs,
            "loss": pytest.approx(theirs["loss"]),
            "perplexity": pytest.approx(mine["perplexity"]),
        }


def test_counts_are_all_choices_and_evaluation_changes_none(alone: Path, tmp_path: Path) -> None:
    lines = read_lines(alone / "experts.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for line in lines:
        assert list(line["tokens_per_expert"]) == ["1", "2", "3"]
        assert all(sum(row) == 2 * 8 * 24 for row in line["tokens_per_expert"].values())
    without = run(tmp_path / "run", f"{MODEL} --eval-iters 0")
    assert lines == read_lines(without / "experts.jsonl")
    last = read_lines(alone / "metrics.jsonl")[-1]
    rows = np.array(list(lines[-1]["tokens_per_expert"].values()))
    assert last["largest_expert_load"] == pytest.approx((rows.max(1) / rows.mean(1)).max())
    assert last["num_idle_experts"] == (rows == 0).sum()


def test_trackers_have_the_largest_load_of_each_layer(alone: Path) -> None:
    events = EventAccumulator(str(alone / "tensorboard"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {"load_balancing_loss", "z_loss", "dropped-share", "largest-expert-load", "idle-experts"} <= tags
    largest = [events.Scalars(f"moe/largest_expert_load_layer_{layer}")[-1].value for layer in (1, 2, 3)]
    assert max(largest) == pytest.approx(read_lines(alone / "metrics.jsonl")[-1]["largest_expert_load"])
    assert "moe/idle_experts_layer_3" in tags and "moe/idle_experts_layer_0" not in tags


VALUES = {
    **{"step": 3, "loss": 2.0, "grad_norm": 1.0, "learning_rate": 0.1, "loss_scale": 1.0, "step_seconds": 1.0},
    **{"data_seconds": 0.0, "tokens_per_second": 10.0, "model_tflops_per_device": 1.0, "peak_memory_bytes": 2**30},
    **{"skipped_since_line": 0, "nan_since_line": 0},
}


def test_the_log_line_has_the_largest_load_and_idle_experts_only_where_there_are_any() -> None:
    even = VALUES | {"largest_expert_load": 1.5, "num_idle_experts": 0.0, "dropped_share": 0.0, "router_z_loss": 4.0}
    assert "load 1.50x" in [part.text for part in compact_parts(even, 10)]
    assert not {"idle", "dropped"} & {part.label for part in compact_parts(even, 10)}
    uneven = even | {"num_idle_experts": 3.0, "dropped_share": 0.25}
    assert {"idle 3", "dropped 25.0%"} <= {part.text for part in compact_parts(uneven, 10)}
    assert {"largest expert load: 1.50", "idle experts: 3", "dropped: 25.0%", "z_loss: 4.000000E+00"} <= set(
        console_parts(uneven)
    )
    assert "load" not in {part.label for part in compact_parts(VALUES, 10)}


def test_a_run_leaves_a_heat_map(alone: Path, tmp_path: Path) -> None:
    assert (alone / "experts.png").read_bytes().startswith(b"\x89PNG")
    assert plot_experts(tmp_path) is None and not list(tmp_path.iterdir())


def test_the_map_shows_shares_of_the_mean_idle_experts_and_the_last_line_of_a_repeated_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Figure] = []
    save = Figure.savefig

    def saved(self: Figure, *args: Any, **options: Any) -> None:
        found.append(self)
        save(self, *args, **options)

    monkeypatch.setattr(Figure, "savefig", saved)
    rows = [(1, [9, 9]), (3, [0, 9]), (2, [8, 4]), (3, [12, 0])]
    lines = [{"step": step, "tokens_per_expert": {"1": row, "3": [5, 5]}} for step, row in rows]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "experts.jsonl").write_text(text + '{"step": 4, "tok')
    counts = read_counts(tmp_path / "experts.jsonl")
    assert counts is not None and counts.layers == (1, 3) and counts.last_steps == (3, 3)
    assert counts.largest[:, 0] == pytest.approx([1.0, 8 / 6, 2.0])
    assert counts.last.tolist() == [[12, 0], [5, 5]]
    plot_experts(tmp_path)
    above, below = found[0].axes[:2]
    assert [label.get_text() for label in above.get_yticklabels()] == ["1", "3"]
    assert [text.get_text() for text in above.texts] == ["2.00", "0.00", "1.00", "1.00"]
    shade = above.collections[0].get_array()
    assert shade is not None and np.ma.getmaskarray(shade).tolist() == [[False, True], [False, False]]
    assert list(below.get_lines()[0].get_xdata()) == [1, 2, 3]
