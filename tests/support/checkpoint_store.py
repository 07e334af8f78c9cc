"""A store of checkpoints behind a link: ``python checkpoint_store.py PORT FOLDER`` takes and gives files over HTTP."""

from __future__ import annotations

import shutil
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Handler(BaseHTTPRequestHandler):
    """One request; paths are those of the test's own program."""

    folder: Path

    def do_PUT(self) -> None:
        """Keep what is sent, whole or not at all."""
        content = self.rfile.read(int(self.headers["Content-Length"]))
        path = self.folder / self.path.strip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".part").write_bytes(content)
        path.with_suffix(".part").rename(path)
        self.send_response(201)
        self.end_headers()

    def do_GET(self) -> None:
        """Send a file."""
        path = self.folder / self.path.strip("/")
        if not path.is_file():
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(path.stat().st_size))
        self.end_headers()
        with path.open("rb") as file:
            shutil.copyfileobj(file, self.wfile)

    def log_message(self, format: str, *values: object) -> None:  # noqa: A002 - the base class names it so
        """Say nothing."""


if __name__ == "__main__":
    Handler.folder = Path(sys.argv[2])
    ThreadingHTTPServer(("0.0.0.0", int(sys.argv[1])), Handler).serve_forever()  # noqa: S104 - inside its namespace
