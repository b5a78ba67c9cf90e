"""A Hugging Face hub on loopback: the routes that huggingface_hub downloads a model through."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Serves ``repos``: name -> file name -> contents."""

    daemon_threads = True

    def __init__(self, repos: dict[str, dict[str, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos = repos
        self.gated: set[str] = set()
        self.announced_sizes: dict[str, int] = {}
        self.cut_after: int | None = None
        """Bytes of the next file after which the connection is closed, once."""
        self.stalls_after: int | None = None
        """Bytes of the next file after which nothing comes until :attr:`goes_on`, once."""
        self.goes_on = threading.Event()
        self.served: list[tuple[str, str | None]] = []
        """(file, Range) of each GET of a file."""
        self.tokens: set[str | None] = set()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # a client that hangs up


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub = self.server
        hub.tokens.add(self.headers.get("Authorization"))
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        owner, name, *rest = parts[2:] if api else parts
        repo = f"{owner}/{name}"
        files = hub.repos.get(repo)
        if files is None:
            return self._refuse(404, "RepoNotFound")
        if rest[1:2] not in ([], ["main"], [COMMIT]):
            return self._refuse(404, "RevisionNotFound")
        if api:
            return self._json(
                self._tree(files) if rest[:1] == ["tree"] else self._info(repo, files)
            )
        if repo in hub.gated:
            return self._refuse(403, "GatedRepo")
        file = "/".join(rest[2:])
        if file not in files:
            return self._refuse(404, "EntryNotFound")
        return self._file(file, files[file])

    def _size(self, file: str, data: bytes) -> int:
        return self.server.announced_sizes.get(file, len(data))

    def _info(self, repo: str, files: dict[str, bytes]) -> object:
        siblings = [{"rfilename": f, "size": self._size(f, d)} for f, d in files.items()]
        return {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings}

    def _tree(self, files: dict[str, bytes]) -> object:
        return [
            {
                "type": "file",
                "path": f,
                "size": self._size(f, d),
                "oid": hashlib.sha1(d).hexdigest(),
            }
            for f, d in files.items()
        ]

    def _json(self, value: object) -> None:
        self._begin(200, len(body := json.dumps(value).encode()), {})
        self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self._begin(status, 0, {"X-Error-Code": code, "X-Error-Message": code})

    def _file(self, file: str, data: bytes) -> None:
        hub, asked = self.server, self.headers.get("Range")
        first = int(asked.removeprefix("bytes=").split("-")[0]) if asked else 0
        headers = {
            "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        if asked:
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        self._begin(206 if asked else 200, len(data) - first, headers)
        if self.command == "HEAD":
            return
        hub.served.append((file, asked))
        cut, hub.cut_after = hub.cut_after, None
        stalls, hub.stalls_after = hub.stalls_after, None
        if stalls is not None:
            self.wfile.write(data[first : first + stalls])
            self.wfile.flush()
            hub.goes_on.wait()
        elif cut is None:
            self.wfile.write(data[first:])
        else:
            self.wfile.write(data[first : first + cut])
            self.close_connection = True

    def _begin(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()


@contextmanager
def running_hub(repos: dict[str, dict[str, bytes]]) -> Iterator[Hub]:
    hub = Hub(repos)
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        hub.goes_on.set()
        hub.shutdown()
        hub.server_close()
        thread.join()
