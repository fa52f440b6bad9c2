"""Test of a run's page in Chromium: everything is drawn, nothing is complained about, no request leaves the page."""

import json
from pathlib import Path

import pytest
from browser import CHROMIUM, NO_BROWSER, browser
from test_report_page import written

from megatronish.report.page.write import write_page

TITLES = ["Layout", "Where the time went", "Schedule", "Experts", "Events"]


@pytest.mark.processes
@pytest.mark.skipif(CHROMIUM is None, reason=NO_BROWSER)
@pytest.mark.parametrize("width", [1300, 400])
def test_a_browser_draws_every_part_of_a_page(tmp_path: Path, width: int) -> None:
    address = write_page([written(tmp_path / "one"), written(tmp_path / "two")], tmp_path / "page.html").as_uri()
    with browser(tmp_path, width=width) as page:
        page.open(address)
        page.wait_for("document.querySelectorAll('article').length === 2")
        assert page.run("document.querySelectorAll('canvas').length") == 5  # loss, rate, experts, ranks of both runs
        titles = (
            "Array.from(document.querySelectorAll('article:first-child h3, article h3'), (each) => each.textContent)"
        )
        assert [page.run(titles).count(title) for title in TITLES] == [2] * len(TITLES)
        assert "is not shown" not in page.run("document.querySelector('main').innerText")
        ranks = "Array.from(document.querySelectorAll('svg title'), (each) => each.textContent)"
        assert sum(title.startswith("rank 3: stage 1, replica 1") for title in page.run(ranks)) == 2
        assert page.run("document.documentElement.scrollWidth <= window.innerWidth")
        page.run("document.getElementById('axis').value = 'tokens'; axis.dispatchEvent(new Event('change')); 0")
        assert page.run("charts[0].chart.data[0][0]") == 100  # tokens of the first step
        assert page.complaints == []


@pytest.mark.processes
@pytest.mark.skipif(CHROMIUM is None, reason=NO_BROWSER)
def test_a_page_of_a_run_that_goes_on_shows_what_is_expected_before_anything_is_measured(tmp_path: Path) -> None:
    run = written(tmp_path / "one")
    memory = {"stage": 0, "bytes": 2048, "by_owner": {"weights": 2048}}
    expected = {"memory": memory, "traffic": {"tp": {"all-reduce": 512}}}
    (run / "forecast.json").write_text(json.dumps({"expected": expected}))
    with browser(tmp_path) as page:
        page.open(write_page([run], tmp_path / "page.html").as_uri())
        page.wait_for("document.querySelectorAll('article').length === 1")
        shown = page.run("document.querySelector('main').innerText")
        assert "is not shown" not in shown
        for line in ("peak memory\t2.0 KiB\t–", "tp\tall-reduce\t512\t–"):
            assert line in shown
        assert page.complaints == []
