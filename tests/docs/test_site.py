"""Tests of the site: it builds strictly, every link leads somewhere, and Chromium shows every page at two widths."""

import os
import subprocess
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from browser import CHROMIUM, NO_BROWSER, Page, browser
from paths import ROOT

PYTHON = ROOT / os.environ.get("DOCS_VENV", ".venv-docs") / "bin" / "python"
WIDTHS = (1280, 390)  # a desktop and a phone
WIDE_TABLES = ("CONVERT.html", "CUDA_REVIEW.html", "TESTS.html")
"""Pages with tables of long names in many columns, which scroll by themselves on a desktop, too."""
NOT_FOUND = "404.html"
"""The page of a server for what is not there: its links begin at the server's root."""
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs MkDocs, which `make test-docs` installs"),
]


class Links(HTMLParser):
    """What a page loads and links to (`links`), and the places in it that one can link to (`anchors`)."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect the addresses of a tag and its name."""
        given = {name: value for name, value in attrs if value}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        address = given.get("href") or given.get("src")
        if address:
            (self.links if tag == "a" else self.loaded).append(address)


@cache
def read(page: Path) -> Links:
    """The links of a page, read once."""
    return Links(page)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site, built strictly: a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    words = [PYTHON, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    environ = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def lost(page: Path, address: str) -> bool:
    """Whether an address that a page has leads nowhere in the site."""
    parts = urlsplit(address)
    target = page if not parts.path else (page.parent / unquote(parts.path)).resolve()
    if target.is_dir():
        target /= "index.html"
    if not target.is_file():
        return True
    anchor = unquote(parts.fragment)
    return bool(anchor) and target.suffix == ".html" and anchor not in read(target).anchors


def is_internal(address: str) -> bool:
    return not urlsplit(address).scheme and not address.startswith("//")


def test_every_internal_link_and_anchor_exists(site: Path) -> None:
    pages = [page for page in sorted(site.rglob("*.html")) if page.name != NOT_FOUND]
    assert len(pages) > 100
    broken = [
        f"{page.relative_to(site)}: {address}"
        for page in pages
        for address in [*read(page).links, *read(page).loaded]
        if is_internal(address) and lost(page, address)
    ]
    assert not broken


def test_no_page_loads_anything_from_another_server(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert not {address for page in pages for address in read(page).loaded if not is_internal(address)}


def test_a_user_meets_neither_the_log_nor_the_review_before_the_part_for_contributors(site: Path) -> None:
    links = [urlsplit(address).path for address in read(site / "TUTORIAL.html").links]
    for_contributors = links.index("CONTRIBUTING.html")
    assert min(links.index("LOG.html"), links.index("CUDA_REVIEW.html")) > for_contributors


def pages_to_look_at(site: Path) -> Iterator[Path]:
    """Every page that is written by hand, and one of the source."""
    written = (page for page in site.rglob("*.html") if "source" not in page.relative_to(site).parts)
    yield from sorted(page for page in written if page.name != NOT_FOUND)
    yield site / "source" / "megatronish" / "parallel" / "mesh.py.html"


TABLES_THAT_SCROLL = """[...document.querySelectorAll(".md-typeset table:not([class])")]
    .map(table => [table.closest(".md-typeset__scrollwrap"), table.rows[0].innerText])
    .filter(([around, head]) => around.scrollWidth > around.clientWidth).map(([around, head]) => head)"""


def narrow(page: Page, width: int) -> None:
    """Give the page the width of a device: a window has a least width."""
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    page.command("Emulation.setDeviceMetricsOverride", **metrics)


@pytest.mark.skipif(CHROMIUM is None, reason=NO_BROWSER)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_browser_shows_every_page_without_an_error_and_without_scrolling_aside(
    site: Path, tmp_path: Path, width: int
) -> None:
    wide = []
    with browser(tmp_path, width=max(width, 600)) as page:
        page.open("about:blank")
        narrow(page, width)
        for path in pages_to_look_at(site):
            page.command("Page.navigate", url=path.as_uri())
            page.wait_for(f"location.href === {path.as_uri()!r} && document.readyState === 'complete'")
            assert page.run("window.innerWidth") == width
            if page.run("document.documentElement.scrollWidth") > width:
                wide.append(path.name)
            if width == max(WIDTHS) and path.name not in WIDE_TABLES:
                wide += [f"{path.name}: {head}" for head in page.run(TABLES_THAT_SCROLL)]
        assert page.complaints == []
    assert not wide


@pytest.mark.skipif(CHROMIUM is None, reason=NO_BROWSER)
def test_the_search_finds_a_page_without_a_network(site: Path, tmp_path: Path) -> None:
    with browser(tmp_path) as page:
        page.open((site / "index.html").as_uri())
        page.run("document.querySelector('[data-md-component=search-query]').focus(); 0")
        page.command("Input.insertText", text="zigzag")
        field = "document.querySelector('[data-md-component=search-query]')"
        page.run(f"{field}.dispatchEvent(new KeyboardEvent('keyup')); 0")
        page.wait_for("document.querySelector('.md-search-result__link') !== null")
        shown = page.run("document.querySelector('.md-search-result__list').innerText")
        assert "How the parts work together" in shown
        assert page.complaints == []
