"""The documentation as a site: it builds offline with strict links, needs no network to be read,
and its generated pages are complete.
"""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from ragen_mega.config.flags import all_flags
from ragen_mega.config.sections.section import flag_of
from ragen_mega.report.glossary import GLOSSARY

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "tools" / "documentation" / "mkdocs.yml"
LOADED = {("script", "src"), ("link", "href"), ("img", "src"), ("iframe", "src")}
"""What a browser fetches by itself."""
SAID_ONLY = ("canonical", "prev", "next")
"""Relations of a <link> that are not fetched."""


class Links(HTMLParser):
    """What a page loads, what it links to, and the anchors that it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.linked: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        of = dict(attrs)
        for name, value in attrs:
            if (tag, name) in LOADED and of.get("rel") not in SAID_ONLY:
                self.loaded.append(value or "")
            elif (tag, name) == ("a", "href"):
                self.linked.append(value or "")
            elif name in ("id", "name"):
                self.anchors.add(value or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="pip install '.[docs]'")
    target = tmp_path_factory.mktemp("site")
    command = ["mkdocs", "build", "--strict", "--config-file", CONFIG, "--site-dir", target]
    offline = {"NO_MKDOCS_2_WARNING": "1", "http_proxy": "http://0.0.0.0:9", "https_proxy": ""}
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        env=os.environ | offline,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return target


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Links]:
    return {
        path: Links(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"
    }


def test_the_pages_load_nothing_from_the_network(pages: dict[Path, Links], site: Path) -> None:
    assert len(pages) > 25
    for page, of in pages.items():
        outside = [place for place in of.loaded if re.match(r"(https?:)?//", place)]
        assert not outside, (page.name, outside)
    style = "".join(path.read_text() for path in site.rglob("*.css"))
    assert not re.search(r"url\(.?https?:|@import", style)


def test_every_link_of_the_built_site_leads_somewhere(pages: dict[Path, Links]) -> None:
    """Also those of READMEs and out of docs/, which the build brings along."""
    for page, of in pages.items():
        for link in of.linked:
            if re.match(r"https://|mailto:", link):
                continue
            path, _, anchor = unquote(link).partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), (page.name, link)
            if anchor and target in pages:
                assert anchor in pages[target].anchors, (page.name, link)


def test_every_flag_and_metric_is_listed(site: Path) -> None:
    flags = (site / "flags.html").read_text()
    assert [one.name for one in all_flags() if f">{flag_of(one.name)}<" not in flags] == ["recipe"]
    metrics = (site / "metrics.html").read_text()
    assert not [key for key in GLOSSARY if f">{key}<" not in metrics]
