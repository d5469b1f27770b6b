"""The documentation as a site: `make docs`."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_FETCHED = re.compile(
    r'<(?:script|img|iframe|source)\b[^>]*\bsrc="([^"]+)"|<link\b[^>]*rel="(?:stylesheet|preload)"[^>]*'
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    # Not --quiet, which also hides the warnings from --strict.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return out


def test_pages_fetch_nothing_from_elsewhere(site: Path):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        html = page.read_text(encoding="utf-8")
        fetched = [found[0] for found in _FETCHED.finditer(html)]
        assert fetched
        assert [tag for tag in fetched if re.search(r'(?:src|href)="(?:https?:)?//', tag)] == [], page
        assert 'data-md-component="source"' not in html  # the theme's script asks the API of GitHub about this element


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
def test_a_browser_asks_only_the_server_of_the_site(site: Path):
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    handler = type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/"
    requests: list[str] = []
    with server, playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.on("request", lambda request: requests.append(request.url))
        for path in ("results/", "reference/", ""):
            page.goto(address + path, wait_until="networkidle")
        page.click("input[name=query]")
        page.keyboard.type("induction")
        page.wait_for_selector(".md-search-result__item")
        browser.close()
        server.shutdown()
    assert len(requests) > 10
    assert [url for url in requests if not url.startswith((address, "data:", "blob:"))] == []


def test_the_reference_has_every_public_name(site: Path):
    page = (ROOT / "docs/reference.md").read_text(encoding="utf-8")
    html = (site / "reference/index.html").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w.]+)` \| (.*) \|$", page, re.MULTILINE)
    modules = {name: re.findall(r"`(\w+)`", names) for name, names in rows}
    assert {"kvshift", "kvshift.models.llama", "kvshift.models.extending"} <= modules.keys()
    for name, names in modules.items():
        if not name.startswith("kvshift.integrations"):  # these import programs that may be missing
            public = import_module(name).__all__
            assert sorted(names) == sorted(one for one in public if not one.startswith("_")), name
        assert [one for one in names if f'id="{name}.{one}"' not in html] == []
