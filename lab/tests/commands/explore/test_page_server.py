"""The server of a page that `kvshift explore` wrote."""

from __future__ import annotations

import http.client
import threading
import urllib.request
from pathlib import Path

import pytest

from kvshift_lab.commands.explore.page_server import page_server
from kvshift_lab.core.errors import LabError


def test_the_server(tmp_path: Path):
    """The server uses the loopback address, and the MIME types that browsers require."""
    for name in ("a.js", "a.mjs", "a.wasm"):
        (tmp_path / name).write_bytes(b"x")
    with page_server(tmp_path) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert server.server_address[0] == "127.0.0.1"
        for name, kind in {"a.js": "text/javascript", "a.mjs": "text/javascript", "a.wasm": "application/wasm"}.items():
            with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/{name}") as answer:
                assert answer.headers["Content-Type"] == kind
        with pytest.raises(LabError, match=f"port: {server.server_port} cannot be used"):
            page_server(tmp_path, server.server_port)
        server.shutdown()


@pytest.mark.parametrize(
    ("path", "host", "code"),
    [
        ("/page.html", "127.0.0.1", 200),
        ("/page.html", "localhost", 200),
        ("/page.html", "elsewhere.example", 403),
        ("/link.txt", "127.0.0.1", 404),
        ("/linked/secret.txt", "127.0.0.1", 404),
        ("/../secret.txt", "127.0.0.1", 404),
        ("/page.html%00", "127.0.0.1", 404),
    ],
)
def test_other_hosts_and_files_outside_of_the_folder_are_refused(path: str, host: str, code: int, tmp_path: Path):
    (tmp_path / "secret.txt").write_text("secret")
    page = tmp_path / "page"
    page.mkdir()
    (page / "page.html").write_text("page")
    (page / "link.txt").symlink_to(tmp_path / "secret.txt")
    (page / "linked").symlink_to(tmp_path)
    with page_server(page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
        connection.request("GET", path, headers={"Host": f"{host}:{server.server_port}"})
        answer = connection.getresponse()
        assert answer.status == code
        assert b"secret" not in answer.read().replace(path.encode(), b"")
        server.shutdown()
