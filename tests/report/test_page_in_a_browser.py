"""Test of a run's page in Chromium: everything is drawn, nothing is complained about, no request leaves the page."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from test_report_page import written

from megatronish.report.page.write import write_page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")
@pytest.mark.parametrize("width", [1300, 400])
def test_a_browser_draws_every_part_of_a_page(tmp_path: Path, width: int) -> None:
    assert CHROMIUM is not None
    page = write_page([written(tmp_path / "one"), written(tmp_path / "two")], tmp_path / "page.html")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--window-size={width},2000"]
    words = [CHROMIUM, *flags, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.as_uri()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True)
    assert "CONSOLE" not in done.stderr, done.stderr
    dom = done.stdout.partition("<script")[0]
    assert dom.count("<canvas") == 5  # loss, learning rate, experts, and the ranks of both runs
    titles = ["Layout", "Where the time went", "Schedule", "Experts", "Events"]
    assert [dom.count(f"<h3>{title}</h3>") for title in titles] == [2] * len(titles)
    assert "is not shown" not in dom
    assert len(re.findall("<title>rank 3: stage 1, replica 1", dom)) == 2
