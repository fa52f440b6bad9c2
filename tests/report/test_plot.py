"""Tests of loss.png: what is drawn of short, long, interrupted and broken runs."""

import json
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from megatronish.report.plot import MOST_BINS, plot_run, smoothed, thinned


@pytest.fixture
def figure(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Figures that were saved."""
    found: list[Figure] = []
    save = Figure.savefig

    def saved(self: Figure, *args: Any, **options: Any) -> None:
        found.append(self)
        save(self, *args, **options)

    monkeypatch.setattr(Figure, "savefig", saved)
    return found


def write(folder: Path, losses: dict[int, float | None], evaluations: dict[int, float] | None = None) -> None:
    lines = [{"step": step, "loss": loss, "learning_rate": 1e-3 / step} for step, loss in losses.items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    lines = [{"step": step, "name": "valid", "loss": loss} for step, loss in (evaluations or {}).items()]
    (folder / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.long
@pytest.mark.parametrize("num_steps", [0, 1, 5, 400])
def test_steps_on_the_axis_are_whole_numbers(tmp_path: Path, figure: list[Figure], num_steps: int) -> None:
    write(tmp_path, {step: 3 + 1 / step for step in range(1, num_steps + 1)})
    assert plot_run(tmp_path).read_bytes().startswith(b"\x89PNG")
    ticks = figure[0].axes[0].get_xticks()
    assert len(ticks) and all(tick == round(tick) for tick in ticks)


def test_a_long_curve_has_a_smoothed_line_over_a_faint_one_and_no_spike_is_lost(
    tmp_path: Path, figure: list[Figure]
) -> None:
    noise = np.random.default_rng(0).normal(size=20_000)
    losses = {step: 3 + 0.1 * float(noise[step - 1]) for step in range(1, 20_001)}
    write(tmp_path, losses | {7777: 9.0}, {10_000: 3.0, 20_000: 2.9})
    plot_run(tmp_path)
    loss_axes, rate_axes = figure[0].axes
    raw, smooth, valid = loss_axes.get_lines()
    assert len(raw.get_xdata()) <= 2 * MOST_BINS + 2 and raw.get_alpha() < 0.5
    assert (7777, 9.0) in list(zip(raw.get_xdata(), raw.get_ydata(), strict=True))
    assert smooth.get_ydata().std() < 0.2 * np.std(list(losses.values()))
    assert list(valid.get_xdata()) == [10_000, 20_000] and valid.get_marker() == "o"
    assert [text.get_text() for text in loss_axes.get_legend().get_texts()] == [
        f"training, smoothed ({smooth.get_ydata()[-1]:.3f})",
        "valid (2.900)",
    ]
    assert rate_axes.get_ylabel() == "learning rate (dashed)"


@pytest.mark.parametrize(("highest", "scale"), [(10.8, "linear"), (400.0, "log")])
def test_losses_of_very_different_size_get_a_logarithmic_axis(
    tmp_path: Path, figure: list[Figure], highest: float, scale: str
) -> None:
    write(tmp_path, {step: 2 + (highest - 2) / step for step in range(1, 101)})
    plot_run(tmp_path)
    assert figure[0].axes[0].get_yscale() == scale


def test_a_repeated_step_counts_once_and_a_loss_that_is_no_number_leaves_a_gap(
    tmp_path: Path, figure: list[Figure]
) -> None:
    lines = [(1, 4.0), (2, 3.0), (4, 9.9), (3, None), (4, 2.0)]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": step, "loss": loss, "learning_rate": 0.1}) + "\n" for step, loss in lines)
        + '{"step": 5, "lo\n3\n'
    )
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b"\x93 of another program\n")
    (tmp_path / "evaluations.jsonl").write_text('{"step": 1e999}\n[]\n{"name": "validation", "step": 2, "loss": 3.5}\n')
    plot_run(tmp_path)
    line = figure[0].axes[0].get_lines()[0]
    assert list(line.get_xdata()) == [1, 2, 3, 4]
    np.testing.assert_equal(line.get_ydata(), [4.0, 3.0, np.nan, 2.0])


def test_the_smoothed_curve_begins_at_the_first_loss_and_does_not_end_at_the_last() -> None:
    values = np.array([100.0, *[1.0] * 998, 5.0])
    smooth = smoothed(values)
    assert smooth[0] == 100.0 and smooth[500] == 1.0
    assert smooth[-1] == pytest.approx((10 * 1.0 + 5.0) / 11)
    assert np.isnan(smoothed(np.full(60, np.nan))).all()
    assert smoothed(np.array([np.inf, 2.0, np.nan, 4.0])) == pytest.approx([np.nan, 2.0, 3.0, 4.0], nan_ok=True)


def test_a_gap_stays_a_gap_when_points_are_left_out() -> None:
    steps, values = np.arange(10_000), np.ones(10_000)
    values[4000:5000] = np.nan
    few_steps, few = thinned(steps, values)
    assert np.isnan(few[(few_steps >= 4010) & (few_steps < 4990)]).all() and np.isfinite(few[few_steps < 3990]).all()


def test_a_picture_that_does_not_fit_on_the_disk_leaves_nothing(tmp_path: Path) -> None:
    """Nor does one of a process that was killed while it drew, once the next one draws."""
    write(tmp_path, {1: 2.0, 2: 1.0})
    before = sorted(tmp_path.iterdir())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            plot_run(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(tmp_path.iterdir()) == before
    (tmp_path / f"loss.png.{'0' * 12}.tmp").write_bytes(b"half of it")
    plot_run(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([*before, tmp_path / "loss.png"])
