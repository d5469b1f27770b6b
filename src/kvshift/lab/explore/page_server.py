"""A web server for one folder, on the loopback address."""

from __future__ import annotations

import webbrowser
from collections.abc import Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from kvshift.lab.core.errors import LabError


class _Handler(SimpleHTTPRequestHandler):
    # Not left to the machine's own table, which may call a script text/plain: browsers then refuse it.
    extensions_map = SimpleHTTPRequestHandler.extensions_map | {
        ".js": "text/javascript",
        ".mjs": "text/javascript",
        ".wasm": "application/wasm",
        ".svg": "image/svg+xml",
    }

    def end_headers(self) -> None:
        self.send_header("Cache-Control", "no-cache")  # a page that was made again is a new one
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the terminal has the address alone."""


def page_server(folder: Path, port: int = 0) -> ThreadingHTTPServer:
    """A server that is bound, and serves once `serve_forever` is called.

    Raises:
        LabError: the port is taken.
    """
    try:
        return ThreadingHTTPServer(("127.0.0.1", port), partial(_Handler, directory=str(folder)))
    except OSError as error:
        raise LabError(f"port: {port} cannot be used: {error.strerror}") from error


def serve_page(folder: Path, port: int, say: Callable[[str], Any]) -> None:
    """Serve until Ctrl-C, and open a browser where there is one."""
    with page_server(folder, port) as server:
        address = f"http://127.0.0.1:{server.server_port}/"
        say(f"{folder} is served at {address}; Ctrl-C ends it")
        webbrowser.open(address)
        server.serve_forever()
