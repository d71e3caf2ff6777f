"""The documentation site: builds with every warning an error, and its pages load nothing from the network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from browser import open_browser, set_view, why_not

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(page.stem for page in (ROOT / "docs").glob("*.md"))

pytest.importorskip("mkdocs", reason="the extra 'docs' is not installed")
pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(target)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    return target


@pytest.mark.timeout(240)
def test_the_site_builds_strictly_and_has_every_page(site: Path) -> None:
    for name in PAGES:
        path = site / "index.html" if name == "index" else site / name / "index.html"
        assert path.is_file(), f"{name}.md is not in the site"
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert [name for name in PAGES if f"{name}.md" not in navigation] == []


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_pages_load_nothing_from_the_network_and_log_nothing(address: str, tmp_path: Path) -> None:
    with open_browser(tmp_path) as driver:
        for name in PAGES:
            set_view(driver, 390, 844)
            driver.get(address + ("" if name == "index" else f"{name}/"))
            assert driver.execute_script("return document.documentElement.scrollWidth") <= 390, name
            assert [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"] == [], name
        messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
        asked = {m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"}
        assert [url for url in asked if url.startswith("http") and not url.startswith(address)] == []
