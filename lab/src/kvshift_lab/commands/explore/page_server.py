"""A web server for one folder on the loopback address."""

from __future__ import annotations

import webbrowser
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

from kvshift_lab.core.errors import LabError


class _Handler(SimpleHTTPRequestHandler):
    # Override the system's table of types, which may map scripts to text/plain; browsers would refuse those.
    extensions_map = SimpleHTTPRequestHandler.extensions_map | {
        ".js": "text/javascript",
        ".mjs": "text/javascript",
        ".wasm": "application/wasm",
        ".svg": "image/svg+xml",
    }

    def send_head(self) -> Any:
        """Refuse requests for another host, which a page elsewhere may send here, and files outside of the folder."""
        port = cast(ThreadingHTTPServer, self.server).server_port
        if self.headers.get("Host") not in (f"127.0.0.1:{port}", f"localhost:{port}"):
            self.send_error(HTTPStatus.FORBIDDEN, "this server answers only to 127.0.0.1 and localhost")
            return None
        asked, folder = Path(self.translate_path(self.path)), Path(self.directory).resolve()
        if "\0" in str(asked) or not asked.resolve().is_relative_to(folder):
            self.send_error(HTTPStatus.NOT_FOUND, "the file is outside of the page's folder")
            return None
        return super().send_head()

    def end_headers(self) -> None:
        self.send_header("Cache-Control", "no-cache")  # the page may be regenerated under the same address
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the terminal shows only the address."""


def page_server(folder: Path, port: int = 0) -> ThreadingHTTPServer:
    """Create a server that is bound to the port; call `serve_forever` to serve.

    Raises:
        LabError: The port cannot be used.
    """
    try:
        return ThreadingHTTPServer(("127.0.0.1", port), partial(_Handler, directory=str(folder)))
    except OSError as error:
        raise LabError(f"port: {port} cannot be used: {error.strerror}") from error


def serve_page(folder: Path, port: int, log: Callable[[str], Any]) -> None:
    """Serve the folder until Ctrl-C, and open a browser if there is one."""
    with page_server(folder, port) as server:
        address = f"http://127.0.0.1:{server.server_port}/"
        log(f"serving {folder} at {address}; Ctrl-C to stop")
        webbrowser.open(address)
        server.serve_forever()
